"""An S3 server on this machine, whose uploads a test can hold back or refuse."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

BUCKET = "a-bucket"
SECRET = "its-very-secret-key"


class S3Server:
    """What a test sees of the server: its requests so far, and what it does with the next ones."""

    def __init__(self, port: int) -> None:
        self.variables = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "some-access-key",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        self.changes: list[tuple[str, str]] = []  # method and path, in order
        self.held = ""  # uploads of paths with this in them wait, until it is empty
        self.refused = ""  # uploads of paths with this in them are answered by 403
        self.lists_nothing = False  # whether lists of the bucket are answered by 403
        self.holds = threading.Event()  # set once one waits
        self._released = threading.Event()

    def before(self, method: str, path: str) -> bool:
        """Note a request, hold it back if that is wanted, and return whether it is allowed."""
        if method not in ("PUT", "DELETE"):
            return not (self.lists_nothing and path.strip("/") == BUCKET)
        self.changes.append((method, path.removeprefix(f"/{BUCKET}/")))
        if self.held and self.held in path:
            self.holds.set()
            self._released.wait(60)
            return False  # whoever asked is gone
        return not (self.refused and self.refused in path)

    def release(self) -> None:
        self.held = ""
        self._released.set()


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """A server with one empty bucket, in threads of this process."""
    s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed: launch/setup --test-tools")
    s3fs.S3FileSystem.clear_instance_cache()  # of another server, in the same process
    moto = pytest.importorskip("moto.server", reason="moto is not installed")
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log(self, *_: object) -> None:
            pass

    stored = moto.DomainDispatcherApplication(moto.create_backend_app)

    def answer(request: dict[str, Any], start: Any) -> Iterable[bytes]:
        if server.before(request["REQUEST_METHOD"], request["PATH_INFO"]):
            return stored(request, start)
        start("403 Forbidden", [("Content-Type", "application/xml")])
        return [b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"]

    listening = make_server("127.0.0.1", 0, answer, threaded=True, request_handler=Quiet)
    listening.daemon_threads = True
    server = S3Server(listening.server_port)
    thread = threading.Thread(target=listening.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.release()
        listening.shutdown()
        listening.server_close()
        thread.join()
