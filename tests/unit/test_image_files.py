"""Which files of a folder are images, and what is said of the others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hvdtrain.data import Dataset, ReadOptions, load_dataset
from hvdtrain.data.image_files import EXTENSIONS, images_under, left_out
from hvdtrain.data.image_folder import read_image
from hvdtrain.data.streaming import BadSample
from hvdtrain.errors import UsageError
from tests.unit.folders import make_class, make_folder, pixels


def load(folder: Path, readers: int = 0) -> Dataset:
    options = ReadOptions(image_size=12, readers=readers)
    return load_dataset(f"imagefolder:{folder}", Path(), 0, torch.float64, options)


@pytest.mark.parametrize("extension", EXTENSIONS)
def test_every_type_that_counts_as_an_image_can_be_read(extension: str, tmp_path: Path) -> None:
    """Fails when an extension is listed that Pillow does not read under that name."""
    Image.init()
    if Image.EXTENSION.get(extension) not in Image.SAVE:
        pytest.skip(f"this Pillow was built without {extension}")
    path = tmp_path / f"one{extension}"
    grey = extension in (".pgm", ".pbm")
    Image.fromarray(pixels(1)).convert("1" if extension == ".pbm" else "L" if grey else "RGB").save(
        path
    )
    assert read_image(path, 3).mode == "RGB"
    assert images_under(tmp_path) == ([str(path)], [])


def test_gifs_are_trained_on(tmp_path: Path) -> None:
    """Fails when a GIF, of one frame or several, is left out, or its first frame is not read."""
    folder = make_folder(tmp_path, 2, 1)
    frames = [Image.new("RGB", (9, 9), colour) for colour in ("red", "blue")]
    frames[0].save(folder / "train" / "cat" / "A.GIF", save_all=True, append_images=frames[1:])
    data = load(folder)
    assert len(data.train) == 5 and "left out" not in data.note
    image = data.train.batch(np.array([2]))[0][0]  # after 000.png and 001.png
    assert (image[0] > 2).all() and (image[2] < 0).all()


def test_files_of_other_types_are_counted_and_one_is_named(tmp_path: Path) -> None:
    """Fails when the header is silent about files that are left out, or counts hidden ones."""
    folder = make_folder(tmp_path, 2, 1)
    for name in ("train/dog/notes.txt", "train/cat/b/x.heic", "valid/cat/y", "valid/dog/.DS_Store"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("")
    assert load(folder).note.endswith(
        f"0 readers a worker; 3 files of other types left out (such as {folder}/train/cat/b/x.heic)"
    )
    assert left_out(["a"]) == "1 file of other types left out (such as a)"
    assert " 1 reader a worker" in load(folder, readers=1).note


def test_a_class_without_images_tells_what_is_there_instead(tmp_path: Path) -> None:
    """Fails when a folder of unknown types looks like an empty one."""
    folder = make_folder(tmp_path, 2, 1)
    for part in ("train", "valid"):
        make_class(folder / part / "emu", 0)
    (folder / "train" / "emu" / "raw.cr2").write_text("")
    with pytest.raises(UsageError) as caught:
        load(folder)
    told = str(caught.value)
    assert f"left out (such as {folder}/train/emu/raw.cr2)" in told and ".gif" in told


def test_what_the_system_says_is_told_without_its_number(tmp_path: Path) -> None:
    """Fails when a missing file is told as '[Errno 2]', or its name is told twice."""
    with pytest.raises(BadSample) as caught:
        read_image(tmp_path / "away.png", 3)
    expected = f"{tmp_path / 'away.png'} cannot be read as an image: No such file or directory"
    assert str(caught.value) == expected
