"""Scripts with other libraries' trainers, one after another in each worker, and what goes wrong.

hvdtrain launch -np 3 --watchdog-timeout-s 12 -- python -m tests.parallel.scripts.trainers FOLDER

Importing these libraries takes most of the time, so one start serves all. FOLDER gets the weights
that each rank has learned, and the messages on wrong gradients. In the end rank 1 is stuck.
"""

from __future__ import annotations

import itertools
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.utils.checkpoint import checkpoint

from hvdtrain.data.builtin import import_torchvision
from hvdtrain.pulse import Pulse

pulse = Pulse.from_environment()  # reports, so that a short limit is for the last training alone
import_torchvision()  # transformers imports it
from lightning import Callback  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook  # noqa: E402
from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from hvdtrain.errors import AuditMismatch, UsageError  # noqa: E402
from hvdtrain.integrations import lightning, transformers  # noqa: E402
from tests.parallel.scripts.lightning_loop import Digits, make_loader, make_trainer  # noqa: E402

SCRIPTS = Path(__file__).parent
EXAMPLE = SCRIPTS.parents[2] / "examples" / "trainer.py"
FOLDER = Path(sys.argv[1])
SLEEP_S = 1000


def run_script(path: Path) -> None:
    """Run it as it is, and keep what this rank has learned."""
    made = runpy.run_path(str(path), run_name="__main__")
    weights = made["weights"] if "weights" in made else made["model"].state_dict()
    weights = {name: value for name, value in weights.items() if "base_layer" not in name}
    copies = {name: value.clone() for name, value in weights.items()}
    save_file(copies, FOLDER / f"{path.stem}.{dist.get_rank()}.safetensors")


class Net(torch.nn.Module):
    """A network for the Trainer, with checkpointing of all its activations."""

    def __init__(self, reentrant: bool, stops_at: int) -> None:
        super().__init__()
        self.layer, self.calls = torch.nn.Linear(4, 3), 0
        self.reentrant, self.stops_at = reentrant, stops_at

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        if self.calls == self.stops_at:
            time.sleep(SLEEP_S)
        scores = checkpoint(self.layer, x.requires_grad_(), use_reentrant=self.reentrant)
        return {"loss": torch.nn.functional.cross_entropy(scores, labels), "logits": scores}


def faulty(step: int) -> Callable[..., Any]:
    """Return a communication hook of DDP that gives rank 1 a wrong element at call `step`."""
    calls = itertools.count(1)

    def hook(state, bucket):  # no annotations: DDP reads them
        wrong = next(calls) == step and dist.get_rank() == 1

        def damage(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            values = future.value()
            values[-1] += 0.001 * wrong
            return values

        return allreduce_hook(None, bucket).then(damage)

    return hook


class Install(TrainerCallback):
    """Gives the DDP of a Trainer of transformers the hook."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook
        self.trainer: Trainer | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        assert self.trainer is not None
        self.trainer.model_wrapped.register_comm_hook(None, self.hook)


class InstallInLightning(Callback):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.model.register_comm_hook(None, faulty(3))


def train(
    steps: int, *callbacks: TrainerCallback, resume: bool = False, stops_at: int | None = None
) -> None:
    """Train by the Trainer, two backward passes a step, with checkpoints of every second step."""
    arguments = TrainingArguments(
        output_dir=str(FOLDER / "trainer"),
        max_steps=steps,
        gradient_accumulation_steps=2,
        ddp_find_unused_parameters=False,  # which DDP cannot do with reentrant checkpointing
        per_device_train_batch_size=4,
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    data = [{"x": torch.randn(4), "labels": torch.tensor(n % 3)} for n in range(96)]
    trainer = Trainer(
        Net(stops_at is None, stops_at or 0),
        arguments,
        train_dataset=data,
        eval_dataset=data[:12],
    )
    for callback in callbacks:
        if isinstance(callback, Install):
            callback.trainer = trainer
        trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=resume)


def note_mismatch(name: str, action: Any) -> None:
    try:
        action()
    except AuditMismatch as error:
        (FOLDER / f"{name}.{dist.get_rank()}.txt").write_text(str(error))


def main() -> None:
    for path in (EXAMPLE, SCRIPTS / "accelerate_loop.py", SCRIPTS / "lightning_loop.py"):
        run_script(path)
        pulse.beat("prepare")
    audit = transformers.AuditCallback(every=2, evidence=FOLDER / "evidence")
    train(2, audit)
    note_mismatch("trainer", lambda: train(6, Install(faulty(2)), audit, resume=True))
    callback = lightning.AuditCallback(evidence=None, every=1)
    by_lightning = make_trainer(callbacks=[InstallInLightning(), callback])
    note_mismatch("lightning", lambda: by_lightning.fit(Digits(), make_float_loader()))
    manual = Digits()
    manual.automatic_optimization = False
    try:
        make_trainer(callbacks=[callback]).fit(manual, make_loader())
    except UsageError as error:
        print(error)
    pulse.beat("prepare")
    train(6, transformers.AuditCallback(), stops_at=3 if dist.get_rank() == 1 else 0)


def make_float_loader() -> torch.utils.data.DataLoader:
    x, y = make_loader().dataset.tensors
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x.float(), y), 20)


if __name__ == "__main__":
    main()
