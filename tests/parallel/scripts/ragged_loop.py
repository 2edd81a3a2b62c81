"""A loop over batches of up to a number of letters, of which its loss is a mean, in micro-batches.

A small GRU learns sums such as 12+30=42 letter by letter; its parameters are in two groups. With
FAILS_ON=1 that rank, of an mpirun, fails before the loop.
"""

import os

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

import hvdtrain

EPOCHS, MOST_LETTERS, IGNORED = 3, 480, -100
LETTERS = "0123456789+=."


def read(number):
    """Return the letters of a sum: of 7 to 10, so that batches are ragged."""
    one, other = divmod(number * 37, 101)
    text = f"{one}+{other}={one + other}."
    return torch.tensor([LETTERS.index(letter) for letter in text])


def collate(texts):
    """Return letters, and the letter that follows each of them."""
    letters = pad_sequence([text[:-1] for text in texts], batch_first=True)
    return letters, pad_sequence([text[1:] for text in texts], True, IGNORED)


class Reader(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(len(LETTERS), 16)
        self.gru = torch.nn.GRU(16, 32, batch_first=True)
        self.output = torch.nn.Linear(32, len(LETTERS))

    def forward(self, letters):
        return self.output(self.gru(self.embedding(letters))[0]).transpose(1, 2)


def evaluate(model, batch):
    """Return for each text its loss, its number of letters and whether it begins with 3 digits."""
    x, y = batch
    losses = cross_entropy(model(x), y, ignore_index=IGNORED, reduction="none").sum(1)
    letters, is_long = (y != IGNORED).sum(1), y[:, 2] == LETTERS.index("+")
    outputs = {"losses": losses, "letters": letters, "long": is_long}
    return hvdtrain.Sums(losses.sum(), int(letters.sum()), {}, outputs)


def finalize(outputs):
    """Return the AUC of the losses, and whether texts are in the order of their numbers."""
    long, losses = outputs["long"], outputs["losses"]
    pairs = losses[long][:, None] > losses[~long]
    in_order = outputs["letters"].tolist() == [len(text) - 1 for text in valid]
    return {"auc": pairs.double().mean(), "in_order": in_order}


if os.environ.get("OMPI_COMM_WORLD_RANK") == os.environ.get("FAILS_ON", "none"):
    raise OSError("a file is not there")
torch.manual_seed(0)
sums = [read(number) for number in range(260)]
batches = hvdtrain.TokenBatches(map(len, sums), MOST_LETTERS)
loader = torch.utils.data.DataLoader(sums, batch_sampler=batches, collate_fn=collate)
valid = [read(number) for number in range(260, 291)]
model = Reader().double()
weights = [p for p in model.parameters() if p.ndim > 1]
others = [p for p in model.parameters() if p.ndim == 1]
groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, EPOCHS * len(loader))

with hvdtrain.Loop(
    model,
    optimizer,
    loader,
    torch.utils.data.DataLoader(valid, 4, collate_fn=collate),
    evaluate,
    finalize=finalize,
    valid_metrics=["auc", "in_order"],
    state=[schedule],
    grad_accum_steps=2,
    epochs=EPOCHS,
    clip_grad=1.0,
) as loop:
    for step in loop:
        for x, y in step.batches():
            loss = cross_entropy(model(x), y, ignore_index=IGNORED)
            step.backward(mean=loss, count=(y != IGNORED).sum())
        step.update()
        schedule.step()

letters, following = collate(sums)
print(f"final loss {cross_entropy(model(letters), following, ignore_index=IGNORED):.12f}")
