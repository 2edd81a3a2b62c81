"""What the data sets hold."""

from __future__ import annotations

import gzip
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from hvdtrain.data import Split, builtin, load_dataset
from hvdtrain.errors import UsageError
from hvdtrain.models import fit_dataset
from tests.fashion import idx_bytes


def everything(split: Split) -> tuple[torch.Tensor, torch.Tensor]:
    return split.batch(np.arange(len(split)))


def load(name: str, folder: Path = Path("data"), seed: int = 0, dtype=torch.float32):
    return load_dataset(name, folder, seed, dtype)


def test_digits_are_all_there_once() -> None:
    """Fails when an image is lost, or stands in both splits (the images are counted as a bag)."""
    from sklearn.datasets import load_digits

    data = load("digits", dtype=torch.float64)
    bag: Counter[tuple[bytes, int]] = Counter()
    for split in (data.train, data.valid):
        inputs, labels = everything(split)
        assert inputs.shape == (len(split), 1, 8, 8) and labels.dtype == torch.int64
        assert inputs.min() == 0 and inputs.max() == 1
        bag.update((row.numpy().tobytes(), int(y)) for row, y in zip(inputs, labels, strict=True))
    pixels, labels = load_digits(return_X_y=True)
    rows = (pixels / 16).reshape(-1, 1, 8, 8)
    assert bag == Counter((row.tobytes(), int(y)) for row, y in zip(rows, labels, strict=True))
    assert bag.total() == 1797 and (data.shape, data.classes) == ((1, 8, 8), 10)


def test_digits_are_split_by_class_and_for_good() -> None:
    """Fails when the seed moves the split, or a class has less than its fifth for validation."""
    data, again = load("digits"), load("digits", seed=5)
    assert (len(data.train), len(data.valid)) == (1433, 364)
    for one, other in ((data.train, again.train), (data.valid, again.valid)):
        assert all(map(torch.equal, everything(one), everything(other)))
    train, valid = (torch.bincount(everything(s)[1]) for s in (data.train, data.valid))
    assert torch.equal(valid, (train + valid + 4) // 5)


def test_synthetic_samples_are_pure_functions_of_their_number() -> None:
    """Fails when a sample depends on its batch, on an earlier one, or not on the seed."""
    name = "synthetic:3x5x4,classes=7,samples=1000"
    data, again, other = load(name), load(name), load(name, seed=1)
    numbers = np.array([999, 3, 3, 501, 0], dtype=np.int64)
    inputs, labels = data.train.batch(numbers)
    assert inputs.shape == (5, 3, 5, 4) and inputs.dtype == torch.float32
    for row, number in enumerate(numbers):
        alone = again.train.batch(np.array([number]))
        assert torch.equal(alone[0][0], inputs[row]) and torch.equal(alone[1][0], labels[row])
    assert not torch.equal(other.train.batch(numbers)[0], inputs)
    assert len(data.train) == 1000 and (data.classes, data.shape) == (7, (3, 5, 4))
    assert data.train.batch(numbers[:0])[0].shape == (0, 3, 5, 4)


def test_synthetic_valid_is_not_train() -> None:
    """Fails when validation begins with the very samples of training."""
    data = load("synthetic:1x4x4")
    assert (len(data.train), data.classes) == (65_536, 10)
    first = np.arange(len(data.valid))
    assert not torch.equal(data.valid.batch(first)[0], data.train.batch(first)[0])
    assert set(everything(data.valid)[1].tolist()) == set(range(10))


@pytest.mark.parametrize(
    "spec",
    [
        *(
            "synthetic:",
            "synthetic:1x28",
            "synthetic:1x2x3x4",
            "synthetic:0x2x2",
            "synthetic:1x-2x2",
        ),
        *("synthetic:1x2x2,", "synthetic:1x2x2,classes", "synthetic:1x2x2,colours=3"),
        *("synthetic:1x2x2,classes=1", "synthetic:1x2x2,samples=0", "synthetic:1x2x2,samples=1e3"),
        *("synthetic:axbxc", "synthetic: 1x2x2", "synthetic:1x2x2,classes=3,classes=4"),
    ],
)
def test_synthetic_syntax_is_checked(spec: str) -> None:
    """Fails when a slip is read as something else, or the message names no flag."""
    with pytest.raises(UsageError, match=f"--data={spec}: expected synthetic:CHANNELS"):
        load(spec)


def test_unknown_data_is_refused() -> None:
    """Fails when a name that is not there gets further than a list of those that are."""
    with pytest.raises(UsageError, match="--data=cifar: unknown; choose from digits, fashion"):
        load("cifar")


@pytest.fixture
def fashion(tmp_path: Path, monkeypatch) -> Path:
    """Twelve training and five validation images as IDX files; returns their folder."""
    monkeypatch.setattr(builtin, "DEBIAN_FOLDER", tmp_path / "debian")
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for part, samples in (("train", 12), ("t10k", 5)):
        pixels = np.arange(samples * 28 * 28).reshape(samples, 28, 28) % 256
        (raw / f"{part}-images-idx3-ubyte").write_bytes(idx_bytes(pixels))
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(idx_bytes(np.arange(samples) % 10))
    return raw


def test_fashion_mnist_is_read(fashion: Path) -> None:
    """Fails when images, their order, their labels or the pixel range are different."""
    data = load("fashion-mnist", fashion.parents[1], dtype=torch.float64)
    assert (len(data.train), len(data.valid), data.shape, data.classes) == (12, 5, (1, 28, 28), 10)
    inputs, labels = data.train.batch(np.array([11, 2]))
    expected = torch.arange(2 * 784, 3 * 784).reshape(1, 28, 28) % 256
    assert torch.equal(inputs[1], expected.double() / 255)
    assert labels.tolist() == [1, 2] and labels.dtype == torch.int64


@pytest.mark.parametrize("where", ["debian", "given", "raw"])
def test_compressed_fashion_mnist_is_read(fashion: Path, where: str) -> None:
    """Fails when files of Debian's package, or its folder given by --data-dir, are not read as the
    unpacked ones are.
    """
    data_dir = fashion.parents[1]
    plain = load("fashion-mnist", data_dir)
    folder = {"debian": data_dir / "debian", "given": data_dir / "own", "raw": fashion}[where]
    folder.mkdir(exist_ok=True)
    for path in list(fashion.iterdir()):
        (folder / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    compressed = load("fashion-mnist", folder if where == "given" else data_dir)
    for split, other in ((plain.train, compressed.train), (plain.valid, compressed.valid)):
        batches = [one.batch(np.arange(len(one))) for one in (split, other)]
        assert all(torch.equal(*pair) for pair in zip(*batches, strict=True))


def test_a_damaged_archive_is_refused(fashion: Path) -> None:
    """Fails when a compressed file that is cut short, or changed, ends in a traceback."""
    name = "t10k-images-idx3-ubyte"
    whole = gzip.compress((fashion / name).read_bytes())
    (fashion / name).unlink()
    for content in (whole[:-9], whole[:40] + b"X" * 20 + whole[60:], b"no gzip"):
        (fashion / f"{name}.gz").write_bytes(content)
        with pytest.raises(UsageError, match=r"--data=fashion-mnist: the t10k-\* files in "):
            load("fashion-mnist", fashion.parents[1])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train-images-idx3-ubyte", idx_bytes(np.zeros((12, 28, 28)))[:-1]),
        ("train-images-idx3-ubyte", idx_bytes(np.zeros((12, 28, 28)))[:10]),
        ("train-images-idx3-ubyte", idx_bytes(np.zeros((11, 28, 28)))),
        ("train-images-idx3-ubyte", idx_bytes(np.zeros((12, 20, 20)))),
        ("train-images-idx3-ubyte", idx_bytes(np.zeros((12, 28, 28)), kind=13)),
        ("t10k-images-idx3-ubyte", b"\x1f\x8b\x08\x00 still compressed"),
        ("t10k-images-idx3-ubyte", b""),
        ("t10k-labels-idx1-ubyte", idx_bytes(np.zeros(6))),
        ("t10k-labels-idx1-ubyte", idx_bytes(np.full(5, 10))),
    ],
    ids=["short", "header", "fewer", "size", "float", "gzip", "empty", "more-labels", "label-10"],
)
def test_damaged_fashion_mnist_is_refused(fashion: Path, name: str, content: bytes) -> None:
    """Fails when a damaged file ends in another error, or is trained on."""
    (fashion / name).write_bytes(content)
    with pytest.raises(UsageError, match="--data=fashion-mnist: ") as caught:
        load("fashion-mnist", fashion.parents[1])
    assert str(fashion) in str(caught.value)


def test_missing_fashion_mnist_files_are_named(fashion: Path) -> None:
    """Fails when only one of two missing files is named, or one that is there."""
    missing = ["train-labels-idx1-ubyte", "t10k-images-idx3-ubyte"]
    for name in missing:
        (fashion / name).unlink()
    with pytest.raises(UsageError) as caught:
        load("fashion-mnist", fashion.parents[1])
    texts = [*missing, str(fashion), "--data-dir", "apt-get install dataset-fashion-mnist"]
    assert all(text in str(caught.value) for text in texts)
    assert "train-images-idx3-ubyte" not in str(caught.value)


@pytest.mark.parametrize("name", ["digits", "synthetic:2x9x30,samples=50"])
def test_images_are_resized_for_lenet(name: str) -> None:
    """Fails when LeNet gets another size, a label moves, or it is not mentioned."""
    data = load(name)
    fitted = fit_dataset(data, "lenet")
    numbers = np.array([5, 1, 40])
    inputs, labels = fitted.train.batch(numbers)
    original, same_labels = data.train.batch(numbers)
    expected = functional.interpolate(original, (28, 28), mode="bilinear", align_corners=False)
    torch.testing.assert_close(inputs, expected)
    assert torch.equal(labels, same_labels)
    assert fitted.shape == (data.shape[0], 28, 28) and "resized" in fitted.note
    assert (len(fitted.train), len(fitted.valid)) == (len(data.train), len(data.valid))
    assert fitted.valid.batch(numbers[:0])[0].shape == (0, *fitted.shape)


def test_images_are_left_as_they_are_where_they_fit() -> None:
    """Fails when images are resized for a model that takes any, or have their size already."""
    assert (digits := load("digits")) == fit_dataset(digits, "mlp")
    assert (fitting := load("synthetic:1x28x28")) == fit_dataset(fitting, "lenet")
