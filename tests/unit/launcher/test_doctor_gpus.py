"""What the doctor reads of GPUs and says of them, on recorded answers of the driver's library."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pynvml
import pytest

from hvdtrain.launcher.doctor import Facts, Finding, format_findings, gpu_checks, gpu_facts
from tests.unit.programs import put
from tests.unit.recorded_nvml import SITUATIONS, install, write_situation

ROOT = Path(__file__).parents[3]
CUDA_13 = {"version": "2.14.1+cu130", "cuda": "13.0"}
CUDA_12 = {"version": "2.14.1+cu128", "cuda": "12.8"}
ON_CPUS = {"version": "2.14.1+cpu", "cuda": None}
WITH_NCCL = {"problem": None, "nccl": True, "gpu_tensors": True}
WITHOUT_NCCL = WITH_NCCL | {"nccl": False}
WITHOUT_GPUS = WITHOUT_NCCL | {"gpu_tensors": False}


@pytest.fixture(autouse=True)
def no_library_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package finds the driver's own library again after each test."""
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})


def found_in(situation: str, selected: str | None = None) -> dict[str, Any]:
    """The fact of a host in this situation; `selected`: its CUDA_VISIBLE_DEVICES."""
    install(situation)
    nothing = {"list": [], "driver": None, "cuda": None, "problem": None, "health": False}
    return nothing | {"selected": selected} | (gpu_facts.read_nvml() or {})


def findings_of(
    *situations: str,
    slots: int = 2,
    build: Any = CUDA_13,
    loads: Any = WITH_NCCL,
    selected: str | None = None,
) -> list[Finding]:
    """All findings of hosts a, b and so on in these situations."""
    more = {"torch_build": build, "horovod_loads": loads}
    hosts = dict(zip("abc", situations, strict=False))
    facts = {it: Facts({"gpus": found_in(s, selected), **more}) for it, s in hosts.items()}
    counts = dict.fromkeys(facts, slots)
    return [
        *gpu_checks.check_gpus(facts, counts),
        *gpu_checks.check_gpu_builds(facts),
        *gpu_checks.check_cards(facts, "gpu errors"),
        *gpu_checks.check_cards(facts, "gpu clocks"),
        *gpu_checks.check_cards(facts, "gpu use"),
        *gpu_checks.check_gpu_kinds(facts),
    ]


def test_a_healthy_host_passes() -> None:
    """Fails when a check complains of good cards, or does not say what it has seen."""
    assert format_findings(findings_of("healthy", "healthy")).splitlines() == [
        "ok    gpus            2 x NVIDIA H100 80GB HBM3, 80.0 GiB",
        "ok    gpu builds      torch 2.14.1+cu130 on driver 580.95.05",
        "ok    gpu errors      no memory errors",
        "ok    gpu clocks      not slowed down",
        "ok    gpu use         no other program computes on them",
    ]


@pytest.mark.parametrize("situation", ["no driver", "driver not loaded"])
def test_a_host_without_gpus_has_one_line(situation: str) -> None:
    """Fails when the absence of a driver is a failure, or checks of GPUs speak of it too."""
    assert found_in(situation)["list"] == []
    (only,) = findings_of(situation, build=ON_CPUS, loads=WITHOUT_GPUS)
    assert (only.status, only.text) == ("ok", "no NVIDIA GPU")


# situation, check, status, part of the text, part of the fix
BAD = [
    ("driver half updated", "gpus", "fail", "does not work: NVML: RM has detected", "repair"),
    ("lost", "gpus", "fail", "GPU 1 does not answer: GPU is lost", "Xid"),
    ("ecc errors", "gpu errors", "fail", "GPU 1: 3 memory errors since the driver was", "reset it"),
    ("ecc errors of the past", "gpu errors", "warn", "GPU 0: 7 memory errors in its life", "burn"),
    ("row remap pending", "gpu errors", "warn", "GPU 0: bad memory is not taken out", "reset it"),
    ("pages pending", "gpu errors", "warn", "GPU 0: bad memory is not taken out", "reset it"),
    ("row remap failed", "gpu errors", "fail", "GPU 0: bad rows of memory can no", "replace the"),
    ("hot", "gpu clocks", "warn", "GPU 0, 1: slowed down: thermal, hardware slowdown", "cooling"),
    ("warm", "gpu clocks", "warn", "GPU 0: slowed down: thermal", "cooling"),
    ("power brake", "gpu clocks", "warn", "GPU 1: slowed down: power brake, hard", "power supply"),
    (
        *("busy", "gpu use", "warn"),
        *("GPU 0: busy: 2 programs (pid 4711, 4712), 61.0 GiB of 80.0 GiB in use", "wait for it"),
    ),
    ("busy, not said by whom", "gpu use", "warn", "GPU 0: busy: other programs, 61.0", "wait for"),
    (
        *("unlike", "gpu kinds", "warn"),
        "NVIDIA H100 80GB HBM3, 80.0 GiB on a; NVIDIA A100-SXM4-40GB, 40.0 GiB on a",
        "--rank-weights auto",
    ),
    (
        *("old driver", "gpu builds", "warn"),
        "driver 550.54.14 supports CUDA up to 12.4, but torch 2.14.1+cu130 is built for CUDA 13.0",
        "install driver 580.65 or newer, or a build of torch for CUDA 12",
    ),
    ("mig", "gpus", "warn", "GPU 0 is divided (MIG) into 2 parts", "srun --gpus-per-task=1"),
    ("mig without parts", "gpus", "warn", "GPU 0 is divided (MIG) into 0 parts", "-mig 0"),
]


@pytest.mark.parametrize(("situation", "check", "status", "text", "fix"), BAD)
def test_each_situation_is_noticed(
    situation: str, check: str, status: str, text: str, fix: str
) -> None:
    """Fails when a check lets this situation pass, names another card, or no fix; or when another
    check complains too.
    """
    slots = len(SITUATIONS[situation].cards) or 1
    slots = 2 if situation == "mig" else slots - (situation == "lost")
    bad = [it for it in findings_of(situation, slots=slots) if it.status != "ok"]
    assert [(it.check, it.status) for it in bad] == [(check, status)], format_findings(bad)
    assert text in bad[0].text
    assert fix in bad[0].fix


@pytest.mark.parametrize("situation", ["at its power limit", "geforce", "ecc off"])
def test_what_is_no_fault(situation: str) -> None:
    """Fails when a card that uses its power, or one without ECC or the like, is complained of, or
    passes for one whose memory has no errors.
    """
    findings = findings_of(situation, slots=1)
    assert {it.status for it in findings} == {"ok"}
    seen = any(it.text == "no memory errors" for it in findings)
    assert seen is bool(SITUATIONS[situation].cards[0].ecc)


@pytest.mark.parametrize(
    ("build", "loads", "situation", "text", "fix"),
    [
        (ON_CPUS, WITHOUT_GPUS, "healthy", "torch 2.14.1+cpu is a build without CUDA", "PyPI has"),
        (CUDA_13, WITHOUT_GPUS, "healthy", "it takes no GPU tensors, so several", "with NCCL"),
        (CUDA_13, WITHOUT_NCCL, "healthy", "gradients pass through the host's mem", "with NCCL"),
        (CUDA_12, WITH_NCCL, "healthy", None, None),  # an older CUDA
        (CUDA_12, WITH_NCCL, "old driver", None, None),  # another minor version
        (CUDA_13, {"problem": "undefined symbol"}, "healthy", None, None),  # has its own check
        (CUDA_13, {}, "healthy", None, None),
    ],
)
def test_software_for_gpus(
    build: Any, loads: Any, situation: str, text: str | None, fix: str | None
) -> None:
    """Fails when torch, driver and Horovod that do not fit pass, or others are complained of."""
    bad = [it for it in findings_of(situation, build=build, loads=loads) if it.status != "ok"]
    if text is None or fix is None:
        assert bad == []
        return
    assert [(it.check, it.status) for it in bad] == [("gpu builds", "warn")]
    assert text in bad[0].text and "`hvdtrain install-horovod`" in bad[0].fix and fix in bad[0].fix


@pytest.mark.parametrize(
    ("situation", "selected", "slots", "text"),
    [
        ("healthy", None, 3, "3 slots, but 2 GPUs: 1 worker without one"),
        ("healthy", "1", 2, "2 slots, but 1 GPU (CUDA_VISIBLE_DEVICES=1): 1 worker without one"),
        ("healthy", "GPU-00000001", 2, "2 slots, but 1 GPU (CUDA_VISIBLE_DEVICES=GPU-0000"),
        ("healthy", "1,9,0", 2, "2 slots, but 1 GPU (CUDA_VISIBLE_DEVICES=1,9,0)"),
        ("healthy", "1, 0", 2, None),
        ("ecc errors", "0", 1, None),  # of a card that is not used
        ("busy", "1", 1, None),
        ("unlike", "1", 1, None),
        ("mig", "MIG-bbbb", 1, None),
        ("mig", None, 1, None),
    ],
)
def test_gpus_and_slots(situation: str, selected: str | None, slots: int, text: str | None) -> None:
    """Fails when workers without a GPU go unnoticed, CUDA_VISIBLE_DEVICES is read otherwise than
    CUDA reads it, or a card that no worker uses is complained of.
    """
    bad = [it for it in findings_of(situation, slots=slots, selected=selected) if it.status != "ok"]
    assert [it.text.startswith(text or "") for it in bad] == [True] * (text is not None)


def test_what_is_selected_is_shown() -> None:
    """Fails when a host whose GPUs are all hidden is said to have none, or parts to be cards."""
    assert findings_of("healthy", selected="")[0].text == "none of 2 GPUs is selected"
    only = findings_of("mig", selected="MIG-bbbb", slots=1)[0]
    assert only.text == "1 x NVIDIA H100 80GB HBM3 (part), 40.0 GiB"


def test_hosts_that_differ() -> None:
    """Fails when other GPUs, none at all, or another driver on one host go unnoticed."""
    bad = [it for it in findings_of("healthy", "no driver", "old driver") if it.status != "ok"]
    texts = [it.text for it in bad]
    assert "different drivers: a 580.95.05, c 550.54.14" in texts
    alone = "unlike GPUs: NVIDIA H100 80GB HBM3, 80.0 GiB on a, c; no NVIDIA GPU on b"
    assert any(text.startswith(alone) for text in texts)


def test_without_the_package_nvidia_smi_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails when a host without nvidia-ml-py has no GPUs, its cards' health is taken for good, or
    the words of a driver that fails are lost.
    """
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['pynvml'] = None\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_facts.gpus()["list"] == []
    put(tmp_path, "nvidia-smi", "echo 'NVIDIA H200, 570.1, 143771, GPU-1'")
    found = gpu_facts.gpus()
    assert (found["driver"], found["list"][0]["uuid"], found["health"]) == ("570.1", "GPU-1", False)
    facts = {"a": Facts({"gpus": found, "torch_build": CUDA_12})}
    (finding,) = gpu_checks.check_gpus(facts, {"a": 1})
    assert (finding.status, finding.fix[:26]) == ("warn", "`pip install nvidia-ml-py`")
    assert [gpu_checks.check_cards(facts, name) for name in gpu_checks.CARD_CHECKS] == [[], [], []]
    put(tmp_path, "nvidia-smi", "echo 'Driver/library version mismatch'; exit 18")
    assert gpu_facts.gpus()["problem"] == "nvidia-smi: Driver/library version mismatch"


def test_a_driver_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when a driver that does not return keeps the host from answering."""
    sleep = (sys.executable, "-c", "import time; time.sleep(60)")
    monkeypatch.setattr(gpu_facts, "READ_NVML", sleep)
    monkeypatch.setattr(gpu_facts, "LIMIT_S", 0.5)
    began = time.monotonic()
    assert "gives no answer within" in gpu_facts.gpus()["problem"]
    assert time.monotonic() - began < 30


def test_the_command_reports_a_bad_card(tmp_path: Path) -> None:
    """Fails when `hvdtrain doctor` does not read the GPUs, or passes a host with a bad one."""
    write_situation(tmp_path, "ecc errors")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    command = [sys.executable, "-m", "hvdtrain.cli", "doctor", "--no-ring", "-H", "localhost:3"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 3, done.stdout + done.stderr
    for line in (
        r"warn  gpus            localhost: 3 slots, but 2 GPUs: 1 worker without one",
        r"fail  gpu errors      localhost: GPU 1: 3 memory errors since the driver was loaded",
        r"ok    gpu clocks      not slowed down",
    ):
        assert re.search(f"^{line}", done.stdout, re.MULTILINE), done.stdout
