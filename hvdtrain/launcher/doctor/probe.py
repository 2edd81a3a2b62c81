"""The probe, run on each host: `python -m hvdtrain.launcher.doctor.probe`.

It reads requests, one JSON object per line, and answers each by a marker line and a line of JSON,
so output of login scripts does not matter. It ends with its standard input, or by an alarm.
"""

import contextlib
import json
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

from hvdtrain.errors import EXIT_FAILED
from hvdtrain.launcher.doctor.facts import gather, quick_sources, slow_sources
from hvdtrain.launcher.doctor.gpu_facts import gpus
from hvdtrain.launcher.doctor.trainings import Trainings
from hvdtrain.launcher.horovodrun import login_of, search_path
from hvdtrain.launcher.job_folder import JobFolder
from hvdtrain.launcher.nodes import FIRST_NODE
from hvdtrain.launcher.processes import marked, send_signal
from hvdtrain.launcher.protocol import remove_ticket, write_ticket
from hvdtrain.network import interface_of

MARKER = "@@ hvdtrain probe answers @@"
MARK = "HVDTRAIN_DOCTOR"  # environment variable by which the doctor finds its own processes
CONNECT_S = 2.0
AT_ONCE = 64  # threads that connect
LONGEST_LIFE_S = 180  # after the last request
STAY = "stay"  # a request that is not answered

Request = dict[str, Any]
Answer = dict[str, Any]  # `values` and `errors`


OWN = dict(os.environ)  # before it becomes the environment of workers
LOGIN = login_of(OWN)


def answer(request: Request) -> Answer:
    """Return the facts for `quick` and `all`, else one value, under the name of the request."""
    os.environ.update(request.get("environment", {}))  # the environment that workers will have
    name = request.get("do", "")
    if name in ("quick", "all"):
        return gather_facts(request)
    if name not in HANDLERS:
        return {"values": {}, "errors": {"request": f"unknown: {name!r}"}}
    return gather({name: lambda: HANDLERS[name](request)})


def gather_facts(request: Request) -> Answer:
    """Gather the quick facts, connect back to the launcher, and store the ticket. For `all`, gather
    the others too, concurrently, since some need child processes, and start to listen.
    """
    slow = slow_sources(request["output"]) | {"listener": listen} if request["do"] == "all" else {}
    with ThreadPoolExecutor(len(slow) + 1) as threads:
        futures = {name: threads.submit(source) for name, source in slow.items()}
        sources = quick_sources(request["working_directory"])
        if request.get("channel_port"):
            channel = call_back(request)
            sources["channel"] = lambda: channel
            if channel["address"] and request.get("ticket"):
                ticket = with_environment(request["ticket"]) | {"login": LOGIN}
                if ticket.pop("keeps", False):
                    with contextlib.suppress(OSError):  # the job does without
                        ticket["job_folder"] = JOB_FOLDER.make()
                ticket["channel"] = [channel["address"], request["channel_port"]]
                sources["ticket"] = lambda: str(write_ticket(ticket, os.environ))
        return gather(sources | {name: future.result for name, future in futures.items()})


def with_environment(ticket: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ticket; in one of a node, whose workers have its own environment, with this."""
    if not ticket.get("own_environment"):
        return dict(ticket)
    orders = json.loads(ticket["ticket"])
    orders["environment"] = OWN | {"PATH": search_path(OWN)} | orders["environment"]
    return {**ticket, "ticket": json.dumps(orders)}


def call_back(request: Request) -> dict[str, Any]:
    """Return the first launcher address that accepts a connection, and the interface used."""
    way: dict[str, Any] = {"address": None, "interface": None, "own": None, "tried": []}
    for address in launcher_addresses(request, os.environ):
        try:
            target = (address, request["channel_port"])
            with socket.create_connection(target, timeout=CONNECT_S) as connection:
                local_address = connection.getsockname()[0]
        except OSError as error:
            way["tried"].append([address, error.strerror or str(error)])
        else:
            interface = interface_of(local_address)
            return way | {"address": address, "interface": interface, "own": local_address}
    return way


def launcher_addresses(request: Request, environment: Mapping[str, str]) -> list[str]:
    """Return the addresses to try, best first: the SSH client or first node, then the launcher's
    interfaces.
    """
    if request.get("channel_address"):  # it listens nowhere else
        return [str(request["channel_address"])]
    if request.get("local"):
        return ["127.0.0.1"]
    peer = environment.get(FIRST_NODE) or environment.get("SSH_CONNECTION", "")
    client = peer.removeprefix("::ffff:").split()[:1]
    candidates = [
        *client,
        *(address for address in request["addresses"] if not address.startswith("127.")),
    ]
    return [address for address in dict.fromkeys(candidates) if ":" not in address]


def listen() -> dict[str, Any]:
    """Start a TCP server that sends its token to every client; return its port and token.

    The token identifies the host: the bridge of a container engine has the same address on each
    host, so a connection to that address reaches the connecting host itself.
    """
    token = secrets.token_hex(8)
    server = socket.create_server(("", 0), backlog=256)
    threading.Thread(target=_serve, args=(server, token.encode()), daemon=True).start()
    return {"port": int(server.getsockname()[1]), "token": token}


def _serve(server: socket.socket, token: bytes) -> None:
    while True:
        connection, _ = server.accept()
        with contextlib.suppress(OSError), connection:
            connection.settimeout(CONNECT_S)
            connection.sendall(token)


def reach_all(targets: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Try every address of every target: {host, port, token, addresses: [[interface, address]]}.

    Return for each address: host, interface, address, problem (None: connected), and if connected
    seconds and `through`, the interface of this end.
    """
    attempts = [(target, *pair) for target in targets for pair in target["addresses"]]
    with ThreadPoolExecutor(max_workers=AT_ONCE) as threads:
        return list(threads.map(lambda attempt: _reach(*attempt), attempts))


def _reach(target: Mapping[str, Any], interface: str, address: str) -> dict[str, Any]:
    attempt: dict[str, Any] = {"host": target["host"], "interface": interface, "address": address}
    began = time.perf_counter()
    try:
        with socket.create_connection((address, target["port"]), timeout=CONNECT_S) as connection:
            attempt["seconds"] = time.perf_counter() - began
            attempt["through"] = interface_of(connection.getsockname()[0])
            token = connection.recv(64).decode(errors="replace")
    except OSError as error:
        return attempt | {"problem": error.strerror or str(error)}
    return attempt | {"problem": None if token == target["token"] else "another machine answers"}


def leave(request: Request) -> str:
    """Write the file that other hosts will look for; return its path."""
    Path(request["file"]).write_text("left by hvdtrain doctor\n", "utf-8")
    return str(request["file"])


def look(request: Request) -> bool:
    """Return whether the file is visible here; listing the folder bypasses cached lookups."""
    path = Path(request["file"])
    try:
        return path.name in os.listdir(path.parent)  # noqa: PTH208
    except FileNotFoundError:
        return False


def make_file(request: Request) -> str:
    """Create an empty temporary file for a worker to write; return its path."""
    handle, path = tempfile.mkstemp(prefix="hvdtrain-doctor-")
    os.close(handle)
    return path


def take_file(request: Request) -> str:
    """Return the content of a file, and remove the file."""
    path = Path(request["file"])
    content = path.read_text("utf-8")
    path.unlink()
    return content


def sweep(mark: str) -> int:
    """Kill the doctor's remaining processes on this host, found by their environment.

    Return their number.
    """
    processes = marked(MARK, mark)
    send_signal(signal.SIGKILL, processes)
    return len(processes)


TRAININGS = Trainings()
JOB_FOLDER = JobFolder()
HANDLERS: dict[str, Callable[[Request], Any]] = {
    "ping": lambda request: None,
    "reach": lambda request: reach_all(request["targets"]),
    "leave": leave,
    "look": look,
    "make_file": make_file,
    "take_file": take_file,
    "withdraw": lambda request: remove_ticket(request["job"]),
    "sweep": lambda request: sweep(request["mark"]),
    "burn_in": lambda request: TRAININGS.start(request["seconds"]),
    "burn_in_state": lambda request: TRAININGS.state(),
    "gpus": lambda request: gpus(),
}


def give_up(*_: object) -> NoReturn:
    """End this process, whatever its threads wait for, and leave nothing behind."""
    JOB_FOLDER.remove()
    os._exit(EXIT_FAILED)


def main() -> int:
    """Answer requests until the input ends; return the exit code."""
    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(LONGEST_LIFE_S)  # leaves nothing behind, even if the connection hangs
    try:
        for line in sys.stdin:
            signal.alarm(LONGEST_LIFE_S)  # anew: a burn-in takes longer, and is asked all the time
            began, request = time.time(), json.loads(line)
            if request.get("do") == STAY:
                continue
            reply = answer(request)
            reply["values"] |= {"began": began, "ended": time.time()}
            sys.stdout.write(f"\n{MARKER}\n{json.dumps(reply)}\n")
            sys.stdout.flush()
    finally:
        TRAININGS.end()
        JOB_FOLDER.remove()
    return 0


if __name__ == "__main__":
    sys.exit(main())
