"""Several serving processes behind one socket."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

STOPPED_WHILE_IT_STARTS = """
import os, signal
from neffcache_server.workers import Workers

def run(ready, lifeline):
    while True:
        signal.pause()

workers = Workers(1, run, lambda: None)
# The signal arrives between the look whether to stop and the fork.
workers._on_signal(signal.SIGTERM, None)
os.close(workers._start())
workers._reap()
"""


def test_a_worker_that_is_being_started_when_the_signal_comes_is_ended_too() -> None:
    """Else the parent waits for a child that nobody has told."""
    program = subprocess.Popen([sys.executable, "-c", STOPPED_WHILE_IT_STARTS], start_new_session=True)
    try:
        assert program.wait(20) == 0
    finally:
        if program.poll() is None:
            os.killpg(program.pid, signal.SIGKILL)
            program.wait()
