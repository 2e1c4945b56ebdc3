"""The one dependency that every route has: it finds out who asks, and whether that is enough.

An endpoint says what it needs with a decorator below the router's:

    @router.get("/v1/ns/{namespace}/entries")
    @require("read")
    async def list_entries(namespace: Namespace, …)

The role is needed in the namespace of the path; where the path has none, in every namespace. An endpoint that takes
`namespace` in the query, and then tells of no other, says `in_query=True`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING, Annotated, Any, TypeVar
from urllib.parse import urlsplit

from fastapi import Depends, Request

from neffcache_server.auth.principal import EVERYTHING, Principal, Role
from neffcache_server.problems import CrossSite, NotAllowed, TokenRequired

if TYPE_CHECKING:
    from neffcache_server.auth.authenticator import Authenticator

SESSION_COOKIE = "neffcache_session"
_SAFE = ("GET", "HEAD", "OPTIONS")
_ATTRIBUTE = "neffcache_requirement"

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(slots=True, frozen=True)
class Requirement:
    """What an endpoint needs. `role` None: nothing at all; `anywhere`: the role in some namespace."""

    role: Role | None
    anywhere: bool = False
    in_query: bool = False

    def __str__(self) -> str:
        return self.role or "–"


_DENIED = Requirement("admin")


def require(role: Role, *, anywhere: bool = False, in_query: bool = False) -> Callable[[F], F]:
    """Let in whoever has `role` in the request's namespace; `anywhere`: in any, and the endpoint looks closer."""
    return _marked(Requirement(role, anywhere, in_query))


def public(endpoint: F) -> F:
    """Let everybody in: for what tells nothing."""
    return _marked(Requirement(None))(endpoint)


def _marked(requirement: Requirement) -> Callable[[F], F]:
    def mark(endpoint: F) -> F:
        setattr(endpoint, _ATTRIBUTE, requirement)
        return endpoint

    return mark


def requirement_of(endpoint: Any) -> Requirement:
    """What an endpoint needs; one that says nothing is for administrators of everything."""
    found: Requirement = getattr(endpoint, _ATTRIBUTE, _DENIED)
    return found


async def authorise(request: Request) -> None:
    """The dependency of every route. Raises TokenRequired, NotAllowed, CrossSite or TooManyRequests."""
    requirement = requirement_of(request.scope.get("endpoint"))
    if requirement.role is None:
        return
    principal = await authenticate(request)
    request.state.principal = principal
    check(principal, requirement.role, _namespace(request, requirement, principal))


def _namespace(request: Request, requirement: Requirement, principal: Principal) -> str:
    if requirement.anywhere:
        return principal.namespace
    named = request.path_params.get("namespace")
    if named is None and requirement.in_query:
        named = request.query_params.get("namespace")
    return named or EVERYTHING


async def authenticate(request: Request) -> Principal:
    """Whoever makes the request. Raises TokenRequired, CrossSite or TooManyRequests."""
    auth: Authenticator = request.app.state.neffcache.auth
    header = request.headers.get("authorization")
    cookie = request.cookies.get(SESSION_COOKIE)
    if header is not None:
        scheme, _, token = header.partition(" ")
        if scheme.lower() != "bearer":
            raise TokenRequired("the Authorization header must read: Bearer TOKEN")
        principal = await auth.by_token(token.strip())
    elif cookie is not None:
        principal = await auth.by_session(cookie)
        check_origin(request, cookie=True)
    else:
        principal = auth.anonymous(proxied="x-forwarded-for" in request.headers or "forwarded" in request.headers)
        check_origin(request, cookie=False)
    auth.limit(principal)
    return principal


def check(principal: Principal, role: Role, namespace: str) -> None:
    """Raises NotAllowed, naming the missing right, unless `principal` has `role` in `namespace`."""
    if principal.may(role, namespace):
        return
    where = "every namespace" if namespace == EVERYTHING else f"namespace {namespace}"
    who = "without a token" if principal.id == "anonymous" else f"token {principal.id}"
    raise NotAllowed(f"this needs the role {role} in {where}; {who} has {principal.rights}")


def check_origin(request: Request, *, cookie: bool) -> None:
    """Raises CrossSite when a page of somebody else's makes a browser change something here.

    SameSite=Strict holds back the cookie already; a browser that is too old for it still says where it comes from. A
    request without a cookie matters where anonymous access is on: a page out there must not use a cache on localhost.
    """
    if request.method in _SAFE:
        return
    origin = request.headers.get("origin")
    if origin is None and not cookie:
        return
    host = request.headers.get("host", "")
    if origin is None or urlsplit(origin).netloc != host:
        raise CrossSite
    auth: Authenticator = request.app.state.neffcache.auth
    if not cookie and auth.local and not _names_this_machine(host):
        raise CrossSite("without a token a browser has to open this server as localhost or by an IP address")


def _names_this_machine(host: str) -> bool:
    """A name from DNS proves nothing: its owner can let it point here."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if name == "localhost" or name.endswith(".localhost"):
            return True
        ip_address(name)
    except ValueError:
        return False
    return True


async def current_principal(request: Request) -> Principal:
    """Whoever makes the request, as `authorise` found out. For endpoints that are not public."""
    principal: Principal = request.state.principal
    return principal


CurrentPrincipal = Annotated[Principal, Depends(current_principal)]
