"""Findings for hosts whose probe did not answer, from the error output of ssh and of shells.

ssh reports all failures by exit code 255, so OpenSSH's text is matched; unknown text is shown
unchanged.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass

from hvdtrain.launcher.doctor.facts import Finding

SSH_FAILED = 255
COMMAND_NOT_FOUND = (126, 127)


@dataclass(frozen=True)
class Attempt:
    """A failed attempt to run the probe on a host."""

    host: str  # as shown in messages
    name: str  # without a user
    by_hand: str  # "ssh -p 2222 carol@beta"
    exit_code: int | None  # None: timed out
    stderr: str
    noise: tuple[str, ...] = ()


def explain(attempt: Attempt) -> Finding:
    """Return the finding for a host that did not answer."""
    if attempt.exit_code == SSH_FAILED or "hvdtrain: there is no ssh" in attempt.stderr:
        return _explain_ssh(attempt)
    if attempt.exit_code is None:
        return Finding(
            "ssh",
            "fail",
            attempt.host,
            f"no answer in time{_last_words(attempt)}",
            f"see what hangs: `{attempt.by_hand} true` (a login script that waits for input, a "
            "file system that does not answer?)",
        )
    return _explain_start(attempt)


def _explain_start(attempt: Attempt) -> Finding:
    """Explain a probe that did not start, or failed, although ssh works."""
    host, python = attempt.host, sys.executable
    if attempt.exit_code in COMMAND_NOT_FOUND:
        return Finding(
            "python",
            "fail",
            host,
            f"there is no {python} on this host{_last_words(attempt)}",
            "every host needs the same environment at the same path: share the folder, copy it, "
            "or run launch/setup there in the same place",
        )
    module = re.search(r"No module named '?(hvdtrain[\w.]*)", attempt.stderr)
    if module:
        return Finding(
            "hvdtrain",
            "fail",
            host,
            f"{python} is there, but has no {module.group(1)}",
            "install the same hvdtrain there (launch/setup in the same place), or share the "
            "environment's folder",
        )
    return Finding(
        "ssh",
        "fail",
        host,
        f"a command on this host ended with exit code {attempt.exit_code} instead of an answer"
        f"{_last_words(attempt)}",
        f"see what `{attempt.by_hand} {python} --version` prints",
    )


def _explain_ssh(attempt: Attempt) -> Finding:
    for pattern, understood in _KNOWN:
        found = re.search(pattern, attempt.stderr)
        if found:
            text, fix = understood(attempt, found)
            return Finding("ssh", "fail", attempt.host, text, fix)
    return Finding(
        "ssh",
        "fail",
        attempt.host,
        f"ssh failed{_last_words(attempt)}",
        f"try it by hand until it answers without a question: `{attempt.by_hand} true`",
    )


def _changed(attempt: Attempt, found: re.Match[str]) -> tuple[str, str]:
    command = re.search(r"ssh-keygen -f .* -R .*", attempt.stderr)
    forget = command.group(0).strip() if command else f"ssh-keygen -R {attempt.name}"
    return (
        "the host key has changed since it was stored: the host was reinstalled, or another "
        "machine answers in its place",
        f"ask the host's administrator; if the key is correct: `{forget}`, then connect by hand "
        f"and compare the fingerprint: `{attempt.by_hand}`",
    )


def _unknown(attempt: Attempt, found: re.Match[str]) -> tuple[str, str]:
    return (
        "the host key is not known here, and must be confirmed first",
        f"connect once by hand, compare the fingerprint and answer yes: `{attempt.by_hand}`",
    )


def _open_key(attempt: Attempt, found: re.Match[str]) -> tuple[str, str]:
    file = found.group(1)
    return f"ssh ignores the private key {file}: others can read it", f"`chmod 600 {file}`"


def _refused_key(attempt: Attempt, found: re.Match[str]) -> tuple[str, str]:
    target = attempt.by_hand.removeprefix("ssh ")
    return (
        f"the host accepts none of the keys offered ({found.group(0).strip()})",
        f"`ssh-copy-id {target}`, or name the right key by -i/--ssh-identity-file (or the right "
        "user in the hostfile: user@host)",
    )


def _too_many_keys(attempt: Attempt, found: re.Match[str]) -> tuple[str, str]:
    return (
        "the host hung up before the right key was offered (too many keys)",
        "name the key by -i/--ssh-identity-file, and set IdentitiesOnly for this host in "
        "~/.ssh/config",
    )


def _unresolved(attempt: Attempt, found: re.Match[str]) -> tuple[str, str]:
    return (
        f"the name does not resolve ({found.group(1).strip()})",
        "correct the name in the hostfile, or add it to DNS, /etc/hosts or ~/.ssh/config",
    )


def _nobody_listens(attempt: Attempt, found: re.Match[str]) -> tuple[str, str]:
    return (
        f"nothing listens for ssh there (port {found.group(1)}: connection refused)",
        "start sshd on that host, or name its port by -p/--ssh-port",
    )


def _unreachable(attempt: Attempt, found: re.Match[str]) -> tuple[str, str]:
    return (
        f"the host cannot be reached ({found.group(0).strip()})",
        "check that it is up, that its address is correct, and that no firewall blocks ssh",
    )


def _hung_up(attempt: Attempt, found: re.Match[str]) -> tuple[str, str]:
    return (
        f"the host's sshd hung up ({found.group(0).strip()})",
        "see its log for the reason (MaxStartups, AllowUsers, a full disk, not ready yet?): "
        "`journalctl -u ssh` there",
    )


def _bad_configuration(attempt: Attempt, found: re.Match[str]) -> tuple[str, str]:
    return (
        f"ssh rejects its own configuration here ({found.group(0).strip()})",
        "correct the file named",
    )


def _no_client(attempt: Attempt, found: re.Match[str]) -> tuple[str, str]:
    return "there is no ssh command on this machine", "`apt-get install -y openssh-client`"


_Understood = Callable[[Attempt, "re.Match[str]"], tuple[str, str]]
# The order matters: the more specific texts stand first.
_KNOWN: tuple[tuple[str, _Understood], ...] = (
    (r"hvdtrain: there is no ssh", _no_client),
    (r".*(?:Bad configuration option|Bad owner or permissions on|terminating, \d+ bad).*",
     _bad_configuration),
    (r"HOST IDENTIFICATION HAS CHANGED", _changed),
    (r"Host key verification failed|host key is known for", _unknown),
    (r"Permissions \d+ for ['\"](.+)['\"] are too open", _open_key),
    (r"Too many authentication failures", _too_many_keys),
    (r"Permission denied \([^)]*\)", _refused_key),
    (r"Could not resolve hostname [^:]*: (.*)", _unresolved),
    (r"port (\d+): Connection refused", _nobody_listens),
    (r"(?i)(?:connection|operation) timed out|no route to host|network is unreachable",
     _unreachable),
    (r"kex_exchange_identification.*|Connection (?:closed|reset) by .*", _hung_up),
)  # fmt: skip


def _last_words(attempt: Attempt) -> str:
    """Return the last line of the output, for a message."""
    lines = [line.strip() for line in attempt.stderr.splitlines() if line.strip()]
    lines = lines or [line for line in attempt.noise if line.strip()]
    return f": {lines[-1][:300]}" if lines else ""
