"""`hvdtrain evaluate`, and what it shares with `hvdtrain predict`: reading what was trained."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hvdtrain.config import BatchConfig, TrainConfig
from hvdtrain.config.fields import flag_of
from hvdtrain.config.options import MAY_NAME_CODE, build_config, explicit_options, known_options
from hvdtrain.config.plugins import is_plugin, refuse_code_of, refuse_data_of
from hvdtrain.data import BatchShares
from hvdtrain.data.splits import Splits
from hvdtrain.documents import check
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.files import write_json
from hvdtrain.log import counted, say
from hvdtrain.run.joined import JoinedWorkers
from hvdtrain.run.script import Script, run_script
from hvdtrain.run.tasks import build_data, build_model, build_task, find_source, valid_batch
from hvdtrain.tasks import Task
from hvdtrain.train.checkpoint import STATE_FILE, DamagedCheckpoint, load_state, load_weights
from hvdtrain.train.devices import choose_device
from hvdtrain.train.evaluate import Evaluation, RankSums, sum_of_rank
from hvdtrain.train.state import completed, load_model
from hvdtrain.train.step import Step
from hvdtrain.weights import find_weights

Weights = dict[str, torch.Tensor]
OF_ANY_RUN = ("device", "eval_batch_size")  # options to replace that are no script's own


class Saved(NamedTuple):
    """The checkpoint of a trained model, whose weights are verified."""

    source: Path  # the folder of a run or of a checkpoint, as it was given
    path: Path  # of the checkpoint
    weights: Weights
    manifest: dict[str, Any]

    @property
    def takeaway(self) -> dict[str, Any]:
        """Return what the run has recorded for those who use the model."""
        recorded: dict[str, Any] = self.manifest.get("takeaway", {})
        return recorded


class Recorded(NamedTuple):
    """How a checkpoint was trained: by the command `train`, or by a script."""

    config: TrainConfig  # with the flags of this command; of a script the options of its loop
    script: list[str] | None = None


def evaluate(arguments: dict[str, Any], overrides: Sequence[str], workers: JoinedWorkers) -> None:
    """Collective: evaluate a checkpoint on its validation data, or on other data.

    `overrides`: the training options that `arguments` may replace.
    """
    source = Path(arguments["source"])
    saved = workers.run("checkpoint", lambda: read_checkpoint(source))
    recorded = workers.run("configuration", lambda: _recorded(saved, arguments, overrides))
    config = recorded.config
    if recorded.script is not None:
        _run_script(recorded.script, config, saved, arguments, workers)
        return
    task, data = _data_of(config, workers)
    classes = saved.takeaway.get("classes")

    def build() -> torch.nn.Module:
        if classes != task.takeaway().get("classes"):
            wrong = _other_classes(task.takeaway().get("classes"), classes)
            raise UsageError(f"--data={config.data.data}: {wrong}")
        if config.model.task is None:
            refuse_other_sizes(saved, config.model.model, task.build_model)
        return with_weights(build_model(task, config), saved)

    model = workers.run("model", build)
    further = {"classes": classes}
    _evaluate(model, task, data, config, arguments["json"], workers, further)


def _recorded(saved: Saved, arguments: dict[str, Any], overrides: Sequence[str]) -> Recorded:
    """Return how the checkpoint was trained, with what `arguments` replace of it. Raises UsageError
    if that is not recorded, or names code or data that may not be used.
    """
    source, takeaway = saved.source, saved.takeaway
    if "config" not in takeaway:
        raise UsageError(f"{source}: its checkpoint does not record how it was trained")
    if command := takeaway["config"].get("script"):
        parsed(source, check, {"script": command}, {"script": [str]})
        if not arguments["trust_code"]:
            refuse_code_of(source, {}, command)
        explicit = explicit_options(arguments, overrides)
        if refused := [name for name in explicit if name not in OF_ANY_RUN]:
            raise UsageError(
                f"{flag_of(refused[0])}: {source} is the run of a script, which decides "
                "that itself: leave it out"
            )
    stored = parsed(source, known_options, takeaway["config"])
    stored |= {"device": "auto", "resume": None, "data_placement": "shared"}
    if command:
        return Recorded(build_config(explicit, recorded=stored), command)
    recorded = chosen(source, stored, overrides, arguments)
    config = build_config(explicit_options(arguments, overrides), recorded=recorded)
    if (config.model.num_classes or 0) > sum(tensor.numel() for tensor in saved.weights.values()):
        raise UsageError(f"{source}: has {config.model.num_classes:,} classes, and fewer weights")
    return Recorded(config)


def _data_of(
    config: TrainConfig, workers: JoinedWorkers, script: Script | None = None
) -> tuple[Task, Splits]:
    """Collective: return the task and its data, which must be the same on all workers."""
    config = replace(config, batch=BatchConfig())  # the shares are others
    if workers.exchange.size > 1:
        local_rank = workers.topology.local_rank
        source = find_source(config, workers.exchange, local_rank, script)
        return source.task, source.data
    if script is not None:
        return script.task, script.data
    task = build_task(config)
    return task, build_data(task, config)


def _other_classes(classes: Any, trained: Any) -> str:
    """Return how the classes of data differ from those that a model was trained on."""
    ours, theirs = (names if isinstance(names, list) else [names] for names in (classes, trained))
    pairs = enumerate(zip_longest(ours, theirs))
    number, (name, other) = next((n, pair) for n, pair in pairs if pair[0] != pair[1])
    return (
        f"its {len(ours):,} classes are not the {len(theirs):,} of the model: "
        f"number {number} is {name!r}, in the model {other!r}"
    )


def _run_script(
    command: list[str],
    config: TrainConfig,
    saved: Saved,
    arguments: dict[str, Any],
    workers: JoinedWorkers,
) -> None:
    """Collective: evaluate these weights as a script does, without any step of its loop.

    Raises AgreedFailure on all workers if the script fails on any before its loop.
    """
    has_begun = False

    def checked(script: Script) -> torch.nn.Module:
        if not len(script.data.valid):
            raise UsageError(f"{script.path}: its loop has no samples to validate with")
        return with_weights(script.model, saved)

    def evaluated(script: Script) -> Generator[Step, None, int]:
        nonlocal has_begun
        has_begun = True
        yield from ()
        model = workers.run("script", lambda: checked(script))
        task, data = _data_of(config, workers, script)
        _evaluate(model, task, data, config, arguments["json"], workers)
        return 0

    def fail(error: BaseException) -> None:
        raise error

    loop = saved.takeaway["config"].get("loop", 1)
    try:
        run_script(command, evaluated, saved.source, loop)
    except (Exception, SystemExit) as error:
        reason = error
        if not has_begun and workers.exchange.size > 1:  # the others wait for its loop
            workers.run("script", lambda: fail(reason))
        raise


def _evaluate(
    model: torch.nn.Module,
    task: Task,
    data: Splits,
    config: TrainConfig,
    file: str | None,
    workers: JoinedWorkers,
    further: dict[str, Any] | None = None,
) -> None:
    """Collective: evaluate; the first worker prints the result, and writes it with `further` values
    to `file`. Raises HvdtrainError.
    """
    exchange = workers.exchange
    workers.check_same(model)
    batch_size = valid_batch(data.valid, config.batch, config.batch.resolve(workers=1))
    shares = BatchShares(len(data.valid), batch_size, exchange.size)

    def sums() -> RankSums:
        device = choose_device(config.model.device, workers.topology)
        placed = model.to(device), task, data.valid, shares, exchange.rank, device
        return sum_of_rank(*placed, workers.is_stopped, batch_size=batch_size)

    evaluation = workers.run("evaluate", sums).over_ranks(exchange)
    if evaluation.samples == 0:
        raise HvdtrainError(f"none of the {len(data.valid):,} samples of {data.name} could be read")
    if workers.is_first:
        _print(evaluation, data)
    figures = evaluation.plain() | (further or {})
    workers.run("json", lambda: write_json(file, figures) if workers.is_first else None)


def _print(evaluation: Evaluation, data: Splits) -> None:
    bad = len(data.valid) - evaluation.samples
    skipped = f"; {bad:,} more could not be read, and were left out" if bad else ""
    say(f"{data.name}, {counted(evaluation.samples, 'sample')}{skipped}")
    say(f"  loss {evaluation.loss:.6g}")
    for name, value in evaluation.metrics.items():
        say(f"  {name} {value:.4f}")
    if seen := [part for part in evaluation.class_accuracy() or () if part is not None]:
        say(f"  worst class {min(seen):.4f}, best class {max(seen):.4f}")


def read_checkpoint(source: Path) -> Saved:
    """Return the checkpoint of a run's or checkpoint's folder. Raises UsageError."""
    path = find_weights(source)
    if not path.is_dir():
        raise UsageError(f"{source}: a run's folder or a checkpoint's is needed, not weights alone")
    try:
        return Saved(source, path, *load_weights(path))
    except DamagedCheckpoint as error:
        raise UsageError(str(error)) from error


def chosen(
    source: Path, stored: dict[str, Any], names: Sequence[str], arguments: dict[str, Any]
) -> dict[str, Any]:
    """Return `stored` with those of `names` replaced that the command line gives. Raises UsageError
    if the checkpoint alone names code to run, unless --trust-code is given.
    """
    explicit = explicit_options(arguments, names)
    left = {
        f"--{name}": stored.get(name)
        for name in MAY_NAME_CODE
        if name in names and name not in explicit
    }
    if not arguments["trust_code"]:
        refuse_code_of(source, left)
        refuse_data_of(source, left.get("--data"))
    return stored | explicit


def parsed(source: Path, parse: Callable[..., Any], *values: Any) -> Any:
    """Return what `parse` makes of values of a checkpoint. Raises UsageError for a ValueError."""
    try:
        return parse(*values)
    except ValueError as error:
        raise UsageError(f"{source}: its checkpoint is not what a run writes: {error}") from error


def refuse_other_sizes(saved: Saved, name: str, build: Callable[[], torch.nn.Module]) -> None:
    """Raise UsageError if the weights are not those of the network that `build` makes, before it is
    made: a forged checkpoint may ask for any size. `name`: of the network; user code is trusted.
    """
    if is_plugin(name):
        return
    try:
        with torch.device("meta"):
            shapes = {key: tensor.shape for key, tensor in build().state_dict().items()}
    except NotImplementedError:  # some networks of torchvision compute with their first values
        return
    if wrong := [key for key, shape in shapes.items() if saved.weights[key].shape != shape]:
        raise UsageError(f"{saved.source}: its weights are not those of {name}: {wrong[0]} differs")


def with_weights(model: torch.nn.Module, saved: Saved) -> torch.nn.Module:
    """Return the model with these weights, and with what only the state of the checkpoint has."""
    weights = saved.weights
    if (saved.path / STATE_FILE).is_file() and model.state_dict().keys() != weights.keys():
        weights = completed(weights, load_state(saved.path, saved.manifest), model)
    try:
        load_model(model, weights)
    except RuntimeError as error:
        raise UsageError(
            f"{saved.source}: its weights are not those of the model that it names; has the code "
            f"of the model changed? {error}"
        ) from error
    return model
