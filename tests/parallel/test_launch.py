"""`hvdtrain launch` on this machine: its results, and what is left when it goes wrong."""

from __future__ import annotations

import json
import re
import shlex
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

import psutil
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.parallel.launching import (
    environment_of,
    hvdtrain,
    kill_all,
    marked,
    rank_of,
    run,
    wait_until_gone,
)

SCRIPT = str(Path(__file__).parent / "scripts" / "launched.py")
TRAIN = ["train", "--model=lenet", "--data=synthetic:1x28x28,samples=256", "--experiment=run"]
TRAIN += ["--global-batch-size=20", "--checkpoint-interval=5", "--log-interval=1"]
ENDLESS = [*TRAIN, "--max-steps=100000", "--eval-interval=100000"]
WITH_SLOW_RANK = [*ENDLESS, "--model=tests.parallel.plugins:throttled", "--audit-every=2"]
STARTED_S, ENDED_S = 90.0, 60.0


def launch(*arguments: str, controller: str = "gloo") -> list[str]:
    """The command, for two workers."""
    return hvdtrain("launch", "-np", "2", f"--controller={controller}", *arguments)


class Job:
    """A launch that is under way."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self._mark = uuid.uuid4().hex
        self.output = folder / "output.txt"
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment_of(self._mark),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def wait_for(self, pattern: str) -> None:
        """Until the output holds it."""
        deadline = time.monotonic() + STARTED_S
        while not re.search(pattern, self.text, re.MULTILINE):
            assert self.process.poll() is None and time.monotonic() < deadline, self.text
            time.sleep(0.05)

    def worker(self, rank: int) -> psutil.Process:
        """The process of a rank; not its agent."""
        for process in marked(self._mark):
            if "hvdtrain.cli" in process.cmdline() and rank_of(process) == rank:
                return process
        raise AssertionError(f"no rank {rank} in\n{self.text}")

    def processes(self) -> list[psutil.Process]:
        return marked(self._mark)

    def end(self) -> int:
        """The exit code; fails when anything of the job is left."""
        code = self.process.wait(ENDED_S)
        assert not wait_until_gone(self._mark), self.text
        return code

    def clear(self) -> None:
        kill_all(marked(self._mark))
        self.process.wait(ENDED_S)


@contextmanager
def started(command: list[str], folder: Path) -> Iterator[Job]:
    """A job that is gone afterwards."""
    job = Job(command, folder)
    try:
        yield job
    finally:
        job.clear()


def read_summary(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "runs" / "run" / "summary.json").read_text())
    return found


def test_other_scripts_run_unchanged(tmp_path: Path) -> None:
    """Fails if a plain Horovod script does not run to its end under `launch`, with a log for each
    rank, the names that scripts look for, and nothing of the user's secrets in `ps`.
    """
    command = launch("--", "python", SCRIPT, controller="mpi")
    done = run(command, cwd=tmp_path, variables={"MY_TOKEN": "hush"})
    assert done.exit_code == 0, done.output
    for rank in (0, 1):
        log = (tmp_path / "logs" / f"rank.{rank}.log").read_text()
        assert f"environment {rank} 2 127.0.0.1" in log
        assert f"on rank {rank}" in log
        assert f"on rank {1 - rank}" not in log
    assert "hush" not in (tmp_path / "logs" / "horovodrun.log").read_text()


def test_first_failing_exit_code(tmp_path: Path) -> None:
    """Fails if the code of the rank that failed gets lost, or its victim is blamed."""
    done = run(launch("--", "python", SCRIPT, "fail"), cwd=tmp_path)
    assert done.exit_code == 7, done.output
    assert "hvdtrain launch: rank 1 on localhost ended with exit code 7, the first" in done.output
    assert "then rank 0 on localhost ended with exit code 1" in done.output


FAILING = """
import hvdtrain, torch
model = torch.nn.Linear(2, 1)
samples = torch.utils.data.TensorDataset(torch.ones(6, 2))
with hvdtrain.Loop(model, torch.optim.SGD(model.parameters(), 0.1), samples,
                   global_batch_size=3, epochs=2) as loop:
    for step in loop:
        for (x,) in step.batches():
            step.backward(model(x).sum(), len(x))
        step.update()
        {}["a name that is nowhere"]
"""


def test_a_failure_of_all_ranks_is_shown_once(tmp_path: Path) -> None:
    """Fails if the traceback of each rank, or once more that of the first, fills the terminal."""
    (tmp_path / "train.py").write_text(FAILING)
    done = run(launch("--", "python", "train.py", controller="mpi"), cwd=tmp_path)
    assert done.exit_code == 1, done.output
    assert done.output.count("Traceback") == 1, done.output
    assert "rank 0 on" in done.output and ", in phase update of step 1" in done.output


def test_a_rank_that_leaves_early_is_named(tmp_path: Path) -> None:
    """Fails if the rank that ended well, but before the others, is not the one that is named, or
    the job counts as done.
    """
    done = run(launch("--", "python", SCRIPT, "leave"), cwd=tmp_path)
    assert done.exit_code == 1, done.output
    assert (
        "hvdtrain launch: rank 1 on localhost ended with exit code 0 while others were still at "
        "work: all ranks must make the same number of steps"
    ) in done.output
    assert "then rank 0 on localhost ended with exit code 1" in done.output


def test_a_worker_that_leaves_in_training_ends_the_job(tmp_path: Path) -> None:
    """Fails if the others wait for a process that ended without a word and with exit code 0, which
    Open MPI takes for a good end.
    """
    train = ["train", "--model=tests.parallel.plugins:leaves_at_once", "--data=digits"]
    done = run(launch("--", *train, controller="mpi"), cwd=tmp_path)
    assert done.exit_code == 1, done.output
    assert "ended with exit code 0, in the middle of its training, the first to" in done.output
    assert done.seconds < 60, done.output


def test_a_script_that_hangs_is_ended_with_its_stacks(tmp_path: Path) -> None:
    """Fails if silence goes unnoticed, or the verdict does not say where each rank stands."""
    command = launch("--watchdog-timeout-s=25", "--", "python", SCRIPT, "hang", controller="mpi")
    done = run(command, cwd=tmp_path)
    assert done.exit_code == 1, done.output
    assert "no progress for 25 s (--watchdog-timeout-s)" in done.output
    verdict = done.output.partition("no progress for")[2]
    sleeps = verdict.partition("rank 1 on")[2].partition("rank 1 on")[2]
    assert f'File "{SCRIPT}", line 29 in <module>' in sleeps, done.output


def behind_a_shell(folder: Path) -> list[str]:
    """`train` in a script that has more to do."""
    script = folder / "run.sh"
    script.write_text(f"#!/bin/bash\n{shlex.join(hvdtrain(*ENDLESS))}\nexit $?\n")
    script.chmod(0o755)
    return ["./run.sh"]


@pytest.mark.parametrize(
    ("controller", "number", "code", "shell"),
    [("gloo", signal.SIGTERM, 143, True), ("mpi", signal.SIGINT, 130, False)],
)
def test_stop_saves(
    tmp_path: Path, controller: str, number: signal.Signals, code: int, shell: bool
) -> None:
    """Fails if a signal to `launch` alone does not make every worker save and leave, also one that
    a shell has started.
    """
    command = behind_a_shell(tmp_path) if shell else ENDLESS
    with started(launch("--", *command, controller=controller), tmp_path) as job:
        job.wait_for(r"^step 7/")
        job.process.send_signal(number)
        assert job.end() == code, job.text
        summary = read_summary(tmp_path)
        last = (tmp_path / "runs" / "run" / "checkpoints" / "last").read_text().strip()
        assert summary["status"] == "stopped"
        assert last == f"step-{summary['steps']:08}", "the step of the stop is kept"


def test_a_second_signal_is_at_once(tmp_path: Path) -> None:
    """Fails if workers that do not listen keep a second signal waiting."""
    command = launch("--", "python", "-c", DEAF)
    with started(command, tmp_path) as job:
        job.wait_for("deaf 0")
        job.wait_for("deaf 1")
        job.process.send_signal(signal.SIGTERM)
        time.sleep(3)
        assert job.process.poll() is None, job.text
        began_s = time.monotonic()
        job.process.send_signal(signal.SIGTERM)
        assert job.end() == 143, job.text
        assert time.monotonic() - began_s < 20


DEAF = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", os.environ["RANK"], flush=True)
time.sleep(300)
"""


def test_a_stopped_worker_is_named(tmp_path: Path) -> None:
    """Fails if a worker that was stopped holds up the job, or is not named as the one."""
    command = launch("--watchdog-timeout-s=15", "--", *ENDLESS)
    with started(command, tmp_path) as job:
        job.wait_for(r"^step 7/")
        job.worker(1).send_signal(signal.SIGSTOP)
        assert job.end() == 1, job.text
        assert re.search(r"rank 1 on \w+: stopped \(SIGSTOP\), in phase \w+ of step", job.text)
        assert re.search(r"rank 0 on \w+, Python stacks:", job.text)
        assert read_summary(tmp_path)["status"] == "failed"


def test_nothing_is_left_by_a_launcher_that_is_killed(tmp_path: Path) -> None:
    """Fails if workers or the process of the metrics outlive the launcher, workers do not save
    before they go, or the metrics, as Prometheus asks for them, are not those of the job.
    """
    command = launch("--metrics-port=0", "--", *WITH_SLOW_RANK, controller="mpi")
    with started(command, tmp_path) as job:
        job.wait_for(r"^step 7/")
        (url,) = re.findall(r"^hvdtrain launch: .*metrics: (http://\S+)$", job.text, re.MULTILINE)
        check_metrics(url, tmp_path)
        job.process.kill()
        job.end()
        assert read_summary(tmp_path)["status"] == "stopped"


def read_metrics(url: str) -> dict[tuple[object, ...], float]:
    """Return the samples, as Prometheus asks for them: (name, labels) -> value."""
    request = Request(url, headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    with urlopen(request, timeout=10) as answer:
        assert answer.headers.get_content_type() == "application/openmetrics-text"
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {(s.name, *sorted(s.labels.items())): s.value for f in families for s in f.samples}


def check_metrics(url: str, folder: Path) -> None:
    """Compare the metrics with the records of the run, and with the page."""
    deadline, host = time.monotonic() + STARTED_S, ("host", socket.gethostname())
    slow = ("hvdtrain_straggler_ratio", host, ("phase", "compute"), ("rank", "1"))
    while slow not in (samples := read_metrics(url)):
        assert time.monotonic() < deadline, samples
        time.sleep(0.2)
    assert samples[slow] > 1.4
    assert samples[("hvdtrain_steps_total",)] >= 7
    lines = (folder / "runs" / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [record["train_loss"] for record in map(json.loads, lines) if "lr" in record]
    assert samples[("hvdtrain_loss",)] in losses
    assert samples[("hvdtrain_planned_steps",)] == 100_000
    assert samples[("hvdtrain_audits_total", ("kind", "exchange"))] >= 15, "after 30 steps"
    for rank in ("0", "1"):
        labels = (host, ("rank", rank))
        assert samples[("hvdtrain_rank_up", *labels)] == 1
        assert samples[("hvdtrain_rank_step", *labels)] >= 1  # reported once a second
        assert samples[("hvdtrain_rank_last_sign_seconds", *labels)] < 10
    with urlopen(url.removesuffix("metrics"), timeout=10) as answer:
        page = answer.read().decode()
    assert " of 100,000</dd>" in page and "2 of 2 running" in page
    assert f"rank 1 on {host[1]} is slow: compute " in page
    assert re.search(r"^(<.*>)?step \d+/", page.partition("Last lines")[2], re.MULTILINE)


def test_nobody_reads_what_is_printed(tmp_path: Path) -> None:
    """Fails if a terminal that takes nothing (Ctrl-S, `| less`) keeps workers that print much from
    their end, if a log lacks a line, or if lines that were not shown are not mentioned.
    """
    mark, lines = uuid.uuid4().hex, 60_000
    process = subprocess.Popen(
        launch("--", "python", "-c", CHATTY, str(lines)),
        cwd=tmp_path,
        env=environment_of(mark),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        logs = [tmp_path / "logs" / f"rank.{rank}.log" for rank in (0, 1)]
        deadline = time.monotonic() + STARTED_S

        def are_whole() -> bool:
            ends = [f"{rank} {lines - 1} {'x' * 50}\n" for rank in (0, 1)]
            pairs = zip(logs, ends, strict=True)
            return all(log.exists() and log.read_text().endswith(end) for log, end in pairs)

        while not are_whole() or len(marked(mark)) > 1:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
        for rank, log in enumerate(logs):
            expected = "".join(f"{rank} {line} {'x' * 50}\n" for line in range(lines))
            assert log.read_text() == expected
        output = process.communicate(timeout=ENDED_S)[0].decode()
    finally:
        kill_all(marked(mark))
        process.communicate()
    assert process.returncode == 0, output[-2000:]
    notes = re.findall(r"^\.\.\. ([\d,]+) lines? not shown; all are in ", output, re.MULTILINE)
    left_out = sum(int(note.replace(",", "")) for note in notes)
    shown = len(re.findall(r"^(\[1\] )?[01] \d+ x{50}$", output, re.MULTILINE))
    assert shown + left_out == 2 * lines


CHATTY = """
import os, sys
for line in range(int(sys.argv[1])):
    print(os.environ["RANK"], line, "x" * 50)
"""


def test_rank_0_killed_leaves_a_summary(tmp_path: Path) -> None:
    """Fails if a run whose rank 0 could not write its end looks as if it went on."""
    with started(launch("--", *ENDLESS), tmp_path) as job:
        job.wait_for(r"^step 7/")
        job.worker(0).kill()
        assert job.end() == 137, job.text
        summary = read_summary(tmp_path)
        assert summary["status"] == "failed"
        assert "rank 0 on localhost was killed by SIGKILL" in str(summary["error"])


def test_a_crash_loop_ends(tmp_path: Path) -> None:
    """Fails if a job that comes no further is started for as long as there are restarts."""
    command = launch("--restarts=50", "--", "python", "-c", "raise SystemExit(9)")
    done = run(command, cwd=tmp_path)
    assert done.exit_code == 9, done.output
    assert done.output.count("hvdtrain launch: restart ") == 2
    assert "3 starts in a row made no progress past step 0: given up" in done.output
