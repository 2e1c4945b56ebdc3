from __future__ import annotations

import os
import pty
import threading
from pathlib import Path

from neffcache_hook.launcher.output import TAIL_BYTES, Output


class Reader(threading.Thread):
    """Drains one pipe to its end."""

    def __init__(self, fd: int) -> None:
        super().__init__(daemon=True)
        self._fd = fd
        self.data = b""
        self.start()

    def run(self) -> None:
        with os.fdopen(self._fd, "rb") as f:
            self.data = f.read()


def _pipes() -> tuple[int, int, int, int]:
    return (*os.pipe(), *os.pipe())


def test_stdout_ends_before_the_first_byte_of_stderr() -> None:
    """UC-12 (b): the caller reads stdout to its end first; a pipe holds 64 KiB."""
    out_r, out_w, err_r, err_w = _pipes()
    output = Output(out_w, err_w)
    os.write(output.stdout, b"o" * 200_000)
    os.write(output.stderr, b"e" * 200_000)
    output.finish()
    order = []

    def caller() -> None:
        with os.fdopen(out_r, "rb") as f:
            order.append(f.read())
        with os.fdopen(err_r, "rb") as f:
            order.append(f.read())

    thread = threading.Thread(target=caller, daemon=True)
    thread.start()
    output.deliver()
    os.close(err_w)
    thread.join(30)
    assert order == [b"o" * 200_000, b"e" * 200_000]


def test_a_caller_that_closed_its_pipe_is_no_error() -> None:
    out_r, out_w, err_r, err_w = _pipes()
    output = Output(out_w, err_w)
    os.write(output.stdout, b"o" * 100_000)
    os.write(output.stderr, b"told")
    os.close(out_r)
    output.deliver()
    os.close(err_w)
    assert os.read(err_r, 100) == b"told"
    os.close(err_r)


def test_a_pipe_that_does_not_block_gets_everything() -> None:
    out_r, out_w, err_r, err_w = _pipes()
    os.set_blocking(out_w, False)
    output = Output(out_w, err_w)
    os.write(output.stdout, b"o" * 1_000_000)
    reader = Reader(out_r)
    output.deliver()
    reader.join(30)
    assert len(reader.data) == 1_000_000
    os.close(err_r)
    os.close(err_w)


def test_one_target_for_both_keeps_the_order_of_writing(tmp_path: Path) -> None:
    with open(tmp_path / "both", "wb") as f:
        stdout = os.dup(f.fileno())
        output = Output(stdout, f.fileno())
        for text in (b"1 out\n", b"2 err\n", b"3 out\n"):
            os.write(output.stdout if b"out" in text else output.stderr, text)
        output.deliver()
    assert (tmp_path / "both").read_bytes() == b"1 out\n2 err\n3 out\n"


def test_a_terminal_sees_output_while_the_compiler_runs() -> None:
    ours, terminal = pty.openpty()
    stdout = os.dup(terminal)
    output = Output(stdout, terminal)
    os.write(output.stdout, b"progress")
    assert os.read(ours, 100) == b"progress"  # before the compiler has ended
    os.write(output.stderr, b"[NCC_EOOM001]")
    output.finish()
    assert output.tails() == [b"progress[NCC_EOOM001]"]
    output.deliver()
    assert os.read(ours, 100) == b"[NCC_EOOM001]"  # and nothing twice
    os.close(ours)
    os.close(terminal)


def test_the_tail_is_bounded_and_keeps_the_end_of_both_streams() -> None:
    out_r, out_w, err_r, err_w = _pipes()
    output = Output(out_w, err_w)
    os.write(output.stdout, b"o" * TAIL_BYTES + b"end of stdout")
    os.write(output.stderr, b"\xff" * TAIL_BYTES + b"end of stderr")
    tail = output.log_tail()
    assert len(tail.encode()) <= TAIL_BYTES
    assert tail.endswith("end of stderr")
    output2 = Output(out_w, err_w)
    os.write(output2.stdout, b"o" * TAIL_BYTES + b"end of stdout")
    os.write(output2.stderr, b"short")
    assert output2.log_tail().endswith("end of stdout\nshort")
    for fd in (out_r, out_w, err_r, err_w):
        os.close(fd)


def test_a_note_comes_behind_the_compilers_own_words() -> None:
    out_r, out_w, err_r, err_w = _pipes()
    output = Output(out_w, err_w)
    os.write(output.stderr, b"compiler\n")
    output.note("ours")
    output.deliver()
    assert os.read(err_r, 100) == b"compiler\nneffcache: ours\n"
    for fd in (out_r, err_r, err_w):
        os.close(fd)
