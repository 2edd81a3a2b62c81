"""Checks of the machines: pure, facts -> findings. `slots`: number of workers by host.address."""

from collections.abc import Mapping

from hvdtrain.launcher.doctor import (
    ALL_HOSTS,
    HOSTS_SHOWN,
    ByHost,
    Finding,
    HostCheck,
    Slots,
    Status,
    list_by_host,
    values_of,
)
from hvdtrain.log import few

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
REBUILD = "build it for this torch: `hvdtrain install-horovod`"


def size(count: float) -> str:
    """Format a number of bytes in MiB or GiB."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"


def check_working_directory(facts: ByHost) -> list[Finding]:
    """Check that the folder in which workers start exists."""
    check, path = HostCheck("path"), ""
    for host, folder in values_of(facts, "working_directory"):
        path = folder["path"]
        if not folder["usable"]:
            check.add(
                host,
                "fail",
                f"there is no folder {path}, in which workers start",
                f"`mkdir -p {path}` there, or start from a folder that all hosts have",
            )
    return check.or_ok(f"working directory {path}")


def check_ports(facts: ByHost) -> list[Finding]:
    """Check that every host can listen on a port."""
    check = HostCheck("ports")
    for host, host_facts in facts.items():
        if problem := host_facts.errors.get("listener"):
            check.add(
                host,
                "fail",
                f"cannot listen on any port: {problem}",
                "free ports, or widen net.ipv4.ip_local_port_range",
            )
    return check.or_ok("hosts can listen on a port")


def check_cores(facts: ByHost, slots: Slots) -> list[Finding]:
    """Check that there are as many usable cores (affinity, container quota) as slots."""
    check = HostCheck("cores")
    for host, cores in values_of(facts, "cores"):
        usable = cores["usable"]
        check.shown[host] = f"{usable:g} usable"
        if slots[host] > usable:
            of = f" (of {cores['all']})" if usable < cores["all"] else ""
            check.add(
                host,
                "warn",
                f"{slots[host]} slots, but {usable:g} usable cores{of}: workers will wait",
                "give the host fewer slots, or its container or job more cores",
            )
    return check.or_shown()


def check_memory(facts: ByHost, slots: Slots) -> list[Finding]:
    """Check that free memory, also within the container's limit, suffices for the workers."""
    check, free = HostCheck("memory"), {}
    for host, memory in values_of(facts, "memory"):
        free[host] = memory["available"]
        group = facts[host].get("cgroup", {})
        if group.get("memory") is not None:
            free[host] = min(free[host], max(0, group["memory"] - (group["memory_used"] or 0)))
        each = free[host] / slots[host]
        if each < MEMORY_WANTED:
            check.add(
                host,
                "fail" if each < MEMORY_NEEDED else "warn",
                f"{size(free[host])} of memory free for {slots[host]} workers, which take "
                f"{size(MEMORY_NEEDED)} each, {size(slots[host] * MEMORY_NEEDED)} in all, before "
                "they have a model",
                "give the host fewer slots (-np), free memory, or raise the container's limit",
            )
    return check.findings or _at_least("memory", free, "{} free")


def check_container(facts: ByHost, slots: Slots) -> list[Finding]:
    """Check the container's limit on processes, and system calls that it may forbid."""
    check = HostCheck("container")
    for host, group in values_of(facts, "cgroup"):
        limits = [
            f"{group['cores']:g} cores" if group["cores"] else "",
            f"memory {size(group['memory'])}" if group["memory"] else "",
            f"{group['processes']} processes" if group["processes"] else "",
        ]
        check.shown[host] = ", ".join(filter(None, limits)) or "no limits"
        wanted = PROCESSES_WANTED + PROCESSES_PER_WORKER * slots[host]
        if group["processes"] is not None and group["processes"] < wanted:
            left = group["processes"] - (group["processes_used"] or 0)
            needed = PROCESSES_NEEDED + PROCESSES_NEEDED_PER_WORKER * slots[host]
            check.add(
                host,
                "fail" if left < needed else "warn",
                f"the container allows {group['processes']} processes and threads, {left} more",
                f"allow {wanted} (docker run --pids-limit; Kubernetes: podPidsLimit)",
            )
        if facts[host].get("single_copy") is False:
            check.add(
                host,
                "warn",
                "processes may not read each other's memory, which Open MPI does within a host",
                "start the container with --cap-add SYS_PTRACE, or set "
                "OMPI_MCA_btl_vader_single_copy_mechanism=none",
            )
    return check.or_shown()


def check_shm(facts: ByHost) -> list[Finding]:
    """Check the room in /dev/shm, through which data-loading workers pass batches."""
    check, free = HostCheck("shm"), {}
    for host, host_facts in facts.items():
        shm = host_facts.get("shm")
        if shm is None:
            check.add(
                host,
                "fail",
                "no /dev/shm, which horovodrun, Open MPI and data-loading workers need",
                "start the container without --ipc none, or mount a tmpfs: "
                "--tmpfs /dev/shm:size=1g",
            )
        elif shm["free"] < SHM_WANTED:
            check.add(
                host,
                "warn",
                f"/dev/shm has {size(shm['free'])} free: too little for data-loading workers (-j)",
                "docker run --shm-size=1g (compose: shm_size), or train with -j 0",
            )
        else:
            free[host] = shm["free"]
    return check.findings or _at_least("shm", free, "/dev/shm {} free")


def check_limits(facts: ByHost, slots: Slots) -> list[Finding]:
    """Check the ulimits: open files, processes, locked memory."""
    check = HostCheck("limits")
    for host, limits in values_of(facts, "limits"):
        processes = PROCESSES_WANTED + PROCESSES_PER_WORKER * slots[host]
        wanted = {"open_files": ("n", OPEN_FILES_WANTED), "processes": ("u", processes)}
        if facts[host].get("infiniband"):
            wanted["locked_memory"] = ("l", LOCKED_WANTED)
        for name, (letter, least) in wanted.items():
            if limits[name] is not None and limits[name] < least:
                in_bytes = name == "locked_memory"
                shown = size(limits[name]) if in_bytes else limits[name]
                enough = f"ulimit -{letter} {'unlimited' if in_bytes else least}"
                check.add(
                    host,
                    "warn",
                    f"a process may have {shown} {name.replace('_', ' ')}",
                    f"`{enough}`, for ssh in /etc/security/limits.conf",
                )
    return check.or_ok("ulimits are high enough")


def check_output(facts: ByHost, first: str) -> list[Finding]:
    """Check that runs can be written, with room. `first`: the host of rank 0, which writes them."""
    check, free = HostCheck("output"), {}
    for host, state in values_of(facts, "output"):
        worst: Status = "fail" if host == first else "warn"
        free[host], files = state["free"], state["files_free"]
        few_files = files is not None and files < FILES_NEEDED
        if state["problem"]:
            check.add(
                host,
                worst,
                f"{state['asked']} cannot be written: {state['problem']} ({state['path']})",
                "make it writable, or choose another folder by --output",
            )
        elif free[host] < DISK_WANTED or few_files:
            left = "few more files" if few_files else size(free[host])
            check.add(
                host,
                worst if free[host] < DISK_NEEDED or few_files else "warn",
                f"the disk of {state['asked']} has room for {left}",
                "free some of it, or choose another folder by --output",
            )
    return check.findings or _at_least("output", free, "writable, {} free")


def check_shared(seen: Mapping[str, bool], first: str, folder: str) -> list[Finding]:
    """Check that the other hosts see a file of the first. `seen`: whether each other host does."""
    if not seen:
        return []
    check = HostCheck("shared")
    if without := few([host for host, sees in seen.items() if not sees], most=HOSTS_SHOWN):
        check.add(
            ALL_HOSTS,
            "warn",
            f"{folder} of {first} is not shared with {without}: checkpoints are on {first} alone, "
            "and a job that starts elsewhere does not find them",
            f"put --output on a file system that all hosts share, or keep {first} the first host",
        )
    return check.or_ok(f"all hosts share {folder}")


def check_built_for(facts: ByHost) -> list[Finding]:
    """Check that Horovod was compiled for the installed torch (check_horovod_loads is slower)."""
    check = HostCheck("horovod")
    for host, built in values_of(facts, "horovod_built_for"):
        # Not the version of the package, which may lack the local part that names the build.
        torch = (facts[host].get("torch_build") or {}).get("version")
        if built and torch and built != torch:
            text = f"Horovod was built for torch {built}, but torch {torch} is installed"
            check.add(host, "warn", text, REBUILD)
    return check.findings


def check_horovod_loads(facts: ByHost) -> list[Finding]:
    """Check that Horovod's native library loads beside the installed torch."""
    check = HostCheck("horovod loads")
    for host, loads in values_of(facts, "horovod_loads"):
        if loads["problem"]:
            check.add(host, "fail", loads["problem"], REBUILD)
        elif not loads["gloo"]:
            check.add(host, "warn", "Horovod is built without Gloo", REBUILD)
        else:
            features = ", ".join(name for name in ("gloo", "mpi", "nccl") if loads[name])
            check.shown[host] = f"beside torch {loads['torch']}, with {features}"
    return check.or_shown()


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
    check = HostCheck("mpi")
    worst: Status = "fail" if needed else "warn"
    versions = dict(values_of(facts, "mpi"))
    different = set(filter(None, versions.values()))
    if versions and not different:
        text = "no mpirun on PATH: --controller gloo only"
        return [Finding("mpi", worst, ALL_HOSTS, text, "launch/setup installs Open MPI 4")]
    for host, version in versions.items():
        if version is None:
            fix = "install the same MPI there, or use --controller gloo"
            check.add(host, worst, "no mpirun on PATH", fix)
        elif not version.startswith("Open MPI 4."):
            check.add(
                host,
                worst,
                f"{version}: horovodrun's options fit Open MPI 4 only",
                "install Open MPI 4: launch/setup",
            )
    if len(different) > 1:
        check.add(
            ALL_HOSTS,
            worst,
            f"different versions: {list_by_host(versions)}",
            "install one version everywhere, or use --controller gloo",
        )
    return check.findings or [Finding("mpi", "ok", ALL_HOSTS, version) for version in different]


def check_clocks(offsets: Mapping[str, tuple[float, float]]) -> list[Finding]:
    """Check the clocks against this machine's. `offsets`: by host, (seconds ahead, uncertainty)."""
    check = HostCheck("clock")
    for host, (ahead, uncertain) in offsets.items():
        if abs(ahead) - uncertain > SKEW_WARN_S:
            check.add(
                host,
                "fail" if abs(ahead) - uncertain > SKEW_FAIL_S else "warn",
                f"the clock is {abs(ahead):.1f} s {'ahead' if ahead > 0 else 'behind'}",
                "synchronise it with a time server: `timedatectl set-ntp true`",
            )
    if not offsets:
        return []
    widest = max(abs(ahead) + uncertain for ahead, uncertain in offsets.values())
    return check.or_ok(f"clocks agree within {widest * 1000:.0f} ms")


def _at_least(check: str, free: Mapping[str, float], text: str) -> list[Finding]:
    """Return one finding, for the host with the least: such numbers differ between all hosts."""
    if not free:
        return []
    shown = size(min(free.values())) + (" or more" if len(free) > 1 else "")
    return [Finding(check, "ok", ALL_HOSTS, text.format(shown))]
