"""Checks of the machines: pure, facts -> findings. `slots`: number of workers by host.address."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvdtrain.launcher.doctor import ALL_HOSTS, ByHost, Finding, Status, values_of
from hvdtrain.launcher.doctor.checks import REBUILD

MIB, GIB = 1 << 20, 1 << 30
# A worker with torch and Horovod imported holds 0.3 GiB before it has a model.
MEMORY_NEEDED, MEMORY_WANTED = 0.3 * GIB, 1 * GIB
SHM_WANTED = 256 * MIB  # a container has 64 MiB by default: too little for data loaders
DISK_NEEDED, DISK_WANTED = 100 * MIB, 2 * GIB
FILES_NEEDED = 1000
OPEN_FILES_WANTED = 1024
PROCESSES_WANTED = 256  # in addition to the workers' processes and threads
PROCESSES_PER_WORKER = 64
PROCESSES_NEEDED, PROCESSES_NEEDED_PER_WORKER = 8, 14  # at least, with threads; measured: 10, 16
LOCKED_WANTED = 1 * GIB  # InfiniBand registers the memory that it sends from
SKEW_WARN_S, SKEW_FAIL_S = 1.0, 60.0

Slots = Mapping[str, int]


def size(count: float) -> str:
    """Format a number of bytes in MiB or GiB."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"


def check_cores(facts: ByHost, slots: Slots) -> list[Finding]:
    """Check that there are as many usable cores (affinity, container quota) as slots."""
    findings, shown = [], {}
    for host, cores in values_of(facts, "cores"):
        usable = cores["usable"]
        shown[host] = f"{usable:g}"
        if slots[host] > usable:
            of = f" (of {cores['all']})" if usable < cores["all"] else ""
            text = f"{slots[host]} slots, but {usable:g} usable cores{of}: workers will wait"
            fix = "give the host fewer slots, or its container or job more cores"
            findings.append(Finding("cores", "warn", host, text, fix))
    return findings or each_host("cores", shown, "{} usable")


def check_memory(facts: ByHost, slots: Slots) -> list[Finding]:
    """Check that free memory, also within the container's limit, suffices for the workers."""
    findings, shown = [], {}
    for host, memory in values_of(facts, "memory"):
        free = memory["available"]
        group = facts[host].get("cgroup", {})
        if group.get("memory") is not None:
            free = min(free, max(0, group["memory"] - (group["memory_used"] or 0)))
        shown[host] = free
        each = free / slots[host]
        if each < MEMORY_WANTED:
            status: Status = "fail" if each < MEMORY_NEEDED else "warn"
            needed = f"{size(MEMORY_NEEDED)} each, {size(slots[host] * MEMORY_NEEDED)} in all"
            text = f"{size(free)} of memory free for {slots[host]} workers, which take {needed}, "
            text += "before they have a model"
            fix = "give the host fewer slots (-np), free memory, or raise the container's limit"
            findings.append(Finding("memory", status, host, text, fix))
    return findings or _at_least("memory", shown, "{} free")


def check_container(facts: ByHost, slots: Slots) -> list[Finding]:
    """Check the container's limit on processes, and system calls that it may forbid."""
    findings, shown = [], {}
    for host, group in values_of(facts, "cgroup"):
        parts = [f"{group['cores']:g} cores"] if group["cores"] else []
        parts += [f"memory {size(group['memory'])}"] if group["memory"] else []
        parts += [f"{group['processes']} processes"] if group["processes"] else []
        shown[host] = ", ".join(parts) or "no limits"
        wanted = PROCESSES_WANTED + PROCESSES_PER_WORKER * slots[host]
        if group["processes"] is not None and group["processes"] < wanted:
            left = group["processes"] - (group["processes_used"] or 0)
            needed = PROCESSES_NEEDED + PROCESSES_NEEDED_PER_WORKER * slots[host]
            status: Status = "fail" if left < needed else "warn"
            text = f"the container allows {group['processes']} processes and threads, {left} more"
            fix = f"allow {wanted} (docker run --pids-limit; Kubernetes: podPidsLimit)"
            findings.append(Finding("container", status, host, text, fix))
        if facts[host].get("single_copy") is False:
            text = "processes may not read each other's memory, which Open MPI does within a host"
            fix = (
                "start the container with --cap-add SYS_PTRACE, or set "
                "OMPI_MCA_btl_vader_single_copy_mechanism=none"
            )
            findings.append(Finding("container", "warn", host, text, fix))
    return findings or each_host("container", shown, "{}")


def check_shm(facts: ByHost) -> list[Finding]:
    """Check the room in /dev/shm, through which data-loading workers pass batches."""
    findings, shown = [], {}
    for host, host_facts in facts.items():
        shm = host_facts.get("shm")
        if shm is None:
            text = "no /dev/shm, which horovodrun, Open MPI and data-loading workers need"
            fix = (
                "start the container without --ipc none, or mount a tmpfs: --tmpfs /dev/shm:size=1g"
            )
            findings.append(Finding("shm", "fail", host, text, fix))
        elif shm["free"] < SHM_WANTED:
            text = (
                f"/dev/shm has {size(shm['free'])} free: too little for data-loading workers (-j)"
            )
            fix = "docker run --shm-size=1g (compose: shm_size), or train with -j 0"
            findings.append(Finding("shm", "warn", host, text, fix))
        else:
            shown[host] = shm["free"]
    return findings or _at_least("shm", shown, "/dev/shm {} free")


def check_limits(facts: ByHost, slots: Slots) -> list[Finding]:
    """Check the ulimits: open files, processes, locked memory."""
    findings = []
    for host, limits in values_of(facts, "limits"):
        processes = PROCESSES_WANTED + PROCESSES_PER_WORKER * slots[host]
        wanted = {"open_files": ("n", OPEN_FILES_WANTED), "processes": ("u", processes)}
        if facts[host].get("infiniband"):
            wanted["locked_memory"] = ("l", LOCKED_WANTED)
        for name, (letter, least) in wanted.items():
            if limits[name] is not None and limits[name] < least:
                in_bytes = name == "locked_memory"
                shown = size(limits[name]) if in_bytes else limits[name]
                text = f"a process may have {shown} {name.replace('_', ' ')}"
                enough = f"ulimit -{letter} {'unlimited' if in_bytes else least}"
                fix = f"`{enough}`, for ssh in /etc/security/limits.conf"
                findings.append(Finding("limits", "warn", host, text, fix))
    return findings or [Finding("limits", "ok", ALL_HOSTS, "ulimits are high enough")]


def check_output(facts: ByHost, first: str) -> list[Finding]:
    """Check that runs can be written, with room. `first`: the host of rank 0, which writes them."""
    findings, shown = [], {}
    for host, state in values_of(facts, "output"):
        worst: Status = "fail" if host == first else "warn"
        free, files = state["free"], state["files_free"]
        few_files = files is not None and files < FILES_NEEDED
        shown[host] = free
        if state["problem"]:
            text = f"{state['asked']} cannot be written: {state['problem']} ({state['path']})"
            fix = "make it writable, or choose another folder by --output"
            findings.append(Finding("output", worst, host, text, fix))
        elif free < DISK_WANTED or few_files:
            left = "few more files" if few_files else size(free)
            text = f"the disk of {state['asked']} has room for {left}"
            fix = "free some of it, or choose another folder by --output"
            status: Status = worst if free < DISK_NEEDED or few_files else "warn"
            findings.append(Finding("output", status, host, text, fix))
    return findings or _at_least("output", shown, "writable, {} free")


def check_shared(seen: Mapping[str, bool], first: str, folder: str) -> list[Finding]:
    """Check that the other hosts see a file of the first. `seen`: whether each other host does."""
    if not seen:
        return []
    if all(seen.values()):
        return [Finding("shared", "ok", ALL_HOSTS, f"all hosts share {folder}")]
    without = ", ".join(host for host, sees in seen.items() if not sees)
    text = (
        f"{folder} of {first} is not shared with {without}: checkpoints are on {first} alone, and "
        "a job that starts elsewhere does not find them"
    )
    fix = f"put --output on a file system that all hosts share, or keep {first} the first host"
    return [Finding("shared", "warn", ALL_HOSTS, text, fix)]


def check_horovod_loads(facts: ByHost) -> list[Finding]:
    """Check that Horovod's native library loads beside the installed torch."""
    findings, shown = [], {}
    for host, loads in values_of(facts, "horovod_loads"):
        if loads["problem"]:
            findings.append(Finding("horovod loads", "fail", host, loads["problem"], REBUILD))
        elif not loads["gloo"]:
            text = "Horovod is built without Gloo"
            findings.append(Finding("horovod loads", "warn", host, text, REBUILD))
        else:
            built = [name for name in ("gloo", "mpi", "nccl") if loads[name]]
            shown[host] = f"beside torch {loads['torch']}, with {', '.join(built)}"
    return findings or each_host("horovod loads", shown, "{}")


def check_torchvision_loads(facts: ByHost) -> list[Finding]:
    """Check that torchvision, where it is installed, can be imported beside the installed torch."""
    fix = "install the build of torchvision for this torch, from the same package index"
    return [
        Finding("torchvision", "warn", host, f"cannot be imported beside torch: {problem}", fix)
        for host, problem in values_of(facts, "torchvision_problem")
        if problem and facts[host].get("packages", {}).get("torchvision")
    ]


def check_mpi(facts: ByHost, needed: bool) -> list[Finding]:
    """Check for Open MPI 4, the same everywhere. `needed`: the user chose the MPI controller."""
    versions = dict(values_of(facts, "mpi"))
    worst: Status = "fail" if needed else "warn"
    if versions and not any(versions.values()):
        text = "no mpirun on PATH: --controller gloo only"
        return [Finding("mpi", worst, ALL_HOSTS, text, "launch/setup installs Open MPI 4")]
    findings = []
    for host, version in versions.items():
        if version is None:
            fix = "install the same MPI there, or use --controller gloo"
            findings.append(Finding("mpi", worst, host, "no mpirun on PATH", fix))
        elif not version.startswith("Open MPI 4."):
            text = f"{version}: horovodrun's options fit Open MPI 4 only"
            findings.append(Finding("mpi", worst, host, text, "install Open MPI 4: launch/setup"))
    if len(different := set(filter(None, versions.values()))) > 1:
        text = f"different versions: {list_by_host(versions)}"
        fix = "install one version everywhere, or use --controller gloo"
        findings.append(Finding("mpi", worst, ALL_HOSTS, text, fix))
    return findings or [Finding("mpi", "ok", ALL_HOSTS, version) for version in different]


def check_clocks(offsets: Mapping[str, tuple[float, float]]) -> list[Finding]:
    """Check the clocks against this machine's. `offsets`: by host, (seconds ahead, uncertainty)."""
    findings = []
    for host, (ahead, uncertain) in offsets.items():
        if abs(ahead) - uncertain > SKEW_WARN_S:
            status: Status = "fail" if abs(ahead) - uncertain > SKEW_FAIL_S else "warn"
            text = f"the clock is {abs(ahead):.1f} s {'ahead' if ahead > 0 else 'behind'}"
            fix = "synchronise it with a time server: `timedatectl set-ntp true`"
            findings.append(Finding("clock", status, host, text, fix))
    if offsets and not findings:
        widest = max(abs(ahead) + uncertain for ahead, uncertain in offsets.values())
        return [Finding("clock", "ok", ALL_HOSTS, f"clocks agree within {widest * 1000:.0f} ms")]
    return findings


def list_by_host(values: Mapping[str, Any]) -> str:
    """Return pairs of host and value as text."""
    return ", ".join(f"{host} {value}" for host, value in values.items())


def each_host(check: str, shown: Mapping[str, str], text: str) -> list[Finding]:
    """Return one finding if all hosts are alike, else one for each."""
    if len(set(shown.values())) == 1:
        return [Finding(check, "ok", ALL_HOSTS, text.format(next(iter(shown.values()))))]
    return [Finding(check, "ok", host, text.format(value)) for host, value in shown.items()]


def _at_least(check: str, free: Mapping[str, float], text: str) -> list[Finding]:
    """Return one finding, for the host with the least: such numbers differ between all hosts."""
    if not free:
        return []
    shown = size(min(free.values())) + (" or more" if len(free) > 1 else "")
    return [Finding(check, "ok", ALL_HOSTS, text.format(shown))]
