"""Options that have no effect beside others: refused where they are chosen, and only there."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from hvdtrain.config.effects import IDLE, WITHOUT_MOMENTUM, WITHOUT_WEIGHT_DECAY
from hvdtrain.config.options import as_flat_dict, build_config, dump_yaml, train_options
from hvdtrain.errors import UsageError
from hvdtrain.run.script_input import read_options
from hvdtrain.train.optimizers import BY_NAME, UNSUITABLE_ALONE
from tests.unit.config.test_options import parse, problems

DEFAULTS = {name: option.default for name, option in train_options().items()}
TASK, FOLDER = "--task=mine:Own", "--data=imagefolder:photos"
REFUSED = [  # the option, what makes it idle, with what it has an effect, what is said
    ("--bucket-bytes=4096", "--virtual-workers=4", "", "beside --virtual-workers=4: leave it out"),
    ("--audit=exact", "", "--audit-every=5", "without --audit-every: leave it out, or add"),
    ("--audit-parts=3", "--audit-every=0", "--audit-every=5", "without --audit-every: leave it"),
    ("--model-ema-decay=0.9", "", "--model-ema", "without --model-ema: leave it out, or add"),
    ("--lr-base-batch-size=64", "", "--scale-lr=sqrt", "without --scale-lr: leave it out, or add"),
    ("--min-delta=0.1", "", "--patience=2", "without --patience: leave it out, or add --patience"),
    ("--min-lr=0.01", "", "--sched=step", "beside --sched=constant: leave it out"),
    ("--momentum=0.8", "--opt=AdamW", "--opt=rmsprop", "beside --opt=AdamW: leave it out"),
    ("--weight-decay=0.1", "--opt=rprop", "--opt=adam", "beside --opt=rprop: leave it out"),
    ("--amp=bf16", "--dtype=float64", "", "beside --dtype=float64: leave it out"),
    ("--num-classes=12", TASK, "", f"beside {TASK}: leave it out"),
    ("--valid-split=0.2", TASK, FOLDER, f"beside {TASK}: leave it out"),
    ("--image-size=32", TASK, FOLDER, f"beside {TASK}: leave it out"),
    ("--hflip=0.5", TASK, "", f"beside {TASK}: leave it out"),
    ("--crop-padding=2", TASK, "", f"beside {TASK}: leave it out"),
    ("--crop-scale=0.5", TASK, FOLDER, f"beside {TASK}: leave it out"),
    ("--max-image-pixels=99", TASK, FOLDER, f"beside {TASK}: leave it out"),
    ("--workers=2", TASK, FOLDER, f"beside {TASK}: leave it out"),
    ("--skip-bad-samples", TASK, FOLDER, f"beside {TASK}: leave it out"),
    ("--workers=2", "--data=synthetic:1x8x8", "--data=mine:pairs", "beside --data=synthetic:1x8x8"),
    ("--image-size=32", "--data=mine:pairs", FOLDER, "beside --data=mine:pairs: leave it out"),
    ("--data-dir=there", "", "--data=cifar10", "beside --data=digits: leave it out"),
]


def flags(*texts: str) -> list[str]:
    return [text for text in texts if text]


@pytest.mark.parametrize(("option", "beside", "useful", "expected"), REFUSED)
def test_an_option_without_effect_is_refused(
    option: str, beside: str, useful: str, expected: str, tmp_path: Path
) -> None:
    """Fails when it is taken as a flag or from a file, or refused where it has an effect, or where
    a flag replaces what a file has with it.
    """
    message = f"{option}: has no effect {expected}"
    assert problems(*flags(option, beside)).startswith(message)
    name, _, value = option.lstrip("-").partition("=")
    file = tmp_path / "options.yaml"
    file.write_text(f"{name}: {value or 'true'}\n", "utf-8")
    if beside:
        parse("--config", str(file), beside)
        name, _, value = beside.lstrip("-").partition("=")
        with file.open("a", encoding="utf-8") as lines:
            lines.write(f"{name.replace('-', '_')}: {value or 'true'}\n")
    assert problems("--config", str(file)).startswith(message)
    parse(*flags(option, useful))
    parse(*flags(beside))


def test_every_row_of_the_table_is_tried() -> None:
    """Fails when the table of options without effect has another row than this page."""
    tried = []
    for option, *_, expected in REFUSED:
        other = expected.split()[1].partition("=")[0].rstrip(":")
        names = [flag.partition("=")[0].lstrip("-").replace("-", "_") for flag in (option, other)]
        tried.append(tuple(names))
    assert sorted(tried) == sorted((name, row.other) for row in IDLE for name in row.names)
    assert {name for pair in tried for name in pair} <= DEFAULTS.keys()


def test_all_options_without_effect_are_reported_at_once() -> None:
    """Fails when one hides another, or another problem."""
    reported = problems("--audit=exact", "--min-lr=0.1", "--model-ema-decay=0.5", "--lr=-1", "--x")
    assert len(reported.splitlines()) == 5


@pytest.mark.parametrize(
    "chosen",
    [
        ["--virtual-workers=4", "--bucket-bytes=auto"],
        ["--audit=bound", "--audit-parts=1", "--model-ema-decay=0.9998", "--data-dir=data"],
        ["--opt=adam", "--momentum=0.9"],
        ["--opt=adam", "--momentum=0"],
        ["--no-decay-norm-bias"],
        [TASK, "--workers=0", "--hflip=0", "--crop-padding=0", "--no-skip-bad-samples"],
    ],
)
def test_defaults_and_what_happens_anyway_are_taken(chosen: list[str]) -> None:
    """Fails when a default, or a value that switches nothing off, is refused."""
    parse(*chosen)


def test_what_a_run_has_written_is_read_again(tmp_path: Path) -> None:
    """Fails when the defaults of a configuration that gives all options are refused."""
    file = tmp_path / "config.yaml"
    for chosen in (["--virtual-workers=4", "--opt=adam"], [TASK, "--dtype=float64"]):
        config = parse(*chosen)
        file.write_text(dump_yaml(config), "utf-8")
        again = as_flat_dict(parse("--config", str(file)))
        assert again == as_flat_dict(config) | {"global_batch_size": 256}


def test_a_recorded_run_keeps_what_had_no_effect() -> None:
    """Fails when an earlier run cannot be evaluated or replayed, or a flag beside it is taken."""
    recorded = {"opt": "adam", "momentum": 0.8, "virtual_workers": 4, "bucket_bytes": "64"}
    assert build_config({"device": "cpu"}, recorded=recorded).optimizer.momentum == 0.8
    with pytest.raises(UsageError, match=r"--image-size=8: has no effect beside --data=digits"):
        build_config({"image_size": 8}, recorded=recorded)


def test_a_loop_refuses_them_in_its_own_words() -> None:
    """Fails when keywords of hvdtrain.Loop are taken, or a message names flags."""
    from hvdtrain.run.script import in_words_of_script

    options = {"virtual_workers": 3, "bucket_bytes": 4096, "audit_parts": 2}
    with pytest.raises(UsageError) as caught, in_words_of_script():
        read_options(options)
    assert str(caught.value).splitlines() == [
        "bucket_bytes='4096': has no effect beside virtual_workers=3: leave it out",
        "audit_parts=2: has no effect without audit_every: leave it out, or add audit_every",
    ]
    read_options({"virtual_workers": 3, "bucket_bytes": "auto"})
    with pytest.raises(UsageError, match=r"bucket_bytes=None: .* leave it out, or give 'auto'"):
        read_options({"bucket_bytes": None})


def test_the_optimizers_of_torch_are_those_of_the_table() -> None:
    """Fails when an optimizer of torch has, or lacks, a setting against the table."""
    suitable = {name: BY_NAME[name] for name in BY_NAME.keys() - UNSUITABLE_ALONE.keys()}
    for setting, table in (("momentum", WITHOUT_MOMENTUM), ("weight_decay", WITHOUT_WEIGHT_DECAY)):
        lacking = {
            n for n, one in suitable.items() if setting not in inspect.signature(one).parameters
        }
        assert lacking == set(table) & suitable.keys()
