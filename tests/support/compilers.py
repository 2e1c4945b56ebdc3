"""Stand-ins for neuronx-cc: small programs that count their runs and misbehave on request.

A compiler is a folder to put on PATH. Every run appends a line to `runs`, every process of it its pid to `pids`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import neffcache_client

CLIENT_PATH = str(Path(next(iter(neffcache_client.__path__))).parent)

_PROGRAM = """#!{python} -IS
import os, signal, sys, time
sys.path.append({client!r})
O = {options!r}
if "FAKE_COMPILER" in os.environ:
    import json
    O.update(json.loads(os.environ["FAKE_COMPILER"]))

def note(name, text):
    fd = os.open(os.path.join(O["folder"], name), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, (text + "\\n").encode())
    os.close(fd)

def spew(fd, size):
    line = (b"x" * 99 + b"\\n") * 1000
    while size > 0:
        part = line[:size]
        while part:
            part = part[os.write(fd, part):]
        size -= len(line)

def wait_for_gate():
    while O["gate"] and not os.path.exists(O["gate"]):
        time.sleep(0.01)

def option(name):
    for i, a in enumerate(sys.argv):
        if a == name:
            return sys.argv[i + 1]
        if a.startswith(name + "="):
            return a[len(name) + 1:]

if "--version" in sys.argv:
    note("versions", "1")
    print("NeuronX Compiler version " + O["version"])
    print("\\nPython version 3.11")
    sys.exit(0)
if "compile" not in sys.argv:
    print("sub-command", *sys.argv[1:])
    print("warning: on stderr", file=sys.stderr)
    sys.exit(3)

note("runs", " ".join(sys.argv[1:]))
note("pids", str(os.getpid()))
note("environ", repr(dict(os.environ)))
out = option("--output")
if O["leave_grandchild"]:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            note("pids", str(os.getpid()))
            while True:
                time.sleep(60)
        os._exit(0)
    os.wait()
spew(1, O["stdout_bytes"])
spew(2, O["stderr_bytes"])
if O["stdout"]:
    sys.stdout.write(O["stdout"]); sys.stdout.flush()
if O["stderr"]:
    sys.stderr.write(O["stderr"]); sys.stderr.flush()
if O["partial"]:
    with open(out, "wb") as f:
        f.write(b"half of a NEFF")
note("started", "1")
time.sleep(O["seconds"])
wait_for_gate()
while O["endless"]:
    time.sleep(60)
if O["kill_self"]:
    os.kill(os.getpid(), O["kill_self"])
    time.sleep(60)
if O["exit_code"] == 0 and O["output"] == "neff":
    import hashlib, json
    from neffcache_client.neff import pack_neff
    source = next(a for a in sys.argv[sys.argv.index("compile") + 1:] if os.path.isfile(a))
    with open(source, "rb") as f:
        digest = hashlib.sha256(f.read()).hexdigest()
    members = {{
        "info.json": json.dumps({{"tool_version": O["version"], "name": "file.neff", "num_tpb": 1}}).encode(),
        "kelf-0.json": b'{{"target": "cayman"}}',
        "sg00/program": digest.encode() + hashlib.shake_256(digest.encode()).digest(O["neff_bytes"]),
    }}
    data = pack_neff(members, uuid=os.urandom(16))
    with open(out, "wb") as f:
        f.write(data[:len(data) - O["cut"]])
elif O["exit_code"] == 0 and O["output"]:
    with open(out, "w") as f:
        f.write(O["output"])
sys.exit(O["exit_code"])
"""

_DEFAULTS: dict[str, Any] = {
    "version": "2.99.1.0+0123abcd",
    "seconds": 0.0,
    "gate": None,
    "stdout": "",
    "stderr": "",
    "stdout_bytes": 0,
    "stderr_bytes": 0,
    "exit_code": 0,
    "output": "neff",
    "neff_bytes": 1000,
    "partial": False,
    "cut": 0,
    "kill_self": 0,
    "endless": False,
    "leave_grandchild": False,
}


class Behaviour:
    """How one compiler behaves on one host: `env` for that host's ranks, and what ran there.

    Two FakeCompilers with other options are two compilers, whose results nobody shares.
    """

    def __init__(self, folder: Path, **options: Any) -> None:
        unknown = set(options) - set(_DEFAULTS)
        assert not unknown, unknown
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        values = {"folder": str(folder), **options}
        if values.get("gate"):
            values["gate"] = str(values["gate"])
        self.env = {"FAKE_COMPILER": json.dumps(values)}

    @property
    def runs(self) -> int:
        """How many compiles were started."""
        return len(self._lines("runs"))

    @property
    def command_lines(self) -> list[str]:
        """The arguments of each compile."""
        return self._lines("runs")

    @property
    def started(self) -> int:
        """How many compiles have come to the point where they work, wait or misbehave."""
        return len(self._lines("started"))

    @property
    def pids(self) -> list[int]:
        """Every process that any compile made."""
        return [int(line) for line in self._lines("pids")]

    def alive(self) -> list[int]:
        """Those of `pids` that still run."""
        return [pid for pid in self.pids if _runs(pid)]

    def environ(self, run: int = -1) -> dict[str, str]:
        """The environment that a compile saw."""
        found: dict[str, str] = eval(self._lines("environ")[run])
        return found

    def _lines(self, name: str) -> list[str]:
        try:
            return (self.folder / name).read_text().splitlines()
        except FileNotFoundError:
            return []


class FakeCompiler(Behaviour):
    """A folder with a `neuronx-cc` in it.

    Options: `seconds` and `gate` (a file to wait for) before it ends; `stdout`, `stderr` text and `stdout_bytes`,
    `stderr_bytes` of flood; `exit_code`; `output` = "neff", "" for none, or text to write instead; `partial` writes
    half a file first; `cut` bytes are missing at the NEFF's end; `kill_self` a signal; `endless`;
    `leave_grandchild` in a session of its own.
    """

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, **options)
        self.path = folder / "neuronx-cc"
        values = {**_DEFAULTS, "folder": str(folder), **options}
        if values["gate"]:
            values["gate"] = str(values["gate"])
        self.version: str = values["version"]
        self.path.write_text(_PROGRAM.format(python=sys.executable, client=CLIENT_PATH, options=values))
        self.path.chmod(0o755)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def environment(*path: Path | str, cache: Path, url: str | None = None, **more: str) -> dict[str, str]:
    """An environment of a rank: `path` in front of the system's, its own local folders under `cache`."""
    env = {n: v for n, v in os.environ.items() if not n.startswith(("NEFFCACHE_", "TORCH_NEURONX_", "NEURON_"))}
    env["PATH"] = os.pathsep.join([*map(str, path), "/usr/bin", "/bin"])
    env["TORCH_NEURONX_NEFF_CACHE_DIR"] = str(cache / "neff_cache")
    env["TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR"] = str(cache / "local_cache")
    if url:
        env["NEFFCACHE_URL"] = url
    return {**env, **more}
