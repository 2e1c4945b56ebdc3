"""The cache service: leases and entries in SQL, artifacts in an object store, one FastAPI application."""

from __future__ import annotations
