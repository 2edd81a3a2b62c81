"""Checks of the GPUs: pure, facts -> findings. `slots`: number of workers by host.address."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from hvdtrain.launcher.doctor import (
    ALL_HOSTS,
    ByHost,
    Facts,
    Finding,
    HostCheck,
    Slots,
    Status,
    list_by_host,
    values_of,
)
from hvdtrain.launcher.doctor.machine_checks import GIB, size
from hvdtrain.log import counted, few

NO_GPU = "no NVIDIA GPU"
# The first driver for each major version of CUDA (CUDA's release notes, table of drivers for minor
# version compatibility).
FIRST_DRIVER = {11: "450.80", 12: "525.60", 13: "580.65"}
# Without permission to list processes, memory in use shows them: a driver by itself takes less.
BUSY_BYTES = 2 * GIB
WITH_NCCL = "`hvdtrain install-horovod` builds it with NCCL where torch has CUDA and there is a GPU"

Card = Mapping[str, Any]  # as in gpu_facts.py
Problem = tuple[Status, str, str]  # status, text, fix


class Device(NamedTuple):
    """What one worker can compute on: a card, or a part (MIG device) of a divided one."""

    card: Card
    uuid: str
    memory: int | None

    @property
    def kind(self) -> str:
        memory = f", {size(self.memory)}" if self.memory else ""
        part = " (part)" if self.uuid != self.card["uuid"] else ""
        return f"{self.card['name']}{part}{memory}"


def devices_of(gpus: Mapping[str, Any]) -> list[Device]:
    """Return the devices of a host that workers may use: all, or those of CUDA_VISIBLE_DEVICES.

    Its numbers are taken for the driver's, which is CUDA's own order where all cards are alike.
    """
    there = [
        Device(card, part["uuid"], part["memory_total"])
        for card in answering(gpus)
        for part in (card["parts"] if card.get("mig") else [card])
    ]
    if gpus.get("selected") is None:
        return there
    chosen: list[Device] = []
    for entry in map(str.strip, gpus["selected"].split(",")):
        named = [
            device
            for device in there
            if entry == str(device.card["index"])
            or (entry.startswith(("GPU-", "MIG-")) and device.uuid.startswith(entry))
        ]
        if not named:  # CUDA ends its list here too
            break
        chosen += named[:1]
    return chosen


def answering(gpus: Mapping[str, Any]) -> list[Card]:
    """Return the cards that answer their driver."""
    return [card for card in gpus["list"] if not card["problem"]]


def check_gpus(facts: ByHost, slots: Slots) -> list[Finding]:
    """Check that there is a GPU for each slot, and one driver everywhere."""
    check, drivers = HostCheck("gpus"), {}
    for host, gpus in values_of(facts, "gpus"):
        check.shown[host] = NO_GPU
        if devices := devices_of(gpus):
            kinds = ", ".join(dict.fromkeys(device.kind for device in devices))
            check.shown[host] = f"{len(devices)} x {kinds}"
            drivers[host] = gpus["driver"]
        elif gpus["list"]:
            check.shown[host] = f"none of {counted(len(gpus['list']), 'GPU')} is selected"
        for problem in _count_problems(gpus, len(devices), slots[host]):
            check.add(host, *problem)
    if len(set(drivers.values())) > 1:
        text = f"different drivers: {list_by_host(drivers)}"
        check.add(ALL_HOSTS, "warn", text, "install one driver everywhere")
    return check.or_shown()


def _count_problems(gpus: Mapping[str, Any], devices: int, slots: int) -> Iterator[Problem]:
    if gpus["problem"]:
        yield (
            "fail",
            f"the driver does not work: {gpus['problem']}",
            "repair the driver (restart after an update?), or remove it",
        )
        return
    for card in gpus["list"]:
        if card["problem"]:
            yield (
                "fail",
                f"GPU {card['index']} does not answer: {card['problem']}",
                "see dmesg there for Xid errors; restart the host, or take the card out",
            )
    setting = f" (CUDA_VISIBLE_DEVICES={gpus['selected']})" if gpus.get("selected") else ""
    if 0 < devices < slots:
        without = counted(slots - devices, "worker")
        yield (
            "warn",
            f"{slots} slots, but {counted(devices, 'GPU')}{setting}: {without} without one",
            f"give the host {counted(devices, 'slot')}, or train with --device cpu",
        )
    if devices and not gpus["health"]:
        yield (
            "warn",
            "errors, clocks and processes of the GPUs are not checked: no nvidia-ml-py",
            "`pip install nvidia-ml-py` in this environment",
        )
    for card in answering(gpus):
        if card.get("mig") and (slots > 1 or not card["parts"]):
            parts = counted(len(card["parts"]), "part")
            yield (
                "warn",
                f"GPU {card['index']} is divided (MIG) into {parts}: a process sees only one",
                "give each worker a part of its own by CUDA_VISIBLE_DEVICES, as srun "
                "--gpus-per-task=1 does, or undivide it: `nvidia-smi -mig 0`",
            )


def check_gpu_builds(facts: ByHost) -> list[Finding]:
    """Check that the driver supports torch's CUDA, and that torch and Horovod take GPU tensors."""
    check = HostCheck("gpu builds")
    for host, gpus in values_of(facts, "gpus"):
        build = facts[host].get("torch_build")
        if not devices_of(gpus) or not build:
            continue
        if problem := _cuda_problem(build, gpus) or _horovod_problem(facts[host]):
            check.add(host, "warn", *problem)
        else:
            check.shown[host] = f"torch {build['version']} on driver {gpus['driver']}"
    return check.or_shown()


def _cuda_problem(build: Mapping[str, Any], gpus: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return problem and fix of torch's CUDA beside the driver.

    A driver runs every CUDA of its own major version, or an older one ("minor version
    compatibility"), so minor versions are not compared.
    """
    if not build["cuda"]:
        text = f"there are GPUs, but torch {build['version']} is a build without CUDA"
        return text, f"install a CUDA build of torch, which PyPI has; then {WITH_NCCL}"
    needed = int(build["cuda"].partition(".")[0])
    supported, minor = gpus.get("cuda") or (needed, 0)  # unknown
    if needed <= supported:
        return None
    first = FIRST_DRIVER.get(needed)
    driver = f"driver {first} or newer" if first else "a newer driver"
    return (
        f"driver {gpus['driver']} supports CUDA up to {supported}.{minor}, but torch "
        f"{build['version']} is built for CUDA {build['cuda']}: it finds no GPU",
        f"install {driver}, or a build of torch for CUDA {supported}",
    )


def _horovod_problem(facts: Facts) -> tuple[str, str] | None:
    """Return problem and fix of a Horovod that does not exchange between GPUs."""
    loads = facts.get("horovod_loads", {})
    if loads.get("problem") or loads.get("nccl", True):
        return None
    refused = "it takes no GPU tensors, so several workers need --device cpu"
    effect = "gradients pass through the host's memory" if loads.get("gpu_tensors") else refused
    return f"torch has CUDA, but Horovod is built without NCCL: {effect}", WITH_NCCL


def _memory_problem(card: Card) -> Problem | None:
    """Return the worst problem of a card's memory."""
    reset = "reset it while no job runs (`nvidia-smi -r`, or restart); then burn it in: --burn-in"
    if card["rows_failed"]:
        return (
            "fail",
            "bad rows of memory can no longer be replaced by spare ones",
            "replace the card; until then select others: CUDA_VISIBLE_DEVICES",
        )
    if count := card["errors_since_loaded"]:
        errors = f"{counted(count, 'memory error')} since the driver was loaded"
        return "fail", f"{errors}, not corrected by ECC", reset
    if card["rows_pending"] or card["pages_pending"]:
        return "warn", "bad memory is not taken out of use before a reset", reset
    if count := card["errors_in_its_life"]:
        return (
            "warn",
            f"{counted(count, 'memory error')} in its life, not corrected by ECC",
            "burn it in (--burn-in), and watch whether the number grows",
        )
    if card["ecc"]:
        return None
    why = "it has no ECC" if card["ecc"] is None else "ECC is off"
    return "ok", f"its memory errors cannot be seen: {why}", ""


def _clock_problem(card: Card) -> Problem | None:
    """Return why a card is slowed down: by heat or its power supply."""
    fix = (
        "improve its cooling or power supply (nvidia-smi -q -d PERFORMANCE,TEMPERATURE); the "
        "slowest worker sets the pace of all"
    )
    reasons = ", ".join(card["throttled"] or ())
    return ("warn", f"slowed down: {reasons}", fix) if reasons else None


def _use_problem(card: Card) -> Problem | None:
    """Return which other programs compute on a card."""
    used, processes = card["memory_total"] - card["memory_free"], card["processes"] or []
    if not processes and used < BUSY_BYTES:
        return None
    pids = few([process["pid"] for process in processes])
    who = f"{counted(len(processes), 'program')} (pid {pids})" if pids else "other programs"
    text = f"busy: {who}, {size(used)} of {size(card['memory_total'])} in use"
    return "warn", text, "wait for it, end it, or select other GPUs: CUDA_VISIBLE_DEVICES"


# Checks of each card by itself: what is wrong with it, and what is shown of good ones.
CARD_CHECKS: Mapping[str, tuple[Callable[[Card], Problem | None], str]] = {
    "gpu errors": (_memory_problem, "no memory errors"),
    "gpu clocks": (_clock_problem, "not slowed down"),
    "gpu use": (_use_problem, "no other program computes on them"),
}


def check_cards(facts: ByHost, name: str) -> list[Finding]:
    """Make one of CARD_CHECKS, on the cards whose health is known."""
    check, (problem_of, good) = HostCheck(name), CARD_CHECKS[name]
    for host, gpus in values_of(facts, "gpus"):
        devices = devices_of(gpus) if gpus["health"] else []
        cards = {device.card["index"]: device.card for device in devices}
        numbers: dict[Problem, list[str]] = {}  # of the cards that have it
        for index, card in cards.items():
            if problem := problem_of(card):
                numbers.setdefault(problem, []).append(str(index))
        for (status, text, fix), affected in numbers.items():
            check.add(host, status, f"GPU {', '.join(affected)}: {text}", fix)
        if cards and not numbers:
            check.shown[host] = good
    return check.or_shown()


def check_gpu_kinds(facts: ByHost) -> list[Finding]:
    """Check that all GPUs are alike, within and across hosts."""
    kinds: dict[str, list[str]] = {}
    for host, gpus in values_of(facts, "gpus"):
        for kind in dict.fromkeys(device.kind for device in devices_of(gpus)) or [NO_GPU]:
            kinds.setdefault(kind, []).append(host)
    check = HostCheck("gpu kinds")
    if len(kinds) > 1:
        listed = "; ".join(f"{kind} on {', '.join(hosts)}" for kind, hosts in kinds.items())
        check.add(
            ALL_HOSTS,
            "warn",
            f"unlike GPUs: {listed}: the slowest sets the pace, and they compute different bits",
            "use GPUs of one kind; else --rank-weights auto gives each worker work by its speed, "
            "but --virtual-workers and replays do not hold bit for bit",
        )
    return check.findings
