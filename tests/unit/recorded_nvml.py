"""Answers of NVML, the driver's library, in several situations: `install("healthy")`.

They were written from NVML's documentation, and have the shapes of its C interface; none was taken
from a card. The package nvidia-ml-py runs above them as it does above the real library: what it
reads, converts and raises is its own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pynvml

GIB = 1 << 30
OK, NOT_SUPPORTED = pynvml.NVML_SUCCESS, pynvml.NVML_ERROR_NOT_SUPPORTED
IDLE, POWER_CAP, HW_SLOWDOWN, SW_THERMAL, HW_THERMAL, POWER_BRAKE = 1, 4, 8, 32, 64, 128


@dataclass(frozen=True)
class Card:
    """What the driver says of a card; None: the card does not support the question."""

    name: str = "NVIDIA H100 80GB HBM3"
    uuid: str = "GPU-00000000-0000-0000-0000-000000000000"
    capability: tuple[int, int] = (9, 0)
    total: int = 80 * GIB
    used: int = GIB // 2  # of the driver itself
    ecc: bool | None = True
    errors: tuple[int, int] | None = (0, 0)  # uncorrected: since the driver was loaded, in its life
    pages_pending: int | None = None  # cards that remap rows retire no pages
    rows: tuple[int, int, int, int] | None = (0, 0, 0, 0)
    reasons: int = IDLE
    processes: tuple[tuple[int, int], ...] | None = ()  # pid, bytes
    mig: bool | None = False
    parts: tuple[tuple[str, int], ...] = ()  # UUID, bytes
    persistence: bool = True
    refused: int = OK  # the error code of every question


@dataclass(frozen=True)
class Machine:
    """What the driver says of a machine."""

    cards: tuple[Card, ...] = ()
    driver: str = "580.95.05"
    cuda: int = 13000
    refused: int = OK  # the error code of the start


def cards(*changed: Mapping[str, Any], count: int = 2) -> tuple[Card, ...]:
    """`count` cards like the default one; `changed`: fields of the first ones."""
    uuids = (f"GPU-0000000{number}-0000-0000-0000-000000000000" for number in range(count))
    found = [Card(uuid=uuid) for uuid in uuids]
    for number, fields in enumerate(changed):
        found[number] = replace(found[number], **fields)
    return tuple(found)


A100 = {"name": "NVIDIA A100-SXM4-40GB", "capability": (8, 0), "total": 40 * GIB}
# A card of Pascal's: it retires pages; without ECC, MIG and remapped rows.
GEFORCE = {"name": "NVIDIA GeForce GTX 1080", "capability": (6, 1), "total": 8 * GIB}
GEFORCE |= dict.fromkeys(("ecc", "errors", "rows", "mig"))
PARTS = (("MIG-aaaa", 40 * GIB), ("MIG-bbbb", 40 * GIB))

SITUATIONS = {
    "no driver": Machine(refused=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND),
    "driver not loaded": Machine(refused=pynvml.NVML_ERROR_DRIVER_NOT_LOADED),
    "driver half updated": Machine(refused=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH),
    "healthy": Machine(cards()),
    "ecc errors": Machine(cards({}, {"errors": (3, 7)})),
    "ecc errors of the past": Machine(cards({"errors": (0, 7)})),
    "row remap pending": Machine(cards({"rows": (0, 1, 1, 0)})),
    "row remap failed": Machine(cards({"rows": (0, 9, 0, 1)})),
    "pages pending": Machine(cards(GEFORCE | {"pages_pending": 1}, count=1)),
    "ecc off": Machine(cards({"ecc": False, "errors": None, "rows": None}, count=1)),
    "hot": Machine(cards(*[{"reasons": HW_SLOWDOWN | HW_THERMAL}] * 2)),
    "warm": Machine(cards({"reasons": SW_THERMAL})),
    "power brake": Machine(cards({}, {"reasons": HW_SLOWDOWN | POWER_BRAKE})),
    "at its power limit": Machine(cards({"reasons": POWER_CAP})),
    "busy": Machine(cards({"used": 61 * GIB, "processes": ((4711, 60 * GIB), (4712, GIB))})),
    "busy, not said by whom": Machine(cards({"used": 61 * GIB, "processes": None})),
    "unlike": Machine(cards({}, A100)),
    "geforce": Machine(cards(GEFORCE, count=1)),
    "old driver": Machine(cards(), driver="550.54.14", cuda=12040),
    "mig": Machine(cards({"mig": True, "parts": PARTS}, count=1)),
    "mig without parts": Machine(cards({"mig": True}, count=1)),
    "lost": Machine(cards({}, {"refused": pynvml.NVML_ERROR_GPU_IS_LOST})),
}


@dataclass
class RecordedLibrary:
    """Stands for libnvidia-ml.so.1: C functions that fill what they are given by reference."""

    machine: Machine
    functions: dict[str, Callable[..., int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        machine = self.machine
        system = {
            "nvmlInitWithFlags": lambda flags: machine.refused,
            "nvmlShutdown": lambda: OK,
            "nvmlSystemGetDriverVersion": lambda text, size: _text(text, machine.driver),
            "nvmlSystemGetCudaDriverVersion_v2": lambda it: _put(it, machine.cuda),
            "nvmlDeviceGetCount_v2": lambda it: _put(it, len(machine.cards)),
            "nvmlDeviceGetHandleByIndex_v2": self._handle,
            "nvmlDeviceGetMigDeviceHandleByIndex": self._part_handle,
            "nvmlDeviceGetMemoryInfo": self._memory,
            "nvmlDeviceGetUUID": lambda handle, text, size: _text(text, self._unit(handle)[0]),
        }
        of_cards = {
            "nvmlDeviceGetName": lambda card, text, size: _text(text, card.name),
            "nvmlDeviceGetCudaComputeCapability": lambda card, *to: _put_all(to, card.capability),
            "nvmlDeviceGetEccMode": lambda card, *to: _put_all(to, card.ecc),
            "nvmlDeviceGetTotalEccErrors": _errors,
            "nvmlDeviceGetRetiredPagesPendingStatus": lambda card, to: _put(to, card.pages_pending),
            "nvmlDeviceGetRemappedRows": lambda card, *to: _put_all(to, card.rows),
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda card, to: _put(to, card.reasons),
            "nvmlDeviceGetComputeRunningProcesses_v3": _processes,
            "nvmlDeviceGetMigMode": lambda card, *to: _put_all(to, card.mig),
            "nvmlDeviceGetMaxMigDeviceCount": lambda card, to: _put(to, 7),
            "nvmlDeviceGetPersistenceMode": lambda card, to: _put(to, card.persistence),
        }
        self.functions |= system
        for name, function in of_cards.items():
            self.functions[name] = self._asked_of_a_card(function)

    def __getattr__(self, name: str) -> Callable[..., int]:
        try:
            return self.functions[name]
        except KeyError:  # as ctypes does
            raise AttributeError(name) from None

    def _asked_of_a_card(self, function: Callable[..., int]) -> Callable[..., int]:
        def ask(handle: Any, *to: Any) -> int:
            return function(self._card(handle), *to)

        return ask

    def _card(self, handle: Any) -> Card:
        return self.machine.cards[(_address(handle) >> 8) - 1]

    def _unit(self, handle: Any) -> tuple[str, int, int]:
        """UUID, size and used bytes of a card, or of a part of it."""
        card, part = self._card(handle), _address(handle) & 0xFF
        return (*card.parts[part - 1], 0) if part else (card.uuid, card.total, card.used)

    def _handle(self, index: Any, to: Any) -> int:
        return self.machine.cards[index.value].refused or _point(to, (index.value + 1) << 8)

    def _part_handle(self, handle: Any, index: Any, to: Any) -> int:
        if index.value >= len(self._card(handle).parts):
            return int(pynvml.NVML_ERROR_NOT_FOUND)
        return _point(to, _address(handle) + index.value + 1)

    def _memory(self, handle: Any, to: Any) -> int:
        _, total, used = self._unit(handle)
        memory = to._obj
        memory.total, memory.used, memory.free = total, used, total - used
        return OK


def _address(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def _point(to: Any, address: int) -> int:
    ctypes.memmove(to, ctypes.byref(ctypes.c_void_p(address)), ctypes.sizeof(ctypes.c_void_p))
    return OK


def _text(buffer: Any, text: str) -> int:
    buffer.value = text.encode()
    return OK


def _put(to: Any, value: Any) -> int:
    if value is None:
        return int(NOT_SUPPORTED)
    to._obj.value = int(value)
    return OK


def _put_all(to: Any, values: Any) -> int:
    """A mode is put twice: now, and after a restart."""
    pair = values if isinstance(values, tuple) else (values, values)
    return max(_put(one, value) for one, value in zip(to, pair, strict=True))


def _errors(card: Card, kind: Any, counter: Any, to: Any) -> int:
    assert kind.value == pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    return _put(to, card.errors and card.errors[counter.value])


def _processes(card: Card, count: Any, to: Any) -> int:
    """The first question has no room for the answer, which only gives the number."""
    if card.processes is None:
        return int(pynvml.NVML_ERROR_NO_PERMISSION)
    room, count._obj.value = count._obj.value, len(card.processes)
    if room < len(card.processes):
        return int(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
    for number, (pid, memory) in enumerate(card.processes):
        to[number].pid, to[number].usedGpuMemory = pid, memory
    return OK


def install(situation: str) -> None:
    """Let the package of this process find the recorded library in place of the driver's."""
    pynvml.nvmlLib = RecordedLibrary(SITUATIONS[situation])
    pynvml._nvmlGetFunctionPointer_cache.clear()


def write_situation(folder: Path, situation: str) -> None:
    """Write the file that Python reads at its start, if `folder` is on PYTHONPATH."""
    lines = f"from tests.unit.recorded_nvml import install\ninstall({situation!r})\n"
    (folder / "sitecustomize.py").write_text(lines)
