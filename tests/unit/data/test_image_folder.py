"""Image folders: files of every kind, what chance does to them, and the layouts."""

from __future__ import annotations

import itertools
from multiprocessing import forkserver
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hvdtrain.data import Dataset, ReadOptions, Split, load_dataset
from hvdtrain.data.feeding import stream
from hvdtrain.data.image_folder import read_image
from hvdtrain.data.reading import BadSample
from hvdtrain.errors import TrainingError, UsageError
from tests.unit.folders import SIZE, make_class, make_folder, pixels

ORIENTATION = 0x0112  # the EXIF tag
JPEG_ERROR = 24  # of 255, for smooth pictures at quality 95


def load(folder: Path, seed: int = 0, **options) -> Dataset:
    chosen = ReadOptions(image_size=12, **options)
    return load_dataset(f"imagefolder:{folder}", Path(), seed, torch.float64, chosen)


def grey(number: int) -> np.ndarray:
    return pixels(number)[:, :, 2]


def save(folder: Path, kind: str) -> tuple[Path, np.ndarray, int]:
    """The file, what a person sees in it (as RGB), and by how much a pixel may differ."""
    rgb, path = pixels(3), folder / f"{kind}.png"
    picture, seen, error = Image.fromarray(rgb), rgb, 0
    options: dict = {}
    if kind in ("jpeg", "cmyk", *(f"exif{n}" for n in range(1, 9))):
        path, error = path.with_suffix(".jpg"), JPEG_ERROR
        options = {"quality": 95, "subsampling": 0}
    if kind == "cmyk":
        picture = picture.convert("CMYK")
    elif kind.startswith("exif"):
        undone = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # Image.Transpose that the tag undoes
        number = int(kind[-1])
        if number > 1:
            picture = picture.transpose(Image.Transpose(undone[number]))
        exif = Image.Exif()
        exif[ORIENTATION] = number
        options["exif"] = exif
    elif kind == "grey":
        picture, seen = Image.fromarray(grey(3)), np.stack([grey(3)] * 3, axis=2)
    elif kind == "grey with alpha":
        picture, seen = Image.fromarray(grey(3)).convert("LA"), np.stack([grey(3)] * 3, axis=2)
    elif kind == "alpha":
        picture = picture.convert("RGBA")
    elif kind.startswith("palette"):
        picture = picture.quantize(64)
        seen = np.asarray(picture.convert("RGB"))
        options = {"transparency": bytes(range(64))} if "transparency" in kind else {}
    elif kind == "16 bits":
        picture = Image.fromarray(grey(3).astype(np.uint16) * 257)
        seen = np.stack([grey(3)] * 3, axis=2)
    elif kind == "1 bit":
        picture = Image.fromarray(grey(3) > 127)
        seen = np.stack([(grey(3) > 127) * np.uint8(255)] * 3, axis=2)
    picture.save(path, **options)
    return path, seen, error


KINDS = (
    *("rgb", "jpeg", "grey", "grey with alpha", "alpha", "palette", "palette with transparency"),
    *("16 bits", "1 bit", "cmyk", *(f"exif{number}" for number in range(1, 9))),
)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_image_is_read_as_it_is_seen(kind: str, tmp_path: Path) -> None:
    """Fails when a kind of file warns, is cut off (16 bits), or its EXIF rotation is not undone."""
    path, seen, error = save(tmp_path, kind)
    read = np.asarray(read_image(path, 3))
    assert read.shape == seen.shape == (*reversed(SIZE), 3)
    assert np.abs(read.astype(int) - seen).max() <= error
    assert read_image(path, 1).mode == "L"


@pytest.mark.parametrize("kind", ["text", "nothing", "half a PNG", "half a JPEG", "32 bits"])
def test_what_is_no_image_is_named(kind: str, tmp_path: Path) -> None:
    """Fails when a broken file is read as something, or the message does not name it."""
    path = tmp_path / "broken.png"
    if kind == "32 bits":
        path = path.with_suffix(".tiff")
        Image.fromarray(pixels(1)[:, :, 0].astype(np.int32) * 1000).save(path)
    elif kind.startswith("half"):
        noise = np.random.default_rng(0).integers(256, size=(60, 60, 3), dtype=np.uint8)
        Image.fromarray(noise).save(path, format=kind.split()[-1])
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    else:
        path.write_bytes(b"no image" if kind == "text" else b"")
    with pytest.raises(BadSample, match="cannot be read as an image: ") as caught:
        read_image(path, 3)
    assert str(path) in str(caught.value) and issubclass(BadSample, TrainingError)


@pytest.mark.parametrize("readers", [0, 1])
def test_a_broken_image_ends_training_or_is_counted(readers: int, tmp_path: Path, capfd) -> None:
    """Fails when it is not named, with may_skip still trained on, or not counted."""
    forkserver._forkserver._stop()  # readers write where the test that started it did
    folder = make_folder(tmp_path)
    broken = folder / "train" / "cat" / "002.png"
    broken.write_bytes(b"broken")
    batches = [np.array([2, 7, 1]), np.array([2]), np.array([0])]
    with pytest.raises(TrainingError) as caught:
        list(stream(load(folder, readers=readers).train, batches, 0))
    assert str(broken) in str(caught.value)
    assert "Traceback" not in str(caught.value)
    skipping = load(folder, readers=readers, skip_bad=True).train
    loaded = list(stream(skipping, batches, 0))
    assert [(one.samples, one.bad) for one in loaded] == [(2, 1), (0, 1), (1, 0)]
    assert [one.batch[1].tolist() for one in loaded] == [[1, 0], [], [0]]
    assert loaded[1].batch[0].shape == (0, 3, 12, 12)
    assert str(broken) in capfd.readouterr().err


def one_by_one(split: Split, order: list[int], size: int, epoch: int) -> dict[int, torch.Tensor]:
    """Each sample's image, read in this order, in batches of `size`."""
    batches = [np.array(order[at : at + size]) for at in range(0, len(order), size)]
    images: dict[int, torch.Tensor] = {}
    for indices, loaded in zip(batches, stream(split, batches, epoch), strict=True):
        images |= dict(zip(indices.tolist(), loaded.on()[0], strict=True))
    return images


def test_chance_is_a_matter_of_seed_epoch_and_sample_alone(tmp_path: Path) -> None:
    """Fails when order, batch, reader or earlier draws change an image, or an epoch does not."""
    folder = make_folder(tmp_path)
    everyone = list(range(12))
    expected = one_by_one(load(folder).train, everyone, 12, epoch=3)
    for readers, size in ((0, 5), (2, 3)):
        torch.manual_seed(readers)
        order = np.random.default_rng(size).permutation(12).tolist()
        split = load(folder, readers=readers).train
        for epoch in (0, 3):  # the transforms have drawn before
            images = one_by_one(split, order, size, epoch)
        assert all(torch.equal(images[number], expected[number]) for number in everyone)
    alone = load(folder).train.batch(np.array([7]), 3)[0][0]
    assert torch.equal(alone, expected[7])
    for others in (
        one_by_one(load(folder).train, everyone, 12, epoch=4),
        one_by_one(load(folder, seed=1).train, everyone, 12, epoch=3),
    ):
        same = sum(torch.equal(others[number], expected[number]) for number in everyone)
        assert same < 3


def test_the_generator_of_torch_is_left_alone(tmp_path: Path) -> None:
    """Fails when reading draws from, or seeds, the generator that dropout draws from."""
    data = load(make_folder(tmp_path))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    data.train.batch(np.arange(4), 1)
    assert torch.equal(torch.get_rng_state(), before)


def test_validation_is_not_random(tmp_path: Path) -> None:
    """Fails when validation images are cropped or mirrored at random, or not in the centre."""
    folder = make_folder(tmp_path)
    first = load(folder).valid.batch(np.arange(6), 0)
    again = load(folder, seed=9, hflip=1.0, crop_scale=0.1).valid.batch(np.arange(6), 5)
    assert all(map(torch.equal, first, again))
    plain = load(folder, hflip=0.0, crop_scale=1.0).train  # no chance either: the same way
    mirrored = load(folder, hflip=1.0, crop_scale=1.0).train.batch(np.arange(12), 2)[0]
    assert torch.equal(plain.batch(np.arange(12))[0].flip(3), mirrored)


def test_pixels_are_normalised_as_imagenet(tmp_path: Path) -> None:
    """Fails when mean or deviation are of other channels, or the type is not the chosen one."""
    for part, label in itertools.product(("train", "val"), ("a", "b")):
        (tmp_path / part / label).mkdir(parents=True)
        Image.new("RGB", SIZE, (255, 0, 51)).save(tmp_path / part / label / "one.PNG")
    inputs, labels = load(tmp_path).valid.batch(np.arange(2))
    assert inputs.dtype == torch.float64 and inputs.shape == (2, 3, 12, 12)
    expected = [(1 - 0.485) / 0.229, (0 - 0.456) / 0.224, (0.2 - 0.406) / 0.225]
    assert inputs.amin((0, 2, 3)).tolist() == pytest.approx(expected)
    assert inputs.amax((0, 2, 3)).tolist() == pytest.approx(expected)
    assert labels.tolist() == [0, 1] and labels.dtype == torch.int64


def test_classes_are_sorted_and_files_found_in_subfolders(tmp_path: Path) -> None:
    """Fails when the order is that of the disk, or hidden folders and other files count."""
    for name in ("zebra", "Ant", "bee", ".git"):
        make_class(tmp_path / "train" / name / "more", 2)
        make_class(tmp_path / "validation" / name, 1)
    (tmp_path / "train" / "notes.txt").write_text("of no class")
    (tmp_path / "train" / "bee" / "notes.txt").write_text("no image")
    data = load(tmp_path)
    assert data.class_names == ("Ant", "bee", "zebra") and data.classes == 3
    assert data.train.batch(np.arange(6))[1].tolist() == [0, 0, 1, 1, 2, 2]
    assert (len(data.train), len(data.valid)) == (6, 3)


@pytest.mark.parametrize("part", [0.2, 0.5, 0.3, 0.9])
def test_valid_split_takes_its_part_of_each_class(part: float, tmp_path: Path) -> None:
    """Fails when a class gives more or less than its part, a file is in both, or chance decides."""
    counts = {"a": 10, "b": 3, "c": 7}
    for name, count in counts.items():
        make_class(tmp_path / name, count)

    def files(split: Split) -> list[tuple[str, int]]:
        return split._samples.files  # type: ignore[attr-defined]

    data, again = load(tmp_path, valid_split=part), load(tmp_path, seed=4, valid_split=part)
    assert files(data.valid) == files(again.valid) and files(data.train) == files(again.train)
    valid = [label for _, label in files(data.valid)]
    assert [valid.count(n) for n in range(3)] == [int(c * part + 1e-9) for c in counts.values()]
    together = [file for split in (data.train, data.valid) for file, _ in files(split)]
    assert len(set(together)) == len(together) == sum(counts.values())


def layout(folder: Path, kind: str) -> float | None:
    """Make what is wrong; returns --valid-split."""
    if kind == "no folder":
        folder.rmdir()
    elif kind == "a file":
        folder.rmdir()
        folder.write_text("")
    elif kind == "train is a file":
        (folder / "train").write_text("")
        make_class(folder / "valid" / "cat", 1)
    elif kind in ("no valid", "no train"):
        make_folder(folder)
        (folder / kind.split()[1]).rename(folder.with_name("elsewhere"))
    elif kind == "no parts":
        make_class(folder / "cat", 2)
    elif kind == "split of parts":
        make_folder(folder)
        return 0.25
    elif kind == "nothing left":
        make_class(folder / "cat", 2)
        make_class(folder / "dog", 2)
        return 0.25
    elif kind == "one class":
        make_class(folder / "cat", 2)
        return 0.25
    elif kind == "empty classes":
        make_folder(folder)
        for name in ("emu", "fox"):
            (folder / "train" / name).mkdir()
        (folder / "valid" / "emu").mkdir()
    elif kind == "other classes":
        make_folder(folder)
        (folder / "valid" / "dog").rename(folder / "valid" / "dogs")
    return None


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("nothing", ["has no train/ and valid/", "--valid-split"]),
        ("no folder", ["is not a folder"]),
        ("a file", ["is not a folder"]),
        ("train is a file", ["train cannot be read: Not a directory", "valid has 1 folder "]),
        ("no valid", ["has train/, but no valid/", "--valid-split"]),
        ("no train", ["has valid/, but no train/", "--valid-split"]),
        ("no parts", ["has no train/ and valid/", "--valid-split"]),
        ("split of parts", ["--valid-split=0.25: ", "has train/ and valid/ already"]),
        ("nothing left", ["--valid-split=0.25: ", "of 4 images", "4 to train on and 0"]),
        ("one class", ["has 1 folder of classes (cat)", "2 or more"]),
        ("empty classes", ["train/emu has no images", "train/fox has no", "valid/emu has no"]),
        ("other classes", ["same classes", "first: ['dog']", "second: ['dogs']"]),
    ],
)
def test_wrong_layouts_are_reported(kind: str, expected: list[str], tmp_path: Path) -> None:
    """Fails when a layout is read as another, or only the first of several faults is reported."""
    folder = tmp_path / "images"
    folder.mkdir()
    valid_split = layout(folder, kind)
    with pytest.raises(UsageError) as caught:
        load(folder, valid_split=valid_split)
    assert all(text in str(caught.value) for text in [str(folder), *expected])
