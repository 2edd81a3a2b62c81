"""The work of the compared systems: one model, one data set, one batch, and the times of steps.

Each script calls `read_work`. It imports torch alone, so that no system's start pays for another's
imports.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import Dataset, TensorDataset

EPOCHS, LR, MOMENTUM = 1, 0.05, 0.9
CHECKED_STEPS = 3  # after which the weights are noted
SIDE, CLASSES = 28, 10  # of images
VOCABULARY, CONTEXT = 256, 64  # of the GPT
SETTINGS = "work.json"
_libraries: list[torch.library.Library] = []  # keeps their definitions alive


class Gpt(nn.Module):
    """A small causal Transformer: the scores of the next token, (samples, VOCABULARY, CONTEXT)."""

    def __init__(self, width: int = 128, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        inputs = self.tokens(tokens) + self.positions.weight
        scores: torch.Tensor = self.head(self.encoder(inputs, mask=self.mask, is_causal=True))
        return scores.transpose(1, 2)


def lenet(channels: int) -> nn.Module:
    """Return a network with the layers and sizes of `--model lenet`."""
    return nn.Sequential(
        *(nn.Conv2d(channels, 20, 3), nn.ReLU(), nn.AvgPool2d(2)),
        *(nn.Conv2d(20, 50, 5), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten()),
        *(nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, CLASSES)),
    )


def mlp(channels: int) -> nn.Module:
    """Return a network with the layers and sizes of `--model mlp`."""
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(channels * SIDE**2, 2048), nn.ReLU()),
        *(nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, CLASSES)),
    )


def resnet18_small(channels: int) -> nn.Module:
    """Return a network with the layers and sizes of `--model resnet18-small`."""
    declare_operators()
    from torchvision.models import resnet18

    model: Any = resnet18(num_classes=CLASSES)
    model.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "lenet": lenet,
    "mlp": mlp,
    "resnet18-small": resnet18_small,
    "gpt": lambda channels: Gpt(),
}


@dataclass(frozen=True)
class PeerWork:
    """The settings of a training, the same for all systems."""

    model: str
    images: str  # a folder with one of each class; empty: the data is in memory
    readers: int  # of images, for each worker
    batch_size: int  # of a worker
    workers: int
    steps: int
    folder: str  # for what the workers note

    @property
    def global_batch_size(self) -> int:
        """Return the samples of a step over all workers."""
        return self.batch_size * self.workers

    @property
    def samples(self) -> int:
        """Return the size of the data set, which all steps take once."""
        return self.global_batch_size * self.steps

    def write(self) -> None:
        """Write the settings to the folder."""
        Path(self.folder, SETTINGS).write_text(json.dumps(asdict(self)), "utf-8")

    def make_model(self) -> nn.Module:
        """Return the network, with the same weights in each call."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return MODELS[self.model](3 if self.images else 1)

    def make_data(self) -> Dataset[Any]:
        """Return the samples: pairs of input and label, or of tokens and those that follow."""
        if self.images:
            return _image_folder(self.images)
        random = torch.Generator().manual_seed(0)
        if self.model == "gpt":
            shape = (self.samples, CONTEXT + 1)
            tokens = torch.randint(VOCABULARY, shape, generator=random)
            return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        inputs = torch.rand(self.samples, 1, SIDE, SIDE, generator=random)
        return TensorDataset(inputs, torch.randint(CLASSES, (self.samples,), generator=random))


class Pictures(Dataset[Any]):
    """An ImageFolder that processes can receive before they have imported torchvision."""

    def __init__(self, folder: Any) -> None:
        self._folder = folder

    def __len__(self) -> int:
        return len(self._folder)

    def __getitem__(self, index: int) -> Any:
        return self._folder[index]

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (pickle.dumps(self._folder),)


def _unpickled(content: bytes) -> Pictures:
    declare_operators()
    return Pictures(pickle.loads(content))


def _image_folder(folder: str) -> Dataset[Any]:
    declare_operators()
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    form = [
        *(transforms.Resize(32), transforms.CenterCrop(SIDE), transforms.ToTensor()),
        transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ]
    return Pictures(ImageFolder(folder, transforms.Compose(form)))


def declare_operators() -> None:
    """Declare the operators that torchvision requires to be imported, where its library is for
    another build of torch. Nothing here uses them.
    """
    package = find_spec("torchvision")
    if package is None or package.origin is None or "torchvision" in sys.modules:
        return
    try:
        torch.ops.load_library(str(Path(package.origin).with_name("_C.so")))
    except OSError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float threshold) -> Tensor")
        _libraries.append(library)


def read_work(folder: str | Path | None = None) -> PeerWork:
    """Return the settings in `folder`, by default the script's argument, and note from now on the
    end of each optimizer step of this process.
    """
    path = Path(sys.argv[1] if folder is None else folder, SETTINGS)
    work = PeerWork(**json.loads(path.read_text("utf-8")))
    StepLog(work)
    return work


class StepLog:
    """The ends of a worker's steps, written to a file at the last one."""

    def __init__(self, work: PeerWork) -> None:
        self._work, self._depth = work, 0
        self._at_s: list[float] = []
        self._first = register_module_forward_pre_hook(self._begin_training)

    def _begin_training(self, module: Any, args: Any) -> None:
        """Note steps from the first forward pass on: Horovod makes one to create the optimizer's
        state.
        """
        self._first.remove()
        register_optimizer_step_pre_hook(self._begin)
        register_optimizer_step_post_hook(self._end)

    def _begin(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._depth += 1

    def _end(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        if self._depth:
            return  # a distributed optimizer makes the step of a plain one within its own
        self._at_s.append(time.time())
        path = Path(self._work.folder, f"worker-{os.getpid()}")
        if len(self._at_s) == CHECKED_STEPS:
            with path.with_suffix(".weights").open("wb") as file:
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.detach().numpy().tofile(file)  # without a copy in memory
        if len(self._at_s) == self._work.steps:
            noted = {"at_s": self._at_s, "peak_bytes": _peak_memory()}
            path.with_suffix(".part").write_text(json.dumps(noted), "utf-8")
            path.with_suffix(".part").rename(path.with_suffix(".json"))


def _peak_memory() -> int:
    """Return the peak memory of this process in bytes; that of getrusage is its parent's too."""
    status = Path("/proc/self/status").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM:"))
