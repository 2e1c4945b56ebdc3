"""The instructions of a serialised HloModuleProto, for its summary.

Read field by field without a schema: whatever field differs makes the digest differ. Field numbers are those of
xla/service/hlo.proto and xla/xla_data.proto, see `hlo`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from neffcache_client.graph_summary import Op, clip, path_tail, short_digest

from neffcache_hook.key.hlo import NotHlo, _skip_field, _varint

_COMPUTATIONS, _INSTRUCTIONS, _STACK_FRAMES = 3, 2, 17
_NAME, _OPCODE, _SHAPE, _METADATA, _LITERAL, _ID, _OPERANDS = 1, 2, 3, 7, 8, 35, 36
_NOT_DIGESTED = {_NAME, _METADATA, _ID, _OPERANDS, 37, 38}
"""Names, ids and what refers to ids: one instruction more would change them all."""
_ELEMENTS = {
    1: "pred",
    2: "s8",
    3: "s16",
    4: "s32",
    5: "s64",
    6: "u8",
    7: "u16",
    8: "u32",
    9: "u64",
    10: "f16",
    11: "f32",
    12: "f64",
    13: "tuple",
    16: "bf16",
    17: "token",
}
_SHOWN_ELEMENTS = 8

Value = int | bytes


def ops(data: bytes) -> list[Op]:
    """One `Op` for each instruction, in the order of the module."""
    frames = _Frames(b"".join(v for n, v in _fields(data) if n == _STACK_FRAMES and isinstance(v, bytes)))
    found: list[Op] = []
    for number, computation in _fields(data):
        if number != _COMPUTATIONS or not isinstance(computation, bytes):
            continue
        at: dict[int, tuple[int, str]] = {}
        for inner, instruction in _fields(computation):
            if inner == _INSTRUCTIONS and isinstance(instruction, bytes):
                found.append(_op(instruction, at, frames))
    return found


def _op(instruction: bytes, at: dict[int, tuple[int, str]], frames: _Frames) -> Op:
    fields = list(_fields(instruction))
    first = dict(reversed(fields))
    opcode = _words(first.get(_OPCODE))
    kept = b"".join(_stated(n, v) for n, v in fields if n not in _NOT_DIGESTED)
    index = len(at)
    identity = first.get(_ID)
    name = "%" + _words(first.get(_NAME))
    at[identity if isinstance(identity, int) else -1 - index] = (index, name)
    operands = [at.get(i, (0, "?")) for i in _numbers(fields, _OPERANDS)]
    wiring = " ".join(str(index - maker) for maker, _ in operands)
    shape = _shape(first.get(_SHAPE, b""))
    value = _literal(first[_LITERAL]) if _LITERAL in first else ""
    text = f"{name} = {shape} {opcode}({value or ', '.join(shown for _, shown in operands)})"
    file, line = frames.place(first.get(_METADATA, b""))
    return Op(opcode, short_digest(kept), short_digest(wiring), path_tail(file), line, clip(text))


def _stated(number: int, value: Value) -> bytes:
    body = value if isinstance(value, bytes) else str(value).encode()
    return b"%d:%d:" % (number, len(body)) + body


class _Frames:
    """A module's table of stack frames: how newer versions of XLA tell the source line of an instruction."""

    def __init__(self, index: bytes) -> None:
        fields = list(_fields(index))
        self._files = [_words(v) for n, v in fields if n == 1]
        self._locations = [dict(_fields(v)) for n, v in fields if n == 3 and isinstance(v, bytes)]
        self._frames = [dict(_fields(v)) for n, v in fields if n == 4 and isinstance(v, bytes)]

    def place(self, metadata: Value) -> tuple[str, int]:
        """File and line that an instruction's metadata tells; ("", 0) when it does not."""
        told = dict(_fields(metadata)) if isinstance(metadata, bytes) else {}
        file, line = _words(told.get(3)), told.get(4, 0)
        if file and isinstance(line, int):
            return file, line
        try:
            frame = self._frames[_index(told.get(15))]
            location = self._locations[_index(frame.get(1))]
            line = location.get(3, 0)
            return self._files[_index(location.get(1))], line if isinstance(line, int) else 0
        except IndexError:
            return "", 0


def _index(one_based: Value | None) -> int:
    if not isinstance(one_based, int) or one_based < 1:
        raise IndexError
    return one_based - 1


def _shape(value: Value) -> str:
    if not isinstance(value, bytes):
        return "?"
    fields = list(_fields(value))
    kind = next((v for n, v in fields if n == 2 and isinstance(v, int)), 0)
    if kind == 13:
        return "(" + ", ".join(_shape(v) for n, v in fields if n == 4) + ")"
    return f"{_ELEMENTS.get(kind, f'type{kind}')}[{','.join(str(d) for d in _numbers(fields, 3))}]"


def _literal(value: Value) -> str:
    """The elements of a small constant; of others their number and a digest."""
    if not isinstance(value, bytes):
        return "?"
    fields = list(_fields(value))
    integers = _numbers(fields, 4) + _numbers(fields, 5)
    if 0 < len(integers) <= _SHOWN_ELEMENTS:
        return ", ".join(str(i - (1 << 64) if i >= 1 << 63 else i) for i in integers)
    packed = b"".join(v for n, v in fields if n == 8 and isinstance(v, bytes))
    if 0 < len(packed) <= 4 * _SHOWN_ELEMENTS and len(packed) % 4 == 0:
        return ", ".join(f"{x:g}" for x in struct.unpack(f"<{len(packed) // 4}f", packed))
    return f"value {short_digest(value)}"


def _words(value: Value | None) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else ""


def _numbers(fields: list[tuple[int, Value]], wanted: int) -> list[int]:
    """A repeated integer field, packed or not."""
    found: list[int] = []
    for number, value in fields:
        if number != wanted:
            continue
        if isinstance(value, int):
            found.append(value)
            continue
        at = 0
        while at < len(value):
            one, at = _varint(value, at)
            found.append(one)
    return found


def _fields(message: bytes) -> Iterator[tuple[int, Value]]:
    """(number, value) of each field: integers for varints, bytes for everything else."""
    at = 0
    while at < len(message):
        tag, behind = _varint(message, at)
        end = _skip_field(message, at)
        if end > len(message):
            raise NotHlo("a field ends behind its message")
        wire = tag & 7
        if wire == 0:
            yield tag >> 3, _varint(message, behind)[0]
        else:
            yield tag >> 3, message[_varint(message, behind)[1] if wire == 2 else behind : end]
        at = end
