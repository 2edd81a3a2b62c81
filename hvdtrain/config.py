"""What a training run is told, as frozen groups of fields, each checked when it is made.

The fields are the flags of `hvdtrain train` (`--global-batch-size` is `global_batch_size`) and the
keys of its YAML file. Only `hvdtrain.cli` sees them all; the layers below are handed values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.errors import UsageError

DEFAULT_GLOBAL_BATCH_SIZE = 256
DEFAULT_EPOCHS = 10


def flag(default: Any, text: str, choices: tuple[str, ...] = ()) -> Any:
    """A field that is also a command-line flag; `text` is its help."""
    return field(default=default, metadata={"help": text, "choices": choices})


def _require(*checks: tuple[bool, str]) -> None:
    problems = [problem for holds, problem in checks if not holds]
    if problems:
        raise UsageError(*problems)


def _positive(name: str, value: float | None, zero: bool = False) -> tuple[bool, str]:
    """A check that `value` is None, or finite and above zero (or zero, where that is allowed)."""
    text = f"--{name.replace('_', '-')}={value}: must be {'at least' if zero else 'above'} 0"
    if value is None:
        return True, text
    finite = isinstance(value, int) or math.isfinite(value)
    return finite and (value > 0 or (zero and value == 0)), text


def _one_of(config: Any, name: str) -> tuple[bool, str]:
    choices = config.__dataclass_fields__[name].metadata["choices"]
    value = getattr(config, name)
    return value in choices, f"--{name.replace('_', '-')}={value}: choose from {', '.join(choices)}"


def _is_file_name(text: str) -> bool:
    return text not in ("", ".", "..") and "/" not in text and "\0" not in text


@dataclass(frozen=True)
class ModelConfig:
    """Which network, in which floating-point type."""

    model: str = flag("lenet", "lenet, mlp, or package.module:callable(input_shape, classes)")
    dtype: str = flag("float32", "type of parameters and data", ("float32", "float64"))
    device: str = flag("auto", "where to compute: CUDA when there is one", ("auto", "cpu", "cuda"))

    def __post_init__(self) -> None:
        _require(
            (bool(self.model), "--model is empty"),
            *(_one_of(self, name) for name in ("dtype", "device")),
        )


@dataclass(frozen=True)
class DataConfig:
    """Which samples."""

    data: str = flag("digits", "digits, fashion-mnist, or synthetic:SHAPE (synthetic:1x28x28)")
    data_dir: str = flag("data", "folder of data sets that are read from files")


@dataclass(frozen=True)
class BatchConfig:
    """How many samples make one step. At most one of the two is given."""

    global_batch_size: int | None = flag(
        None, f"samples per step over all workers (default: {DEFAULT_GLOBAL_BATCH_SIZE})"
    )
    batch_size: int | None = flag(None, "samples per step and worker, instead")

    def __post_init__(self) -> None:
        _require(
            _positive("global_batch_size", self.global_batch_size),
            _positive("batch_size", self.batch_size),
            (
                self.global_batch_size is None or self.batch_size is None,
                f"--batch-size={self.batch_size} and --global-batch-size="
                f"{self.global_batch_size}: give one of them (the first is per worker)",
            ),
        )

    def resolve(self, workers: int) -> int:
        """The global batch size for this many workers."""
        if self.batch_size is not None:
            return self.batch_size * workers
        return self.global_batch_size or DEFAULT_GLOBAL_BATCH_SIZE


@dataclass(frozen=True)
class OptimizerConfig:
    """How parameters are updated."""

    opt: str = flag("sgd", "any optimizer of torch.optim, by its name in lower case")
    lr: float = flag(0.05, "learning rate, before --scale-lr")
    momentum: float = flag(0.9, "momentum, for optimizers that have one")
    weight_decay: float = flag(0.0, "weight decay")
    scale_lr: str = flag(
        "none",
        "multiply --lr by global batch / --lr-base-batch-size, or its square root",
        ("none", "linear", "sqrt"),
    )
    lr_base_batch_size: int = flag(256, "the global batch size that --lr is meant for")

    def __post_init__(self) -> None:
        _require(
            _positive("lr", self.lr, zero=True),
            _positive("momentum", self.momentum, zero=True),
            _positive("weight_decay", self.weight_decay, zero=True),
            _positive("lr_base_batch_size", self.lr_base_batch_size),
            _one_of(self, "scale_lr"),
        )


@dataclass(frozen=True)
class ScheduleConfig:
    """How long, and how the learning rate moves."""

    epochs: int | None = flag(
        None, f"passes over the data (default: {DEFAULT_EPOCHS}, or as --max-steps says)"
    )
    max_steps: int | None = flag(None, "end after this many steps, if that is earlier")
    sched: str = flag(
        "constant",
        "learning rate over time: constant; cosine to 0; step: a tenth at 1/3, 2/3 and 8/9",
        ("constant", "cosine", "step"),
    )
    warmup_epochs: float = flag(0.0, "raise the learning rate linearly over so many epochs")

    def __post_init__(self) -> None:
        _require(
            _positive("epochs", self.epochs),
            _positive("max_steps", self.max_steps),
            _positive("warmup_epochs", self.warmup_epochs, zero=True),
            _one_of(self, "sched"),
        )

    def total_steps(self, steps_per_epoch: int) -> int:
        """The length of the run in steps."""
        if self.epochs is None and self.max_steps is not None:
            return self.max_steps
        steps = (self.epochs or DEFAULT_EPOCHS) * steps_per_epoch
        return min(steps, self.max_steps) if self.max_steps is not None else steps


@dataclass(frozen=True)
class AuditConfig:
    """How often the exchange is checked against the ring reference."""

    audit_every: int = flag(0, "check the reduced gradients every so many steps (0: never)")

    def __post_init__(self) -> None:
        _require(_positive("audit_every", self.audit_every, zero=True))


@dataclass(frozen=True)
class RunConfig:
    """Where the run is written, and what is reported."""

    output: str = flag("runs", "folder of runs")
    experiment: str | None = flag(None, "name of this run (default: MODEL-DATA)")
    seed: int = flag(0, "seed of initial parameters, sample order and dropout")
    log_interval: int = flag(10, "steps between progress lines")
    eval_interval: int = flag(1, "epochs between evaluations (the end is always evaluated)")

    def __post_init__(self) -> None:
        _require(
            _positive("log_interval", self.log_interval),
            _positive("eval_interval", self.eval_interval),
            (0 <= self.seed < 2**63, f"--seed={self.seed}: must be from 0 to 2^63 - 1"),
            (
                self.experiment is None or _is_file_name(self.experiment),
                f"--experiment={self.experiment!r}: must be one folder name",
            ),
        )


@dataclass(frozen=True)
class TrainConfig:
    """All groups of `hvdtrain train`."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    batch: BatchConfig = BatchConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    audit: AuditConfig = AuditConfig()
    run: RunConfig = RunConfig()

    @property
    def experiment(self) -> str:
        """The name of the run's folder."""
        if self.run.experiment is not None:
            return self.run.experiment
        readable = f"{self.model.model}-{self.data.data}"
        return "".join(char if char.isalnum() or char in "-_." else "_" for char in readable)
