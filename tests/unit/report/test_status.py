"""Metrics and status page of a running job: what is served of a state, and to whom."""

from __future__ import annotations

import base64
import re
import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from hvdtrain.report.status import PHASES, Status

TOKEN = "a-token-of-24-characters"
PAGE = Path(__file__).parents[3] / "docs" / "several-machines.md"
SLOW = {
    "rank": 1,
    "host": "beta.example",  # as it calls itself
    "phase": "compute",
    "ratio": 2.125,
    "steps": 40,
}


def row(number: int, **others: Any) -> dict[str, Any]:
    values = {"rank": number, "host": ("alpha", "beta")[number], "up": True, "step": 120 + number}
    return values | {"phase": "exchange", "silent_s": 0.25, "note": ""} | others


def state(**others: Any) -> dict[str, Any]:
    figures = {"epoch": 2, "loss": 0.12345, "samples_per_s": 2033.4, "total_steps": 230}
    counts = {"steps": 131, "audit_checked": 12, "audit_failed": 1, "compute_audit_checked": 3}
    made = {"at_s": time.monotonic(), "headline": "epoch 2  step 121/230", "restarts": 1}
    made |= {"figures": figures | {"stragglers": [SLOW]}, "counts": counts}
    made |= {"ranks": [row(0), row(1, phase="compute", silent_s=7.0, note="lost", up=False)]}
    return made | {"lines": ["step 121 <b>"], "notices": ["restart 1 of 3"]} | others


def served(current: dict[str, Any]) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Return the samples as a scraper reads them: name -> labels -> value."""
    registry, status = CollectorRegistry(), Status(None, "hvdtrain launch")
    status.state = current
    registry.register(status)
    samples: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            samples.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return samples


def ask(status: Status, path: str = "/", **environ: str) -> tuple[str, dict[str, str], str]:
    """Return status, headers and body of a request."""
    answers: list[tuple[str, list[tuple[str, str]]]] = []
    request = {"REQUEST_METHOD": "GET", "PATH_INFO": path, "QUERY_STRING": ""} | environ
    body = b"".join(status(request, lambda *answer: answers.append(answer)))
    return answers[0][0], dict(answers[0][1]), body.decode()


@pytest.fixture
def status() -> Status:
    made = Status(TOKEN, "hvdtrain launch -np 2 -- train")
    made.state = state()
    return made


def test_the_metrics_of_a_job() -> None:
    """Fails when a figure is missing, in another metric, or counted for another rank."""
    samples = served(state())
    assert samples["hvdtrain_steps_total"] == {(): 131}
    assert samples["hvdtrain_planned_steps"] == {(): 230}
    assert samples["hvdtrain_epoch"] == {(): 2}
    assert samples["hvdtrain_loss"] == {(): 0.12345}
    assert samples["hvdtrain_samples_per_second"] == {(): 2033.4}
    assert samples["hvdtrain_restarts_total"] == {(): 1}
    compute, exchange = (("kind", "compute"),), (("kind", "exchange"),)
    assert samples["hvdtrain_audits_total"] == {exchange: 12, compute: 3}
    assert samples["hvdtrain_failed_audits_total"] == {exchange: 1, compute: 0}
    ranks = [(("host", "alpha"), ("rank", "0")), (("host", "beta"), ("rank", "1"))]
    assert samples["hvdtrain_rank_up"] == dict(zip(ranks, (1, 0), strict=True))
    assert samples["hvdtrain_rank_step"] == dict(zip(ranks, (120, 121), strict=True))
    (age_s,) = samples["hvdtrain_rank_last_sign_seconds"].values()
    assert 0.25 <= age_s < 5, "of the rank that is up alone"
    phases = samples["hvdtrain_rank_phase"]
    assert len(phases) == len(PHASES)
    (now,) = [dict(labels) for labels, value in phases.items() if value]
    assert now == {"rank": "0", "host": "alpha", "hvdtrain_rank_phase": "exchange"}
    slow = (("host", "beta"), ("phase", "compute"), ("rank", "1"))
    assert samples["hvdtrain_straggler_ratio"] == {slow: 2.125}


def test_a_job_that_begins() -> None:
    """Fails when a state without ranks and figures cannot be served, or figures are invented."""
    empty = state(figures={}, counts={}, ranks=[], lines=[], notices=[], headline="starting")
    assert set(served(empty)) == {
        *("hvdtrain_steps_total", "hvdtrain_restarts_total"),
        *("hvdtrain_audits_total", "hvdtrain_failed_audits_total"),
    }
    status = Status(None, "")
    status.state = empty
    assert "<h1>starting</h1>" in status.page()


def test_the_table_of_the_docs_is_what_is_served() -> None:
    """Fails when the page names another metric, or other labels of one."""
    rows = re.findall(
        r"^\| `(hvdtrain_\w+)` \| ([^|]*?) ?\|", PAGE.read_text("utf-8"), re.MULTILINE
    )
    documented = {
        name: set(re.findall(r"(\w+)(?:: [\w, ]+)?(?:, |$)", labels.split(":")[0]))
        for name, labels in rows
    }
    actual = {
        name: {label for labels in samples for label, _ in labels}
        for name, samples in served(state()).items()
    }
    assert documented == actual


def test_the_page_shows_the_job(status: Status) -> None:
    """Fails when a figure, a rank, the straggler or a line is not on the page, what workers print
    becomes HTML, or the page needs anything from elsewhere.
    """
    answer, headers, page = ask(status, QUERY_STRING=f"token={TOKEN}")
    assert answer == "200 OK" and headers["Content-Type"] == "text/html; charset=utf-8"
    for text in (
        *("epoch 2  step 121/230", "hvdtrain launch -np 2 -- train", "121 of 230", "0.1235"),
        *("2,033", "1 of 2 running", "15, 1 failed", "restart 1 of 3", "step 121 &lt;b&gt;"),
        "rank 1 on beta is slow: compute 2.1 times the median of the other workers, for 40 steps",
        *('<th scope="row">0</th><td>alpha</td><td>120</td><td>exchange</td>', "<td>lost</td>"),
    ):
        assert text in page, text
    assert "prefers-color-scheme: dark" in page
    assert not re.findall(r'(?:src|href)="(?!data:)|url\(|@import', page)
    (nonce,) = re.findall(r'<script nonce="([^"]+)"', page)
    assert f"'nonce-{nonce}'" in headers["Content-Security-Policy"]


def basic(password: str) -> str:
    return f"Basic {base64.b64encode(f'me:{password}'.encode()).decode()}"


@pytest.mark.parametrize("path", ["/", "/metrics"])
@pytest.mark.parametrize(
    ("environ", "allowed"),
    [
        ({}, False),
        ({"QUERY_STRING": f"token={TOKEN}"}, True),
        ({"QUERY_STRING": f"token={TOKEN}x"}, False),
        ({"QUERY_STRING": "token="}, False),
        ({"HTTP_AUTHORIZATION": f"Bearer {TOKEN}"}, True),
        ({"HTTP_AUTHORIZATION": f"Bearer {TOKEN[:-1]}"}, False),
        ({"HTTP_AUTHORIZATION": "Bearer \xe9\udc80"}, False),
        ({"HTTP_AUTHORIZATION": basic(TOKEN)}, True),
        ({"HTTP_AUTHORIZATION": basic("")}, False),
        ({"HTTP_AUTHORIZATION": "Basic !"}, False),
    ],
)
def test_only_who_has_the_token_is_answered(
    status: Status, path: str, environ: dict[str, str], allowed: bool
) -> None:
    """Fails when the token is not asked for, is not taken, or something else is."""
    answer, headers, body = ask(status, path, **environ)
    assert answer == ("200 OK" if allowed else "401 Unauthorized")
    assert ("WWW-Authenticate" in headers) != allowed
    assert ("hvdtrain_" in body or "<h1>" in body) == allowed


@pytest.mark.parametrize(
    ("host", "answer"),
    [
        *((name, "200 OK") for name in ("localhost:9400", "127.0.0.1:9400", "[::1]:9400")),
        *((name, "403 F") for name in ("evil.example:9400", "", "localhost.evil.example", "[x")),
    ],
)
def test_a_page_of_the_web_cannot_ask(host: str, answer: str) -> None:
    """Fails when a name that was made to stand for this machine's address is served."""
    status = Status(None, "")
    status.state = state()
    assert ask(status, HTTP_HOST=host)[0].startswith(answer)


def test_other_paths_and_methods(status: Status) -> None:
    """Fails when they are answered with the page."""
    token = {"QUERY_STRING": f"token={TOKEN}"}
    assert ask(status, "/x", **token)[0] == "404 Not Found"
    assert ask(status, REQUEST_METHOD="POST", **token)[0] == "405 Method Not Allowed"
