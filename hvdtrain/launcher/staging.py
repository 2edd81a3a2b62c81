"""Staging: copies of this environment and of folders, at the same paths on hosts that lack them.

Each host's own Python runs receiver.py. It reports what is there; a host that cannot take the
copies is a finding before anything is changed. Needed files follow as a tar archive, through ssh.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from hvdtrain.errors import PreflightError
from hvdtrain.launcher import receiver
from hvdtrain.launcher.doctor import THIS_MACHINE, Facts, Finding, failed, format_findings
from hvdtrain.launcher.doctor.probe import MARKER
from hvdtrain.launcher.doctor.sessions import (
    COMMAND_NOT_FOUND,
    NoAnswer,
    ProbeSession,
    explain,
    on_all,
    open_sessions,
)
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
        self._ssh, self.sessions = ssh, sessions
        self.findings: list[Finding] = []
        self._sizes: dict[str, int] = {}  # bytes to send, by host
        self._moved: dict[str, int] = {}
        self._began_s = self._shown_s = time.monotonic()
        self._showing = threading.Lock()
        source = repr(Path(receiver.__file__).read_text("utf-8"))
        for session in sessions.values():
            session.send(source)

    def note(self, host: str, *problems: str, fix: str = "", ok: str = "") -> None:
        """Add a finding for each problem of a host, or, without one, the text `ok`."""
        self.findings += [Finding(CHECK, "fail", host, text, fix) for text in problems]
        if ok and not problems:
            self.findings.append(Finding(CHECK, "ok", host, ok))

    def refuse(self) -> None:
        """Raise PreflightError if there are problems."""
        if failed(self.findings):
            lines = format_findings(
                finding for finding in self.findings if finding.status == "fail"
            )
            raise PreflightError(f"no host was changed:\n{lines}")

    def ask(self, requests: Mapping[str, Mapping[str, Any]]) -> dict[str, Facts]:
        """Return the answers to the requests, by host; note each host without one."""
        return self._gather(
            requests, lambda session: self._answer(session, requests[session.host.address])
        )

    def send(self, files: Mapping[str, Mapping[str, int]]) -> dict[str, Facts]:
        """Send files, given by their absolute names and bytes for each host; return the answers of
        hosts where they are in place, and note each other one.
        """
        self._sizes = {host: sum(sizes.values()) for host, sizes in files.items()}
        return self._gather(files, lambda session: self._send(session, files[session.host.address]))

    def _gather(
        self, hosts: Collection[str], work: Callable[[ProbeSession], Facts | Finding]
    ) -> dict[str, Facts]:
        answers = on_all(work, {host: self.sessions[host] for host in hosts})
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


@contextmanager
def receivers(hosts: Sequence[Host], ssh: SshSetup) -> Iterator[Staging]:
    """Run a receiver on every host while the context lasts."""
    with open_sessions(hosts, ssh, COMMAND) as sessions:
        yield Staging(ssh, sessions)


def stage(hosts: Sequence[Host], ssh: SshSetup, trees: Trees) -> list[Finding]:
    """Bring the trees to distant hosts that lack them or have others; return their findings.

    Raises PreflightError if a host cannot take them: no host has been changed then.
    """
    with receivers(hosts, ssh) as staging, ThreadPoolExecutor() as threads:
        listings = {
            path: threads.submit(receiver.listing, path, names) for path, names in trees.items()
        }  # while the hosts list theirs
        look = {"do": "look", "paths": {path: receiver.identity(path) for path in trees}}
        states = staging.ask(dict.fromkeys(staging.sessions, look))
        for host, state in states.items():
            staging.note(host, *problems_of(state))
        staging.refuse()
        try:
            files = {path: listed.result() for path, listed in listings.items()}
        except OSError as error:
            raise PreflightError(f"{error.filename}: cannot be read: {error.strerror}") from error
        digests = {path: receiver.digest(listing) for path, listing in files.items()}
        compare = {}
        for host, state in states.items():
            digests_there = {
                path: folder_state.get("digest")
                for path, folder_state in state.values["states"].items()
            }
            others = [
                path
                for path, digest in digests_there.items()
                if digest not in (None, digests[path])
            ]
            if others:
                compare[host] = {"do": "compare", "paths": {path: files[path] for path in others}}
            else:
                has_own = any(digests_there.values())
                staging.note(host, ok="unchanged" if has_own else f"shared with {THIS_MACHINE}")
        needed = {}
        for host, answer in staging.ask(compare).items():
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


def problems_of(state: Facts) -> list[str]:
    """Return why a host cannot take the copies: another system, another home, what is there."""
    there, here, states = state.values, receiver.system(), state.values["states"]
    problems = [
        folder_state["problem"] for folder_state in states.values() if "problem" in folder_state
    ]
    if there["abi"] != here["abi"]:
        text = f"its Python is {there['abi']}, and this environment is for {here['abi']}"
        problems.append(text)
    elif _numbers(there["glibc"]) < _numbers(here["glibc"]):
        problems.append(f"its glibc {there['glibc']} is older than {here['glibc']} here")
    inside = [path for path in states if Path(path).is_relative_to(here["home"])]
    if inside and there["home"] != here["home"]:
        text = f"the home there is {there['home']}, and {inside[0]} is in {here['home']}"
        problems.append(text)
    return problems


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part]


def unstage(hosts: Sequence[Host], ssh: SshSetup, trees: Trees) -> list[Finding]:
    """Remove from distant hosts what was staged there; return their findings."""
    with receivers(hosts, ssh) as staging:
        remove = {"do": "remove", "paths": {path: receiver.identity(path) for path in trees}}
        for host, answer in staging.ask(dict.fromkeys(staging.sessions, remove)).items():
            used, left = answer.values["used"], answer.values["left"]
            kept = [f"{path}/{names[0]}" for path, names in left.items() if names]
            count = sum(map(len, left.values()))
            files = counted(count, "file")
            text = f"removed, but {files} not staged or changed there ({', '.join(kept)})"
            staging.note(host, *used, ok=text if kept else "removed")
    return staging.findings
