"""The node cache against a server that answers what a test says."""

from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from neffcache_client import errand
from neffcache_client.errors import Aborted, LocalTierError
from neffcache_client.heartbeat import LeaseView
from neffcache_client.host_lock import HostLock
from neffcache_client.records import summarise
from support.neffs import make_neff
from support.node import KEY, NEFF, Node
from support.scripted_server import Reply, ScriptedServer, busy, hit, leased, problem

SHA = hashlib.sha256(NEFF).hexdigest()
HIT = hit(SHA, len(NEFF), compile_seconds=9.0)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


@pytest.fixture
def node(tmp_path: Path, server: ScriptedServer) -> Node:
    return Node(tmp_path / "host", server.url)


@pytest.fixture(autouse=True)
def no_background(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Uploaders in the background have their own tests."""
    started: list[object] = []
    monkeypatch.setattr(errand, "start_in_background", started.append)
    return started


def closed_port() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{s.getsockname()[1]}"


# A hit


def test_a_remote_hit_is_downloaded_verified_and_kept_on_the_host(node: Node, server: ScriptedServer) -> None:
    server.script("acquire", HIT)
    server.script("get", Reply(body=NEFF))
    got = node.obtain()
    assert (got.verdict, got.exit_code, got.saved_seconds, got.bytes) == ("remote", 0, 9.0, len(NEFF))
    assert node.output().read_bytes() == NEFF
    assert node.obtain(output="second.neff").verdict == "local"
    assert len(server.calls("acquire")) == 1
    assert summarise(node.settings.tier_dir).verdicts == {"remote": 1, "local": 1}


@pytest.mark.parametrize(
    "bad",
    [
        Reply(body=NEFF[:-1] + b"x"),
        Reply(body=NEFF[:-5]),
        Reply(body=NEFF[:500], announce=len(NEFF)),
        Reply(body=b""),
        Reply(body=NEFF + b"x"),
        Reply(drop=True),
        problem(500, "broken"),
        Reply(body=make_neff(uuid=7)),
    ],
    ids=["flipped", "short", "truncated", "empty", "long", "dropped", "500", "another"],
)
def test_a_bad_download_is_fetched_again_once(node: Node, server: ScriptedServer, bad: Reply) -> None:
    """UC-11."""
    server.script("acquire", HIT)
    server.script("get", bad, Reply(body=NEFF))
    assert node.obtain().verdict == "remote"
    assert node.output().read_bytes() == NEFF
    assert node.compiles == 0


def test_an_artifact_that_stays_damaged_is_compiled_locally_and_counted(node: Node, server: ScriptedServer) -> None:
    """UC-11."""
    server.script("acquire", HIT)
    server.script("get", Reply(body=NEFF[:-1] + b"x"), Reply(body=NEFF[:-1] + b"x"))
    got = node.obtain()
    assert (got.verdict, got.reason, got.exit_code) == ("fallback", "corrupt", 0)
    assert node.spooled() == 0, "the server has this key and would keep what it has"
    assert summarise(node.settings.tier_dir).corrupt == 2
    assert node.output().read_bytes() == NEFF
    assert [p.name for p in node.folder.iterdir() if "tmp" in p.name] == []


@pytest.mark.parametrize(
    "said", [{"compiler_version": "9.9.9+other"}, {"target": "trn2"}], ids=["compiler", "target"]
)
def test_an_artifact_of_another_compiler_or_target_is_never_used(
    node: Node, server: ScriptedServer, said: dict[str, str]
) -> None:
    """UC-28: a key names both, so only something broken can bring it about; and a wrong hit is worse than a miss."""
    server.script("acquire", hit(SHA, len(NEFF), **said))
    server.script("get", Reply(body=NEFF))
    got = node.obtain(expect_target="trn1")
    assert (got.verdict, got.reason, node.compiles) == ("fallback", "mismatch", 1)
    assert not server.calls("get")


def test_a_hit_that_cannot_be_handed_over_leaves_nothing_behind(node: Node, server: ScriptedServer) -> None:
    server.script("acquire", HIT)
    server.script("get", Reply(body=NEFF))
    node.output().mkdir()
    with pytest.raises(LocalTierError):
        node.obtain()
    assert not list(node.folder.glob(".neffcache*"))


def test_a_lock_that_is_looked_at_for_a_moment_is_not_waited_for(node: Node, server: ScriptedServer) -> None:
    server.script("acquire", HIT)
    server.script("get", Reply(body=NEFF))
    lock = HostLock(node.settings.lock_dir, "default", KEY)
    assert lock.try_lock()
    node.cache._log = lambda line: lock.release() if "another process" in line else None
    assert node.obtain().verdict == "remote"


def test_a_blob_that_disappeared_is_asked_for_again_and_compiled(node: Node, server: ScriptedServer) -> None:
    """UC-15."""
    server.script("acquire", HIT, leased())
    server.script("get", problem(404, "blob_not_found"))
    got = node.obtain()
    assert (got.verdict, got.reason) == ("compiled", None)
    ids = [s.json["lease_id"] for s in server.calls("acquire")]
    assert ids[0] != ids[1]


def test_the_token_goes_to_the_server_and_never_to_the_store(tmp_path: Path, server: ScriptedServer) -> None:
    node = Node(tmp_path / "host", server.url, NEFFCACHE_TOKEN="secret")
    with ScriptedServer() as store:
        server.script("acquire", HIT)
        server.script("get", Reply(status=307, headers={"location": f"{store.url}/bucket/x?signature=1"}))
        store.script("get", Reply(body=NEFF))
        assert node.obtain().verdict == "remote"
        (direct,) = server.calls("get")
        (stored,) = store.calls("get")
    assert direct.headers["authorization"] == "Bearer secret"
    assert "authorization" not in stored.headers


def test_an_absolute_blob_address_is_asked_without_the_token(tmp_path: Path, server: ScriptedServer) -> None:
    node = Node(tmp_path / "host", server.url, NEFFCACHE_TOKEN="secret")
    with ScriptedServer() as store:
        server.script("acquire", hit(SHA, len(NEFF), f"{store.url}/bucket/x"))
        store.script("get", Reply(body=NEFF))
        assert node.obtain().verdict == "remote"
        assert "authorization" not in store.calls("get")[0].headers


def test_a_presigned_upload_carries_its_headers_and_no_credential_of_ours(
    tmp_path: Path, server: ScriptedServer
) -> None:
    node = Node(tmp_path / "host", server.url, NEFFCACHE_TOKEN="secret")
    with ScriptedServer() as store:
        server.script("acquire", leased())
        target = {"how": "presigned", "url": f"{store.url}/bucket/x", "headers": {"if-none-match": "*"}}
        server.script("upload", Reply(target))
        assert node.obtain().reason is None
        (put,) = store.calls("put")
    assert put.body == NEFF
    assert put.headers["if-none-match"] == "*"
    assert put.headers["content-length"] == str(len(NEFF))
    assert not {"authorization", "neffcache-lease", "transfer-encoding"} & set(put.headers)


# A lease


def test_a_lease_is_compiled_uploaded_published_and_kept(node: Node, server: ScriptedServer) -> None:
    server.script("acquire", leased())
    got = node.obtain()
    assert (got.verdict, got.reason, got.exit_code) == ("compiled", None, 0)
    assert node.output().read_bytes() == NEFF
    asked = server.calls("acquire")[0].json
    assert asked["factors"] == {"recipe": 1}
    assert asked["wait_seconds"] == 0
    (put,) = server.calls("put")
    assert put.body == NEFF
    assert put.headers["neffcache-lease"] == asked["lease_id"]
    (published,) = server.calls("publish")
    assert published.json | {"sha256": SHA, "size": len(NEFF), "compile_seconds": 2.5} == published.json
    assert asked["lease_id"] in published.path
    assert node.spooled() == 0
    assert node.obtain(output="again").verdict == "local"


def test_the_first_heartbeat_comes_at_once_and_tells_what_the_compile_does(
    node: Node, server: ScriptedServer
) -> None:
    """A grant is provisional until then."""
    server.script("acquire", leased())

    def compiling(view: LeaseView) -> None:
        server.wait_for("heartbeat")

    node.on_compile = compiling
    assert node.obtain().verdict == "compiled"
    assert len(server.calls("heartbeat")) >= 1


def test_a_lost_lease_serves_this_job_alone(node: Node, server: ScriptedServer) -> None:
    """UC-01: superseded while it compiled."""
    server.script("acquire", leased())
    server.script("heartbeat", problem(409, "lease_superseded"))
    lost = threading.Event()

    def compiling(view: LeaseView) -> None:
        while not view.lost:
            lost.wait(0.01)

    node.on_compile = compiling
    got = node.obtain()
    assert (got.verdict, got.reason, got.exit_code) == ("compiled", "lease_lost", 0)
    assert node.output().read_bytes() == NEFF
    assert server.calls("publish") == []
    assert server.calls("put") == []


@pytest.mark.parametrize(
    ("expect", "reason"),
    [({"expect_version": "2.24.0+x"}, "mismatch"), ({"expect_target": "trn1"}, "mismatch")],
)
def test_a_neff_of_another_compiler_or_target_is_handed_over_but_not_shared(
    node: Node, server: ScriptedServer, expect: dict[str, str], reason: str
) -> None:
    server.script("acquire", leased())
    got = node.obtain(**expect)
    assert (got.verdict, got.reason, got.exit_code) == ("compiled", reason, 0)
    assert node.output().read_bytes() == NEFF
    assert server.calls("publish") == []
    assert len(server.calls("release")) == 1
    assert not (node.tier / "artifacts").exists()
    assert len(node.warnings()) == 1


def test_an_architecture_without_a_known_target_name_is_shared(node: Node, server: ScriptedServer) -> None:
    """Its name in the NEFF differs from `--target` for every chip; only cayman = trn2 has been seen."""
    server.script("acquire", leased())
    node.neff = make_neff(target="sunda")
    assert node.obtain(expect_target="trn1").reason is None
    assert len(server.calls("publish")) == 1


def test_what_is_no_neff_is_handed_over_but_not_shared(node: Node, server: ScriptedServer) -> None:
    server.script("acquire", leased())
    node.neff = b"not a NEFF at all"
    got = node.obtain()
    assert (got.verdict, got.reason, got.exit_code) == ("compiled", "not_a_neff", 0)
    assert node.output().read_bytes() == b"not a NEFF at all"
    assert server.calls("put") == []


def test_a_dead_leaders_lease_is_superseded(node: Node, server: ScriptedServer) -> None:
    """UC-01."""
    lock = HostLock(node.settings.lock_dir, "default", KEY)
    lock.try_lock()
    lock.write("0f" * 16)
    path = Path(lock.path)
    record = path.read_bytes()
    lock.release()
    # The same boot, a pid that cannot be: what a killed process leaves.
    path.write_bytes(record.replace(b'"start": ', b'"start": 9'))
    server.script("acquire", leased())
    node.obtain()
    assert server.calls("acquire")[0].json["supersedes"] == "0f" * 16
    assert path.read_bytes().strip() == b""


# Failures


def test_a_deterministic_failure_is_reported_with_its_code(node: Node, server: ScriptedServer) -> None:
    """UC-02."""
    server.script("acquire", leased())
    node.result = "deterministic"
    got = node.obtain()
    assert (got.verdict, got.exit_code, got.failure) == ("failed", 70, None)
    assert got.result is not None
    (sent,) = server.calls("fail")
    assert sent.json == {"kind": "deterministic", "exit_code": 70, "code": "NCC_EOOM001", "log_tail": "it went wrong"}
    assert not node.output().exists()


def test_a_stored_failure_is_replayed_with_code_time_and_host(node: Node, server: ScriptedServer) -> None:
    """UC-02."""
    failure = {
        "kind": "deterministic",
        "exit_code": 70,
        "code": "NCC_EOOM001",
        "log_tail": "[NCC_EOOM001] too large",
        "host": "trn-7",
        "first_seen_at": 1_700_000_000.0,
    }
    server.script("acquire", Reply({"state": "failed", "failure": failure}))
    got = node.obtain()
    assert (got.verdict, got.exit_code, node.compiles) == ("failed", 70, 0)
    assert got.message is not None
    assert got.message.startswith("[NCC_EOOM001] too large")
    assert "first compiled at 2023-11-14 22:13:20 UTC on host trn-7" in got.message


def test_a_transient_failure_is_given_back_and_another_hosts_neff_used(node: Node, server: ScriptedServer) -> None:
    """UC-04."""
    server.script("acquire", leased(), busy(), HIT)
    server.script("get", Reply(body=NEFF))
    node.result = "transient"
    got = node.obtain()
    assert (got.verdict, got.exit_code, node.compiles) == ("waited", 0, 1)
    assert server.calls("fail")[0].json["kind"] == "transient"
    ids = [s.json["lease_id"] for s in server.calls("acquire")]
    assert ids[0] != ids[1] == ids[2]


def test_an_exhausted_key_returns_this_hosts_own_last_failure(node: Node, server: ScriptedServer) -> None:
    """UC-04."""
    exhausted = {"kind": "exhausted", "exit_code": 137}
    server.script("acquire", leased(), leased(), Reply({"state": "failed", "failure": exhausted}))
    node.result = "transient"
    got = node.obtain()
    assert (got.verdict, got.reason, got.exit_code, node.compiles) == ("failed", "exhausted", 70, 2)
    assert got.result is not None


def test_a_server_that_leases_for_ever_does_not_keep_a_job_compiling_for_ever(
    node: Node, server: ScriptedServer
) -> None:
    server.script("acquire", *[leased() for _ in range(9)])
    node.result = "transient"
    assert node.obtain().exit_code == 70
    assert node.compiles == 3


def test_retry_failed_is_asked_once(node: Node, server: ScriptedServer) -> None:
    server.script("acquire", busy(), leased())
    node.obtain(retry_failed=True)
    first, second = (s.json for s in server.calls("acquire"))
    assert first["retry_failed"] is True
    assert second["retry_failed"] is False


# Waiting


def test_a_waiter_says_who_compiles_and_asks_under_the_same_lease_id(node: Node, server: ScriptedServer) -> None:
    """UC-01."""
    server.script("acquire", busy("trn-3"), busy("trn-3"), HIT)
    server.script("get", Reply(body=NEFF))
    assert node.obtain().verdict == "waited"
    asked = [s.json for s in server.calls("acquire")]
    assert len({a["lease_id"] for a in asked}) == 1
    assert [a["wait_seconds"] for a in asked] == [0, 5.0, 5.0]
    assert any("pid 7 on trn-3" in line and "for 12 s" in line for line in node.log)


def test_an_abort_ends_a_wait_and_gives_the_lease_back(node: Node, server: ScriptedServer) -> None:
    gate = threading.Event()
    server.script("acquire", busy(), Reply({"state": "busy"}, gate=gate))

    def cancel() -> None:
        server.wait_for("acquire", 2)
        node.abort.set()

    threading.Thread(target=cancel).start()
    with pytest.raises(Aborted):
        node.obtain()
    gate.set()
    lease_id = server.calls("acquire")[0].json["lease_id"]
    assert lease_id in server.calls("release")[0].path
    assert summarise(node.settings.tier_dir).reasons == {"failed": {"aborted": 1}}


def test_an_abort_during_a_compile_is_no_failure_of_the_graph(node: Node, server: ScriptedServer) -> None:
    """UC-02: Ctrl-C marks nothing as failed."""
    server.script("acquire", leased())
    node.result = "transient"
    node.on_compile = lambda view: node.abort.set()
    with pytest.raises(Aborted):
        node.obtain()
    assert server.calls("fail") == []
    assert len(server.calls("release")) == 1


# Folders


def test_a_local_folder_that_cannot_be_written_costs_no_neff(tmp_path: Path, server: ScriptedServer) -> None:
    """UC-30."""
    (tmp_path / "file").write_text("")
    env = {
        "TORCH_NEURONX_NEFF_CACHE_DIR": str(tmp_path / "file"),
        "TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR": str(tmp_path / "file"),
    }
    node = Node(tmp_path / "host", server.url, **env)
    server.script("acquire", HIT, leased())
    server.script("get", Reply(body=NEFF))
    assert node.obtain().verdict == "remote"
    assert node.obtain("cd" * 32, output="b").verdict == "compiled"
    assert node.output("b").read_bytes() == NEFF
    assert len(node.warnings()) == 1


def test_without_folder_and_server_the_job_still_compiles(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    env = {
        "TORCH_NEURONX_NEFF_CACHE_DIR": str(tmp_path / "file"),
        "TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR": str(tmp_path / "file"),
    }
    node = Node(tmp_path / "host", closed_port(), **env)
    assert node.obtain().exit_code == 0
    assert node.output().read_bytes() == NEFF


# Modes


def test_readonly_uses_hits_and_publishes_nothing(tmp_path: Path, server: ScriptedServer) -> None:
    node = Node(tmp_path / "host", server.url, NEFFCACHE_MODE="readonly")
    server.script("acquire", Reply({"state": "busy"}), HIT)
    server.script("get", Reply(body=NEFF))
    got = node.obtain()
    assert (got.verdict, got.reason, got.exit_code) == ("compiled", "readonly", 0)
    assert server.calls("acquire")[0].json["can_compile"] is False
    assert server.calls("put") == []
    assert node.spooled() == 0
    assert node.obtain("cd" * 32).verdict == "remote"


def test_readonly_waits_for_somebody_who_compiles(tmp_path: Path, server: ScriptedServer) -> None:
    node = Node(tmp_path / "host", server.url, NEFFCACHE_MODE="readonly")
    server.script("acquire", busy(), HIT)
    server.script("get", Reply(body=NEFF))
    assert node.obtain().verdict == "waited"


def test_require_makes_a_miss_an_error(tmp_path: Path, server: ScriptedServer) -> None:
    node = Node(tmp_path / "host", server.url, NEFFCACHE_MODE="require")
    server.script("acquire", Reply({"state": "busy"}))
    got = node.obtain()
    assert (got.verdict, got.reason, got.exit_code, node.compiles) == ("failed", "required", 75, 0)
    assert got.message is not None
    assert KEY in got.message


def test_require_makes_an_outage_an_error(tmp_path: Path) -> None:
    node = Node(tmp_path / "host", closed_port(), NEFFCACHE_MODE="require")
    got = node.obtain()
    assert (got.verdict, got.exit_code, node.compiles) == ("failed", 75, 0)


def test_strict_makes_an_outage_an_error(tmp_path: Path) -> None:
    """UC-10."""
    node = Node(tmp_path / "host", closed_port(), NEFFCACHE_STRICT="1")
    got = node.obtain()
    assert (got.verdict, got.exit_code, node.compiles) == ("failed", 75, 0)
    assert got.message is not None
    assert "NEFFCACHE_STRICT=1" in got.message


def test_strict_makes_a_failed_publish_an_error_and_keeps_the_neff(tmp_path: Path, server: ScriptedServer) -> None:
    node = Node(tmp_path / "host", server.url, NEFFCACHE_STRICT="1")
    server.script("acquire", leased())
    server.script("upload", problem(403, "read_only"))
    got = node.obtain()
    assert (got.verdict, got.exit_code) == ("failed", 75)
    assert node.output().read_bytes() == NEFF


# Ranks of one host


def test_ranks_of_one_host_send_one_of_them_to_the_server(tmp_path: Path, server: ScriptedServer) -> None:
    nodes = [Node(tmp_path / "host", server.url) for _ in range(6)]
    gate = threading.Event()
    server.script("acquire", Reply(leased().json, gate=gate))
    verdicts: list[str] = []

    def rank(n: int) -> None:
        verdicts.append(nodes[n].obtain(output=f"out{n}").verdict)

    threads = [threading.Thread(target=rank, args=(n,)) for n in range(6)]
    for t in threads:
        t.start()
    server.wait_for("acquire")
    gate.set()
    for t in threads:
        t.join(60)
    assert sorted(verdicts)[0] == "compiled"
    assert verdicts.count("compiled") == 1
    assert sum(n.compiles for n in nodes) == 1
    assert len(server.calls("acquire")) == 1
    assert {nodes[0].output(f"out{n}").read_bytes() for n in range(6)} == {NEFF}


def test_ranks_of_one_host_share_one_compile_without_a_server(tmp_path: Path) -> None:
    url = closed_port()
    nodes = [Node(tmp_path / "host", url) for _ in range(6)]
    threads = [threading.Thread(target=n.obtain, kwargs={"output": f"out{i}"}) for i, n in enumerate(nodes)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert sum(n.compiles for n in nodes) == 1
    assert nodes[0].spooled() == 1


def test_a_leader_that_hangs_blocks_its_host_for_one_ttl_only(tmp_path: Path, server: ScriptedServer) -> None:
    """UC-01: a stopped leader. The server decides, not the lock."""
    node = Node(tmp_path / "host", server.url)
    lock = HostLock(node.settings.lock_dir, "default", KEY)
    lock.try_lock()
    lock.write("0f" * 16)
    server.script("acquire", leased())
    assert node.obtain().verdict == "compiled"
    assert server.calls("acquire")[0].json.get("supersedes") is None
    lock.release()
