"""What a tired person types: one sentence on stderr, never a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
from neffcache_client.cli.main import main
from support.server import ServerProcess, running_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> object:
    with running_server(tmp_path_factory.mktemp("server")) as running:
        yield running


def said(argv: list[str], capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit code of a command and what it said."""
    try:
        code = main(argv)
    except SystemExit as exc:
        code = int(exc.code or 0)
    return code, capfd.readouterr().err


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["run", "--", ""], 127, "neffcache: "),
        (["db", "upgrade", "--data-dir", "/dev/null/x"], 2, "/dev/null/x cannot be used: Not a directory"),
        (["db", "check", "--data-dir", "/nonexistent/x"], 2, "/nonexistent/x/neffcache.sqlite3"),
        (
            ["db", "check", "--database-url", "postgresql://me:secret@127.0.0.1:1/x"],
            2,
            "postgresql://me:***@127.0.0.1:1/x",
        ),
        (["db", "upgrade", "--database-url", "sqlite://"], 2, "SQLite needs a file"),
        (["serve", "--port", "0", "--database-url", "sqlite:///:memory:"], 2, "SQLite needs a file"),
        (["serve", "--port", "0", "--port-file", "/nonexistent/dir/f"], 2, "/nonexistent/dir"),
        (["serve", "--port", "0", "--storage-url", "file:relative"], 2, "file:///an/absolute/folder"),
        (["serve", "--port", "99999"], 2, "65535"),
        (["gc", "--namespace", "UPPER/.."], 2, "a namespace is 1 to 63"),
        (["entries", "ls", "--limit", "0"], 2, "'0' is no number of at least 1"),
        (["entries", "ls", "--limit", "²"], 2, "'²' is no number of at least 1"),
        (["jobs", "--limit", "-5"], 2, "'-5' is no number of at least 1"),
        (["top", "--interval", "nan"], 2, "'nan' is no number of seconds"),
        (["top", "--interval", "-1"], 2, "'-1' is no number of seconds"),
    ],
)
def test_a_question_that_makes_no_sense_gets_a_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    argv: list[str],
    code: int,
    words: str,
) -> None:
    monkeypatch.setenv("NEFFCACHE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("NEFFCACHE_SERVER_DATA_DIR", str(tmp_path / "data"))
    got, text = said(argv, capfd)
    assert (got, words in text, "Traceback" in text) == (code, True, False), text


def test_a_job_that_nobody_saw_is_said_so(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NEFFCACHE_URL", server.url)
    for argv in (["jobs", "nobody"], ["stats", "--job", "nobody"]):
        code, text = said(argv, capfd)
        assert (code, "No request of that job was seen in this namespace" in text) == (1, True), text
