"""Finding processes again, and asking after them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid

from hvdtrain.launcher.processes import command_of, has_ended, marked, process_state


def test_a_marked_process_is_found_until_it_has_ended() -> None:
    """Fails when a process is not found by its mark, or by half of it, or after its end."""
    value = uuid.uuid4().hex
    program = [sys.executable, "-c", "input()"]
    child = subprocess.Popen(
        program, stdin=subprocess.PIPE, env={"MARK": value, "OTHER": "a=b"}, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 20
        while child.pid not in marked("MARK", value) and time.monotonic() < deadline:
            time.sleep(0.01)
        found = marked("MARK", value)
        assert list(found) == [child.pid]
        assert found[child.pid]["OTHER"] == "a=b"
        assert command_of(child.pid) == " ".join(program)
        assert marked("MARK", value[:-1]) == marked("ARK", value) == {}
        assert not has_ended(child.pid)
    finally:
        child.kill()
        while not has_ended(child.pid):
            time.sleep(0.01)
        assert process_state(child.pid) == "Z"  # its number is still its own
        assert marked("MARK", value) == {}
        assert command_of(child.pid) == ""
        child.communicate()
    assert process_state(child.pid) == ""
    assert process_state(os.getpid()) == "R"
