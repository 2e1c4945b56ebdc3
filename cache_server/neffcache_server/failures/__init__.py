"""Why keys cannot be had at present."""

from __future__ import annotations
