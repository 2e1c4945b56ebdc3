"""Published keys: look up, list, show, remove."""

from __future__ import annotations
