"""Calls on tokens and sessions."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from neffcache_client.wire import (
    LoginRequest,
    NewToken,
    TokenInfo,
    TokenList,
    TokenRequest,
    WhoAmI,
    check_namespace,
)
from pydantic import AfterValidator

from neffcache_server.auth.principal import EVERYTHING
from neffcache_server.auth.repository import TokenRepository
from neffcache_server.auth.requirement import SESSION_COOKIE, CurrentPrincipal, check, check_origin, public, require
from neffcache_server.auth.secrets import digest_of, new_token
from neffcache_server.leases.repository import LeaseRepository
from neffcache_server.problems import CrossSite, TokenRequired, TokenUnknown, documented
from neffcache_server.state import AppState

router = APIRouter(tags=["tokens"])


def _scope(value: str) -> str:
    return value if value == EVERYTHING else check_namespace(value)


@router.get("/v1/whoami")
@require("read", anywhere=True)
async def whoami(principal: CurrentPrincipal, state: AppState) -> WhoAmI:
    """What the caller's token allows, and what the database's clock shows."""
    async with state.database.read() as db:
        now = await LeaseRepository(state.database).now(db)
    return WhoAmI(
        id=principal.id,
        name=principal.name,
        role=principal.role,
        namespace=principal.namespace,
        trusted=principal.trusted,
        now=now,
    )


@router.post("/v1/tokens", status_code=201)
@require("admin", anywhere=True)
async def create_token(body: TokenRequest, principal: CurrentPrincipal, state: AppState) -> NewToken:
    """Make a token. The answer is the only place where it is ever shown; the server keeps its SHA-256."""
    check(principal, "admin", body.namespace)
    public_id, token = new_token()
    async with state.database.write() as db:
        row = await TokenRepository(state.database).add(
            db,
            id=public_id,
            digest=digest_of(token),
            name=body.name,
            role=body.role,
            namespace=body.namespace,
            created_by=principal.id,
            seconds=body.expires_in_seconds,
        )
    return NewToken(token=token, info=_info(row))


@router.get("/v1/tokens")
@require("admin", anywhere=True)
async def list_tokens(
    principal: CurrentPrincipal,
    state: AppState,
    namespace: Annotated[str | None, AfterValidator(_scope), Query(max_length=63)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
) -> TokenList:
    """Tokens of one namespace, or of all that the caller administers; newest first, ended ones too."""
    scope = namespace or principal.namespace
    check(principal, "admin", scope)
    async with state.database.read() as db:
        rows = await TokenRepository(state.database).listing(db, scope, limit)
    return TokenList(tokens=[_info(row) for row in rows])


@router.delete("/v1/tokens/{id}", status_code=204, responses=documented(TokenUnknown))
@require("admin", anywhere=True)
async def revoke_token(id: str, principal: CurrentPrincipal, state: AppState) -> None:
    """Make a token useless, and the browser sessions that stand for it. May be repeated."""
    repository = TokenRepository(state.database)
    async with state.database.write() as db:
        namespace = await repository.namespace_of(db, id)
        # One that the caller may not revoke is not told apart from none.
        if namespace is None or not principal.may("admin", namespace):
            raise TokenUnknown
        await repository.revoke(db, id)
    state.auth.forget(id)


@router.post("/login", status_code=204, responses=documented(TokenRequired, CrossSite))
@public
async def login(body: LoginRequest, request: Request, response: Response, state: AppState) -> None:
    """Exchange a token for a session cookie (HttpOnly, SameSite=Strict)."""
    check_origin(request, cookie=False)
    seconds = state.settings.session_seconds
    cookie = await state.auth.open_session(body.token, seconds)
    secure = request.url.scheme == "https"
    response.set_cookie(SESSION_COOKIE, cookie, seconds, httponly=True, samesite="strict", secure=secure)


@router.post("/logout", status_code=204)
@public
async def logout(response: Response) -> None:
    """Forget the session cookie."""
    response.delete_cookie(SESSION_COOKIE, httponly=True, samesite="strict")


def _info(row: Any) -> TokenInfo:
    return TokenInfo(
        id=row.id,
        name=row.name,
        role=row.role,
        namespace=row.namespace,
        created_by=row.created_by,
        created_at=row.created_at,
        expires_at=row.expires_at,
        revoked_at=row.revoked_at,
    )
