"""What stands for ssh at node rank 0: `shell FILE [options] HOST COMMAND` runs a command on a node.

FILE has the address, secret and key of the hub, and the ranks of nodes by the names of their hosts.
Input, output and the exit code are passed on as by ssh: 255 where the node is not connected.
"""

import json
import os
import select
import sys
import time
from pathlib import Path
from typing import Any

from hvdtrain.launcher.nodes import CODING
from hvdtrain.launcher.protocol import ALIVE_EVERY_S, Connection, ConnectionLost, connect

LOST = 255  # the exit code of ssh where the connection fails
STDIN, STDOUT, STDERR = 0, 1, 2
CHUNK_BYTES = 1 << 16


def main() -> int:
    """Run the command on the node to its end; return its exit code."""
    settings: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    *options, command = sys.argv[2:]
    ranks = settings["ranks"]
    node = next(ranks[word] for word in options if word in ranks)
    # Above all ranks of nodes; a process id is that of one process of this machine.
    introduction = {"rank": settings["nodes"] + os.getpid(), "node": node, "key": settings["key"]}
    try:
        address = settings["host"], settings["port"]
        connection = connect(address, settings["secret"], introduction)
        connection.send({"start": command})
        return _relay(connection)
    except ConnectionLost as error:
        print(f"hvdtrain: the launcher is gone: {error}", file=sys.stderr)
        return LOST


def _relay(connection: Connection) -> int:
    """Pass on input and output until the command has ended; return its exit code."""
    sources: list[Any] = [connection, STDIN]
    alive_s = 0.0
    while True:
        if time.monotonic() - alive_s >= ALIVE_EVERY_S:
            alive_s = time.monotonic()
            connection.send({"alive": True})
        for source in select.select(sources, [], [], ALIVE_EVERY_S)[0]:
            if source == STDIN:
                read = os.read(STDIN, CHUNK_BYTES)
                connection.send({"input": read.decode(CODING)})
                if not read:  # its end
                    sources.remove(STDIN)
                continue
            for message in connection.receive():
                match message:
                    case {"output": text}:
                        _write(STDOUT, text)
                    case {"errors": text}:
                        _write(STDERR, text)
                    case {"ended": code}:
                        return int(code)
        if connection.is_silent(time.monotonic()):
            raise ConnectionLost("no sign of life")


def _write(descriptor: int, text: str) -> None:
    data = text.encode(CODING)
    while data:
        data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    sys.exit(main())
