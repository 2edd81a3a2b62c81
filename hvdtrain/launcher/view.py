"""Output of `hvdtrain launch`: plain lines, or a live view on a terminal."""

from __future__ import annotations

import copy
import math
import os
import statistics
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, cast

from hvdtrain import log
from hvdtrain.launcher.ranks import SUSPENDED_STATES, Rank
from hvdtrain.launcher.supervise import Watch
from hvdtrain.log import counted, discard, duration, few, has_screen, rate, write_all

if TYPE_CHECKING:
    from rich.console import RenderableType

    from hvdtrain.launcher.metrics import MetricsServer

RANKS_SHOWN = 16
SLOW = 1.2  # multiple of the median of the ranks' own time in a step
SILENT_S = 10.0
REFRESH_S = 0.5
PLAIN = ("", "waiting", "ended")  # descriptions of healthy ranks


def make_view(
    workers: int,
    stream: TextIO,
    logs: Path,
    plain: bool = False,
    metrics: MetricsServer | None = None,
) -> SteadyView:
    """Return a live view on a terminal, unless `plain`, else plain lines; it never blocks.

    `metrics` is started, receives notices and the state of the job, and is closed with the view.
    """
    output = cast(TextIO, Output(stream))
    view = (PlainView if plain or not has_screen(stream) else LiveView)(workers, output)
    if metrics:
        metrics.start()
    steady = SteadyView(view, stream, logs, metrics)
    if metrics:
        steady.notice(f"status page: {metrics.url}, metrics: {metrics.url}metrics")
    return steady


class PlainView:
    """A view of plain lines: rank 0's unchanged, those of other ranks with a [rank] prefix."""

    most_waiting = 1 << 22  # characters that may wait for the terminal: room for a burst of output

    def __init__(self, workers: int, output: TextIO) -> None:
        self._width = len(str(workers - 1))
        self._output = output

    def label(self, rank: int, text: str) -> str | None:
        """Return a worker's line as it is shown, or None to hide it."""
        return text if rank == 0 else f"[{rank:{self._width}}] {text}"

    def show(self, text: str) -> None:
        self._output.write(text + "\n")

    def update(self, watch: Watch) -> None: ...

    def close(self) -> None: ...


class LiveView(PlainView):
    """A live view: log lines, and below them the progress and a row for each rank."""

    most_waiting = 1 << 16  # a longer backlog would delay new lines

    def __init__(self, workers: int, output: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        super().__init__(workers, output)
        self._console = Console(file=output)
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
            transient=True,  # the last frame shows workers at work that have ended by then
        )

    def label(self, rank: int, text: str) -> str | None:
        repeated = rank == 0 and text.startswith("step ")  # the view shows the same
        return None if repeated else super().label(rank, text)

    def show(self, text: str) -> None:
        self._live.start()
        self._console.print(text, markup=False, highlight=False)

    def update(self, watch: Watch) -> None:
        self._live.start()
        self._live.update(render(watch), refresh=True)

    def close(self) -> None:
        self._live.stop()


def render(watch: Watch) -> RenderableType:
    from rich.console import Group
    from rich.padding import Padding
    from rich.progress_bar import ProgressBar
    from rich.table import Column, Table
    from rich.text import Text

    slow = slow_ranks(watch.ranks)
    columns: list[Column | str] = [
        *(Column("rank", justify="right"), "host", Column("step", justify="right")),
        *(Column("phase", min_width=len("exchange")), "own s/step", ""),
    ]
    table = Table(*columns, box=None, padding=(0, 2, 0, 0), header_style="dim")
    for rank in watch.ranks[:RANKS_SHOWN]:
        busy = f"{rank.busy_s:.3f}" if rank.busy_s is not None else ""
        note = describe(rank, rank.number in slow)
        row = (str(rank.number), rank.host, str(rank.step), rank.phase, busy, note)
        table.add_row(*map(Text, row))
    parts: list[RenderableType] = [Text(headline(watch), style="bold")]
    if total := watch.figures.get("total_steps"):
        bar = ProgressBar(total=total, completed=max((r.step for r in watch.ranks), default=0))
        parts.append(Padding(bar, 0))  # on a line of its own
    parts.append(table)
    if hidden := watch.ranks[RANKS_SHOWN:]:
        parts.append(Text(_describe_hidden(hidden, slow)))
    return Group(*parts)


def _describe_hidden(ranks: list[Rank], slow: set[int]) -> str:
    worst = [r.label for r in ranks if r.has_failed or describe(r, r.number in slow) not in PLAIN]
    named = f": look at {few(worst)}" if worst else ""
    return f"and {len(ranks)} more{named}"


def headline(watch: Watch) -> str:
    """Return 'epoch 2  step 120/230  loss 0.1234  2,033 samples/s  0:00:12 left'."""
    figures, step = watch.figures, max((rank.step for rank in watch.ranks), default=0)
    if not step and not figures:
        ready = sum(rank.state != "waiting" for rank in watch.ranks)
        return f"starting: {ready} of {counted(len(watch.ranks), 'worker')} connected"
    parts = [f"epoch {figures['epoch']}"] if "epoch" in figures else []
    total = figures.get("total_steps")
    parts.append(f"step {step}/{total}" if total else f"step {step}")
    if figures.get("loss") is not None:
        parts.append(f"loss {figures['loss']:.4f}")
    if figures.get("samples_per_s"):
        parts.append(f"{rate(figures['samples_per_s'])} samples/s")
    if total and math.isfinite(step_s := figures.get("step_s") or math.nan):
        parts.append(f"{duration((total - step) * step_s)} left")
    return "  ".join(parts)


def slow_ranks(ranks: list[Rank]) -> set[int]:
    """Return the ranks whose own time in a step is more than SLOW times the median."""
    times = {rank.number: rank.busy_s for rank in ranks if rank.busy_s is not None}
    limit_s = SLOW * statistics.median_low(times.values()) if times else 0.0
    return {number for number, busy_s in times.items() if busy_s > limit_s}


def describe(rank: Rank, slow: bool) -> str:
    """Return the remark on a rank, such as 'slow' or 'lost'; empty if it runs normally."""
    if rank.state in ("waiting", "ended", "lost"):
        return rank.state if rank.exit_code in (None, 0) else f"ended with {rank.exit_code}"
    if rank.process_state in SUSPENDED_STATES:
        return SUSPENDED_STATES[rank.process_state]
    if rank.speaks and rank.silent_s > SILENT_S:
        return f"silent for {rank.silent_s:.0f} s"
    return "slow" if slow else ""


class Output:
    """An unbuffered writer to a stream's file, without a lock that could block at exit."""

    def __init__(self, stream: TextIO) -> None:
        self._fd = stream.fileno()
        self.encoding, self._errors = stream.encoding, stream.errors or "strict"

    def write(self, text: str) -> int:
        write_all(self._fd, text.encode(self.encoding, self._errors))
        return len(text)

    def flush(self) -> None: ...

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)


class SteadyView:
    """A view that runs another view in a thread.

    Lines that exceed its limit are dropped and counted, with a notice that names `logs`. Once the
    terminal or pipe is closed, all are dropped, and the job continues.
    """

    def __init__(
        self,
        view: PlainView,
        stream: TextIO,
        logs: Path,
        metrics: MetricsServer | None = None,
    ) -> None:
        self.view, self._stream, self._logs, self._metrics = view, stream, logs, metrics
        self._lines: list[str] = []
        self._waiting = self._left_out = 0
        self._frame: Watch | None = None
        self._framed_s = 0.0
        self._gone = self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._print_all, name="terminal", daemon=True)
        self._thread.start()

    def notice(self, text: str) -> None:
        """Show a line of the launcher; these are never dropped."""
        self._put(log.shown(f"hvdtrain launch: {text}"))
        if self._metrics:
            self._metrics.notice(text)

    def line(self, rank: int, text: str) -> None:
        """Show a worker's line; drop it if too much output is waiting."""
        shown = self.view.label(rank, text)
        if shown is None:
            return
        if self._waiting and self._waiting + len(shown) > self.view.most_waiting:
            with self._changed:
                self._left_out += 1
        else:
            self._put(shown)

    def update(self, watch: Watch) -> None:
        """Show the state of the job, at most every REFRESH_S seconds."""
        if self._metrics and not self._metrics.update(watch):
            self._metrics.close()
            self._metrics = None
            self.notice("metrics and status page have ended; the job continues without them")
        now = time.monotonic()
        if now - self._framed_s >= REFRESH_S:
            self._framed_s = now
            ranks = [copy.copy(rank) for rank in watch.ranks]
            with self._changed:
                self._frame = Watch(ranks, dict(watch.figures))
                self._changed.notify()

    def close(self) -> None:
        """Print all that is waiting, then end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        if self._metrics:
            self._metrics.close()

    def _put(self, text: str) -> None:
        with self._changed:
            if not self._gone:
                self._lines.append(text)
                self._waiting += len(text) + 1
                self._changed.notify()

    def _print_all(self) -> None:
        try:
            while self._print():
                pass
            self.view.close()
        except OSError:
            discard(self._stream)
        finally:
            with self._changed:
                self._gone, self._lines = True, []

    def _print(self) -> bool:
        """Wait for lines or a frame and print them; return False at the end."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._lines or self._left_out or self._frame or self._closing
            )
            lines, left_out, frame = self._lines, self._left_out, self._frame
            self._lines, self._left_out, self._frame, self._waiting = [], 0, None, 0
            closing = self._closing
        if left_out:
            lines.append(f"... {counted(left_out, 'line')} not shown; all are in {self._logs}")
        if lines:
            self.view.show("\n".join(lines))
        if frame:
            self.view.update(frame)
        return bool(lines or frame or not closing)
