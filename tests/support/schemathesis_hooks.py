"""Keeps schemathesis from waiting: a long-poll may ask for 25 seconds, and a feed has no end."""

from __future__ import annotations

from typing import Any

import schemathesis


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    if isinstance(case.body, dict) and isinstance(case.body.get("wait_seconds"), int | float):
        case.body["wait_seconds"] = min(case.body["wait_seconds"], 0)
