"""Data sets that are fetched: when, and the message where they cannot be."""

from __future__ import annotations

import pickle
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock

from hvdtrain.data import builtin, load_dataset
from hvdtrain.data.builtin import import_torchvision
from hvdtrain.errors import UsageError

BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")


class NoNetwork:
    """Stands for torchvision.datasets; notes what was to be read."""

    def __init__(self, raises: Exception | None = None) -> None:
        self.raises = raises
        self.asked: list[str] = []
        self.timeouts: list[float | None] = []

    def __getattr__(self, reader: str):
        def read(folder: str, download: bool) -> None:
            assert download
            self.asked.append(f"{reader} {folder}")
            self.timeouts.append(socket.getdefaulttimeout())
            if self.raises:
                raise self.raises

        return read

    @property
    def datasets(self) -> NoNetwork:
        return self


@pytest.fixture
def offline(monkeypatch) -> NoNetwork:
    fake = NoNetwork(OSError("Network is unreachable"))
    monkeypatch.setattr(builtin, "DEBIAN_FOLDER", Path("/nowhere"))
    monkeypatch.setattr(builtin, "import_torchvision", lambda: fake)
    return fake


@pytest.mark.parametrize("name", ["fashion-mnist", "cifar10"])
def test_offline_the_files_are_named(name: str, offline: NoNetwork, tmp_path: Path) -> None:
    """Fails when the message does not name files and folder, or a time limit stays behind."""
    folder = tmp_path / "data"
    with pytest.raises(UsageError, match=f"--data={name}: ") as caught:
        builtin.fetch(name, folder)
    files = builtin.KNOWN[name][1]
    assert all(str(file) in str(caught.value) for file in files)
    assert ("dataset-fashion-mnist" in str(caught.value)) == (name == "fashion-mnist")
    assert all(text in str(caught.value) for text in (str(folder), "unreachable", "--data-dir"))
    assert offline.timeouts == [builtin.TIMEOUT_S] and socket.getdefaulttimeout() is None


def test_only_missing_files_are_named(offline: NoNetwork, tmp_path: Path) -> None:
    """Fails when a file that is there is asked for again."""
    there, *missing = builtin.KNOWN["fashion-mnist"][1]
    (tmp_path / there).parent.mkdir(parents=True)
    (tmp_path / there).touch()
    with pytest.raises(UsageError) as caught:
        builtin.fetch("fashion-mnist", tmp_path)
    assert str(there) not in str(caught.value)
    assert all(str(file) in str(caught.value) for file in missing)


def test_nothing_is_fetched_without_need(offline: NoNetwork, tmp_path: Path, monkeypatch) -> None:
    """Fails when the network is asked for files that are there, or for data of no known source."""
    for file in builtin.KNOWN["fashion-mnist"][1]:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    builtin.fetch("fashion-mnist", tmp_path)
    for name in ("digits", "imagefolder:images", "a.b:c", "unknown"):
        builtin.fetch(name, tmp_path / "none")
    monkeypatch.setattr(builtin, "DEBIAN_FOLDER", tmp_path / "debian")
    for file in builtin.FILES:
        (tmp_path / "debian").mkdir(exist_ok=True)
        (tmp_path / "debian" / f"{file}.gz").touch()
    builtin.fetch("fashion-mnist", tmp_path / "none")
    assert offline.asked == [] and not (tmp_path / "none").exists()


def test_jobs_fetch_one_after_another(offline: NoNetwork, tmp_path: Path, monkeypatch) -> None:
    """Fails when a second job writes the same files meanwhile, or a held lock gives a traceback."""
    monkeypatch.setattr(builtin, "LOCK_TIMEOUT_S", 0.1)
    offline.raises = None
    with FileLock(tmp_path / ".cifar10.lock"):
        with pytest.raises(UsageError, match=r"--data=cifar10: .*Timeout"):
            builtin.fetch("cifar10", tmp_path)
        assert offline.asked == []
        builtin.fetch("fashion-mnist", tmp_path)
    builtin.fetch("cifar10", tmp_path)
    assert offline.asked == [f"FashionMNIST {tmp_path}", f"CIFAR10 {tmp_path}"]


def test_a_folder_that_cannot_be_made_is_reported(offline: NoNetwork, tmp_path: Path) -> None:
    """Fails when a file in place of the folder ends in a traceback."""
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="--data=cifar10: "):
        builtin.fetch("cifar10", tmp_path / "file" / "data")


@pytest.fixture
def cifar10(tmp_path: Path) -> Path:
    """Files like those of CIFAR-10, of three images each; returns their folder's parent."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for number, name in enumerate(BATCHES):
        pixels = np.arange(3 * 3072).reshape(3, 3072) % 251 + number
        content = {"data": pixels.astype(np.uint8), "labels": [number, 9, 0]}
        (folder / name).write_bytes(pickle.dumps(content))
    names = {"label_names": [f"class {number}" for number in range(10)]}
    (folder / "batches.meta").write_bytes(pickle.dumps(names))
    return tmp_path


def test_other_files_than_the_originals_are_refused(cifar10: Path) -> None:
    """Fails when pickles that anyone may have made are opened."""
    with pytest.raises(UsageError, match=r"--data=cifar10: .*not the original ones") as caught:
        load_dataset("cifar10", cifar10, 0, torch.float32)
    assert str(cifar10 / "cifar-10-batches-py") in str(caught.value)


def test_cifar10_is_read(cifar10: Path, monkeypatch) -> None:
    """Fails when channels, rows, order, labels, names, range or the usual changes are others."""
    reader = import_torchvision().datasets.CIFAR10
    monkeypatch.setattr(reader, "_check_integrity", lambda self: True)
    monkeypatch.setattr(reader, "_load_meta", lambda self: setattr(self, "classes", list("abc")))
    data = load_dataset("cifar10", cifar10, 0, torch.float64)
    assert (len(data.train), len(data.valid), data.shape) == (15, 3, (3, 32, 32))
    assert "crops out of 4 more pixels, mirrored at 0.5" in data.note
    inputs, labels = data.valid.batch(np.array([2, 0]))
    expected = (torch.arange(2 * 3072, 3 * 3072) % 251 + 5).reshape(3, 32, 32) / 255
    torch.testing.assert_close(inputs[0], expected.double())
    assert labels.tolist() == [0, 5] and inputs.is_contiguous()
    assert data.train.batch(np.arange(15))[1].tolist() == [n for k in range(5) for n in (k, 9, 0)]
