"""Configuration of a training run, as frozen dataclasses that validate themselves.

The fields are the flags of `hvdtrain train` (`--global-batch-size` is `global_batch_size`) and the
keys of its YAML file. Only `cli` and `run` see all of them; lower floors receive values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hvdtrain.config.fields import AUTO
from hvdtrain.config.groups import (
    DEFAULT_EPOCHS,
    DEFAULT_GLOBAL_BATCH_SIZE,
    BatchConfig,
    CheckConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    RunConfig,
    ScheduleConfig,
)
from hvdtrain.errors import UsageError

__all__ = [
    "DEFAULT_EPOCHS",
    "DEFAULT_GLOBAL_BATCH_SIZE",
    "BatchConfig",
    "CheckConfig",
    "DataConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PrecisionConfig",
    "RunConfig",
    "ScheduleConfig",
    "TrainConfig",
]


@dataclass(frozen=True)
class TrainConfig:
    """The complete configuration of `hvdtrain train`, by groups."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    check: CheckConfig = field(default_factory=CheckConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        if problems := self.problems():
            raise UsageError(*problems)

    def problems(self) -> list[str]:
        """Return a message for each pair of groups that contradict each other."""
        smoothing = self.model.label_smoothing
        labelled = [f"--label-smoothing={smoothing}"] if smoothing else []
        problems = [
            f"{flag}: is for classification, and --task={self.model.task} has a loss of its own: "
            "leave one of them out"
            for flag in (*labelled, *self.data.mixes)
            if self.model.task
        ]
        if self.batch.rank_weights == AUTO and self.data.data_placement != "shared":
            problems.append(
                f"--rank-weights={AUTO} and --data-placement={self.data.data_placement}: a sample "
                "goes to a rank of its host, however fast: give weights, or leave one of them out"
            )
        if self.model.compile and self.precision.sync_bn:
            problems.append(
                "--compile and --sync-bn: layers that exchange sums within a pass cannot be "
                "compiled: leave one of them out"
            )
        if self.check.audit_compute and self.precision.sync_bn:
            problems.append(
                f"--audit-compute={self.check.audit_compute} and --sync-bn: a rank alone cannot "
                "compute what layers normalise over all ranks: leave one of them out"
            )
        virtual_flag = f"--virtual-workers={self.batch.virtual_workers}"
        refused = {
            "--sync-bn": (
                self.precision.sync_bn,
                "normalises over workers; virtual ones share none",
            ),
            f"--compression={self.precision.compression}": (
                self.precision.compression != "none",
                "virtual workers exchange integers, which are not compressed",
            ),
        }
        if self.batch.virtual_workers is None:
            return problems
        return problems + [
            f"{virtual_flag} and {flag}: {reason}: leave one of them out"
            for flag, (is_given, reason) in refused.items()
            if is_given
        ]

    @property
    def promises_bits(self) -> bool:
        """Return whether a step has the same bits when it is computed again, here or elsewhere."""
        check, precision = self.check, self.precision
        others = self.batch.virtual_workers or check.trace_every or check.audit_compute
        return bool(precision.deterministic or others)

    @property
    def experiment(self) -> str:
        """Return the name of the run's folder."""
        if self.run.experiment is not None:
            return self.run.experiment
        readable = self.model.task or f"{self.model.model}-{self.data.data}"
        return "".join(char if char.isalnum() or char in "-_." else "_" for char in readable)

    @property
    def folder(self) -> Path:
        """Return the path of the run's folder."""
        return Path(self.run.output) / self.experiment
