"""The bytes of artifacts: up, down, verified."""

from __future__ import annotations
