"""The launcher's end of the probes: one child process per host (ssh, or Python itself for this
machine), a protocol of lines, hosts in parallel, every wait bounded.

A host that does not answer gets a finding. ssh reports all failures by exit code 255, so OpenSSH's
text is matched; unknown text is shown unchanged.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Any, TypeVar

from hvdtrain.interpreter import module_argv, python_path
from hvdtrain.launcher.addresses import addresses_of
from hvdtrain.launcher.doctor import Facts, Finding
from hvdtrain.launcher.doctor.probe import MARKER
from hvdtrain.launcher.hosts import Host
from hvdtrain.launcher.processes import has_ended, run_child
from hvdtrain.launcher.ssh import SshSetup, is_local

PROBE = module_argv("hvdtrain.launcher.doctor.probe")
SMALL_PACKETS = module_argv("hvdtrain.launcher.doctor.small_packets")
# Variables that horovodrun passes to the workers.
HANDED_ON = ("LD_LIBRARY_PATH", "PATH", "XDG_CACHE_HOME")
LONGEST_LINE = 4_000_000
NOISE_KEPT = 20
LOGIN_S = 8.0  # of a trial
STEP_S = 15.0  # for an answer to anything but the first request
END_S = 2.0  # for a process to end after its input is closed

Result = TypeVar("Result")


@dataclass(eq=False)
class NoAnswer(Exception):
    """Failure of a probe to answer, with its exit code and output."""

    exit_code: int | None  # None: timed out
    stderr: str
    noise: Sequence[str] = ()  # unexpected lines of standard output

    @property
    def last_words(self) -> str:
        """Return the last line of the output, for the end of a message."""
        lines = [line.strip() for line in self.stderr.splitlines() if line.strip()]
        lines = lines or [line for line in self.noise if line.strip()]
        return f": {lines[-1][:300]}" if lines else ""


class ProbeSession:
    """A probe process on one host, until it is closed.

    `command`: another one, which is to run on a distant host and answers as the probe does.
    """

    def __init__(self, host: Host, ssh: SshSetup, command: Sequence[str] = ()) -> None:
        self.host = host
        self.local = is_local(host)
        self.noise: list[str] = []
        self._unread = b""
        self._closing = threading.Lock()
        self._error_text = ""
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        # The same as horovodrun's workers: this Python, by its path, with this PYTHONPATH.
        path = [f"{name}={value}" for name, value in python_path(os.environ).items()]
        remote = ["env", *path, *PROBE] if path else PROBE
        self._process = subprocess.Popen(
            PROBE if self.local else ssh.argv(host, command or remote),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            start_new_session=True,  # Ctrl-C is the launcher's to handle
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self.input, self.output = self._process.stdin, self._process.stdout
        self._arrival = select.poll()
        self._arrival.register(self.output, select.POLLIN)

    def ask(self, request: Mapping[str, Any], deadline: float) -> Facts:
        """Send a request and wait for its answer until `deadline` (of time.monotonic).

        Raises NoAnswer.
        """
        environment = {name: os.environ[name] for name in HANDED_ON if name in os.environ}
        environment |= python_path(os.environ)
        self.send(json.dumps({"environment": environment, "local": self.local, **request}))
        return self.answer(deadline)

    def send(self, line: str) -> None:
        """Send a line; a process that has ended shows this in its answer."""
        with contextlib.suppress(OSError, ValueError):
            self.input.write(f"{line}\n".encode())
            self.input.flush()

    def answer(self, deadline: float) -> Facts:
        """Wait for the next answer until `deadline` (of time.monotonic). Raises NoAnswer."""
        while (line := self._line(deadline)) != MARKER:
            if line.strip() and len(self.noise) < NOISE_KEPT:
                self.noise.append(line[:200])
        answer = self._line(deadline)
        try:
            return Facts(**json.loads(answer))
        except (ValueError, TypeError):
            self.noise.append(answer[:200])
            raise self._no_answer() from None

    def ask_again(self, request: Mapping[str, Any]) -> Facts:
        """Return the answer within STEP_S; without values if there is none."""
        try:
            return self.ask(request, time.monotonic() + STEP_S)
        except NoAnswer as error:
            return Facts({}, {"answer": error.stderr.strip() or "none in time"})

    def _line(self, deadline: float) -> str:
        """Return the next line of output; raise NoAnswer at its end, or at the deadline."""
        while b"\n" not in self._unread:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not self._arrival.poll(left_s * 1000):
                raise self._no_answer(timed_out=True)
            data = os.read(self.output.fileno(), 1 << 16)
            if not (data or self._unread) or len(self._unread) > LONGEST_LINE:
                raise self._no_answer()
            self._unread += data or b"\n"
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode(errors="replace").rstrip("\r")

    def _no_answer(self, timed_out: bool = False) -> NoAnswer:
        """Close the session; return the reason for the missing answer."""
        self.close()
        code = None if timed_out else self._process.returncode
        return NoAnswer(code, self._error_text, self.noise)

    def close(self) -> None:
        """Close the probe's input, which ends it; kill it if it does not end.

        Its output stays open, since another thread may wait for a line.
        """
        process = self._process
        with self._closing:
            if process.returncode is not None:
                return
            with contextlib.suppress(OSError):
                self.input.close()
            deadline = time.monotonic() + END_S
            # Not reaped before it is killed, so that its pid cannot be reused.
            while not has_ended(process.pid) and time.monotonic() < deadline:
                time.sleep(0.005)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # includes its children
            process.wait()
            self._stderr.seek(0)
            self._error_text = self._stderr.read(20_000).decode(errors="replace")
            self._stderr.close()


@contextlib.contextmanager
def open_sessions(
    hosts: Sequence[Host], ssh: SshSetup, command: Sequence[str] = ()
) -> Iterator[dict[str, ProbeSession]]:
    """Run a probe, or `command`, on every host while the context lasts; yield the sessions by
    host.address.
    """
    sessions: dict[str, ProbeSession] = {}
    try:
        for host in hosts:
            sessions[host.address] = ProbeSession(host, ssh, command)
        yield sessions
    finally:
        on_all(ProbeSession.close, sessions)
        for session in sessions.values():
            session.output.close()


def on_all(
    work: Callable[[ProbeSession], Result], sessions: Mapping[str, ProbeSession]
) -> dict[str, Result]:
    """Run `work` for every host concurrently. On an exception (Ctrl-C), close all sessions."""
    with ThreadPoolExecutor(max_workers=max(1, len(sessions))) as threads:
        futures = {host: threads.submit(work, session) for host, session in sessions.items()}
        try:
            return {host: future.result() for host, future in futures.items()}
        except BaseException:  # closing ends the waits of the other threads
            for session in sessions.values():
                session.close()
            raise


SSH_FAILED = 255
COMMAND_NOT_FOUND = (126, 127)
# Pattern, problem and fix; the more specific patterns stand first. {found}: the matching text,
# {part}: its group, {by_hand}: "ssh -p 2222 carol@beta", {target}: the same without "ssh".
_SSH_FAILURES = (
    (
        r"hvdtrain: there is no ssh",
        "there is no ssh command on this machine",
        "`apt-get install -y openssh-client`",
    ),
    (
        r".*(?:Bad configuration option|Bad owner or permissions on|terminating, \d+ bad).*",
        "ssh rejects its own configuration here ({found})",
        "correct the file named",
    ),
    (
        r"HOST IDENTIFICATION HAS CHANGED",
        "the host key has changed since it was stored: the host was reinstalled, or another "
        "machine answers in its place",
        "ask the host's administrator; if the key is correct: `{forget}`, then connect by hand and "
        "compare the fingerprint: `{by_hand}`",
    ),
    (
        r"Host key verification failed|host key is known for",
        "the host key is not known here, and must be confirmed first",
        "connect once by hand, compare the fingerprint and answer yes: `{by_hand}`",
    ),
    (
        r"Permissions \d+ for ['\"](.+)['\"] are too open",
        "ssh ignores the private key {part}: others can read it",
        "`chmod 600 {part}`",
    ),
    (
        r"Too many authentication failures",
        "the host hung up before the right key was offered (too many keys)",
        "name the key by -i/--ssh-identity-file, and set IdentitiesOnly for this host in "
        "~/.ssh/config",
    ),
    (
        r"Permission denied \([^)]*\)",
        "the host accepts none of the keys offered ({found})",
        "`ssh-copy-id {target}`, or name the right key by -i/--ssh-identity-file (or the right "
        "user in the hostfile: user@host)",
    ),
    (
        r"Could not resolve hostname [^:]*: (.*)",
        "the name does not resolve ({part})",
        "correct the name in the hostfile, or add it to DNS, /etc/hosts or ~/.ssh/config",
    ),
    (
        r"port (\d+): Connection refused",
        "nothing listens for ssh there (port {part}: connection refused)",
        "start sshd on that host, or name its port by -p/--ssh-port",
    ),
    (
        r"(?i)(?:connection|operation) timed out|no route to host|network is unreachable",
        "the host cannot be reached ({found})",
        "check that it is up, that its address is correct, and that no firewall blocks ssh",
    ),
    (
        r"kex_exchange_identification.*|Connection (?:closed|reset) by .*",
        "the host's sshd hung up ({found})",
        "see its log for the reason (MaxStartups, AllowUsers, a full disk, not ready yet?): "
        "`journalctl -u ssh` there",
    ),
)


def takes_small_packets(host: Host, ssh: SshSetup, failure: NoAnswer) -> bool:
    """Return whether a host whose answer did not come in time is reached in small packets alone."""
    text = failure.stderr.lower()
    if "connect to host" in text or "banner" in text:  # which are small
        return False
    if failure.exit_code is not None and "timed out" not in text:
        return False
    program, *words = ssh.argv(host, ["true"])
    proxy = f"ProxyCommand={shlex.join(SMALL_PACKETS)} %h %p"
    return not _ends_well([program, *words]) and _ends_well([program, "-o", proxy, *words])


def _ends_well(command: Sequence[str]) -> bool:
    try:
        return run_child(command, LOGIN_S).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def explain(host: Host, by_hand: str, failure: NoAnswer, small_ones_pass: bool = False) -> Finding:
    """Return the finding for a host that did not answer. `by_hand`: the command to log in to it.
    `small_ones_pass`: it was reached in small packets.
    """
    check, python = "ssh", sys.executable
    code, stderr, last_words = failure.exit_code, failure.stderr, failure.last_words
    if small_ones_pass:
        check = "network"
        text = (
            "small packets arrive, large ones are lost without an error: a link on the way carries "
            "less than the interfaces send (an MTU black hole)"
        )
        fix = (
            "set the interfaces of both machines to what the link carries, such as `ip link set "
            "dev NAME mtu 1400` over a VPN or VXLAN, or let ICMP pass (fragmentation needed)"
        )
    elif code == SSH_FAILED or "hvdtrain: there is no ssh" in stderr:
        text, fix = _explain_ssh(host, by_hand, failure)
    elif code is None:
        text = f"no answer in time{last_words}"
        fix = (
            f"see what hangs: `{by_hand} true` (a login script that waits for input, a file system "
            "that does not answer?)"
        )
    elif code in COMMAND_NOT_FOUND:
        check = "python"
        text = f"there is no {python} on this host{last_words}"
        fix = (
            "every host needs the same environment at the same path: copy it there (`hvdtrain "
            "stage`), share the folder, or run launch/setup there in the same place"
        )
    elif module := re.search(r"No module named '?(hvdtrain[\w.]*)", stderr):
        check = "hvdtrain"
        text = f"{python} is there, but has no {module.group(1)}"
        fix = (
            "install the same hvdtrain there (launch/setup in the same place), or share the "
            "environment's folder"
        )
    else:
        ended = f"a command on this host ended with exit code {code}"
        text = f"{ended} instead of an answer{last_words}"
        fix = f"see what `{by_hand} {python} --version` prints"
    if len(several := addresses_of(host.name)) > 1:
        text += f"; {host.name} stands for {len(several)} addresses, {', '.join(several[:8])}"
        fix += ". If these are several machines, list each by a name or address of its own"
    return Finding(check, "fail", host.address, text, fix)


def _explain_ssh(host: Host, by_hand: str, failure: NoAnswer) -> tuple[str, str]:
    """Return problem and fix of the first pattern that matches the output of ssh."""
    forget = re.search(r"ssh-keygen -f .* -R .*", failure.stderr)
    values = {
        "by_hand": by_hand,
        "target": by_hand.removeprefix("ssh "),
        "forget": forget.group(0).strip() if forget else f"ssh-keygen -R {host.name}",
    }
    for pattern, text, fix in _SSH_FAILURES:
        if match := re.search(pattern, failure.stderr):
            values |= {"found": match[0].strip(), "part": match[match.lastindex or 0].strip()}
            return text.format(**values), fix.format(**values)
    fix = f"try it by hand until it answers without a question: `{by_hand} true`"
    return f"ssh failed{failure.last_words}", fix
