"""The predictions as text and as a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter, NullLocator, StrMethodFormatter

from hvdtrain.errors import UsageError
from hvdtrain.lab.charts import (
    GREY,
    HEIGHT,
    WIDTH,
    Plot,
    dress,
    look_of,
    new_figure,
    set_text,
    shorten,
    to_png,
)
from hvdtrain.lab.plan.costs import METHODS, Link
from hvdtrain.lab.plan.network import Network
from hvdtrain.lab.plan.predicting import Prediction, Queue, Scenario, Useful
from hvdtrain.lab.plan.profiles import Profile
from hvdtrain.log import counted

COLUMNS_WIDTH = 20  # of the two columns of a method
MOST_TICKS = 12
MB = 1e6


def describe(setting: Scenario, network: Network | None) -> list[str]:
    """Return lines on the inputs of the predictions."""
    return [
        *_describe_profile(setting.profile, setting.compute_speed),
        *_describe_cluster(setting, network),
        _describe_queue(setting.queue, setting.negotiation),
    ]


def _describe_profile(profile: Profile, speed: float) -> list[str]:
    phases = ", ".join(
        f"{name} {1000 * value / speed:.2f}"
        for name, value in (
            ("forward", profile.forward_s),
            ("backward", profile.backward_s),
            ("update", profile.update_s),
        )
    )
    at = f", at {speed:g} times the speed" if speed != 1 else ""
    lines = [
        f"plan: {profile.name}, {counted(profile.batch_size, 'sample')} a worker, "
        f"{len(profile.gradients)} gradients of {profile.gradient_bytes / MB:.3f} MB",
        f"  compute  {1000 * profile.step_s / speed:.2f} ms a step ({phases}); "
        f"{profile.source}{at}",
    ]
    times = sorted(profile.step_times_s)
    spread = "spread   unknown: waiting for the slowest worker is not predicted"
    if times:
        spread = (
            f"spread   {1000 * times[0]:.2f} to {1000 * times[-1]:.2f} ms over "
            f"{counted(len(times), 'step')}: a step waits for the slowest worker"
        )
    return [*lines, f"  {spread}"]


def _describe_cluster(setting: Scenario, network: Network | None) -> list[str]:
    cluster = setting.cluster
    source = "as given"
    if network:
        source = (
            f"measured with {network.workers} workers ({network.controller}), "
            f"{100 * network.typical_residual:.0f} % from the fit typically (root mean square), "
            f"{100 * network.worst_residual:.0f} % at most"
        )
    lines = [f"  network  {_link(cluster.between)}; {source}"]
    if cluster.workers_per_host > 1:
        cores = setting.cores_per_host
        shared = f", which share {counted(cores, 'core')}" if cores else ""
        lines.append(
            f"  hosts    {counted(cluster.workers_per_host, 'worker')} each{shared}; inside "
            f"{_link(cluster.inside)}"
        )
    servers = "one parameter server per host"
    if cluster.servers is not None:
        servers = counted(cluster.servers, "parameter server")
    return [*lines, f"  servers  {servers}"]


def _link(link: Link) -> str:
    return f"{1e6 * link.latency_s:.1f} us, {link.bandwidth_bytes_per_s / MB:,.0f} MB/s"


def _describe_queue(queue: Queue, negotiation: str) -> str:
    fusion = f"up to {queue.fusion_bytes:,} bytes fused" if queue.fusion_bytes else "no fusion"
    return (
        f"  queue    a cycle of {1000 * queue.cycle_s:g} ms, {fusion}, ranks agree "
        f"{'on a tree' if negotiation == 'tree' else 'one by one'}"
    )


def table(predictions: Sequence[Prediction]) -> list[str]:
    """Return the heading, and a line for each N with step time and efficiency by method."""
    above = " " * 7 + "".join(f"{method:>{COLUMNS_WIDTH}}" for method in METHODS)
    heads = f"{'N':>7}" + f"{'ms a step':>12}{'effic.':>8}" * len(METHODS)
    lines = [above, heads]
    for workers in dict.fromkeys(p.workers for p in predictions):
        by_method = {p.method: p for p in predictions if p.workers == workers}
        cells = [
            f"{1000 * by_method[method].step_s:12,.2f}{by_method[method].efficiency:8.3f}"
            for method in METHODS
        ]
        lines.append(f"{workers:>7,}" + "".join(cells))
    return lines


def describe_useful(useful: Mapping[str, Useful], least: float) -> list[str]:
    """Return a heading, and the largest useful N of each method."""
    width = max(map(len, useful))
    return [
        f"largest useful N (efficiency of at least {least:g} up to there):",
        *(
            f"  {method:{width}}  {one.workers:>6,}"
            + (" or more" if one.is_limit else f"  ({one.efficiency:.3f})")
            for method, one in useful.items()
        ),
    ]


def write_plot(
    predictions: Sequence[Prediction],
    useful: Mapping[str, Useful],
    least: float,
    profile: Profile,
    folder: Path,
) -> Path:
    """Write the plot as PNG and return its path. Raises UsageError if that fails."""
    plot = draw_plot(predictions, useful, least, profile)
    path = folder / f"{plot.name}.png"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(to_png(plot.figure))
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(
            f"--output={folder}: cannot be written: {reason}; choose another --output"
        ) from error
    return path


def draw_plot(
    predictions: Sequence[Prediction],
    useful: Mapping[str, Useful],
    least: float,
    profile: Profile,
) -> Plot:
    """Draw efficiency above, throughput below; circles mark the largest useful N."""
    figure = new_figure(WIDTH, 1.75 * HEIGHT)
    upper, lower = figure.subplots(2, 1, sharex=True)
    dress(upper, f"Predicted: {shorten(profile.name)}", "efficiency", "")
    dress(lower, "", "samples/s", "workers")
    counts = list(dict.fromkeys(p.workers for p in predictions))
    for index, method in enumerate(METHODS):
        _draw_method(upper, lower, [p for p in predictions if p.method == method], index)
        _mark(upper, useful[method], index)
    alone = predictions[0].samples_per_s
    lower.plot(counts, [n * alone for n in counts], color=GREY, linestyle=(0, (1, 1.2)))
    upper.axhline(least, color=GREY, linestyle=(0, (4, 3)), linewidth=1)
    upper.set_ylim(0, 1.05)
    lower.set_yscale("log")
    lower.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    _number_workers(lower, counts)
    _name_methods(upper)
    caption = (
        "Efficiency (throughput on N over N times that on 1) and throughput, each worker with the "
        f"same batch. Circles: the largest N with an efficiency of at least {least:g}; dotted: N "
        "times the throughput of one."
    )
    return Plot("scaling", "Predicted scaling", caption, figure)


def _draw_method(upper: Axes, lower: Axes, rows: Sequence[Prediction], index: int) -> None:
    look = look_of(index)
    style = {"color": look.colour, "linewidth": 1.6, "marker": "o", "markersize": 3}
    counts = [row.workers for row in rows]
    upper.plot(counts, [row.efficiency for row in rows], **style)  # type: ignore[arg-type]
    lower.plot(counts, [row.samples_per_s for row in rows], **style)  # type: ignore[arg-type]


def _mark(axes: Axes, useful: Useful, index: int) -> None:
    at = ([useful.workers], [useful.efficiency])
    axes.scatter(*at, s=70, facecolors="none", edgecolors=look_of(index).colour, linewidths=1.4)


def _number_workers(axes: Axes, counts: Sequence[int]) -> None:
    """Label the axis with powers of two, or every other one if there are many."""
    axes.set_xscale("log", base=2)
    shown = counts[:: 1 + len(counts) // (MOST_TICKS + 1)]
    axes.set_xticks(shown, [f"{n:,}" for n in shown])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())


def _name_methods(axes: Axes) -> None:
    handles = [
        Line2D([], [], color=look_of(index).colour, linewidth=2.5) for index in range(len(METHODS))
    ]
    figure = axes.get_figure()
    assert figure is not None
    legend = figure.legend(
        handles,
        [method.replace("_", " ") for method in METHODS],
        loc="outside lower center",
        ncols=len(METHODS),
        frameon=False,
        fontsize=9,
    )
    for text in legend.get_texts():
        set_text(text)
