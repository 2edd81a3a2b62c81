"""Train a LeNet as scripts for torchrun do that are started again after a failure.

    torchrun ... elastic_ddp.py SNAPSHOT STEPS

Rank 0 keeps a snapshot of all state every few steps, from which every rank goes on. Data, batch and
interval are those of tests/hosts/trials.py; a collective fails where its watchdog would act.
"""

import hashlib
import sys
from datetime import timedelta
from pathlib import Path

import torch
from same_work import lenet
from torch import distributed
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

BATCH, SAMPLES, EVERY, FAILS_AFTER = 30, 256, 5, timedelta(seconds=8)


def main() -> None:
    """Collective: train, from the snapshot if there is one."""
    snapshot, steps = Path(sys.argv[1]), int(sys.argv[2])
    distributed.init_process_group("gloo", timeout=FAILS_AFTER)
    rank, size = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(0)
    inputs, labels = torch.rand(SAMPLES, 1, 28, 28), torch.randint(10, (SAMPLES,))
    model = DistributedDataParallel(lenet(channels=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    first = 1
    if snapshot.exists():
        state = torch.load(snapshot)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"] + 1
    for step in range(first, steps + 1):
        chosen = torch.arange((step - 1) * BATCH, step * BATCH)[rank::size] % SAMPLES
        optimizer.zero_grad()
        cross_entropy(model(inputs[chosen]), labels[chosen]).backward()
        optimizer.step()
        if rank == 0 and step % EVERY == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, snapshot.with_suffix(".part"))
            snapshot.with_suffix(".part").rename(snapshot)
        if rank == 0:
            print(f"step {step}/{steps} by {size} workers", flush=True)
    if rank == 0:
        weights = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
        print(f"weights {hashlib.sha256(weights).hexdigest()}", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
