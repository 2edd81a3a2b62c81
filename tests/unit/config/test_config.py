"""The groups of the configuration: which values they take, and what is worked out from them."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
from hypothesis import given, settings

from hvdtrain.config import BatchConfig, DataConfig, ModelConfig, ScheduleConfig, TrainConfig
from hvdtrain.config.options import build_config
from hvdtrain.errors import UsageError
from tests.unit.config.test_options import TEXT, parse, problems


@pytest.mark.parametrize(
    "text", ["", "a", "1,,2", "1,-1", "0,0", "1,nan", "1,inf", "1;2", "1e400,1", "1e308,1e308"]
)
def test_rank_weights_that_make_no_sense_are_refused(text: str) -> None:
    """Fails when a list that cannot be weights gets further than the flags."""
    assert f"--rank-weights={text}: must be auto, or comma-separated" in problems(
        f"--rank-weights={text}"
    )


@pytest.mark.parametrize("text", ["", "-1", "1.5", "1e6", "Auto", "1 MiB", "9" * 19])
def test_bucket_sizes_that_make_no_sense_are_refused(text: str) -> None:
    """Fails when a text that is no size gets further than the flags."""
    assert f"--bucket-bytes={text}: must be auto, or a number" in problems(f"--bucket-bytes={text}")


def test_there_is_a_weight_for_each_worker() -> None:
    """Fails when weights are cut or filled to the number of workers, or equal ones are not."""
    batch = parse("--rank-weights=1, 0,2.5").batch
    assert batch.weights(3) == (1.0, 0.0, 2.5)
    for workers in (1, 2, 4):
        with pytest.raises(UsageError, match=f"3 weights for {workers} workers"):
            batch.weights(workers)
    assert BatchConfig().weights(3) == (1.0, 1.0, 1.0)


def test_other_values_that_make_no_sense_are_refused() -> None:
    """Fails when an average that never moves, or an empty path, is taken."""
    assert "--model-ema-decay=1.0: must be at least 0 and below 1" in problems(
        "--model-ema-decay=1"
    )
    assert "--resume is empty" in problems("--resume=")
    assert "--pretrained is empty" in problems("--pretrained=")


@pytest.mark.parametrize(
    ("epochs", "max_steps", "expected"),
    [(None, None, 70), (3, None, 21), (None, 1000, 1000), (3, 20, 20), (3, 22, 21), (1, 7, 7)],
)
def test_total_steps(epochs: int | None, max_steps: int | None, expected: int) -> None:
    """Fails when --max-steps alone does not set the length, or the later of two ends counts."""
    assert ScheduleConfig(epochs=epochs, max_steps=max_steps).total_steps(7) == expected


def test_batch_size_per_worker_grows_with_workers() -> None:
    """Fails when a global batch depends on N, or a batch per worker does not."""
    for workers in (1, 2, 3, 8):
        assert BatchConfig().resolve(workers) == 256
        assert BatchConfig(global_batch_size=100).resolve(workers) == 100
        assert BatchConfig(batch_size=100).resolve(workers) == 100 * workers


@settings(deadline=None)
@given(model=TEXT, data=TEXT)
def test_the_experiment_name_is_one_folder(model: str, data: str) -> None:
    """Fails when a model or data name leads out of the output folder."""
    name = TrainConfig(ModelConfig(model=model), DataConfig(data=data)).experiment
    assert "/" not in name and "\0" not in name and name not in ("", ".", "..")
    assert Path("runs", name).parent == Path("runs")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/", "/tmp", "a\0b"])
def test_experiment_names_that_are_no_folder_name_are_refused(name: str) -> None:
    """Fails when --experiment can leave the output folder."""
    with pytest.raises(UsageError, match="must be one folder name"):
        build_config({"experiment": name})


def test_config_groups_cannot_change() -> None:
    """Fails when a checked value can be replaced by one that is not."""
    for group in vars(TrainConfig()).values():
        field = dataclasses.fields(group)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(group, field, math.nan)
