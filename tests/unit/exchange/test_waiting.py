"""Threads of hvdtrain.exchange.waiting: their scheduling class, how often they look, the timer."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import pytest

from hvdtrain.exchange.waiting import (
    LONGEST_REST_S,
    do_not_push,
    push,
    rest_until,
    thread_ids,
)


def policies_of_a_thread(choose: Callable[[], None]) -> list[int]:
    """That a new thread has which chooses one for itself first: when it shall not push, and when it
    may again.
    """
    ready, over = threading.Event(), threading.Event()

    def live() -> None:
        choose()
        ready.set()
        over.wait()

    before = thread_ids()
    thread = threading.Thread(target=live)
    thread.start()
    ready.wait()
    assert thread.native_id
    try:
        calm = do_not_push(thread_ids() - before)
        policies = [os.sched_getscheduler(thread.native_id)]
        push(calm)
        return [*policies, os.sched_getscheduler(thread.native_id)]
    finally:
        over.set()
        thread.join()


def choose_idle() -> None:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def choose_batch() -> None:
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@pytest.mark.parametrize(
    ("choose", "expected"),
    [
        (lambda: None, [os.SCHED_BATCH, os.SCHED_OTHER]),
        (choose_idle, [os.SCHED_IDLE] * 2),
        (choose_batch, [os.SCHED_BATCH] * 2),
    ],
)
def test_new_threads(choose: Callable[[], None], expected: list[int]) -> None:
    """Fails if a new thread keeps the class that pushes, if it never gets it back, if one that was
    chosen is changed, or if the thread that computes is changed too.
    """
    assert policies_of_a_thread(choose) == expected
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_threads_that_have_ended_are_left_out() -> None:
    """Fails if a thread that ended in between is an error."""
    assert do_not_push({2**22 + 1}) == set()
    push({2**22 + 1})


def test_a_long_wait_is_looked_at_seldom() -> None:
    """Fails if a rank that waits wakes up so often that it takes the cores from the others, beside
    a thread that spins in sched_yield(); or if it sleeps on when what it waits for has come.
    """
    looked: list[float] = []

    def done() -> bool:
        looked.append(time.monotonic())
        return looked[-1] - looked[0] > 0.5

    rest_until(done)
    late = [moment for moment in looked if moment - looked[0] > 0.1]
    assert len(late) <= 0.4 / LONGEST_REST_S + 2
    assert len(looked) < 500


def test_a_short_wait_is_looked_at_often() -> None:
    """Fails if what has come already is waited for."""
    rest_until(lambda: True)
    looks = iter([False, True])
    rest_until(lambda: next(looks))
