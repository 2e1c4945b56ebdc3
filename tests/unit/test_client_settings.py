"""The environment of a rank holds whatever people put there."""

from __future__ import annotations

import pytest
from neffcache_client.errors import SettingsError
from neffcache_client.settings import ClientSettings, parse_bytes


@pytest.mark.parametrize("text", ["infG", "1e400g", "nanG", "inf", "²", "12x", "-1", "-1G", "G"])
def test_a_size_that_is_none_is_refused_with_its_variables_name(text: str) -> None:
    with pytest.raises(SettingsError, match="NEFFCACHE_LOCAL_MAX_BYTES="):
        parse_bytes(text, "NEFFCACHE_LOCAL_MAX_BYTES")


@pytest.mark.parametrize("text", ["²", "9" * 5000, "0", "-1", "1.5", "two"])
def test_a_number_of_compiles_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="NEFFCACHE_HOST_COMPILES="):
        ClientSettings.from_env({"NEFFCACHE_HOST_COMPILES": text})


@pytest.mark.parametrize("text", ["²", "9" * 5000, "-1", "one", "99999999999"])
def test_a_rank_that_is_no_rank_is_none(text: str) -> None:
    """The scheduler's variable, and the scheduler's to complain about."""
    assert ClientSettings.from_env({"RANK": text}).rank is None


def test_a_rank_is_a_number() -> None:
    assert ClientSettings.from_env({"RANK": "63"}).rank == 63


@pytest.mark.parametrize("around", ["\n", " ", "\r\n"])
def test_what_a_mounted_secret_has_around_it_is_no_part_of_the_token(around: str) -> None:
    """A Kubernetes secret made from a file ends with the file's last line end."""
    assert ClientSettings.from_env({"NEFFCACHE_TOKEN": f"neff_abc{around}"}).token == "neff_abc"


@pytest.mark.parametrize("token", ["neff_secret\nvalue", "neff_secreté", "neff_secret\0", "\x7fneff_secret"])
def test_a_token_that_cannot_be_sent_is_refused_and_never_shown(token: str) -> None:
    with pytest.raises(SettingsError, match="NEFFCACHE_TOKEN") as caught:
        ClientSettings.from_env({"NEFFCACHE_TOKEN": token})
    assert "secret" not in str(caught.value)


def test_a_token_may_be_a_sentence() -> None:
    """The administrator's own is whatever has 20 characters."""
    token = "correct horse battery staple"
    assert ClientSettings.from_env({"NEFFCACHE_TOKEN": token}).token == token
