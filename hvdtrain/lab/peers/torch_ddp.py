"""Train with torch's own means: `torchrun --nproc-per-node 2 torch_ddp.py FOLDER`."""

import torch
from same_work import EPOCHS, LR, MOMENTUM, read_work
from torch import distributed
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    """Collective: train."""
    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    work = read_work()
    data = work.make_data()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, work.batch_size, sampler=sampler, num_workers=work.readers)
    model = DistributedDataParallel(work.make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
