"""The burn-in: which core is wrong, what becomes of its processes, and hosts without results."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pynvml
import pytest

from hvdtrain.evidence.known_answer import kind_of
from hvdtrain.launcher.doctor import Facts, Finding, format_findings, trainings
from hvdtrain.launcher.doctor.burn_in import BurnIn, Unit, burn_in, burn_in_json, check_burn_in
from hvdtrain.launcher.doctor.gpu_facts import read_nvml
from hvdtrain.launcher.doctor.probe import MARKER
from hvdtrain.launcher.hosts import Host
from hvdtrain.launcher.processes import marked
from hvdtrain.launcher.ssh import SshSetup
from tests.unit.launcher.test_doctor_probe import ask
from tests.unit.recorded_nvml import install
from tests.unit.sshd import ADDRESS, running_sshd

LIMIT_S = 20.0
RIGHT, WRONG, OTHER = "right", "wrong", "other"
TRACES = {
    RIGHT: {"input": "a", "step 1, loss": "b", "step 2, loss": "c"},
    WRONG: {"input": "a", "step 1, loss": "x", "step 2, loss": "y"},
}


def core(name: str, *answers: str, kind: str = "K", problem: str | None = None) -> Unit:
    """`name`: host and number; the answers of all repetitions."""
    at = {answer: [n for n, it in enumerate(answers, 1) if it == answer] for answer in answers}
    given = {answer: {"count": len(numbers), "at": numbers} for answer, numbers in at.items()}
    return Unit(name[:-1], "core", int(name[-1]), kind, False, problem, len(answers), given)


def findings_of(*trained: Unit) -> list[Finding]:
    found = BurnIn(60, traces=dict(TRACES))
    for it in trained:
        found.units.setdefault(it.host, []).append(it)
    return check_burn_in(found)


ONCE = "1 wrong; core 1 wrong in 1 of 3 repetitions (transient: 2), first in step 1, loss"
ALWAYS = "2 wrong; core 1 wrong in 2 of 2 repetitions (repeatable), first in step 1, loss"
ADVICE = "fix: take the host out of the hostfile, and test its memory"


@pytest.mark.parametrize(
    ("trained", "expected", "absent"),
    [
        pytest.param(
            [core("a0", RIGHT, RIGHT), core("b0", RIGHT)],
            ["ok    burn-in         a: 1 core, 2 repetitions, 0 wrong", "a, b: 2 cores compared"],
            ["fail", "fix"],
            id="all agree",
        ),
        pytest.param(
            [core("a0", RIGHT), core("b1", RIGHT, WRONG, RIGHT)],
            [f"fail  burn-in         b: 1 core, 3 repetitions, {ONCE}", ADVICE, "a: 1 core, 1 rep"],
            ["fail  burn-in         a"],
            id="transient",
        ),
        pytest.param(
            [core("a0", RIGHT), core("a1", WRONG, WRONG), core("b0", RIGHT)],
            [f"fail  burn-in         a: 2 cores, 3 repetitions, {ALWAYS}", "ok    burn-in"],
            ["fail  burn-in         b"],
            id="majority",
        ),
        pytest.param(
            [core("a0", RIGHT), core("b1", *map(str, range(9)))],
            ["b: 1 core, 9 repetitions, 9 wrong; core 1 wrong in 9 of 9 repetitions"],
            ["fail  burn-in         a", "first in"],
            id="one that contradicts itself loses, also without a trace",
        ),
        pytest.param(
            [core("a0", RIGHT), core("b0", WRONG, WRONG)],
            [
                "a core 0 and b core 0 disagree, first in step 1, loss: no majority (K)",
                "fix: to see which is wrong",
                "fail  burn-in         a: 1 core, 1 repetition, no majority",
                "fail  burn-in         b: 1 core, 2 repetitions, no majority",
            ],
            ["ok"],
            id="tie of two",
        ),
        pytest.param(
            [core("a0", RIGHT, RIGHT, WRONG)],
            ["1 wrong; core 0 wrong in 1 of 3 repetitions (transient: 3)", "with itself only"],
            [],
            id="a single core",
        ),
        pytest.param(
            [core("a0", RIGHT, WRONG)],
            ["a core 0 disagrees with itself, first in step 1, loss: no majority"],
            ["ok"],
            id="a single core without a majority",
        ),
        pytest.param(
            [core("a0", RIGHT), core("a1", RIGHT), core("b0", WRONG, kind="L")],
            [
                "a: 2 cores compared with one another, not with 1 other kind (K)",
                "b: 1 core compared with itself only, not with 1 other kind (L)",
            ],
            ["fail"],
            id="two kinds",
        ),
        pytest.param(
            [core("a0", RIGHT), core("a1", problem="ended by SIGKILL")],
            [
                "fail  burn-in         a: 2 cores, 1 repetition, 0 wrong; core 1 ended by SIGKILL, "
                "after 0 repetitions",
                "fix: see dmesg there",
            ],
            ["memtest"],
            id="a process that was killed",
        ),
        pytest.param(
            [
                core("a0", RIGHT),
                *(core(f"b{n}", WRONG, OTHER) for n in range(6)),
                core("c0", RIGHT),
            ],
            ["b: 6 cores, 12 repetitions, no majority", "b core 3, and 2 more"],
            [],
            id="lists are short",
        ),
    ],
)
def test_which_core_is_wrong(trained: list[Unit], expected: list[str], absent: list[str]) -> None:
    """Fails when a wrong core is not named, a good one is, or kinds are compared."""
    text = format_findings(findings_of(*trained))
    assert [part for part in expected if part not in text] == [], text
    assert [part for part in absent if part in text] == [], text


def test_a_host_without_results() -> None:
    """Fails when a host that gave no answer is not named, or the others are not compared."""
    found = BurnIn(60, {"a": [core("a0", RIGHT)]}, dict(TRACES))
    found.lost["b"] = Finding("burn-in", "fail", "b", "no answer in time")
    assert [(it.status, it.host) for it in check_burn_in(found)] == [
        ("ok", "a"), ("fail", "b"), ("ok", ""),
    ]  # fmt: skip


def gpu(name: str, *answers: str, sums: dict[str, Any] | None = None, **fields: Any) -> Unit:
    """The same of a GPU; `sums`: of the all-reduce between those of its host."""
    return replace(core(name, *answers, kind="G", **fields), what="GPU", sums=sums)


def summed(seconds: float, **fields: Any) -> dict[str, Any]:
    """An all-reduce of 1 GB between two GPUs."""
    sums = {"backend": "nccl", "bytes": 10**9, "seconds": seconds, "devices": 2, "wrong": None}
    return sums | fields


FAST, SLOW = "bus bandwidth 200.00 GB/s", "bus bandwidth 50.00 GB/s, but 200.00 GB/s on a like host"


@pytest.mark.parametrize(
    ("trained", "expected", "absent"),
    [
        pytest.param(
            [core("a0", RIGHT), gpu("a0", RIGHT, RIGHT), gpu("a1", RIGHT, WRONG, RIGHT)],
            [
                "ok    burn-in         a: 1 core, 1 repetition, 0 wrong",
                "fail  burn-in         a: 2 GPUs, 5 repetitions, 1 wrong; GPU 1 wrong in 1 of 3",
                "(transient: 2), first in step 1, loss",
                "fix: select other GPUs by CUDA_VISIBLE_DEVICES, and run the vendor's diagnosis",
                "a: 1 core compared with itself only (K)",
                "a: 2 GPUs compared with one another (G)",
            ],
            ["memtest"],
            id="a card is wrong",
        ),
        pytest.param(
            [gpu("a0", RIGHT), replace(gpu("b0", WRONG), uuid="4f-2a")],
            [
                "a GPU 0 and b GPU 0 (4f-2a) disagree, first in step 1, loss: no majority (G)",
                "fix: to see which is wrong, burn in with more GPUs of this kind",
            ],
            ["ok"],
            id="no majority",
        ),
        pytest.param(
            [gpu("a0", RIGHT, problem="ended by SIGABRT")],
            [
                "a: 1 GPU, 1 repetition, 0 wrong; GPU 0 ended by SIGABRT",
                "an Xid error of the drive",
            ],
            ["memtest"],
            id="a process that was ended",
        ),
        pytest.param(
            [
                *(gpu(f"a{n}", RIGHT, sums=summed(it)) for n, it in enumerate([0.004, 0.005])),
                *(gpu(f"b{n}", RIGHT, sums=summed(0.020)) for n in range(2)),
                *(gpu(f"c{n}", RIGHT, sums=summed(0.030, devices=4)) for n in range(2)),
            ],
            [
                f"ok    burn-in         a: all-reduce of 953 MiB between 2 GPUs (nccl): {FAST}",
                f"warn  burn-in         b: all-reduce of 953 MiB between 2 GPUs (nccl): {SLOW}",
                "fix: see the links between its GPUs",
                "ok    burn-in         c: all-reduce of 953 MiB between 4 GPUs (nccl): bus band",
            ],
            [],
            id="the slowest rank counts, and hosts with as many GPUs",
        ),
        pytest.param(
            [gpu("a0", RIGHT, sums=summed(1, wrong="3 of 5")), gpu("a1", RIGHT, sums=summed(1))],
            [
                "fail  burn-in         a: the all-reduce between GPUs gives wrong sums: 3 of 5",
                "fix",
            ],
            ["bus bandwidth"],
            id="wrong sums",
        ),
        pytest.param(
            [gpu("a0", RIGHT, sums={"missing": "no NCCL"}), gpu("a1", RIGHT, sums=summed(1))],
            [
                "warn  burn-in         a: the all-reduce between GPUs is not measured: no NCCL",
                "fix",
            ],
            ["bus bandwidth"],
            id="no sums",
        ),
    ],
)
def test_which_gpu_is_wrong(trained: list[Unit], expected: list[str], absent: list[str]) -> None:
    """Fails when a wrong GPU is not named, is compared with cores, gets the advice for these, or
    when slow or wrong sums between GPUs pass.
    """
    text = format_findings(findings_of(*trained))
    assert [part for part in expected if part not in text] == [], text
    assert [part for part in absent if part in text] == [], text


@pytest.mark.parametrize(
    ("situation", "text"),
    [
        ("healthy", "ok    burn-in         at work: not slowed down"),
        ("hot", "warn  burn-in         a: at work: GPU 0, 1: slowed down: thermal, hardware"),
        ("ecc errors", "fail  burn-in         a: at work: GPU 1: 3 memory errors since"),
    ],
)
def test_gpus_at_work(situation: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when what a driver reports of GPUs during the burn-in is lost."""
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    install(situation)
    found = BurnIn(60, {"a": [gpu("a0", RIGHT)]}, dict(TRACES))
    found.gpus["a"] = Facts({"gpus": {"selected": None, **(read_nvml() or {})}})
    assert text in format_findings(check_burn_in(found))
    assert burn_in_json(found)["gpus"]["a"]["driver"] == "580.95.05"


PROGRAM = """
import json, os, signal, sys, time
number = int(sys.argv[1])
if number == 1:
    sys.exit("no memory for it")
print("a warning", flush=True)
given = {"count": 1, "at": [1], "trace": {"input": "a"}}
print(json.dumps({"kind": "K", "repetitions": 1, "answers": {"x": given}}), flush=True)
if number == 2:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60 if number == 3 else 0)
"""


def wait_for(started: trainings.Trainings, ready: Callable[[dict[str, Any]], bool]) -> Any:
    """The state of the trainings, once it is as wanted."""
    deadline = time.monotonic() + LIMIT_S
    while not ready(state := started.state()):
        assert time.monotonic() < deadline, state
        time.sleep(0.02)
    return state


def test_processes_that_end_early_or_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when a process that dies or hangs is waited for, or its end is not explained."""
    monkeypatch.setattr(trainings, "ON_CORE", (sys.executable, "-c", PROGRAM))
    monkeypatch.setattr(trainings, "ON_DEVICE", (sys.executable, "-c", "print('[]')"))
    monkeypatch.setattr(trainings.os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    started = trainings.Trainings()
    try:
        started.start(1.0)
        wait_for(
            started,
            lambda state: (
                sum(it["running"] for it in state["units"]) == 1
                and state["units"][3]["answers"]
                and not state["listing"]
            ),
        )
        monkeypatch.setattr(trainings, "SILENT_S", 0.0)
        state = started.state()
    finally:
        started.end()
    assert not any(it["running"] for it in state["units"])
    assert [it["problem"] for it in state["units"][:3]] == [
        None,
        "ended by exit code 1 (no memory for it)",
        "ended by SIGKILL (a warning)",
    ]
    assert state["units"][3]["problem"].startswith("gave no result for ")
    assert [it["repetitions"] for it in state["units"]] == [1, 0, 1, 1]
    assert state["traces"] == {"x": {"input": "a"}}
    assert state["units"][0]["answers"] == {"x": {"count": 1, "at": [1]}}


LISTS = """
import sys
if sys.argv[1:] == ["list"]:
    print('a warning\\n[["gpu:0", "U0"], ["gpu:1", "U1"]]')
else:
    sys.exit(" ".join(sys.argv[1:5]))
"""


def test_gpus_are_burnt_in_as_soon_as_they_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when a GPU gets no process, or other arguments, or the cores wait for the GPUs."""
    monkeypatch.setattr(trainings, "ON_CORE", (sys.executable, "-c", PROGRAM))
    monkeypatch.setattr(trainings, "ON_DEVICE", (sys.executable, "-c", LISTS))
    monkeypatch.setattr(trainings.os, "sched_getaffinity", lambda pid: {0})
    started = trainings.Trainings()
    try:
        state = started.start(1.5)
        assert [it["what"] for it in state["units"]] == ["core"] and state["listing"]
        state = wait_for(
            started, lambda it: len(it["units"]) == 3 and not any(u["running"] for u in it["units"])
        )
    finally:
        started.end()
    gpus = [it for it in state["units"] if it["what"] == "GPU"]
    assert [(it["number"], it["uuid"], it["problem"]) for it in gpus] == [
        (0, "U0", "ended by exit code 1 (gpu:0 1.5 0 2)"),
        (1, "U1", "ended by exit code 1 (gpu:1 1.5 1 2)"),
    ]


@pytest.mark.parametrize(
    ("program", "limit_s", "problem"),
    [
        ("raise SystemExit('no libcuda')", 60.0, "torch cannot list the GPUs: no libcuda"),
        ("import os; os._exit(3)", 60.0, "torch cannot list the GPUs: exit code 3"),
        ("import time; time.sleep(60)", 0.2, "torch has not found the GPUs within 0 s"),
    ],
)
def test_gpus_that_torch_does_not_find(
    program: str, limit_s: float, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails when a host whose GPUs were not tested passes, or waits for them for ever."""
    monkeypatch.setattr(trainings, "ON_CORE", (sys.executable, "-c", PROGRAM))
    monkeypatch.setattr(trainings, "ON_DEVICE", (sys.executable, "-c", program))
    monkeypatch.setattr(trainings.os, "sched_getaffinity", lambda pid: {0})
    monkeypatch.setattr(trainings, "LISTING_S", limit_s)
    started = trainings.Trainings()
    try:
        started.start(1.0)
        state = wait_for(started, lambda it: not it["listing"])
    finally:
        started.end()
    assert state["problem"] == problem
    found = BurnIn(60, {"a": [core("a0", RIGHT)]}, dict(TRACES), unlisted={"a": state["problem"]})
    assert f"fail  burn-in         a: {problem}" in format_findings(check_burn_in(found))


def test_trainings_end_with_their_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when a probe whose input ends, as by a lost connection, leaves a training behind."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv("HVDTRAIN_TEST_MARK", mark)
    (answer,) = ask({"do": "burn_in", "seconds": 600})
    started = answer["values"]["burn_in"]["units"]
    assert [it["number"] for it in started] == sorted(os.sched_getaffinity(0))
    left = marked("HVDTRAIN_TEST_MARK", mark).keys() - {os.getpid()}
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == set()


def test_a_host_that_is_lost_on_the_way(tmp_path: Path) -> None:
    """Fails when a host that stops answering is waited for, not named, or its results are lost."""
    running = {"what": "core", "number": 0, "kind": "K", "running": True, "problem": None}
    running |= {"repetitions": 1, "answers": {"x": {"count": 1, "at": [1]}}}
    state = {"units": [running], "traces": {}, "listing": False, "problem": None}
    answer = json.dumps({"values": {"burn_in": state}, "errors": {}})
    (tmp_path / "answer").write_text(f"{MARKER}\n{answer}\n")
    command = f"ForceCommand read request; cat {tmp_path}/answer; read request; exit 9"
    with (
        running_sshd(tmp_path, command) as sshd,
        SshSetup([Host(ADDRESS)], sshd.options()) as ssh,
    ):
        found = burn_in([Host(ADDRESS)], ssh, 600)
    text = format_findings(check_burn_in(found))
    assert f"fail  burn-in         {ADDRESS}: a command on this host ended with exit code 9" in text
    assert f"{ADDRESS}: 1 core, 1 repetition, 0 wrong" in text


def test_trainings_that_cannot_be_started(tmp_path: Path) -> None:
    """Fails when the reason why a host could start no process does not reach the user."""
    answer = json.dumps({"values": {}, "errors": {"burn_in": "OSError: no more processes"}})
    (tmp_path / "answer").write_text(f"{MARKER}\n{answer}\n")
    command = f"ForceCommand read request; cat {tmp_path}/answer; read request"
    with (
        running_sshd(tmp_path, command) as sshd,
        SshSetup([Host(ADDRESS)], sshd.options()) as ssh,
    ):
        (finding,) = check_burn_in(burn_in([Host(ADDRESS)], ssh, 600))
    assert (finding.status, finding.host) == ("fail", ADDRESS)
    assert "OSError: no more processes" in finding.text


def write_cpu(root: Path, core: int, entries: Mapping[str, str], cache: str) -> None:
    lines = "".join(f"{name}\t: {value}\n" for name, value in entries.items())
    (root / "proc").mkdir(exist_ok=True)
    with (root / "proc/cpuinfo").open("a") as file:
        file.write(f"processor\t: {core}\n{lines}\n")
    folder = root / f"sys/devices/system/cpu/cpu{core}/cache/index0"
    folder.mkdir(parents=True)
    (folder / "size").write_text(f"{cache}\n")


def test_kinds_of_processors(tmp_path: Path) -> None:
    """Fails when like cores are of different kinds, or unlike ones (a hybrid processor) of one."""
    xeon = {"vendor_id": "GenuineIntel", "model": "85", "model name": "Xeon", "bogomips": "5"}
    write_cpu(tmp_path, 0, xeon, "32K")
    write_cpu(tmp_path, 1, xeon | {"bogomips": "6"}, "32K")
    write_cpu(tmp_path, 2, xeon, "48K")
    write_cpu(tmp_path, 10, {"CPU implementer": "0x41", "CPU part": "0xd0c"}, "32K")
    kinds = [kind_of(number, tmp_path) for number in (0, 1, 2, 10)]
    assert kinds[0] == kinds[1]
    assert len(set(kinds)) == 3
    assert "model 85, model name Xeon, caches 32K, torch " in kinds[0]
    assert "CPU implementer 0x41, CPU part 0xd0c, caches 32K" in kinds[3]
