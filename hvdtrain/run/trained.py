"""`hvdtrain evaluate` and `hvdtrain predict`: use of trained models on one device."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hvdtrain.config import DataConfig
from hvdtrain.config.fields import flag_of
from hvdtrain.config.options import MAY_NAME_CODE, build_config, known_options
from hvdtrain.config.plugins import is_plugin, refuse_code_of, refuse_data_of
from hvdtrain.data import Shares
from hvdtrain.data.image_files import EXTENSIONS, images_under, left_out
from hvdtrain.data.image_folder import centred, read_image
from hvdtrain.data.reading import BadSample
from hvdtrain.data.splits import MAX_PIXELS, ImageFormat, Splits
from hvdtrain.data.transforms import normalised, resize
from hvdtrain.documents import check
from hvdtrain.errors import EXIT_OK, HvdtrainError, UsageError, refuse
from hvdtrain.exchange import SingleProcess
from hvdtrain.files import write_json
from hvdtrain.log import complain, counted, say
from hvdtrain.models import build_model as build_network
from hvdtrain.run.script import Script, run_script
from hvdtrain.run.tasks import DTYPES, build_data, build_model, build_task
from hvdtrain.tasks import Task
from hvdtrain.topology import Topology
from hvdtrain.train.checkpoint import STATE_FILE, DamagedCheckpoint, load_state, load_weights
from hvdtrain.train.devices import choose_device
from hvdtrain.train.evaluate import evaluate as evaluate_split
from hvdtrain.train.state import completed, load_model
from hvdtrain.train.step import Step
from hvdtrain.weights import find_weights

PREDICTED_AT_A_TIME = 64
MOST_PIXELS_AT_A_TIME = 1 << 26
# What `predict` needs of a checkpoint; see `hvdtrain.documents.FIELDS`.
IMAGE_FORMAT = {
    **dict.fromkeys(("channels", "height", "width"), int),
    "crop": bool,
    "mean": [float],
    "std": [float],
}
OF_CLASSIFIERS = {
    **dict.fromkeys(("task", "model", "data", "dtype"), str),
    "classes": [str],
    "shape": [int],
    "images": (IMAGE_FORMAT,),
}
Takeaway = dict[str, Any]
Weights = dict[str, torch.Tensor]


class Saved(NamedTuple):
    """The checkpoint of a trained model, whose weights are verified."""

    source: Path  # the folder of a run or of a checkpoint, as it was given
    path: Path  # of the checkpoint
    weights: Weights
    manifest: dict[str, Any]


def evaluate(arguments: dict[str, Any], overrides: Sequence[str]) -> int:
    """Evaluate a checkpoint on its validation data, or on other data. Returns the exit code.

    `overrides`: the training options that `arguments` may replace.
    """
    saved = read_checkpoint(Path(arguments["source"]))
    source, takeaway = saved.source, saved.manifest.get("takeaway", {})
    if "config" not in takeaway:
        raise UsageError(f"{source}: its checkpoint does not record how it was trained")
    if command := takeaway["config"].get("script"):
        _parsed(source, check, {"script": command}, {"script": [str]})
        if not arguments["trust_code"]:
            refuse_code_of(source, {}, command)
        if refused := [name for name in _explicit(arguments, overrides) if name != "device"]:
            raise UsageError(
                f"{flag_of(refused[0])}: {source} is the run of a script, which decides "
                "that itself: leave it out"
            )
        return run_script(
            command,
            lambda script: _of_script(script, saved, arguments),
            source,
            takeaway["config"].get("loop", 1),
        )
    stored = _parsed(source, known_options, takeaway["config"])
    stored |= {"device": "auto", "resume": None, "data_placement": "shared"}
    config = build_config(_chosen(source, stored, overrides, arguments))
    if (config.model.num_classes or 0) > sum(tensor.numel() for tensor in saved.weights.values()):
        raise UsageError(f"{source}: has {config.model.num_classes:,} classes, and fewer weights")
    task = build_task(config)
    trained, classes = takeaway.get("classes"), task.takeaway().get("classes")
    if trained != classes:
        raise UsageError(f"--data={config.data.data}: {_other_classes(classes, trained)}")
    if config.model.task is None:
        _refuse_other_sizes(saved, config.model.model, task.build_model)
    model = _with_weights(build_model(task, config), saved)
    figures = _evaluate(model, task, build_data(task, config), config.model.device)
    write_json(arguments["json"], figures | {"classes": trained})
    return EXIT_OK


def _other_classes(classes: Any, trained: Any) -> str:
    """Return how the classes of data differ from those that a model was trained on."""
    ours, theirs = (names if isinstance(names, list) else [names] for names in (classes, trained))
    pairs = enumerate(zip_longest(ours, theirs))
    number, (name, other) = next((n, pair) for n, pair in pairs if pair[0] != pair[1])
    return (
        f"its {len(ours):,} classes are not the {len(theirs):,} of the model: "
        f"number {number} is {name!r}, in the model {other!r}"
    )


def _of_script(
    script: Script, saved: Saved, arguments: dict[str, Any]
) -> Generator[Step, None, int]:
    """Evaluate these weights as a script does, without any step of its loop."""
    yield from ()
    if not len(script.data.valid):
        raise UsageError(f"{script.path}: its loop has no samples to validate with")
    model = _with_weights(script.model, saved)
    device_name = arguments["device"] or "auto"
    write_json(arguments["json"], _evaluate(model, script.task, script.data, device_name))
    return EXIT_OK


def _evaluate(model: torch.nn.Module, task: Task, data: Splits, device_name: str) -> dict[str, Any]:
    """Evaluate on one device, print the result, and return it as plain values."""
    device = choose_device(device_name, Topology())
    evaluation = evaluate_split(
        model.to(device), task, data.valid, Shares(1), SingleProcess(), device
    )
    if evaluation.samples == 0:
        raise HvdtrainError(f"none of the {len(data.valid):,} samples of {data.name} could be read")
    bad = len(data.valid) - evaluation.samples
    skipped = f"; {bad:,} more could not be read, and were left out" if bad else ""
    say(f"{data.name}, {counted(evaluation.samples, 'sample')}{skipped}")
    say(f"  loss {evaluation.loss:.6g}")
    for name, value in evaluation.metrics.items():
        say(f"  {name} {value:.4f}")
    if seen := [part for part in evaluation.class_accuracy() or () if part is not None]:
        say(f"  worst class {min(seen):.4f}, best class {max(seen):.4f}")
    return evaluation.plain()


def predict(arguments: dict[str, Any]) -> int:
    """Print the likeliest classes of images; name those not readable. Returns the exit code."""
    saved = read_checkpoint(Path(arguments["source"]))
    source, takeaway = saved.source, saved.manifest.get("takeaway", {})
    form, dtype = _format_of(source, takeaway), DTYPES[takeaway["dtype"]]
    takeaway = _chosen(source, takeaway, ("model",), arguments)
    most = DataConfig(max_image_pixels=arguments["max_image_pixels"]).max_image_pixels
    paths = _images(arguments["images"])
    classes, shape = takeaway["classes"], tuple(takeaway["shape"])
    build = partial(build_network, takeaway["model"], shape, len(classes), dtype)
    _refuse_other_sizes(saved, takeaway["model"], build)
    device = choose_device(arguments["device"] or "auto", Topology())
    model = _with_weights(build(), saved).to(device).eval()
    records: list[dict[str, Any]] = []  # with --json: the scores of many classes take memory
    predicted = 0
    pixels_each = max(form.height * form.width, shape[1] * shape[2])
    at_a_time = max(1, min(PREDICTED_AT_A_TIME, MOST_PIXELS_AT_A_TIME // pixels_each))
    for start in range(0, len(paths), at_a_time):
        if read := _readable(paths[start : start + at_a_time], form, most or MAX_PIXELS):
            stacked = torch.stack([pixels for _, pixels in read])
            inputs = resize(normalised(stacked, form, dtype), shape[1:])
            with torch.no_grad():
                scores = model(inputs.to(device)).softmax(dim=1).tolist()
            printed = _print_best([path for path, _ in read], scores, classes, arguments["top"])
            predicted += len(printed)
            records += printed if arguments["json"] else []
    write_json(arguments["json"], records)
    bad = len(paths) - predicted
    if not predicted or (bad and not arguments["skip_bad_samples"]):
        advice = ". With --skip-bad-samples that is no failure" if predicted else ""
        raise HvdtrainError(f"{bad:,} of {counted(len(paths), 'image')} could not be read{advice}")
    return EXIT_OK


def read_checkpoint(source: Path) -> Saved:
    """Return the checkpoint of a run's or checkpoint's folder. Raises UsageError."""
    path = find_weights(source)
    if not path.is_dir():
        raise UsageError(f"{source}: a run's folder or a checkpoint's is needed, not weights alone")
    try:
        return Saved(source, path, *load_weights(path))
    except DamagedCheckpoint as error:
        raise UsageError(str(error)) from error


def _chosen(
    source: Path, stored: dict[str, Any], names: Sequence[str], arguments: dict[str, Any]
) -> dict[str, Any]:
    """Return `stored` with those of `names` replaced that the command line gives. Raises UsageError
    if the checkpoint alone names code to run, unless --trust-code is given.
    """
    explicit = _explicit(arguments, names)
    left = {
        f"--{name}": stored.get(name)
        for name in MAY_NAME_CODE
        if name in names and name not in explicit
    }
    if not arguments["trust_code"]:
        refuse_code_of(source, left)
        refuse_data_of(source, left.get("--data"))
    return stored | explicit


def _explicit(arguments: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the values of those of `names` that the command line gives."""
    return {name: arguments[name] for name in names if arguments.get(name) is not None}


def _parsed(source: Path, parse: Callable[..., Any], *values: Any) -> Any:
    """Return what `parse` makes of values of a checkpoint. Raises UsageError for a ValueError."""
    try:
        return parse(*values)
    except ValueError as error:
        raise UsageError(f"{source}: its checkpoint is not what a run writes: {error}") from error


def _refuse_other_sizes(saved: Saved, name: str, build: Callable[[], torch.nn.Module]) -> None:
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


def _with_weights(model: torch.nn.Module, saved: Saved) -> torch.nn.Module:
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


def _format_of(source: Path, takeaway: Takeaway) -> ImageFormat:
    """Return how an image file is converted to an input. Raises UsageError if it is unknown."""
    if takeaway.get("images") is not None:
        _parsed(source, check, takeaway, OF_CLASSIFIERS)
        shape = takeaway.get("shape", [])
        is_whole = takeaway.keys() >= OF_CLASSIFIERS.keys() and takeaway["dtype"] in DTYPES
        if not is_whole or len(shape) != 3 or min(shape) < 1:
            raise UsageError(f"{source}: its checkpoint is not what a run writes")
        try:
            image_format = ImageFormat(**takeaway["images"])
            replace(image_format, height=shape[1], width=shape[2])  # is as bounded
            return image_format
        except (TypeError, ValueError) as error:
            raise UsageError(f"{source}: its format of images is wrong: {error}") from error
    way_out = "take its weights into a script of yours: hvdtrain export"
    if takeaway.get("task") != "classification":
        raise UsageError(f"{source}: was trained by a --task, not as a classifier; {way_out}")
    data, form = takeaway["data"], ", ".join(map(str, takeaway["shape"]))
    advice = ""
    if is_plugin(data) and takeaway["shape"][0] in (1, 3):
        advice = (
            f": give its first data set `image_format = hvdtrain.ImageFormat({form})`, or its "
            "hvdtrain.Dataset the same as `images`, and train again"
        )
    raise UsageError(
        f"{source}: was trained on --data={data}, which does not define how an image file becomes "
        f"an input{advice}; or {way_out}"
    )


def _images(names: list[str]) -> list[Path]:
    """Return the given files, and the images in and below the given folders. Raises UsageError,
    naming all paths that are missing or without images.
    """
    paths: list[Path] = []
    problems = []
    for path in map(Path, names):
        if path.is_dir():
            images, others = images_under(path)
            paths += map(Path, images)
            if not images:
                problems.append(f"{path}: no image is in this folder ({', '.join(EXTENSIONS)})")
            if others:
                complain(f"{path}: {left_out(others)}")
        elif path.exists():
            paths.append(path)
        else:
            problems.append(f"{path}: no such file or folder")
    refuse(problems)
    return paths


def _readable(
    paths: list[Path], form: ImageFormat, max_pixels: int
) -> list[tuple[Path, torch.Tensor]]:
    """Return the paths that can be read, with their pixels; print the reasons for the others."""
    read = []
    for path in paths:
        try:
            read.append((path, centred(read_image(path, form.channels, max_pixels), form)))
        except BadSample as error:
            complain(f"skipped: {error}")
    return read


def _print_best(
    paths: list[Path], predictions: list[list[float]], classes: list[str], top: int
) -> list[dict[str, Any]]:
    """Print the `top` likeliest classes of each image; return the scores of all classes."""
    records = []
    for path, scores in zip(paths, predictions, strict=True):
        best = sorted(range(len(scores)), key=lambda number: -scores[number])[:top]
        say(f"{path}: " + ", ".join(f"{classes[number]} {scores[number]:.3f}" for number in best))
        records.append({"image": str(path), "scores": dict(zip(classes, scores, strict=True))})
    return records
