"""The SQL side: tables, clock, engines, migrations."""

from __future__ import annotations
