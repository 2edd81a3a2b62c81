"""Predictions of `hvdtrain plan`, compared with published and with local measurements.

    python -m tests.campaigns.planning published
    python -m tests.campaigns.planning measure [--controllers gloo mpi]
    python -m tests.campaigns.planning measured

prints the tables of docs/planning.md. `measure` takes some minutes, and requires an idle machine.
It adds missing measurements to docs/planning-measured.json; `measured` prints them again. The jobs
of a model for all N are alive together and train in turns, so that a drift in the speed of the
machine affects all N alike.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from hvdtrain.lab.bench.scaling import OURS, ScalingCase, Starter
from hvdtrain.lab.bench.within_job import DATA
from hvdtrain.lab.children import fork_server, guarded
from hvdtrain.lab.plan.costs import Cluster
from hvdtrain.lab.plan.measuring import WARM_UP_STEPS, measure_profile
from hvdtrain.lab.plan.network import measure_network, read_network
from hvdtrain.lab.plan.predicting import Queue, Scenario, predict
from hvdtrain.lab.plan.profiles import read_profile
from hvdtrain.lab.systems.work import WorkSpec
from tests.campaigns.published import POINTS, layers_of, predicted_efficiencies
from tests.parallel.launching import CHECKOUT, CONTROLLERS

MEASURED = CHECKOUT / "docs" / "planning-measured.json"
WORK = {"lenet": 128, "mlp": 128, "resnet18-small": 16}  # samples per worker
PROFILE_STEPS = {"lenet": 60, "mlp": 30, "resnet18-small": 6}
WORKERS = (1, 2, 3, 4)
ROUNDS, TURN_S = 4, 3.0
LIMIT_S = 1200.0  # of each model, and of the network


def published_table() -> list[str]:
    """Return the lines of a table with a row for each published efficiency."""
    layers = {model: layers_of(model) for model in dict.fromkeys(p.model for p in POINTS)}
    lines = [
        "| | model | N | predicted | published | residual | predicted without overlap |",
        "|---|---|---|---|---|---|---|",
    ]
    for point in POINTS:
        found, exposed = predicted_efficiencies(point, layers[point.model])
        base = f"{point.base} to {point.workers}" if point.base > 1 else str(point.workers)
        lines.append(
            f"| {point.what} | {point.model} | {base} | {100 * found:.1f} % | "
            f"{100 * point.efficiency:.1f} % | {100 * (found - point.efficiency):+.1f} | "
            f"{100 * exposed:.1f} % |"
        )
    return lines


def measure(controllers: Sequence[str]) -> None:
    """Measure the data of the second table into the file, except those that it already holds."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {"profiles": {}, "networks": {}, "samples_per_s": {}}
    if MEASURED.exists():
        found = json.loads(MEASURED.read_text())
    found["cores"] = len(os.sched_getaffinity(0))
    for model, batch_size in WORK.items():
        if model not in found["profiles"]:
            count = WARM_UP_STEPS + PROFILE_STEPS[model]
            spec = WorkSpec(model, DATA, ".", batch_size, count, "float32", 0, 0.01, 0.9)
            _keep(found, "profiles", model, measure_profile(spec).as_json())
    for controller in controllers:
        if controller not in found["networks"]:
            network = measure_network(controller, LIMIT_S).as_json()
            _keep(found, "networks", controller, network)
        for model in WORK:
            if (name := f"{controller} {model}") not in found["samples_per_s"]:
                _keep(found, "samples_per_s", name, _train(controller, model))


def _keep(found: dict[str, Any], part: str, name: str, value: object) -> None:
    """Add one measurement to the file immediately, as the campaign may be interrupted."""
    found[part][name] = value
    MEASURED.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def _train(controller: str, model: str) -> dict[str, list[float]]:
    """Return samples per second of each N and round, over all workers."""
    start = Starter(controller, LIMIT_S, fork_server())
    with guarded(), tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        running = {}
        for workers in WORKERS:
            case = ScalingCase(model, workers, WORK[model] * workers)
            running[workers] = start(case, OURS, Path(folder, str(workers)))
            stack.callback(running[workers].close)
        for number in range(ROUNDS):
            for workers in WORKERS[:: -1 if number % 2 else 1]:
                running[workers].take(TURN_S)
        return {str(workers): contestant.rates() for workers, contestant in running.items()}


def measured_table(measured: dict[str, Any]) -> list[str]:
    """Return the lines of a table by controller, model and N: samples/s and efficiency."""
    lines = [
        "| controller | model | N | samples/s predicted | measured | residual "
        "| efficiency predicted | measured | residual | predicted without overlap |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for controller in sorted(measured["networks"]):
        for model in WORK:
            rates = measured["samples_per_s"][f"{controller} {model}"]
            setting = _setting(measured, controller, model)
            lines += [_row(setting, controller, model, workers, rates) for workers in WORKERS]
    return lines


def _row(
    setting: Scenario, controller: str, model: str, workers: int, rates: dict[str, list[float]]
) -> str:
    """Return one row; the efficiency is the median of the ratios within rounds."""
    predicted = predict(setting, "ring", workers)
    ours, alone = rates[str(workers)], rates["1"]
    rate = statistics.median(ours)
    efficiency = statistics.median(n / (workers * one) for n, one in zip(ours, alone, strict=True))
    return (
        f"| {controller} | {model} | {workers} | {predicted.samples_per_s:,.0f} | {rate:,.0f} | "
        f"{100 * (predicted.samples_per_s / rate - 1):+.0f} % | {predicted.efficiency:.2f} | "
        f"{efficiency:.2f} | {predicted.efficiency - efficiency:+.2f} | "
        f"{predicted.efficiency_without_overlap:.2f} |"
    )


def _setting(measured: dict[str, Any], controller: str, model: str) -> Scenario:
    """Return the scenario of this machine: one host, whose workers share its cores."""
    with tempfile.TemporaryDirectory() as name:
        profile_file, network_file = Path(name, "profile"), Path(name, "network")
        profile_file.write_text(json.dumps(measured["profiles"][model]))
        network_file.write_text(json.dumps(measured["networks"][controller]))
        profile, network = read_profile(profile_file), read_network(network_file)
    return Scenario(
        profile=profile,
        cluster=Cluster(network.link, network.link, workers_per_host=max(WORKERS)),
        queue=Queue(network.cycle_s),
        negotiation_message_s=network.negotiation_message_s,
        cores_per_host=measured["cores"],
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", choices=("published", "measure", "measured"))
    parser.add_argument("--controllers", nargs="+", default=list(CONTROLLERS))
    arguments = parser.parse_args()
    if arguments.table == "published":
        print("\n".join(published_table()))
        return 0
    if arguments.table == "measure":
        measure(arguments.controllers)
    print("\n".join(measured_table(json.loads(MEASURED.read_text()))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
