"""Counters per namespace."""

from __future__ import annotations
