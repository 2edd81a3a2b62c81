"""Configuration of a training run, as frozen dataclasses that validate themselves.

The fields are the flags of `hvdtrain train` (`--global-batch-size` is `global_batch_size`) and the
keys of its YAML file. Only `cli` and `run` see all of them; lower floors receive values.
"""

from dataclasses import dataclass, field
from pathlib import Path

from hvdtrain.config.data import DataConfig
from hvdtrain.config.fields import AUTO, FlagGroup, folder_of
from hvdtrain.config.groups import (
    DEFAULT_EPOCHS,
    DEFAULT_GLOBAL_BATCH_SIZE,
    BatchConfig,
    CheckConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    RunConfig,
    ScheduleConfig,
)
from hvdtrain.errors import every_problem

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
class TrainConfig(FlagGroup):
    """The complete configuration of `hvdtrain train`, by groups."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    check: CheckConfig = field(default_factory=CheckConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def problems(self) -> list[str]:
        """Return a message for each pair of groups that contradict each other."""
        model, data, batch = self.model, self.data, self.batch
        precision, audited = self.precision, self.check.audit_compute
        smoothing = [f"--label-smoothing={model.label_smoothing}"] if model.label_smoothing else []
        own_loss = f"is for classification, and --task={model.task} has a loss of its own"
        virtual, virtual_flag = batch.virtual_workers, f"--virtual-workers={batch.virtual_workers}"
        contradictions = [
            *((model.task, f"{flag}: {own_loss}:") for flag in (*smoothing, *data.mixes)),
            (
                batch.rank_weights == AUTO and data.data_placement != "shared",
                f"--rank-weights={AUTO} and --data-placement={data.data_placement}: a sample goes "
                "to a rank of its host, however fast: give weights, or",
            ),
            (
                model.compile and precision.sync_bn,
                "--compile and --sync-bn: layers that exchange sums within a pass cannot be "
                "compiled:",
            ),
            (
                model.compile and model.grad_checkpointing,
                "--compile and --grad-checkpointing: the second computation sets random "
                "generators, which cannot be compiled:",
            ),
            (
                audited and precision.sync_bn,
                f"--audit-compute={audited} and --sync-bn: a rank alone cannot compute what layers "
                "normalise over all ranks:",
            ),
            (
                virtual and precision.sync_bn,
                f"{virtual_flag} and --sync-bn: normalises over workers; virtual ones share none:",
            ),
            (
                virtual and precision.compression != "none",
                f"{virtual_flag} and --compression={precision.compression}: virtual workers "
                "exchange integers, which are not compressed:",
            ),
        ]
        return [f"{text} leave one of them out" for text in every_problem(*contradictions)]

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
        """Return the path of the run's folder on this machine."""
        return folder_of(self.run.output) / self.experiment
