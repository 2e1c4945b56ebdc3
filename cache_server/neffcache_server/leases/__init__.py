"""Who may compile a key, and what everybody else is told meanwhile."""

from __future__ import annotations
