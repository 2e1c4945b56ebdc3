"""From exceptions to problem documents, in answers and in the OpenAPI document."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from neffcache_client.wire import Problem
from pydantic import TypeAdapter
from starlette.exceptions import HTTPException

from neffcache_server.auth.documents import describe_access
from neffcache_server.kit.request_id import HEADER, request_id
from neffcache_server.problems import (
    MEDIA_TYPE,
    DatabaseUnavailable,
    InvalidRequest,
    MethodNotAllowed,
    RouteUnknown,
    ServerProblem,
    documented,
)

_HEADERS = {401: {"www-authenticate": "Bearer"}, 429: {"retry-after": "1"}, 503: {"retry-after": "1"}}


def answer(problem: Problem, headers: dict[str, str] | None = None) -> JSONResponse:
    """A problem document."""
    return JSONResponse(asdict(problem), problem.status, headers, MEDIA_TYPE)


def install_handlers(app: FastAPI) -> None:
    """Every error of `app` becomes a problem document."""
    app.add_exception_handler(ServerProblem, _on_problem)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_fault)


async def _on_problem(_request: Request, exc: Exception) -> JSONResponse:
    assert isinstance(exc, ServerProblem)
    return answer(exc.problem(), _HEADERS.get(exc.status))


async def _on_invalid(_request: Request, exc: Exception) -> JSONResponse:
    assert isinstance(exc, RequestValidationError)
    # Only where and why. The offending input may be a lease id or a log, and is not sent back.
    lines = [f"{'.'.join(str(part) for part in e['loc'][1:]) or e['loc'][0]}: {e['msg']}" for e in exc.errors()[:10]]
    return answer(InvalidRequest("; ".join(lines)).problem())


async def _on_http(_request: Request, exc: Exception) -> JSONResponse:
    assert isinstance(exc, HTTPException)
    headers = dict(exc.headers) if exc.headers else None
    if exc.status_code == 404:
        return answer(RouteUnknown().problem(), headers)
    if exc.status_code == 405:
        return answer(MethodNotAllowed().problem(), headers)
    if exc.status_code == 400:
        # FastAPI's word for a body that is not even text; JSON that makes no sense is answered 422 as well.
        return answer(InvalidRequest("the body is not JSON").problem(), headers)
    code = "body_too_large" if exc.status_code == 413 else "refused"
    return answer(Problem(title="Refused", status=exc.status_code, code=code, detail=str(exc.detail)), headers)


async def _on_fault(_request: Request, _exc: Exception) -> JSONResponse:
    # The server logs the traceback; the client is told nothing of it but where to look.
    named = request_id.get()
    headers = {HEADER: named} if named else None
    return answer(ServerProblem("an unexpected fault; the server's log has more").problem(), headers)


def problem_openapi(app: FastAPI, routers: Sequence[APIRouter]) -> Callable[[], dict[str, Any]]:
    """`app.openapi` with our errors in place of FastAPI's own validation answer, and what each call needs."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is not None:
            return app.openapi_schema
        schema = plain()
        schemas = schema.setdefault("components", {}).setdefault("schemas", {})
        schemas.pop("HTTPValidationError", None)
        schemas.pop("ValidationError", None)
        schemas["Problem"] = TypeAdapter(Problem).json_schema()
        for path, item in schema["paths"].items():
            for operation in item.values():
                _document_errors(operation["responses"], everything=path != "/livez")
        describe_access(schema, routers)
        return schema

    return openapi


def _document_errors(responses: dict[str, Any], *, everything: bool) -> None:
    invalid = documented(InvalidRequest)[422]
    own = responses.get("422")
    if own is not None and "application/problem+json" not in own["content"]:
        responses["422"] = invalid
    elif own is not None:
        own["description"] = f"{invalid['description']}\n\n{own['description']}"
    if everything and "503" not in responses:
        responses["503"] = documented(DatabaseUnavailable)[503]
