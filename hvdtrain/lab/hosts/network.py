"""Several hosts on one switch, each with its own network, names, processes and sshd.

They reach one another by SSH, with keys and a configuration that are not those of the machine.

Each host, and the switch that connects them, is a `Node`. The bridge of the switch is in its own
namespace, so that the network of the machine is not changed. Three hosts:

    alpha 10.77.0.1          beta 10.77.0.2          gamma 10.77.0.3
    eth0 ---- port0 [ switch: a bridge ] port1 ---- eth0 ...

Nothing of it has a name outside. All of it is removed with the process that made it, however that
ends, and two networks at the same time are invisible to each other.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from hvdtrain.lab.hosts.node import UNSHARE, HostProcess, HostsError, Node, kill_all, run_tool

NAMES = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta")
INTERFACE = "eth0"  # on every host
SSHD = "/usr/sbin/sshd"
SSHD_START_S = 10.0
VANISH_S = 15.0  # processes that were killed have this long to go
BURST_BYTES = 512 << 10  # that a shaped link passes at once
QUEUE_MS = 200  # that a packet may wait for a shaped link
SHELL_START_UP = (".bashrc", ".zshenv")  # files that a shell under sshd reads
PACKAGES = Path(__file__).resolve().parents[3]  # the folder of this package
TOOLS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "ssh-keygen": "openssh-client",
    SSHD: "openssh-server",
}
# PYTHONPATH: a login on a host finds this package, as if it were installed there.
SSHD_CONFIG = """\
Port {port}
ListenAddress 0.0.0.0
ListenAddress ::
HostKey "{folder}/host_key"
PidFile none
AuthorizedKeysFile .ssh/authorized_keys
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
PrintMotd no
SetEnv "PYTHONPATH={python_path}"
"""


def why_not() -> str | None:
    """Return the reason why this machine cannot make hosts, or None."""
    if os.geteuid() != 0:
        return "hosts are made of namespaces, which needs root"
    if missing := sorted({package for tool, package in TOOLS.items() if not shutil.which(tool)}):
        return f"to make hosts, these Debian packages are needed: {' '.join(missing)}"
    try:
        run_tool([*UNSHARE, "ip", "link", "add", "port0", "type", "bridge"])
    except HostsError as error:
        return f"hosts are made of namespaces, which this machine does not allow: {error}"
    return None


@dataclass(frozen=True)
class NamespaceHost:
    """One host; `folder` holds its SSH files (`ssh/` is its ~/.ssh) and the log of its sshd."""

    name: str
    address: str
    address6: str
    slots: int
    folder: Path

    @property
    def names(self) -> tuple[str, ...]:
        """Return all its names and addresses; NAME-v6 resolves to its IPv6 address."""
        return (self.name, f"{self.name}-v6", self.address, self.address6)


class HostNetwork:
    """Hosts on one switch, each with an sshd; a context manager.

    `folder` is for their files, and must be empty or absent. Of /tmp, only `folder` and `visible`
    exist on the hosts. Methods take a host by its index.
    """

    def __init__(
        self,
        slots: Sequence[int],
        folder: Path,
        names: Sequence[str] = NAMES,
        ssh_port: int = 22,
        visible: Sequence[Path] = (),
    ) -> None:
        self.folder = folder
        self.ssh_port = ssh_port
        self.hosts = tuple(
            NamespaceHost(name, f"10.77.0.{i}", f"fd77::{i}", count, folder / name)
            for i, (name, count) in enumerate(zip(names, slots, strict=False), start=1)
        )
        assert len(self.hosts) == len(slots), "more hosts than names"
        self._visible = _outermost([folder, *visible, PACKAGES, Path(sys.prefix)])
        self._switch: Node
        self._nodes: list[Node] = []
        self._sshds: dict[int, HostProcess] = {}
        self._started: list[HostProcess] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> HostNetwork:
        with contextlib.ExitStack() as stack:
            stack.callback(self._discard)
            self._write_files()
            self._switch = Node("switch")
            stack.callback(self._switch.close)
            up = ["link add bridge0 type bridge", "link set bridge0 up"]
            self._switch.tool(["net"], "ip", "-batch", "-", lines=up)
            stack.callback(self._close_nodes)
            for host in range(len(self.hosts)):
                self._nodes.append(self._make_node(host))
                self._plug_in(host)
            for host in range(len(self.hosts)):
                self.start_sshd(host)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def shape(self, bits_per_s: float, hosts: Sequence[int] | None = None) -> None:
        """Limit the links of hosts (None: all) to this many bits a second, in each direction.

        By a token bucket (tc-tbf(8)) at both ends of its cable.
        """
        shaped = ("tc", "qdisc", "replace", "dev")
        rate = ("rate", f"{bits_per_s:.0f}bit", "burst", f"{BURST_BYTES}b")
        queue = ("root", "tbf", *rate, "latency", f"{QUEUE_MS}ms")
        for host in range(len(self._nodes)) if hosts is None else hosts:
            self._nodes[host].tool(["net"], *shaped, INTERFACE, *queue)
            self._switch.tool(["net"], *shaped, f"port{host}", *queue)

    def start(
        self,
        command: Sequence[str],
        host: int = 0,
        variables: Mapping[str, str] | None = None,
        cwd: Path = PACKAGES,
        **options: object,
    ) -> HostProcess:
        """Start a command on a host; `options` are those of Popen (default: one output pipe)."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        search_paths = {"PATH": path, "PYTHONPATH": str(PACKAGES)}
        defaults = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "cwd": cwd,
            "env": os.environ | search_paths | dict(variables or {}),
        }
        self._started.append(HostProcess(self._nodes[host], command, **(defaults | options)))
        return self._started[-1]

    def processes(self, host: int | None = None) -> list[psutil.Process]:
        """Return the processes of a host (or of all), without its init and listening sshd."""
        listening = {process.inner.pid for process in self._sshds.values()}
        chosen = self._nodes if host is None else [self._nodes[host]]
        alive = (process for node in chosen if node.is_alive for process in node.processes())
        return [process for process in alive if process.pid not in listening]

    def kill_since(self, before: Sequence[psutil.Process] = ()) -> None:
        """Kill the processes of all hosts that are not in `before`. Raises HostsError."""
        deadline = time.monotonic() + VANISH_S
        while left := [process for process in self.processes() if process not in before]:
            if time.monotonic() > deadline:
                raise HostsError(f"cannot be killed: {left}")
            kill_all(left)
            time.sleep(0.02)

    def start_sshd(self, host: int) -> None:
        """Start the listening sshd, and wait until it listens. Raises HostsError."""
        assert host not in self._sshds, "it runs"
        folder = self.hosts[host].folder
        log = folder / "sshd.log"
        with log.open("w") as file:
            command = [SSHD, "-D", "-e", "-f", str(folder / "sshd_config")]
            process = HostProcess(self._nodes[host], command, stdin=subprocess.DEVNULL, stderr=file)
        self._sshds[host] = process
        deadline = time.monotonic() + SSHD_START_S
        while log.read_text().count("Server listening on") < 2:
            if process.poll() is not None or time.monotonic() > deadline:
                raise HostsError(f"sshd does not start: {log.read_text()}")
            time.sleep(0.01)

    def _write_files(self) -> None:
        assert not self.folder.exists() or not any(self.folder.iterdir()), "folder in use"
        for host in self.hosts:
            host.folder.mkdir(parents=True)
        names = [
            "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n",
            *(f"{host.address} {host.name}\n" for host in self.hosts),
            *(f"{host.address6} {host.name}-v6\n" for host in self.hosts),
        ]
        (self.folder / "names").write_text("".join(names))
        self._write_ssh_files()

    def _write_ssh_files(self) -> None:
        """Write `ssh/` (the host's ~/.ssh), `host_key` and `sshd_config` into each host's folder.

        All hosts share one key pair. Their known_hosts holds the host keys of all, under all names.
        """
        public, known_hosts, port = make_key(self.folder / "id_ed25519"), "", self.ssh_port
        for host in self.hosts:
            key = make_key(host.folder / "host_key")
            patterns = [name if port == 22 else f"[{name}]:{port}" for name in host.names]
            known_hosts += f"{','.join(patterns)} {key}\n"
            text = SSHD_CONFIG.format(port=port, folder=host.folder, python_path=PACKAGES)
            (host.folder / "sshd_config").write_text(text)
        for host in self.hosts:
            ssh_folder = host.folder / "ssh"
            ssh_folder.mkdir(mode=0o700)
            for name in ("id_ed25519", "id_ed25519.pub"):
                shutil.copy2(self.folder / name, ssh_folder / name)
            (ssh_folder / "authorized_keys").write_text(f"{public}\n")
            (ssh_folder / "known_hosts").write_text(known_hosts)

    def _make_node(self, host: int) -> Node:
        home = Path("~/.ssh").expanduser()
        home.mkdir(mode=0o700, exist_ok=True)  # a mount point; its content is not changed
        folder = self.hosts[host].folder
        binds = {str(home): folder / "ssh", "/etc/hosts": self.folder / "names"}
        # Start-up files may take a lock, and a host may be killed while it is held.
        personal = (Path("~", name).expanduser() for name in SHELL_START_UP)
        binds |= {str(file): Path(os.devnull) for file in personal if file.exists()}
        return Node(self.hosts[host].name, self._visible, binds)

    def _plug_in(self, host: int) -> None:
        """Connect the host to the switch, and assign the addresses to its interface."""
        node, port, its = self._nodes[host], f"port{host}", self.hosts[host]
        hardware = f"02:00:00:77:00:{host + 1:02x}"  # the same after a restart: others cache it
        plug = [
            f"link add {port} type veth peer name {INTERFACE} netns {node.pid} address {hardware}",
            f"link set {port} master bridge0",
            f"link set {port} up",
        ]
        self._switch.tool(["net"], "ip", "-batch", "-", lines=plug)
        addresses = [
            "link set lo up",
            f"address add {its.address}/24 dev {INTERFACE}",
            f"address add {its.address6}/64 dev {INTERFACE} nodad",
            f"link set {INTERFACE} up",
        ]
        node.tool(["net"], "ip", "-batch", "-", lines=addresses)

    def _close_nodes(self) -> None:
        for node in self._nodes:
            node.close()

    def _discard(self) -> None:
        for process in [*self._sshds.values(), *self._started]:
            process.discard()


def make_key(path: Path) -> str:
    """Write a new key pair without a passphrase, and return the public key."""
    run_tool(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", path.name, "-f", str(path)])
    kind, key = path.with_suffix(".pub").read_text().split()[:2]
    return f"{kind} {key}"


def _outermost(folders: Sequence[Path]) -> list[Path]:
    """Return the folders below /tmp, without those inside another of them."""
    resolved = {folder.resolve() for folder in folders}
    below = {folder for folder in resolved if folder.is_relative_to("/tmp")}
    return sorted(folder for folder in below if below.isdisjoint(folder.parents))
