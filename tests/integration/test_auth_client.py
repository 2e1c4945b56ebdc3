"""Jobs whose token is missing, revoked or good for reading only: they go on, with one warning."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support import backends
from support.neffs import make_neff
from support.node import NEFF, Node
from support.server import ServerProcess, running_server

ADMIN = "the-first-admin-token-of-tests"
KEYS = [f"{n:064x}" for n in range(1, 9)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    env = {"NEFFCACHE_SERVER_ADMIN_TOKEN": ADMIN, "NEFFCACHE_SERVER_READ_CHAIN": json.dumps({"pr": "main"})}
    with running_server(tmp_path_factory.mktemp("server"), env=env) as running:
        yield running


def token(server: ServerProcess, role: str, namespace: str) -> tuple[str, str]:
    """(id, token)."""
    body = {"name": "t", "role": role, "namespace": namespace}
    made = httpx.post(f"{server.url}/v1/tokens", json=body, headers={"authorization": f"Bearer {ADMIN}"}).json()
    return made["info"]["id"], made["token"]


def node(folder: Path, server: ServerProcess, secret: str, namespace: str, **env: str) -> Node:
    return Node(folder, server.url, NEFFCACHE_TOKEN=secret, NEFFCACHE_NAMESPACE=namespace, **env)


def test_reader_uses_what_is_there_and_compiles_the_rest_for_itself(tmp_path: Path, server: ServerProcess) -> None:
    """A miss must not shut the reader out of the hits that follow, nor fill its disk with uploads to come."""
    writer = node(tmp_path / "w", server, token(server, "write", "team")[1], "team")
    for key in KEYS[:2]:
        assert writer.obtain(key).verdict == "compiled"
    reader = node(tmp_path / "r", server, token(server, "read", "team")[1], "team")
    assert reader.obtain(KEYS[0], output="0.neff").verdict == "remote"
    missed = reader.obtain(KEYS[2], output="2.neff")
    assert (missed.verdict, missed.exit_code, reader.compiles) == ("fallback", 0, 1)
    assert reader.output("2.neff").read_bytes() == NEFF
    assert reader.obtain(KEYS[1], output="1.neff").verdict == "remote"
    assert reader.obtain(KEYS[3], output="3.neff").verdict == "fallback"
    assert len(reader.warnings()) == 1
    assert "needs the role write in namespace team" in reader.warnings()[0]
    assert reader.spooled() == 0


def test_pull_request_gets_hits_of_the_trusted_namespace(tmp_path: Path, server: ServerProcess) -> None:
    """UC-16, through a whole client: the artifact comes from `main`, what is compiled stays in `pr`."""
    trusted = node(tmp_path / "m", server, token(server, "write", "main")[1], "main")
    assert trusted.obtain(KEYS[4]).verdict == "compiled"
    guest = node(tmp_path / "p", server, token(server, "write", "pr")[1], "pr")
    assert guest.obtain(KEYS[4]).verdict == "remote"
    assert guest.obtain(KEYS[5], output="5.neff").verdict == "compiled"
    assert guest.warnings() == []
    fresh = node(tmp_path / "f", server, token(server, "write", "main")[1], "main")
    assert fresh.obtain(KEYS[5]).verdict == "compiled"


def test_damage_in_the_trusted_namespace_is_withdrawn_there(tmp_path: Path, server: ServerProcess) -> None:
    """UC-11, UC-16: a reader's report makes the server look; else every host of `pr` compiles this for ever."""
    trusted = node(tmp_path / "m", server, token(server, "write", "main")[1], "main")
    trusted.neff = make_neff(payload=b"to be damaged")
    assert trusted.obtain(KEYS[0]).verdict == "compiled"
    digest = hashlib.sha256(trusted.neff).hexdigest()
    backends.current().replace_blob(server.data_dir, "main", digest, trusted.neff[:-1] + b"!")
    guest = node(tmp_path / "p", server, token(server, "write", "pr")[1], "pr")
    got = guest.obtain(KEYS[0])
    assert (got.verdict, got.reason, guest.compiles) == ("compiled", None, 1)
    assert node(tmp_path / "o", server, token(server, "write", "pr")[1], "pr").obtain(KEYS[0]).verdict == "remote"


@pytest.mark.parametrize("kind", ["none", "revoked", "elsewhere"])
def test_token_that_is_no_good_costs_one_warning(tmp_path: Path, server: ServerProcess, kind: str) -> None:
    """UC-10, UC-23."""
    token_id, secret = token(server, "write", "elsewhere" if kind == "elsewhere" else "team")
    if kind == "revoked":
        httpx.delete(f"{server.url}/v1/tokens/{token_id}", headers={"authorization": f"Bearer {ADMIN}"})
    rank = node(tmp_path, server, "" if kind == "none" else secret, "team")
    for number in (6, 7):
        got = rank.obtain(KEYS[number], output=f"{number}.neff")
        assert (got.verdict, got.exit_code) == ("fallback", 0)
    assert len(rank.warnings()) == 1
    assert secret not in "".join(rank.log)


def test_strict_job_fails_on_a_token_that_is_no_good(tmp_path: Path, server: ServerProcess) -> None:
    rank = node(tmp_path, server, "nct_no_good", "team", NEFFCACHE_STRICT="1")
    got = rank.obtain(KEYS[6])
    assert got.exit_code != 0
    assert rank.compiles == 0
