"""Which files of a folder are images, and what is reported of the others."""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hvdtrain.data import Dataset, ReadOptions, load_dataset
from hvdtrain.data.feeding import stream
from hvdtrain.data.image_files import EXTENSIONS, images_under, images_under_each, left_out
from hvdtrain.data.image_folder import read_image
from hvdtrain.data.reading import BadSample
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


def test_what_systems_put_beside_images_is_no_sample_and_no_class(tmp_path: Path) -> None:
    """Fails when a copy that a notebook keeps, a thumbnail, or the metadata of an archive is
    trained on or becomes a class, or is left out without a word.
    """
    folder = make_folder(tmp_path / ".cache", 2, 1)  # what lies in a hidden folder may be shown
    hidden = [
        *("train/cat/.ipynb_checkpoints/000-checkpoint.png", "train/cat/._000.png"),
        *("train/cat/.thumb.png", "train/dog/@eaDir/000.png/SYNOFILE_THUMB_M.jpg"),
        *("train/__MACOSX/cat/._000.png", "train/__MACOSX/cat/001.png"),
        *("train/.ipynb_checkpoints/001.png", "valid/lost+found/003.jpg"),
    ]
    for name in hidden:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"no image")
    data = load(folder)
    assert (data.class_names, len(data.train), len(data.valid)) == (("cat", "dog"), 4, 2)
    assert "; 8 files that are hidden or of other types left out (such as " in data.note
    assert images_under(folder / "train" / "cat")[0] == [
        f"{folder}/train/cat/{name}.png" for name in ("000", "001")
    ]


def test_a_class_without_images_is_reported_with_what_its_folder_holds(tmp_path: Path) -> None:
    """Fails when a folder of unknown types looks like an empty one."""
    folder = make_folder(tmp_path, 2, 1)
    for part in ("train", "valid"):
        make_class(folder / part / "emu", 0)
    (folder / "train" / "emu" / "raw.cr2").write_text("")
    with pytest.raises(UsageError) as caught:
        load(folder)
    reported = str(caught.value)
    assert f"left out (such as {folder}/train/emu/raw.cr2)" in reported and ".gif" in reported


def test_messages_of_the_system_are_shown_without_their_number(tmp_path: Path) -> None:
    """Fails when a missing file is reported as '[Errno 2]', or its name is printed twice."""
    with pytest.raises(BadSample) as caught:
        read_image(tmp_path / "away.png", 3)
    expected = f"{tmp_path / 'away.png'} cannot be read as an image: No such file or directory"
    assert str(caught.value) == expected


@pytest.mark.timeout(60)
def test_links_to_folders_around_them_have_no_end(tmp_path: Path) -> None:
    """Fails when an image is found more than once for a link to a folder that it lies in (`..` of
    the class finds the images of all classes), or when other links are not followed.
    """
    folder = make_folder(tmp_path / "data", 2, 1)
    make_class(tmp_path / "elsewhere", 3)
    cat = folder / "train" / "cat"
    for name, target in {"up": "..", "same": ".", "top": tmp_path, "more": "deep/x"}.items():
        (cat / name).symlink_to(target)
    make_class(cat / "deep" / "x", 1)
    (cat / "deep" / "x" / "back").symlink_to(cat)
    (folder / "train" / "dog" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "again").symlink_to("../elsewhere")
    places = ["000.png", "001.png", "deep/x/000.png", "more/000.png"]
    assert images_under(cat) == ([f"{cat}/{place}" for place in places], [])
    assert len(load(folder).train) == 4 + 2 + 3
    (folder / "train" / "dog").rename(folder / "all")
    (folder / "train" / "dog").symlink_to(tmp_path / "elsewhere")  # a class elsewhere is one
    (folder / "train" / "emu").symlink_to(tmp_path / "elsewhere")
    assert len(images_under(folder / "train" / "emu")[0]) == 3
    (folder / "train" / "gnu").symlink_to(".")
    assert images_under(folder / "train" / "gnu") == ([], [])


def test_many_classes_are_listed_with_one_look_around(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if each class costs a look at all folders around it, whose number is no matter of its
    own: a set of 200,000 classes then takes minutes to begin.
    """
    folder = tmp_path.joinpath(*"abcdefghijklmnop")
    names = [f"{number:03}" for number in range(100)]
    for name in names:
        make_class(folder / name, 1)
    looks, stat = [], os.stat
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", lambda path, **how: looks.append(path) or stat(path, **how))
        found = list(images_under_each(folder, names))
    assert found == [([f"{folder}/{name}/000.png"], []) for name in names]
    assert len(names) < len(looks) < 3 * len(names)  # each as a link, and as a folder


def test_a_folder_is_named_by_any_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when `.` or `..` is taken for a link to a folder around it."""
    make_class(tmp_path / "data" / "cat", 2)
    (tmp_path / "data" / "cat" / "deep").mkdir()
    monkeypatch.chdir(tmp_path / "data" / "cat" / "deep")
    for name, count in (("..", 2), (".", 0), ("../..", 2), ("../../cat", 2), ("../deep/..", 2)):
        assert len(images_under(Path(name))[0]) == count, name


def png_header(width: int, height: int) -> bytes:
    """A PNG file that states its size, and ends."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        ends = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", ends)

    sizes = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", sizes) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


@pytest.mark.parametrize("height", [9_000, 13_000, 40_000])
def test_images_that_unpack_to_gigabytes_are_refused(height: int, tmp_path: Path) -> None:
    """Fails when a small file may take any amount of memory, or the file is not named,
    how large, and by what flag it is let in.
    """
    path = tmp_path / "large.png"
    path.write_bytes(png_header(13_000, height))
    limit = Image.MAX_IMAGE_PIXELS
    with pytest.raises(BadSample) as caught:
        read_image(path, 3)
    expected = f"it has {13_000 * height:,} pixels, and --max-image-pixels=89478485 is the limit"
    assert str(caught.value) == f"{path} cannot be read as an image: {expected}"
    path.write_bytes(png_header(13, height))
    with pytest.raises(BadSample) as caught:  # it is let in, but has no pixels
        read_image(path, 3, 13 * height)
    assert "--max-image-pixels" not in str(caught.value)
    assert limit == Image.MAX_IMAGE_PIXELS


def test_the_largest_image_is_a_choice(tmp_path: Path) -> None:
    """Fails when the flag does not reach the reader, or one pixel too many is no bad sample."""
    folder = make_folder(tmp_path, 2, 1)
    Image.new("RGB", (10, 29)).save(folder / "train" / "cat" / "002.png")
    name = f"imagefolder:{folder}"
    for most, bad in ((289, 1), (290, 0)):
        options = ReadOptions(image_size=12, skip_bad=True, max_pixels=most)
        data = load_dataset(name, Path(), 0, torch.float64, options)
        (loaded,) = stream(data.train, [np.array([0, 2])], 0)
        assert (loaded.samples, loaded.bad) == (2 - bad, bad)
    with pytest.raises(
        UsageError, match="--max-image-pixels=290: has no meaning for --data=digits"
    ):
        load_dataset("digits", Path(), 0, torch.float64, ReadOptions(max_pixels=290))
