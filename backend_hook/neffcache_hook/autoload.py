"""The `torch.backends` entry point: `import torch` alone puts the launcher first on PATH.

Loaded by every `import torch` in an environment that has this package, so without NEFFCACHE_URL it does nothing
and costs nothing, and it never raises.
"""

from __future__ import annotations

import os


def activate() -> None:
    """Called by torch. Silent unless the user asked for a cache and cannot have it; then one line on stderr."""
    if not os.environ.get("NEFFCACHE_URL"):
        return
    try:
        from neffcache_hook.launcher.activate import activate as put_launcher_first

        done = put_launcher_first(os.environ)
        problem = done.problem
        if done.active:
            _speak_at_the_end()
    except Exception as exc:
        problem = f"{exc}; compiling without the cache"
    if problem:
        _warn_once(problem)


def _speak_at_the_end() -> None:
    from neffcache_client.settings import ClientSettings

    from neffcache_hook.end_of_run import register

    register(os.environ, ClientSettings.from_env(os.environ))


def _warn_once(problem: str) -> None:
    # Worker processes inherit the environment and import torch again.
    if os.environ.get("NEFFCACHE_LAUNCHER_DIR") == "-":
        return
    os.environ["NEFFCACHE_LAUNCHER_DIR"] = "-"
    try:
        os.write(2, f"neffcache: {problem}\n".encode())
    except OSError:
        return
