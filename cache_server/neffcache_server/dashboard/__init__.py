"""The dashboard: pages made on the server from SQL, so that every replica shows the same and none keeps anything."""

from __future__ import annotations
