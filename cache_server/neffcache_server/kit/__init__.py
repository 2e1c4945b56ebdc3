"""Small tools without knowledge of the cache."""

from __future__ import annotations
