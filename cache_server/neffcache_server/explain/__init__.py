"""Why a key missed: what is kept of keys and graphs, the nearest stored key, and the difference in words."""

from __future__ import annotations
