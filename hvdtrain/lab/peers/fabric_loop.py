"""Train with Lightning Fabric: `torchrun --nproc-per-node 2 fabric_loop.py FOLDER`."""

import torch
import torchvision_operators  # noqa: F401
from lightning.fabric import Fabric
from same_work import EPOCHS, LR, MOMENTUM, read_work
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


def main() -> None:
    """Collective: train."""
    work = read_work()
    fabric = Fabric(accelerator="cpu", devices=work.workers, strategy="ddp")
    fabric.launch()
    torch.manual_seed(0)
    loader = DataLoader(work.make_data(), work.batch_size, shuffle=True, num_workers=work.readers)
    loader = fabric.setup_dataloaders(loader)
    model = work.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    model, optimizer = fabric.setup(model, optimizer)
    for _epoch in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            fabric.backward(loss)
            optimizer.step()


if __name__ == "__main__":
    main()
