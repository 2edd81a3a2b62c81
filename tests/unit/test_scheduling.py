"""Scheduling classes of threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

from hvdtrain.scheduling import new_threads_do_not_push


def policy_of_a_thread(choose: Callable[[], None]) -> int:
    """That a thread has which is started within, and chooses for itself first."""
    ready, over = threading.Event(), threading.Event()

    def live() -> None:
        choose()
        ready.set()
        over.wait()

    thread = threading.Thread(target=live)
    with new_threads_do_not_push():
        thread.start()
        ready.wait()
    try:
        assert thread.native_id
        return os.sched_getscheduler(thread.native_id)
    finally:
        over.set()
        thread.join()


def choose_idle() -> None:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


@pytest.mark.parametrize(
    ("choose", "expected"), [(lambda: None, os.SCHED_BATCH), (choose_idle, os.SCHED_IDLE)]
)
def test_new_threads(choose: Callable[[], None], expected: int) -> None:
    """Fails if a new thread keeps the class that pushes, or one that was chosen is changed."""
    assert policy_of_a_thread(choose) == expected


def test_threads_that_were_there_stay() -> None:
    """Fails if the thread that computes is changed too."""
    with new_threads_do_not_push():
        pass
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
