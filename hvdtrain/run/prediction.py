"""`hvdtrain predict`: the most likely classes of image files."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hvdtrain.config.plugins import is_plugin
from hvdtrain.data.image_files import EXTENSIONS, images_under, left_out
from hvdtrain.data.image_folder import centred, read_image
from hvdtrain.data.reading import BadSample
from hvdtrain.data.splits import MAX_PIXELS, ImageFormat
from hvdtrain.data.transforms import normalised, resize
from hvdtrain.documents import check
from hvdtrain.errors import HvdtrainError, UsageError, refuse
from hvdtrain.files import write_json
from hvdtrain.log import complain, counted, say
from hvdtrain.models import build_model
from hvdtrain.run.joined import JoinedWorkers
from hvdtrain.run.tasks import DTYPES
from hvdtrain.run.trained import (
    chosen,
    parsed,
    read_checkpoint,
    refuse_other_sizes,
    with_weights,
)
from hvdtrain.topology import Topology
from hvdtrain.train.devices import choose_device

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


class Classified(NamedTuple):
    """The classes of an image."""

    line: str  # with the most likely ones, to be printed
    record: dict[str, Any] | None  # with the scores of all, if these are to be written


@dataclass(frozen=True)
class Classifier:
    """A trained model on its device, and how it takes images."""

    model: torch.nn.Module
    device: torch.device
    form: ImageFormat
    dtype: torch.dtype
    size: tuple[int, int]  # height and width of an input
    classes: Sequence[str]
    max_pixels: int  # of an image

    @property
    def at_a_time(self) -> int:
        """Return the number of images to classify at a time."""
        pixels_each = max(self.form.height * self.form.width, math.prod(self.size))
        return max(1, min(PREDICTED_AT_A_TIME, MOST_PIXELS_AT_A_TIME // pixels_each))

    def predict(self, paths: Sequence[Path], top: int, records: bool) -> list[Classified]:
        """Return the classes of the images that can be read; print the reasons for the others."""
        read = _readable(paths, self.form, self.max_pixels)
        if not read:
            return []
        stacked = torch.stack([pixels for _, pixels in read])
        inputs = resize(normalised(stacked, self.form, self.dtype), self.size)
        with torch.no_grad():
            scores = self.model(inputs.to(self.device)).softmax(dim=1).tolist()
        predictions = []
        for (path, _), each in zip(read, scores, strict=True):
            best = sorted(range(len(each)), key=each.__getitem__, reverse=True)[:top]
            text = ", ".join(f"{self.classes[number]} {each[number]:.3f}" for number in best)
            record = {"image": str(path), "scores": dict(zip(self.classes, each, strict=True))}
            predictions.append(Classified(f"{path}: {text}", record if records else None))
        return predictions


def predict(arguments: dict[str, Any], workers: JoinedWorkers) -> None:
    """Collective: classify images; the first worker prints their likeliest classes, in order.

    Each worker names those images of its own that it cannot read. Raises HvdtrainError if there are
    any, unless they are to be skipped.
    """
    exchange, is_first = workers.exchange, workers.is_first
    listed = workers.run("images", lambda: _images(arguments["images"]) if is_first else [])
    paths = exchange.broadcast_object(listed, "hvdtrain.predict.images")
    classifier = workers.run("classifier", lambda: _classifier(arguments, workers.topology))
    workers.check_same(classifier.model)
    at_a_time, top, has_file = classifier.at_a_time, arguments["top"], bool(arguments["json"])
    records: list[dict[str, Any] | None] = []  # with --json: the scores of many classes take memory
    predicted = 0
    for first in range(0, len(paths), at_a_time * exchange.size):
        workers.is_stopped()
        start = first + exchange.rank * at_a_time
        part = paths[start : start + at_a_time]
        predictions = workers.run("predict", partial(classifier.predict, part, top, has_file))
        for of_rank in exchange.all_gather_object(predictions, "hvdtrain.predict.classes"):
            predicted += len(of_rank)
            for prediction in of_rank if is_first else ():
                say(prediction.line)
                records += [prediction.record] if has_file else []
    workers.run("json", lambda: write_json(arguments["json"], records) if is_first else None)
    bad = len(paths) - predicted
    if not predicted or (bad and not arguments["skip_bad_samples"]):
        advice = ". With --skip-bad-samples that is no failure" if predicted else ""
        raise HvdtrainError(f"{bad:,} of {counted(len(paths), 'image')} could not be read{advice}")


def _classifier(arguments: dict[str, Any], topology: Topology) -> Classifier:
    """Return the model of a checkpoint. Raises UsageError if it does not classify images."""
    saved = read_checkpoint(Path(arguments["source"]))
    source, takeaway = saved.source, saved.takeaway
    form, dtype = _format_of(source, takeaway), DTYPES[takeaway["dtype"]]
    takeaway = chosen(source, takeaway, ("model",), arguments)
    classes, shape = takeaway["classes"], tuple(takeaway["shape"])
    build = partial(build_model, takeaway["model"], shape, len(classes), dtype)
    refuse_other_sizes(saved, takeaway["model"], build)
    device = choose_device(arguments["device"], topology)
    model = with_weights(build(), saved).to(device).eval()
    most = arguments["max_image_pixels"] or MAX_PIXELS
    return Classifier(model, device, form, dtype, shape[1:], classes, most)


def _format_of(source: Path, takeaway: Takeaway) -> ImageFormat:
    """Return how an image file is converted to an input. Raises UsageError if it is unknown."""
    if takeaway.get("images") is not None:
        parsed(source, check, takeaway, OF_CLASSIFIERS)
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
    paths: Sequence[Path], form: ImageFormat, max_pixels: int
) -> list[tuple[Path, torch.Tensor]]:
    """Return the paths that can be read, with their pixels; print the reasons for the others."""
    read = []
    for path in paths:
        try:
            read.append((path, centred(read_image(path, form.channels, max_pixels), form)))
        except BadSample as error:
            complain(f"skipped: {error}")
    return read
