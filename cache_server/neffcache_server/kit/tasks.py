"""Tasks that go on without whoever started them."""

from __future__ import annotations

import asyncio
from typing import Any


def retrieve(task: asyncio.Future[Any]) -> None:
    """As a done callback: nobody may be left to look at the task's fault, and asyncio would complain of that."""
    if not task.cancelled():
        task.exception()
