"""Figures for Prometheus."""

from __future__ import annotations
