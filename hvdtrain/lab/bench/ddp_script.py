"""A small training script as one writes it for torchrun, the peer of `bench start`.

    torchrun --nproc-per-node 2 ddp_script.py TIMES.json
    python ddp_script.py TIMES.json

It does not import hvdtrain. Rank 0 writes the monotonic times (in seconds) of its start and of
the ends of imports, joining, preparation and first step.
"""

import time

TIMES = [time.monotonic()]

import json  # noqa: E402  # imports are timed
import os  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
from torch import distributed, nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

BATCH_SIZE, SAMPLES = 128, 1280


def lenet() -> nn.Module:
    """Return a network with the layers and sizes of `--model lenet`."""
    return nn.Sequential(
        *(nn.Conv2d(1, 20, 3), nn.ReLU(), nn.AvgPool2d(2)),
        *(nn.Conv2d(20, 50, 5), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten()),
        *(nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def main() -> None:
    """Collective: train for one step."""
    TIMES.append(time.monotonic())
    torch.set_num_threads(1)
    together = "WORLD_SIZE" in os.environ
    if together:
        distributed.init_process_group("gloo")
    TIMES.append(time.monotonic())
    torch.manual_seed(0)
    images, labels = torch.randn(SAMPLES, 1, 28, 28), torch.arange(SAMPLES) % 10
    model = DistributedDataParallel(lenet()) if together else lenet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    TIMES.append(time.monotonic())
    rank = distributed.get_rank() if together else 0
    local_indices = torch.arange(rank * BATCH_SIZE, (rank + 1) * BATCH_SIZE) % SAMPLES
    nn.functional.cross_entropy(model(images[local_indices]), labels[local_indices]).backward()
    optimizer.step()
    TIMES.append(time.monotonic())
    if rank == 0:
        part = Path(sys.argv[1] + ".part")
        part.write_text(json.dumps(TIMES), "utf-8")
        part.rename(sys.argv[1])  # whole, as the reader may look at it after a failure
    if together:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
