"""Who may do what: tokens, sessions of browsers, roles per namespace.

Every route is closed to all but administrators of everything until its endpoint says otherwise with `@require(role)`
or `@public`, so a route that somebody forgets is refused rather than open.
"""

from __future__ import annotations

from neffcache_server.auth.principal import EVERYTHING, Principal, Role
from neffcache_server.auth.requirement import CurrentPrincipal, public, require

__all__ = ["EVERYTHING", "CurrentPrincipal", "Principal", "Role", "public", "require"]
