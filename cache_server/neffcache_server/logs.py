"""Log lines: where they go, what they look like, and what never gets into them."""

from __future__ import annotations

import json
import logging
import re
import time
from typing import Any, Literal

from neffcache_server.kit.request_id import request_id

_OURS = ("neffcache_server", "uvicorn", "uvicorn.error", "uvicorn.access")
_LEASE_IN_PATH = re.compile(r"/leases/[^/ ?]+")


def log_config(level: str, form: Literal["text", "json"]) -> dict[str, Any]:
    """The configuration for `logging.config.dictConfig`: everything to stderr, in one form."""
    formatter = "neffcache_server.logs.JsonLines" if form == "json" else "neffcache_server.logs.TextLines"
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"()": formatter}},
        "filters": {"context": {"()": "neffcache_server.logs.Context"}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line", "filters": ["context"]}},
        # Other libraries only warn: at DEBUG database drivers log parameters (lease ids) and boto3 its signatures.
        "root": {"handlers": ["stderr"], "level": "ERROR" if level == "error" else "WARNING"},
        # uvicorn gives its own loggers levels; their lines travel up to ours.
        "loggers": {name: {"level": level.upper()} for name in _OURS},
    }


class Context(logging.Filter):
    """Adds the request's id, and blots out lease ids: they are secrets, and paths hold them."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = request_id.get()
        if isinstance(record.args, tuple):
            record.args = tuple(
                _LEASE_IN_PATH.sub("/leases/***", a) if isinstance(a, str) else a for a in record.args
            )
        return True


class TextLines(logging.Formatter):
    """For people."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        named = getattr(record, "request_id", None)
        return super().formatMessage(record) + (f" [{named}]" if named else "")


class JsonLines(logging.Formatter):
    """For programs: one object a line. `at` is Unix seconds."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "at": round(record.created, 3),
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created)),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "pid": record.process,
        }
        if named := getattr(record, "request_id", None):
            line["request_id"] = named
        if record.name == "uvicorn.access" and isinstance(record.args, tuple) and len(record.args) == 5:
            client, method, path, _version, status = record.args
            line |= {"client": client, "method": method, "path": path, "status": status}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
