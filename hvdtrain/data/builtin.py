"""Digits of scikit-learn, Fashion-MNIST, CIFAR-10 and synthetic images; torchvision's import.

Sources: H. Xiao, K. Rasul, R. Vollgraf, "Fashion-MNIST", arXiv:1708.07747; A. Krizhevsky, "Learning
multiple layers of features from tiny images", 2009. torchvision downloads both.
"""

import gzip
import importlib
import importlib.util
import re
import socket
import sys
import types
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock

from hvdtrain.data.sampler import Indices
from hvdtrain.data.splits import Batch, Dataset, ImageFormat, Shape, TensorSplit
from hvdtrain.errors import PreflightError, UsageError
from hvdtrain.horovod_build.environment import torchvision_for

CLASSES = 10
DIGITS_FILE = Path("datasets", "data", "digits.csv.gz")  # in scikit-learn: 64 pixels, label
DIGITS_SHAPE = (1, 8, 8)
LARGEST_PIXEL = 16
VALID_EVERY = 5  # every fifth image of each class is for validation
FASHION_FOLDER = Path("FashionMNIST", "raw")
DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")  # of the package below
DEBIAN_PACKAGE = "dataset-fashion-mnist"
FASHION_SHAPE = (1, 28, 28)
FASHION_NAMES = (
    *("t-shirt", "trouser", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
)
FILES = tuple(
    f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
)
CIFAR10_FOLDER = Path("cifar-10-batches-py")
CIFAR10_SHAPE = (3, 32, 32)
UNSIGNED_BYTES = b"\x00\x00\x08"  # how an IDX file of them begins
WAYS_TO_FASHION_MNIST = (
    f"Put the IDX files there, unpacked or as .gz, or give their folder, or that which holds "
    f"{FASHION_FOLDER}, by --data-dir. Debian has them: apt-get install {DEBIAN_PACKAGE} puts "
    f"them into {DEBIAN_FOLDER}, where they are read without --data-dir"
)
# torchvision's class, the files whose presence makes a download unnecessary, and what to do about
# missing ones.
KNOWN = {
    "fashion-mnist": (
        "FashionMNIST",
        [FASHION_FOLDER / name for name in FILES],
        f"Missing there: {{}}. {WAYS_TO_FASHION_MNIST}",
    ),
    "cifar10": (
        "CIFAR10",
        [CIFAR10_FOLDER / "batches.meta"],
        "Put there by hand: {} (unpacked), or give --data-dir",
    ),
}
TIMEOUT_S = 15.0
LOCK_TIMEOUT_S = 1800.0


def load_digits(dtype: torch.dtype) -> Dataset:
    """Return 1,797 images of 8x8, pixels from 0 to 1, in a fixed split stratified by class.

    Raises UsageError if scikit-learn is not installed.
    """
    # Importing scikit-learn would take a second or two per worker.
    package = importlib.util.find_spec("sklearn")
    path = Path(package.origin).parent / DIGITS_FILE if package and package.origin else None
    if path is None or not path.is_file():
        raise UsageError(
            "--data=digits: its file comes with scikit-learn: pip install scikit-learn"
        )
    table = np.loadtxt(path, delimiter=",")
    labels = table[:, -1].astype(np.int64)
    inputs = torch.as_tensor(table[:, :-1] / LARGEST_PIXEL, dtype=dtype).reshape(-1, *DIGITS_SHAPE)
    is_valid = np.zeros(len(labels), dtype=bool)
    for label in range(CLASSES):
        is_valid[np.flatnonzero(labels == label)[::VALID_EVERY]] = True
    splits = [
        TensorSplit(inputs[mask], torch.from_numpy(labels)[mask])
        for mask in map(torch.from_numpy, (~is_valid, is_valid))
    ]
    return _of_ten_classes("digits", DIGITS_SHAPE, splits)


def _of_ten_classes(
    name: str, shape: Shape, splits: list[TensorSplit], names: tuple[str, ...] = ()
) -> Dataset:
    train, valid = splits
    return Dataset(name, shape, CLASSES, train, valid, names=names, images=ImageFormat(*shape))


def fashion_files(data_dir: Path) -> tuple[dict[str, Path], list[str]]:
    """Return the files of Fashion-MNIST by name, plain or compressed, and the names of those that
    are missing in `data_dir`, where no folder has all: FashionMNIST/raw in `data_dir`, `data_dir`
    itself, or that of Debian's package.
    """
    folders = (data_dir / FASHION_FOLDER, data_dir, DEBIAN_FOLDER)
    in_folders = [_files_in(folder) for folder in folders]
    files = next((held for held in in_folders if len(held) == len(FILES)), in_folders[0])
    return files, [name for name in FILES if name not in files]


def _files_in(folder: Path) -> dict[str, Path]:
    candidates = [(name, folder / f"{name}{end}") for name in FILES for end in (".gz", "")]
    return {name: path for name, path in candidates if path.is_file()}


def _read_idx(path: Path, dimensions: int) -> torch.Tensor:
    """Return the unsigned bytes of an IDX file, plain or compressed. Raises ValueError, OSError,
    EOFError and zlib.error for one that is damaged.
    """
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        content = file.read()
    if content[:4] != UNSIGNED_BYTES + bytes([dimensions]):
        raise ValueError(f"{path.name} is not an IDX file of unsigned bytes")
    start = 4 * (1 + dimensions)
    lengths = np.frombuffer(content[4:start], ">u4").tolist()
    values = np.frombuffer(content, np.uint8, offset=start)
    return torch.from_numpy(values.reshape(lengths).copy())


def load_fashion_mnist(data_dir: Path, dtype: torch.dtype) -> Dataset:
    """Return 60,000 training and 10,000 validation images of 28x28, pixels from 0 to 1.

    Raises UsageError, with the missing or damaged files and their folder.
    """
    files, missing = fashion_files(data_dir)
    if missing:
        raise UsageError(
            f"--data=fashion-mnist: missing in {data_dir / FASHION_FOLDER}: {', '.join(missing)}. "
            f"{WAYS_TO_FASHION_MNIST}"
        )
    splits = []
    for part in ("train", "t10k"):
        images, labels_file = (files[name] for name in FILES if name.startswith(part))
        try:
            read, labels = _read_idx(images, 3), _read_idx(labels_file, 1).to(torch.int64)
        except (OSError, ValueError, EOFError, zlib.error) as error:
            raise UsageError(
                f"--data=fashion-mnist: the {part}-* files in {images.parent} cannot be read "
                f"({type(error).__name__}: {error}). Are they the originals?"
            ) from error
        inputs = read.to(dtype).div_(255).unsqueeze(1)
        if len(inputs) != len(labels) or len(inputs) == 0:
            raise UsageError(
                f"--data=fashion-mnist: {len(inputs)} images and {len(labels)} labels in "
                f"{images.parent}: the files do not belong together"
            )
        if inputs.shape[1:] != FASHION_SHAPE or labels.max() >= CLASSES:
            raise UsageError(
                "--data=fashion-mnist: images of another size than 28x28, or labels beyond "
                f"{CLASSES - 1}, in {images.parent}: these are files of another data set"
            )
        splits.append(TensorSplit(inputs, labels))
    return _of_ten_classes("fashion-mnist", FASHION_SHAPE, splits, FASHION_NAMES)


def load_cifar10(data_dir: Path, dtype: torch.dtype) -> Dataset:
    """Return 50,000 training and 10,000 validation images of 32x32, pixels from 0 to 1.

    Raises UsageError if the files are missing, or not the original ones.
    """
    splits = []
    for train in (True, False):
        try:
            read = import_torchvision().datasets.CIFAR10(str(data_dir), train=train)
        except Exception as error:  # checksums are checked before unpickling
            raise UsageError(
                f"--data=cifar10: the files in {data_dir / CIFAR10_FOLDER} are missing, or not the "
                f"original ones ({error})"
            ) from error
        inputs = torch.from_numpy(read.data).permute(0, 3, 1, 2).to(dtype).div_(255)
        splits.append(TensorSplit(inputs.contiguous(), torch.tensor(read.targets)))
    return _of_ten_classes("cifar10", CIFAR10_SHAPE, splits, tuple(read.classes))


def fetch(name: str, data_dir: Path) -> None:
    """Download Fashion-MNIST or CIFAR-10 if it is not in `data_dir` yet.

    One process per host calls this; a lock keeps other jobs out. Raises UsageError, with the files
    to install by hand, if the download fails.
    """
    reader, files, advice = KNOWN.get(name, ("", [], ""))
    if name == "fashion-mnist":
        files = [FASHION_FOLDER / file for file in fashion_files(data_dir)[1]]
    missing = [str(file) for file in files if not (data_dir / file).is_file()]
    if not missing:
        return
    before = socket.getdefaulttimeout()
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        with FileLock(data_dir / f".{name}.lock", timeout=LOCK_TIMEOUT_S):
            socket.setdefaulttimeout(TIMEOUT_S)  # urllib has no default timeout
            getattr(import_torchvision().datasets, reader)(str(data_dir), download=True)
    except Exception as error:  # no network, no permission, a wrong checksum, a full disk
        reason = " ".join(str(error).split())
        raise UsageError(
            f"--data={name}: its files are not in {data_dir}, and cannot be downloaded "
            f"({type(error).__name__}: {reason}). {advice.format(', '.join(missing))}"
        ) from error
    finally:
        socket.setdefaulttimeout(before)


SYNTHETIC = "synthetic:"
SYNTAX = re.compile(r"synthetic:(\d+)x(\d+)x(\d+)((?:,(?:classes|samples)=\d+)*)")
TRAIN_SAMPLES = 65_536
VALID_SAMPLES = 4_096
POOL = 251  # noise images; prime, so that each is combined with every class
NOISE = 0.5


@dataclass(frozen=True, eq=False)
class SyntheticSplit:
    """Samples first .. first + samples - 1 of the synthetic data.

    Sample i is the pattern of class i mod classes plus one of a pool of noise images. Classes are
    thus learnable, and every sample is a pure function of the seed and its number. Images repeat
    after pool x classes samples, so validation accuracy is meaningless.
    """

    patterns: torch.Tensor  # one for each class
    noise: torch.Tensor  # the pool
    first: int
    samples: int

    def __len__(self) -> int:
        return self.samples

    def batch(self, indices: Indices, epoch: int = 0) -> Batch:
        numbers = torch.from_numpy(indices) + self.first
        labels = numbers % len(self.patterns)
        return self.patterns[labels] + self.noise[numbers % len(self.noise)], labels


def read_spec(spec: str) -> tuple[Shape, int, int]:
    """Return shape, classes and training samples of synthetic:CxHxW[,classes=K][,samples=M].

    Raises UsageError if `spec` is malformed.
    """
    match = SYNTAX.fullmatch(spec)
    options = dict(part.split("=") for part in match.group(4).split(",")[1:]) if match else {}
    sizes = [int(text) for text in match.groups()[:3]] if match else []
    classes = int(options.get("classes", CLASSES))
    samples = int(options.get("samples", TRAIN_SAMPLES))
    repeated = match is not None and match.group(4).count("=") > len(options)
    if not match or repeated or min([*sizes, samples]) < 1 or classes < 2:
        raise UsageError(
            f"--data={spec}: expected synthetic:CHANNELSxHEIGHTxWIDTH[,classes=K][,samples=M], "
            "such as synthetic:1x28x28 (at least 1 each, and 2 classes)"
        )
    return (sizes[0], sizes[1], sizes[2]), classes, samples


def make_synthetic(spec: str, seed: int, dtype: torch.dtype) -> Dataset:
    """Return images of any shape, without files and in little memory (see `read_spec`)."""
    shape, classes, samples = read_spec(spec)
    generator = np.random.Generator(np.random.PCG64([seed, 0x5EED]))
    patterns = torch.as_tensor(generator.standard_normal((classes, *shape)), dtype=dtype)
    noise = torch.as_tensor(NOISE * generator.standard_normal((POOL, *shape)), dtype=dtype)
    return Dataset(
        spec,
        shape,
        classes,
        train=SyntheticSplit(patterns, noise, 0, samples),
        valid=SyntheticSplit(patterns, noise, samples, VALID_SAMPLES),
    )


_SCHEMAS = tuple(
    f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor" for name in ("nms", "qnms")
)
_library: torch.library.Library | None = None  # keeps the definitions alive


def import_torchvision() -> types.ModuleType:
    """Import torchvision, declaring the operators that it requires if they are absent.

    Raises PreflightError where it is not installed, or cannot be loaded beside this torch.
    """
    try:
        return _import_torchvision()
    except (ImportError, OSError, RuntimeError) as error:
        version = str(torch.__version__)
        raise PreflightError(
            f"torchvision cannot be loaded: {error}. The one for torch {version}: "
            f"{sys.executable} -m pip install --no-deps torchvision=={torchvision_for(version)}"
        ) from error


def _import_torchvision() -> types.ModuleType:
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
    global _library
    _library = torch.library.Library("torchvision", "DEF")
    for schema in _SCHEMAS:
        _library.define(schema)
    return importlib.import_module("torchvision")
