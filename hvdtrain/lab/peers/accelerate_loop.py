"""Train with Accelerate: `torchrun --nproc-per-node 2 accelerate_loop.py FOLDER`."""

import torch
from accelerate import Accelerator
from same_work import EPOCHS, LR, MOMENTUM, read_work
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


def main() -> None:
    """Collective: train."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    work = read_work()
    loader = DataLoader(work.make_data(), work.batch_size, shuffle=True, num_workers=work.readers)
    model = work.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _epoch in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
    accelerator.end_training()


if __name__ == "__main__":
    main()
