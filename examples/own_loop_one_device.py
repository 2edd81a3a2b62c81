"""Sums such as 12+30=42, learned letter by letter by a small GRU, in a training loop of one's own.

own_loop_one_device.py is for one device, own_loop.py for any number; see the difference by
diff examples/own_loop_one_device.py examples/own_loop.py
"""

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

EPOCHS, BATCH_SIZE, PARTS, IGNORED = 3, 50, 2, -100
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


torch.manual_seed(0)
sums = [read(number) for number in range(260)]
loader = torch.utils.data.DataLoader(sums, BATCH_SIZE, shuffle=True, collate_fn=collate)
model = Reader().double()
weights = [p for p in model.parameters() if p.ndim > 1]
others = [p for p in model.parameters() if p.ndim == 1]
groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, EPOCHS * len(loader))

for _epoch in range(EPOCHS):
    for letters, following in loader:
        tokens = (following != IGNORED).sum()
        for x, y in zip(letters.chunk(PARTS), following.chunk(PARTS), strict=True):
            loss = cross_entropy(model(x), y, reduction="sum", ignore_index=IGNORED) / tokens
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

letters, following = collate(sums)
print(f"final loss {cross_entropy(model(letters), following, ignore_index=IGNORED):.12f}")
