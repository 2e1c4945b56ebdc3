"""NEFFs of an exact size, made fast and in constant memory."""

from __future__ import annotations

import hashlib
import io
import os
import struct
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from neffcache_client.neff import HEADER_SIZE, pack_neff

_BLOCK = 65535
_MIB = 1 << 20
MIN_SIZE = 16 * 1024


def write_neff(path: Path, size: int) -> None:
    """A valid NEFF of exactly `size` bytes, at least 16 KiB. No two are alike."""
    room = size - HEADER_SIZE
    # A gzip member of stored blocks: its length follows from that of its content, the rest goes into its file name.
    content = (room - 4096) // (_BLOCK + 5) * _BLOCK or room - 4096
    content -= content % 512
    blocks = -(-content // _BLOCK)
    name = room - (10 + 1 + 8 + 5 * blocks + content)
    with path.open("wb") as file:
        file.write(bytes(HEADER_SIZE))
        md5 = hashlib.md5(usedforsecurity=False)
        for piece in _gzip(content, name):
            md5.update(piece)
            file.write(piece)
        assert file.tell() == size, (file.tell(), size)
        file.seek(0)
        file.write(_header(room, md5.digest()))


def _header(room: int, md5: bytes) -> bytes:
    model = bytearray(pack_neff({"info.json": b"{}"}, uuid=os.urandom(16))[:HEADER_SIZE])
    struct.pack_into("<Q", model, 16, room)
    at = struct.calcsize("<5Q128sI")
    model[at : at + 16] = struct.pack("<4I", *struct.unpack(">4I", md5))
    return bytes(model)


def _gzip(content: int, name: int) -> Iterator[bytes]:
    yield b"\x1f\x8b\x08\x08" + bytes(6) + b"n" * name + b"\0"
    crc = 0
    left = content
    for piece in _tar(content):
        crc = zlib.crc32(piece, crc)
        left -= len(piece)
        yield struct.pack("<BHH", left == 0, len(piece), len(piece) ^ 0xFFFF) + piece
    yield struct.pack("<II", crc, content & 0xFFFFFFFF)


def _tar(content: int) -> Iterator[bytes]:
    """Tar members that fill `content` bytes, in pieces of a block."""
    head = io.BytesIO()
    with tarfile.open(fileobj=head, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for member, text in (
            ("info.json", b'{"tool_version": "2.26.0+abc"}'),
            ("kelf-0.json", b'{"target": "cayman"}'),
        ):
            info = tarfile.TarInfo(member)
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text))
    start = head.getvalue()[: 4 * 512]
    program = tarfile.TarInfo("sg00/program.bin")
    program.size = content - len(start) - 512 - 1024
    start += program.tobuf(tarfile.GNU_FORMAT)
    noise = os.urandom(_MIB)
    pending = bytearray(start)
    made = len(start)
    while made < content - 1024:
        piece = noise[: min(_MIB, content - 1024 - made)]
        made += len(piece)
        pending += piece
        while len(pending) >= _BLOCK:
            yield bytes(pending[:_BLOCK])
            del pending[:_BLOCK]
    pending += bytes(1024)
    while pending:
        yield bytes(pending[:_BLOCK])
        del pending[:_BLOCK]
