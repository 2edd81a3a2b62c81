"""Seconds of a step of hvdtrain and of a plain loop of torch; waits for the GPU; cost of an audit.

python -m tests.device.on_a_gpu.speed waits|steps|audits DEVICE
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import hvdtrain
from hvdtrain.audit.script import GradientAudit
from hvdtrain.ring.transports import in_process_ring

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Timing:
    """How many steps warm up, how many are timed together, and how often."""

    warm: int
    timed: int
    rounds: int

    @property
    def steps(self) -> int:
        return self.warm + self.timed * self.rounds


ON_GPU, ON_CPU = Timing(8, 16, 3), Timing(1, 2, 1)


@dataclass(frozen=True)
class Case:
    """A model with one batch, which every step computes on again."""

    name: str
    model: Callable[[], nn.Module]
    batch: Batch

    def loss(self, scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(scores.flatten(0, -2), y.flatten(), reduction="sum")

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)


class Gpt(nn.Module):
    """A small GPT of torch's own encoder layers, with learned positions and a causal mask."""

    def __init__(self, words: int, width: int, depth: int, length: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, words)
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.words(x) + self.places.weight
        scores: torch.Tensor = self.head(self.blocks(hidden, mask=self.mask, is_causal=True))
        return scores


def cases(on_gpu: bool) -> list[Case]:
    """Return the models that are timed; on a CPU one small one, to try this script."""
    import torchvision

    def images(name: str, count: int) -> Case:
        batch = torch.randn(count, 3, 224, 224), torch.randint(1000, (count,))
        return Case(f"{name}, {count} images", getattr(torchvision.models, name), batch)

    def text(count: int, *shape: int) -> Case:
        words, _, _, length = shape
        x = torch.randint(words, (count, length + 1))
        batch = x[:, :-1].contiguous(), x[:, 1:].contiguous()
        return Case(f"GPT, {count} x {length} tokens", lambda: Gpt(*shape), batch)

    if not on_gpu:
        return [text(4, 512, 64, 2, 16)]
    gpt = (8192, 768, 12, 512)
    return [images("resnet18", 64), images("resnet50", 128), text(8, *gpt), text(32, *gpt)]


class Fixed:
    """A split that gives the same batch at every step, wherever it lies."""

    def __init__(self, batch: Batch, samples: int) -> None:
        self._batch, self._samples = batch, samples

    def __len__(self) -> int:
        return self._samples

    def batch(self, indices: Any, epoch: int = 0) -> Batch:
        x, y = self._batch
        return x[: len(indices)], y[: len(indices)]


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def plain_s(case: Case, device: torch.device, timing: Timing, parts: int | None = None) -> float:
    """Return the seconds of a step of a plain loop; `parts`: it audits one of so many each step."""
    torch.manual_seed(0)
    model = case.model().to(device)
    optimizer = case.optimizer(model)
    audit = None
    if parts:
        (ring,) = in_process_ring(1)
        audit = GradientAudit(model, every=1, parts=parts, transport=ring, op="sum", evidence=None)
    x, y = (it.to(device) for it in case.batch)

    def step() -> None:
        optimizer.zero_grad()
        (case.loss(model(x), y) / y.numel()).backward()
        if audit:
            audit.check()
        optimizer.step()

    for _ in range(timing.warm):
        step()
    means = []
    for _ in range(timing.rounds):
        synchronize(device)
        began = time.perf_counter()
        for _ in range(timing.timed):
            step()
        synchronize(device)
        means.append((time.perf_counter() - began) / timing.timed)
    return statistics.median(means)


def ours_s(case: Case, device: torch.device, timing: Timing, **options: Any) -> float:
    """Return the seconds of a step of `hvdtrain.Loop`, with the batch on the device."""
    means: list[float] = []
    began = 0.0
    for number in steps(case, device, timing.steps, **options):
        done = number - timing.warm
        if done >= 0 and done % timing.timed == 0:
            synchronize(device)
            if done:
                means.append((time.perf_counter() - began) / timing.timed)
            began = time.perf_counter()
    return statistics.median(means)


def steps(case: Case, device: torch.device, count: int, **options: Any) -> Any:
    """Train for so many steps; yield the number of each when it is done."""
    torch.manual_seed(0)
    model = case.model()
    optimizer = case.optimizer(model)
    samples = len(case.batch[0])
    split = Fixed((case.batch[0].to(device), case.batch[1].to(device)), samples * count)
    settings: dict[str, Any] = {
        "device": "cpu" if device.type == "cpu" else "cuda",
        "global_batch_size": samples,
        "max_steps": count,
        "log_interval": 10**6,
        "output": tempfile.mkdtemp(),
        "experiment": "speed",
    }
    with hvdtrain.Loop(model, optimizer, split, **settings | options) as loop:
        for step in loop:
            for x, y in step.batches():
                step.backward(case.loss(model(x), y), y.numel())
            step.update()
            yield step.number


def row(**figures: object) -> None:
    print("ROW", json.dumps(figures), flush=True)


def time_steps(device: torch.device, timing: Timing) -> None:
    """Print a row for each case and option: our seconds, those of torch before and after."""
    for case in cases(device.type != "cpu"):
        before = plain_s(case, device, timing)
        own = ours_s(case, device, timing)
        after = plain_s(case, device, timing)
        ratio = round(own / min(before, after), 4)
        row(case=case.name, torch_s=[round(before, 5), round(after, 5)], ours_s=own, ratio=ratio)
    for options in ({"virtual_workers": 4}, {"trace_every": 1}, {"clip_grad": 1.0}):
        case = cases(device.type != "cpu")[0]
        row(case=case.name, **options, ours_s=round(ours_s(case, device, timing, **options), 5))


def time_audits(device: torch.device, _: Timing) -> None:
    """Print what an audit of all, a tenth and a hundredth of the gradients adds to a step."""
    timing = Timing(1, 2, 3)  # of all gradients an audit takes seconds
    for case in cases(device.type != "cpu")[:2]:
        step = plain_s(case, device, timing)
        for parts in (1, 10, 100):
            audited = plain_s(case, device, timing, parts)
            row(case=case.name, parts=parts, step_s=round(step, 5), audited_s=round(audited, 5))


def count_waits(device: torch.device, timing: Timing) -> None:
    """Print the lines of hvdtrain at which the host waits for the GPU, and how often in a step."""
    found: Counter[str] = Counter()

    def note(*arguments: object, **others: object) -> None:
        frames = [it for it in traceback.extract_stack() if "/hvdtrain/" in it.filename]
        last = frames[-1] if frames else None
        place = f"{last.filename.split('/hvdtrain/')[-1]}:{last.lineno}" if last else "elsewhere"
        found[place] += 1

    warnings.showwarning = note  # type: ignore[assignment]
    warnings.simplefilter("always")
    case, first, last = cases(device.type != "cpu")[0], 3, 6
    for name, options in {"plain": {}, "virtual": {"virtual_workers": 4}}.items():
        found.clear()
        for number in steps(case, device, last, **options):
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("warn" if first <= number < last else "default")
        for place, count in found.most_common():
            row(kind=name, waits_a_step=count / (last - first), at=place)


if __name__ == "__main__":
    wanted, where = sys.argv[1], torch.device(sys.argv[2])
    what = {"waits": count_waits, "steps": time_steps, "audits": time_audits}[wanted]
    what(where, ON_CPU if where.type == "cpu" else ON_GPU)
