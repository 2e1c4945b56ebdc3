"""Putting the launcher in front of the compiler: what `neffcache run` and the torch auto-load share.

Runs inside the user's training process, so it is quick, imports little and changes nothing but four environment
variables.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from neffcache_client.settings import BY_COMPILER, ClientSettings, unknown_variables, vendor_cache_disabled

from neffcache_hook.launcher import find
from neffcache_hook.launcher.log import Log
from neffcache_hook.launcher.shim import ShimUnusable, make_shim

VENDOR_DIR = "TORCH_NEURONX_NEFF_CACHE_DIR"
LOCAL_DIR = "NEFFCACHE_LOCAL_DIR"
LAUNCHER_DIR = "NEFFCACHE_LAUNCHER_DIR"


class Activation:
    """What came of it. `problem` is for the user's eyes, `note` for the log."""

    __slots__ = ("active", "note", "problem")

    def __init__(self, active: bool, *, note: str | None = None, problem: str | None = None) -> None:
        self.active = active
        self.note = note
        self.problem = problem


def activate(environ: MutableMapping[str, str]) -> Activation:
    """Point PATH and the vendor's cache folder in `environ` at neffcache. Doing it again changes nothing.

    Raises SettingsError for settings that cannot be used, with `environ` as it was.
    """
    if not environ.get("NEFFCACHE_URL"):
        return Activation(False, note="NEFFCACHE_URL is not set")
    _forget_stale_local_dir(environ)
    settings = ClientSettings.from_env(environ)
    log = Log(settings.tier_dir, settings.log)
    done = _activate(environ, settings)
    for name in unknown_variables(environ):
        log(f"WARNING: {name} is set but means nothing to neffcache: a typing error?")
    if done.problem or done.note:
        log(f"{'WARNING: ' if done.problem else ''}{done.problem or done.note}")
    return done


def _activate(environ: MutableMapping[str, str], settings: ClientSettings) -> Activation:
    if not settings.active:
        return Activation(False)
    if vendor_cache_disabled(environ):
        return Activation(False, note="the vendor's cache is switched off, so neffcache is too")
    path = environ.get("PATH", os.defpath)
    compiler = find.real_compiler(path)
    if compiler is None:
        return Activation(False, note=f"there is no {find.NAME} on PATH: nothing to put the launcher in front of")
    from neffcache_hook.key.identity import IdentityUnknown, identify

    try:
        identity = identify(compiler, os.path.join(settings.tier_dir, "identity"))
        folder = make_shim(environ)
    except (IdentityUnknown, ShimUnusable) as exc:
        return Activation(False, problem=f"{exc}; compiling without the cache")
    from neffcache_hook.key.compute import unseen_by_vendor

    environ[LOCAL_DIR] = settings.cache_dir
    # The vendor's cache answers before the launcher is asked, and its key lacks these: each has a folder of its own.
    parts = [identity.text, unseen_by_vendor(environ)]
    environ[VENDOR_DIR] = os.path.join(settings.cache_dir, BY_COMPILER, "-".join(filter(None, parts)))
    environ[LAUNCHER_DIR] = folder
    environ["PATH"] = os.pathsep.join([folder, *_others(path, folder)])
    return Activation(True)


def _others(path: str, folder: str) -> list[str]:
    return [entry for entry in path.split(os.pathsep) if entry != folder]


def _forget_stale_local_dir(environ: MutableMapping[str, str]) -> None:
    """A user who names another folder inside an active environment means that folder."""
    own, vendor = environ.get(LOCAL_DIR), environ.get(VENDOR_DIR)
    if own and vendor and os.path.dirname(vendor.rstrip("/")) != os.path.join(own, BY_COMPILER):
        del environ[LOCAL_DIR]
