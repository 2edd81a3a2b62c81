"""Facts of a host's NVIDIA GPUs: from the driver's library, NVML, by the optional package
nvidia-ml-py; without the package, a few of them from nvidia-smi.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from hvdtrain.interpreter import module_argv
from hvdtrain.launcher.processes import run_child
from hvdtrain.log import say

SELECTION = "CUDA_VISIBLE_DEVICES"
# Why clocks are lowered: bits of nvmlClocksThrottleReasons. Those of idle cards and of limits that
# a user or the design of the card sets (clocks, power cap) are left out.
THROTTLED = {"thermal": 0x20 | 0x40, "power brake": 0x80, "hardware slowdown": 0x08}
UNCORRECTED, SINCE_LOADED, IN_ITS_LIFE = 1, 0, 1  # nvmlMemoryErrorType_t, nvmlEccCounterType_t
MIB = 1 << 20
READ_NVML = module_argv("hvdtrain.launcher.doctor.gpu_facts")
LIMIT_S = 20.0  # a card that is lost may hang whoever asks its driver


def gpus() -> dict[str, Any]:
    """Return the GPUs that the driver reports, and its versions.

    `list`: a mapping for each card; `driver`; `cuda`: the version that the driver supports, or
    None; `problem`: why the driver does not answer, or None; `health`: whether the facts include
    errors, clocks and processes; `selected`: CUDA_VISIBLE_DEVICES of this host, or None.
    """
    try:
        done = run_child(READ_NVML, LIMIT_S)
        answer: Mapping[str, Any] = json.loads(done.stdout or "null") or _by_nvidia_smi()
    except subprocess.TimeoutExpired:
        answer = {"problem": f"the driver gives no answer within {LIMIT_S:.0f} s"}
    return {
        "list": [],
        "driver": None,
        "cuda": None,
        "problem": None,
        "health": False,
        "selected": os.environ.get(SELECTION),
        **answer,
    }


def read_nvml() -> dict[str, Any] | None:
    """Return what NVML reports; None without its package or without a driver."""
    try:
        import pynvml  # optional: the package nvidia-ml-py
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        absent = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED
        return None if error.value in absent else {"problem": f"NVML: {error}"}
    try:
        return _read_all(pynvml)
    except pynvml.NVMLError as error:
        return {"problem": f"NVML: {error}"}
    finally:
        pynvml.nvmlShutdown()


def _read_all(nvml: ModuleType) -> dict[str, Any]:
    """Return the facts of all cards, of a library that is ready. Raises NVMLError."""
    # The second form reports the driver that CUDA loads, also where a newer one is installed beside
    # that of the kernel ("forward compatibility").
    version = _answer(nvml.nvmlSystemGetCudaDriverVersion_v2) or _answer(
        nvml.nvmlSystemGetCudaDriverVersion
    )
    cards = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            cards.append(_read_card(nvml, index))
        except nvml.NVMLError as error:
            cards.append({"index": index, "problem": str(error)})
    return {
        "list": cards,
        "driver": nvml.nvmlSystemGetDriverVersion(),
        "cuda": version and [version // 1000, version % 1000 // 10],
        "health": True,
    }


def _read_card(nvml: ModuleType, index: int) -> dict[str, Any]:
    """Return the facts of a card; None for those that it does not have. Raises NVMLError."""
    card = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(card)
    errors = nvml.nvmlDeviceGetTotalEccErrors
    reasons = _answer(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, card)
    rows = _answer(nvml.nvmlDeviceGetRemappedRows, card)
    processes = _answer(nvml.nvmlDeviceGetComputeRunningProcesses, card)
    return {
        "index": index,
        "problem": None,
        "name": nvml.nvmlDeviceGetName(card),
        "uuid": nvml.nvmlDeviceGetUUID(card),
        "capability": _answer(nvml.nvmlDeviceGetCudaComputeCapability, card),
        "memory_total": memory.total,
        "memory_free": memory.free,
        "ecc": _is_on(nvml.nvmlDeviceGetEccMode, card),
        "errors_since_loaded": _answer(errors, card, UNCORRECTED, SINCE_LOADED),
        "errors_in_its_life": _answer(errors, card, UNCORRECTED, IN_ITS_LIFE),
        "pages_pending": _answer(nvml.nvmlDeviceGetRetiredPagesPendingStatus, card),
        "rows_pending": rows and bool(rows[2]),
        "rows_failed": rows and bool(rows[3]),
        "throttled": None
        if reasons is None
        else [name for name, bits in THROTTLED.items() if reasons & bits],
        "processes": processes  # None: not permitted
        and [{"pid": process.pid, "memory": process.usedGpuMemory} for process in processes],
        "mig": _is_on(nvml.nvmlDeviceGetMigMode, card),
        "parts": _parts(nvml, card),
        "persistence": _answer(nvml.nvmlDeviceGetPersistenceMode, card),
    }


def _parts(nvml: ModuleType, card: Any) -> list[dict[str, Any]]:
    """Return the parts (MIG devices) of a divided card."""
    parts = []
    for number in range(_answer(nvml.nvmlDeviceGetMaxMigDeviceCount, card) or 0):
        part = _answer(nvml.nvmlDeviceGetMigDeviceHandleByIndex, card, number)
        if part is not None:
            total = nvml.nvmlDeviceGetMemoryInfo(part).total
            parts.append({"uuid": nvml.nvmlDeviceGetUUID(part), "memory_total": total})
    return parts


def _is_on(question: Callable[..., Any], card: Any) -> bool | None:
    """Return whether a mode is on now (not after a restart); None where there is no such mode."""
    modes = _answer(question, card)
    return modes and bool(modes[0])


def _answer(question: Callable[..., Any], *arguments: Any) -> Any:
    """Return the answer; None where card or driver has none, or this user may not ask."""
    try:
        return question(*arguments)
    except Exception:  # NVMLError, or NVMLLibraryMismatchError of another version of the package
        return None


def _by_nvidia_smi() -> Mapping[str, Any]:
    """Return the facts that every version of nvidia-smi reports; none without it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    query = ["--query-gpu=name,driver_version,memory.total,uuid", "--format=csv,noheader,nounits"]
    done = run_child([program, *query], LIMIT_S)
    if done.returncode != 0:
        return {"problem": f"nvidia-smi: {(done.stdout + done.stderr).strip()[:300]}"}
    cards, driver = [], None
    for index, line in enumerate(filter(None, done.stdout.splitlines())):
        name, driver, memory, uuid = map(str.strip, line.split(","))
        total = int(memory) * MIB if memory.isdigit() else None
        cards.append(
            {"index": index, "problem": None, "name": name, "uuid": uuid, "memory_total": total}
        )
    return {"list": cards, "driver": driver}


if __name__ == "__main__":
    say(json.dumps(read_nvml()))
