"""`hvdtrain evaluate` and `hvdtrain predict`: what was trained, on one device, without Horovod."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from hvdtrain.checkpoint import DamagedCheckpoint, load_weights
from hvdtrain.cli.options import build_config, train_options
from hvdtrain.cli.prepare import choose_device
from hvdtrain.cli.tasks import DTYPES, build_data, build_model, build_task
from hvdtrain.cli.trained_options import OVERRIDES
from hvdtrain.data import Shares
from hvdtrain.data.image_folder import centred, normalised, read_image
from hvdtrain.data.resize import resize
from hvdtrain.data.splits import ImageFormat
from hvdtrain.data.streaming import BadSample
from hvdtrain.errors import EXIT_OK, UsageError
from hvdtrain.evaluate import Evaluation, class_accuracy
from hvdtrain.evaluate import evaluate as evaluate_split
from hvdtrain.exchange import SingleProcess
from hvdtrain.log import say
from hvdtrain.models import build_model as build_network
from hvdtrain.tasks import Task
from hvdtrain.topology import Topology
from hvdtrain.weights import find_weights

PREDICTED_AT_A_TIME = 64
Takeaway = dict[str, Any]
Weights = dict[str, torch.Tensor]


def evaluate(arguments: dict[str, Any]) -> int:
    """Evaluate a checkpoint on its validation data, or on other data. Returns the exit code."""
    source = Path(arguments["source"])
    weights, takeaway = read_checkpoint(source)
    if "config" not in takeaway:
        raise UsageError(f"{source}: its checkpoint does not say how it was trained")
    known = train_options()
    stored = {name: value for name, value in takeaway["config"].items() if name in known}
    chosen = {name: arguments[name] for name in OVERRIDES if arguments.get(name) is not None}
    fixed = {"device": "auto", "resume": None, "data_placement": "shared"}
    config = build_config(stored | fixed | chosen, [])
    task = build_task(config)
    _refuse_other_classes(task, takeaway, config.data.data)
    data = build_data(task, config)
    device = choose_device(config.model.device, Topology())
    model = _with_weights(build_model(task, config), weights, source).to(device)
    found = evaluate_split(model, task, data.valid, Shares(1), SingleProcess(), device)
    assert found is not None
    say(_describe(found, f"{data.name}, {len(data.valid):,} samples"))
    if arguments["json"]:
        _write_json(Path(arguments["json"]), asdict(found) | {"classes": takeaway.get("classes")})
    return EXIT_OK


def predict(arguments: dict[str, Any]) -> int:
    """Tell the likeliest classes of images. Returns the exit code."""
    source = Path(arguments["source"])
    weights, takeaway = read_checkpoint(source)
    if takeaway.get("images") is None:
        raise UsageError(
            f"{source}: was not trained on images of 1 or 3 channels, so images tell it nothing"
        )
    form = ImageFormat(**takeaway["images"])
    dtype = DTYPES[takeaway["dtype"]]
    paths = _images(arguments["images"])
    pixels = _read_all(paths, form)
    outputs = len(takeaway["classes"])
    model = build_network(takeaway["model"], tuple(takeaway["shape"]), outputs, dtype)
    device = choose_device(arguments["device"] or "auto", Topology())
    model = _with_weights(model, weights, source).to(device).eval()
    size = (takeaway["shape"][1], takeaway["shape"][2])
    predictions = []
    with torch.no_grad():
        for start in range(0, len(paths), PREDICTED_AT_A_TIME):
            batch = torch.stack(pixels[start : start + PREDICTED_AT_A_TIME])
            inputs = normalised(batch, form, dtype)
            if inputs.shape[2:] != size:
                inputs = resize(inputs, size)
            predictions += model(inputs.to(device)).softmax(dim=1).cpu().tolist()
    _tell(paths, predictions, takeaway["classes"], arguments)
    return EXIT_OK


def read_checkpoint(source: Path) -> tuple[Weights, Takeaway]:
    """Weights and what is told of them. Raises UsageError unless `source` is a run or checkpoint
    of ours, undamaged.
    """
    place = find_weights(source)
    if not place.is_dir():
        raise UsageError(f"{source}: a run's folder or a checkpoint's is needed, not weights alone")
    try:
        return load_weights(place)
    except DamagedCheckpoint as error:
        raise UsageError(str(error)) from error


def _with_weights(model: torch.nn.Module, weights: Weights, source: Path) -> torch.nn.Module:
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise UsageError(
            f"{source}: its weights are not those of the model that it names; has the code of the "
            f"model changed? {error}"
        ) from error
    return model


def _refuse_other_classes(task: Task, takeaway: Takeaway, data: str) -> None:
    trained, own = takeaway.get("classes"), task.takeaway().get("classes")
    if trained != own:
        raise UsageError(f"--data={data}: its classes are {own}, those of the model {trained}")


def _images(given: list[str]) -> list[Path]:
    """The files, and the files in the folders."""
    paths = []
    for path in map(Path, given):
        inside = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else []
        paths += inside or [path]
    return paths


def _read_all(paths: list[Path], form: ImageFormat) -> list[torch.Tensor]:
    pixels, problems = [], []
    for path in paths:
        try:
            pixels.append(centred(read_image(path, form.channels), form))
        except BadSample as error:
            problems.append(str(error))
    if problems:
        raise UsageError(*problems)
    return pixels


def _tell(
    paths: list[Path],
    predictions: list[list[float]],
    classes: list[str],
    arguments: dict[str, Any],
) -> None:
    records = []
    for path, scores in zip(paths, predictions, strict=True):
        best = sorted(range(len(scores)), key=lambda number: -scores[number])[: arguments["top"]]
        say(f"{path}: " + ", ".join(f"{classes[number]} {scores[number]:.3f}" for number in best))
        records.append({"image": str(path), "scores": dict(zip(classes, scores, strict=True))})
    if arguments["json"]:
        _write_json(Path(arguments["json"]), records)


def _describe(found: Evaluation, what: str) -> str:
    lines = [what, f"  loss {found.loss:.6g}"]
    lines += [f"  {name} {value:.4f}" for name, value in found.metrics.items()]
    if "confusion" in found.tables:
        seen = [part for part in class_accuracy(found.tables["confusion"]) if part is not None]
        lines.append(f"  worst class {min(seen):.4f}, best class {max(seen):.4f}")
    return "\n".join(lines)


def _write_json(path: Path, value: Any) -> None:
    try:
        path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")
    except OSError as error:
        raise UsageError(f"--json={path}: cannot be written: {error.strerror}") from error
