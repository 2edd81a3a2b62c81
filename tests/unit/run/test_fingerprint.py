"""What identifies the data of a run: a change of names, labels or number is reported."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from hvdtrain.config.options import build_config
from hvdtrain.data import AugmentedSplit, ReadOptions, TensorSplit, load_dataset
from hvdtrain.data.splits import difference, fingerprint
from hvdtrain.data.transforms import ResizedSplit
from hvdtrain.errors import AgreedFailure, UsageError
from hvdtrain.exchange import SingleProcess
from hvdtrain.run.resume import Resumable, Resumed, refuse_changed_data
from hvdtrain.run.tasks import TaskData, find_source
from tests.unit.folders import make_folder
from tests.unit.threads import connect, run_ranks


class Named:
    """A split that offers its texts: s0, s1, ..."""

    def __init__(self, texts: Any, samples: int) -> None:
        self.texts, self.samples = texts, samples

    def __len__(self) -> int:
        return self.samples

    def batch(self, indices: Any, epoch: int = 0) -> Any:
        raise AssertionError("a sample was read")

    def fingerprint(self) -> Any:
        return self.texts


def named(samples: int, changed: int | None = None) -> Named:
    return Named([f"s{i}" if i != changed else "other" for i in range(samples)], samples)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (named(7), named(7), None),
        (named(7), named(7, 6), "7 samples as before, but with other names or labels; the first "
         "that differs is number 6, now other"),
        (named(7), named(9), "7 samples then and 9 now; the first that differs is number 7, now "
         "s7"),
        (named(9), named(7), "9 samples then and 7 now; the first 7 are the same"),
        (named(900), named(1100, 777), "900 samples then and 1,100 now; the first that differs is "
         "one of the numbers 776 to 779, now s776 to s779"),
        (named(1100), named(900, 777), "1,100 samples then and 900 now; the first that differs is "
         "one of the numbers 776 to 779, now s776 to s779"),
        (Named("one", 5), Named("one", 5), None),
        (Named("one", 5), Named("two", 5), "5 samples as before, but with other names or labels"),
        (Named(None, 5), Named(None, 5), None),
        (Named(None, 5), Named(None, 6), "5 samples then and 6 now"),
    ],
    ids=[
        *("same", "renamed", "longer", "shorter", "longer and renamed", "shorter and renamed"),
        *("same digest", "other digest", "counts alone", "other count"),
    ],
)  # fmt: skip
def test_changed_data_are_described(old: Named, new: Named, expected: str | None) -> None:
    """Fails if a change is missed, invented, or placed elsewhere; or if a sample is read."""
    assert difference(fingerprint(old), fingerprint(new), new) == expected


def test_splits_around_others_have_their_fingerprints() -> None:
    """Fails if resizing or augmenting hides what identifies the samples, or changes it."""
    labels = torch.arange(6) % 4
    split = TensorSplit(torch.zeros(6, 1, 3, 3), labels)
    for around in (ResizedSplit(split, (5, 5)), AugmentedSplit(split, 1, 0.5, 2)):
        assert fingerprint(around) == fingerprint(split)
        other = TensorSplit(split.inputs, labels.flip(0))
        assert difference(fingerprint(other), fingerprint(around), around)


def load(folder: Path) -> Any:
    return load_dataset(
        f"imagefolder:{folder}", Path(), 0, torch.float32, ReadOptions(image_size=8, readers=0)
    )


def test_an_image_folder_is_known_by_names_and_classes(tmp_path: Path) -> None:
    """Fails if a folder may not be moved, or a file that is renamed or moved is not noticed."""
    folder = tmp_path / "here"
    make_folder(folder)
    known = fingerprint(load(folder).train)
    moved = Path(shutil.move(folder, tmp_path / "there"))
    assert fingerprint(load(moved).train) == known
    first = min(path for path in (moved / "train").rglob("*.*"))
    first.rename(first.with_name(f"zzz{first.suffix}"))
    split = load(moved).train
    reported = difference(known, fingerprint(split), split)
    assert reported is not None and "the first that differs is number 0, now " in reported


class Scene:
    """A run of two hosts with a part each, as it was saved."""

    def __init__(self, tmp_path: Path) -> None:
        self.folders = [tmp_path / f"host{host}" for host in range(2)]
        for folder in self.folders:
            make_folder(folder)
        self.config = build_config(
            {
                "data": f"imagefolder:{tmp_path}/host{{host}}",
                "data_placement": "per-host",
                "image_size": 8,
                "workers": 0,
                "model": "mlp",
            },
            [],
        )

    def source(self) -> TaskData:
        exchanges = connect(3)
        local_ranks = [0, 1, 0]
        return run_ranks(exchanges, lambda ex: find_source(self.config, ex, local_ranks[ex.rank]))[
            0
        ]


def test_the_parts_of_all_hosts_count(tmp_path: Path) -> None:
    """Fails if a sample more on the last host, or parts of fewer hosts, go unnoticed."""
    scene = Scene(tmp_path)
    saved = scene.source().fingerprints
    state = {"data": saved}
    found = Resumable(None, Resumed(4, state, None))  # type: ignore[arg-type]
    refuse_changed_data(scene.config, found, scene.source(), "--data=x")
    one = min((scene.folders[1] / "valid").rglob("*.*"))
    shutil.copy(one, one.with_name(f"zzz{one.suffix}"))
    with pytest.raises(
        UsageError, match=r"checkpoint: valid split of host 1: \d+ samples then and"
    ):
        refuse_changed_data(scene.config, found, scene.source(), "--data=x")
    state["data"] = saved[:1]
    with pytest.raises(UsageError, match="parts of 1 hosts then, of 2 now"):
        refuse_changed_data(scene.config, found, scene.source(), "--data=x")


def test_a_fault_in_a_users_fingerprint_is_the_users(tmp_path: Path, monkeypatch) -> None:
    """Fails if it ends in a traceback."""
    (tmp_path / "own_data.py").write_text(
        "import torch, hvdtrain\n"
        "class Own(hvdtrain.TensorSplit):\n"
        "    def fingerprint(self):\n"
        "        raise OSError('no list')\n"
        "def make():\n"
        "    split = Own(torch.zeros(4, 1, 8, 8), torch.arange(4))\n"
        "    return hvdtrain.Dataset('own', (1, 8, 8), 4, split, split)\n"
    )
    monkeypatch.chdir(tmp_path)
    config = build_config({"data": "own_data:make", "model": "mlp"})
    with pytest.raises(
        AgreedFailure, match=r"--data=own_data:make: /.*own_data.py:4: OSError: no list"
    ):
        find_source(config, SingleProcess(), 0)
