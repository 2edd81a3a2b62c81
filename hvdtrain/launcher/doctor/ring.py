"""A ring over all hosts: `hvdtrain verify` under horovodrun, one worker per host."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.errors import EXIT_MISMATCH
from hvdtrain.launcher.command import EngineOptions, engine_environment, horovodrun_argv, mpi_prefix
from hvdtrain.launcher.doctor.facts import ALL_HOSTS, Finding
from hvdtrain.launcher.doctor.probe import MARK
from hvdtrain.launcher.hosts import Host
from hvdtrain.launcher.ssh import SshSetup

END_S = 5.0
SMALL, LARGE = 4, 4 << 20  # bytes: latency, bandwidth
SET = ("--ops", "allreduce-sum", "--dtypes", "float32", "--sizes", "4,4M")


@dataclass(frozen=True)
class RingTrial:
    """Result of the ring."""

    workers: int
    controller: str
    exit_code: int | None  # of the launcher; None: timed out
    output: str
    measured: Mapping[str, Any] | None  # report written by verify

    def seconds(self, size: int) -> float | None:
        """Return the time of one all-reduce of `size` bytes; None if it was not measured."""
        return self._measured(size, "seconds")

    def bandwidth(self) -> float | None:
        """Return the bus bandwidth (busbw of nccl-tests) in bytes/s; None if not measured."""
        return self._measured(LARGE, "bus_bandwidth_bytes_per_s")

    def _measured(self, size: int, name: str) -> float | None:
        for case in (self.measured or {}).get("cases", ()):
            if case["bytes"] == size and case["submission"] == "alone":
                return float(case[name])
        return None


def ring_command(
    hosts: Sequence[Host], ssh: SshSetup, controller: str, interface: str | None, file: str
) -> list[str]:
    """Return the horovodrun command: one worker per host, or two on a single host."""
    each = 2 if len(hosts) == 1 else 1
    engine = EngineOptions(
        workers=each * len(hosts),
        controller=controller,
        hosts=[(ssh.name_of(host), each) for host in hosts],
        interface=interface,
        start_timeout_s=20,
        mpi_prefix=mpi_prefix(),
    )
    verify = str(Path(sys.executable).parent / "hvdtrain")
    return horovodrun_argv(engine, [verify, "verify", *SET, "--json", file])


def ring_environment(environment: Mapping[str, str], ssh: SshSetup, mark: str) -> dict[str, str]:
    """Return the environment of horovodrun and its workers: our `ssh` first on PATH, no secrets."""
    settings = {"OMPI_MCA_mpi_yield_when_idle": "1"}
    own = {MARK: mark, "OMP_NUM_THREADS": "1", "HOROVOD_GLOO_TIMEOUT_SECONDS": "20"}
    return engine_environment(environment, settings, ssh.path) | own


def run_ring(
    command: Sequence[str], environment: Mapping[str, str], limit_s: float
) -> tuple[int | None, str]:
    """Run the ring; return exit code (None: timed out) and output. No local process survives it."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None = None
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            _signal_group(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
        finally:
            _kill_session(process.pid)
            process.wait()
        output.seek(0)
        return code, output.read(1 << 20).decode(errors="replace")


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _kill_session(session: int) -> None:
    """Kill all processes of a session: Open MPI gives each worker its own process group."""
    deadline = time.monotonic() + END_S
    while (left := _members(session)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _members(session: int) -> list[int]:
    """Return the pids of the living processes of a session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, number = stat.read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):
            continue
        if int(number) == session and state not in "ZX":
            found.append(int(stat.parent.name))
    return found


def parse_measured(text: str | None) -> Mapping[str, Any] | None:
    """Return the report of verify; None if it is missing or incomplete."""
    try:
        found = json.loads(text or "")
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def check_ring(ring: RingTrial) -> list[Finding]:
    """Check that all sums are right, and report latency and bandwidth."""
    where = f"{ring.workers} workers, {ring.controller}"
    latency, bandwidth = ring.seconds(SMALL), ring.bandwidth()
    if ring.exit_code == 0 and latency is not None and bandwidth is not None:
        text = (
            f"{where}: all sums right; {SMALL} bytes in {latency * 1000:.1f} ms, bus bandwidth "
            f"{bandwidth / 1e6:.0f} MB/s"
        )
        return [Finding("ring", "ok", ALL_HOSTS, text)]
    cause = last_words(ring.output)
    if _wrong(ring):
        text = f"{where}: sums are wrong: {cause}"
        fix = "run `hvdtrain verify --full` under horovodrun, host by host: memory or network fault"
        return [Finding("ring", "fail", ALL_HOSTS, text, fix)]
    if ring.exit_code is None:
        text = f"{where}: timed out: {cause}"
        fix = "workers cannot reach one another: try --network-interface, check firewalls"
        return [Finding("ring", "fail", ALL_HOSTS, text, fix)]
    text = f"{where}: ended with exit code {ring.exit_code}: {cause}"
    fix = "fix what the checks above name, then run it by hand: horovodrun ... hvdtrain verify"
    return [Finding("ring", "fail", ALL_HOSTS, text, fix)]


def _wrong(ring: RingTrial) -> bool:
    if ring.exit_code == EXIT_MISMATCH or (ring.measured or {}).get("wrong", 0) > 0:
        return True
    return (
        re.search(rf"(?i)exit (?:with status )?code:? +{EXIT_MISMATCH}\b", ring.output) is not None
    )


def last_words(output: str) -> str:
    """Return the line that shows the cause: hvdtrain's error, another error, or the last line."""
    lines = [re.sub(r"^\[[\d,]+\]<std\w+>:", "", line).strip() for line in output.splitlines()]
    lines = [line for line in lines if line]
    for pattern in (r"^hvdtrain: |^verify: .*wrong", r"not found|denied|refused|timed out|Error:"):
        for line in lines:
            if re.search(pattern, line):
                return line[:300]
    return lines[-1][:300] if lines else "no output"
