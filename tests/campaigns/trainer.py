"""Training of the model of examples/gpt2.py by the Trainer of transformers on 1, 2 and 3 workers.

python -m tests.campaigns.trainer: the largest difference of a weight between 1 worker and more, in
parts of its tensor's largest, in float64 and without dropout. Global batches have 12 lines; of 125
lines, the last batch of an epoch has 5. The last row is the example itself, with hvdtrain.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from hvdtrain.data.builtin import import_torchvision
from tests.parallel.experiments import Weights, largest_difference, summary_and_weights
from tests.parallel.test_own_loop import train

ROOT = Path(__file__).parents[2]
GLOBAL_BATCH = 12
SETTINGS = {
    "120 lines, average of means": (120, False, False),
    "120 lines, mean over the tokens": (120, True, False),
    "120 lines, mean over the tokens, loss in float64": (120, True, True),
    "125 lines, mean over the tokens": (125, True, False),
}


def main() -> None:
    """Print a line for each setting."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for size in (1, 2, 3):
            processes = f"--nproc_per_node={size}"
            own = [str(Path(__file__)), "--worker", str(folder / str(size))]
            environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            start = [sys.executable, "-m", "torch.distributed.run", processes, *own]
            subprocess.run(start, check=True, env=environment)
        for setting in SETTINGS:
            weights = [_read(folder / n, setting) for n in "123"]
            _print(f"Trainer, {setting}", weights)
        for size, controller in ((1, "none"), (2, "mpi"), (3, "gloo")):
            train("gpt2.py", folder / f"own-{size}", size, controller)
        _print("hvdtrain", [summary_and_weights(folder / f"own-{n}")[1] for n in "123"])


def _print(what: str, weights: list[Weights]) -> None:
    two, three = (largest_difference(found, weights[0]) for found in weights[1:])
    print(f"{what}: {two:.1e} at N = 2, {three:.1e} at N = 3", flush=True)


def _read(folder: Path, setting: str) -> Weights:
    return torch.load(folder / f"{setting}.pt", weights_only=True)


def work(folder: Path) -> None:
    """Train in this process, one of several, with each setting."""
    import_torchvision()  # transformers imports it
    sys.path.insert(0, str(ROOT / "examples"))
    import gpt2
    from transformers import Trainer, TrainingArguments

    size = int(os.environ["WORLD_SIZE"])

    def collate(lines: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        names = ("input_ids", "attention_mask", "labels")
        return dict(zip(names, gpt2.collate(lines), strict=True))

    def loss_in_float64(found: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
        scores, following = found.logits[:, :-1].transpose(1, 2), labels[:, 1:]
        loss = cross_entropy(scores, following, reduction="sum", ignore_index=gpt2.IGNORED)
        return loss / num_items_in_batch

    for setting, (lines, averages_tokens, in_float64) in SETTINGS.items():
        given = argparse.Namespace(dropout=0.0, float32=False, lr=0.003)
        arguments = TrainingArguments(
            output_dir=str(folder),
            num_train_epochs=3,
            learning_rate=given.lr,
            lr_scheduler_type="cosine",
            per_device_train_batch_size=GLOBAL_BATCH // size,
            average_tokens_across_devices=averages_tokens,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            logging_strategy="no",
            remove_unused_columns=False,
        )
        data = [gpt2.read(number) for number in range(lines)]
        own_loss = loss_in_float64 if in_float64 else None
        model = gpt2.make_model(given)
        trainer = Trainer(model, arguments, collate, data, compute_loss_func=own_loss)
        trainer.train()
        if trainer.is_world_process_zero():
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(trainer.model.state_dict(), folder / f"{setting}.pt")
    if size > 1:
        torch.distributed.barrier()
    os._exit(0)  # threads of the process group can abort or block an ordinary end


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)  # its folder
    own_folder = parser.parse_args().worker
    if own_folder:
        work(own_folder)
    else:
        main()
