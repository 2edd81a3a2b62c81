"""A TCP connection of small segments, in place of ssh's own: ssh -o ProxyCommand="... HOST PORT".

ssh that reaches a host by it alone shows that large packets are lost on the way (RFC 2923, 2.1).
"""

from __future__ import annotations

import os
import socket
import sys
import threading

SEGMENT_BYTES = 500  # with headers below 576 bytes, which every link carries (RFC 791)
STDIN, STDOUT = 0, 1


def main() -> int:
    """Copy standard input to the host, and what it answers to standard output, until it ends."""
    host, port = sys.argv[1:3]
    with socket.socket() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES)
        connection.connect((host, int(port)))
        threading.Thread(target=_send, args=(connection,), daemon=True).start()
        while data := connection.recv(1 << 16):
            os.write(STDOUT, data)
    return 0


def _send(connection: socket.socket) -> None:
    while data := os.read(STDIN, 1 << 16):
        connection.sendall(data)


if __name__ == "__main__":
    sys.exit(main())
