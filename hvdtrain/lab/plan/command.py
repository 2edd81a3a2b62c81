"""The `plan` subcommand: a table, JSON and a plot of predictions for N workers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from hvdtrain.errors import EXIT_OK
from hvdtrain.files import write_json
from hvdtrain.lab.plan.costs import METHODS, Cluster, Link
from hvdtrain.lab.plan.measuring import WARM_UP_STEPS, measure_profile
from hvdtrain.lab.plan.network import Network, measure_network, read_network
from hvdtrain.lab.plan.predicting import (
    Prediction,
    Queue,
    Scenario,
    Useful,
    largest_useful,
    predict_all,
    worker_counts,
)
from hvdtrain.lab.plan.profiles import Profile, build_layers, read_profile, share_out, write_profile
from hvdtrain.lab.plan.table import describe, describe_useful, table, write_plot
from hvdtrain.lab.systems.work import WorkSpec
from hvdtrain.launcher.command import find_controller
from hvdtrain.launcher.stopping import StopRequests
from hvdtrain.log import say

MODEL, DATA, BATCH_SIZE, STEPS = "lenet", "digits", 32, 30
BITS, GIGA, MICRO, MILLI = 8, 1e9, 1e-6, 1e-3


def run(arguments: dict[str, Any]) -> int:
    """Measure what is not given, predict, print and write; return the exit code."""
    StopRequests()  # a signal raises Stopped, and child processes are ended on the way out
    torch.set_num_threads(1)
    network = read_network(arguments["network"]) if arguments["network"] else None
    profile = find_profile(arguments)
    if arguments["save_profile"]:
        write_profile(profile, arguments["save_profile"])
    if network is None and arguments["latency_us"] is None:
        network = measure_network(
            find_controller(arguments["controller"]), arguments["time_limit_s"]
        )
    setting = make_setting(arguments, profile, network)
    most, least = arguments["max_workers"], arguments["min_efficiency"]
    predictions = predict_all(setting, worker_counts(most))
    useful = {method: largest_useful(setting, method, most, least) for method in METHODS}
    say("\n".join([*describe(setting, network), *table(predictions)]))
    say("\n".join(describe_useful(useful, least)))
    write_json(arguments["json"], as_json(setting, network, predictions, useful))
    say(f"written to {write_plot(predictions, useful, least, profile, arguments['output'])}")
    return EXIT_OK


def find_profile(arguments: dict[str, Any]) -> Profile:
    """Return the profile from a file, a given step time, or a measurement. Raises UsageError."""
    if arguments["profile"]:
        return read_profile(arguments["profile"])
    model, data = arguments["model"] or MODEL, arguments["data"] or DATA
    batch_size = arguments["batch_size"] or BATCH_SIZE
    if arguments["step_time_s"]:
        layers = build_layers(model, data, arguments["data_dir"], "float32")
        return share_out(layers, f"{model} on {data}", batch_size, arguments["step_time_s"])
    return measure_profile(
        WorkSpec(
            model=model,
            data=data,
            data_dir=arguments["data_dir"],
            global_batch_size=batch_size,
            steps=WARM_UP_STEPS + (arguments["steps"] or STEPS),
            dtype="float32",
            seed=0,
            lr=0.01,
            momentum=0.9,
        )
    )


def make_setting(arguments: dict[str, Any], profile: Profile, network: Network | None) -> Scenario:
    """Build the scenario from checked flags; `network` is used if they give no latency."""
    between = network.link if network else _link(arguments, "")
    inside = between
    if arguments["intra_latency_us"] is not None:
        inside = _link(arguments, "intra_")
    message_s = network.negotiation_message_s if network else None
    if arguments["negotiation_us"] is not None:
        message_s = arguments["negotiation_us"] * MICRO
    return Scenario(
        profile=profile,
        cluster=Cluster(between, inside, arguments["workers_per_host"], arguments["servers"]),
        queue=Queue(arguments["cycle_time_ms"] * MILLI, arguments["fusion_bytes"]),
        negotiation=arguments["negotiation"],
        negotiation_message_s=message_s,
        cores_per_host=arguments["cores_per_host"],
        compute_speed=arguments["compute_speed"],
    )


def as_json(
    setting: Scenario,
    network: Network | None,
    predictions: list[Prediction],
    useful: dict[str, Useful],
) -> dict[str, Any]:
    """Return scenario, network and predictions as JSON values."""
    return {
        **asdict(setting),
        "network": network.as_json() if network else None,
        "predictions": [asdict(prediction) for prediction in predictions],
        "largest_useful": {method: asdict(one) for method, one in useful.items()},
    }


def _link(arguments: dict[str, Any], prefix: str) -> Link:
    bandwidth = arguments[f"{prefix}bandwidth_gbit_s"] * GIGA / BITS
    return Link(arguments[f"{prefix}latency_us"] * MICRO, bandwidth)
