"""Flags and YAML keys: the same fields, flags win, and all problems are reported at once."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.cli.flags import TRAIN_FLAGS, Parser, add_all
from hvdtrain.config import DEFAULT_GLOBAL_BATCH_SIZE, BatchConfig, TrainConfig
from hvdtrain.config.effects import without_idle
from hvdtrain.config.options import Option, as_flat_dict, build_config, dump_yaml, train_options
from hvdtrain.errors import UsageError

OPTIONS = train_options()
ZERO_IS_FINE = {
    *("min_lr", "min_delta", "opt_eps", "label_smoothing", "mixup", "cutmix"),
    *("lr", "momentum", "weight_decay", "model_ema_decay", "warmup_epochs", "seed"),
    *("hflip", "crop_padding", "workers"),
    *("audit_every", "hash_every", "trace_every", "audit_compute"),
    *("checkpoint_interval", "memory_interval"),
    "eval_every",
}
# What an option needs to have an effect.
BESIDE = {
    "data_dir": "--data=cifar10",
    "image_size": "--data=imagefolder:some",
    "workers": "--data=imagefolder:some",
    "lr_base_batch_size": "--scale-lr=linear",
    "model_ema_decay": "--model-ema",
    "min_lr": "--sched=cosine",
    "min_delta": "--patience=1",
    "audit": "--audit-every=1",
    "audit_parts": "--audit-every=1",
}
NUMBERS = [name for name, option in OPTIONS.items() if option.type in (int, float)]
FLOATS = [name for name in NUMBERS if OPTIONS[name].type is float]


def parse(*argv: str) -> TrainConfig:
    parser = Parser(prog="train")
    add_all(parser, TRAIN_FLAGS)
    arguments, unknown = parser.parse_known_args(argv)
    return build_config(vars(arguments), parser.explain(unknown))


def problems(*argv: str) -> str:
    """What `argv` is refused with."""
    with pytest.raises(UsageError) as caught:
        parse(*argv)
    return str(caught.value)


def sample(option: Option, number: int) -> object:
    """The first or second good value, each unlike the default."""
    if option.choices:
        return [choice for choice in option.choices if choice != option.default][-number]
    if option.name == "micro_batch":
        return "auto"
    if option.name == "profile":
        return f"{3 + number}-9"
    if option.name == "rank_weights":
        return f"1,{number},0.5"
    if option.name == "opt_betas":
        return f"0.{number},0.5"
    if option.name == "bucket_bytes":
        return f"{number}"
    if option.name == "log_to":
        return ("mlflow,wandb", "wandb")[number]
    kinds = {int: 7 + number, float: 0.25 + number / 2, str: f"name{number}", bool: number == 0}
    return kinds[option.type]


def spellings(option: Option, value: object) -> list[list[str]]:
    """The flag that gives `value`, with `-` and with `_`."""
    names = (option.name.replace("_", "-"), option.name)
    if option.type is bool:
        return [[f"--{name}" if value else f"--no-{name}"] for name in names]
    return [[f"--{name}", str(value)] for name in names]


@pytest.fixture
def yaml_file(tmp_path: Path) -> Callable[[str | bytes], str]:
    def write(text: str | bytes) -> str:
        path = tmp_path / "train.yaml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return str(path)

    return write


def test_every_field_is_an_option() -> None:
    """Fails when a field of a group has no flag, or two groups share a name."""
    groups = typing.get_type_hints(TrainConfig).values()
    fields = [field.name for group in groups for field in dataclasses.fields(group)]
    assert sorted(fields) == sorted(OPTIONS)
    assert as_flat_dict(TrainConfig()) == {name: o.default for name, o in OPTIONS.items()}


@pytest.mark.parametrize("option", OPTIONS.values(), ids=OPTIONS)
def test_flag_spellings_and_precedence(option: Option, yaml_file) -> None:
    """Fails when a spelling is unknown, a value goes elsewhere, or the file beats the flag."""
    in_file, in_flag = sample(option, 0), sample(option, 1)
    beside = [BESIDE[option.name]] if option.name in BESIDE else []
    default = as_flat_dict(parse(*beside))
    for value in (in_file, in_flag):
        for argv in spellings(option, value):
            assert as_flat_dict(parse(*beside, *argv)) == default | {option.name: value}
    for key in (option.name, option.name.replace("_", "-")):
        file = yaml_file(f"{key}: {in_file}\n")
        from_file = parse(*beside, "--config", file)
        assert as_flat_dict(from_file) == default | {option.name: in_file}
        for argv in spellings(option, in_flag):
            both = parse(*beside, "--config", file, *argv)
            assert as_flat_dict(both) == default | {option.name: in_flag}


@pytest.mark.parametrize("name", [name for name, option in OPTIONS.items() if option.type is bool])
def test_booleans(name: str, yaml_file) -> None:
    """Fails when true or false is misread, or a word that is neither switches something on."""
    for text, value in (("true", True), ("True", True), ("false", False), ("FALSE", False)):
        assert as_flat_dict(parse("--config", yaml_file(f"{name}: {text}")))[name] is value
    for text in ("yes", "on", "1", "0", "null", "''", "[true]"):
        assert f"{name}: " in problems("--config", yaml_file(f"{name}: {text}"))
    assert f"--{name.replace('_', '-')}" in problems(f"--{name}=true")


def test_options_that_are_learned_are_distinguished_from_the_rest() -> None:
    """Fails when a flag that changes what is learned may change on resume, or N may not."""
    free = {
        *("device", "data_dir", "batch_size", "rank_weights", "epochs", "max_steps", "resume"),
        *("audit_every", "hash_every", "output", "experiment", "log_interval", "eval_interval"),
        *("checkpoint_interval", "keep_checkpoints", "audit", "audit_parts", "workers"),
        *("eval_every", "log_to", "pretrained", "profile", "max_image_pixels", "single_worker"),
        *("trace_every", "audit_compute", "bucket_bytes", "grad_checkpointing"),
        *("micro_batch", "eval_batch_size", "memory_interval"),
    }
    assert {name for name, option in OPTIONS.items() if not option.learns} == free


@pytest.mark.parametrize(
    ("text", "line", "expected"),
    [
        ("lr: 0.1\nlearning_rate: 1\n", 2, "unknown option 'learning_rate'; did you mean lr?"),
        ("lr: 0.1\nmomentun: 1\n", 2, "unknown option 'momentun'; did you mean momentum?"),
        ("quux: 1\n", 1, "unknown option 'quux'"),
        ("lr: 0.1\n\nepochs: many\n", 3, "epochs: 'many' is not of type int"),
        ("epochs: true\n", 1, "epochs: 'true' is not of type int"),
        ("epochs: 1.5\n", 1, "epochs: '1.5' is not of type int"),
        ("lr: null\n", 1, "lr: 'null' is not of type float"),
        ("model: [lenet]\n", 1, "model: expected a single value"),
        ("lr: 0.1\nseed: 1\nlr: 0.2\n", 3, "lr is given twice"),
        ("log-interval: 1\nlog_interval: 2\n", 2, "log_interval is given twice"),
        ("- lr\n- 0.1\n", 1, "must contain lines of the form NAME: VALUE"),
        ("lenet\n", 1, "must contain lines of the form NAME: VALUE"),
        ("lr: 0.1\nseed: {1\n", 3, "not valid YAML"),
        ("lr: 0.1\nseed: !!python/name:os.system 1e3\n", 2, "seed: '1e3' is not of type int"),
        ("lr: 0.1\n---\nlr: 0.2\n", 2, "not valid YAML"),
    ],
)
def test_yaml_problems_name_file_and_line(yaml_file, text: str, line: int, expected: str) -> None:
    """Fails when a bad file is accepted, or its place is not given."""
    file = yaml_file(text)
    reported = problems("--config", file)
    assert reported.startswith(f"{file}:{line}: ")
    assert expected in reported


def test_unreadable_yaml_names_the_file(yaml_file, tmp_path: Path) -> None:
    """Fails when a missing, binary or empty-named file is no UsageError, or is passed over."""
    for file in (str(tmp_path / "missing.yaml"), str(tmp_path), yaml_file(b"lr: \xff\xfe\x00")):
        assert file in problems("--config", file)
    file = yaml_file(b"lr: 1\x00")
    assert file in problems("--config", file)


def test_an_empty_config_name_is_refused() -> None:
    """Fails when `--config "$UNSET"` trains with the defaults, silently."""
    assert "--config" in problems("--config", "")


def test_an_empty_yaml_file_changes_nothing(yaml_file) -> None:
    """Fails when a file of comments is refused."""
    assert parse("--config", yaml_file("# nothing yet\n")) == TrainConfig()


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "1.0e-3", "0.001", ".001"])
def test_numbers_read_in_a_file_as_in_a_flag(yaml_file, text: str) -> None:
    """Fails when a number that the flag takes is refused in the file (YAML 1.1 requires 1.0e-3)."""
    assert parse("--lr", text).optimizer.lr == 0.001
    assert parse("--config", yaml_file(f"lr: {text}\n")).optimizer.lr == 0.001


def test_all_flag_problems_are_reported_at_once() -> None:
    """Fails when the user mends one flag only to meet the next."""
    reported = problems("--lr=-1", "--epochs=0", "--seed=-1", "--experiment=a/b", "--sede=1", "--x")
    for expected in ("--lr=-1.0:", "--epochs=0:", "--seed=-1:", "'a/b'", "--sede:", "--x:"):
        assert expected in reported
    assert len(reported.splitlines()) == 6


def test_file_and_flag_problems_are_reported_at_once(yaml_file) -> None:
    """Fails when a problem of the file hides those of the flags, or of its own other lines."""
    file = yaml_file("bad: 1\nepochs: x\nmomentum: -1\n")
    reported = problems("--config", file, "--lr=-1", "--sede")
    for expected in (":1: unknown", ":2: epochs", "momentum=-1", "--lr=-1", "--sede"):
        assert expected in reported


@pytest.mark.parametrize(
    ("given_flag", "suggested"),
    [
        ("--experimnet", "--experiment"),
        ("--global-batchsize", "--global-batch-size"),
        ("--log_intervall", "--log-interval"),
        ("--max-step-s=3", "--max-steps"),
        ("--learning-rate=3", "--lr"),
        ("--num_workers", "--workers"),
    ],
)
def test_unknown_flags_get_a_suggestion(given_flag: str, suggested: str) -> None:
    """Fails when a slip of the pen is passed over, or answered without the flag that was meant."""
    flag = given_flag.partition("=")[0]
    assert problems(given_flag) == f"{flag}: no such flag; did you mean {suggested}?"


def test_flags_unlike_any_other_and_stray_words_are_refused() -> None:
    """Fails when something on the command line is silently dropped."""
    assert problems("--quux") == "--quux: no such flag; see train --help"
    assert problems("lenet") == "not understood: lenet (see train --help)"


@pytest.mark.parametrize("argv", [["--epochs", "x"], ["--lr"], ["--sched", "linear"]])
def test_a_value_of_the_wrong_kind_is_a_usage_error(argv: list[str]) -> None:
    """Fails when argparse ends the process itself, or the flag is not named."""
    assert argv[0] in problems(*argv)


def test_one_kind_of_batch_size(yaml_file) -> None:
    """Fails when both kinds pass together, or a flag does not replace the file's other kind."""
    assert "give one of them" in problems("--batch-size=8", "--global-batch-size=8")
    assert "give one of them" in problems(
        "--config", yaml_file("batch_size: 8\nglobal_batch_size: 8\n")
    )
    assert parse("--config", yaml_file("batch_size: 8"), "--global-batch-size=9").batch == (
        BatchConfig(global_batch_size=9)
    )
    assert parse("--config", yaml_file("global_batch_size: 8"), "--batch-size=9").batch == (
        BatchConfig(batch_size=9)
    )


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_make_no_sense_are_refused(name: str, yaml_file) -> None:
    """Fails when a field takes a negative or infinite number, no number, or a zero too many."""
    flag = f"--{name.replace('_', '-')}"
    bad = ["-1"] + (["nan", "inf", "-inf"] if name in FLOATS else ["-1000000000000"])
    for text in bad + ([] if name in ZERO_IS_FINE else ["0"]):
        assert f"{flag}=" in problems(f"{flag}={text}")
        assert f"{flag}=" in problems("--config", yaml_file(f"{name}: {text}"))
    if name in ZERO_IS_FINE:
        assert as_flat_dict(parse(f"{flag}=0"))[name] == 0


@pytest.mark.parametrize("name", ["lr", "max_steps", "global_batch_size"])
@pytest.mark.parametrize("place", ["flag", "file"])
def test_a_number_beyond_any_float_is_no_surprise(name: str, place: str, yaml_file) -> None:
    """Fails when 400 digits end in an OverflowError: they are taken as they are, or refused."""
    digits = "9" * 400
    file = yaml_file(f"{name}: {digits}" if place == "file" else "")
    flags = [] if place == "file" else [f"--{name.replace('_', '-')}={digits}"]
    try:
        assert as_flat_dict(parse("--config", file, *flags))[name] == int(digits)
    except UsageError as error:
        assert name in str(error).replace("-", "_")


def values(option: Option) -> st.SearchStrategy:
    if option.choices:
        return st.sampled_from(option.choices)
    if option.name == "experiment":
        return st.none() | TEXT.filter(lambda text: "/" not in text and text not in (".", ".."))
    if option.name == "micro_batch":
        return st.none() | st.just("auto")
    if option.name == "rank_weights":
        weights = st.lists(st.floats(1e-3, 1e6), min_size=1)
        return st.none() | weights.map(lambda some: ",".join(map(str, some)))
    if option.name == "opt_betas":
        return st.none() | st.floats(0, 0.99).map(lambda beta: f"{beta},0.5")
    if option.name == "bucket_bytes":
        return st.just("auto") | st.integers(0, 10**18 - 1).map(str)
    if option.name in ("model_ema_decay", "hflip", "label_smoothing"):
        return st.floats(0, 1, exclude_max=True)
    if option.name == "log_to":
        return st.sampled_from([None, "mlflow", "wandb", "wandb,mlflow"])
    if option.name == "profile":
        return st.none() | st.integers(1, 99).map(lambda first: f"{first}-{first + 2}")
    if option.name in ("valid_split", "crop_scale"):
        return st.none() | st.floats(0, 1, exclude_min=True, exclude_max=True)
    strategy = {
        int: st.integers(1, 2**63 - 1),
        float: st.floats(0, allow_infinity=False, exclude_min=True),
        str: TEXT,
        bool: st.booleans(),
    }[option.type]
    return st.none() | strategy if option.optional else strategy


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)


@settings(deadline=None)
@given(
    flat=st.fixed_dictionaries({name: values(option) for name, option in OPTIONS.items()}),
    per_worker=st.booleans(),
)
def test_dumped_configs_read_back_equal(flat, per_worker: bool, tmp_path_factory) -> None:
    """Fails when any value is lost or changed between --print-config and --config."""
    flat["global_batch_size" if per_worker else "batch_size"] = None
    if flat["sync_bn"] or flat["compression"] != "none":  # refused together
        flat["virtual_workers"] = None
    flat["audit_compute"] *= not flat["sync_bn"]
    flat["compile"] &= not flat["sync_bn"]
    flat["grad_checkpointing"] &= not flat["compile"]
    flat["label_smoothing"] *= not flat["task"]
    for name in ("mixup", "cutmix"):
        flat[name] *= not flat["task"] and not flat["skip_bad_samples"]
    config = build_config(without_idle(flat, {name: o.default for name, o in OPTIONS.items()}))
    path = tmp_path_factory.getbasetemp() / "round-trip.yaml"
    path.write_text(dump_yaml(config) + "\n", "utf-8")
    if config.batch.batch_size is config.batch.global_batch_size is None:  # the default is resolved
        batch = dataclasses.replace(config.batch, global_batch_size=DEFAULT_GLOBAL_BATCH_SIZE)
        config = dataclasses.replace(config, batch=batch)
    assert build_config({"config": str(path)}) == config
