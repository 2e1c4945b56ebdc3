"""A `neuronx-cc` for machines without Trainium: StableHLO in, NEFF out, compiled by IREE for a baseline CPU.

    neuronx-cc [--target T] compile IN --framework XLA --target T --lnc N ... --output OUT
    neuronx-cc --version | --help

Takes the command lines of TorchNeuron; options that only mean something to the real compiler are accepted and have
no effect. Exit codes are the real compiler's: 0, or 70 with an `NCC_` code when the input or an option cannot be
compiled. The same graph gives the same NEFF on every host of one machine type, wherever its source file lies: the
code is for a baseline CPU, never for the host's own, and carries neither locations nor debug information.

This file is the whole start-up of a compile, so nothing heavy is imported at its top.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence

from neffcache_client.neff import TARGET_OF_ARCHITECTURE, pack_neff

_RECIPE = 1
"""Counts changes of this file that change what a NEFF holds: part of the version, hence of every compile key."""
_BASELINE_CPU = {"x86_64": "x86-64-v2", "aarch64": "generic"}
_MAX_SHEBANG = 127
_BYTECODE_MAGIC = b"ML\xefR"
_WITH_VALUE = {
    "--auto-cast",
    "--auto-cast-type",
    "--execute-repetition",
    "--framework",
    "--internal-hlo2tensorizer-options",
    "--lnc",
    "--logfile",
    "--logical-nc-config",
    "--model-type",
    "--optlevel",
    "--output",
    "--target",
    "--tensorizer-options",
    "--verbose",
    "--workdir",
    "-o",
}
_NOT_OPTIONS = {"--cache_dir", "--log_level", "--no_cache", "--retry_failed_compilation"}
"""Understood by the framework's wrapper only; the real compiler refuses them too."""
PROGRAM = "sg00/program.vmfb"
"""Tar member of the NEFF that holds the compiled program."""
_USAGE = """\
usage: neuronx-cc [--target TARGET] compile IN --framework XLA --target TARGET [--lnc N] [options] --output OUT
       neuronx-cc --version | --help

CPU stand-in for the AWS Neuron compiler: compiles StableHLO (bytecode or text) for this machine's CPU.
"""


class _CompileError(Exception):
    """Ends the compile with exit 70; the message starts with the code."""


def main(argv: Sequence[str] | None = None) -> int:
    """The program. Returns the exit code and never raises."""
    args = list(sys.argv[1:] if argv is None else argv)
    if "--version" in args:
        _say(f"NeuronX Compiler version {version()}\n\nCPU stand-in (IREE {_iree_version()}), not the AWS compiler")
        return 0
    if not args or args[0] in ("-h", "--help", "help") or "--help" in args:
        _say(_USAGE.rstrip())
        return 0 if args else 2
    try:
        return _compile(args)
    except _CompileError as exc:
        _complain(f"ERROR: {exc}")
        return 70
    except OSError as exc:
        # No code: a full disk or a missing folder may be gone at the next try.
        _complain(f"ERROR: {exc.strerror}: {exc.filename}" if exc.filename else f"ERROR: {exc}")
        return 70


def version() -> str:
    """Version of this compiler: names IREE's, this file's recipe and the machine type the code is for."""
    return f"0.0.{_iree_version()}.{_RECIPE}+cpustandin.{os.uname().machine}"


def install_compiler(folder: str) -> str:
    """Write an executable `neuronx-cc` into a folder (made if missing) and return its path.

    It runs this module in the Python that is running now, isolated from the caller's PYTHON* variables.
    """
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, "neuronx-cc")
    own = f"{path}.{os.getpid()}"
    with open(own, "w", encoding="utf-8") as f:
        f.write(_program_text(sys.executable))
    os.chmod(own, 0o755)
    os.replace(own, path)
    return path


def _program_text(python: str) -> str:
    line = f"#!{python} -I"
    # The rule is a `#!python` line: it tells whoever identifies the compiler which packages it runs with.
    # The kernel cuts a long one and splits it at blanks; then a shell finds a command where Python sees a string.
    if len(line) > _MAX_SHEBANG or any(c.isspace() for c in python):
        quoted = python.replace("'", "'\"'\"'")
        line = f"#!/bin/sh\n'''exec' '{quoted}' -I \"$0\" \"$@\"\n' '''"
    return f"{line}\n# {version()}\nimport sys\n\nfrom neffcache_hook.cpu.compiler import main\n\nsys.exit(main())\n"


class _Command:
    """What matters here of a `compile` command line."""

    def __init__(self, args: Sequence[str]) -> None:
        self.input = ""
        self.options: dict[str, str] = {}
        rest = list(args)
        positional: list[str] = []
        while rest:
            arg = rest.pop(0)
            name, equals, value = arg.partition("=")
            if name in _NOT_OPTIONS:
                raise _CompileError(f"[NCC_EARG001] unrecognized arguments: {arg}")
            if not arg.startswith("-"):
                positional.append(arg)
            elif equals:
                self.options[name] = value
            elif name in _WITH_VALUE:
                if not rest:
                    raise _CompileError(f"[NCC_EARG001] argument {name}: expected one argument")
                self.options[name] = rest.pop(0)
        if positional[:1] != ["compile"]:
            raise _CompileError(f"[NCC_EARG001] invalid command {(positional or ['none'])[0]!r}: expected 'compile'")
        if len(positional) < 2:
            raise _CompileError("[NCC_EARG001] the following arguments are required: the input file")
        # A third positional can only be the value of an option this compiler does not know.
        self.input = positional[1]
        self.target = self.options.get("--target", "")
        self.lnc = self.options.get("--lnc") or self.options.get("--logical-nc-config") or "1"
        self.output = self.options.get("--output") or self.options.get("-o") or "file.neff"
        if self.options.get("--framework", "XLA") != "XLA":
            raise _CompileError(f"[NCC_EARG001] invalid framework {self.options['--framework']!r}: only XLA")
        if not self.target:
            raise _CompileError("[NCC_EARG001] the following arguments are required: --target")


def _compile(args: Sequence[str]) -> int:
    started = time.perf_counter()
    command = _Command(args)
    try:
        with open(command.input, "rb") as f:
            source = f.read()
    except FileNotFoundError:
        raise _CompileError(f"[NCC_EARG001] input file not found: {command.input}") from None
    exit_code = 70
    try:
        _check_source(source, command.input)
        neff = _pack(_run_iree(source), command)
        with open(command.output, "wb") as f:
            f.write(neff)
        exit_code = 0
    finally:
        _log(source, time.perf_counter() - started, exit_code)
    _say("Compiler status PASS")
    return 0


def _check_source(source: bytes, path: str) -> None:
    if source.startswith(_BYTECODE_MAGIC):
        return
    text = source[:4096].decode("utf-8", "replace")
    if "\0" in text or not re.search(r"^\s*(module|func\.func|#\w+ *=|//)", text, re.M):
        raise _CompileError(
            f"[NCC_EARG001] {os.path.basename(path)} is not StableHLO. The CPU stand-in compiles StableHLO bytecode "
            "and text; HLO protobufs (*.pb) are not supported by it"
        )


def _run_iree(source: bytes) -> bytes:
    """StableHLO -> program. Raises _CompileError with what IREE said, in one line."""
    machine = os.uname().machine
    if machine not in _BASELINE_CPU:
        raise _CompileError(f"[NCC_EARG001] the CPU stand-in has no baseline for {machine} machines")
    command = [
        _iree_compile(),
        "-",
        "--iree-input-type=stablehlo",
        "--iree-input-demote-f64-to-f32=false",
        "--iree-hal-target-device=local",
        "--iree-hal-local-target-device-backends=llvm-cpu",
        f"--iree-llvmcpu-target-triple={machine}-unknown-linux-gnu",
        f"--iree-llvmcpu-target-cpu={_BASELINE_CPU[machine]}",
        # Both carry paths and process ids.
        "--iree-llvmcpu-debug-symbols=false",
        "--iree-vm-bytecode-module-strip-source-map",
        "--mlir-print-op-on-diagnostic=false",
        "-o",
        "-",
    ]
    done = subprocess.run(command, input=source, capture_output=True, check=False)
    if done.returncode == 0 and done.stdout:
        return done.stdout
    if done.returncode < 0:
        # Killed, most likely for memory. As the real driver reports a lost child: without a deterministic code.
        raise _CompileError(f"[F137] the compiler was killed by signal {-done.returncode}")
    raise _CompileError(_diagnosis(done.stderr.decode("utf-8", "replace")))


def _diagnosis(stderr: str) -> str:
    errors = [line.partition("error: ")[2] for line in stderr.splitlines() if "error: " in line]
    first = errors[0] if errors else (stderr.strip().splitlines() or ["no message"])[-1]
    operation = re.search(r"'((?:stablehlo|chlo|torch|vhlo)\.[\w.]+)'", " ".join(errors))
    if operation:
        return f"[NCC_EXTP003] unsupported operation {operation.group(1)}: {first}"
    return f"[NCC_EXSP001] {first}"


def _pack(program: bytes, command: _Command) -> bytes:
    """The NEFF. Holds nothing of where or when it was made, so equal inputs give equal bytes."""
    import hashlib

    architecture = {t: a for a, t in TARGET_OF_ARCHITECTURE.items()}.get(command.target, command.target)
    info = {
        "tool_version": version(),
        "name": "file.neff",
        "num_tpb": 1,
        "lnc": command.lnc,
        "machine": os.uname().machine,
        "note": "CPU stand-in: runs on a CPU of this machine type, not on Trainium",
    }
    members = {
        PROGRAM: program,
        "info.json": json.dumps(info, sort_keys=True).encode(),
        "kelf-0.json": json.dumps({"target": architecture}).encode(),
        "neff.json": json.dumps({"nodes": [{"name": "sg00", "program": PROGRAM}]}).encode(),
    }
    digest = hashlib.sha256()
    for name in sorted(members):
        digest.update(name.encode() + b"\0" + members[name])
    return pack_neff(members, uuid=digest.digest()[:16])


def _iree_version() -> str:
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("iree-base-compiler")
    except PackageNotFoundError:
        return "none"


def _iree_compile() -> str:
    from importlib.util import find_spec

    # The package's folder, not the package: importing it loads 300 MB of bindings that a child process has anyway.
    iree = find_spec("iree")
    for folder in (iree.submodule_search_locations or ()) if iree else ():
        path = os.path.join(folder, "compiler", "_mlir_libs", "iree-compile")
        if os.access(path, os.X_OK):
            return path
    raise _CompileError("[NCC_EARG001] IREE's compiler is not installed: pip install neffcache[demo]")


def _log(source: bytes, seconds: float, exit_code: int) -> None:
    path = os.environ.get("NEFFCACHE_CPU_COMPILER_LOG")
    if not path:
        return
    import hashlib

    line = {
        "time": round(time.time(), 3),
        "pid": os.getpid(),
        "input": hashlib.sha256(source).hexdigest(),
        "seconds": round(seconds, 3),
        "exit": exit_code,
    }
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(fd, (json.dumps(line) + "\n").encode())
    finally:
        os.close(fd)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _complain(text: str) -> None:
    sys.stderr.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
