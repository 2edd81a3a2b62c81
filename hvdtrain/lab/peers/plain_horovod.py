"""Train with Horovod, as its examples do: `horovodrun -np 2 python plain_horovod.py FOLDER`."""

import horovod.torch as hvd
import torch
from same_work import EPOCHS, LR, MOMENTUM, read_work
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    """Collective: train."""
    hvd.init()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    work = read_work()
    data = work.make_data()
    sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(data, work.batch_size, sampler=sampler, num_workers=work.readers)
    model = work.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    model.train()
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
