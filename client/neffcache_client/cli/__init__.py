"""The `neffcache` command."""

from __future__ import annotations
