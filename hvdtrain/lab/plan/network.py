"""Latency and bandwidth of a network: timed all-reduces and the fit to them.

K tensors of b bytes that are submitted together to Horovod, each reduced separately in a ring of N
workers, take

    c + K * 2 (N - 1) * (latency + b / (N bandwidth))

where c does not depend on K and b: it is the agreement of the ranks, plus half a cycle, the mean
wait after a submission. The three unknowns are found by least squares over several K and b, with
errors relative to the fitted time, as times differ by orders of magnitude: gamma regression, by
iterated weights (P. McCullagh, J. Nelder, "Generalized Linear Models", 1989, chapter 8).
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.errors import TrainingError, UsageError
from hvdtrain.lab.children import ChildFailure, Commanded
from hvdtrain.lab.plan.costs import Link, negotiation_messages
from hvdtrain.lab.plan.profiles import is_count, is_seconds, read_json_object
from hvdtrain.launcher.command import EngineOptions, horovodrun_argv

LEAST_POINTS = 4  # one more than unknowns
POLL_S = 0.05
START_TIMEOUT_S = 60
ITERATIONS = 25  # of the weights, which converge in far fewer
LINES_SHOWN = 12
EXAMPLE = '{"tensors": 1, "size_bytes": 4096, "seconds": 0.002}'

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Point:
    """The time of one all-reduce of `tensors` tensors of `size_bytes` bytes each."""

    tensors: int
    size_bytes: int
    seconds: float


@dataclass(frozen=True)
class Network:
    """The measured points, and the three fitted unknowns."""

    workers: int
    controller: str
    cycle_s: float
    points: tuple[Point, ...]
    link: Link
    negotiation_message_s: float
    residuals: tuple[float, ...]  # of each point: measured / fitted time - 1

    @property
    def worst_residual(self) -> float:
        return max(map(abs, self.residuals))

    @property
    def typical_residual(self) -> float:
        """Root mean square of the residuals."""
        return math.sqrt(math.fsum(r * r for r in self.residuals) / len(self.residuals))

    def as_json(self) -> dict[str, Any]:
        """Return the fields that `--network` reads, and the fit."""
        return asdict(self)


def fit(workers: int, controller: str, cycle_s: float, points: Sequence[Point]) -> Network:
    """Fit the unknowns to `points`. Raises TrainingError if times do not grow with bytes."""
    steps = 2 * (workers - 1)
    times = np.array([point.seconds for point in points])
    terms = np.array(
        [
            [1.0, point.tensors * steps, point.tensors * steps * point.size_bytes / workers]
            for point in points
        ]
    )
    fitted, unknowns = times, np.zeros(3)
    for _ in range(ITERATIONS):
        unknowns = _positive_least_squares(terms / fitted[:, None], times / fitted)
        fitted = terms @ unknowns
    constant_s, latency_s, seconds_per_byte = unknowns.tolist()
    if not seconds_per_byte > 0:
        raise TrainingError("network: the times of all-reduces do not grow with their bytes")
    agreement_s = max(constant_s - cycle_s / 2, 0.0)
    return Network(
        workers=workers,
        controller=controller,
        cycle_s=cycle_s,
        points=tuple(points),
        link=Link(latency_s, 1 / seconds_per_byte),
        negotiation_message_s=agreement_s / negotiation_messages("tree", workers),
        residuals=tuple((times / fitted - 1).tolist()),
    )


def _positive_least_squares(terms: Floats, wanted: Floats) -> Floats:
    """Return the x >= 0 that minimises |terms @ x - wanted|, by trying each subset of unknowns
    with the others set to 0.
    """
    count = terms.shape[1]
    best, least = np.zeros(count), math.inf
    for choice in range(1, 1 << count):
        used = [place for place in range(count) if choice >> place & 1]
        found, *_ = np.linalg.lstsq(terms[:, used], wanted, rcond=None)
        error = float(np.sum((terms[:, used] @ found - wanted) ** 2))
        if (found >= 0).all() and error < least:
            best, least = np.zeros(count), error
            best[used] = found
    return best


def read_network(path: Path, flag: str = "--network") -> Network:
    """Read and fit a file that `probe` writes. Raises UsageError with every problem of the file."""
    content = read_json_object(path, flag)
    problems = [f"{flag}={path}: {text}" for text in _problems(content)]
    if problems:
        raise UsageError(*problems)
    points = [Point(**point) for point in content["points"]]
    try:
        return fit(content["workers"], content["controller"], content["cycle_s"], points)
    except TrainingError as error:
        raise UsageError(f"{flag}={path}: {error}") from error


def _problems(content: Mapping[str, Any]) -> Iterator[str]:
    workers = content.get("workers")
    if not is_count(workers) or workers == 1:
        yield f"workers={workers}: a whole number of at least 2 was expected"
    if not isinstance(content.get("controller"), str):
        yield "controller: a string was expected"
    if not is_seconds(content.get("cycle_s")):
        yield f"cycle_s={content.get('cycle_s')}: seconds of at least 0 were expected"
    points = content.get("points")
    if not isinstance(points, list) or len(points) < LEAST_POINTS:
        yield f"points: a list of at least {LEAST_POINTS} was expected"
        return
    for number, point in enumerate(points):
        if not isinstance(point, dict) or set(point) != set(Point.__dataclass_fields__):
            yield f"points[{number}]: an object such as {EXAMPLE} was expected"
        elif not (
            is_count(point["tensors"])
            and is_count(point["size_bytes"])
            and is_seconds(point["seconds"])
            and point["seconds"] > 0
        ):
            yield f"points[{number}]: whole numbers of at least 1 and seconds above 0 were expected"


def measure_network(controller: str, limit_s: float) -> Network:
    """Measure with two workers on this machine, started by horovodrun and ended on return.

    Raises TrainingError if they fail or exceed `limit_s` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="hvdtrain-plan-") as name:
        folder = Path(name)
        file, log = folder / "network.json", folder / "log"
        worker = [sys.executable, "-m", "hvdtrain.lab.plan.probe", str(file)]
        engine = EngineOptions(2, controller, (("localhost", 2),), None, START_TIMEOUT_S)
        try:
            code = _run(horovodrun_argv(engine, worker), log, limit_s)
        except ChildFailure as failure:
            raise TrainingError(f"network: {failure}") from failure
        if code != 0 or not file.exists():
            lines = log.read_text("utf-8", errors="replace").splitlines()[-LINES_SHOWN:]
            reason = f"exit code {code}"
            if code is None:
                reason = f"not finished after {limit_s:g} s (--time-limit-s)"
            raise TrainingError(
                "\n".join([f"network: the measurement failed: {reason}", *lines])
                + "\nGive --latency-us and --bandwidth-gbit-s to skip the measurement"
            )
        return read_network(file, "probe")


def _run(argv: Sequence[str], log: Path, limit_s: float) -> int | None:
    """Run the command and return its exit code, None if it exceeds `limit_s`."""
    deadline = time.monotonic() + limit_s
    child = Commanded(argv, log)
    try:
        while (code := child.exit_code()) is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return code
    finally:
        child.end()
