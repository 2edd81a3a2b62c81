"""Published measurements of scaling, and the hardware that they were made on, with sources.

Nothing here is fitted to a result. The time of one device is that of the authors, or of the same
GPU in TensorFlow's benchmarks. Latencies are those in NCCL's model of its ring. Links have their
nominal bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.lab.plan.costs import Cluster, Link
from hvdtrain.lab.plan.predicting import Queue, Scenario, predict
from hvdtrain.lab.plan.profiles import Layer, build_layers, share_out

GBIT = 1e9 / 8
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

# Horovod until June 2018: a fusion buffer of 64 MiB, a tick of 5 ms, and ranks that report ready
# tensors to rank 0 one by one (horovod/common/operations.cc at its commit 8318a898).
HOROVOD_2018 = Queue(cycle_s=0.005, fusion_bytes=64 << 20)
# Goyal et al., section 4: each gradient is reduced as soon as it is available.
AT_ONCE = Queue(cycle_s=0.0, fusion_bytes=0)


@dataclass(frozen=True)
class Published:
    """One published efficiency, and the parameters of its prediction."""

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
            what=what,
            model=model,
            cluster=cluster,
            queue=HOROVOD_2018,
            negotiation="linear",
            negotiation_message_s=None,
            method="ring",
            batch_size=64,
            step_s=64 / images_per_s[model],
            workers=workers,
            base=1,
            efficiency=efficiency,
        )
        for model, efficiency in zip(images_per_s, found, strict=True)
    ]


def _pairs(totals: tuple[float, ...], alone: dict[str, float]) -> list[tuple[float, float]]:
    return list(zip(totals, alone.values(), strict=True))


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
        *(total / (16 * one) for total, one in _pairs((2022.6, 1746.2, 1787.4), ALONE_25)),
    ),
    # the README at its commit cd2a3ce8 (November 2017)
    *_horovod("Horovod, 25 Gbit/s RoCE", PASCAL_25, 128, ALONE_25, 0.90, 0.90, 0.79),
    # the README and docs/benchmarks.md at its commit 8318a898 (May 2018), unchanged since
    *_horovod("Horovod, 25 Gbit/s RoCE", PASCAL_25, 512, ALONE_25, 0.90, 0.90, 0.68),
    # "TCP Horovod (allreduce on GPU with NCCL)", in images per second on 64 GPUs
    *_horovod(
        *("Horovod, 40 Gbit/s TCP", PASCAL_40, 64, ALONE_40),
        *(total / (64 * one) for total, one in _pairs((7932.1, 7741.6, 6084.2), ALONE_40)),
    ),
    *(
        Published(
            what=f"Goyal et al., {what}",
            model="resnet50",
            cluster=BIG_BASIN,
            queue=AT_ONCE,
            negotiation="tree",
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


def layers_of(model: str) -> list[Layer]:
    """Return the layers of a torchvision model, for its usual image size and 1,000 classes."""
    return build_layers(model, INPUTS.get(model, IMAGENET), ".", "float32")


def predicted_efficiencies(point: Published, layers: list[Layer]) -> tuple[float, float]:
    """Return the efficiency with and without overlap, relative to `point.base` workers."""
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
