"""The launcher with many workers: seconds to start, its CPU and memory, and the time to a verdict.

    python -m tests.campaigns.many_workers [--workers 8 64] [--spoken 8 64 512] [--seconds 20]

The workers are stand-ins on this machine that report 10 steps a second, 4 phases each, and print a
line a second. `--workers`: each is a process with its agent, started by `hvdtrain launch`; the
processes of 64 fill two cores. `--spoken`: one process speaks for all agents, as messages are all
that the launcher receives of them. One worker is killed in the end. Exits with 1 if the launcher
takes over 10 % of a core, its CPU grows faster than N log N, or the verdict names another rank.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import psutil

from hvdtrain.interpreter import module_argv, peak_memory
from hvdtrain.lab.disturbance import Disturbance
from hvdtrain.launcher.channel import Channel
from hvdtrain.launcher.logs import Logs
from hvdtrain.launcher.protocol import Connection, ConnectionLost, connect
from hvdtrain.launcher.ranks import Limits, Rank
from hvdtrain.launcher.supervise import Supervisor, Watch
from hvdtrain.launcher.view import make_view

MOST_CPU = 0.1  # of a core, for the launcher
GROWTH = 1.5  # times what N log N allows from the fewest workers on
LEAST_CPU = 0.01  # of a core, which the launcher may take in any case
LIMIT_S = 300.0
HERE = "tests.campaigns.many_workers"
TOKEN = "the token of these stand-ins"
THREADS = 32  # that connect agents

# A worker: reports phases as hvdtrain/pulse.py does, prints its process id, then a line a second.
STAND_IN = """
import os, time
pulse = int(os.environ["HVDTRAIN_PULSE_FD"])
os.write(pulse, b"?%d\\n" % os.getpid())
print("up", os.environ["RANK"], os.getpid(), flush=True)
began_s, step = time.monotonic(), 0
while True:
    step += 1
    for phase in (b"data", b"compute", b"exchange", b"update"):
        os.write(pulse, b"+%s %d %f\\n" % (phase, step, time.monotonic()))
    if step % 10 == 0:
        print("step", step, flush=True)
    time.sleep(max(0.0, began_s + step / 10 - time.monotonic()))
"""


class Measured(NamedTuple):
    """What a job of stand-ins has taken."""

    start_s: float
    cpu: float  # of a core, by the launcher
    mib: float  # of the launcher
    verdict_s: float  # from a killed worker to the end of the launcher
    is_right: bool  # the verdict names that worker


def launched(workers: int, seconds: float, folder: Path) -> Measured:
    """Start workers by `hvdtrain launch`, and kill one after some seconds."""
    command = [*module_argv("hvdtrain"), "launch", "-np", str(workers), "--controller", "gloo"]
    command += ["--log-dir", str(folder), "--", sys.executable, "-SE", "-c", STAND_IN]
    began_s = time.monotonic()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as launcher:
        assert launcher.stdout is not None
        pids: dict[int, int] = {}
        while len(pids) < workers:
            line = launcher.stdout.readline()
            if not line:
                raise SystemExit(f"{workers} workers: exit code {launcher.wait()}")
            if match := re.search(r"up (\d+) (\d+)", line):
                pids[int(match[1])] = int(match[2])
        start_s = time.monotonic() - began_s
        before_s, began_s = _cpu_s(launcher.pid), time.monotonic()
        while time.monotonic() < began_s + seconds:  # read on, so that nothing waits for the pipe
            launcher.stdout.readline()
        cpu = (_cpu_s(launcher.pid) - before_s) / (time.monotonic() - began_s)
        status = Path(f"/proc/{launcher.pid}/status").read_text()
        mib = int(status.partition("VmHWM:")[2].split()[0]) / 1024
        victim, killed_s = workers // 2, time.monotonic()
        os.kill(pids[victim], signal.SIGKILL)
        rest = launcher.stdout.read()
    is_right = launcher.returncode == 137 and f"rank {victim} on " in rest
    return Measured(start_s, cpu, mib, time.monotonic() - killed_s, is_right)


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def spoken(workers: int, seconds: float, folder: Path) -> Measured:
    """Supervise agents that one process speaks for, which ends one worker after some seconds."""
    done = subprocess.run(
        [*module_argv(HERE), "--supervise", str(workers), str(seconds), str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    start_s, cpu, mib, verdict_s, is_right = map(float, done.stdout.splitlines()[-1].split())
    return Measured(start_s, cpu, mib, verdict_s, bool(is_right))


def supervise(workers: int, seconds: float, folder: Path) -> None:
    """Be the launcher of stand-ins; print what it took."""
    began_s, marks = time.monotonic(), list[tuple[float, float]]()
    channel = Channel("127.0.0.1", TOKEN)
    channel.workers = workers
    watch = Watch([Rank(number) for number in range(workers)])
    with Path(os.devnull).open("w") as terminal:
        logs = Logs(folder, lambda rank, line: view.line(rank, line))
        view = make_view(workers, terminal, folder, plain=True)

        def show(watch: Watch) -> None:
            view.update(watch)
            if all(rank.state == "running" for rank in watch.ranks):
                marks[1:] = [(time.monotonic(), time.process_time())]
                marks[:1] = marks[:1] or marks[1:]

        command = [*module_argv(HERE), "--speak", str(channel.port), str(workers), str(seconds)]
        limits = Limits(LIMIT_S, LIMIT_S)
        supervisor = Supervisor(command, dict(os.environ), channel, logs, limits, watch, list, show)
        outcome = supervisor.run()
        ended_s = time.monotonic()
        view.close()
    logs.close()
    (first_s, first_cpu_s), (last_s, last_cpu_s) = marks
    killed_s = float((folder / "horovodrun.log").read_text().split()[-1])
    victim = workers // 2
    is_right = outcome.exit_code == 137 and f"rank {victim} on " in outcome.text
    figures = (
        *(first_s - began_s, (last_cpu_s - first_cpu_s) / (last_s - first_s)),
        *(peak_memory() / 2**20, ended_s - killed_s, float(is_right)),
    )
    print(*figures)


def speak(port: int, workers: int, seconds: float) -> None:
    """Be all agents: report each second, end one worker after `seconds`, and print that time."""

    def joined(rank: int) -> Connection:
        about = {"rank": rank, "host": f"host{rank // 16}", "hostname": "here", "pid": 1}
        return connect(("127.0.0.1", port), TOKEN, about)

    with ThreadPoolExecutor(THREADS) as threads:
        agents = list(threads.map(joined, range(workers)))
    selector = selectors.DefaultSelector()
    for rank, agent in enumerate(agents):
        selector.register(agent, selectors.EVENT_READ, rank)
    began_s, sent, running = time.monotonic(), 0, set(range(workers))

    def end(rank: int) -> None:
        running.discard(rank)
        agents[rank].send({"ended": -signal.SIGKILL, "pulse": _report(step)})

    while selector.get_map():
        now, step = time.monotonic() - began_s, int(10 * (time.monotonic() - began_s))
        while sent < now * workers and running:  # each in its turn, once a second
            rank, sent = sent % workers, sent + 1
            if rank in running:
                agents[rank].send({"output": f"step {step}\n"})
                agents[rank].send({"alive": _report(step) | {"state": "S"}})
        if now > seconds and len(running) == workers:
            end(workers // 2)
            print(time.monotonic(), flush=True)
        for key, _ in selector.select(1 / workers):
            rank = key.data
            try:
                for message in agents[rank].receive():
                    if "kill" in message and rank in running:
                        end(rank)
                    if "leave" in message:
                        raise ConnectionLost
            except ConnectionLost:
                selector.unregister(agents[rank])
                agents[rank].close()


def _report(step: int) -> dict[str, object]:
    return {
        "step": step,
        "phase": "compute",
        "silent_s": 0.0,
        "busy_s": 0.1,
        "speaks": True,
        "folder": "",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="*", default=[8, 64])
    parser.add_argument("--spoken", type=int, nargs="*", default=[8, 64, 512])
    parser.add_argument("--seconds", type=float, default=20)
    for role in ("--supervise", "--speak"):
        parser.add_argument(role, nargs=3, help=argparse.SUPPRESS)
    asked, disturbance = parser.parse_args(), Disturbance()
    if asked.supervise:
        workers, seconds, folder = asked.supervise
        supervise(int(workers), float(seconds), Path(folder))
        return 0
    if asked.speak:
        port, workers, seconds = asked.speak
        speak(int(port), int(workers), float(seconds))
        return 0
    is_good = True
    print("workers           start, s  launcher, % of a core  launcher, MiB  verdict, s")
    with tempfile.TemporaryDirectory(prefix="hvdtrain-many-") as scratch:
        for kind, measure, counts in (
            ("launched", launched, asked.workers),
            ("spoken", spoken, asked.spoken),
        ):
            first = None
            for workers in counts:
                done = measure(workers, asked.seconds, Path(scratch, f"{kind}-{workers}"))
                first = first or (workers, max(done.cpu, LEAST_CPU))
                allowed = GROWTH * first[1] * n_log_n(workers) / n_log_n(first[0])
                is_good = is_good and done.is_right and done.cpu <= min(allowed, MOST_CPU)
                print(
                    f"{workers:7} {kind:8}  {done.start_s:8.1f}  {100 * done.cpu:21.1f}"
                    f"  {done.mib:13.0f}  {done.verdict_s:10.1f}"
                    + ("" if done.is_right else "  wrong verdict"),
                    flush=True,
                )
    print(disturbance.line())
    return 0 if is_good else 1


def n_log_n(workers: int) -> float:
    """Return what nothing grows faster than."""
    return workers * max(math.log2(workers), 1.0)


if __name__ == "__main__":
    sys.exit(main())
