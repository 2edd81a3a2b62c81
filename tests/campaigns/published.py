"""Published measurements of scaling, and the hardware that they were made on, with sources.

Nothing here is fitted to a result: the time of one device is the authors' own, or that of the same
GPU in TensorFlow's benchmarks; latencies are those that NCCL's own model of its ring has; links
have the bandwidth that they are sold with.
"""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.lab.plan.costs import Cluster, Link
from hvdtrain.lab.plan.predicting import Queue, Scenario, predict
from hvdtrain.lab.plan.profiles import Layer, build_layers, share_out

GBIT = 1e9 / 8
IMAGENET = "synthetic:3x224x224,classes=1000"
INPUTS = {"inception_v3": "synthetic:3x299x299,classes=1000"}

# NCCL 2.5.6 (November 2019, the first that tells), src/graph/tuning.cc: latency of a hop of its
# ring with the protocol Simple, by NVLink and PCI 5.7 us, over the network 6.6 us.
NVLINK_LATENCY_S = PCI_LATENCY_S = 5.7e-6
NETWORK_LATENCY_S = 6.6e-6
PCI_BANDWIDTH = 15.75e9  # PCI Express 3.0 x16: 16 lanes of 8 GT/s, 128b/130b
NVLINK_BANDWIDTH = 20e9  # in each direction by one of a Tesla P100's four links, 80 GB/s in all


def _network(gbit_s: float) -> Link:
    return Link(NETWORK_LATENCY_S, gbit_s * GBIT)


PASCAL_25 = Cluster(_network(25), Link(PCI_LATENCY_S, PCI_BANDWIDTH), workers_per_host=4)
PASCAL_40 = Cluster(_network(40), Link(PCI_LATENCY_S, PCI_BANDWIDTH), workers_per_host=4)
BIG_BASIN = Cluster(_network(50), Link(NVLINK_LATENCY_S, NVLINK_BANDWIDTH), workers_per_host=8)

# Horovod until June 2018: a fusion buffer of 64 MiB, a tick of 5 ms, and ranks that tell rank 0
# one by one what is ready (horovod/common/operations.cc at its commit 8318a898).
HOROVOD_2018 = Queue(cycle_s=0.005, fusion_bytes=64 << 20)
# Goyal et al., section 4: each gradient is reduced as soon as it is there.
AT_ONCE = Queue(cycle_s=0.0, fusion_bytes=0)


@dataclass(frozen=True)
class Published:
    """One published efficiency, and what is needed to predict it."""

    what: str
    model: str
    cluster: Cluster
    queue: Queue
    negotiation: str
    negotiation_message_s: float | None
    method: str
    batch_size: int
    step_s: float  # of one device
    workers: int
    base: int  # the number of workers that the efficiency is relative to
    efficiency: float


def _horovod(
    what: str, cluster: Cluster, workers: int, images_per_s: dict[str, float], *found: float
) -> list[Published]:
    """`found`: the efficiency of each model."""
    return [
        Published(
            *(what, model, cluster, HOROVOD_2018, "linear", None, "ring", 64),
            *(64 / images_per_s[model], workers, 1, efficiency),
        )
        for model, efficiency in zip(images_per_s, found, strict=True)
    ]


def _pairs(totals: tuple[float, ...], alone: dict[str, float]) -> list[tuple[float, float]]:
    return list(zip(totals, alone.values(), strict=True))


# Horovod's README at its commit d54e3a88 (September 2017): one GPU, batch 64, images a second.
ALONE_25 = {"inception_v3": 134.4, "resnet101": 119.4, "vgg16": 130.9}
ALONE_40 = {"inception_v3": 148.8, "resnet101": 136.0, "vgg16": 149.6}
# TensorFlow's benchmarks (May 2017): one Tesla P100 of a DGX-1, ResNet-50, batch 32, images/s.
P100_RESNET50 = 195.0
# Goyal et al., section 4: the backward pass of ResNet-50 with 32 images on a P100 takes 120 ms; by
# operations the forward pass takes half of that.
GOYAL_STEP_S = 0.120 * 3 / 2

POINTS = [
    # "RDMA Horovod (allreduce on GPU with NCCL)", in images a second on 16 GPUs
    *_horovod(
        *("Horovod, 25 Gbit/s RoCE", PASCAL_25, 16, ALONE_25),
        *(total / (16 * one) for total, one in _pairs((2022.6, 1746.2, 1787.4), ALONE_25)),
    ),
    # the README at its commit cd2a3ce8 (November 2017)
    *_horovod("Horovod, 25 Gbit/s RoCE", PASCAL_25, 128, ALONE_25, 0.90, 0.90, 0.79),
    # the README and docs/benchmarks.md at its commit 8318a898 (May 2018), and to this day
    *_horovod("Horovod, 25 Gbit/s RoCE", PASCAL_25, 512, ALONE_25, 0.90, 0.90, 0.68),
    # "TCP Horovod (allreduce on GPU with NCCL)", in images a second on 64 GPUs
    *_horovod(
        *("Horovod, 40 Gbit/s TCP", PASCAL_40, 64, ALONE_40),
        *(total / (64 * one) for total, one in _pairs((7932.1, 7741.6, 6084.2), ALONE_40)),
    ),
    *(
        Published(
            *(f"Goyal et al., {what}", "resnet50", BIG_BASIN, AT_ONCE, "tree", 0.0),
            *("hierarchical_ring", 32, step_s, 256, 8, 0.90),
        )
        for what, step_s in (
            ("one GPU as in TensorFlow's", 32 / P100_RESNET50),
            ("one GPU as they say", GOYAL_STEP_S),
        )
    ),
]


def layers_of(model: str) -> list[Layer]:
    """Of a network of torchvision, for images of its usual size and 1,000 classes."""
    return build_layers(model, INPUTS.get(model, IMAGENET), ".", "float32")


def predicted_efficiencies(point: Published, layers: list[Layer]) -> tuple[float, float]:
    """With overlap and without, relative to `point.base` workers, as the published one is."""
    setting = Scenario(
        profile=share_out(layers, point.model, point.batch_size, point.step_s),
        cluster=point.cluster,
        queue=point.queue,
        negotiation=point.negotiation,
        negotiation_message_s=point.negotiation_message_s,
    )
    found = predict(setting, point.method, point.workers)
    base = predict(setting, point.method, point.base)
    return (
        found.efficiency / base.efficiency,
        found.efficiency_without_overlap / base.efficiency_without_overlap,
    )
