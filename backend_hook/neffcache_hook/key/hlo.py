"""HLO protobuf in a canonical form.

Only the fields that are dropped, looked into or put in order are declared; everything else stays where protobuf
keeps what it does not know, byte for byte and in order, so that a field of tomorrow's XLA is hashed as well. Field
numbers: xla/service/hlo.proto (HloModuleProto, HloComputationProto, HloInstructionProto, HloScheduleProto) and
xla/xla_data.proto (OpMetadata, FrontendAttributes) of openxla/xla as of 2026; the numbers of OpMetadata that XLA
retired (6, 7, 11, 13, 14) stay in, since one of them used to ask for a layout to be preserved.

Dropped: of the module the name (1), id (5), profile_info (13) and stack_frame_index (17); of an instruction's
metadata the fields of `_METADATA`. Instruction names, ids and order stay.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import Any

from neffcache_hook.key.nki import References, canonical_config

NAME = "hlo-1"
"""Changes whenever the canonical form does, together with the recipe."""

# Through importlib: the library comes without types, and may be missing altogether, which the caller handles.
_descriptor_pb2: Any = importlib.import_module("google.protobuf.descriptor_pb2")
_descriptor_pool: Any = importlib.import_module("google.protobuf.descriptor_pool")
_message_factory: Any = importlib.import_module("google.protobuf.message_factory")
_DecodeError: Any = importlib.import_module("google.protobuf.message").DecodeError
_F = _descriptor_pb2.FieldDescriptorProto

_METADATA = {
    1: "op_type",
    2: "op_name",
    3: "source_file",
    4: "source_line",
    5: "profile_type",
    8: "size_of_generated_code_in_bytes",
    9: "size_of_memory_working_set_in_bytes",
    10: "profile_info",
    12: "deduplicated_name",
    15: "stack_frame_id",
    16: "scheduling_name",
    17: "source_end_line",
    18: "source_column",
    19: "source_end_column",
}
_METADATA_BYTES = (1, 2, 3, 10, 12, 16)
_CHUNK = 4096
_INSTRUCTION = 0x12
"""The tag of field 2, of which a computation mostly consists."""
_OPCODE = re.compile(r"[a-z][a-z0-9-]*")


class NotHlo(ValueError):
    """The bytes are no HloModuleProto."""


def _message(file: Any, name: str, fields: list[tuple[int, str, str, bool]]) -> None:
    message = file.message_type.add(name=name)
    for number, field, kind, repeated in fields:
        declared = message.field.add(name=field, number=number)
        declared.label = _F.LABEL_REPEATED if repeated else _F.LABEL_OPTIONAL
        if kind == "bytes":
            declared.type = _F.TYPE_BYTES
        elif kind == "string":
            declared.type = _F.TYPE_STRING
        elif kind == "int64":
            declared.type = _F.TYPE_INT64
        else:
            declared.type, declared.type_name = _F.TYPE_MESSAGE, f".neffcache.hlo.{kind}"


def _unknown_counter() -> Any:
    """A function telling how many undeclared fields a message holds, in whatever way this protobuf can."""
    try:
        fields = importlib.import_module("google.protobuf.unknown_fields").UnknownFieldSet
    except ImportError:
        return lambda message: len(message.UnknownFields())
    return lambda message: len(fields(message))


_unknown_fields = _unknown_counter()


def _build() -> Any:
    # proto2: presence is kept, so that a field that is set to its default stays distinct from one left out.
    file = _descriptor_pb2.FileDescriptorProto(name="neffcache/hlo.proto", package="neffcache.hlo", syntax="proto2")
    metadata = [(n, name, "bytes" if n in _METADATA_BYTES else "int64", n == 5) for n, name in _METADATA.items()]
    _message(file, "OpMetadata", metadata)
    _message(file, "Map", [(1, "entries", "bytes", True)])
    _message(
        file,
        "Instruction",
        [
            (2, "opcode", "string", False),
            (7, "metadata", "OpMetadata", False),
            (43, "backend_config", "bytes", False),
            (68, "frontend_attributes", "Map", False),
        ],
    )
    _message(file, "Computation", [(2, "instructions", "Instruction", True)])
    _message(
        file,
        "Module",
        [
            (1, "name", "bytes", False),
            (2, "entry_computation_name", "bytes", False),
            (3, "computations", "bytes", True),
            (5, "id", "int64", False),
            (7, "schedule", "Map", False),
            (13, "profile_info", "bytes", True),
            (17, "stack_frame_index", "bytes", False),
            (19, "frontend_attributes", "Map", False),
        ],
    )
    pool = _descriptor_pool.DescriptorPool()
    pool.Add(file)

    def message_class(name: str) -> Any:
        descriptor = pool.FindMessageTypeByName(f"neffcache.hlo.{name}")
        # protobuf before 4.22, which Neuron images still carry, spells it differently.
        modern = getattr(_message_factory, "GetMessageClass", None)
        return modern(descriptor) if modern else _message_factory.MessageFactory(pool).GetPrototype(descriptor)

    return message_class("Module"), message_class("Computation")


_Module, _Computation = _build()


def canonicalise(data: bytes, found: References, ops: dict[str, int]) -> bytes:
    """The canonical bytes of a serialised HloModuleProto; fills `found` and the op counts.

    Raises NotHlo for anything else, a wrapping HloProto included, and KernelUnclear.
    """
    module = _parse(_Module, data)
    _check_module(module)
    for field in ("name", "id", "profile_info", "stack_frame_index"):
        module.ClearField(field)
    for owner in ("schedule", "frontend_attributes"):
        if module.HasField(owner):
            _sort_map(getattr(module, owner))
    computations = list(module.computations)
    module.ClearField("computations")
    parts = [_serialised(module)]
    del module
    for computation in computations:
        parts.append(b"\x1a")
        parts.append(_canonicalise_computation(computation, found, ops))
    # Each part under its length, so that none can pass for the end of another.
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def _parse(kind: Any, data: bytes) -> Any:
    message = kind()
    try:
        message.ParseFromString(data)
    except _DecodeError as exc:
        raise NotHlo("no protobuf message") from exc
    return message


def _serialised(message: Any) -> bytes:
    return bytes(message.SerializeToString(deterministic=True))


def _check_module(module: Any) -> None:
    """Dropping field 1 of something that merely resembles a module would drop its contents: be strict."""
    for name in (module.name, module.entry_computation_name):
        try:
            printable = name.decode("utf-8").isprintable()
        except UnicodeDecodeError:
            printable = False
        if not printable:
            raise NotHlo("the name of the module is no text")
    if not module.entry_computation_name or not module.computations:
        raise NotHlo("no computations")


def _canonicalise_computation(computation: bytes, found: References, ops: dict[str, int]) -> bytes:
    before = sum(ops.values())
    pieces = []
    for chunk in _chunks(computation):
        message = _parse(_Computation, chunk)
        _canonicalise_instructions(message.instructions, found, ops)
        pieces.append(_serialised(message))
    if sum(ops.values()) == before:
        raise NotHlo("a computation without instructions")
    return b"".join(pieces)


def _canonicalise_instructions(instructions: Any, found: References, ops: dict[str, int]) -> None:
    for instruction in instructions:
        name = instruction.opcode
        if name in ops:
            ops[name] += 1
        elif _OPCODE.fullmatch(name):
            ops[name] = 1
        else:
            raise NotHlo("an instruction without an opcode")
        if instruction.HasField("metadata"):
            _drop_metadata(instruction)
        if instruction.HasField("backend_config"):
            config = canonical_config(instruction.backend_config, found)
            if config is not None:
                instruction.backend_config = config
        if instruction.HasField("frontend_attributes"):
            _sort_map(instruction.frontend_attributes)


def _chunks(message: bytes) -> Iterator[bytes]:
    """A message cut between fields every `_CHUNK` fields: parsed whole, a graph takes eight times its size."""
    start = at = count = 0
    size = len(message)
    while at < size:
        if message[at] == _INSTRUCTION and at + 2 < size and message[at + 1] < 0x80:
            at += 2 + message[at + 1]
        else:
            at = _skip_field(message, at)
        count += 1
        if count == _CHUNK:
            yield message[start:at]
            start, count = at, 0
    yield message[start:]


def _skip_field(data: bytes, at: int) -> int:
    """Where the field at `at` ends; past the end of truncated data, which the parser then refuses."""
    tag, at = _varint(data, at)
    wire = tag & 7
    if wire == 2:
        length, at = _varint(data, at)
        return at + length
    if wire == 0:
        return _varint(data, at)[1]
    if wire in (1, 5):
        return at + (8 if wire == 1 else 4)
    raise NotHlo("a field of unknown kind")


def _drop_metadata(instruction: Any) -> None:
    """Drop the fields of `_METADATA`; a field that is not among them stays."""
    metadata = instruction.metadata
    if _unknown_fields(metadata):
        for field, _ in metadata.ListFields():
            metadata.ClearField(field.name)
    else:
        instruction.ClearField("metadata")


def _sort_map(owner: Any) -> None:
    """Put a map's entries in the order of their keys; entries with one key keep theirs, since the last one counts."""
    entries = owner.entries
    if len(entries) > 1:
        ordered = sorted(entries, key=_entry_key)
        del entries[:]
        entries.extend(ordered)


def _entry_key(entry: bytes) -> bytes:
    """The bytes of field 1 at the front of a map entry; the whole entry where something else comes first."""
    if entry[:1] == b"\x0a":
        length, at = _varint(entry, 1)
        return entry[: at + length]
    if entry[:1] == b"\x08":
        return entry[: _varint(entry, 1)[1]]
    return entry


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    return value, at
