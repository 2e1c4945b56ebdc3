"""Calls that hang are left behind."""

from __future__ import annotations

import threading

import pytest
from neffcache_client.bounded import Interrupted, TimeIsUp, bounded
from neffcache_client.errors import Aborted


def test_the_result_comes_back() -> None:
    assert bounded(lambda: 7, seconds=5, abort=None) == 7


def test_what_it_raises_is_raised() -> None:
    def wrong() -> int:
        raise KeyError("x")

    with pytest.raises(KeyError):
        bounded(wrong, seconds=5, abort=None)


def test_a_hanging_call_is_left_behind_and_its_late_result_undone() -> None:
    gate, undone = threading.Event(), threading.Event()
    late: list[int] = []

    def call() -> int:
        gate.wait(30)
        return 7

    with pytest.raises(TimeIsUp):
        bounded(call, seconds=0.05, abort=None, late=lambda r: (late.append(r), undone.set())[0])
    assert late == []
    gate.set()
    assert undone.wait(10)
    assert late == [7]


def test_an_abort_ends_the_wait() -> None:
    abort, gate = threading.Event(), threading.Event()
    threading.Timer(0.05, abort.set).start()
    with pytest.raises(Aborted):
        bounded(lambda: gate.wait(30), seconds=None, abort=abort)
    gate.set()


def test_an_interrupt_ends_the_wait() -> None:
    gate = threading.Event()
    with pytest.raises(Interrupted):
        bounded(lambda: gate.wait(30), seconds=None, abort=None, interrupt=lambda: True)
    gate.set()
