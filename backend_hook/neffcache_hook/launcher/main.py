"""The launcher: what runs when a rank starts `neuronx-cc`.

On the path of a local hit this imports `os`, `hashlib`, `json`, `struct` and the project's own light modules; the
interpreter was started without `site` (`-IS`), whose `.pth` files cost more than the hit. Anything else is imported
when the local tier has no answer.

Whatever goes wrong here ends in the real compiler, as if this program did not exist; NEFFCACHE_STRICT=1 makes it
an error instead.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # built in, unknown to typeshed
import os
import sys
import time

from neffcache_client.errors import SettingsError
from neffcache_client.settings import ClientSettings, flag, vendor_cache_disabled

from neffcache_hook.launcher import find
from neffcache_hook.launcher.log import Log, complain

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import FrameType
    from typing import Any, NoReturn

    from neffcache_client.local_tier import LocalTier

    from neffcache_hook.key.command import CompileCommand
    from neffcache_hook.key.compute import ComputedKey
    from neffcache_hook.key.identity import CompilerIdentity

CACHE_FAULT_EXIT = 75
"""As in `neffcache_client.results`, which is too heavy to import here."""
STOPPING_SIGNALS = (1, 2, 3, 10, 12, 14, 15, 24)
"""HUP, INT, QUIT, USR1, USR2, ALRM, TERM, XCPU, all that ends a process unless caught: end the compile, exit 128+N.

Schedulers announce a preemption by USR1 or USR2. Those that were ignored at the start stay ignored.
"""


class Caller:
    """The process that started this launcher, watched from the first moment on."""

    __slots__ = ("fd", "pid")

    def __init__(self) -> None:
        self.pid = os.getppid()
        self.fd = -1
        try:
            self.fd = os.pidfd_open(self.pid)
        except OSError:
            return  # gone already, or a kernel before 5.3: `gone` then compares parents
        if os.getppid() != self.pid:
            # Died between the two calls, and its number may be a stranger's by now.
            os.close(self.fd)
            self.fd = -1

    def gone(self) -> bool:
        """True when the caller has died.

        It may have died before this process could look, which leaves process 1 as the parent; but in a container
        process 1 may be the caller. A pipe that nobody reads tells the two apart.
        """
        return os.getppid() != self.pid or (self.pid == 1 and _nobody_reads(1))


class Job:
    """One compile, as far as it is known before the cache is asked."""

    __slots__ = (
        "arguments",
        "caller",
        "cmd",
        "compiler",
        "computed",
        "environ",
        "identity",
        "log",
        "output",
        "settings",
        "waited",
    )

    def __init__(self, caller: Caller, argv: list[str], environ: Mapping[str, str], compiler: str) -> None:
        self.waited = 0.0
        """Seconds spent on this host's leader before the node cache was asked."""
        self.caller = caller
        self.arguments = argv
        """What the compiler is given if it runs as it is: without the wrapper-only options once they are known."""
        self.environ = environ
        self.compiler = compiler
        self.settings: ClientSettings
        self.log: Log
        self.cmd: CompileCommand
        self.output: str
        self.identity: CompilerIdentity | None = None
        self.computed: ComputedKey | None = None

    def record(self, verdict: str, **fields: Any) -> None:
        """Note what became of this compile, for `neffcache stats`."""
        from neffcache_client.records import record

        record(self.settings.tier_dir, verdict=verdict, job=self.settings.job, rank=self.settings.rank, **fields)


def _nobody_reads(fd: int) -> bool:
    import select
    import stat

    try:
        if not stat.S_ISFIFO(os.fstat(fd).st_mode):
            return False
        poll = select.poll()
        poll.register(fd, 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    except OSError:
        return False


def main(argv: list[str], site_dirs: list[str]) -> NoReturn:
    """Answer one call of `neuronx-cc`. `site_dirs`: where the packages are that a miss needs."""
    caller = Caller()
    _exit_on_signals()
    environ = os.environ
    compiler = find.real_compiler(environ.get("PATH", os.defpath), sys.argv[0])
    if compiler is None:
        complain(f"there is no {find.NAME} on PATH behind the neffcache launcher")
        os._exit(127)
    if environ.get(find.INNER) or "compile" not in argv:
        find.become(compiler, argv, environ)
    job = Job(caller, argv, environ, compiler)
    _load_site_on_demand(site_dirs)
    try:
        job.settings = ClientSettings.from_env(environ)
        job.log = Log(job.settings.tier_dir, job.settings.log)
    except SettingsError as exc:
        _without_cache(job, str(exc), strict=flag(environ, "NEFFCACHE_STRICT"))
    except Exception as exc:
        # There is no log yet, and a traceback would end the compile.
        _without_cache(job, f"a fault in neffcache: {exc!r}", strict=flag(environ, "NEFFCACHE_STRICT"))
    if not job.settings.active or vendor_cache_disabled(environ):
        find.become(compiler, argv, environ)
    try:
        code = _answer(job)
    except Exception as exc:
        job.log.exception("WARNING: a fault in neffcache itself; compiling without the cache")
        _without_cache(job, f"a fault in neffcache: {exc!r}", strict=job.settings.strict, quiet=True)
    os._exit(code)


def _answer(job: Job) -> int:
    """The exit code of a compile that the cache may answer."""
    if not _prepare(job):
        find.become(job.compiler, job.arguments, job.environ)
    if job.computed is not None and job.computed.key and _from_this_host(job, job.computed.key):
        return 0
    _without_httpx_command_line()
    from neffcache_hook.launcher import compile as slow

    return slow.serve(job)


def _prepare(job: Job) -> bool:
    """Parse, identify, compute the key. False: nothing for a cache, leave it to the compiler."""
    from neffcache_hook.key.command import parse

    cmd = parse(job.arguments, job.environ)
    if cmd is None:
        return False
    job.cmd = cmd
    job.arguments = cmd.compiler_argv
    if cmd.no_cache or not cmd.output:
        return False
    # The compiler would write through a symlink; a rename would replace it.
    job.output = os.path.realpath(cmd.output) if os.path.islink(cmd.output) else cmd.output
    if not _is_plain_file_target(job.output):
        return False
    from neffcache_hook.key.compute import compute_key
    from neffcache_hook.key.identity import IdentityUnknown, identify

    try:
        job.identity = identify(job.compiler, identity_dir(job.settings))
    except IdentityUnknown as exc:
        job.log.once(f"WARNING: {exc}; compiling without the cache")
        return True
    job.computed = compute_key(
        cmd,
        cwd=os.getcwd(),
        environ=job.environ,
        compiler=job.identity,
        index_dir=index_dir(job.settings),
    )
    return True


def identity_dir(settings: ClientSettings) -> str:
    """Where it is remembered what a compiler's `--version` printed."""
    return os.path.join(settings.tier_dir, "identity")


def index_dir(settings: ClientSettings) -> str:
    """Where it is remembered what a graph was found to be."""
    return os.path.join(settings.tier_dir, "index")


def _from_this_host(job: Job, key: str) -> bool:
    """True when the NEFF was in the local tier, or came there while another process of this host was getting it."""
    from neffcache_client.local_tier import LocalTier

    tier = LocalTier(job.settings.tier_dir, job.settings.local_max_bytes)
    if _local_hit(job, key, tier, "local"):
        return True
    from neffcache_client.host_lock import HostLock

    from neffcache_hook.launcher.follow import CallerGone, follow

    began = time.monotonic()
    lock = HostLock(job.settings.lock_dir, job.settings.namespace, key)
    try:
        came = follow(lock, job.caller, lambda: tier.contains(key))
    except CallerGone:
        job.log(f"stopping: the process that asked for this compile (pid {job.caller.pid}) has died")
        os._exit(128 + 15)
    job.waited = time.monotonic() - began
    return came and _local_hit(job, key, tier, "waited")


def _local_hit(job: Job, key: str, tier: LocalTier, verdict: str) -> bool:
    from neffcache_client.errors import LocalTierError

    try:
        artifact = tier.fetch(key, job.output)
    except LocalTierError as exc:
        # The output itself cannot be written: the compiler shall say so in its own words.
        job.log(f"WARNING: {exc}")
        return False
    if artifact is None:
        return False
    job.record(
        verdict,
        key=key,
        bytes=artifact.size,
        saved_seconds=artifact.compile_seconds,
        waited_seconds=round(job.waited, 3) or None,
        exit_code=0,
    )
    if job.settings.log:
        job.log(f"{verdict} {key[:12]} for {job.cmd.output} ({artifact.size} bytes)")
    return True


def _without_httpx_command_line() -> None:
    """httpx imports its own command line where click and rich are installed: half of its 90 ms, for nothing.

    It copes with that module's absence, and this process is nobody else's.
    """
    sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]


def _is_plain_file_target(output: str) -> bool:
    """True when `output` is a regular file or absent, in a folder that exists: a rename replaces even a device."""
    folder = os.path.dirname(output) or os.curdir
    return os.path.isdir(folder) and (os.path.isfile(output) or not os.path.lexists(output))


def _without_cache(job: Job, why: str, *, strict: bool, quiet: bool = False) -> NoReturn:
    if strict:
        complain(f"{why} (NEFFCACHE_STRICT=1, so nothing was compiled)")
        os._exit(CACHE_FAULT_EXIT)
    if not quiet:
        complain(f"{why}; compiling without the cache")
    find.become(job.compiler, job.arguments, job.environ)


def _exit_on_signals() -> None:
    """Never die by a signal: the C++ caller takes that for success. Until `compile` installs its own handling."""
    for number in STOPPING_SIGNALS:
        if _signal.getsignal(number) != _signal.SIG_IGN:
            _signal.signal(number, _exit_by_convention)


def _exit_by_convention(number: int, frame: FrameType | None) -> NoReturn:
    os._exit(128 + number)


class _SiteOnDemand:
    """A last finder that runs `site`, once, when an import fails without it."""

    def __init__(self, site_dirs: list[str]) -> None:
        self._site_dirs = site_dirs

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if path is not None:
            return None  # a module missing in a package that was found: no path of ours would help
        sys.meta_path.remove(self)
        import site
        from importlib.machinery import PathFinder

        site.main()
        # With `-I` the user's site-packages stay out, though the package itself may live there.
        sys.path += [folder for folder in self._site_dirs if folder not in sys.path]
        return PathFinder.find_spec(name)


def _load_site_on_demand(site_dirs: list[str]) -> None:
    if sys.flags.no_site:
        sys.meta_path.append(_SiteOnDemand(site_dirs))
