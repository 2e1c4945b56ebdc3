"""The pages."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from urllib.parse import parse_qs, quote

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import FileResponse, RedirectResponse, Response
from neffcache_client.wire import check_key, check_namespace
from pydantic import AfterValidator

from neffcache_server.auth import EVERYTHING, CurrentPrincipal, Principal, public, require
from neffcache_server.auth.requirement import SESSION_COOKIE, check_origin
from neffcache_server.dashboard import charts, views
from neffcache_server.dashboard.page import FOLDER, PageRoute, page, scope_of
from neffcache_server.dashboard.queries import MOST_COUNTED, MOST_PAGES, PAGE, Queries
from neffcache_server.dashboard.words import factor_rows, money
from neffcache_server.entries.endpoints import delete_entry, pin_entry, quarantine_entry, unpin_entry
from neffcache_server.problems import EntryUnknown, JobUnknown, RouteUnknown, ServerProblem
from neffcache_server.recording.history import Figures
from neffcache_server.state import AppState, State

router = APIRouter(route_class=PageRoute, include_in_schema=False)

NamespaceQuery = Annotated[
    str | None, AfterValidator(lambda n: check_namespace(n) if n else None), Query(max_length=63)
]
NamespacePath = Annotated[str, Path(max_length=63), AfterValidator(check_namespace)]
KeyPath = Annotated[str, Path(max_length=64), AfterValidator(lambda k: check_key(k))]
Search = Annotated[str, Query(max_length=255), AfterValidator(str.strip)]
PageNumber = Annotated[int, Query(alias="page", ge=1, le=MOST_PAGES)]
Order = Literal["created", "size", "compile", "hits", "used"]
JobOrder = Literal["last_at", "ranks", "compiles", "waited_seconds", "spent_seconds", "saved_seconds"]

_HISTORY = 50
_MEDIA = {
    "style.css": "text/css",
    "app.js": "text/javascript",
    "theme.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}


async def _common(state: State, principal: Principal, view: str, namespace: str | None) -> dict[str, Any]:
    """What every page has: whom it is for, and the choice of namespaces."""
    if principal.namespace == EVERYTHING:
        async with state.database.read() as db:
            names = await Queries(state.database).namespaces(db)
    else:
        names = [principal.namespace, *([principal.trusted] if principal.trusted else [])]
    return {
        "view": view,
        "namespace": namespace,
        "namespaces": names,
        "every_namespace": principal.namespace == EVERYTHING,
        "signed_in": principal.id != "anonymous",
        "who": principal.name,
        "live": view == "now",
    }


@router.get("/")
@require("read", anywhere=True)
async def now(state: AppState, principal: CurrentPrincipal, namespace: NamespaceQuery = None) -> Response:
    """What goes on at present."""
    scope = scope_of(principal, namespace)
    await state.recorder.flush()
    live = await state.live.read(scope)
    async with state.database.read() as db:
        hour = await state.history.figures(db, scope, live.now - 3600.0)
        failures = await Queries(state.database).failures(db, scope, 50)
    return await page(
        "now.html",
        **await _common(state, principal, "now", scope),
        state=live,
        hour=hour,
        failures=failures,
        now=live.now,
        embedded=state.settings.embedded,
    )


@router.get("/savings")
@require("read", anywhere=True)
async def savings(
    state: AppState,
    principal: CurrentPrincipal,
    namespace: NamespaceQuery = None,
    period: Annotated[Literal["24h", "7d", "30d", "1y"], Query(alias="range")] = "30d",
    price: Annotated[str, Query(max_length=16)] = "",
) -> Response:
    """Compiles, time and money saved."""
    scope = scope_of(principal, namespace)
    await state.recorder.flush()
    async with state.database.read() as db:
        data = await views.savings(state, db, scope, period)
    each = _price(price, state.settings.price_per_host_hour)
    total: Figures = data["total"]
    return await page(
        "savings.html",
        **await _common(state, principal, "savings", scope),
        **data,
        period=period,
        ranges=views.RANGES,
        price=each,
        price_text=price if price else "" if each is None else f"{each:g}",
        money=None if each is None else money(total.saved_seconds / 3600 * each, state.settings.price_currency),
        currency=state.settings.price_currency,
        charts=charts,
    )


def _price(given: str, default: float | None) -> float | None:
    try:
        price = float(given.replace(",", ".")) if given.strip() else default
    except ValueError:
        return default
    return price if price is not None and 0 <= price < 1e6 else default


@router.get("/graphs")
@require("read", anywhere=True)
async def graphs(
    state: AppState,
    principal: CurrentPrincipal,
    namespace: NamespaceQuery = None,
    q: Search = "",
    sort: Order = "created",
    up: bool = False,
    number: PageNumber = 1,
) -> Response:
    """What is stored."""
    scope = scope_of(principal, namespace)
    await state.counter.flush()
    async with state.database.read() as db:
        rows, total = await Queries(state.database).graphs(db, scope, q.lower(), sort, number, up=up)
        at = await state.history.now(db)
    return await page(
        "graphs.html",
        **await _common(state, principal, "graphs", scope),
        rows=rows,
        total=total,
        q=q,
        more=bool(q) and total == MOST_COUNTED,
        sort=sort,
        up=up,
        page=number,
        pages=min(MOST_PAGES, max(1, -(-total // PAGE))),
        now=at,
    )


@router.get("/graphs/{namespace}/{key}")
@require("read")
async def graph(namespace: NamespacePath, key: KeyPath, state: AppState, principal: CurrentPrincipal) -> Response:
    """One key: what it was made of, who asked for it, what is nearest to it."""
    await state.counter.flush()
    await state.recorder.flush()
    queries = Queries(state.database)
    async with state.database.read() as db:
        row = await queries.entry(db, namespace, key)
        if row is None:
            raise EntryUnknown("nobody ever asked for that key in this namespace; it may have been typed wrongly")
        events = await state.history.key_events(db, namespace, key, _HISTORY)
        at = await state.history.now(db)
        unequal = await queries.differences(db, namespace, key, 5)
        failed = await queries.failures(db, namespace, 1, key)
    live = await state.live.read(namespace)
    try:
        explanation = await state.explain.explain(namespace, key)
    except ServerProblem:
        explanation = None
    return await page(
        "graph.html",
        **await _common(state, principal, "graphs", namespace),
        row=row,
        key=key,
        factors=factor_rows(_decoded(row.factors)),
        events=events,
        explanation=explanation,
        compiling=next((lease for lease in live.leases if lease.key == key), None),
        failure=failed[0] if failed else None,
        unequal=unequal,
        may_admin=principal.may("admin", namespace),
        now=at,
    )


def _decoded(text: str | None) -> dict[str, Any] | None:
    import json

    found = json.loads(text) if text else None
    return found if isinstance(found, dict) else None


@router.post("/graphs/{namespace}/{key}/{action}")
@require("admin")
async def act(
    namespace: NamespacePath,
    key: KeyPath,
    action: Literal["pin", "unpin", "quarantine", "delete"],
    state: AppState,
) -> Response:
    """Do something to an entry, and show it again (the list, when it is gone)."""
    await _ACTIONS[action](namespace, key, state)
    here = f"/graphs?namespace={quote(namespace)}" if action == "delete" else f"/graphs/{namespace}/{key}"
    return RedirectResponse(here, 303)


_ACTIONS = {"pin": pin_entry, "unpin": unpin_entry, "quarantine": quarantine_entry, "delete": delete_entry}


@router.get("/jobs")
@require("read", anywhere=True)
async def jobs(
    state: AppState,
    principal: CurrentPrincipal,
    namespace: NamespaceQuery = None,
    q: Search = "",
    sort: JobOrder = "last_at",
    number: PageNumber = 1,
) -> Response:
    """Jobs."""
    scope = scope_of(principal, namespace)
    await state.recorder.flush()
    async with state.database.read() as db:
        rows = await state.history.jobs(db, scope, limit=PAGE, offset=(number - 1) * PAGE, search=q, order=sort)
        total = await state.history.count_jobs(db, scope, q)
        at = await state.history.now(db)
    return await page(
        "jobs.html",
        **await _common(state, principal, "jobs", scope),
        rows=rows,
        total=total,
        q=q,
        sort=sort,
        page=number,
        pages=min(MOST_PAGES, max(1, -(-total // PAGE))),
        now=at,
    )


@router.get("/jobs/show")
@require("read", in_query=True)
async def job(
    state: AppState,
    principal: CurrentPrincipal,
    namespace: Annotated[str, Query(max_length=63), AfterValidator(check_namespace)],
    job: Annotated[str, Query(min_length=1, max_length=255)],
) -> Response:
    """One job: its ranks and who compiled, who waited."""
    await state.recorder.flush()
    async with state.database.read() as db:
        row = await state.history.job(db, namespace, job)
        if row is None:
            raise JobUnknown("nothing was recorded of a job of that name in this namespace")
        data = await views.job(state, db, row)
    return await page("job.html", **await _common(state, principal, "jobs", namespace), **data, charts=charts)


@router.get("/storage")
@require("read", anywhere=True)
async def storage(state: AppState, principal: CurrentPrincipal, namespace: NamespaceQuery = None) -> Response:
    """Bytes, by compiler, target and age."""
    scope = scope_of(principal, namespace)
    await state.counter.flush()
    queries = Queries(state.database)
    async with state.database.read() as db:
        at = await state.history.now(db)
        versions = await queries.stored_by(db, scope, "compiler_version")
        targets = await queries.stored_by(db, scope, "target")
        ages = await queries.stored_by_age(db, scope, at)
        spaces = await queries.stored_by(db, scope, "namespace", 50)
        forecast = await views.forecast(queries, db, scope, state.settings, at)
    return await page(
        "storage.html",
        **await _common(state, principal, "storage", scope),
        versions=versions,
        targets=targets,
        ages=ages,
        spaces=spaces,
        forecast=forecast,
        limit=state.settings.gc_max_bytes,
        total_bytes=sum(g.bytes for g in ages),
        total_number=sum(g.number for g in ages),
        total_seconds=sum(g.seconds for g in ages),
        now=at,
    )


@router.get("/health")
@require("read", anywhere=True)
async def health(state: AppState, principal: CurrentPrincipal, namespace: NamespaceQuery = None) -> Response:
    """Whether everything works."""
    scope = scope_of(principal, namespace)
    async with state.database.read() as db:
        data = await views.health(state, db, scope)
        unequal = await Queries(state.database).differences(db, scope, None, 10)
    return await page(
        "health.html",
        **await _common(state, principal, "health", scope),
        **data,
        unequal=unequal,
        settings=state.settings,
    )


@router.post("/sign-in")
@public
async def sign_in(request: Request, state: AppState) -> Response:
    """Exchange the token of the form for a session cookie, and go back to where one came from."""
    check_origin(request, cookie=False)
    form = parse_qs((await request.body()).decode("utf-8", "replace"))
    seconds = state.settings.session_seconds
    cookie = await state.auth.open_session(form.get("token", [""])[0].strip(), seconds)
    response = RedirectResponse(_local(form.get("back", ["/"])[0]), 303)
    secure = request.url.scheme == "https"
    response.set_cookie(SESSION_COOKIE, cookie, seconds, httponly=True, samesite="strict", secure=secure)
    return response


@router.post("/sign-out")
@public
async def sign_out(request: Request) -> Response:
    """Forget the session cookie."""
    check_origin(request, cookie=False)
    response = RedirectResponse("/", 303)
    response.delete_cookie(SESSION_COOKIE, httponly=True, samesite="strict")
    return response


def _local(back: str) -> str:
    """`back` if it is an address on this server: nobody shall be sent away by a form."""
    return back if back.startswith("/") and not back.startswith(("//", "/\\")) else "/"


@router.get("/static/{name}")
@public
async def static(name: str) -> Response:
    """Style sheet, scripts and the icon."""
    if name not in _MEDIA:
        raise RouteUnknown
    headers = {"cache-control": "public, max-age=31536000, immutable", "x-content-type-options": "nosniff"}
    return FileResponse(FOLDER / "static" / name, media_type=_MEDIA[name], headers=headers)
