"""What `neffcache doctor` looks at: settings and folders of this host, and the server from here."""

from __future__ import annotations
