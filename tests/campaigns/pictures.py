"""The pictures of the pages, in docs/pictures: `python -m tests.campaigns.pictures [NAME...]`.

promise   loss of the same experiment on 1, 2 and 4 workers, beside a batch for each worker; float64
audit     diagram: a global batch, its shares, and the audit of the exchange
report    two plots of `hvdtrain report`
terminal  the end of `hvdtrain launch`
"""

from __future__ import annotations

import argparse
import io
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle
from rich.console import Console
from rich.text import Text

from hvdtrain.data import Shares
from hvdtrain.report.charts import GREY, PALETTE, new_figure

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
HVDTRAIN = [sys.executable, "-m", "hvdtrain.cli"]
SIZES = (1, 2, 4)
EPOCHS = 4
EXPERIMENT = ["train", "--model", "lenet", "--data", "digits", "--dtype", "float64"]
EXPERIMENT += ["--opt", "sgd", "--lr", "0.05", "--epochs", str(EPOCHS)]
BATCH = 50  # not divisible by 4: shares are uneven
MARGIN = 0.02


def launch(size: int, folder: Path, *flags: str) -> str:
    """Train in `folder` on `size` workers, and return what `hvdtrain launch` printed."""
    output = ["--output", str(folder.parent), "--experiment", folder.name]
    command = [*HVDTRAIN, "launch", "-np", str(size), "--", *EXPERIMENT, *flags, *output]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    return done.stdout


def losses(folder: Path) -> tuple[list[float], list[float]]:
    """Return epochs and losses of the logged steps of a run."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    last = steps[-1]["step"]
    return [EPOCHS * line["step"] / last for line in steps], [line["train_loss"] for line in steps]


def draw_promise(folder: Path) -> None:
    """Run both kinds of experiment on each number of workers, and plot their losses."""
    figure = new_figure(width=10, height=3.8)
    left, right = figure.subplots(1, 2, sharey=True)
    kinds = (
        (left, "--global-batch-size", f"hvdtrain: a global batch of {BATCH}"),
        (right, "--batch-size", f"a batch of {BATCH} for each worker"),
    )
    for axes, flag, title in kinds:
        for index, size in enumerate(SIZES):
            run = folder / f"{flag.strip('-')}-{size}"
            launch(size, run, flag, str(BATCH), "--log-interval", "1")
            epochs, values = losses(run)
            width = 5 - 2 * index  # equal curves stay visible under one another
            name = f"{size} worker{'s' * (size > 1)}"
            axes.semilogy(epochs, values, color=PALETTE[index], linewidth=width, label=name)
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
        axes.set_xlabel("epoch")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.legend(frameon=False)
    left.set_ylabel("training loss")
    save(figure, "promise.png")


def draw_audit(_folder: Path) -> None:
    """Draw the way of a global batch through three workers, and what the audit compares."""
    figure = Figure(figsize=(10, 4.4), dpi=160)
    axes = figure.add_axes((MARGIN, MARGIN, 1 - 2 * MARGIN, 1 - 2 * MARGIN))
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 44)
    axes.axis("off")
    shares, start = Shares(3).sizes(10), 0
    label(axes, 6, 42, "global batch\nof 10 samples")
    for rank, count in enumerate(shares):
        middle, colour = 32 - 12 * rank, PALETTE[rank]
        for place in range(count):
            sample(axes, 3.5, 35.5 - 3.2 * (start + place), colour, start + place)
            sample(axes, 19 + 3.2 * place, middle, colour, start + place)
        arrow(axes, (7.5, 36.5 - 3.2 * (start + count / 2)), (18, middle + 1))
        box(axes, 33, middle - 2, 15, f"worker {rank}\nforward, backward", colour)
        arrow(axes, (48.5, middle + 1), (54, middle + 1))
        arrow(axes, (54, middle + 1), (59, 32.5), "dimgrey")
        arrow(axes, (54, middle + 1), (59, 9.5), "dimgrey")
        start += count
    label(axes, 25, 42, "shares, uneven")
    label(axes, 54, 38.5, "gradients of\nthe sums / 10")
    box(axes, 59.5, 29.5, 17, "Horovod: all-reduce\n(Gloo or Open MPI)", GREY)
    box(axes, 59.5, 6.5, 17, "ring in plain Python:\nthe reference", GREY)
    box(axes, 82, 29.5, 16, "optimizer.step()\non every worker", GREY)
    box(axes, 82, 17.5, 16, "audit: equal within the\nrounding bound?", PALETTE[2])
    arrow(axes, (77, 31), (81.5, 22))
    arrow(axes, (90, 24), (90, 29))
    label(axes, 93, 26.5, "yes")
    arrow(axes, (77, 9.5), (81.5, 19))
    label(axes, 90, 12, "no: exit code 17, with step, rank,\nparameter, element and bound")
    arrow(axes, (90, 17), (90, 14.5))
    save(figure, "audit.png")


def sample(axes: Axes, x: float, y: float, colour: str, number: int) -> None:
    axes.add_patch(Rectangle((x, y), 2.6, 2.6, facecolor=colour, edgecolor="white"))
    axes.text(x + 1.3, y + 1.3, str(number), color="white", ha="center", va="center", fontsize=8)


def box(axes: Axes, x: float, y: float, width: float, text: str, colour: str) -> None:
    look = {"boxstyle": "round,pad=0.3", "facecolor": "white", "edgecolor": colour}
    axes.add_patch(FancyBboxPatch((x, y), width, 6, linewidth=1.8, **look))
    axes.text(x + width / 2, y + 3, text, ha="center", va="center", fontsize=9)


def arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str = GREY
) -> None:
    look = {"arrowstyle": "-|>", "mutation_scale": 10, "shrinkA": 0, "shrinkB": 0}
    axes.add_patch(FancyArrowPatch(start, end, color=colour, linewidth=1, **look))


def label(axes: Axes, x: float, y: float, text: str) -> None:
    axes.text(x, y, text, ha="center", va="center", fontsize=9, color="black")


def draw_report(folder: Path) -> None:
    """Make the report of two runs, and keep its plot of the losses."""
    runs = [folder / "batch-50", folder / "batch-200"]
    for run in runs:
        launch(
            2,
            run,
            "--global-batch-size",
            run.name.split("-")[1],
            "--audit-every",
            "5",
            "--log-interval",
            "1",
        )
    output = folder / "report"
    names = [str(run) for run in runs]
    command = [*HVDTRAIN, "report", *names, "--output", str(output)]
    subprocess.run(command, check=True, timeout=300)
    (PICTURES / "report.png").write_bytes((output / "loss.png").read_bytes())


def draw_terminal(folder: Path) -> None:
    """Draw the output of a job as it looks on a terminal."""
    flags = ["--global-batch-size", "64", "--audit-every", "10", "--log-interval", "40"]
    lines = launch(2, folder / "lenet-digits", *flags).replace(f"{folder}", "runs").splitlines()
    console = Console(record=True, width=134, file=io.StringIO())
    console.print(
        Text.from_ansi(
            "\n".join([f"$ hvdtrain launch -np 2 -- {shlex.join([*EXPERIMENT, *flags])}", *lines])
        )
    )
    console.save_svg(str(PICTURES / "terminal.svg"), title="hvdtrain launch")


def save(figure: Figure, name: str) -> None:
    figure.savefig(PICTURES / name)
    print(PICTURES / name)


DRAWN = {
    "promise": draw_promise,
    "audit": draw_audit,
    "report": draw_report,
    "terminal": draw_terminal,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    names = parser.parse_args().names or DRAWN
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            DRAWN[name](Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
