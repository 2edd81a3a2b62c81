"""Why a host does not answer: a finding, from what ssh, the host's shell or its Python printed.

ssh reports all failures by exit code 255, so OpenSSH's text is matched; unknown text is shown
unchanged.
"""

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from hvdtrain.interpreter import module_argv
from hvdtrain.launcher.addresses import addresses_of
from hvdtrain.launcher.doctor import Finding
from hvdtrain.launcher.hosts import Host
from hvdtrain.launcher.nodes import NO_CONNECTION
from hvdtrain.launcher.processes import run_child
from hvdtrain.launcher.ssh import SshSetup
from hvdtrain.log import few

SMALL_PACKETS = module_argv("hvdtrain.launcher.doctor.small_packets")
LOGIN_S = 8.0  # of a trial
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


_ONLY_SMALL_ONES = (
    "network",
    "small packets arrive, large ones are lost without an error: a link on the way carries less "
    "than the interfaces send (an MTU black hole)",
    "set the interfaces of both machines to what the link carries, such as `ip link set dev NAME "
    "mtu 1400` over a VPN or VXLAN, or let ICMP pass (fragmentation needed)",
)


@dataclass(eq=False)
class NoAnswer(Exception):
    """Failure of a probe to answer, with its exit code and output."""

    exit_code: int | None  # None: timed out
    stderr: str
    noise: Sequence[str] = ()  # unexpected lines of standard output

    @property
    def last_words(self) -> str:
        """Return the last line of the output, for the end of a message."""
        lines = [*self.noise, *map(str.strip, self.stderr.splitlines())]
        lines = list(filter(str.strip, lines))
        return f": {lines[-1][:300]}" if lines else ""


def takes_small_packets(host: Host, ssh: SshSetup, failure: NoAnswer) -> bool:
    """Return whether a host whose answer did not come in time is reached in small packets alone."""
    text = failure.stderr.lower()
    in_small_packets = "connect to host" in text or "banner" in text
    if in_small_packets or (failure.exit_code is not None and "timed out" not in text):
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
    check, text, fix = _ONLY_SMALL_ONES if small_ones_pass else _cause(host, by_hand, failure)
    if len(several := addresses_of(host.name)) > 1:
        text += f"; {host.name} stands for {len(several)} addresses, {few(several, 8)}"
        fix += ". If these are several machines, list each by a name or address of its own"
    return Finding(check, "fail", host.address, text, fix)


def _cause(host: Host, by_hand: str, failure: NoAnswer) -> tuple[str, str, str]:
    """Return check, problem and fix."""
    python, code, last_words = sys.executable, failure.exit_code, failure.last_words
    if missing := re.search(f"{NO_CONNECTION} (.*)", failure.stderr):
        return "node", f"node rank {missing[1]}", "start the same command there again"
    if code == SSH_FAILED or "hvdtrain: there is no ssh" in failure.stderr:
        return "ssh", *_explain_ssh(host, by_hand, failure)
    if code is None:
        return (
            "ssh",
            f"no answer in time{last_words}",
            f"see what hangs: `{by_hand} true` (a login script that waits for input, a file system "
            "that does not answer?)",
        )
    if code in COMMAND_NOT_FOUND:
        return (
            "python",
            f"there is no {python} on this host{last_words}",
            "every host needs the same environment at the same path: copy it there (`hvdtrain "
            "stage`), share the folder, or run launch/setup there in the same place",
        )
    if module := re.search(r"No module named '?(hvdtrain[\w.]*)", failure.stderr):
        return (
            "hvdtrain",
            f"{python} is there, but has no {module[1]}",
            "install the same hvdtrain there (launch/setup in the same place), or share the "
            "environment's folder",
        )
    return (
        "ssh",
        f"a command on this host ended with exit code {code} instead of an answer{last_words}",
        f"see what `{by_hand} {python} --version` prints",
    )


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
    return (
        f"ssh failed{failure.last_words}",
        f"try it by hand until it answers without a question: `{by_hand} true`",
    )
