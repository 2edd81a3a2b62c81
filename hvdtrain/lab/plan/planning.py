"""The `plan` subcommand: a table, JSON and a plot of predictions for N workers."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator, StrMethodFormatter

from hvdtrain.exchange.buckets import LEAST_BUCKET_BYTES
from hvdtrain.files import write_json
from hvdtrain.lab.findings import Findings, publish
from hvdtrain.lab.plan import traffic
from hvdtrain.lab.plan.predicting import (
    METHODS,
    Cluster,
    LargestUsefulN,
    Link,
    Prediction,
    Queue,
    Scenario,
    largest_useful,
    predict,
    worker_counts,
)
from hvdtrain.lab.plan.probe import Network, measure_network, read_network
from hvdtrain.lab.plan.profiles import (
    WARM_UP_STEPS,
    Profile,
    build_layers,
    measure_profile,
    read_profile,
    share_out,
)
from hvdtrain.lab.systems.work import WorkSpec
from hvdtrain.launcher.horovodrun import find_controller
from hvdtrain.launcher.processes import StopRequests
from hvdtrain.log import counted
from hvdtrain.report.charts import (
    GREY,
    HEIGHT,
    WIDTH,
    Plot,
    dress,
    legend_below,
    look_of,
    new_figure,
    shorten,
)

MODEL, DATA, BATCH_SIZE, STEPS = "lenet", "digits", 32, 30
BITS, GIGA, MICRO = 8, 1e9, 1e-6
MB = 1e6
COLUMNS_WIDTH = 20  # of the two columns of a method
MOST_TICKS = 12


def run(arguments: dict[str, Any]) -> int:
    """Measure what is not given, predict, print and write; return the exit code."""
    StopRequests()  # a signal raises Stopped, and child processes are ended on the way out
    torch.set_num_threads(1)
    network = read_network(arguments["network"]) if arguments["network"] else None
    profile = find_profile(arguments)
    write_json(arguments["save_profile"], asdict(profile), "--save-profile")
    if network is None and arguments["latency_us"] is None:
        network = measure_network(find_controller(arguments["controller"]).name)
    setting = make_setting(arguments, profile, network)
    most, least = arguments["max_workers"], arguments["min_efficiency"]
    predictions = [predict(setting, name, n) for n in worker_counts(most) for name in METHODS]
    useful = {method: largest_useful(setting, method, most, least) for method in METHODS}
    lengths = [gradient.size_bytes // traffic.VALUE for gradient in profile.gradients]
    by_workers = traffic.by_workers(lengths, worker_counts(most))
    results = {
        "network": asdict(network) if network else None,
        "predictions": [asdict(prediction) for prediction in predictions],
        "largest_useful": {method: asdict(one) for method, one in useful.items()},
        "traffic": by_workers,
    }
    lines = [*describe(setting, network), *table(predictions), *describe_useful(useful, least)]
    lines += traffic.table(by_workers)
    plot = draw_plot(predictions, useful, least, profile.name)
    return publish(Findings(lines, asdict(setting) | results, [plot]), arguments)


def find_profile(arguments: dict[str, Any]) -> Profile:
    """Return the profile from a file, a given step time, or a measurement. Raises UsageError."""
    if arguments["profile"]:
        return read_profile(arguments["profile"])
    model, data = arguments["model"] or MODEL, arguments["data"] or DATA
    batch_size = arguments["batch_size"] or BATCH_SIZE
    if arguments["step_time_s"]:
        layers = build_layers(model, data, arguments["data_dir"])
        return share_out(layers, f"{model} on {data}", batch_size, arguments["step_time_s"])
    return measure_profile(
        WorkSpec(
            model=model,
            data=data,
            data_dir=arguments["data_dir"],
            global_batch_size=batch_size,
            steps=WARM_UP_STEPS + STEPS,
        )
    )


def make_setting(arguments: dict[str, Any], profile: Profile, network: Network | None) -> Scenario:
    """Build the scenario from checked flags; `network` is used if they give no latency."""

    def link(prefix: str) -> Link:
        bits_per_s = arguments[f"{prefix}bandwidth_gbit_s"] * GIGA
        return Link(arguments[f"{prefix}latency_us"] * MICRO, bits_per_s / BITS)

    between = network.link if network else link("")
    inside = between if arguments["intra_latency_us"] is None else link("intra_")
    return Scenario(
        profile=profile,
        cluster=Cluster(between, inside, arguments["workers_per_host"]),
        queue=None,
        negotiation_message_s=network.negotiation_message_s if network else None,
        cores_per_host=arguments["cores_per_host"],
    )


def describe(setting: Scenario, network: Network | None) -> list[str]:
    """Return lines on the inputs of the predictions."""
    profile, cluster, cores = setting.profile, setting.cluster, setting.cores_per_host
    spread = "unknown: waiting for the slowest worker is not predicted"
    if times := profile.step_times_s:
        spread = (
            f"{1000 * min(times):.2f} to {1000 * max(times):.2f} ms over "
            f"{counted(len(times), 'step')}: a step waits for the slowest worker"
        )
    source = "as given"
    if network:
        source = (
            f"measured with {network.workers} workers ({network.controller}), "
            f"{100 * network.typical_residual:.0f} % from the fit typically (root mean square), "
            f"{100 * network.worst_residual:.0f} % at most"
        )
    shared = f", which share {counted(cores, 'core')}" if cores else ""
    hosts = (
        f"  hosts    {counted(cluster.workers_per_host, 'worker')} each{shared}; inside "
        f"{_describe_link(cluster.inside)}"
    )
    return [
        f"plan: {profile.name}, {counted(profile.batch_size, 'sample')} a worker, "
        f"{counted(len(profile.gradients), 'gradient')} of {profile.gradient_bytes / MB:.3f} MB",
        f"  compute  {1000 * profile.step_s:.2f} ms a step ("
        f"forward {1000 * profile.forward_s:.2f}, backward {1000 * profile.backward_s:.2f}, "
        f"update {1000 * profile.update_s:.2f}); {profile.source}",
        f"  spread   {spread}",
        f"  network  {_describe_link(cluster.between)}; {source}",
        *([hosts] if cluster.workers_per_host > 1 else []),
        "  servers  one parameter server per host",
        f"  queue    a cycle of {1000 * Queue().cycle_s:g} ms, buckets of "
        f"{LEAST_BUCKET_BYTES / (1 << 20):g} MiB or more, ranks agree on a tree",
    ]


def _describe_link(link: Link) -> str:
    return f"{1e6 * link.latency_s:.1f} us, {link.bandwidth_bytes_per_s / MB:,.0f} MB/s"


def table(predictions: Sequence[Prediction]) -> list[str]:
    """Return the heading, and a line for each N with step time and efficiency by method.

    `predictions`: in the order of METHODS for each N.
    """
    starts = range(0, len(predictions), len(METHODS))
    rows = [predictions[start : start + len(METHODS)] for start in starts]
    return [
        " " * 7 + "".join(f"{method:>{COLUMNS_WIDTH}}" for method in METHODS),
        f"{'N':>7}" + f"{'ms a step':>12}{'effic.':>8}" * len(METHODS),
        *(
            f"{row[0].workers:>7,}"
            + "".join(f"{1000 * one.step_s:12,.2f}{one.efficiency:8.3f}" for one in row)
            for row in rows
        ),
    ]


def describe_useful(useful: Mapping[str, LargestUsefulN], least: float) -> list[str]:
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


def draw_plot(
    predictions: Sequence[Prediction], useful: Mapping[str, LargestUsefulN], least: float, name: str
) -> Plot:
    """Draw efficiency above, throughput below; circles mark the largest useful N."""
    figure = new_figure(WIDTH, 1.75 * HEIGHT)
    upper, lower = figure.subplots(2, 1, sharex=True)
    dress(upper, f"Predicted: {shorten(name)}", "efficiency", "")
    dress(lower, "", "samples/s", "workers")
    counts = list(dict.fromkeys(p.workers for p in predictions))
    for index, method in enumerate(METHODS):
        rows = [p for p in predictions if p.method == method]
        colour = look_of(index)["color"]
        style: dict[str, Any] = {"color": colour, "linewidth": 1.6, "marker": "o", "markersize": 3}
        upper.plot(counts, [row.efficiency for row in rows], **style)
        lower.plot(counts, [row.samples_per_s for row in rows], **style)
        at = useful[method].workers, useful[method].efficiency
        upper.scatter(*at, s=70, facecolors="none", edgecolors=colour, linewidths=1.4)
    ideal = [n * predictions[0].samples_per_s for n in counts]
    lower.plot(counts, ideal, color=GREY, linestyle=(0, (1, 1.2)))
    upper.axhline(least, color=GREY, linestyle=(0, (4, 3)), linewidth=1)
    upper.set_ylim(0, 1.05)
    lower.set_yscale("log")
    lower.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    lower.set_xscale("log", base=2)
    shown = counts[:: 1 + len(counts) // (MOST_TICKS + 1)]
    lower.set_xticks(shown, [f"{n:,}" for n in shown])
    lower.xaxis.set_minor_locator(NullLocator())
    handles = [Line2D([], [], linewidth=2.5, **look_of(index)) for index in range(len(METHODS))]
    legend_below(figure, handles, [method.replace("_", " ") for method in METHODS])
    return Plot(
        name="scaling",
        title="Predicted scaling",
        caption="Circles: the largest useful N; dotted: N times the throughput of one.",
        figure=figure,
    )
