"""What `hvdtrain bench start` and `classic` have found, as pictures."""

from __future__ import annotations

import statistics

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from hvdtrain.lab.bench.classic import PUBLISHED, SETTINGS, ClassicPlan, Results, epoch_time
from hvdtrain.lab.bench.start import PARTS, Starts, medians_of_parts
from hvdtrain.lab.charts import GREY, PALETTE, WIDTH, Plot, new_figure, set_text

BAR = 0.62  # of a row
ROW_HEIGHT, MARGIN = 0.42, 1.2  # inches
PART_COLOURS = dict(zip(PARTS, (PALETTE[4], *PALETTE[:4]), strict=True))


def draw_start(starts: Starts) -> Plot:
    """A bar a command, of its parts where they are known."""
    figure = new_figure(WIDTH, MARGIN + ROW_HEIGHT * len(starts))
    axes = figure.add_subplot()
    longest = 0.0
    for place, found in enumerate(starts.values()):
        total_s = statistics.median(start.total_s for start in found)
        left = 0.0
        for part, seconds in medians_of_parts(found).items():
            axes.barh(place, seconds, BAR, left=left, color=PART_COLOURS[part])
            left += seconds
        if not left:
            axes.barh(place, total_s, BAR, color=GREY, alpha=0.6)
        end = max(total_s, left)
        longest = max(longest, end)
        at = {"textcoords": "offset points", "xytext": (4, 0), "va": "center", "fontsize": 8}
        axes.annotate(f"{total_s:.2f}", (end, place), **at)  # type: ignore[arg-type]
    axes.set_xlim(0, longest * 1.12)
    _dress_rows(axes, "From the command to the first step", [*starts], "seconds, medians")
    handles = [*(Patch(color=colour) for colour in PART_COLOURS.values())]
    handles.append(Patch(color=GREY, alpha=0.6))
    labels = [*PARTS, "not taken apart"]
    figure.legend(
        handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=8
    )
    caption = "Medians; parts are medians by themselves, and need not add up to the whole's."
    return Plot("start", "Start", caption, figure)


def draw_classic(plan: ClassicPlan, results: Results) -> Plot:
    """Speed-ups over one worker: ours, and those that were published."""
    own = [epoch_time(results[setting]) for setting in SETTINGS]
    series = {f"hvdtrain, {plan.model} on {plan.data}": own}
    series |= {f"{found.name}, published": list(found.epoch_s) for found in PUBLISHED}
    figure = new_figure()
    axes = figure.add_subplot()
    width = 0.8 / len(series)
    for number, (seconds, colour) in enumerate(zip(series.values(), PALETTE, strict=False)):
        for place, value in enumerate(seconds):
            at = place + (number - (len(series) - 1) / 2) * width
            factor = seconds[0] / value
            axes.bar(at, factor, width * 0.9, color=colour)
            label = axes.annotate(f"{factor:.2f}", (at, factor), ha="center", va="bottom")
            label.set_fontsize(8)
    titles = [
        f"{s.workers} worker{'s' if s.workers > 1 else ''}\nbatch {s.global_batch_size}, lr {s.lr}"
        for s in SETTINGS
    ]
    axes.set_xticks(range(len(SETTINGS)), titles)
    set_text(axes.set_title("Speed-up", loc="left", fontsize=11, fontweight="bold"))
    axes.set_ylabel("epoch time of one worker / epoch time")
    axes.spines[["top", "right"]].set_visible(False)
    handles = [Patch(color=colour) for colour, _ in zip(PALETTE, series, strict=False)]
    figure.legend(
        handles, [*series], loc="outside lower center", ncols=len(series), frameon=False, fontsize=8
    )
    caption = "Epoch time of one worker over that of each setting; the published ones on GPUs."
    return Plot("classic", "Classic table", caption, figure)


def _dress_rows(axes: Axes, title: str, names: list[str], x_label: str) -> None:
    """A row a name, the first on top."""
    set_text(axes.set_title(title, loc="left", fontsize=11, fontweight="bold"))
    axes.set_xlabel(x_label)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
