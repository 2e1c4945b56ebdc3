"""Tokens, sessions, anonymous access, the read chain and quotas on a real server process."""

from __future__ import annotations

import hashlib
import itertools
import json
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from neffcache_client.cli.main import main
from neffcache_client.wire import Role
from neffcache_server.auth.limiter import RateLimiter
from neffcache_server.auth.principal import Principal
from neffcache_server.auth.secrets import digest_of, new_key, read_session, session_holds, sign_session
from neffcache_server.settings import load_settings
from support.cache_state import lease_id, neff, rows
from support.server import ServerProcess, running_server

ADMIN = "the-first-admin-token-of-tests"
HOLDER = {"host": "h0", "boot": "b0", "pid": 7}
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    env = {
        "NEFFCACHE_SERVER_ADMIN_TOKEN": ADMIN,
        "NEFFCACHE_SERVER_READ_CHAIN": json.dumps({"pr-*": "main"}),
        "NEFFCACHE_SERVER_NAMESPACE_QUOTAS": json.dumps({"small": 20000}),
        "NEFFCACHE_SERVER_ACCESS_LOG": "1",
        "NEFFCACHE_SERVER_LOG_LEVEL": "debug",
    }
    with running_server(tmp_path_factory.mktemp("auth"), env=env) as running:
        yield running


def as_(server: ServerProcess, token: str | None, namespace: str = "main") -> httpx.Client:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    return httpx.Client(base_url=f"{server.url}/v1/ns/{namespace}/", headers=headers, timeout=30)


def made(server: ServerProcess, role: Role, namespace: str = "main", by: str = ADMIN, **given: Any) -> dict[str, Any]:
    """A new token's answer."""
    with as_(server, by) as api:
        answer = api.post(
            f"{server.url}/v1/tokens", json={"name": "t", "role": role, "namespace": namespace, **given}
        )
    assert answer.status_code == 201, answer.text
    found: dict[str, Any] = answer.json()
    return found


def token(server: ServerProcess, role: Role, namespace: str = "main") -> str:
    return str(made(server, role, namespace)["token"])


def acquire(api: httpx.Client, key: str, **given: Any) -> httpx.Response:
    return api.post(f"keys/{key}/acquire", json={"lease_id": lease_id(next(_numbers)), "holder": HOLDER, **given})


def published(api: httpx.Client, key: str, data: bytes) -> str:
    lease = lease_id(next(_numbers))
    answer = api.post(f"keys/{key}/acquire", json={"lease_id": lease, "holder": HOLDER})
    assert answer.json()["state"] == "leased", answer.text
    sha256 = hashlib.sha256(data).hexdigest()
    api.put(f"blobs/{sha256}", content=data, headers={"neffcache-lease": lease}).raise_for_status()
    body = {"sha256": sha256, "size": len(data), "compile_seconds": 1.0}
    api.post(f"leases/{lease}/publish", json=body).raise_for_status()
    return sha256


def key() -> str:
    return f"{next(_numbers):064x}"


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["code"]


# Tokens


def test_token_is_stored_hashed_and_shown_once(server: ServerProcess) -> None:
    answer = made(server, "write")
    secret, info = answer["token"], answer["info"]
    assert secret.startswith("nct_" + info["id"])
    stored = rows(server.data_dir, "SELECT * FROM tokens")
    assert secret not in str(stored)
    assert hashlib.sha256(secret.encode()).hexdigest() in str(stored)
    with as_(server, ADMIN) as api:
        assert secret.split("_", 2)[2] not in api.get(f"{server.url}/v1/tokens").text


def test_revoked_token_gets_401_and_so_does_its_session(server: ServerProcess) -> None:
    answer = made(server, "write")
    with as_(server, answer["token"]) as api, httpx.Client(base_url=server.url) as browser:
        assert api.get("entries").status_code == 200
        assert browser.post("/login", json={"token": answer["token"]}).status_code == 204
        assert browser.get("/v1/ns/main/entries").status_code == 200
        with as_(server, ADMIN) as admin:
            for _ in range(2):
                assert admin.delete(f"{server.url}/v1/tokens/{answer['info']['id']}").status_code == 204
        assert code(api.get("entries")) == (401, "token_required")
        # The same replica forgets at once; another one within seconds.
        assert browser.get("/v1/ns/main/entries").status_code == 401


def test_expired_token_is_no_token(server: ServerProcess) -> None:
    answer = made(server, "read", expires_in_seconds=1)
    connection_rows = rows(
        server.data_dir, f"SELECT expires_at - created_at FROM tokens WHERE id = '{answer['info']['id']}'"
    )
    assert connection_rows == [(1.0,)]

    with sqlite3.connect(server.data_dir / "neffcache.sqlite3") as db:
        db.execute("UPDATE tokens SET expires_at = 1 WHERE id = ?", (answer["info"]["id"],))
    db.close()
    with as_(server, answer["token"]) as api:
        assert code(api.get("entries")) == (401, "token_required")


def test_administrator_of_a_namespace_hands_out_only_that(server: ServerProcess) -> None:
    mine = token(server, "admin", "team")
    made(server, "admin", "team", by=mine)
    other = made(server, "read", "main")["info"]["id"]
    with as_(server, mine) as api:
        for namespace in ("main", "*"):
            body = {"name": "x", "role": "read", "namespace": namespace}
            assert code(api.post(f"{server.url}/v1/tokens", json=body)) == (403, "not_allowed")
        assert code(api.delete(f"{server.url}/v1/tokens/{other}")) == (404, "token_unknown")
        assert {t["namespace"] for t in api.get(f"{server.url}/v1/tokens").json()["tokens"]} == {"team"}
        assert code(api.get(f"{server.url}/v1/tokens?namespace=main")) == (403, "not_allowed")


def test_refusal_names_the_missing_right(server: ServerProcess) -> None:
    with as_(server, token(server, "read")) as api:
        detail = api.delete(f"entries/{key()}").json()["detail"]
    assert "needs the role admin in namespace main" in detail
    assert "has read in namespace main" in detail


# What each role may do (UC-16)


def test_reader_gets_hits_and_never_a_lease(server: ServerProcess) -> None:
    """A reading rank of a read-write job gets what is there, and is told at once that it compiles for itself."""
    there, absent = key(), key()
    with as_(server, token(server, "write")) as writer, as_(server, token(server, "read")) as reader:
        published(writer, there, neff("reader"))
        hit = acquire(reader, there).json()
        assert hit["state"] == "hit"
        assert reader.get(f"{server.url}{hit['artifact']['url']}").content == neff("reader")
        assert code(acquire(reader, absent)) == (403, "write_needed")
        assert acquire(reader, absent, can_compile=False).json()["state"] == "busy"
        assert acquire(writer, absent).json()["state"] == "leased"
        busy = acquire(reader, absent).json()
        assert (busy["state"], busy["holder"]["host"]) == ("busy", "h0")


def test_writer_cannot_remove_what_is_published(server: ServerProcess) -> None:
    there = key()
    with as_(server, token(server, "write")) as writer:
        published(writer, there, neff("keep"))
        assert code(writer.delete(f"entries/{there}")) == (403, "not_allowed")
    with as_(server, token(server, "admin")) as admin:
        assert admin.delete(f"entries/{there}").status_code == 204


def test_pull_request_reads_the_trusted_namespace_and_writes_its_own(server: ServerProcess) -> None:
    """UC-16: own, then trusted; nothing that a pull request does reaches the trusted namespace."""
    shared, own = key(), key()
    pr_token = token(server, "write", "pr-7")
    with as_(server, token(server, "write")) as main_api, as_(server, pr_token, "pr-7") as pr:
        trusted = published(main_api, shared, neff("trusted"))
        hit = acquire(pr, shared).json()
        assert hit["state"] == "hit"
        assert hit["artifact"]["url"] == f"/v1/ns/main/blobs/{trusted}"
        assert pr.get(f"{server.url}{hit['artifact']['url']}").content == neff("trusted")
        published(pr, own, neff("own"))
        assert acquire(main_api, own).json()["state"] == "leased"
        present = pr.post("keys/lookup", json={"keys": [shared, own]}).json()["present"]
        assert {k: a["url"].split("/")[3] for k, a in present.items()} == {shared: "main", own: "pr-7"}
    with as_(server, pr_token, "main") as trespasser:
        assert code(acquire(trespasser, key())) == (403, "write_needed")
        assert code(trespasser.delete(f"entries/{shared}")) == (403, "not_allowed")
        assert code(trespasser.put(f"blobs/{trusted}", content=neff("x"))) == (403, "not_allowed")
    with as_(server, pr_token, "pr-8") as stranger:
        assert code(acquire(stranger, shared)) == (403, "not_allowed")


def test_own_artifact_goes_before_the_trusted_one(server: ServerProcess) -> None:
    both = key()
    with as_(server, token(server, "write")) as main_api, as_(server, token(server, "write", "pr-1"), "pr-1") as pr:
        own = published(pr, both, neff("of the pull request"))
        published(main_api, both, neff("of main"))
        assert acquire(pr, both).json()["artifact"]["sha256"] == own


def test_upload_beyond_the_quota_is_refused_before_its_bytes_come(server: ServerProcess) -> None:
    first, second = key(), key()
    with as_(server, token(server, "write", "small"), "small") as api:
        data = neff("first")
        published(api, first, data)
        lease = lease_id(next(_numbers))
        assert (
            api.post(f"keys/{second}/acquire", json={"lease_id": lease, "holder": HOLDER}).json()["state"] == "leased"
        )
        headers = {"neffcache-lease": lease}
        big = {"size": 20001 - len(data)}
        assert code(api.post(f"blobs/{'a' * 64}/upload", json=big, headers=headers)) == (413, "quota_exceeded")
        body = b"\0" * big["size"]
        assert code(api.put(f"blobs/{'a' * 64}", content=body, headers=headers)) == (413, "quota_exceeded")
        fits = {"size": 20000 - len(data)}
        assert api.post(f"blobs/{'a' * 64}/upload", json=fits, headers=headers).status_code == 200


# Browsers


def test_login_gives_a_cookie_that_no_script_and_no_other_site_can_use(server: ServerProcess) -> None:
    there = key()
    with httpx.Client(base_url=server.url) as browser:
        assert browser.post("/login", json={"token": "nct_wrong"}).status_code == 401
        answer = browser.post("/login", json={"token": token(server, "admin")})
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert "Secure" not in cookie
        assert browser.get("/v1/whoami").json()["role"] == "admin"
        url = f"/v1/ns/main/failures/{there}"
        for origin in ({}, {"origin": "https://evil.example"}, {"origin": "null"}):
            assert code(browser.delete(url, headers=origin)) == (403, "cross_site")
        assert code(browser.delete(url, headers={"origin": server.url})) == (404, "failure_unknown")
        assert browser.post("/logout").status_code == 204
        assert browser.get("/v1/whoami").status_code == 401


def test_secure_cookie_behind_a_proxy_that_ends_tls(server: ServerProcess) -> None:
    headers = {"x-forwarded-proto": "https"}
    answer = httpx.post(f"{server.url}/login", json={"token": ADMIN}, headers=headers)
    assert "Secure" in answer.headers["set-cookie"]


def test_forged_and_foreign_sessions_are_refused(server: ServerProcess) -> None:
    forged = sign_session(new_key(), "admin", digest_of(ADMIN), 60)
    for cookie in (forged, "", ".", "x.y", forged.partition(".")[0]):
        answer = httpx.get(f"{server.url}/v1/whoami", headers={"cookie": f"neffcache_session={cookie}"})
        assert code(answer) == (401, "token_required")


def test_session_ends_with_its_time_and_with_its_token() -> None:
    key_ = new_key()
    parts = read_session(sign_session(key_, "id", "digest", 60))
    assert parts is not None
    assert session_holds(key_, "digest", parts[1], parts[2])
    assert not session_holds(key_, "another digest", parts[1], parts[2])
    assert not session_holds(new_key(), "digest", parts[1], parts[2])
    assert read_session(sign_session(key_, "id", "digest", -1)) is None


# Anonymous


def test_nothing_secret_is_logged(server: ServerProcess) -> None:
    secret = token(server, "write")
    with as_(server, secret) as api:
        lease = lease_id(next(_numbers))
        api.post(f"keys/{key()}/acquire", json={"lease_id": lease, "holder": HOLDER})
        api.post(f"leases/{lease}/heartbeat", json={})
    httpx.post(f"{server.url}/login", json={"token": secret, "more": 1})
    httpx.post(f"{server.url}/login", json={"token": [secret]})
    for hidden in (secret, ADMIN, lease):
        assert hidden not in server.log


def test_server_that_others_reach_does_not_start_without_a_token(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "neffcache_server", "serve", "--host", "0.0.0.0", "--port", "0"]
    done = subprocess.run([*command, "--data-dir", str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "NEFFCACHE_SERVER_ADMIN_TOKEN" in done.stderr
    assert "NEFFCACHE_SERVER_ALLOW_ANONYMOUS" in done.stderr


def test_anonymous_access_by_name(tmp_path: Path) -> None:
    env = {"NEFFCACHE_SERVER_ALLOW_ANONYMOUS": "read", "NEFFCACHE_SERVER_REQUESTS_PER_MINUTE": "5"}
    with running_server(tmp_path, env=env, arguments=("--host", "0.0.0.0")) as open_server:
        url = f"http://127.0.0.1:{open_server.port}"
        assert httpx.get(f"{url}/v1/ns/main/entries").status_code == 200
        assert code(httpx.delete(f"{url}/v1/ns/main/entries/{key()}")) == (403, "not_allowed")
        # A wrong token is told so instead of being let in as nobody.
        assert httpx.get(f"{url}/v1/ns/main/entries", headers={"authorization": "Bearer nct_x"}).status_code == 401
        for _ in range(3):
            assert httpx.get(f"{url}/v1/ns/main/entries").status_code == 200
        answer = httpx.get(f"{url}/v1/ns/main/entries")
        assert code(answer) == (429, "too_many_requests")
        assert answer.headers["retry-after"] == "1"


def test_loopback_is_open_to_this_machine_and_closed_to_a_proxys_guests(tmp_path: Path) -> None:
    with running_server(tmp_path) as local:
        url = f"{local.url}/v1/ns/main/failures/{key()}"
        assert code(httpx.delete(url)) == (404, "failure_unknown")
        assert code(httpx.delete(url, headers={"x-forwarded-for": "10.0.0.1"})) == (401, "token_required")
        # A page in this machine's browser must not use the cache either.
        assert code(httpx.delete(url, headers={"origin": "https://evil.example"})) == (403, "cross_site")
        # A name of theirs that points to this machine: origin and host agree, and neither is ours.
        rebound = {"origin": "http://evil.example:1", "host": "evil.example:1"}
        assert code(httpx.delete(url, headers=rebound)) == (403, "cross_site")
        for name in ("localhost:1", "127.0.0.1:1", "[::1]:1"):
            own = {"origin": f"http://{name}", "host": name}
            assert code(httpx.delete(url, headers=own)) == (404, "failure_unknown")


@pytest.mark.parametrize(
    ("given", "anonymous"),
    [
        ({}, "local"),
        ({"host": "::1"}, "local"),
        ({"host": "localhost"}, "local"),
        ({"host": "0.0.0.0"}, "off"),
        ({"host": "cache.example"}, "off"),
        ({"admin_token": ADMIN}, "off"),
        ({"allow_anonymous": "off"}, "off"),
        ({"host": "0.0.0.0", "allow_anonymous": "Write"}, "write"),
    ],
)
def test_when_requests_without_a_token_are_let_in(given: dict[str, Any], anonymous: str) -> None:
    assert load_settings(**given).anonymous == anonymous


# Parts


def test_rate_limit_lets_a_minutes_worth_through_at_once() -> None:
    limiter = RateLimiter(3)
    assert [limiter.wait_seconds("a") for _ in range(3)] == [0.0, 0.0, 0.0]
    assert 0 < limiter.wait_seconds("a") <= 20.0
    assert limiter.wait_seconds("b") == 0.0
    assert RateLimiter(0).wait_seconds("a") == 0.0


def test_admin_token_is_not_shown_by_settings_or_their_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ADMIN not in repr(load_settings(admin_token=ADMIN))
    monkeypatch.setenv("NEFFCACHE_SERVER_ADMIN_TOKEN", "hunter2hunter2")
    with pytest.raises(Exception, match="at least 20 characters") as raised:
        load_settings()
    assert "hunter2" not in str(raised.value)


def test_roles_include_those_below() -> None:
    who = Principal(id="x", name="x", role="write", namespace="a", trusted="t")
    allowed = [(r, n) for r in ("read", "write", "admin") for n in ("a", "t", "b", "*") if who.may(r, n)]  # type: ignore[arg-type]
    assert allowed == [("read", "a"), ("read", "t"), ("write", "a")]


# The command


def test_token_command(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NEFFCACHE_URL", server.url)
    monkeypatch.setenv("NEFFCACHE_TOKEN", ADMIN)
    assert main(["token", "create", "ci", "--role", "read", "--namespace", "team-b", "--expires", "30d"]) == 0
    out, err = capsys.readouterr()
    secret = out.strip()
    assert secret.startswith("nct_")
    assert "read in namespace team-b" in err
    token_id = secret.split("_")[1]
    assert main(["token", "ls", "--namespace", "team-b"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if token_id in line)
    assert line.endswith("valid")
    monkeypatch.setenv("NEFFCACHE_TOKEN", secret)
    assert main(["token", "ls"]) == 1
    assert "needs the role admin in namespace team-b" in capsys.readouterr().err
    monkeypatch.setenv("NEFFCACHE_TOKEN", ADMIN)
    assert main(["token", "revoke", token_id]) == 0
    assert main(["token", "ls", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out.partition("\n")[2])
    assert next(t for t in shown["tokens"] if t["id"] == token_id)["revoked_at"]
    assert main(["token", "revoke", "nonsense"]) == 1
