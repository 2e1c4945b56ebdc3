"""Every route, every role, every relation of the token's namespace to the route's: who gets in.

The routes come from the OpenAPI document and, for the dashboard's pages, from the application itself, so one that is
added without a row here fails.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from neffcache_client.wire import Role
from neffcache_server.app import create_app
from neffcache_server.settings import ServerSettings
from support.cache_state import lease_id
from support.server import running_server

ADMIN = "the-first-admin-token-of-tests"
KEY, LEASE = "a" * 64, lease_id(1)
NS = "/v1/ns/{namespace}"
CHAIN = {"mine": "parent", "child": "mine"}
# The route's namespace is `mine`. It trusts `parent` and is trusted by `child`.
RELATIONS = {"same": "mine", "all": "*", "stranger": "other", "child": "child", "parent": "parent"}
ROLES: tuple[Role, ...] = ("read", "write", "admin")

# What a route needs in its namespace. `*`: the call names no namespace, so the token has to be for all.
# `any`: a token of any namespace will do, and sees no more than its own.
TABLE: dict[tuple[str, str], str] = {
    ("GET", "/livez"): "nothing",
    ("GET", "/readyz"): "nothing",
    ("POST", "/login"): "nothing",
    ("POST", "/logout"): "nothing",
    ("GET", "/v1/whoami"): "read any",
    ("GET", "/v1/tokens"): "admin any",
    ("POST", "/v1/tokens"): "admin any",
    ("DELETE", "/v1/tokens/{id}"): "admin any",
    ("GET", "/v1/stats"): "read *",
    ("GET", "/metrics"): "read *",
    # The dashboard. Its pages show the namespaces that the token may read.
    ("GET", "/"): "read any",
    ("GET", "/savings"): "read any",
    ("GET", "/graphs"): "read any",
    ("GET", "/graphs/{namespace}/{key}"): "read",
    ("POST", "/graphs/{namespace}/{key}/{action}"): "admin",
    ("GET", "/jobs"): "read any",
    ("GET", "/jobs/show"): "read *",
    ("GET", "/storage"): "read any",
    ("GET", "/health"): "read any",
    ("POST", "/sign-in"): "nothing",
    ("POST", "/sign-out"): "nothing",
    ("GET", "/static/{name}"): "nothing",
    ("GET", "/v1/live"): "read *",
    ("GET", "/v1/events"): "read *",
    ("POST", f"{NS}/reports"): "write",
    ("GET", f"{NS}/jobs"): "read",
    ("GET", f"{NS}/job"): "read",
    ("POST", f"{NS}/keys/{{key}}/acquire"): "read",
    ("POST", f"{NS}/keys/lookup"): "read",
    ("POST", f"{NS}/keys/{{key}}/summary"): "write",
    ("POST", f"{NS}/leases/{{lease_id}}/heartbeat"): "write",
    ("DELETE", f"{NS}/leases/{{lease_id}}"): "write",
    ("POST", f"{NS}/leases/{{lease_id}}/publish"): "write",
    ("POST", f"{NS}/leases/{{lease_id}}/fail"): "write",
    ("POST", f"{NS}/blobs/{{sha256}}/upload"): "write",
    ("POST", f"{NS}/blobs/{{sha256}}/report"): "read",
    ("PUT", f"{NS}/blobs/{{sha256}}"): "write",
    ("GET", f"{NS}/blobs/{{sha256}}"): "read",
    ("HEAD", f"{NS}/blobs/{{sha256}}"): "read",
    ("GET", f"{NS}/entries"): "read",
    ("GET", f"{NS}/entries/{{key}}"): "read",
    ("DELETE", f"{NS}/entries/{{key}}"): "admin",
    ("GET", f"{NS}/entries/{{key}}/explain"): "read",
    ("GET", f"{NS}/explain"): "read",
    ("PUT", f"{NS}/entries/{{key}}/pin"): "admin",
    ("DELETE", f"{NS}/entries/{{key}}/pin"): "admin",
    ("PUT", f"{NS}/entries/{{key}}/quarantine"): "admin",
    ("GET", f"{NS}/failures"): "read",
    ("DELETE", f"{NS}/failures/{{key}}"): "write",
}
APP = create_app(ServerSettings())
# They take the token in their body.
DOORS = {("POST", "/login"), ("POST", "/sign-in")}
DOCUMENTED = {(method.upper(), path) for path, item in APP.openapi()["paths"].items() for method in item}


def routes(of: Any) -> Iterator[tuple[str, str]]:
    """Every call that reaches an endpoint of ours, documented or not."""
    for route in of.routes:
        if isinstance(route, APIRoute):
            yield from ((method, route.path) for method in route.methods or ())
        elif hasattr(route, "original_router"):
            yield from routes(route.original_router)


ROUTES = set(routes(APP))


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    env = {"NEFFCACHE_SERVER_ADMIN_TOKEN": ADMIN, "NEFFCACHE_SERVER_READ_CHAIN": json.dumps(CHAIN)}
    with (
        running_server(tmp_path_factory.mktemp("auth"), env=env) as server,
        httpx.Client(base_url=server.url, timeout=30) as running,
    ):
        yield running


@pytest.fixture(scope="module")
def tokens(client: httpx.Client) -> dict[tuple[Role, str], str]:
    """A token for each role and relation."""
    return {
        (role, relation): make(client, role, namespace) for role in ROLES for relation, namespace in RELATIONS.items()
    }


def make(client: httpx.Client, role: Role, namespace: str, by: str = ADMIN, **given: Any) -> str:
    body = {"name": "test", "role": role, "namespace": namespace, **given}
    answer = client.post("/v1/tokens", json=body, headers=bearer(by))
    assert answer.status_code == 201, answer.text
    return str(answer.json()["token"])


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def call(client: httpx.Client, method: str, path: str, headers: dict[str, str]) -> int:
    """The status of a call that may fail for any reason after it got in."""
    parts = {"namespace": "mine", "key": KEY, "lease_id": LEASE, "sha256": KEY, "action": "pin"}
    url = path.format(**parts, id="no-such-token", name="no-such-file")
    headers = {"neffcache-lease": LEASE, **headers}
    # Only the head: a stream of events has no end.
    with client.stream(method, url, headers=headers) as answer:
        return answer.status_code


def expected(needs: str, role: Role, relation: str) -> bool:
    needed, _, where = needs.partition(" ")
    if needed == "nothing":
        return True
    enough = ROLES.index(role) >= ROLES.index(needed)  # type: ignore[arg-type]
    if where == "any":
        return enough
    if where == "*":
        return enough and relation == "all"
    if relation == "child":
        return needed == "read"
    return enough and relation in ("same", "all")


def test_every_route_has_a_row() -> None:
    assert ROUTES >= DOCUMENTED
    assert sorted(ROUTES - set(TABLE)) == [], "say in TABLE what these need, and in their endpoints"
    assert sorted(set(TABLE) - ROUTES) == []


@pytest.mark.parametrize(("method", "path"), sorted((ROUTES & set(TABLE)) - DOORS))
def test_who_gets_in(method: str, path: str, client: httpx.Client, tokens: dict[tuple[Role, str], str]) -> None:
    """UC-16. Everybody else is answered 403 before anything about the namespace shows."""
    needs = TABLE[method, path]
    for (role, relation), token in tokens.items():
        status = call(client, method, path, headers=bearer(token))
        assert (status not in (401, 403)) == expected(needs, role, relation), f"{role} of {relation}: {status}"
    open_to_all = needs == "nothing"
    for headers in ({}, bearer("nct_000000000000_unknown"), bearer("x"), {"authorization": "Basic eDp5"}):
        status = call(client, method, path, headers=headers)
        assert (status != 401) == (open_to_all and status != 401), f"{headers}: {status}"
        assert open_to_all or status == 401


@pytest.mark.parametrize("path", ["/v1/stats", "/v1/live", "/v1/events", "/", "/savings", "/graphs", "/storage"])
def test_a_call_with_a_namespace_in_its_query_needs_the_role_there(
    path: str, client: httpx.Client, tokens: dict[tuple[Role, str], str]
) -> None:
    for relation in RELATIONS:
        status = call(client, "GET", f"{path}?namespace=mine", headers=bearer(tokens["read", relation]))
        assert status == (200 if relation in ("same", "all", "child") else 403), relation
    # Another namespace in the query, another asked for twice: none of it widens what is shown.
    twice = f"{path}?namespace=other&namespace=mine"
    assert call(client, "GET", twice, headers=bearer(tokens["read", "stranger"])) == 403


def test_the_document_says_what_each_route_needs() -> None:
    schema = APP.openapi()
    for method, path in DOCUMENTED:
        needs = TABLE[method, path]
        operation = schema["paths"][path][method.lower()]
        role = needs.partition(" ")[0]
        assert operation["x-neffcache-role"] == ("–" if role == "nothing" else role), (method, path)
        assert ("401" in operation["responses"]) == (role != "nothing" or path == "/login"), (method, path)
