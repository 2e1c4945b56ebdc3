"""Mutations of real graphs and commands: what must keep the key keeps it, what must change it changes it."""

from __future__ import annotations

import collections
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from neffcache_hook.key import hlo, ir, mlir
from neffcache_hook.key.identity import CompilerIdentity
from support import wire
from support.corpus import corpus
from support.keys import Keys, in_process

Mutation = tuple[str, bytes]


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus(tmp_path_factory)


class Tally:
    """Counts by kind of mutation; those that went the wrong way are kept by name."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []

    def add(self, kind: str, right: bool, where: str) -> None:
        self.counts[kind] += 1
        if not right:
            self.wrong.append(f"{where}: {kind}")

    def show(self, title: str) -> None:
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(self.counts.items()))
        print(f"\n{title}: {self.counts.total()} mutations, {len(self.wrong)} wrong\n  {kinds}")


def digest(data: bytes) -> tuple[str, str]:
    found = ir.canonicalise(data)
    return found["canonicaliser"], found["digest"]


# HLO.


def hlo_keeping(module: bytes, chance: random.Random) -> Iterator[Mutation]:
    """The same module in other words: each metadata, all of it, names, numbers, notes of the module."""

    def metadata(number: int) -> bytes:
        fields = [
            wire.text(1, f"type{number}"),
            wire.text(2, f"jit(f)/scope{number}/op"),
            wire.text(3, f"/venv{number}/lib/model.py"),
            (4, 0, number),
            (15, 0, number % 7),
            wire.text(16, f"sched{number}"),
            (17, 0, number + 1),
        ]
        return wire.encode(chance.sample(fields, chance.randint(1, len(fields))))

    def with_metadata(indexes: set[int]) -> bytes:
        def change(index: int, fields: wire.Message) -> wire.Message:
            if index not in indexes:
                return fields
            kept = [field for field in fields if field[0] != wire.METADATA]
            at = chance.randint(0, len(kept))
            return [*kept[:at], wire.text(wire.METADATA, metadata(chance.randrange(10_000))), *kept[at:]]

        return wire.map_instructions(module, change)

    count = wire.instructions(module)
    for _ in range(4):
        yield "one metadata", with_metadata({chance.randrange(count)})
    yield "all metadata", with_metadata(set(range(count)))
    yield "no metadata", wire.map_instructions(module, lambda _, fs: [f for f in fs if f[0] != wire.METADATA])
    fields = wire.decode(module)
    rest = [field for field in fields if field[0] not in (1, 5, 13, 17)]
    yield "module name", wire.encode([*rest, wire.text(1, f"jit_other.{chance.randrange(999)}")])
    yield "module id", wire.encode([*rest, (5, 0, chance.randrange(1, 10**6))])
    yield "stack frames", wire.encode([*rest, wire.text(17, wire.encode([wire.text(1, "/home/a/model.py")]))])
    yield "profile", wire.encode([*rest, wire.text(13, wire.encode([wire.text(5, "fingerprint")]))])


def keep_hlo(graphs: Path, tally: Tally) -> None:
    for path in sorted(graphs.glob("*.hlo.pb")):
        module = path.read_bytes()
        before = digest(module)
        for kind, mutated in hlo_keeping(module, random.Random(path.name)):
            tally.add(f"hlo {kind}", digest(mutated) == before, path.name)
        tally.add("hlo map order", _map_orders(module, random.Random(path.name)) == 1, path.name)


def _map_orders(module: bytes, chance: random.Random) -> int:
    """How many digests a module has under two orders of one map."""
    pairs = [wire.encode([wire.text(1, f"key{n}"), wire.text(2, f"value{n}")]) for n in range(4)]
    digests = set()
    for _ in range(2):
        chance.shuffle(pairs)
        attributes = wire.text(68, wire.encode([wire.text(1, pair) for pair in pairs]))
        digests.add(digest(wire.map_instructions(module, lambda _, fields, a=attributes: [*fields, a])))  # type: ignore[misc]
    return len(digests)


def change_hlo(graphs: Path, tally: Tally, each: int = 16) -> None:
    """A sample of every field of every module, each kind of change at least once where a module has it."""
    for path in sorted(graphs.glob("*.hlo.pb")):
        module = path.read_bytes()
        seen = {digest(module)}
        changes = list(wire.meaningful_changes(module))
        random.Random(path.name).shuffle(changes)
        first = {kind: (kind, make) for kind, make in changes}
        for kind, make in [*first.values(), *changes[: max(0, each - len(first))]]:
            mutated = make()
            if mutated != module:
                tally.add(f"hlo {kind}", digest(mutated) not in seen, path.name)


# StableHLO.


_MOVED = re.compile(r'loc\("([^"]+)":(\d+):\d+(?: to (?:\d+)?:\d+)?\)')


def mlir_keeping(source: str, plain: str) -> Iterator[Mutation]:
    yield "locations gone", plain.encode()
    yield (
        "locations moved",
        _MOVED.sub(r'loc("/elsewhere\1":1\2:7)', source).encode(),
    )
    yield "module name", re.sub(r"^module @\S+", "module @another_name", plain, flags=re.MULTILINE).encode()
    yield "value names", re.sub(r"%(\w+)", r"%renamed_\1", plain).encode()
    yield "blanks and comments", ("// a comment\n" + plain.replace("\n", "  // x\n\n")).encode()


def _plain(path: Path) -> str:
    """A module's text without locations."""
    binding, context = mlir.BINDINGS["jaxlib"]()
    with context:
        return str(binding.Module.parse(path.read_text()).operation.get_asm(enable_debug_info=False))


def keep_mlir(graphs: Path, tally: Tally) -> None:
    for path in sorted(graphs.glob("*.mlir")):
        before = digest(path.read_bytes())
        mutations = [
            *mlir_keeping(path.read_text(), _plain(path)),
            ("bytecode", path.with_suffix(".mlirbc").read_bytes()),
        ]
        for kind, mutated in mutations:
            tally.add(f"mlir {kind}", digest(mutated) == before, path.name)


def change_mlir(graphs: Path, tally: Tally, each: int = 4) -> None:
    """A number somewhere in the text, or a type: dimensions, constants, groups, channels, shardings."""
    for path in sorted(graphs.glob("*.mlir")):
        plain = _plain(path)
        before = digest(plain.encode())
        chance = random.Random(path.name)
        numbers = [m.start() for m in re.finditer(r"(?<![\w.#%])(?<!e[+-])\d", plain)]
        types = [m.span() for m in re.finditer(r"(?<=x)f32|(?<=<)f32|bf16", plain)]
        for at in chance.sample(numbers, min(each, len(numbers))):
            mutated = plain[:at] + str((int(plain[at]) + 1) % 10) + plain[at + 1 :]
            tally.add("mlir number", digest(mutated.encode()) != before, f"{path.name} at {at}")
        for start, end in chance.sample(types, min(2, len(types))):
            tally.add("mlir type", digest((plain[:start] + "f16" + plain[end:]).encode()) != before, path.name)


# Commands.

OPTIONS = {
    "--framework": ["XLA"],
    "--model-type": ["transformer", "generic"],
    "--auto-cast": ["none", "all", "matmult"],
    "--target": ["trn1", "trn2"],
    "--lnc": ["1", "2"],
    "--optlevel": ["1", "2", "3"],
}
SPELLINGS = {
    "--lnc": ["--lnc {}", "--lnc={}", "--logical-nc-config {}", "--logical-nc-config={}"],
    "--optlevel": ["-O{}", "-O {}", "--optlevel {}", "--optlevel={}"],
}
NOISE = [
    "--verbose 35",
    "--verbose=10",
    "--logfile /l{}",
    "--workdir=/w{}",
    "--retry_failed_compilation",
    "--cache_dir=/c{}",
]
ENVIRONMENT = ("HOME", "TMPDIR", "PWD", "RANK", "LOCAL_RANK", "HOSTNAME", "MASTER_PORT", "NEURON_RT_ROOT_COMM_ID")


def command(options: dict[str, str], chance: random.Random) -> list[str]:
    words = [
        chance.choice(SPELLINGS.get(name, [name + " {}", name + "={}"])).format(value)
        for name, value in options.items()
    ]
    words += [n.format(chance.randrange(9)) for n in chance.sample(NOISE, chance.randrange(4))]
    words += [f"--output /tmp/{chance.randrange(10**6)}/x.neff", "{input}"]
    chance.shuffle(words)
    front = [w for w in words if w.startswith("--target") and chance.random() < 0.3]
    return " ".join([*front, "compile", *(w for w in words if w not in front)]).split()


def keep_commands(keys: Keys, tally: Tally, runs: int = 120) -> None:
    chance = random.Random("commands")
    base = {name: values[0] for name, values in OPTIONS.items()}
    before = keys.key(b"graph", command(base, chance))
    for _ in range(runs):
        environ = {name: str(chance.random()) for name in ENVIRONMENT}
        keys.folder.joinpath("moved").mkdir(exist_ok=True)
        moved = keys.folder / "moved" / f"{chance.randrange(10**6)}.mlir"
        moved.write_bytes(b"graph")
        tally.add("command", keys.key(moved, command(base, chance), environ=environ) == before, "command")


def change_commands(keys: Keys, tally: Tally) -> None:
    chance = random.Random("commands")
    base = {name: values[0] for name, values in OPTIONS.items()}
    seen = {keys.key(b"graph", command(base, chance))}

    def add(kind: str, key: str) -> None:
        tally.add(kind, key not in seen, kind)
        seen.add(key)

    for name, values in OPTIONS.items():
        for value in values[1:]:
            add(f"option {name}", keys.key(b"graph", command({**base, name: value}, chance)))
    for number in range(20):
        add("unknown option", keys.key(b"graph", command({**base, f"--new{number}": "x"}, chance)))
        compiler = CompilerIdentity(f"2.23.{number}+3b612583", "c" * 64, "wheel")
        add("compiler version", keys.key(b"graph", command(base, chance), compiler=compiler))
        rebuilt = CompilerIdentity("2.23.6484.0+3b612583", f"{number:064x}", "wheel")
        add("compiler contents", keys.key(b"graph", command(base, chance), compiler=rebuilt))
        add("XLA_FLAGS", keys.key(b"graph", command(base, chance), environ={"XLA_FLAGS": f"--x={number}"}))


# The tests.


def test_at_least_500_mutations_keep_the_key(graphs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """UC-05, UC-07, UC-08"""
    in_process(monkeypatch)
    tally = Tally()
    keep_hlo(graphs, tally)
    keep_mlir(graphs, tally)
    keep_commands(Keys(tmp_path), tally)
    tally.show("must keep the key")
    assert tally.wrong == []
    assert tally.counts.total() >= 500


@pytest.mark.slow
def test_at_least_500_mutations_change_the_key(graphs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """UC-05, UC-08, UC-12, UC-13"""
    in_process(monkeypatch)
    tally = Tally()
    change_hlo(graphs, tally)
    change_mlir(graphs, tally)
    change_commands(Keys(tmp_path), tally)
    tally.show("must change the key")
    assert tally.wrong == []
    assert tally.counts.total() >= 500
    covered = {
        "constant",
        "shape",
        "dtype",
        "layout",
        "channel id",
        "sharding",
        "alias",
        "config",
        "custom-call target",
    }
    assert covered <= {kind.removeprefix("hlo ") for kind in tally.counts}
    assert {"hlo replica groups", "hlo device list"} & set(tally.counts)


def test_the_keeping_mutations_notice_metadata_left_in(graphs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hlo, "_drop_metadata", lambda instruction: None)
    tally = Tally()
    keep_hlo(graphs, tally)
    assert tally.wrong


def test_the_changing_mutations_notice_a_config_left_out(graphs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = hlo._canonicalise_instructions

    def forgetful(instructions: list[object], *rest: object) -> None:
        original(instructions, *rest)  # type: ignore[arg-type]
        for instruction in instructions:
            instruction.ClearField("backend_config")  # type: ignore[attr-defined]

    monkeypatch.setattr(hlo, "_canonicalise_instructions", forgetful)
    tally = Tally()
    change_hlo(graphs, tally)
    assert [wrong for wrong in tally.wrong if wrong.endswith("config")]
