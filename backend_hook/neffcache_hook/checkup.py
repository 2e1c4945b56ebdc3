"""The hook's part of `neffcache doctor`: launcher, compiler, and what graphs are brought into one form with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, entry_points, version

from neffcache_client.checkup.finding import Finding, fail, ok, warn
from neffcache_client.errors import NeffcacheError
from neffcache_client.settings import ClientSettings

from neffcache_hook.launcher import find
from neffcache_hook.launcher.activate import activate

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_FIRST_WITH_AUTOLOAD = (2, 5)
_BINDINGS_SECONDS = 60.0


def check_hook(settings: ClientSettings, env: Mapping[str, str]) -> Iterator[Finding]:
    """Whether a compile that starts in this environment goes through neffcache, and what it then finds."""
    path = env.get("PATH", os.defpath)
    yield from _compiler(settings, path)
    yield from _launcher(settings, env, path)
    yield _target(env)
    yield from _bindings()


def _compiler(settings: ClientSettings, path: str) -> Iterator[Finding]:
    from neffcache_hook.key.identity import identify

    compiler = find.real_compiler(path)
    if compiler is None:
        yield fail("compiler", f"there is no {find.NAME} on PATH", "run this where ranks run; elsewhere use --server")
        return
    try:
        identity = identify(compiler, os.path.join(settings.tier_dir, "identity"))
    except NeffcacheError as exc:
        yield fail("compiler", f"{compiler}: {exc}", "without an identity nothing is cached: mend the compiler")
        return
    yield ok("compiler", f"{compiler}, version {identity.version}")
    yield ok("compiler", f"identity {identity.text}, by {identity.kind}: equal on hosts that share NEFFs")


def _launcher(settings: ClientSettings, env: Mapping[str, str], path: str) -> Iterator[Finding]:
    yield ok("hook", f"loaded from {os.path.dirname(os.path.abspath(__file__))}, neffcache {version('neffcache')}")
    if _first_is_launcher(path):
        yield ok("launcher", "first on PATH in this environment")
        return
    if not settings.active:
        return
    done = activate(dict(env))
    if not done.active:
        reason = done.problem or done.note or "switched off"
        yield fail("launcher", f"cannot be put in front of the compiler: {reason}", "see above")
        return
    yield _autoload(env)


def _autoload(env: Mapping[str, str]) -> Finding:
    """What `import torch` will do, without importing it: that takes seconds and may claim the device."""
    run = "start programs as `neffcache run -- CMD`"
    if env.get(_AUTOLOAD, "1") == "0":
        return fail("launcher", f"{_AUTOLOAD}=0, so `import torch` does not load it", f"unset it, or {run}")
    if not entry_points(group="torch.backends", name="neffcache"):
        return fail("launcher", "its entry point is not installed for this interpreter", "install neffcache anew")
    try:
        torch = version("torch")
    except PackageNotFoundError:
        return fail("launcher", f"no torch in {sys.prefix} that would load it", run)
    numbers = tuple(int(part) for part in torch.split("+")[0].split(".")[:2] if part.isdigit())
    if numbers < _FIRST_WITH_AUTOLOAD:
        return fail("launcher", f"torch {torch} loads no back ends by itself", run)
    return ok("launcher", f"`import torch` (torch {torch}) puts it first on PATH")


def _first_is_launcher(path: str) -> bool:
    for folder in path.split(os.pathsep):
        program = os.path.join(folder or os.curdir, find.NAME)
        if os.path.isfile(program) and os.access(program, os.X_OK):
            try:
                return find.is_launcher(program)
            except OSError:
                return False
    return False


def _target(env: Mapping[str, str]) -> Finding:
    target = env.get("NEURON_PLATFORM_TARGET_OVERRIDE")
    lnc = env.get("NEURON_LOGICAL_NC_CONFIG")
    text = f"{target} (NEURON_PLATFORM_TARGET_OVERRIDE)" if target else "as each compile says"
    return ok("target", f"{text}; lnc {lnc + ' (NEURON_LOGICAL_NC_CONFIG)' if lnc else 'as each compile says'}")


def _bindings() -> Iterator[Finding]:
    """Which MLIR binding makes the canonical form here, and whether the others that are installed agree."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "neffcache_hook.key.agreement"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_BINDINGS_SECONDS,
            check=True,
        )
        digests: dict[str, str | None] = json.loads(done.stdout.splitlines()[-1])
    except (OSError, ValueError, IndexError, subprocess.SubprocessError) as exc:
        yield warn("graphs", f"the MLIR bindings cannot be tried: {exc}", "StableHLO is then hashed as it is")
        return
    working = {name: digest for name, digest in digests.items() if digest is not None}
    if not working:
        text = "no MLIR binding: StableHLO is hashed as it is, so a moved source line is a miss (HLO is not affected)"
        yield warn("graphs", text, "install one of iree-base-compiler, torch-mlir or jaxlib in the image")
        return
    yield ok("graphs", f"StableHLO is brought into its canonical form by {next(iter(working))}")
    if len(set(working.values())) > 1:
        text = f"the installed MLIR bindings disagree ({', '.join(working)}): hosts that use different ones miss"
        yield warn("graphs", text, "install the same versions in every image")
