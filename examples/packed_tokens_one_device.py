"""A small GPT-2 of Hugging Face transformers, trained on packed lines of bytes: nothing is padded.

packed_tokens_one_device.py is for one device, packed_tokens.py for any number; see the difference
by: diff examples/packed_tokens_one_device.py examples/packed_tokens.py
Both need `pip install 'hvdtrain[transformers]'`, and download nothing.
"""

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import DataCollatorWithFlattening, GPT2Config, GPT2LMHeadModel

EPOCHS, TOKENS, LINES, END = 2, 500, 125, 0


class TokenBatches:
    """Batches of lines with up to a number of tokens, in a random order."""

    def __init__(self, lengths, tokens):
        self.batches, total = [[]], 0
        for number in torch.randperm(len(lengths)).tolist():
            total += lengths[number]
            if total > tokens:
                self.batches.append([])
                total = lengths[number]
            self.batches[-1].append(number)

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter([self.batches[k] for k in torch.randperm(len(self.batches)).tolist()])


def read(number):
    """Return the bytes of a line, of 6 to 77."""
    words = (f"{number * factor}" for factor in range(1, 2 + number % 19))
    return {"input_ids": [*" ".join(words).encode(), END]}


def mean_loss(model, batch):
    """Return the mean over the tokens of a batch, but for the first of each line."""
    # Without attention_mask and cache, lines attend to themselves alone, by their position_ids.
    scores = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
    return cross_entropy(scores[0, :-1], batch["labels"][0, 1:])


torch.manual_seed(0)
sizes = {"vocab_size": 256, "n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 4}
drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
config = GPT2Config(**sizes, **drop, bos_token_id=END, eos_token_id=END, use_cache=False)
model = GPT2LMHeadModel(config).double()  # so that runs can be compared to 1e-9

lines, collate = [read(number) for number in range(LINES)], DataCollatorWithFlattening()
batches = TokenBatches([len(line["input_ids"]) for line in lines], TOKENS)
loader = DataLoader(lines, batch_sampler=batches, collate_fn=collate)
optimizer = torch.optim.AdamW(model.parameters(), 0.003)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(loader))

for _epoch in range(EPOCHS):
    for batch in loader:
        loss = mean_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

print(f"final loss {mean_loss(model.eval(), collate(lines[:20])):.12f}")
