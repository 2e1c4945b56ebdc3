"""Client side of neffcache: wire types, node cache, transfers and the `neffcache` command.

Nothing here imports torch, FastAPI or SQLAlchemy; importing this package itself imports nothing at all,
because it sits on the launcher's path of a local hit.
"""

from __future__ import annotations
