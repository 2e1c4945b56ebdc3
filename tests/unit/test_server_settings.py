"""Settings of the server."""

from __future__ import annotations

from pathlib import Path

import pytest
from neffcache_server.problems import SetupError
from neffcache_server.settings import ServerSettings, load_settings


def test_every_setting_is_described() -> None:
    assert [n for n, f in ServerSettings.model_fields.items() if not f.description] == []


def test_environment_is_read_and_options_win(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NEFFCACHE_SERVER_PORT", "1234")
    monkeypatch.setenv("NEFFCACHE_SERVER_TTL_SECONDS", "12.5")
    settings = load_settings(port=99, data_dir=tmp_path, host=None)
    assert (settings.port, settings.ttl_seconds, settings.host) == (99, 12.5, "127.0.0.1")
    assert settings.effective_database_url == f"sqlite:///{tmp_path}/neffcache.sqlite3"
    assert settings.effective_storage_url == f"file://{tmp_path}/blobs"


def test_unknown_name_is_refused_with_the_likely_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEFFCACHE_SERVER_TTL_SECOND", "12")
    with pytest.raises(SetupError, match="did you mean NEFFCACHE_SERVER_TTL_SECONDS"):
        load_settings()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("PORT", "http", "NEFFCACHE_SERVER_PORT"),
        ("PORT", "70000", "NEFFCACHE_SERVER_PORT"),
        ("LOG_LEVEL", "loud", "debug, info"),
        ("PROVISIONAL_SECONDS", "31", "must not be larger than ttl_seconds"),
    ],
)
def test_unusable_value_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: str
) -> None:
    monkeypatch.setenv(f"NEFFCACHE_SERVER_{name}", value)
    with pytest.raises(SetupError, match=words):
        load_settings()
