"""The NEFF container check: what is not a whole, undamaged NEFF never gets further."""

from __future__ import annotations

from pathlib import Path

import pytest
from neffcache_client.errors import (
    NeffChecksumMismatch,
    NeffEmpty,
    NeffInvalid,
    NeffNotAContainer,
    NeffTruncated,
)
from neffcache_client.neff import (
    HEADER_SIZE,
    NeffChecker,
    check_neff,
    extract_members,
    member_digests,
    pack_neff,
)
from support.neffs import REAL_VERSION, make_neff, neff_of_size, real_neff


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_a_made_neff_says_its_compiler_and_target(tmp_path: Path) -> None:
    info = check_neff(write(tmp_path / "a.neff", make_neff(version="2.26.6360.0+6f180f47", target="cayman")))
    assert (info.compiler_version, info.target) == ("2.26.6360.0+6f180f47", "trn2")


def test_an_unknown_architecture_is_shown_as_the_neff_spells_it(tmp_path: Path) -> None:
    assert check_neff(write(tmp_path / "a.neff", make_neff(target="newchip"))).target == "newchip"


@pytest.mark.parametrize("name", ["matmul_small.neff", "matmul_large.neff"])
def test_a_real_neff_is_accepted(name: str) -> None:
    info = check_neff(real_neff(name))
    assert (info.compiler_version, info.target, info.num_tpb) == (REAL_VERSION, "trn2", 1)


@pytest.mark.parametrize("name", ["matmul_small.neff", "matmul_large.neff"])
def test_a_real_neff_with_one_flipped_bit_is_refused_wherever_it_is(name: str, tmp_path: Path) -> None:
    data = real_neff(name).read_bytes()
    for offset in (HEADER_SIZE, HEADER_SIZE + 1, len(data) // 2, len(data) - 1):
        damaged = bytearray(data)
        damaged[offset] ^= 1
        with pytest.raises(NeffChecksumMismatch, match="damaged"):
            check_neff(write(tmp_path / "bad.neff", bytes(damaged)))


@pytest.mark.parametrize(
    ("data", "error", "says"),
    [
        (b"", NeffEmpty, "empty"),
        (b"ERROR: the compiler was here\n", NeffNotAContainer, "too few"),
        (b"log line\n" * 1000, NeffNotAContainer, "does not start with a NEFF header"),
        (make_neff()[:-1], NeffTruncated, "cut short"),
        (make_neff()[:HEADER_SIZE], NeffTruncated, "cut short"),
        (make_neff() + b"x", NeffTruncated, "longer"),
    ],
)
def test_each_kind_of_bad_file_has_its_own_message(
    data: bytes, error: type[NeffInvalid], says: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=says):
        check_neff(write(tmp_path / "bad.neff", data))


def test_a_checksummed_payload_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    good = make_neff()
    bad = bytearray(pack_neff({}))
    assert len(good) > len(bad)
    with pytest.raises(NeffNotAContainer, match=r"info\.json"):
        check_neff(write(tmp_path / "bad.neff", bytes(bad)))


def test_streaming_in_any_pieces_gives_the_same_verdict() -> None:
    data = neff_of_size(100_000)
    for piece in (1000, 1023, 1024, 1025, 65536):
        checker = NeffChecker()
        for start in range(0, len(data), piece):
            checker.update(data[start : start + piece])
        assert checker.finish().data_size == len(data) - HEADER_SIZE
        assert checker.size == len(data)


def test_members_can_be_compared_and_read(tmp_path: Path) -> None:
    one = write(tmp_path / "one.neff", make_neff(uuid=1))
    two = write(tmp_path / "two.neff", make_neff(uuid=2))
    other = write(tmp_path / "other.neff", make_neff(payload=b"other"))
    assert one.read_bytes() != two.read_bytes()
    assert member_digests(one) == member_digests(two) != member_digests(other)
    assert extract_members(one, ["sg00/program.bin"]) == {"sg00/program.bin": b"program"}
    with pytest.raises(NeffInvalid, match="absent"):
        extract_members(one, ["absent"])
