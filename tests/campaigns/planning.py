"""Predictions of `hvdtrain plan` beside what was published, and beside what is measured here.

    python -m tests.campaigns.planning published
    python -m tests.campaigns.planning measure [--controllers gloo mpi] [--rounds 3]
    python -m tests.campaigns.planning measured

prints the tables of docs/planning.md. `measure` takes some minutes, and needs a machine that does
nothing else; it writes docs/planning-measured.json, which `measured` shows again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hvdtrain.planning.costs import Cluster
from hvdtrain.planning.measuring import WARM_UP_STEPS, measure_profile
from hvdtrain.planning.network import measure_network, read_network
from hvdtrain.planning.overlap import Queue
from hvdtrain.planning.predicting import Setting, predict
from hvdtrain.planning.profiles import read_profile
from hvdtrain.strategies.work import WorkSpec
from tests.campaigns.published import POINTS, layers_of, predicted_efficiencies
from tests.parallel.launching import CHECKOUT, CONTROLLERS, horovodrun, hvdtrain, run

MEASURED = CHECKOUT / "docs" / "planning-measured.json"
DATA = "synthetic:1x28x28"
WORK = {"lenet": (128, 120), "mlp": (128, 60), "resnet18-small": (16, 30)}  # batch size, steps
WORKERS = (1, 2, 3, 4)
LIMIT_S = 300.0


def published_table() -> list[str]:
    """A row for each published efficiency."""
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


def measure(controllers: Sequence[str], rounds: int) -> dict[str, Any]:
    """All that the other table is made from."""
    torch.set_num_threads(1)
    profiles = {
        model: measure_profile(
            WorkSpec(model, DATA, ".", batch, WARM_UP_STEPS + steps, "float32", 0, 0.01, 0.9)
        ).as_json()
        for model, (batch, steps) in WORK.items()
    }
    found: dict[str, Any] = {"cores": os.cpu_count(), "profiles": profiles, "networks": {}}
    for controller in controllers:
        found["networks"][controller] = measure_network(controller, LIMIT_S).as_json()
    found["samples_per_s"] = {
        controller: {
            model: {str(n): [_train(model, controller, n) for _ in range(rounds)] for n in WORKERS}
            for model in WORK
        }
        for controller in controllers
    }
    return found


def _train(model: str, controller: str, workers: int) -> float:
    """Samples a second over all workers, as the run's own summary has it."""
    batch_size, steps = WORK[model]
    with tempfile.TemporaryDirectory() as folder:
        flags = [f"--model={model}", f"--data={DATA}", f"--batch-size={batch_size}"]
        flags += [f"--max-steps={steps}", f"--output={folder}", "--experiment=run"]
        flags += ["--log-interval=1000", "--lr=0.01"]
        command = hvdtrain("train", *flags)
        variables = {"OMP_NUM_THREADS": "1"}
        finished = (
            run(command, LIMIT_S, variables=variables)
            if workers == 1
            else horovodrun(workers, controller, command, timeout_s=LIMIT_S, variables=variables)
        )
        assert finished.exit_code == 0, finished.output
        summary = json.loads(Path(folder, "run", "summary.json").read_text())
    return float(summary["samples_per_s"])


def measured_table(measured: dict[str, Any]) -> list[str]:
    """A row for each model, controller and N: samples a second, and efficiency."""
    lines = [
        "| controller | model | N | samples/s predicted | measured | residual "
        "| efficiency predicted | measured | residual |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for controller, by_model in measured["samples_per_s"].items():
        for model, by_workers in by_model.items():
            setting = _setting(measured, controller, model)
            alone = statistics.median(by_workers["1"])
            for workers, rates in by_workers.items():
                lines.append(_row(setting, controller, model, int(workers), rates, alone))
    return lines


def _row(
    setting: Setting, controller: str, model: str, workers: int, rates: list[float], alone: float
) -> str:
    predicted = predict(setting, "ring", workers)
    rate = statistics.median(rates)
    efficiency = rate / (workers * alone)
    return (
        f"| {controller} | {model} | {workers} | {predicted.samples_per_s:,.0f} | {rate:,.0f} | "
        f"{100 * (predicted.samples_per_s / rate - 1):+.0f} % | {predicted.efficiency:.2f} | "
        f"{efficiency:.2f} | {predicted.efficiency - efficiency:+.2f} |"
    )


def _setting(measured: dict[str, Any], controller: str, model: str) -> Setting:
    """This machine: one host, whose workers share its cores."""
    with tempfile.TemporaryDirectory() as name:
        profile_file, network_file = Path(name, "profile"), Path(name, "network")
        profile_file.write_text(json.dumps(measured["profiles"][model]))
        network_file.write_text(json.dumps(measured["networks"][controller]))
        profile, network = read_profile(profile_file), read_network(network_file)
    return Setting(
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
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.table == "published":
        print("\n".join(published_table()))
        return 0
    if arguments.table == "measure":
        found = measure(arguments.controllers, arguments.rounds)
        MEASURED.write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(measured_table(json.loads(MEASURED.read_text()))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
