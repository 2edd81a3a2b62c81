"""The CPU in place of each rank's GPU, for what runs on GPUs with a Horovod that has NCCL.

    install()

in a `sitecustomize.py` on PYTHONPATH: hvdtrain finds two devices, each the CPU, and Horovod, which
takes their tensors, says that it is built with NCCL.
"""

from __future__ import annotations

import sys
from pathlib import Path

USERS = ("verify", "bench", "hvdtrain.exchange.prove")


def install() -> None:
    """Patch hvdtrain and Horovod in a process that verifies or measures."""
    if not set(USERS) & set(sys.orig_argv) or "launch" in sys.orig_argv:
        return
    if "horovodrun" in " ".join(sys.orig_argv):
        return
    import horovod.torch as hvd
    import torch

    from hvdtrain.exchange import gpus

    gpus.find_devices = lambda: [torch.device("cpu", 0), torch.device("cpu", 0)]
    honest, local = gpus.uuid_of, hvd.local_rank
    gpus.uuid_of = lambda device: f"{honest(device)} of local rank {local()}"
    hvd.cuda_built = hvd.nccl_built = lambda: True


def write_gpus(folder: Path) -> None:
    """Write the file that Python reads at its start, if `folder` is on PYTHONPATH."""
    lines = "from tests.parallel.cpu_as_gpu import install\ninstall()\n"
    (folder / "sitecustomize.py").write_text(lines)
