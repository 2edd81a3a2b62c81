"""Loops that end before their last step, one after another.

python ending_loop.py OUTPUT CUT; prints the evaluations that each rank's hook was called with. CUT:
the last step of the loop that is resumed, here or by another start; 0: to its end.
"""

import json
import sys

import torch
from torch.nn.functional import cross_entropy

import hvdtrain

EPOCHS = 9  # of 5 steps
torch.manual_seed(3)
inputs = torch.randn(47, 4)
samples = hvdtrain.TensorSplit(inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0))
CASES = {  # the step, and where the last rank calls loop.stop
    "before the update": (7, "before"),
    "after the update": (7, "after"),
    "in the hook": (12, "hook"),
    "patience": (0, ""),
    "cut": (0, ""),
}


def evaluate(model, batch):
    x, y = batch
    scores = model(x)
    right = (scores.argmax(1) == y).sum()
    return hvdtrain.Sums(cross_entropy(scores, y, reduction="sum"), len(y), {"accuracy": right})


def train(name, **options):
    """Train in the run `name`; return the evaluations."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Dropout(0.2), torch.nn.Linear(4, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    called, (at, position) = [], CASES[name]
    if name in ("patience", "cut"):
        options |= {"patience": 3, "min_delta": 0.02, "best_is_highest": True}

    def stop(number, here):
        if (number, here) == (at, position) and loop.rank == loop.size - 1:
            loop.stop(f"rank {loop.rank}, {here}")

    def on_evaluation(evaluation):
        called.append((evaluation.step, evaluation.epoch, round(evaluation.metrics["accuracy"], 4)))
        stop(evaluation.step, "hook")

    with hvdtrain.Loop(
        *(model, optimizer, samples, samples, evaluate),
        best="accuracy",
        valid_metrics=["accuracy"],
        on_evaluation=on_evaluation,
        output=sys.argv[1],
        experiment=name,
        global_batch_size=10,
        epochs=EPOCHS,
        virtual_workers=3,
        eval_every=4,
        log_interval=3,
        **options,
    ) as loop:
        for step in loop:
            stop(step.number, "before")
            for x, y in step.batches():
                step.backward(mean=cross_entropy(model(x), y), count=len(y))
            step.update()
            stop(step.number, "after")
    print(json.dumps({"rank": loop.rank, "name": name, "called": called}), flush=True)


cut = {"max_steps": int(sys.argv[2])} if sys.argv[2] != "0" else {}
for case in CASES:
    train(case, **(cut | {"resume": "auto"} if case == "cut" else {}))
