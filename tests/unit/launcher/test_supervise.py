"""The end of horovodrun, and of what it has started."""

from __future__ import annotations

import subprocess

import psutil
import pytest

from hvdtrain.launcher import supervise
from hvdtrain.launcher.processes import descendants, start_of

# As horovodrun's ssh to a host that is gone: of another session, and deaf to its parent's end.
STARTS = "setsid sh -c 'trap \"\" TERM; echo started; while :; do sleep 1; done' & wait"


@pytest.mark.timeout(60)
def test_what_horovodrun_has_started_ends_with_it() -> None:
    """Fails if a process of another session, which horovodrun leaves behind, stays."""
    command = ["sh", "-c", STARTS]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    with process:
        assert process.stdout and process.stdout.readline() == b"started\n"
        started = {pid: start_of(pid) for pid in descendants(process.pid)}
        assert started
        supervise._end(process, 0.0, 0.2)
        psutil.wait_procs([psutil.Process(pid) for pid in started if start_of(pid)], 5)
    assert not [pid for pid, start in started.items() if start and start_of(pid) == start]
