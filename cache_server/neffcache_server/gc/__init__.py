"""Garbage collection: entries by policy, then the bytes that nothing refers to any more."""

from __future__ import annotations
