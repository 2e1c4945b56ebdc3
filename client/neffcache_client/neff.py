"""The NEFF container: checked before anything is published, served or handed to a runtime.

Layout (seen in files of neuronx-cc 2.23; little-endian): a header of 1024 bytes, then the payload.

    0    u64  pkg_version        2 = gzip'd tar (1 = plain tar with a SHA-256, not seen, not accepted for publishing)
    8    u64  header_size        1024
    16   u64  data_size          file size - 1024
    24   u64  neff_version_major
    32   u64  neff_version_minor
    40   char build_version[128] may be empty
    168  u32  num_tpb
    172  u8   hash[32]           [0:16] = MD5 of the payload, each 32-bit word byte-swapped; [16:32] = 0
    204  u8   uuid[16]
    220  char name[...]

There is no magic number, so the sizes are what tells a NEFF from a text file. In the tar, `info.json` holds the
compiler's full version as `tool_version` and `kelf-0.json` the target as `target`.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import struct
from collections.abc import Iterable, Mapping

from neffcache_client.errors import (
    NeffChecksumMismatch,
    NeffEmpty,
    NeffInvalid,
    NeffNotAContainer,
    NeffTruncated,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    import tarfile
    from typing import BinaryIO

HEADER_SIZE = 1024
_HEADER = struct.Struct("<5Q128sI32s16s")
_CHUNK = 1 << 20
_MAX_MEMBER = 16 << 20

TARGET_OF_ARCHITECTURE = {"cayman": "trn2"}
"""What `kelf-0.json` calls a target -> what `--target` calls it. Only pairs seen in real files."""


class NeffHeader:
    """The fixed part of a container."""

    __slots__ = ("data_size", "md5", "name", "num_tpb", "pkg_version", "uuid", "version")

    def __init__(self, raw: bytes) -> None:
        """Parse the first 1024 bytes. Raises NeffEmpty or NeffNotAContainer."""
        if not raw:
            raise NeffEmpty
        if len(raw) < HEADER_SIZE:
            raise NeffNotAContainer(f"{len(raw)} bytes are too few for a NEFF: its header alone has {HEADER_SIZE}")
        pkg, header_size, self.data_size, major, minor, _build, tpb, digest, uuid = _HEADER.unpack_from(raw)
        if header_size != HEADER_SIZE or pkg not in (1, 2):
            raise NeffNotAContainer("the file does not start with a NEFF header (it may be text or another format)")
        if pkg != 2:
            raise NeffNotAContainer(f"NEFF package version {pkg} is not supported: only version 2 can be verified")
        self.pkg_version: int = pkg
        self.version = f"{major}.{minor}"
        self.num_tpb: int = tpb
        self.md5 = _swap_words(digest[:16])
        self.uuid: str = uuid.hex()
        self.name = raw[_HEADER.size : HEADER_SIZE].split(b"\0", 1)[0].decode("utf-8", "replace")


class NeffInfo:
    """What a verified NEFF says of itself."""

    __slots__ = ("compiler_version", "name", "num_tpb", "sha256", "size", "target", "uuid")

    def __init__(
        self,
        *,
        sha256: str,
        size: int,
        compiler_version: str | None,
        target: str | None,
        name: str,
        num_tpb: int,
        uuid: str,
    ) -> None:
        self.sha256 = sha256
        self.size = size
        self.compiler_version = compiler_version
        self.target = target
        """As `--target` spells it where that is known, as the NEFF spells it otherwise."""
        self.name = name
        self.num_tpb = num_tpb
        self.uuid = uuid


class NeffChecker:
    """Checks a NEFF as its bytes pass by: `update` with each chunk, then `finish`.

    Holds no more than the header, so any size streams through in constant memory. Raises as soon as the bytes
    cannot become a valid NEFF any more.
    """

    def __init__(self) -> None:
        self.size = 0
        self.header: NeffHeader | None = None
        self._head = b""
        self._md5 = hashlib.md5(usedforsecurity=False)
        self._sha = hashlib.sha256()

    def update(self, chunk: bytes | memoryview) -> None:
        """Take the next bytes. Raises NeffInvalid early."""
        self._sha.update(chunk)
        start = 0
        if self.header is None:
            start = min(HEADER_SIZE - len(self._head), len(chunk))
            self._head += bytes(chunk[:start])
            if len(self._head) == HEADER_SIZE:
                self.header = NeffHeader(self._head)
        self.size += len(chunk)
        self._md5.update(chunk[start:])
        if self.header and self.size > HEADER_SIZE + self.header.data_size:
            raise NeffTruncated(
                f"the file is longer than its header says: {HEADER_SIZE + self.header.data_size} bytes expected"
            )

    @property
    def sha256(self) -> str:
        """SHA-256 of all bytes so far."""
        return self._sha.hexdigest()

    def finish(self) -> NeffHeader:
        """All bytes were given. Raises NeffInvalid unless length and checksum are right."""
        header = self.header or NeffHeader(self._head)
        expected = HEADER_SIZE + header.data_size
        if self.size != expected:
            raise NeffTruncated(f"the file has {self.size} bytes, its header says {expected}: it was cut short")
        if self._md5.digest() != header.md5:
            raise NeffChecksumMismatch(
                f"the payload's MD5 is {self._md5.hexdigest()}, the NEFF's header says {header.md5.hex()}: "
                "the file is damaged"
            )
        return header


def check_neff(path: str | os.PathLike[str]) -> NeffInfo:
    """Verify a NEFF file whole and read what it says of itself.

    Raises NeffInvalid (a subclass naming what is wrong) or OSError.
    """
    checker = NeffChecker()
    with open(path, "rb") as f:
        while chunk := f.read(_CHUNK):
            checker.update(chunk)
        header = checker.finish()
        f.seek(HEADER_SIZE)
        version, target = read_members(f)
    return NeffInfo(
        sha256=checker.sha256,
        size=checker.size,
        compiler_version=version,
        target=target,
        name=header.name,
        num_tpb=header.num_tpb,
        uuid=header.uuid,
    )


def read_members(payload: BinaryIO) -> tuple[str | None, str | None]:
    """(compiler version, target) from a payload positioned at its start; None where absent.

    Streams through the gzip'd tar. Raises NeffNotAContainer when the payload is no archive, OSError when it cannot
    be read.
    """
    import tarfile
    import zlib

    found: dict[str, object] = {}
    try:
        with tarfile.open(fileobj=payload, mode="r|gz") as tar:
            for member in tar:
                name = member.name.removeprefix("./")
                if name in ("info.json", "kelf-0.json") and member.isfile() and member.size <= _MAX_MEMBER:
                    found[name] = _member_json(tar, member)
                    if len(found) == 2:
                        break
    except (tarfile.TarError, zlib.error, EOFError, ValueError, RecursionError) as exc:
        raise NeffNotAContainer(f"the payload of the NEFF is not a readable archive: {exc}") from exc
    if "info.json" not in found:
        raise NeffNotAContainer("the NEFF's archive holds no info.json")
    version = _text(found["info.json"], "tool_version")
    target = _text(found.get("kelf-0.json"), "target")
    return version, TARGET_OF_ARCHITECTURE.get(target, target) if target else None


def pack_neff(members: Mapping[str, bytes], *, name: str = "file.neff", uuid: bytes = bytes(16)) -> bytes:
    """Make a container from tar members. The same members give the same bytes."""
    import gzip
    import tarfile

    tarred = io.BytesIO()
    with tarfile.open(fileobj=tarred, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for member in sorted(members):
            info = tarfile.TarInfo(member)
            info.size = len(members[member])
            tar.addfile(info, io.BytesIO(members[member]))
    payload = gzip.compress(tarred.getvalue(), compresslevel=1, mtime=0)
    digest = _swap_words(hashlib.md5(payload, usedforsecurity=False).digest())
    header = _HEADER.pack(2, HEADER_SIZE, len(payload), 2, 0, b"", 1, digest, uuid) + name.encode()
    return header.ljust(HEADER_SIZE, b"\0") + payload


def member_digests(path: str | os.PathLike[str]) -> dict[str, str]:
    """SHA-256 of every tar member: what two NEFFs are compared by, since the container carries UUID and times."""
    import tarfile
    import zlib

    digests: dict[str, str] = {}
    try:
        with open(path, "rb") as f:
            f.seek(HEADER_SIZE)
            with tarfile.open(fileobj=f, mode="r|gz") as tar:
                for member in tar:
                    stream = tar.extractfile(member)
                    if stream is None:
                        continue
                    digest = hashlib.sha256()
                    while chunk := stream.read(_CHUNK):
                        digest.update(chunk)
                    digests[member.name.removeprefix("./")] = digest.hexdigest()
    except (tarfile.TarError, zlib.error, EOFError) as exc:
        raise NeffNotAContainer(f"the payload of the NEFF is not a readable archive: {exc}") from exc
    return digests


def extract_members(path: str | os.PathLike[str], names: Iterable[str]) -> dict[str, bytes]:
    """The named tar members of a NEFF file. Raises NeffInvalid when one is missing."""
    import tarfile

    wanted = set(names)
    out: dict[str, bytes] = {}
    with open(path, "rb") as f:
        f.seek(HEADER_SIZE)
        with tarfile.open(fileobj=f, mode="r|gz") as tar:
            for member in tar:
                stream = tar.extractfile(member) if member.name in wanted else None
                if stream is not None:
                    out[member.name] = stream.read()
    if missing := wanted - set(out):
        raise NeffInvalid(f"the NEFF holds no {', '.join(sorted(missing))}")
    return out


def _member_json(tar: tarfile.TarFile, member: tarfile.TarInfo) -> object:
    stream = tar.extractfile(member)
    return json.loads(stream.read()) if stream else None


def _text(document: object, field: str) -> str | None:
    value = document.get(field) if isinstance(document, dict) else None
    return value if isinstance(value, str) and value else None


def _swap_words(digest: bytes) -> bytes:
    return struct.pack("<4I", *struct.unpack(">4I", digest))
