"""Settings, and the folders of this host."""

from __future__ import annotations

import difflib
import os
import shutil
from collections.abc import Iterator, Mapping

from neffcache_client.checkup.finding import Finding, fail, ok, warn
from neffcache_client.cli.output import size
from neffcache_client.errors import SettingsError
from neffcache_client.settings import (
    DEFAULT_CACHE_DIR,
    DEFAULT_LOCK_DIR,
    VARIABLES,
    ClientSettings,
    unknown_variables,
    vendor_cache_disabled,
)
from neffcache_client.spool import Spool

_LITTLE_SPACE = 1 << 30
# Attributes of the settings, and the variables they may come from in order.
_SOURCES = {
    "url": ("NEFFCACHE_URL",),
    "token": ("NEFFCACHE_TOKEN",),
    "namespace": ("NEFFCACHE_NAMESPACE",),
    "mode": ("NEFFCACHE_MODE",),
    "job": (
        "NEFFCACHE_JOB",
        "SLURM_JOB_ID",
        "AWS_BATCH_JOB_ID",
        "TORCHELASTIC_RUN_ID",
        "KUBERNETES_JOB_NAME",
    ),
    "rank": ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"),
    "strict": ("NEFFCACHE_STRICT",),
    "retry_failed": ("NEFFCACHE_RETRY_FAILED",),
    "log": ("NEFFCACHE_LOG",),
    "local_max_bytes": ("NEFFCACHE_LOCAL_MAX_BYTES",),
    "host_compiles": ("NEFFCACHE_HOST_COMPILES",),
    "cache_dir": ("NEFFCACHE_LOCAL_DIR", "TORCH_NEURONX_NEFF_CACHE_DIR"),
    "lock_dir": ("TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR",),
}
_UNSET = {"log": "a file per host in the local folder", "local_max_bytes": "no bound", "host_compiles": "no bound"}


def read_settings(env: Mapping[str, str]) -> tuple[ClientSettings | None, list[Finding]]:
    """The settings, None when they cannot be used, and what there is to say about them."""
    findings = list(_unknown(env))
    try:
        settings = ClientSettings.from_env(env)
    except SettingsError as exc:
        return None, [*findings, fail("settings", str(exc), "correct the variable")]
    findings += [ok(name, _shown(settings, name, env)) for name in _SOURCES if name != "url"]
    if settings.url:
        findings.append(ok("url", _shown(settings, "url", env)))
    else:
        todo = "export NEFFCACHE_URL=http://host:8765"
        findings.append(fail("url", "NEFFCACHE_URL is not set, so neffcache does nothing", todo))
    return settings, findings + list(_switches(settings, env))


def _unknown(env: Mapping[str, str]) -> Iterator[Finding]:
    for name in unknown_variables(env):
        near = difflib.get_close_matches(name, VARIABLES, n=1, cutoff=0.75)
        todo = f"did you mean {near[0]}?" if near else "unset it; docs/settings.md has the names"
        yield fail("variables", f"{name} means nothing to neffcache", todo)


def _switches(settings: ClientSettings, env: Mapping[str, str]) -> Iterator[Finding]:
    if settings.mode == "off":
        yield fail("mode", "NEFFCACHE_MODE=off switches the cache off", "unset NEFFCACHE_MODE")
    if vendor_cache_disabled(env):
        todo = "unset TORCH_NEURONX_NEFF_DISABLE_CACHE and TORCH_NEURONX_DISABLE_NEFF_CACHE"
        yield fail("vendor cache", "the vendor's cache is switched off, and neffcache with it", todo)


def _shown(settings: ClientSettings, name: str, env: Mapping[str, str]) -> str:
    value = getattr(settings, name)
    source = next((v for v in _SOURCES[name] if env.get(v)), None)
    if name == "token":
        text = "set" if value else "none"
    elif value is None:
        text = _UNSET.get(name, "none")
    else:
        text = str(value)
    return f"{text} ({source or 'default'})"


def check_folders(settings: ClientSettings, env: Mapping[str, str]) -> Iterator[Finding]:
    """Can the local folder and the lock folder be used, and is anything left behind in them?"""
    yield _writable("local folder", settings.tier_dir)
    lock_dir = os.path.join(settings.lock_dir, "neffcache")
    finding = _writable("lock folder", lock_dir)
    if finding.status == "FAIL":
        finding = warn("lock folder", finding.text, "without it every rank of the host asks the server for itself")
    yield finding
    if not any(env.get(n) for n in ("NEFFCACHE_LOCAL_DIR", "TORCH_NEURONX_NEFF_CACHE_DIR")):
        todo = (
            "name a folder that outlives the container in TORCH_NEURONX_NEFF_CACHE_DIR to start warm without network"
        )
        yield warn("local folder", f"{DEFAULT_CACHE_DIR} is the default, and often gone after a restart", todo)
    if settings.lock_dir == DEFAULT_LOCK_DIR and settings.cache_dir.startswith(DEFAULT_LOCK_DIR + "/"):
        yield warn("lock folder", "the local folder lies inside it", "name another TORCH_NEURONX_NEFF_CACHE_DIR")
    waiting = len(Spool(settings.tier_dir))
    if waiting:
        yield warn("spool", f"{waiting} compiled NEFFs wait for upload", "neffcache push")


def _writable(name: str, folder: str) -> Finding:
    probe = os.path.join(folder, f".doctor-{os.getpid()}")
    try:
        os.makedirs(folder, exist_ok=True)
        with open(probe, "wb") as f:
            f.write(b"doctor")
        os.unlink(probe)
        free = shutil.disk_usage(folder).free
    except OSError as exc:
        return fail(name, f"{folder} cannot be written: {exc.strerror}", "make it writable or name another")
    if free < _LITTLE_SPACE:
        return warn(name, f"{folder} is writable, only {size(free)} are free", "make room, or set a bound")
    return ok(name, f"{folder} is writable, {size(free)} free")
