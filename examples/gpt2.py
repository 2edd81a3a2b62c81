"""A small GPT-2 of Hugging Face transformers, trained on ragged lines of bytes.

python examples/gpt2.py                                   # one device
hvdtrain launch -np 3 -- python examples/gpt2.py          # the same model to 1e-9
HVDTRAIN_OPTIONS='{"virtual_workers": 6}' python examples/gpt2.py --dropout 0.1 --float32
                                                          # the same bits on 1 to 6 workers
It needs `pip install 'hvdtrain[transformers]'`, and downloads nothing.
"""

import argparse

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import GPT2Config, GPT2LMHeadModel

import hvdtrain

EPOCHS, BATCH_SIZE, LINES, IGNORED, END = 3, 12, 125, -100, 0


def read(number):
    """Return the bytes of a line: of 6 to 77, so that batches are ragged."""
    words = (f"{number * factor}" for factor in range(1, 2 + number % 19))
    return torch.tensor([*" ".join(words).encode(), END])


def collate(lines):
    """Return padded bytes, which of them are real, and labels: IGNORED is not learned."""
    parts = [torch.ones_like(line) for line in lines]
    labels = pad_sequence(lines, True, IGNORED)
    return pad_sequence(lines, True, END), pad_sequence(parts, True, 0), labels


def make_model(arguments):
    """Return a GPT-2 with random weights."""
    torch.manual_seed(0)
    drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), arguments.dropout)
    sizes = {"vocab_size": 256, "n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 4}
    config = GPT2Config(**sizes, **drop, bos_token_id=END, eos_token_id=END)
    return GPT2LMHeadModel(config).to(torch.float32 if arguments.float32 else torch.float64)


def sum_of_losses(model, batch):
    """Return the sum of the losses of the tokens of a batch, and their number."""
    letters, mask, labels = batch
    scores = model(input_ids=letters, attention_mask=mask).logits[:, :-1].transpose(1, 2)
    following = labels[:, 1:]
    loss = cross_entropy(scores, following, reduction="sum", ignore_index=IGNORED)
    return loss, (following != IGNORED).sum()


def evaluate(model, batch):
    loss, tokens = sum_of_losses(model, batch)
    return hvdtrain.Sums(loss, tokens)


def train(model, arguments, **options):
    """Train what is not frozen."""
    lines = [read(number) for number in range(150)]
    loader = torch.utils.data.DataLoader(lines[:LINES], BATCH_SIZE, collate_fn=collate)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, arguments.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(loader))
    options = {"state": [schedule], "epochs": EPOCHS, "clip_grad": 1.0} | options
    valid = torch.utils.data.DataLoader(lines[LINES:], BATCH_SIZE, collate_fn=collate)
    with hvdtrain.Loop(model, optimizer, loader, valid, evaluate, **options) as loop:
        for step in loop:
            for batch in step.batches():
                step.backward(*sum_of_losses(model, batch))
            step.update()
            schedule.step()
    print(f"final loss {loop.evaluation.loss:.12f}" if loop.evaluation else "nothing left to train")


def read_arguments(description=__doc__):
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--float32", action="store_true", help="default: float64")
    parser.add_argument("--lr", type=float, default=0.003)
    return parser.parse_args()


if __name__ == "__main__":
    arguments = read_arguments()
    train(make_model(arguments), arguments)
