"""Groups of the fields of a training run's configuration, each checked on construction."""

from dataclasses import dataclass

from hvdtrain.config.fields import (
    AUTO,
    BELOW_1,
    BETAS,
    FOLDER_NAME,
    NOT_EMPTY,
    NOT_NEGATIVE,
    OUTPUT,
    POSITIVE,
    SIZE,
    SOME_TRACKERS,
    Check,
    FlagGroup,
    are_weights,
    flag,
    free_flag,
    numbers_of,
    step_range,
)
from hvdtrain.errors import UsageError, every_problem

DEFAULT_GLOBAL_BATCH_SIZE = 256
DEFAULT_EPOCHS = 10


@dataclass(frozen=True)
class ModelConfig(FlagGroup):
    """The task, the network, its initial weights, floating-point type and device."""

    task: str | None = flag(
        None, "train this hvdtrain.Task, package.module:Class, instead of classification", NOT_EMPTY
    )
    model: str = flag(
        "lenet",
        "train lenet, mlp, resnet18-small, any classification network of torchvision, or "
        "package.module:callable(input_shape, classes)",
        NOT_EMPTY,
    )
    num_classes: int | None = flag(
        None, "set the number of outputs, if above the data's classes", POSITIVE
    )
    pretrained: str | None = free_flag(
        None,
        "start from the weights in this file, checkpoint or run folder",
        Check(bool, " is empty: give a file or a folder"),
    )
    label_smoothing: float = flag(
        0.0, "spread this part of each label over all classes, in the loss of training", BELOW_1
    )
    dtype: str = flag("float32", "set the type of parameters and data", ("float32", "float64"))
    device: str = free_flag(
        "auto", "compute on this device; auto: CUDA if available", ("auto", "cpu", "cuda")
    )
    channels_last: bool = flag(False, "keep images and kernels in memory with the channels last")
    compile: bool = flag(False, "compile the network by torch.compile, which takes a compiler")
    grad_checkpointing: bool = free_flag(
        False, "compute activations again in the backward pass, which takes time and saves memory"
    )


@dataclass(frozen=True)
class BatchConfig(FlagGroup):
    """The samples of a step. At most one of the two batch sizes may be given."""

    global_batch_size: int | None = flag(
        None,
        f"take this many samples per step in all (default: {DEFAULT_GLOBAL_BATCH_SIZE})",
        POSITIVE,
    )
    batch_size: int | None = free_flag(None, "take this many samples per step and worker", POSITIVE)
    grad_accum_steps: int = flag(
        1, "split each step into this many forward and backward passes", POSITIVE
    )
    micro_batch: str | None = free_flag(
        None,
        "auto: at the start, raise --grad-accum-steps until a pass fits in the memory of each GPU",
        Check(AUTO.__eq__, "={}: must be auto; --grad-accum-steps chooses a number of passes"),
    )
    virtual_workers: int | None = flag(
        None,
        "divide each batch among this many virtual workers, so that any number of workers, at most "
        "this many, ends with the same bits",
        POSITIVE,
    )
    eval_batch_size: int | None = free_flag(
        None,
        "evaluate this many samples at a time on each worker (default: as many as all workers take "
        "in one pass, at most 512)",
        POSITIVE,
    )
    rank_weights: str | None = free_flag(
        None,
        "share out batches, or virtual workers, by a weight per worker, such as 1,1,2 (default: "
        "1); auto: by the speed of each, measured at the start, and again and again with "
        "--virtual-workers",
        Check(are_weights, "={}: must be auto, or comma-separated numbers from 0, not all 0"),
    )

    def problems(self) -> list[str]:
        problems, sizes = super().problems(), (self.batch_size, self.global_batch_size)
        if None not in sizes:
            flags = "--batch-size={} and --global-batch-size={}".format(*sizes)
            problems.append(f"{flags}: give one of them (the first is per worker)")
        if self.micro_batch == AUTO == self.rank_weights:
            problems.append(
                f"--micro-batch={AUTO} and --rank-weights={AUTO}: each is measured with the result "
                "of the other: give weights, or --grad-accum-steps"
            )
        return problems

    def resolve(self, workers: int) -> int:
        """Return the global batch size for this many workers; virtual ones replace them."""
        if self.batch_size is not None:
            return self.batch_size * (self.virtual_workers or workers)
        return self.global_batch_size or DEFAULT_GLOBAL_BATCH_SIZE

    def weights(self, workers: int) -> tuple[float, ...]:
        """Return a weight for each worker. Raises UsageError for another number of weights."""
        if self.rank_weights in (None, AUTO):
            return (1.0,) * workers
        weights = tuple(numbers_of(str(self.rank_weights)))
        if len(weights) != workers:
            raise UsageError(
                f"--rank-weights={self.rank_weights}: {len(weights)} weights for {workers} workers"
            )
        return weights


@dataclass(frozen=True)
class OptimizerConfig(FlagGroup):
    """The optimizer, its learning rate, and what is done to gradients and weights."""

    opt: str = flag("sgd", "update with this optimizer of torch.optim, named in lower case")
    lr: float = flag(0.05, "set the learning rate, before --scale-lr", NOT_NEGATIVE)
    momentum: float = flag(0.9, "set the momentum, for optimizers that have one", NOT_NEGATIVE)
    nesterov: bool = flag(False, "look ahead by Nesterov's momentum, in optimizers that have it")
    opt_betas: str | None = flag(
        None, "set the decay rates of the optimizer's averages, such as 0.9,0.95", BETAS
    )
    opt_eps: float | None = flag(
        None, "set the term that keeps the optimizer from dividing by 0", NOT_NEGATIVE
    )
    weight_decay: float = flag(0.0, "set the weight decay", NOT_NEGATIVE)
    decay_norm_bias: bool = flag(
        True, "apply the weight decay to norms and biases too, not to matrices and kernels alone"
    )
    scale_lr: str = flag(
        "none",
        "multiply --lr by global batch / --lr-base-batch-size, or its square root",
        ("none", "linear", "sqrt"),
    )
    lr_base_batch_size: int = flag(
        256, "state the global batch size that --lr is meant for", POSITIVE
    )
    clip_grad: float | None = flag(
        None, "clip the norm of the reduced gradient to this value", POSITIVE
    )
    model_ema: bool = flag(False, "evaluate and save a moving average of the weights")
    model_ema_decay: float = flag(
        0.9998, "keep this fraction of the moving average at each step", BELOW_1
    )

    @property
    def betas(self) -> tuple[float, ...] | None:
        """Return the numbers of --opt-betas."""
        return tuple(numbers_of(self.opt_betas)) if self.opt_betas else None

    @property
    def ema_decay(self) -> float | None:
        """Return the decay of the moving average of the weights, if there is one."""
        return self.model_ema_decay if self.model_ema else None


@dataclass(frozen=True)
class ScheduleConfig(FlagGroup):
    """The length of the run, and the learning rate over time."""

    epochs: int | None = free_flag(
        None,
        f"make this many passes over the data (default: {DEFAULT_EPOCHS}, or up to --max-steps)",
        POSITIVE,
    )
    max_steps: int | None = free_flag(None, "end after this many steps, if earlier", POSITIVE)
    patience: int | None = flag(
        None,
        "end after this many evaluations that do not improve the figure of the best checkpoint",
        POSITIVE,
    )
    min_delta: float = flag(
        0.0, "count as improvement, for --patience, only a change above this", NOT_NEGATIVE
    )
    sched: str = flag(
        "constant",
        "schedule the learning rate: constant; cosine to 0; step: a tenth at 1/3, 2/3 and 8/9",
        ("constant", "cosine", "step"),  # those of hvdtrain.train.schedules
    )
    warmup_epochs: float = flag(
        0.0, "raise the learning rate linearly over this many epochs", NOT_NEGATIVE
    )
    min_lr: float = flag(
        0.0, "let a schedule fall to this learning rate, after the warm-up", NOT_NEGATIVE
    )

    def total_steps(self, steps_per_epoch: int) -> int:
        """Return the length of the run in steps."""
        if self.epochs is None and self.max_steps is not None:
            return self.max_steps
        steps = (self.epochs or DEFAULT_EPOCHS) * steps_per_epoch
        return min(steps, self.max_steps) if self.max_steps is not None else steps

    def problems_without_epochs(self) -> list[str]:
        """Return what is wrong with this schedule for samples whose number is not known."""
        text = "the samples to train on have no length, and so no epochs"
        return every_problem(
            (self.max_steps is None, f"{text}: give --max-steps"),
            (self.epochs, f"--epochs={self.epochs}: {text}: leave it out"),
            (self.warmup_epochs, f"--warmup-epochs={self.warmup_epochs}: {text}: leave it out"),
        )


@dataclass(frozen=True)
class PrecisionConfig(FlagGroup):
    """Number formats of computation and exchange, batch norm, and determinism."""

    amp: str = flag(
        "none", "autocast to this type, with loss scaling for fp16", ("none", "bf16", "fp16")
    )
    compression: str = flag("none", "exchange gradients in this type", ("none", "fp16"))
    bucket_bytes: str = free_flag(
        AUTO,
        "exchange gradients below this size together, up to this size (0: each alone; auto: 1 MiB, "
        "and more from 17 workers or hosts on)",
        SIZE,
    )
    sync_bn: bool = flag(False, "normalise batches over the samples of all workers")
    deterministic: bool = flag(
        False, "use only algorithms and an exchange that repeat bit for bit, else fail"
    )


@dataclass(frozen=True)
class CheckConfig(FlagGroup):
    """Checks of gradients and parameters during the run."""

    audit_every: int = free_flag(
        0, "audit reduced gradients against the ring every so many steps (0: never)", NOT_NEGATIVE
    )
    audit: str = free_flag(
        "bound",
        "accept audits within the rounding bound, or only equal bits (needs a known order of sums)",
        ("bound", "exact"),
    )
    audit_parts: int = free_flag(
        1, "audit one of this many parts of the gradients at a time, in turn", POSITIVE
    )
    audit_compute: int = free_flag(
        0,
        "compute one worker's gradients again on another worker every so many steps (0: never)",
        NOT_NEGATIVE,
    )
    trace_every: int = free_flag(
        0,
        "record digests of every K-th step, which hvdtrain replay computes again (0: never)",
        NOT_NEGATIVE,
    )
    hash_every: int = free_flag(
        1000, "compare all ranks' parameters every so many steps (0: only at saves)", NOT_NEGATIVE
    )


@dataclass(frozen=True)
class RunConfig(FlagGroup):
    """The folder of the run, its seed, reports and checkpoints."""

    output: str = free_flag(
        "runs",
        "write runs below this folder, or copy them to s3://BUCKET/PATH, gs://... or az://...",
        OUTPUT,
    )
    experiment: str | None = free_flag(
        None, "name this run (default: MODEL-DATA, or TASK)", FOLDER_NAME
    )
    seed: int = flag(
        0,
        "seed initial parameters, sample order and dropout",
        Check(lambda seed: 0 <= seed < 2**63, "={}: must be from 0 to 2^63 - 1"),
    )
    log_interval: int = free_flag(10, "print progress every so many steps", POSITIVE)
    eval_interval: int = free_flag(1, "evaluate every so many epochs, and at the end", POSITIVE)
    eval_every: int = free_flag(
        0, "evaluate after every so many steps as well (0: never within an epoch)", NOT_NEGATIVE
    )
    checkpoint_interval: int = free_flag(
        0, "save every so many steps, besides at each evaluation (0: only then)", NOT_NEGATIVE
    )
    memory_interval: int = free_flag(
        0,
        "save every so many steps in memory, on two hosts, for restarts by launch (0: never)",
        NOT_NEGATIVE,
    )
    keep_checkpoints: int = free_flag(3, "keep this many checkpoints, besides the best", POSITIVE)
    profile: str | None = free_flag(
        None,
        "profile these steps, such as 20-22, into the run's profile/",
        Check(step_range, "={}: give the first and the last step, such as 20-22"),
    )
    log_to: str | None = free_flag(
        None, "record the run in mlflow, wandb or mlflow,wandb as well", SOME_TRACKERS
    )
    single_worker: bool = free_flag(
        False, "train with one worker in a job of Slurm, torchrun or MPI that has several tasks"
    )
    resume: str | None = free_flag(
        None,
        "auto: continue the run of --output and --experiment from its newest good checkpoint, or "
        "start it; a checkpoint's folder: continue from there",
        Check(bool, " is empty: give auto, or a checkpoint's path"),
    )
