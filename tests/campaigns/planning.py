"""Predictions of `hvdtrain plan`, compared with published and with local measurements.

    python -m tests.campaigns.planning published
    python -m tests.campaigns.planning measure [--controllers gloo mpi]
    python -m tests.campaigns.planning measured

prints the tables of docs/planning.md. `measure` takes some minutes, and requires an idle machine.
It adds missing measurements to docs/planning-measured.json; `measured` prints them again. The jobs
of a model for all N are alive together and train in turns, so that a drift in the speed of the
machine affects all N alike.

Nothing is fitted to a published result. The time of one device is that of the authors, or of the
same GPU in TensorFlow's benchmarks. Latencies are those in NCCL's model of its ring. Links have
their nominal bandwidth.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hvdtrain.evidence.children import guarded
from hvdtrain.lab.bench import contestants
from hvdtrain.lab.bench.contestants import OURS, ScalingCase
from hvdtrain.lab.bench.loops import DATA
from hvdtrain.lab.plan.predicting import (
    Cluster,
    Link,
    Queue,
    Scenario,
    negotiation_messages,
    predict,
)
from hvdtrain.lab.plan.probe import measure_network, read_network
from hvdtrain.lab.plan.profiles import (
    WARM_UP_STEPS,
    Layer,
    build_layers,
    measure_profile,
    read_profile,
    share_out,
)
from hvdtrain.lab.systems.process import start_fork_server
from hvdtrain.lab.systems.work import WorkSpec
from tests.parallel.launching import CHECKOUT, CONTROLLERS

MEASURED = CHECKOUT / "docs" / "planning-measured.json"
WORK = {"lenet": 128, "mlp": 128, "resnet18-small": 16}  # samples per worker
PROFILE_STEPS = {"lenet": 60, "mlp": 30, "resnet18-small": 6}
WORKERS = (1, 2, 3, 4)
ROUNDS, TURN_S = 4, 3.0
LIMIT_S = 1200.0  # of each model

GBIT = 1e9 / 8
# The usual image size of each model, and 1,000 classes.
IMAGENET = "synthetic:3x224x224,classes=1000"
INPUTS = {"inception_v3": "synthetic:3x299x299,classes=1000"}

# NCCL 2.5.6 (November 2019, the first version with them), src/graph/tuning.cc: latency of a hop of
# its ring with the protocol Simple, by NVLink and PCI 5.7 us, over the network 6.6 us.
NVLINK_LATENCY_S = PCI_LATENCY_S = 5.7e-6
NETWORK_LATENCY_S = 6.6e-6
PCI_BANDWIDTH = 15.75e9  # PCI Express 3.0 x16: 16 lanes of 8 GT/s, 128b/130b
NVLINK_BANDWIDTH = 20e9  # in each direction by one of a Tesla P100's four links, 80 GB/s in all


def _network(gbit_s: float) -> Link:
    return Link(NETWORK_LATENCY_S, gbit_s * GBIT)


PASCAL_25 = Cluster(_network(25), Link(PCI_LATENCY_S, PCI_BANDWIDTH), workers_per_host=4)
PASCAL_40 = Cluster(_network(40), Link(PCI_LATENCY_S, PCI_BANDWIDTH), workers_per_host=4)
BIG_BASIN = Cluster(_network(50), Link(NVLINK_LATENCY_S, NVLINK_BANDWIDTH), workers_per_host=8)

# Horovod until June 2018: a fusion buffer of 64 MiB, a tick of 5 ms (horovod/common/operations.cc
# at its commit 8318a898).
HOROVOD_2018 = Queue(cycle_s=0.005, fusion_bytes=64 << 20, sleeps=True)
# Goyal et al., section 4: each gradient is reduced as soon as it is available.
AT_ONCE = Queue(cycle_s=0.0, fusion_bytes=0)


@dataclass(frozen=True)
class Published:
    """One published efficiency, and the parameters of its prediction."""

    what: str
    model: str
    cluster: Cluster
    queue: Queue
    negotiation_message_s: float
    method: str
    batch_size: int
    step_s: float  # of one device
    workers: int
    base: int  # the number of workers that the efficiency is relative to
    efficiency: float


def _horovod(
    what: str, cluster: Cluster, workers: int, images_per_s: dict[str, float], *found: float
) -> list[Published]:
    """Return a point for each model; `found`: its efficiency.

    Until June 2018 each rank in turn reported ready tensors to rank 0 (Horovod's pull request 276):
    2 (N - 1) messages, instead of those of a tree.
    """
    one_by_one_s = 2 * (workers - 1) * NETWORK_LATENCY_S
    return [
        Published(
            what=what,
            model=model,
            cluster=cluster,
            queue=HOROVOD_2018,
            negotiation_message_s=one_by_one_s / negotiation_messages(workers),
            method="ring",
            batch_size=64,
            step_s=64 / images_per_s[model],
            workers=workers,
            base=1,
            efficiency=efficiency,
        )
        for model, efficiency in zip(images_per_s, found, strict=True)
    ]


def _efficiencies(workers: int, alone: dict[str, float], *totals: float) -> list[float]:
    return [total / (workers * one) for total, one in zip(totals, alone.values(), strict=True)]


# Horovod's README at its commit d54e3a88 (September 2017): one GPU, batch 64, images per second.
ALONE_25 = {"inception_v3": 134.4, "resnet101": 119.4, "vgg16": 130.9}
ALONE_40 = {"inception_v3": 148.8, "resnet101": 136.0, "vgg16": 149.6}
# TensorFlow's benchmarks (May 2017): one Tesla P100 of a DGX-1, ResNet-50, batch 32, images/s.
P100_RESNET50 = 195.0
# Goyal et al., section 4: the backward pass of ResNet-50 with 32 images on a P100 takes 120 ms. By
# number of operations the forward pass takes half of that.
GOYAL_STEP_S = 0.120 * 3 / 2

POINTS = [
    # "RDMA Horovod (allreduce on GPU with NCCL)", in images per second on 16 GPUs
    *_horovod(
        *("Horovod, 25 Gbit/s RoCE", PASCAL_25, 16, ALONE_25),
        *_efficiencies(16, ALONE_25, 2022.6, 1746.2, 1787.4),
    ),
    # the README at its commit cd2a3ce8 (November 2017)
    *_horovod("Horovod, 25 Gbit/s RoCE", PASCAL_25, 128, ALONE_25, 0.90, 0.90, 0.79),
    # the README and docs/benchmarks.md at its commit 8318a898 (May 2018), unchanged since
    *_horovod("Horovod, 25 Gbit/s RoCE", PASCAL_25, 512, ALONE_25, 0.90, 0.90, 0.68),
    # "TCP Horovod (allreduce on GPU with NCCL)", in images per second on 64 GPUs
    *_horovod(
        *("Horovod, 40 Gbit/s TCP", PASCAL_40, 64, ALONE_40),
        *_efficiencies(64, ALONE_40, 7932.1, 7741.6, 6084.2),
    ),
    *(
        Published(
            what=f"Goyal et al., {what}",
            model="resnet50",
            cluster=BIG_BASIN,
            queue=AT_ONCE,
            negotiation_message_s=0.0,
            method="hierarchical_ring",
            batch_size=32,
            step_s=step_s,
            workers=256,
            base=8,
            efficiency=0.90,
        )
        for what, step_s in (
            ("one GPU as in TensorFlow's", 32 / P100_RESNET50),
            ("one GPU as they say", GOYAL_STEP_S),
        )
    ),
]


def predicted_efficiencies(point: Published, layers: list[Layer]) -> tuple[float, float]:
    """Return the efficiency with and without overlap, relative to `point.base` workers."""
    setting = Scenario(
        profile=share_out(layers, point.model, point.batch_size, point.step_s),
        cluster=point.cluster,
        queue=point.queue,
        negotiation_message_s=point.negotiation_message_s,
    )
    found = predict(setting, point.method, point.workers)
    base = predict(setting, point.method, point.base)
    return (
        found.efficiency / base.efficiency,
        found.efficiency_without_overlap / base.efficiency_without_overlap,
    )


def published_table() -> list[str]:
    """Return the lines of a table with a row for each published efficiency."""
    layers = {
        model: build_layers(model, INPUTS.get(model, IMAGENET), ".")
        for model in {p.model for p in POINTS}
    }
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
            _keep(found, "profiles", model, asdict(measure_profile(spec)))
    for controller in controllers:
        if controller not in found["networks"]:
            _keep(found, "networks", controller, asdict(measure_network(controller)))
        for model in WORK:
            if (name := f"{controller} {model}") not in found["samples_per_s"]:
                _keep(found, "samples_per_s", name, _train(controller, model))


def _keep(found: dict[str, Any], part: str, name: str, value: object) -> None:
    """Add one measurement to the file immediately, as the campaign may be interrupted."""
    found[part][name] = value
    MEASURED.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def _train(controller: str, model: str) -> dict[str, list[float]]:
    """Return samples per second of each N and round, over all workers."""
    how = {"controller": controller, "time_limit_s": LIMIT_S}
    start_fork_server()
    with guarded(), tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        running = {}
        for workers in WORKERS:
            case = ScalingCase(model, workers, WORK[model] * workers)
            run_folder = Path(folder, str(workers))
            running[workers] = contestants.start(case, OURS, run_folder, **how)
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
