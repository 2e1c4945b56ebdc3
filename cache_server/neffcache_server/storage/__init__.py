"""Where blobs live: one interface, a folder behind it."""

from __future__ import annotations
