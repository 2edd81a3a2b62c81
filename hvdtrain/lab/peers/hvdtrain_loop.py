"""Train with hvdtrain.Loop: `hvdtrain launch -np 2 -- python hvdtrain_loop.py FOLDER`."""

import torch
from same_work import EPOCHS, LR, MOMENTUM, read_work
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import hvdtrain


def main() -> None:
    """Collective: train."""
    torch.manual_seed(0)
    work = read_work()
    loader = DataLoader(
        work.make_data(), work.global_batch_size, shuffle=True, num_workers=work.readers
    )
    model = work.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    with hvdtrain.Loop(model, optimizer, loader, epochs=EPOCHS, output=work.folder) as loop:
        for step in loop:
            for x, y in step.batches():
                step.backward(mean=cross_entropy(model(x), y), count=len(y))
            step.update()


if __name__ == "__main__":
    main()
