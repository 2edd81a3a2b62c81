"""A ring over all hosts: `hvdtrain verify` under horovodrun, one worker per host."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
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
from hvdtrain.launcher.doctor import ALL_HOSTS, Finding
from hvdtrain.launcher.doctor.probe import MARK, sweep
from hvdtrain.launcher.doctor.sessions import ProbeSession, on_all
from hvdtrain.launcher.horovodrun import (
    GPU_SELECTION,
    horovodrun_argv,
    horovodrun_environment,
    mpi_prefix,
)
from hvdtrain.launcher.hosts import Host
from hvdtrain.launcher.ssh import SshSetup
from hvdtrain.network import TOWARDS

LIMIT_S = 60.0
END_S = 5.0
SMALL, LARGE = 4, 4 << 20  # bytes: latency, bandwidth
SET = ("--ops", "allreduce-sum", "--dtypes", "float32", "--sizes", "4,4M")
# Lines of output that name a cause: hvdtrain's error, another error.
CAUSES = (r"^hvdtrain: |^verify: .*wrong", r"not found|denied|refused|timed out|Error:")


@dataclass(frozen=True)
class RingTrial:
    """Result of the ring."""

    workers: int
    controller: str
    exit_code: int | None  # of the launcher; None: timed out
    output: str
    measured: Mapping[str, Any] | None  # report written by verify


def try_ring(
    hosts: Sequence[Host],
    ssh: SshSetup,
    sessions: Mapping[str, ProbeSession],
    controller: str,
    interface: str | None,
    towards: str | None = None,
) -> RingTrial:
    """Run the ring, one worker per host or two on a single host; leave no process behind.

    `towards`: an address; each worker uses its own interface towards it, instead of `interface`.
    """
    each = 2 if len(hosts) == 1 else 1
    writer = sessions[hosts[0].address]  # the host of rank 0
    file = writer.ask_again({"do": "make_file"}).get("make_file", os.devnull)
    verify = [str(Path(sys.executable).parent / "hvdtrain"), "verify", *SET, "--json", file]
    mark = secrets.token_hex(16)
    try:
        command = horovodrun_argv(
            verify,
            each * len(hosts),
            controller,
            [(ssh.name_of(host), each) for host in hosts],
            interface=interface,
            start_timeout_s=20,
            prefix=mpi_prefix(),
        )
        environment = ring_environment(os.environ, ssh, mark)
        environment |= {TOWARDS: towards} if towards and len(hosts) > 1 else {}
        if all(session.local for session in sessions.values()):
            environment |= {name: os.environ[name] for name in GPU_SELECTION if name in os.environ}
        code, output = run_ring(command, environment, LIMIT_S)
    finally:
        content = writer.ask_again({"do": "take_file", "file": file}).get("take_file")
        on_all(lambda session: session.ask_again({"do": "sweep", "mark": mark}), sessions)
    measured = None
    with contextlib.suppress(ValueError):  # incomplete
        measured = json.loads(content or "null")
    return RingTrial(each * len(hosts), controller, code, output, measured)


def ring_environment(environment: Mapping[str, str], ssh: SshSetup, mark: str) -> dict[str, str]:
    """Return the environment of horovodrun and its workers: our `ssh` first on PATH, no secrets."""
    settings = {"OMPI_MCA_mpi_yield_when_idle": "1"}
    overrides = {MARK: mark, "OMP_NUM_THREADS": "1", "HOROVOD_GLOO_TIMEOUT_SECONDS": "20"}
    return horovodrun_environment(environment, settings, ssh.path) | overrides


def run_ring(
    command: Sequence[str], environment: Mapping[str, str], limit_s: float
) -> tuple[int | None, str]:
    """Run the ring; return exit code (None: timed out) and output. No local process survives it.

    Its processes are found by MARK in `environment`: under Open MPI each has its own process group.
    """
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            env=dict(environment),
            cwd="/",  # exists on every host, and has nothing that Python would import
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None = None
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
        finally:
            deadline = time.monotonic() + END_S
            while sweep(environment[MARK]) and time.monotonic() < deadline:
                time.sleep(0.02)
            process.wait()
        output.seek(0)
        return code, output.read(1 << 20).decode(errors="replace")


def check_ring(ring: RingTrial) -> list[Finding]:
    """Check that all sums are right, and report latency and bandwidth."""
    where = f"{ring.workers} workers, {ring.controller}"
    report = ring.measured or {"cases": [], "wrong": 0}
    measured = _measured_alone(report["cases"])
    is_complete = all(sizes.keys() >= {SMALL, LARGE} for sizes in measured.values())
    if ring.exit_code == 0 and measured and is_complete:
        speeds = [_speed(report, device, sizes) for device, sizes in measured.items()]
        text = f"{where}: all sums right; {'; '.join(speeds)}"
        return [Finding("ring", "ok", ALL_HOSTS, text)]
    reported = re.search(rf"(?i)exit (?:with status )?code:? +{EXIT_MISMATCH}\b", ring.output)
    if ring.exit_code == EXIT_MISMATCH or report["wrong"] > 0 or reported:
        problem = "sums are wrong"
        fix = "run `hvdtrain verify --full` under horovodrun, host by host: memory or network fault"
    elif ring.exit_code is None:
        problem = "timed out"
        fix = "workers cannot reach one another: try --network-interface, check firewalls"
    else:
        problem = f"ended with exit code {ring.exit_code}"
        fix = "fix what the checks above name, then run it by hand: horovodrun ... hvdtrain verify"
    text = f"{where}: {problem}: {last_words(ring.output)}"
    return [Finding("ring", "fail", ALL_HOSTS, text, fix)]


def _measured_alone(cases: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, Mapping[str, Any]]]:
    """Return device -> bytes -> the case of one tensor of this size."""
    by_device: dict[str, dict[int, Mapping[str, Any]]] = {}
    for case in cases:
        if case["submission"] == "alone":
            by_device.setdefault(case["device"], {})[case["bytes"]] = case
    return by_device


def _speed(report: Mapping[str, Any], device: str, sizes: Mapping[int, Mapping[str, Any]]) -> str:
    """Return latency and bandwidth (busbw of nccl-tests) of the sums of one device's tensors."""
    on_gpus = f"on GPUs{' by NCCL' if report.get('nccl') else ''} "
    return (
        f"{'' if device == 'cpu' else on_gpus}{SMALL} bytes in "
        f"{sizes[SMALL]['seconds'] * 1000:.1f} ms, bus bandwidth "
        f"{sizes[LARGE]['bus_bandwidth_bytes_per_s'] / 1e6:.0f} MB/s"
    )


def last_words(output: str) -> str:
    """Return the line that shows the cause: hvdtrain's error, another error, or the last line."""
    lines = [re.sub(r"^\[[\d,]+\]<std\w+>:", "", line).strip() for line in output.splitlines()]
    lines = list(filter(None, lines))
    causes = [line for pattern in CAUSES for line in lines if re.search(pattern, line)]
    return [*causes, *lines[-1:], "no output"][0][:300]
