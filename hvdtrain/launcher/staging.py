"""Staging: copies of this environment and of folders, at the same paths on hosts that lack them.

Each host's own Python runs receiver.py. It reports what is there; a host that cannot take the
copies is a finding before anything is changed. Needed files follow as a tar archive, through ssh.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from hvdtrain.errors import PreflightError
from hvdtrain.launcher import receiver
from hvdtrain.launcher.doctor import THIS_MACHINE, Facts, Finding, format_findings
from hvdtrain.launcher.doctor.probe import MARKER
from hvdtrain.launcher.doctor.sessions import ProbeSession, on_all, open_sessions
from hvdtrain.launcher.doctor.ssh_failures import COMMAND_NOT_FOUND, NoAnswer, explain
from hvdtrain.launcher.hosts import Host
from hvdtrain.launcher.ssh import SshSetup
from hvdtrain.log import counted, duration, say

CHECK = "stage"
PACKAGE = Path(__file__).parents[1]  # hvdtrain
NO_PROGRESS_S = 60
SHOW_S = 5.0
# The Python that the environment was made with: a host needs it, at the same path.
PYTHON: str = sys._base_executable  # type: ignore[attr-defined]
COMMAND = [PYTHON, "-I", "-S", "-X", "utf8", "-c"]
COMMAND += ["import sys;exec(eval(sys.stdin.buffer.readline()))", MARKER, str(NO_PROGRESS_S)]
TAR = ["tar", "--create", "--format=gnu", f"--blocking-factor={receiver.RECORD // 512}"]
TAR += ["--hard-dereference", "--no-recursion", "--directory=/", "--null", "--files-from=-"]

Part = TypeVar("Part")
Trees = Mapping[str, Collection[str]]  # absolute path: names in it that are left out


def trees_of(folders: Mapping[Path, Collection[str]]) -> Trees:
    """Return what to stage: the environment, hvdtrain if it is outside, and `folders`, with the
    names in each that are left out. A folder inside another one is a part of that.

    Raises PreflightError without a virtual environment: files of a system are not replaced.
    """
    if sys.prefix == sys.base_prefix:
        raise PreflightError(
            f"{sys.prefix} is not a virtual environment, and no other can be staged: install "
            "hvdtrain and Horovod in one (`python3 -m venv DIR`), and run the hvdtrain in it"
        )
    wanted = {Path(sys.prefix): (), PACKAGE: (), **folders}
    inside = {path for path in wanted if not wanted.keys().isdisjoint(path.parents)}
    return {str(path): left_out for path, left_out in wanted.items() if path not in inside}


class Staging:
    """A receiver on each host, and the findings so far."""

    def __init__(self, ssh: SshSetup, sessions: Mapping[str, ProbeSession]) -> None:
        self._ssh, self._sessions = ssh, sessions
        self.findings: list[Finding] = []
        self._sizes: dict[str, int] = {}  # bytes to send, by host
        self._moved: dict[str, int] = {}
        self._began_s = self._shown_s = time.monotonic()
        self._showing = threading.Lock()
        source = repr(Path(receiver.__file__).read_text("utf-8"))
        for session in sessions.values():
            session.send(source)

    def note(self, host: str, *problems: str, ok: str = "") -> None:
        """Add a finding for each problem of a host, or, without one, the text `ok`."""
        self.findings += [Finding(CHECK, "fail", host, text) for text in problems]
        if ok and not problems:
            self.findings.append(Finding(CHECK, "ok", host, ok))

    def refuse(self) -> None:
        """Raise PreflightError if there are problems."""
        problems = [finding for finding in self.findings if finding.status == "fail"]
        if problems:
            raise PreflightError(f"no host was changed:\n{format_findings(problems)}")

    def ask(self, requests: Mapping[str, Mapping[str, Any]]) -> dict[str, Facts]:
        """Return the answers to the requests, by host; note each host without one."""
        return self._gather(self._answer, requests)

    def send(self, files: Mapping[str, Mapping[str, int]]) -> dict[str, Facts]:
        """Send files, given by their absolute names and bytes for each host; return the answers of
        hosts where they are in place, and note each other one.
        """
        self._sizes = {host: sum(sizes.values()) for host, sizes in files.items()}
        return self._gather(self._send, files)

    def _gather(
        self, work: Callable[[ProbeSession, Part], Facts | Finding], parts: Mapping[str, Part]
    ) -> dict[str, Facts]:
        """Do the work with each host's part; return the answers, and note each other finding."""
        sessions = {host: self._sessions[host] for host in parts}
        answers = on_all(lambda session: work(session, parts[session.host.address]), sessions)
        self.findings += [answer for answer in answers.values() if isinstance(answer, Finding)]
        return {host: answer for host, answer in answers.items() if isinstance(answer, Facts)}

    def _answer(
        self, session: ProbeSession, request: Mapping[str, Any] | None = None
    ) -> Facts | Finding:
        """Return the answer to a request (None: to what was sent); show progress until then."""
        host = session.host
        wait = session.answer if request is None else partial(session.ask, request)
        try:
            while "moved" in (answer := wait(time.monotonic() + NO_PROGRESS_S)).values:
                wait = session.answer
                self._show(host.address, answer.values["moved"])
        except NoAnswer as failure:
            if failure.exit_code in COMMAND_NOT_FOUND:
                text = f"there is no {PYTHON}, which this environment needs{failure.last_words}"
                fix = "install the same Python there, or make the environment with one that is"
                return Finding("python", "fail", host.address, text, fix)
            return explain(host, self._ssh.by_hand(host), failure)
        errors = "; ".join(answer.errors.values())
        return Finding(CHECK, "fail", host.address, errors) if errors else answer

    def _send(self, session: ProbeSession, files: Collection[str]) -> Facts | Finding:
        with tempfile.TemporaryFile() as names:
            names.write(b"\0".join(os.fsencode(name[1:]) for name in files))
            names.seek(0)
            session.send('{"do": "receive"}')
            tar = subprocess.Popen(
                TAR,
                stdin=names,
                stdout=session.input,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is the launcher's to handle
            )
            answer = self._answer(session)
            words = tar.communicate()[1].decode(errors="replace").partition("\n")[0]
        if tar.returncode > 0:
            return Finding(CHECK, "fail", session.host.address, f"not copied: {words}")
        if isinstance(answer, Facts):
            session.send("commit")
            answer = self._answer(session)
        return answer

    def _show(self, host: str, moved: int) -> None:
        """Print the progress of all hosts, at most every SHOW_S."""
        with self._showing:
            self._moved[host] = max(moved, self._moved.get(host, 0))
            now_s = time.monotonic()
            if self._sizes and now_s - self._shown_s > SHOW_S:
                self._shown_s = now_s
                parts = [
                    f"{host} {self._moved.get(host, 0) / 1e6:,.0f} of {size / 1e6:,.0f} MB"
                    for host, size in self._sizes.items()
                ]
                say(f"stage: {duration(now_s - self._began_s)}, {', '.join(parts)}")


def stage(hosts: Sequence[Host], ssh: SshSetup, trees: Trees) -> list[Finding]:
    """Bring the trees to distant hosts that lack them or have others; return their findings.

    Raises PreflightError if a host cannot take them: no host has been changed then.
    """
    with open_sessions(hosts, ssh, COMMAND) as sessions, ThreadPoolExecutor() as threads:
        staging = Staging(ssh, sessions)
        listings = {
            path: threads.submit(receiver.listing, path, names) for path, names in trees.items()
        }  # while the hosts list theirs
        look = {"do": "look", "paths": {path: receiver.identity(path) for path in trees}}
        states = staging.ask(dict.fromkeys(sessions, look))
        for host, state in states.items():
            staging.note(host, *problems_of(state))
        staging.refuse()
        try:
            files = {path: listed.result() for path, listed in listings.items()}
        except OSError as error:
            raise PreflightError(f"{error.filename}: cannot be read: {error.strerror}") from error
        needed = {}
        for host, answer in _compare(staging, states, files).items():
            staging.note(host, *answer.values["problems"])
            needed[host] = {
                f"{path}/{name}": files[path][name][2]
                for path, flags in answer.values["needed"].items()
                for name, is_needed in zip(files[path], flags, strict=True)
                if is_needed == "1"
            }
        staging.refuse()
        for host in staging.send(needed):
            size = sum(needed[host].values()) / 1e6
            staging.note(host, ok=f"{counted(len(needed[host]), 'file')} copied ({size:,.1f} MB)")
    return staging.findings


def _compare(
    staging: Staging, states: Mapping[str, Facts], files: Mapping[str, receiver.Files]
) -> dict[str, Facts]:
    """Return which files are needed on the hosts that lack some; note the hosts that do not."""
    digests = {path: receiver.digest(listing) for path, listing in files.items()}
    requests = {}
    for host, state in states.items():
        there = {path: each.get("digest") for path, each in state.values["states"].items()}
        others = [path for path, digest in there.items() if digest not in (None, digests[path])]
        if others:
            requests[host] = {"do": "compare", "paths": {path: files[path] for path in others}}
        else:
            has_own = any(there.values())
            staging.note(host, ok="unchanged" if has_own else f"shared with {THIS_MACHINE}")
    return staging.ask(requests)


def problems_of(state: Facts) -> list[str]:
    """Return why a host cannot take the copies: another system, another home, what is there."""
    there, here, states = state.values, receiver.system(), state.values["states"]
    problems = [each["problem"] for each in states.values() if "problem" in each]
    glibc, needed = ([*map(int, re.findall("[0-9]+", system["glibc"]))] for system in (there, here))
    if there["abi"] != here["abi"]:
        problems.append(f"its Python is {there['abi']}, and this environment is for {here['abi']}")
    elif glibc < needed:
        problems.append(f"its glibc {there['glibc']} is older than {here['glibc']} here")
    inside = [path for path in states if Path(path).is_relative_to(here["home"])]
    if inside and there["home"] != here["home"]:
        where = f"and {inside[0]} is in {here['home']}"
        problems.append(f"the home there is {there['home']}, {where}")
    return problems


def unstage(hosts: Sequence[Host], ssh: SshSetup, trees: Trees) -> list[Finding]:
    """Remove from distant hosts what was staged there; return their findings."""
    with open_sessions(hosts, ssh, COMMAND) as sessions:
        staging = Staging(ssh, sessions)
        remove = {"do": "remove", "paths": {path: receiver.identity(path) for path in trees}}
        for host, answer in staging.ask(dict.fromkeys(sessions, remove)).items():
            used, left = answer.values["used"], answer.values["left"]
            kept = [f"{path}/{names[0]}" for path, names in left.items() if names]
            files = counted(sum(map(len, left.values())), "file")
            text = f"removed, but {files} not staged or changed there ({', '.join(kept)})"
            staging.note(host, *used, ok=text if kept else "removed")
    return staging.findings
