"""Containers with less than usual: the lines of the table "Restricted platforms" in docs/docker.md.

Two workers train, or are refused before the start with the reason and the fix.
"""

from __future__ import annotations

import re
import shlex

import pytest

from tests.cluster.containers import ROOT, docker

TRAIN = "train --model lenet --data digits --max-steps 2 --global-batch-size 50"
PAGE = ROOT / "docs" / "docker.md"
TRAINED, REFUSED = (0, "finished: 1 epoch, 2 steps, 100 samples"), 3
EATER = """
import horovod.torch as hvd, time
hvd.init()
held = []
while hvd.rank() == 1:
    held.append(b"." * (1 << 24))
time.sleep(60)
"""
CASES = {
    "--network none": TRAINED,
    "--cpus 1": (0, "on cpu, 1 compute thread each"),
    "--cap-drop ALL --security-opt no-new-privileges": TRAINED,
    "--read-only": (2, "Read-only file system"),
    "--read-only --tmpfs /tmp --env HOME=/tmp --workdir /tmp": TRAINED,
    "--user 12345:0 --env HOME=/tmp --workdir /tmp": TRAINED,
    "--user 12345": (2, "belongs to uid 1000, gid 1000 (mode 755), and this process has uid 12345"),
    "--ipc none": (REFUSED, "no /dev/shm, which horovodrun"),
    "--ipc none --tmpfs /dev/shm:size=1g": TRAINED,
    "--pids-limit 20": (REFUSED, "the container allows 20 processes and threads"),
}


@pytest.mark.parametrize("options", CASES)
def test_what_is_missing(image: str, options: str) -> None:
    """Fails when a container that suffices is refused, or another one ends with a riddle; or when
    the page does not say so.
    """
    code, text = CASES[options]
    assert f"| `{options}` |" in PAGE.read_text("utf-8")
    command = f"{options} {image} hvdtrain launch -np 2 -- {TRAIN}"
    done = docker("run", "--rm", *command.split())
    output = done.stdout
    assert (done.returncode, text in output) == (code, True), output
    assert "Traceback" not in output


def test_memory_that_runs_out(image: str) -> None:
    """Fails when a worker that the kernel has killed, as the container's memory was full, is said
    to have been killed by somebody, and the limit is not named.
    """
    script = f"echo {shlex.quote(EATER)} > eat.py; hvdtrain launch -np 2 -- python eat.py"
    limits = ["--memory=900m", "--memory-swap=900m"]
    done = docker("run", "--rm", *limits, image, "sh", "-c", script)
    assert done.returncode == 137, done.stdout
    reason = "rank 1 on .* was killed by SIGKILL .the kernel has killed a process, as the memory of"
    assert re.search(f"{reason} the container or job, 0.88 GiB, was full", done.stdout), done.stdout
