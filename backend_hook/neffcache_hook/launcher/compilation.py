"""One run of the compiler under its supervisor, seen from the launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping

from neffcache_hook.launcher import process_tree

SUPERVISOR = os.path.join(os.path.dirname(os.path.abspath(__file__)), "supervisor.py")
KILLED = 137
_GIVE_UP_SECONDS = 30.0


class Ended:
    """How a run ended. `exit_code` by shell convention; `seconds` of wall and CPU, `peak` in bytes."""

    __slots__ = ("could_not_start", "cpu_seconds", "exit_code", "peak", "seconds", "stopped", "supervisor_died")

    def __init__(self, exit_code: int, *, seconds: float = 0.0, cpu_seconds: float = 0.0, peak: int = 0) -> None:
        self.exit_code = exit_code
        self.seconds = seconds
        self.cpu_seconds = cpu_seconds
        self.peak = peak
        self.stopped = False
        self.supervisor_died = False
        self.could_not_start: str | None = None


class Compilation:
    """Starts the compiler once and waits for it; `stop` may be called from any thread, at any time.

    When this process dies, the supervisor kills the compiler. When the supervisor dies, `run` kills it: for this
    the launcher is a child subreaper too, so that the orphans become its children.
    """

    def __init__(
        self,
        command: list[str],
        environ: Mapping[str, str],
        *,
        folder: str,
        stdout: int,
        stderr: int,
        on_sample: Callable[[int], None] = lambda rss: None,
    ) -> None:
        self._command = command
        self._environ = environ
        self._folder = folder
        self._stdout, self._stderr = stdout, stderr
        self._on_sample = on_sample
        self._lock = threading.Lock()
        self._stopped = False
        self._lifeline: int | None = None
        self._peak = 0

    def run(self) -> Ended:
        """Run to the end. Never raises for anything the compiler does."""
        spare = frozenset(process_tree.descendants(os.getpid()))
        process_tree.become_subreaper()
        supervisor, result = self._start()
        if supervisor is None:
            return self._stopped_end()
        try:
            with os.fdopen(result, "rb") as lines:
                last = self._read(lines)
            supervisor.wait()
            if last is None:
                process_tree.end_descendants(spare=spare, give_up_after=_GIVE_UP_SECONDS)
        finally:
            self._close_lifeline()
        return self._ended(last)

    def stop(self) -> None:
        """Kill the compiler and all its descendants; `run` then returns with `stopped`."""
        with self._lock:
            self._stopped = True
            if self._lifeline is not None:
                try:
                    os.write(self._lifeline, b"!")
                except OSError:
                    return

    def _start(self) -> tuple[subprocess.Popen[bytes] | None, int]:
        lifeline, ours = os.pipe()
        result, theirs = os.pipe()
        with self._lock:
            if self._stopped:
                for fd in (lifeline, ours, result, theirs):
                    os.close(fd)
                return None, -1
            self._lifeline = ours
        program = [sys.executable, "-IS", SUPERVISOR, str(lifeline), str(theirs), self._folder, "--"]
        try:
            supervisor = subprocess.Popen(
                [*program, *self._command],
                stdout=self._stdout,
                stderr=self._stderr,
                env=self._environ,
                pass_fds=(lifeline, theirs),
                start_new_session=True,
            )
            return supervisor, result
        finally:
            os.close(lifeline)
            os.close(theirs)

    def _read(self, lines: object) -> dict[str, object] | None:
        """The supervisor's last word; None when it died without one."""
        last: dict[str, object] | None = None
        for line in lines:  # type: ignore[attr-defined]
            try:
                said = json.loads(line)
            except ValueError:
                continue  # cut off: the supervisor was killed while writing
            if "rss" in said:
                self._peak = max(self._peak, said["rss"])
                self._on_sample(said["rss"])
            else:
                last = said
        return last

    def _ended(self, last: dict[str, object] | None) -> Ended:
        if last is None:
            ended = Ended(KILLED, peak=self._peak)
            ended.supervisor_died = True
            ended.stopped = self._stopped
            return ended
        if "stopped" in last:
            return self._stopped_end()
        if "error" in last:
            ended = Ended(127 if last["error"] == 2 else 126)
            ended.could_not_start = str(last.get("text"))
            return ended
        number: dict[str, float] = {k: float(v) for k, v in last.items() if isinstance(v, int | float)}
        return Ended(int(number["exit"]), seconds=number["wall"], cpu_seconds=number["cpu"], peak=int(number["peak"]))

    def _stopped_end(self) -> Ended:
        ended = Ended(KILLED, peak=self._peak)
        ended.stopped = True
        return ended

    def _close_lifeline(self) -> None:
        with self._lock:
            if self._lifeline is not None:
                os.close(self._lifeline)
                self._lifeline = None
