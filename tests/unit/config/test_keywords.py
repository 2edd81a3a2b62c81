"""The options as keywords of `hvdtrain.Loop`, and on the pages that list them: as in the fields."""

from __future__ import annotations

import inspect
import re
import types
import typing
from pathlib import Path

import pytest
import torch

import hvdtrain
from hvdtrain.config.keywords import OPTIONS, LoopOptions
from hvdtrain.config.options import train_options
from hvdtrain.errors import UsageError
from hvdtrain.exchange import SingleProcess, join
from hvdtrain.run.script import OWN

DOCS = Path(__file__).parents[3] / "docs"
# Decided by a script itself.
SCRIPTS = {
    *("task", "model", "num_classes", "pretrained", "label_smoothing", "dtype", "channels_last"),
    *("compile", "data", "data_dir", "data_placement", "valid_split", "image_size", "hflip"),
    *("crop_padding", "crop_scale", "mixup", "cutmix", "max_image_pixels", "workers"),
    *("skip_bad_samples", "opt", "momentum", "nesterov", "opt_betas", "opt_eps", "weight_decay"),
    *("decay_norm_bias", "scale_lr", "lr_base_batch_size", "sched", "min_lr", "audit_compute"),
    "grad_checkpointing",
}


def test_every_option_is_a_keyword_or_the_scripts_own() -> None:
    """Fails when a new option is in none of the lists, or in two."""
    assert sorted([*OPTIONS, *SCRIPTS, *OWN]) == sorted(train_options())


def test_keywords_have_the_types_of_the_fields() -> None:
    """Fails when an editor is given another type, or a choice is missing."""
    for name, hint in typing.get_type_hints(LoopOptions).items():
        option = train_options()[name]
        if typing.get_origin(hint) is typing.Literal:
            assert typing.get_args(hint) == option.choices and option.type is str, name
            continue
        parts = typing.get_args(hint) or (hint,)
        of_text = [part for part in parts if typing.get_origin(part) is typing.Literal]
        kinds = {str if part in of_text else part for part in parts}  # checked when it is read
        assert option.type in kinds and not option.choices, name
        assert (types.NoneType in kinds) == option.optional, name


def test_the_signature_has_the_names_and_defaults_of_train() -> None:
    """Fails when an option is not listed for an editor, or with another default."""
    for function in (hvdtrain.Loop, hvdtrain.Loop.__init__):
        parameters = inspect.signature(function).parameters
        assert list(parameters)[-len(OPTIONS) :] == list(OPTIONS)
        for name in OPTIONS:
            assert parameters[name].default == train_options()[name].default
            assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
    distributed = inspect.signature(hvdtrain.distribute).parameters["bucket_bytes"]
    assert distributed.default == train_options()["bucket_bytes"].default == "auto"


def test_distribute_has_one_spelling_of_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when None means what "auto" does, or a wrong size is taken."""
    monkeypatch.setattr("hvdtrain.exchange._joined", None)
    join(SingleProcess)
    model = torch.nn.Linear(2, 1)
    for wrong in (None, -1, 1.5, True, "4096"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(UsageError, match=f"bucket_bytes={wrong!r}: must be 'auto', or an int"):
            hvdtrain.distribute(model, optimizer, bucket_bytes=wrong)
    for right in ("auto", 0, 4096):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert hvdtrain.distribute(model, optimizer, bucket_bytes=right) is optimizer


def test_the_pages_list_the_options() -> None:
    """Fails when a page lacks an option, or lists one that does not exist."""
    text = (DOCS / "own-loop.md").read_text("utf-8").partition("## Options")[2]
    listed = re.findall(r"`(\w+)`", text[: text.index("An editor completes")].partition(":")[2])
    assert tuple(listed) == OPTIONS
    guide = (DOCS / "guide.md").read_text("utf-8")
    flags = {name: f"-{name.replace('_', '-')}" for name in train_options()}
    assert [name for name, flag in flags.items() if not re.search(rf"{flag}\b", guide)] == []
