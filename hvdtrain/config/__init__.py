"""What a training run is told, as frozen groups of fields, each checked when it is made.

The fields are the flags of `hvdtrain train` (`--global-batch-size` is `global_batch_size`) and the
keys of its YAML file. Only `hvdtrain.cli` sees them all; the layers below are handed values.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hvdtrain.config.fields import (
    are_weights,
    flag,
    is_file_name,
    one_of,
    positive,
    profiled_steps,
    require,
)
from hvdtrain.errors import UsageError

DEFAULT_GLOBAL_BATCH_SIZE = 256
DEFAULT_EPOCHS = 10


@dataclass(frozen=True)
class ModelConfig:
    """Which network, in which floating-point type."""

    task: str | None = flag(
        None, "package.module:Class, derived from hvdtrain.Task, for anything but classification"
    )
    model: str = flag(
        "lenet",
        "lenet, mlp, resnet18-small, any classification network of torchvision, or "
        "package.module:callable(input_shape, classes)",
    )
    num_classes: int | None = flag(None, "outputs of the model, if more than the data's classes")
    pretrained: str | None = flag(
        None, "start from these weights: a file, a checkpoint, or a run's folder", learns=False
    )
    dtype: str = flag("float32", "type of parameters and data", ("float32", "float64"))
    device: str = flag(
        "auto", "where to compute: CUDA when there is one", ("auto", "cpu", "cuda"), False
    )

    def __post_init__(self) -> None:
        require(
            (bool(self.model), "--model is empty"),
            (self.task != "", "--task is empty"),
            positive("num_classes", self.num_classes),
            (self.pretrained != "", "--pretrained is empty: give a file or a folder"),
            *(one_of(self, name) for name in ("dtype", "device")),
        )


@dataclass(frozen=True)
class DataConfig:
    """Which samples, and how they are read."""

    data: str = flag(
        "digits",
        "digits, fashion-mnist, cifar10, imagefolder:DIR (train/CLASS/*.jpg, valid/CLASS/*.jpg), "
        "synthetic:SHAPE (synthetic:1x28x28), or package.module:callable",
    )
    data_dir: str = flag("data", "folder of data sets that are read from files", learns=False)
    data_placement: str = flag(
        "shared",
        "per-host: each host reads its own part ({host} in a path is the number of the host)",
        ("shared", "per-host"),
    )
    valid_split: float | None = flag(
        None, "part of a folder without train/ and valid/ that is for validation"
    )
    image_size: int | None = flag(
        None, "height and width that images of folders get (default: 224, or as the model needs)"
    )
    hflip: float | None = flag(
        None, "probability of mirroring a training image (default: as usual for the data)"
    )
    crop_padding: int | None = flag(
        None, "pixels put around a training image before its own size is cut out at random"
    )
    crop_scale: float | None = flag(
        None, "smallest part of a folder's training image that is cut out at random (default: .08)"
    )
    max_image_pixels: int | None = flag(
        None, "pixels of the largest image that is read (default: 89478485)", learns=False
    )
    workers: int | None = flag(
        None,
        "processes that read ahead for each worker (default: its cores, at most 8; 0: none)",
        learns=False,
        short="-j",
    )
    skip_bad_samples: bool = flag(False, "leave out images that cannot be read, and count them")

    def __post_init__(self) -> None:
        require(
            (bool(self.data), "--data is empty"),
            one_of(self, "data_placement"),
            (
                self.valid_split is None or 0 < self.valid_split < 1,
                f"--valid-split={self.valid_split}: must be above 0 and below 1",
            ),
            positive("image_size", self.image_size),
            (
                self.hflip is None or 0 <= self.hflip <= 1,
                f"--hflip={self.hflip}: must be from 0 to 1",
            ),
            positive("crop_padding", self.crop_padding, zero=True),
            (
                self.crop_scale is None or 0 < self.crop_scale <= 1,
                f"--crop-scale={self.crop_scale}: must be above 0, and at most 1",
            ),
            positive("max_image_pixels", self.max_image_pixels),
            positive("workers", self.workers, zero=True),
        )


@dataclass(frozen=True)
class BatchConfig:
    """How many samples make one step. At most one of the two is given."""

    global_batch_size: int | None = flag(
        None, f"samples per step over all workers (default: {DEFAULT_GLOBAL_BATCH_SIZE})"
    )
    batch_size: int | None = flag(None, "samples per step and worker, instead", learns=False)
    grad_accum_steps: int = flag(1, "cut each step into so many forward and backward passes")
    rank_weights: str | None = flag(
        None, "shares of mixed hardware, a number per worker (default: equal): 1,1,2", learns=False
    )

    def __post_init__(self) -> None:
        require(
            positive("global_batch_size", self.global_batch_size),
            positive("batch_size", self.batch_size),
            (
                self.global_batch_size is None or self.batch_size is None,
                f"--batch-size={self.batch_size} and --global-batch-size="
                f"{self.global_batch_size}: give one of them (the first is per worker)",
            ),
            positive("grad_accum_steps", self.grad_accum_steps),
            (
                self.rank_weights is None or are_weights(self.rank_weights),
                f"--rank-weights={self.rank_weights}: must be numbers of at least 0, not all 0, "
                "with commas between them",
            ),
        )

    def resolve(self, workers: int) -> int:
        """The global batch size for this many workers."""
        if self.batch_size is not None:
            return self.batch_size * workers
        return self.global_batch_size or DEFAULT_GLOBAL_BATCH_SIZE

    def weights(self, workers: int) -> tuple[float, ...]:
        """Each worker's weight. Raises UsageError unless there are as many as workers."""
        if self.rank_weights is None:
            return (1.0,) * workers
        weights = tuple(float(text) for text in self.rank_weights.split(","))
        if len(weights) != workers:
            raise UsageError(
                f"--rank-weights={self.rank_weights}: {len(weights)} weights for {workers} workers"
            )
        return weights


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
    clip_grad: float | None = flag(None, "largest norm of the gradient over all workers")
    model_ema: bool = flag(False, "evaluate and save a moving average of the weights")
    model_ema_decay: float = flag(0.9998, "how much of the moving average stays at each step")

    def __post_init__(self) -> None:
        require(
            positive("lr", self.lr, zero=True),
            positive("momentum", self.momentum, zero=True),
            positive("weight_decay", self.weight_decay, zero=True),
            positive("lr_base_batch_size", self.lr_base_batch_size),
            positive("clip_grad", self.clip_grad),
            (
                0 <= self.model_ema_decay < 1,
                f"--model-ema-decay={self.model_ema_decay}: must be at least 0 and below 1",
            ),
            one_of(self, "scale_lr"),
        )


@dataclass(frozen=True)
class ScheduleConfig:
    """How long, and how the learning rate moves."""

    epochs: int | None = flag(
        None,
        f"passes over the data (default: {DEFAULT_EPOCHS}, or as --max-steps says)",
        learns=False,
    )
    max_steps: int | None = flag(None, "end after this many steps, if earlier", learns=False)
    sched: str = flag(
        "constant",
        "learning rate over time: constant; cosine to 0; step: a tenth at 1/3, 2/3 and 8/9",
        ("constant", "cosine", "step"),
    )
    warmup_epochs: float = flag(0.0, "raise the learning rate linearly over so many epochs")

    def __post_init__(self) -> None:
        require(
            positive("epochs", self.epochs),
            positive("max_steps", self.max_steps),
            positive("warmup_epochs", self.warmup_epochs, zero=True),
            one_of(self, "sched"),
        )

    def total_steps(self, steps_per_epoch: int) -> int:
        """The length of the run in steps."""
        if self.epochs is None and self.max_steps is not None:
            return self.max_steps
        steps = (self.epochs or DEFAULT_EPOCHS) * steps_per_epoch
        return min(steps, self.max_steps) if self.max_steps is not None else steps


@dataclass(frozen=True)
class PrecisionConfig:
    """In which numbers is computed and exchanged, and over which samples is normalised."""

    amp: str = flag("none", "autocast, with loss scaling for fp16", ("none", "bf16", "fp16"))
    compression: str = flag("none", "type in which gradients are exchanged", ("none", "fp16"))
    sync_bn: bool = flag(False, "batch norm over the samples of all workers")
    deterministic: bool = flag(
        False, "only algorithms, and an exchange, that repeat bit for bit; else an error"
    )

    def __post_init__(self) -> None:
        require(*(one_of(self, name) for name in ("amp", "compression")))


@dataclass(frozen=True)
class CheckConfig:
    """How often the run checks itself."""

    audit_every: int = flag(
        0, "check reduced gradients against the ring every so many steps (0: never)", learns=False
    )
    audit: str = flag(
        "bound",
        "within the rounding bound, or equal in every bit (where the order of sums is known)",
        ("bound", "exact"),
        learns=False,
    )
    audit_parts: int = flag(
        1, "check one of so many parts of the gradients at each audit, all in turn", learns=False
    )
    hash_every: int = flag(
        1000, "compare all ranks' parameters every so many steps (0: only at saves)", learns=False
    )

    def __post_init__(self) -> None:
        require(
            positive("audit_every", self.audit_every, zero=True),
            positive("audit_parts", self.audit_parts),
            one_of(self, "audit"),
            positive("hash_every", self.hash_every, zero=True),
        )


@dataclass(frozen=True)
class RunConfig:
    """Where the run is written, and what is reported."""

    output: str = flag("runs", "folder of runs", learns=False)
    experiment: str | None = flag(
        None, "name of this run (default: MODEL-DATA, or TASK)", learns=False
    )
    seed: int = flag(0, "seed of initial parameters, sample order and dropout")
    log_interval: int = flag(10, "steps between progress lines", learns=False)
    eval_interval: int = flag(
        1, "epochs between evaluations (the end is always evaluated)", learns=False
    )
    checkpoint_interval: int = flag(
        0, "steps between checkpoints, besides one at each evaluation", learns=False
    )
    keep_checkpoints: int = flag(3, "how many checkpoints stay, besides the best", learns=False)
    profile: str | None = flag(
        None, "steps to profile, such as 20-22: traces in the run's profile/", learns=False
    )
    resume: str | None = flag(
        None,
        "auto: go on with the run of --output and --experiment from its newest good checkpoint, or "
        "start it; or the folder of one of its checkpoints",
        learns=False,
    )

    def __post_init__(self) -> None:
        require(
            positive("log_interval", self.log_interval),
            positive("eval_interval", self.eval_interval),
            positive("checkpoint_interval", self.checkpoint_interval, zero=True),
            positive("keep_checkpoints", self.keep_checkpoints),
            (
                self.profile is None or profiled_steps(self.profile) is not None,
                f"--profile={self.profile}: give the first and the last step, such as 20-22",
            ),
            (self.resume != "", "--resume is empty: give auto, or a checkpoint's path"),
            (0 <= self.seed < 2**63, f"--seed={self.seed}: must be from 0 to 2^63 - 1"),
            (
                self.experiment is None or is_file_name(self.experiment),
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
    precision: PrecisionConfig = PrecisionConfig()
    check: CheckConfig = CheckConfig()
    run: RunConfig = RunConfig()

    @property
    def experiment(self) -> str:
        """The name of the run's folder."""
        if self.run.experiment is not None:
            return self.run.experiment
        readable = self.model.task or f"{self.model.model}-{self.data.data}"
        return "".join(char if char.isalnum() or char in "-_." else "_" for char in readable)

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.run.output) / self.experiment
