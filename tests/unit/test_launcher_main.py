from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from neffcache_client.results import CACHE_FAULT_EXIT
from neffcache_hook.launcher import main
from neffcache_hook.launcher.log import MAX_BYTES, Log


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for fd in ends:
        try:
            os.close(fd)
        except OSError:
            continue


def test_the_exit_code_of_a_cache_fault_is_the_node_caches() -> None:
    assert main.CACHE_FAULT_EXIT == CACHE_FAULT_EXIT


def test_a_caller_is_gone_when_the_parent_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    caller = main.Caller()
    assert caller.fd >= 0
    assert not caller.gone()
    os.close(caller.fd)
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert caller.gone()


def test_a_caller_that_died_before_the_first_look_is_noticed(
    monkeypatch: pytest.MonkeyPatch, pipe: tuple[int, int]
) -> None:
    """Process 1 as parent: an orphan, unless somebody reads what we write."""
    monkeypatch.setattr(os, "getppid", lambda: 1)
    caller = main.Caller()
    saved = os.dup(1)
    os.dup2(pipe[1], 1)
    try:
        before = caller.gone()
        os.close(pipe[0])
        after = caller.gone()
    finally:
        os.dup2(saved, 1)
        os.close(saved)
        os.close(caller.fd)
    assert (before, after) == (False, True)


def test_the_log_never_raises_and_never_grows_without_bound(tmp_path: os.PathLike[str]) -> None:
    path = os.path.join(tmp_path, "a.log")
    log = Log("/unused", path)
    log("first")
    with open(path, "ab") as f:
        f.truncate(MAX_BYTES + 1)
    log("second\nwith more")
    assert os.path.getsize(path + ".1") > MAX_BYTES
    with open(path) as f:
        assert f.read().endswith("] second\n    with more\n")
    Log("/proc/nowhere", None)("lost")


def test_a_warning_is_written_once_per_process(capfd: pytest.CaptureFixture[str]) -> None:
    log = Log("/unused", "stderr")
    log.once("WARNING: x")
    log.once("WARNING: x")
    assert capfd.readouterr().err == "neffcache: WARNING: x\n"
