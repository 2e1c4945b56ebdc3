"""Rendering: templates, headers, and errors as pages that say what to do."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Coroutine
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from anyio import to_thread
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, Response
from fastapi.routing import APIRoute
from jinja2 import Environment, PackageLoader, StrictUndefined

from neffcache_server.auth import EVERYTHING, Principal
from neffcache_server.auth.requirement import SESSION_COOKIE, check
from neffcache_server.dashboard import words
from neffcache_server.dashboard.charts import STACK, mix
from neffcache_server.problems import ServerProblem, TokenRequired

FOLDER = Path(__file__).resolve().parent
HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    # Not `no-referrer`: browsers would then hide the origin of our own forms from ourselves.
    "referrer-policy": "same-origin",
    "cache-control": "no-store",
}
VIEWS = (
    ("now", "/", "Now"),
    ("savings", "/savings", "Savings"),
    ("graphs", "/graphs", "Graphs"),
    ("jobs", "/jobs", "Jobs"),
    ("storage", "/storage", "Storage"),
    ("health", "/health", "Health"),
)


@cache
def environment() -> Environment:
    """The templates. Everything that goes into them is escaped, and a name that they misspell is an error."""
    made = Environment(
        loader=PackageLoader("neffcache_server.dashboard"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(words.FILTERS)
    made.globals.update(
        views=VIEWS,
        asset=asset,
        mix=mix,
        link=link,
        stack=STACK,
        verdict_words=words.VERDICT_WORDS,
        reason_words=words.REASON_WORDS,
        version=version("neffcache"),
    )
    return made


@cache
def asset(name: str) -> str:
    """The address of a static file; changes with its content, so that browsers may keep it."""
    digest = hashlib.sha256((FOLDER / "static" / name).read_bytes()).hexdigest()[:12]
    return f"/static/{name}?v={digest}"


def link(path: str, **query: object) -> str:
    """A path with those parts of a query that say something."""
    given = {name: value for name, value in query.items() if value not in (None, "", False)}
    return f"{path}?{urlencode(given)}" if given else path


def scope_of(principal: Principal, namespace: str | None) -> str | None:
    """The namespace that a page is about, None for all. Raises NotAllowed."""
    if namespace is None and principal.namespace != EVERYTHING:
        namespace = principal.namespace
    check(principal, "read", namespace or EVERYTHING)
    return namespace


async def page(template: str, *, answer: int = 200, **data: Any) -> HTMLResponse:
    """A rendered page. Pictures are drawn on the way, so this happens in a thread."""
    text = await to_thread.run_sync(lambda: environment().get_template(template).render(**data))
    return HTMLResponse(text, answer, HEADERS)


class PageRoute(APIRoute):
    """A route whose errors are pages."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        plain = super().get_route_handler()

        async def handler(request: Request) -> Response:
            try:
                return await plain(request)
            except ServerProblem as exc:
                response = await error_page(
                    request, exc.status, exc.title, exc.detail, sign_in=isinstance(exc, TokenRequired)
                )
                if isinstance(exc, TokenRequired) and request.method == "GET" and SESSION_COOKIE in request.cookies:
                    # One that has ended, or of another server on this host: where no token is needed, and so nobody
                    # has one, it would keep the pages shut.
                    response.delete_cookie(SESSION_COOKIE, httponly=True, samesite="strict")
                return response
            except RequestValidationError as exc:
                where = "; ".join(f"{e['loc'][-1]}: {e['msg']}" for e in exc.errors()[:3])
                return await error_page(request, 422, "That address makes no sense", where)

        return handler


async def error_page(request: Request, status: int, title: str, detail: str, *, sign_in: bool = False) -> Response:
    """What went wrong and what to do about it."""
    back = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    return await page(
        "error.html",
        answer=status,
        view="",
        namespace=None,
        namespaces=[],
        status=status,
        title=title,
        detail=detail,
        sign_in=sign_in,
        newcomer=sign_in and detail == TokenRequired().detail,
        back=back if request.method == "GET" else "/",
        signed_in=False,
        live=False,
    )
