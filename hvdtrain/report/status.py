"""Metrics and status page of a running job: `python -m hvdtrain.report.status DESCRIPTOR`.

`hvdtrain launch` starts this process with a listening socket (hvdtrain/launcher/metrics.py). It
reads lines of JSON from standard input: the token and the title, then the state of the job, each
time anew. It ends with its input, which the launcher closes in whatever way it ends.
"""

import base64
import ctypes
import hmac
import ipaddress
import json
import math
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from socketserver import ThreadingMixIn
from typing import Any
from urllib.parse import parse_qs, urlsplit
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    StateSetMetricFamily,
)

from hvdtrain import __version__
from hvdtrain.launcher.worker import PR_SET_PDEATHSIG
from hvdtrain.log import rate, shown
from hvdtrain.pulse import BEGUN, ENDED, OWN, WAITING
from hvdtrain.records.stragglers import lines_of
from hvdtrain.report.templates import HERE, load_template

REQUEST_S = 10.0  # for a request to arrive
MOST_THREADS = 64  # of requests under way
PHASES = (BEGUN, "prepare", *OWN, WAITING, "evaluate", "save", ENDED)
FIGURES = {  # name in the figures of a job -> metric and its help
    "total_steps": ("hvdtrain_planned_steps", "Steps of the whole run"),
    "epoch": ("hvdtrain_epoch", "Epoch under way, from 1"),
    "loss": ("hvdtrain_loss", "Mean training loss since the last logged step"),
    "samples_per_s": ("hvdtrain_samples_per_second", "Samples a second over all ranks"),
}
AUDITS = {"exchange": "audit", "compute": "compute_audit"}  # label -> name in the counts
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
POLICY += "frame-ancestors 'none'; base-uri 'none'; form-action 'none'; script-src 'nonce-{}'"
HEADERS = [
    ("Cache-Control", "no-store"),
    ("Referrer-Policy", "no-referrer"),
    ("X-Content-Type-Options", "nosniff"),
]
State = Mapping[str, Any]
Environ = Mapping[str, Any]


def families(state: State) -> Iterator[Metric]:
    """Yield the metrics of a job, by the conventions of OpenMetrics."""
    counts, figures = state["counts"], state["figures"]
    text = "Steps done by this job; those that a restart repeats count again"
    yield CounterMetricFamily("hvdtrain_steps", text, value=counts.get("steps", 0))
    text = "Restarts of this job after failures"
    yield CounterMetricFamily("hvdtrain_restarts", text, value=state["restarts"])
    checked = CounterMetricFamily("hvdtrain_audits", "Audits done", labels=["kind"])
    failed = CounterMetricFamily("hvdtrain_failed_audits", "Audits failed", labels=["kind"])
    for kind, name in AUDITS.items():
        checked.add_metric([kind], counts.get(f"{name}_checked", 0))
        failed.add_metric([kind], counts.get(f"{name}_failed", 0))
    yield from (checked, failed)
    for name, (metric, text) in FIGURES.items():
        if (value := figures.get(name)) is not None:
            yield GaugeMetricFamily(metric, text, value=value)
    yield from _families_of_ranks(state)
    text = "Time of a slow rank in a phase, as a multiple of the median of the other ranks"
    labels = ["rank", "host", "phase"]
    slow = GaugeMetricFamily("hvdtrain_straggler_ratio", text, labels=labels, unit="ratio")
    for record in stragglers(state):
        slow.add_metric([str(record[label]) for label in labels], record["ratio"])
    yield slow


def _families_of_ranks(state: State) -> Iterator[Metric]:
    labels = ["rank", "host"]
    up = GaugeMetricFamily("hvdtrain_rank_up", "Whether the rank is running", labels=labels)
    step = GaugeMetricFamily("hvdtrain_rank_step", "Step that the rank is in", labels=labels)
    text = "Phase that the rank is in"
    phase = StateSetMetricFamily("hvdtrain_rank_phase", text, labels=labels)
    text = "Time since the rank last reported progress"
    name, unit = "hvdtrain_rank_last_sign_seconds", "seconds"
    sign = GaugeMetricFamily(name, text, labels=labels, unit=unit)
    for rank in state["ranks"]:
        values = [str(rank["rank"]), rank["host"]]
        up.add_metric(values, rank["up"])
        step.add_metric(values, rank["step"])
        if rank["up"] and rank["phase"]:
            phases = dict.fromkeys((*PHASES, rank["phase"]), False)
            phase.add_metric(values, phases | {rank["phase"]: True})
        if rank["up"]:
            sign.add_metric(values, _age_s(state, rank))
    yield from (up, step, phase, sign)


def stragglers(state: State) -> list[dict[str, Any]]:
    """Return the slow ranks; hosts have the names by which the launcher reaches them."""
    hosts = {rank["rank"]: rank["host"] for rank in state["ranks"]}
    return [
        record | {"host": hosts[record["rank"]]}
        for record in state["figures"].get("stragglers", ())
    ]


def _age_s(state: State, rank: State) -> float:
    """Return the seconds since a rank's last sign of progress, at this moment."""
    return float(rank["silent_s"] + max(0.0, time.monotonic() - state["at_s"]))


class Status:
    """What is served: an application of WSGI."""

    def __init__(self, token: str | None, title: str) -> None:
        self._token, self._title = token, title
        self.state: State = {}
        self._template = load_template(HERE / "status.html.jinja")
        registry = CollectorRegistry()
        registry.register(self)
        self._metrics = make_wsgi_app(registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; the registry also calls this before there is a state."""
        if self.state:
            yield from families(self.state)

    def __call__(self, environ: Environ, start: Callable[..., Any]) -> Iterable[bytes]:
        status, headers, body = "200 OK", [*HEADERS], b""
        if self._token and not holds_token(environ, self._token):
            status = "401 Unauthorized"
            headers.append(("WWW-Authenticate", 'Basic realm="hvdtrain", charset="UTF-8"'))
        elif not self._token and not names_this_machine(environ):
            status = "403 Forbidden: without a token, ask for localhost or an address"
        elif environ["REQUEST_METHOD"] != "GET":
            status = "405 Method Not Allowed"
        elif environ["PATH_INFO"] == "/metrics":
            answer: Iterable[bytes] = self._metrics(environ, start)
            return answer
        elif environ["PATH_INFO"] == "/":
            nonce = secrets.token_urlsafe()
            headers.append(("Content-Security-Policy", POLICY.format(nonce)))
            body = self.page(nonce).encode(errors="replace")
        else:
            status = "404 Not Found"
        kind = "html" if body else "plain"
        start(status, [*headers, ("Content-Type", f"text/{kind}; charset=utf-8")])
        return [body or f"{status}\n".encode()]

    def page(self, nonce: str = "") -> str:
        """Return the status page; `nonce` lets its script run."""
        state, counts = self.state, self.state["counts"]
        figures, ranks = state["figures"], state["ranks"]
        audits = {
            end: sum(counts.get(f"{name}_{end}", 0) for name in AUDITS.values())
            for end in ("checked", "failed")
        }
        facts = {
            "step": _of(max((rank["step"] for rank in ranks), default=0), figures),
            "loss": _shown_loss(figures.get("loss")),
            "samples/s": rate(speed) if (speed := figures.get("samples_per_s")) else "–",
            "workers": f"{sum(rank['up'] for rank in ranks)} of {len(ranks)} running",
            "restarts": str(state["restarts"]),
            "audits": f"{audits['checked']:,}, {audits['failed']:,} failed",
        }
        return self._template.render(
            title=self._title,
            version=__version__,
            nonce=nonce,
            headline=state["headline"],
            facts=facts,
            ranks=[rank | {"age_s": _age_s(state, rank)} for rank in ranks],
            slow=list(lines_of(stragglers(state), "is")),
            notices=[shown(line) for line in state["notices"]],
            lines=[shown(line) for line in state["lines"]],
        )


def _of(step: int, figures: State) -> str:
    total = figures.get("total_steps")
    return f"{step:,} of {total:,}" if total else f"{step:,}"


def _shown_loss(loss: float | None) -> str:
    return "–" if loss is None else f"{loss:.4f}" if math.isfinite(loss) else str(loss)


def holds_token(environ: Environ, token: str) -> bool:
    """Return whether a request has the token: as ?token=, a bearer token, or a password."""
    scheme, _, offered = environ.get("HTTP_AUTHORIZATION", "").partition(" ")
    if scheme.lower() == "basic":
        try:
            offered = base64.b64decode(offered).decode().partition(":")[2]
        except ValueError:
            return False
    offers = [offered, *parse_qs(environ.get("QUERY_STRING", "")).get("token", ())]
    return any(
        hmac.compare_digest(each.encode(errors="replace"), token.encode()) for each in offers
    )


def names_this_machine(environ: Environ) -> bool:
    """Return whether a request is for localhost or an address: a page of the web could let another
    name, which a browser takes for its own, stand for the address of this machine.
    """
    try:
        name = urlsplit(f"//{environ.get('HTTP_HOST', 'localhost')}").hostname or ""
        return name == "localhost" or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


class QuietHandler(WSGIRequestHandler):
    """A handler of one request, which logs nothing."""

    timeout = REQUEST_S

    def log_message(self, *_: Any) -> None: ...


class HttpServer(ThreadingMixIn, WSGIServer):
    """A server on a socket that already listens."""

    daemon_threads = True

    def __init__(self, descriptor: int, application: Status) -> None:
        super().__init__(("", 0), QuietHandler, bind_and_activate=False)
        self.socket.close()
        self.socket = socket.socket(fileno=descriptor)
        self.server_name, self.server_port = "", 0
        self.setup_environ()
        self.set_app(application)

    def process_request(self, request: Any, client_address: Any) -> None:
        if threading.active_count() > MOST_THREADS:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def handle_error(self, *_: Any) -> None:
        """Ignore a client that has gone, or sends no request."""


def main() -> int:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # Slurm sends SIGTERM to all, and workers save then
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    greeting = sys.stdin.readline()
    if not greeting:  # the launcher has ended already
        return 0
    status = Status(**json.loads(greeting))
    for line in sys.stdin:
        if not line.endswith("\n"):  # the launcher was killed
            break
        first = not status.state
        status.state = json.loads(line)
        if first:
            server = HttpServer(int(sys.argv[1]), status)
            threading.Thread(target=server.serve_forever, daemon=True).start()
    return 0


if __name__ == "__main__":
    sys.exit(main())
