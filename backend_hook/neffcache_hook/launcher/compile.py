"""What the launcher does when the local tier has no answer: ask the node cache, compile if told to.

The main thread only watches: the caller's death, signals, the end of the work. The work runs in a second thread.
Python runs signal handlers in the main thread, and one that interrupted the work while it holds an Event's lock
could not set that Event without waiting for itself.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from dataclasses import replace

from neffcache_client.admission import Ticket, wait_for_turn
from neffcache_client.errors import NeffChecksumMismatch, NeffInvalid, NeffTruncated
from neffcache_client.history import Expected
from neffcache_client.local_tier import describe, place
from neffcache_client.neff import check_neff
from neffcache_client.node_cache import CACHE_FAULT_EXIT, CompileResult, LeaseView, NodeCache, Obtained, Patience
from neffcache_client.results import failure_text

from neffcache_hook.key.compute import compute_key
from neffcache_hook.key.identity import IdentityUnknown, identify
from neffcache_hook.launcher import find
from neffcache_hook.launcher.classify import COMPILE_ERROR, Verdict, classify, out_of_memory
from neffcache_hook.launcher.compilation import Compilation, Ended
from neffcache_hook.launcher.log import complain
from neffcache_hook.launcher.main import STOPPING_SIGNALS, Job, identity_dir, index_dir
from neffcache_hook.launcher.output import Output, write_all
from neffcache_hook.launcher.private_folder import PrivateFolder

ABORT_SECONDS = 5.0
"""After this long a stopped launcher exits even if the lease could not be released; the server's TTL does it then."""
_CALLER_CHECK_SECONDS = 1.0


class CompilerNotRun(Exception):
    """No private folder could be made: the compiler has to run without us."""


class Work:
    """The way of one compile through the cache; `run` in its own thread, `stop` from the watching one."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.abort = threading.Event()
        self.exit_code: int | None = None
        """None when the real compiler has to take over."""
        self.fault: str | None = None
        self._lock = threading.Lock()
        self._folder: PrivateFolder | None = None
        self._compilation: Compilation | None = None
        self._output: Output | None = None
        self._result: CompileResult | None = None

    def run(self) -> None:
        """Do all of it. Leaves `exit_code`, and `fault` when the cache broke."""
        try:
            self.exit_code = self._through_cache() if self._key() else self._around_cache()
        except Exception as exc:
            if not self.abort.is_set():
                self.fault = repr(exc)
                self.job.log.exception("WARNING: a fault in neffcache itself; this compile goes on without the cache")
                self.exit_code = self._rescue()
        finally:
            self._end_compiler()
        if self._output is not None and self.exit_code is not None and not self.abort.is_set():
            self._output.deliver()

    def stop(self) -> None:
        """Stop waiting, end the compiler."""
        self.abort.set()
        self._end_compiler()

    def clean_up(self) -> None:
        """Remove what a compile left behind. Called last, also after a stop."""
        if self._folder is not None:
            self._folder.remove()

    def compile(self, lease: LeaseView) -> CompileResult:
        """Run the real compiler into a private folder. What the node cache calls when it is this process's turn.

        May be called again after a transient failure; only the last run's words reach the caller.
        """
        job = self.job
        self.clean_up()
        try:
            folder = PrivateFolder(job.output)
        except OSError as exc:
            raise CompilerNotRun(describe(exc)) from exc
        output = Output()

        def sample(rss: int) -> None:
            lease.tell(rss)
            if lease.not_needed.is_set():
                self._end_compiler()

        compilation = Compilation(
            [job.compiler, *job.cmd.with_output(folder.file)],
            find.inner_environment(job.environ),
            folder=folder.path,
            stdout=output.stdout,
            stderr=output.stderr,
            on_sample=sample,
        )
        with self._lock:
            self._folder, self._output, self._compilation = folder, output, compilation
            if self.abort.is_set():
                compilation.stop()
        lease.phase = "compiling"
        ended = compilation.run()
        lease.phase = "compiled"
        output.finish()
        self._result = self._judge(ended, output, folder)
        if self._result.exit_code == 0:
            self._result.unpublishable = self._changed_meanwhile()
        return self._result

    def _changed_meanwhile(self) -> str | None:
        """What the key was made of may have been replaced under the compiler: then nobody knows what it read."""
        job = self.job
        if job.identity is None or job.computed is None or job.computed.key is None:
            return None
        try:
            compiler = identify(job.compiler, identity_dir(job.settings))
        except IdentityUnknown as exc:
            return str(exc)
        if compiler.text != job.identity.text:
            return "the compiler changed while it compiled"
        now = compute_key(
            job.cmd, cwd=os.getcwd(), environ=job.environ, compiler=compiler, index_dir=index_dir(job.settings)
        )
        if now.key == job.computed.key:
            return None
        return f"{job.cmd.input} or a file named with it changed while it was compiled"

    def _key(self) -> str | None:
        return self.job.computed.key if self.job.computed else None

    def _through_cache(self) -> int:
        job = self.job
        assert job.computed is not None
        assert job.computed.key is not None
        assert job.identity is not None
        patience = Patience()
        patience = replace(patience, leader=max(1.0, patience.leader - job.waited))
        cache = NodeCache(job.settings, log=job.log, abort=self.abort, patience=patience)
        obtained = cache.obtain(
            job.computed.key,
            job.computed.factors,
            output=job.output,
            compile=self.compile,
            expect_version=job.identity.version,
            expect_target=job.cmd.target,
            retry_failed=job.cmd.retry_failed or job.settings.retry_failed,
            graph_bytes=_size(job.cmd.input),
            summarise=self._summarise,
        )
        if obtained.result is None:
            # Somebody else's NEFF, or somebody else's failure: what our own compiler printed, if it ran, is void.
            self._output = None
            _explain(obtained)
        elif obtained.exit_code == 0 and self._folder is not None:
            self._folder.hand_over_rest()
        if obtained.message and obtained.result is not None and self._output is not None:
            self._output.note(obtained.message)
        return obtained.exit_code

    def _summarise(self) -> str | None:
        from neffcache_hook.launcher.summary import summarise

        return summarise(self.job)

    def _around_cache(self) -> int:
        """A compile without a key: the launcher's other promises hold for it all the same."""
        job = self.job
        reason = (job.computed.uncacheable if job.computed else None) or "compiler_unknown"
        if job.settings.mode == "require":
            complain(f"this compile cannot be cached ({reason}) and NEFFCACHE_MODE=require forbids compiling")
            job.record("failed", reason=reason, exit_code=CACHE_FAULT_EXIT)
            return CACHE_FAULT_EXIT
        ticket = Ticket(job.settings.lock_dir, job.settings.host_compiles)
        if not wait_for_turn(ticket, Expected(), self.abort):
            return 128 + signal.SIGTERM
        view = LeaseView(told=ticket.note)
        try:
            result = self.compile(view)
        finally:
            ticket.leave()
        job.record("uncacheable", reason=reason, compile_seconds=result.seconds, exit_code=result.exit_code)
        return self._hand_over(result)

    def _rescue(self) -> int | None:
        """The cache broke: what the compiler has already done is still good; None when it has not run."""
        if self.job.settings.strict:
            complain(f"a fault in neffcache: {self.fault} (NEFFCACHE_STRICT=1)")
            return CACHE_FAULT_EXIT
        if self._result is None:
            return None
        return self._hand_over(self._result)

    def _hand_over(self, result: CompileResult) -> int:
        if result.exit_code == 0 and result.output is not None and os.path.exists(result.output):
            try:
                place(result.output, self.job.output)
            except OSError as exc:
                complain(f"the compiler's output cannot be put at {self.job.output}: {describe(exc)}")
                return 1
            if self._folder is not None:
                self._folder.hand_over_rest()
        return result.exit_code

    def _judge(self, ended: Ended, output: Output, folder: PrivateFolder) -> CompileResult:
        code = ended.exit_code
        verdict = classify(code, output.tails())
        if ended.could_not_start:
            output.note(f"{self.job.compiler} could not be started: {ended.could_not_start}")
        elif ended.supervisor_died:
            output.note("the process that supervises the compiler was killed, so the compile was ended")
        elif code == 0 and (damage := _damage(folder.file)):
            # The caller takes exit 0 for a NEFF that is there and whole, and would cache what it finds.
            output.note(f"the compiler reported success but {damage} at {self.job.cmd.output}")
            code, verdict = COMPILE_ERROR, Verdict("transient", None)
        if ended.stopped:
            verdict = Verdict("transient", None)
        return CompileResult(
            exit_code=code,
            kind=verdict.kind,
            output=folder.file if code == 0 else None,
            seconds=ended.seconds,
            cpu_seconds=ended.cpu_seconds,
            peak_rss_bytes=ended.peak or None,
            log_tail=output.log_tail(),
            code=verdict.code,
            out_of_memory=not (ended.stopped or ended.supervisor_died) and out_of_memory(code, output.tails()),
        )

    def _end_compiler(self) -> None:
        with self._lock:
            if self._compilation is not None:
                self._compilation.stop()


def serve(job: Job) -> int:
    """The exit code for the caller. Does not return when the real compiler has to take over."""
    work = Work(job)
    watch = _Watch(job)
    threading.Thread(target=watch.run_and_tell, args=(work.run,), name="neffcache-work", daemon=True).start()
    ended_by = watch.wait()
    if ended_by is not None:
        job.log(f"stopping: {watch.reason}")
        work.stop()
        watch.wait_for_work(ABORT_SECONDS)
        work.clean_up()
        return 128 + ended_by
    work.clean_up()
    if work.exit_code is None:
        find.become(job.compiler, job.arguments, job.environ)
    return work.exit_code


class _Watch:
    """What the main thread waits for."""

    def __init__(self, job: Job) -> None:
        self._caller = job.caller
        self._done_r, self._done_w = os.pipe()
        self._signal_r, self._signal_w = os.pipe()
        os.set_blocking(self._signal_w, False)
        self.reason = ""
        signal.set_wakeup_fd(self._signal_w, warn_on_full_buffer=False)
        for number in STOPPING_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda number, frame: None)  # the wake-up descriptor carries the news
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING_SIGNALS)

    def run_and_tell(self, work: object) -> None:
        """Body of the working thread."""
        try:
            work()  # type: ignore[operator]
        finally:
            os.write(self._done_w, b".")

    def wait(self) -> int | None:
        """None when the work is done, otherwise the number of the signal to end like."""
        poll = select.poll()
        for fd in (self._done_r, self._signal_r, self._caller.fd):
            if fd >= 0:
                poll.register(fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll(_CALLER_CHECK_SECONDS * 1000)}
            if self._done_r in ready:
                return None
            if self._signal_r in ready and (number := self._stopping_signal()):
                self.reason = f"signal {number}"
                return number
            if self._caller.fd in ready or self._caller.gone():
                self.reason = f"the process that asked for this compile (pid {self._caller.pid}) has died"
                return int(signal.SIGTERM)

    def wait_for_work(self, seconds: float) -> None:
        """Give the work time to release what it holds; a second signal ends the patience."""
        deadline = time.monotonic() + seconds
        poll = select.poll()
        poll.register(self._done_r, select.POLLIN)
        poll.register(self._signal_r, select.POLLIN)
        while (left := deadline - time.monotonic()) > 0:
            ready = {fd for fd, _ in poll.poll(left * 1000)}
            if self._done_r in ready or (self._signal_r in ready and self._stopping_signal()):
                return

    def _stopping_signal(self) -> int | None:
        return next((n for n in os.read(self._signal_r, 64) if n in STOPPING_SIGNALS), None)


def _explain(obtained: Obtained) -> None:
    """Say why there is no NEFF when no compiler of ours said it."""
    if obtained.failure is not None:
        write_all(2, f"{failure_text(obtained.failure)}; NEFFCACHE_RETRY_FAILED=1 compiles again\n".encode())
    elif obtained.exit_code != 0:
        complain(obtained.message or obtained.reason or "the NEFF could not be had")


def _size(path: str | None) -> int | None:
    try:
        return os.stat(path).st_size if path else None
    except OSError:
        return None


def _damage(path: str) -> str | None:
    """What is wrong with a finished output; None for a whole NEFF, and for a format that we cannot judge."""
    try:
        if not os.stat(path).st_size:
            return "left an empty file"
        check_neff(path)
    except FileNotFoundError:
        return "left no output"
    except (NeffTruncated, NeffChecksumMismatch) as exc:
        return f"left a damaged NEFF ({exc})"
    except (NeffInvalid, OSError):
        # Not published (the node cache sees to that), but not ours to refuse either.
        return None
    return None
