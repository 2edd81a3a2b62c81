"""Train with Lightning Fabric: `fabric run --strategy=ddp --devices=2 fabric_loop.py FOLDER`."""

import torch
from lightning.fabric import Fabric
from same_work import EPOCHS, LR, MOMENTUM, read_work
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


def main() -> None:
    """Collective: train."""
    fabric = Fabric()
    fabric.launch()
    torch.manual_seed(0)
    work = read_work()
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
