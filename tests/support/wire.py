"""Protobuf at the level of bytes, for tests that change one field of a serialised HLO module."""

from __future__ import annotations

from collections.abc import Callable, Iterator

# (field number, wire type, value): an int for varints, bytes for everything else.
Field = tuple[int, int, "int | bytes"]
Message = list[Field]

COMPUTATIONS, INSTRUCTIONS, METADATA, SHAPE, LITERAL = 3, 2, 7, 3, 8

NAMES = {
    1: "name",
    2: "opcode",
    8: "constant",
    14: "dimensions",
    15: "window",
    16: "convolution dimensions",
    26: "channel id",
    28: "custom-call target",
    30: "dot dimensions",
    36: "operands",
    38: "called computations",
    40: "sharding",
    43: "config",
    49: "replica groups",
    51: "precision",
    52: "permutation",
    63: "comparison",
    87: "device list",
}
SHAPE_NAMES = {2: "dtype", 3: "shape", 4: "tuple shape", 5: "layout"}
MODULE_NAMES = {2: "entry name", 4: "program shape", 6: "entry id", 8: "alias", 12: "sharding", 14: "sharding"}


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at


def _to_varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def decode(data: bytes) -> Message:
    """The fields of a message in order. Raises IndexError or ValueError where it is none."""
    fields: Message = []
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, at = _varint(data, at)
            fields.append((number, wire, value))
            continue
        length = {1: 8, 5: 4}.get(wire, 0)
        if wire == 2:
            length, at = _varint(data, at)
        elif not length:
            raise ValueError(f"wire type {wire}")
        fields.append((number, wire, data[at : at + length]))
        at += length
    return fields


def encode(message: Message) -> bytes:
    """The bytes of a message."""
    out = bytearray()
    for number, wire, value in message:
        out += _to_varint(number << 3 | wire)
        if isinstance(value, int):
            out += _to_varint(value)
        else:
            out += (_to_varint(len(value)) if wire == 2 else b"") + value
    return bytes(out)


def text(number: int, value: str | bytes) -> Field:
    """A field that holds text or a message."""
    return (number, 2, value.encode() if isinstance(value, str) else value)


def map_instructions(module: bytes, change: Callable[[int, Message], Message]) -> bytes:
    """`module` with each instruction passed through `change(index, fields)`."""
    count = 0
    changed = []
    for number, wire, value in decode(module):
        if number == COMPUTATIONS and isinstance(value, bytes):
            computation = []
            for inner, inner_wire, body in decode(value):
                if inner == INSTRUCTIONS and isinstance(body, bytes):
                    body = encode(change(count, decode(body)))
                    count += 1
                computation.append((inner, inner_wire, body))
            value = encode(computation)
        changed.append((number, wire, value))
    return encode(changed)


def instructions(module: bytes) -> int:
    """How many instructions there are."""
    seen: list[int] = []
    map_instructions(module, lambda index, fields: seen.append(index) or fields)  # type: ignore[func-returns-value]
    return len(seen)


def _bumped(value: int | bytes) -> int | bytes:
    if isinstance(value, int):
        return value ^ 1
    return value[:-1] + bytes([value[-1] ^ 1]) if value else b"\x01"


Change = tuple[str, Callable[[], bytes]]


def meaningful_changes(module: bytes) -> Iterator[Change]:
    """(what is changed, a maker of the changed module) for every field that is no name, number or note of the module
    itself, and no metadata: in a shape its parts one by one, elsewhere the last bit."""
    fields = decode(module)
    for at, (number, wire, value) in enumerate(fields):
        if number in MODULE_NAMES:
            changed = [*fields[:at], (number, wire, _bumped(value)), *fields[at + 1 :]]
            yield MODULE_NAMES[number], lambda changed=changed: encode(changed)  # type: ignore[misc]
    found: list[Message] = []
    map_instructions(module, lambda _, fields: found.append(fields) or fields)  # type: ignore[func-returns-value]
    for index, instruction in enumerate(found):
        yield from _instruction_changes(module, index, instruction)


def _instruction_changes(module: bytes, index: int, fields: Message) -> Iterator[Change]:
    def with_field(at: int, value: int | bytes) -> Callable[[], bytes]:
        changed = [*fields[:at], (fields[at][0], fields[at][1], value), *fields[at + 1 :]]
        return lambda: map_instructions(module, lambda i, old: changed if i == index else old)

    for at, (number, _, value) in enumerate(fields):
        if number == METADATA:
            continue
        if number != SHAPE or not isinstance(value, bytes):
            yield NAMES.get(number, f"field {number}"), with_field(at, _bumped(value))
            continue
        shape = decode(value)
        for part, (inner, wire, content) in enumerate(shape):
            changed = [*shape[:part], (inner, wire, _bumped(content)), *shape[part + 1 :]]
            yield SHAPE_NAMES.get(inner, f"shape field {inner}"), with_field(at, encode(changed))
