"""What was predicted, as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hvdtrain.lab.plan.costs import METHODS, Cluster, Link
from hvdtrain.lab.plan.network import Network
from hvdtrain.lab.plan.overlap import Queue
from hvdtrain.lab.plan.predicting import Prediction, Scenario, Useful
from hvdtrain.lab.plan.profiles import Profile
from hvdtrain.log import counted

WIDTH = 20  # of a method's two columns
MB = 1e6


def describe(setting: Scenario, network: Network | None) -> list[str]:
    """What the predictions are made from."""
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
    spread = "spread   not known: no waiting for the slowest worker is predicted"
    if times:
        spread = (
            f"spread   {1000 * times[0]:.2f} to {1000 * times[-1]:.2f} ms over "
            f"{counted(len(times), 'step')}: of N workers the slowest is waited for"
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
            f"  hosts    of {counted(cluster.workers_per_host, 'worker')}{shared}; inside "
            f"{_link(cluster.inside)}"
        )
    return [*lines, f"  servers  {_servers(cluster)}"]


def _servers(cluster: Cluster) -> str:
    if cluster.servers is None:
        return "one a host, of the parameter server"
    return f"{cluster.servers:,} of the parameter server"


def _link(link: Link) -> str:
    return f"{1e6 * link.latency_s:.1f} us, {link.bandwidth_bytes_per_s / MB:,.0f} MB/s"


def _describe_queue(queue: Queue, negotiation: str) -> str:
    fusion = f"up to {queue.fusion_bytes:,} bytes fused" if queue.fusion_bytes else "no fusion"
    return (
        f"  queue    a cycle of {1000 * queue.cycle_s:g} ms, {fusion}, ranks agree "
        f"{'on a tree' if negotiation == 'tree' else 'one by one'}"
    )


def table(predictions: Sequence[Prediction]) -> list[str]:
    """A line for each N: step time and efficiency by method."""
    above = " " * 7 + "".join(f"{method:>{WIDTH}}" for method in METHODS)
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
    """One line a method."""
    width = max(map(len, useful))
    return [
        f"largest useful N (efficiency of at least {least:g} up to there):",
        *(
            f"  {method:{width}}  {one.workers:>6,}"
            + (" or more" if one.is_limit else f"  ({one.efficiency:.3f})")
            for method, one in useful.items()
        ),
    ]
