"""Checks of the GPUs: pure, facts -> findings. `slots`: number of workers by host.address."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hvdtrain.launcher.doctor import ALL_HOSTS, ByHost, Facts, Finding, Status, values_of
from hvdtrain.launcher.doctor.machine_checks import GIB, each_host, list_by_host, size
from hvdtrain.log import counted

NO_GPU = "no NVIDIA GPU"
# The first driver for each major version of CUDA (CUDA's release notes, table of drivers for minor
# version compatibility).
FIRST_DRIVER = {11: "450.80", 12: "525.60", 13: "580.65"}
# Without permission to list processes, memory in use shows them: a driver by itself takes less.
BUSY_BYTES = 2 * GIB
SHOWN = 4  # processes of a card
REBUILD = "`hvdtrain install-horovod` builds it with NCCL where torch has CUDA and there is a GPU"

Card = Mapping[str, Any]  # as in gpu_facts.py
Slots = Mapping[str, int]
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
    there = [device for card in answering(gpus) for device in _parts_or_whole(card)]
    if gpus.get("selected") is None:
        return there
    chosen: list[Device] = []
    for entry in map(str.strip, gpus["selected"].split(",")):
        named = [
            device
            for device in there
            if entry[:4] in ("GPU-", "MIG-") and device.uuid.startswith(entry)
        ]
        named = named or [device for device in there if entry == str(device.card["index"])]
        if not named:  # CUDA ends its list here too
            break
        chosen += named[:1]
    return chosen


def answering(gpus: Mapping[str, Any]) -> list[Card]:
    """Return the cards that answer their driver."""
    return [card for card in gpus["list"] if not card["problem"]]


def _parts_or_whole(card: Card) -> list[Device]:
    if card.get("mig"):
        return [Device(card, part["uuid"], part["memory_total"]) for part in card["parts"]]
    return [Device(card, card["uuid"], card["memory_total"])]


def cards_in_use(gpus: Mapping[str, Any]) -> list[Card]:
    """Return the cards of a host that workers may use."""
    return list({device.card["index"]: device.card for device in devices_of(gpus)}.values())


def check_gpus(facts: ByHost, slots: Slots) -> list[Finding]:
    """Check that there is a GPU for each slot, and one driver everywhere."""
    findings, shown, drivers = [], {}, {}
    for host, gpus in values_of(facts, "gpus"):
        devices = devices_of(gpus)
        kinds = ", ".join(dict.fromkeys(device.kind for device in devices))
        shown[host] = f"{len(devices)} x {kinds}" if devices else NO_GPU
        if gpus["list"] and not devices:
            shown[host] = f"none of {counted(len(gpus['list']), 'GPU')} is selected"
        if devices:
            drivers[host] = gpus["driver"]
        for status, text, fix in _count_problems(gpus, slots[host]):
            findings.append(Finding("gpus", status, host, text, fix))
    if len(set(drivers.values())) > 1:
        text = f"different drivers: {list_by_host(drivers)}"
        findings.append(Finding("gpus", "warn", ALL_HOSTS, text, "install one driver everywhere"))
    return findings or each_host("gpus", shown, "{}")


def _count_problems(gpus: Mapping[str, Any], slots: int) -> Iterator[Problem]:
    if gpus["problem"]:
        fix = "repair the driver (restart after an update?), or remove it"
        yield "fail", f"the driver does not work: {gpus['problem']}", fix
        return
    for card in gpus["list"]:
        if card["problem"]:
            fix = "see dmesg there for Xid errors; restart the host, or take the card out"
            yield "fail", f"GPU {card['index']} does not answer: {card['problem']}", fix
    devices = devices_of(gpus)
    setting = f" (CUDA_VISIBLE_DEVICES={gpus['selected']})" if gpus.get("selected") else ""
    if devices and slots > len(devices):
        without = counted(slots - len(devices), "worker")
        text = f"{slots} slots, but {counted(len(devices), 'GPU')}{setting}: {without} without one"
        fix = f"give the host {counted(len(devices), 'slot')}, or train with --device cpu"
        yield "warn", text, fix
    if devices and not gpus["health"]:
        text = "errors, clocks and processes of the GPUs are not checked: no nvidia-ml-py"
        yield "warn", text, "`pip install nvidia-ml-py` in this environment"
    for card in answering(gpus):
        if card.get("mig") and (slots > 1 or not card["parts"]):
            parts = counted(len(card["parts"]), "part")
            text = f"GPU {card['index']} is divided (MIG) into {parts}: a process sees only one"
            fix = (
                "give each worker a part of its own by CUDA_VISIBLE_DEVICES, as srun "
                "--gpus-per-task=1 does, or undivide it: `nvidia-smi -mig 0`"
            )
            yield "warn", text, fix


def check_gpu_builds(facts: ByHost) -> list[Finding]:
    """Check that the driver supports torch's CUDA, and that torch and Horovod take GPU tensors."""
    findings, shown = [], {}
    for host, gpus in values_of(facts, "gpus"):
        build = facts[host].get("torch_build")
        if not devices_of(gpus) or not build:
            continue
        problem = _cuda_problem(build, gpus) or _horovod_problem(facts[host])
        if problem:
            findings.append(Finding("gpu builds", "warn", host, *problem))
        else:
            shown[host] = f"torch {build['version']} on driver {gpus['driver']}"
    return findings or each_host("gpu builds", shown, "{}")


def _cuda_problem(build: Mapping[str, Any], gpus: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return problem and fix of torch's CUDA beside the driver.

    A driver runs every CUDA of its own major version, or an older one ("minor version
    compatibility"), so minor versions are not compared.
    """
    if not build["cuda"]:
        text = f"there are GPUs, but torch {build['version']} is a build without CUDA"
        fix = f"install a CUDA build of torch, which PyPI has; then {REBUILD}"
        return text, fix
    if not gpus.get("cuda"):
        return None
    needed, (supported, minor) = int(build["cuda"].partition(".")[0]), gpus["cuda"]
    if needed <= supported:
        return None
    text = (
        f"driver {gpus['driver']} supports CUDA up to {supported}.{minor}, but torch "
        f"{build['version']} is built for CUDA {build['cuda']}: it finds no GPU"
    )
    first = FIRST_DRIVER.get(needed)
    driver = f"driver {first} or newer" if first else "a newer driver"
    return text, f"install {driver}, or a build of torch for CUDA {supported}"


def _horovod_problem(facts: Facts) -> tuple[str, str] | None:
    """Return problem and fix of a Horovod that does not exchange between GPUs."""
    loads = facts.get("horovod_loads", {})
    if loads.get("problem") or loads.get("nccl", True):
        return None
    text = "torch has CUDA, but Horovod is built without NCCL: "
    if loads.get("gpu_tensors"):
        return f"{text}gradients pass through the host's memory", REBUILD
    return f"{text}it takes no GPU tensors, so several workers need --device cpu", REBUILD


def check_gpu_errors(facts: ByHost) -> list[Finding]:
    """Check for memory errors of the GPUs that ECC could not correct, and what they left."""
    return _check_cards(facts, "gpu errors", _memory_problem, "no memory errors")


def _memory_problem(card: Card) -> Problem | None:
    """Return the worst problem of a card's memory."""
    reset = "reset it while no job runs (`nvidia-smi -r`, or restart); then burn it in: --burn-in"
    if card["rows_failed"]:
        text = "bad rows of memory can no longer be replaced by spare ones"
        return "fail", text, "replace the card; until then select others: CUDA_VISIBLE_DEVICES"
    if count := card["errors_since_loaded"]:
        text = f"{counted(count, 'memory error')} since the driver was loaded, not corrected by ECC"
        return "fail", text, reset
    if card["rows_pending"] or card["pages_pending"]:
        return "warn", "bad memory is not taken out of use before a reset", reset
    if count := card["errors_in_its_life"]:
        text = f"{counted(count, 'memory error')} in its life, not corrected by ECC"
        return "warn", text, "burn it in (--burn-in), and watch whether the number grows"
    if card["ecc"]:
        return None
    why = "it has no ECC" if card["ecc"] is None else "ECC is off"
    return "ok", f"its memory errors cannot be seen: {why}", ""


def check_gpu_clocks(facts: ByHost) -> list[Finding]:
    """Check that no GPU is slowed down by heat or its power supply."""
    fix = (
        "improve its cooling or power supply (nvidia-smi -q -d PERFORMANCE,TEMPERATURE); the "
        "slowest worker sets the pace of all"
    )

    def problem(card: Card) -> Problem | None:
        reasons = card["throttled"]
        return ("warn", f"slowed down: {', '.join(reasons)}", fix) if reasons else None

    return _check_cards(facts, "gpu clocks", problem, "not slowed down")


def check_gpu_use(facts: ByHost) -> list[Finding]:
    """Check that no other program computes on the GPUs."""
    fix = "wait for it, end it, or select other GPUs: CUDA_VISIBLE_DEVICES"

    def problem(card: Card) -> Problem | None:
        used = card["memory_total"] - card["memory_free"]
        processes = card["processes"] or []
        if not processes and used < BUSY_BYTES:
            return None
        who = "other programs"
        if processes:
            pids = ", ".join(str(process["pid"]) for process in processes[:SHOWN])
            who = f"{counted(len(processes), 'program')} (pid {pids})"
        text = f"busy: {who}, {size(used)} of {size(card['memory_total'])} in use"
        return "warn", text, fix

    return _check_cards(facts, "gpu use", problem, "no other program computes on them")


def check_gpu_kinds(facts: ByHost) -> list[Finding]:
    """Check that all GPUs are alike, within and across hosts."""
    kinds: dict[str, list[str]] = {}
    for host, gpus in values_of(facts, "gpus"):
        for kind in dict.fromkeys(device.kind for device in devices_of(gpus)) or [NO_GPU]:
            kinds.setdefault(kind, []).append(host)
    if len(kinds) < 2:
        return []
    listed = "; ".join(f"{kind} on {', '.join(hosts)}" for kind, hosts in kinds.items())
    text = f"unlike GPUs: {listed}: the slowest sets the pace, and they compute different bits"
    fix = (
        "use GPUs of one kind; else --rank-weights auto gives each worker work by its speed, but "
        "--virtual-workers and replays do not hold bit for bit"
    )
    return [Finding("gpu kinds", "warn", ALL_HOSTS, text, fix)]


def _check_cards(
    facts: ByHost, check: str, problem: Callable[[Card], Problem | None], good: str
) -> list[Finding]:
    """Return the findings of a check of each card whose health is known."""
    findings, shown = [], {}
    for host, gpus in values_of(facts, "gpus"):
        cards = cards_in_use(gpus) if gpus["health"] else []
        problems = _by_text(cards, problem)
        for (status, text, fix), named in problems.items():
            findings.append(Finding(check, status, host, f"{named}: {text}", fix))
        if cards and not problems:
            shown[host] = good
    return findings or each_host(check, shown, "{}")


def _by_text(cards: Sequence[Card], check: Callable[[Card], Problem | None]) -> dict[Problem, str]:
    """Return problem -> the names of the cards that have it."""
    numbers: dict[Problem, list[str]] = {}
    for card in cards:
        if problem := check(card):
            numbers.setdefault(problem, []).append(str(card["index"]))
    return {problem: f"GPU {', '.join(named)}" for problem, named in numbers.items()}
