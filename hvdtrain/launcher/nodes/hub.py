"""The end at node rank 0: other nodes and shells connect to it, and it passes messages on."""

from __future__ import annotations

import hmac
import os
import secrets
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from hvdtrain.errors import EXIT_FAILED, PreflightError
from hvdtrain.launcher.addresses import ANYWHERE, LOOPBACK, is_loopback, name_problem
from hvdtrain.launcher.channel import Channel
from hvdtrain.launcher.hosts import Host
from hvdtrain.launcher.job import JobPlan
from hvdtrain.launcher.nodes import NO_CONNECTION, SECRET, Rendezvous
from hvdtrain.launcher.nodes.shell import LOST
from hvdtrain.launcher.protocol import LOST_AFTER_S, Message
from hvdtrain.launcher.ssh import HubAddress
from hvdtrain.launcher.verdict import JobOutcome
from hvdtrain.log import few
from hvdtrain.network import address_of
from hvdtrain.pulse import STOP_SIGNALS

TICK_S = 0.1
TWICE_S = LOST_AFTER_S + 2.0  # after which a connection that is still there is no lost one
ANSWERS = ("output", "errors", "ended")  # of a node to a shell
OVER_S = 1.0  # for nodes to read that the job is over

Context = Callable[[], AbstractContextManager[None]]


class Hub(Channel):
    """Connections of the other nodes, by rank, and of shells, by their numbers above."""

    def __init__(
        self, rendezvous: Rendezvous, interface: str | None, undisturbed: Context = nullcontext
    ) -> None:
        """Listen at the rendezvous. `undisturbed`: a context in which a signal raises nothing.

        Raises PreflightError.
        """
        self._undisturbed = undisturbed
        self._job, self._shells = rendezvous, dict[int, int]()  # node by shell
        self.names: dict[int, str] = {}  # of the machines of nodes that have ever joined
        self.turned_away: dict[str, None] = {}  # addresses, in order
        self.problem = ""  # why the nodes do not make a job
        self._key = secrets.token_hex(32)
        self._twice_s: dict[int, tuple[float, float]] = {}  # first and last try, by rank
        self._over = threading.Event()
        self.ending: Message = {"over": EXIT_FAILED, "text": ""}
        self._own = _listening_address(rendezvous, interface)
        try:
            super().__init__(self._own, rendezvous.secret, rendezvous.port)
        except OSError as error:
            raise PreflightError(
                f"--rendezvous={rendezvous.address}: node rank 0 cannot listen on port "
                f"{rendezvous.port} ({error.strerror}): choose a free one"
            ) from None
        self.workers = rendezvous.nodes
        self._thread = threading.Thread(target=self._poll, name="nodes", daemon=True)
        self._thread.start()

    @property
    def address(self) -> HubAddress:
        """Return where shells reach it."""
        job, host = self._job, LOOPBACK if self._own == ANYWHERE else self._own
        return HubAddress(host, job.port, job.secret, self._key, job.nodes, is_loopback(job.host))

    @property
    def missing(self) -> list[int]:
        """Return the ranks of nodes that are not connected."""
        return sorted({*range(1, self._job.nodes)}.difference(self.connected))

    def refusal(self, rank: int, introduction: Message) -> Message | None:
        """Return why a node does not belong to this job, or is not alone with its rank."""
        if rank >= self._job.nodes:  # a shell, which only this machine starts
            is_own = hmac.compare_digest(str(introduction.get("key")).encode(), self._key.encode())
            return None if is_own else {"refused": f"there is no node rank {rank}"}
        host = str(introduction.get("hostname"))
        job = introduction.get("job")
        theirs: dict[str, Any] = job if isinstance(job, dict) else {}
        for name, value in self._job.job.items():
            if theirs.get(name) != value:
                self.problem = (
                    f"node rank {rank} on {host} has another value of {name}: "
                    f"{theirs.get(name)!r}, and {value!r} on node rank 0; start the same command "
                    "on every node"
                )
                return {"refused": self.problem}
        if rank < 1:
            self.problem = f"{host} has node rank {rank} too; give each node a rank of its own"
            return {"refused": self.problem}
        if rank in self.connected:  # started again, perhaps, before the loss was noticed
            now = time.monotonic()
            first_s, last_s = self._twice_s.get(rank, (now, now))
            first_s = first_s if now - last_s < TWICE_S else now  # it had given up
            self._twice_s[rank] = first_s, now
            again = f"{self.names[rank]} and {host} have node rank {rank}"
            is_lost = now - first_s < TWICE_S
            self.problem = self.problem if is_lost else f"both {again}; give each one of its own"
            return {"refused": f"both {again}", "may_retry": is_lost}
        return None

    def turn_away(self, address: str) -> None:
        self.turned_away[address] = None

    def _poll(self) -> None:
        while not self._over.is_set():
            self.poll(TICK_S, self._take, self._part)

    def _take(self, rank: int, message: Message) -> None:
        is_shell = rank >= self._job.nodes
        match message:
            case {"hello": {"node": int(node)}} if is_shell:
                self._shells[rank] = node
            case {"hello": hello}:
                self.names[rank] = str(hello.get("hostname"))
                self._twice_s.pop(rank, None)
            case {"start": command} if is_shell:
                node = self._shells[rank]
                if node in self.connected:
                    self.send({"start": rank, "command": command}, node)
                else:
                    self._lose_command(rank, f"{NO_CONNECTION} {node} is not connected")
            case {"input": text} if is_shell:
                self.send({"input": text, "of": rank}, self._shells[rank])
            case {"to": int(shell), **answer} if self._shells.get(shell) == rank:
                self.send({name: answer[name] for name in ANSWERS if name in answer}, shell)
            case {"stop": int(number)} if not is_shell and number in STOP_SIGNALS:
                os.kill(os.getpid(), number)

    def _part(self, rank: int) -> None:
        if rank in self._shells:
            self.send({"input": "", "of": rank}, self._shells.pop(rank))
            return
        for shell, node in self._shells.items():
            if node == rank:
                self._lose_command(shell, f"{NO_CONNECTION} {rank} has lost its connection")

    def _lose_command(self, shell: int, text: str) -> None:
        self.send({"errors": f"{text}\n"}, shell)
        self.send({"ended": LOST}, shell)

    def wait_for_all(self, limit_s: float, notify: Callable[[str], None]) -> None:
        """Wait for all other nodes to join. Raises PreflightError if they do not in time."""
        count, address = self._job.nodes, self._job.address
        notify(f"node rank 0 of {count}: waiting for the others at {address}, for {limit_s:.0f} s")
        deadline, warned = time.monotonic() + limit_s, 0
        while missing := self.missing:
            if self.problem:
                raise PreflightError(self.problem)
            strangers = few([*self.turned_away])
            if len(self.turned_away) > warned:
                notify(f"turned away, for lack of this node's secret: {strangers}")
                warned = len(self.turned_away)
            if time.monotonic() > deadline:
                also = f"; turned away, for lack of the secret: {strangers}" if strangers else ""
                raise PreflightError(
                    f"of {count} nodes, these ranks have not joined {address} within {limit_s:.0f} "
                    f"s: {few(missing, 10)}{also}. Start the same command on each, with a "
                    "--node-rank of its own"
                )
            time.sleep(TICK_S)
        self.problem = ""
        notify(f"all nodes have joined: {few([host.name for host in self.hosts], 8)}")

    @property
    def hosts(self) -> tuple[Host, ...]:
        """Return the nodes as hosts, by the names of their machines where these are unique."""
        names = {0: socket.gethostname(), **self.names}
        count = Counter(names.values())
        return tuple(
            Host(
                name if count[name] == 1 and not name_problem(name) else f"node-rank-{rank}",
                self._job.slots,
                source="--nnodes",
                node=rank,
            )
            for rank, name in sorted(names.items())
        )

    def conclude(self, outcome: JobOutcome) -> None:
        """Keep the outcome of the job for the nodes."""
        lines = outcome.text.splitlines() if outcome.exit_code else []
        self.ending = {"over": outcome.exit_code, "text": "".join(lines[:1])}

    def __enter__(self) -> Hub:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Tell all nodes that the job is over, how it has ended, and disconnect them."""
        if error:
            stopped = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else EXIT_FAILED
            self.ending = {"over": getattr(error, "exit_code", stopped), "text": str(error)}
        with self._undisturbed():  # all nodes are to end with one code
            self.send(self.ending)
            deadline = time.monotonic() + OVER_S
            while len(self.missing) < self._job.nodes - 1 and time.monotonic() < deadline:
                time.sleep(TICK_S)
            self._over.set()
            self._thread.join()
            self.close()


@contextmanager
def joined(
    plan: JobPlan,
    meeting: Rendezvous | None,
    notify: Callable[[str], None],
    undisturbed: Context,
) -> Iterator[tuple[JobPlan, Callable[[JobOutcome], None]]]:
    """Yield the plan with the nodes that have joined as its hosts, and a function that takes the
    outcome for them, which they learn at the end of the context. Without a meeting, yield `plan`.
    """
    os.environ.pop(SECRET, None)  # not for what is started here
    if meeting is None:
        yield plan, lambda outcome: None
        return
    with Hub(meeting, plan.interface, undisturbed) as hub:
        hub.wait_for_all(plan.limits.start_timeout_s, notify)
        yield replace(plan, hosts=hub.hosts, ssh=replace(plan.ssh, hub=hub.address)), hub.conclude


def _listening_address(rendezvous: Rendezvous, interface: str | None) -> str:
    """Return loopback, the address of the interface that the user has chosen, or all."""
    if is_loopback(rendezvous.host):
        return LOOPBACK
    return (address_of(interface) if interface else None) or ANYWHERE
