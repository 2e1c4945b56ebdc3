"""The OpenAPI document says what each call needs: `x-neffcache-role`, the errors, and how a token is sent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute

from neffcache_server.auth.requirement import Requirement, requirement_of
from neffcache_server.problems import CrossSite, NotAllowed, TokenRequired, TooManyRequests, documented

EXTENSION = "x-neffcache-role"


def describe_access(schema: dict[str, Any], routers: Iterable[APIRouter]) -> None:
    """Add to the OpenAPI document what the routes of `routers` need."""
    schema["components"]["securitySchemes"] = {
        "token": {"type": "http", "scheme": "bearer"},
        "session": {"type": "apiKey", "in": "cookie", "name": "neffcache_session"},
    }
    for router in routers:
        for route in router.routes:
            if isinstance(route, APIRoute) and route.include_in_schema:
                for method in route.methods or ():
                    _describe(schema["paths"][route.path][method.lower()], requirement_of(route.endpoint), method)


def _describe(operation: dict[str, Any], requirement: Requirement, method: str) -> None:
    operation[EXTENSION] = str(requirement)
    if requirement.role is None:
        return
    operation["security"] = [{"token": []}, {"session": []}]
    refusals = (NotAllowed,) if method in ("GET", "HEAD") else (NotAllowed, CrossSite)
    for status, text in documented(TokenRequired, *refusals, TooManyRequests).items():
        own = operation["responses"].setdefault(str(status), text)
        if own is not text:
            own["description"] = f"{text['description']}\n\n{own['description']}"
