"""As the number of workers grows: the launcher, audits and canonical sums, in a table and a plot.

    python -m tests.campaigns.growth [--workers 8 64 512] [--seconds 20] [--plot FILE]

The launcher supervises agents for which one process speaks (`tests.campaigns.many_workers`). Audits
and canonical sums run for real, each rank in a thread of one process over the reference ring, for a
model of 130,266 parameters. Every message is counted, and compared with what `hvdtrain plan` says.
Memory is what a rank takes, its model included. Exits with 1 where a count is another, a result is
wrong, or the launcher's CPU, the messages of a rank or its memory grow faster than N log N.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from hvdtrain.interpreter import module_argv, peak_memory
from hvdtrain.lab.disturbance import Disturbance
from hvdtrain.lab.plan import traffic
from hvdtrain.report.charts import GREY, HEIGHT, WIDTH, dress, legend_below, look_of, new_figure
from tests.campaigns.many_workers import GROWTH, LEAST_CPU, n_log_n, spoken
from tests.simulated import Counted, audited, summed

HERE = "tests.campaigns.growth"
LENGTHS = [100_000, 30_000, 256, 10]
GRADIENT_BYTES = traffic.VALUE * sum(LENGTHS)
SIMULATED: dict[str, Callable[[Sequence[int], int], Counted]] = {
    "canonical sums": summed,
    "an audit": audited,
}
PLANNED = {"canonical sums": traffic.of_canonical_sums, "an audit": traffic.of_audit}
LIMIT_S = 600.0
DPI = 110
Row = dict[str, float]


def simulate(kind: str, workers: int) -> None:
    """Print what the ranks have sent, whether all is right, and the bytes that each has taken."""
    before = peak_memory()
    counted = SIMULATED[kind](LENGTHS, workers)
    taken = (peak_memory() - before) / workers
    print(counted.sent_bytes, counted.messages, int(counted.is_right), taken)


def simulated(kind: str, workers: int) -> tuple[Row, bool]:
    """Return the figures of a simulation, in a process of its own; whether they are as planned."""
    done = subprocess.run(
        [*module_argv(HERE), "--simulate", kind, str(workers)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    sent, messages, is_right, taken = map(float, done.stdout.split())
    # Backward passes make the gradients in the reverse order.
    planned = PLANNED[kind](LENGTHS[::-1] if kind == "canonical sums" else LENGTHS, workers)
    is_planned = messages == planned.messages and math.isclose(sent, planned.sent_bytes)
    return {"sent": sent, "messages": messages, "taken": taken}, bool(is_right) and is_planned


def grows_too_fast(figures: Sequence[float], counts: Sequence[int], least: float = 0.0) -> bool:
    """Return whether figures grow faster than N log N from the first on."""
    first = max(figures[0], least) / n_log_n(counts[0])
    return any(
        figure > GROWTH * first * n_log_n(n) for figure, n in zip(figures, counts, strict=True)
    )


def draw(
    path: Path, counts: Sequence[int], cpu: Sequence[float], rows: dict[str, list[Row]]
) -> None:
    """Draw the launcher's CPU, and messages and bytes of a rank."""
    figure = new_figure(1.6 * WIDTH, HEIGHT)
    panels = figure.subplots(1, 3)
    dress(panels[0], "launcher", "% of a core", "workers")
    panels[0].plot(counts, [100 * value for value in cpu], marker="o", **look_of(0))
    guide = [100 * max(cpu[0], LEAST_CPU) * n_log_n(n) / n_log_n(counts[0]) for n in counts]
    panels[0].plot(counts, guide, color=GREY, linestyle=(0, (1, 1.2)))
    dress(panels[1], "messages of a rank", "one after another", "workers")
    dress(panels[2], "bytes sent by a rank", "times those of the gradients", "workers")
    for index, measured in enumerate(rows.values(), start=1):
        panels[1].plot(counts, [row["messages"] for row in measured], marker="o", **look_of(index))
        sent = [row["sent"] / GRADIENT_BYTES for row in measured]
        panels[2].plot(counts, sent, marker="o", **look_of(index))
    panels[2].set_ylim(0, 5)
    for axes in panels:
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(n) for n in counts])
    for axes in panels[:2]:
        axes.set_yscale("log")
    launcher, guide_line = panels[0].get_lines()
    handles = [launcher, *panels[1].get_lines(), guide_line]
    legend_below(figure, handles, ["launcher", *rows, "N log N"])
    figure.savefig(path, dpi=DPI, metadata={"Software": None})
    print(f"written to {path}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="*", default=[8, 64, 512])
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--plot", type=Path, help="write the plot here")
    parser.add_argument("--simulate", nargs=2, help=argparse.SUPPRESS)
    asked, disturbance = parser.parse_args(), Disturbance()
    if asked.simulate:
        simulate(asked.simulate[0], int(asked.simulate[1]))
        return 0
    counts, is_good = asked.workers, True
    rows: dict[str, list[Row]] = {kind: [] for kind in SIMULATED}
    cpu = []
    print(" " * 20 + "".join(f"{kind:>36}" for kind in SIMULATED))
    print("workers  launcher, %" + "  sent/gradients  messages  KiB a rank" * len(SIMULATED))
    with tempfile.TemporaryDirectory(prefix="hvdtrain-growth-") as scratch:
        for workers in counts:
            launcher = spoken(workers, asked.seconds, Path(scratch, str(workers)))
            cpu.append(launcher.cpu)
            is_good &= launcher.is_right
            text = f"{workers:7}  {100 * launcher.cpu:11.1f}"
            for kind in SIMULATED:
                row, is_planned = simulated(kind, workers)
                is_good &= is_planned
                rows[kind].append(row)
                text += (
                    f"  {row['sent'] / GRADIENT_BYTES:14.3f}  {row['messages']:8,.0f}"
                    f"  {row['taken'] / 1024:10,.0f}" + ("" if is_planned else "  not as planned")
                )
            print(text, flush=True)
    figures = [cpu, *([row[name] for row in rows[kind]] for kind in rows for name in rows[kind][0])]
    is_good &= not any(grows_too_fast(values, counts, LEAST_CPU) for values in figures)
    if asked.plot:
        draw(asked.plot, counts, cpu, rows)
    print(disturbance.line())
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
