"""Weights of files: who may have written them, which names they get, and into what they go."""

from __future__ import annotations

import argparse
import copy
import json
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save, save_file
from torch import nn
from torch.optim.swa_utils import AveragedModel

from hvdtrain.errors import UsageError
from hvdtrain.train.checkpoint import Checkpoints, Snapshot
from hvdtrain.weights import find_weights, load_pretrained, read_weights
from hvdtrain.weights.names import clean_names
from tests.unit.nets import Net, net, same

ran: list[str] = []


class Malicious:
    """Unpickling it runs code: this test notices by `ran`."""

    def __reduce__(self) -> tuple[Any, ...]:
        return snap, ()


def snap() -> None:
    """The trap."""
    ran.append("executed")


class HoldsModule(nn.Module):
    """Its own attribute is called as the wrappers call theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)


class OnlyModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(4, 2)


def compiled_part(model: Net) -> nn.Module:
    model.features = torch.compile(model.features)
    return model


WRAPPERS = {
    "plain": lambda model: model,
    "data parallel": nn.DataParallel,
    "compiled": torch.compile,
    "compiled part": compiled_part,
    "compiled, parallel": lambda model: nn.DataParallel(torch.compile(model)),
    "parallel, compiled": lambda model: torch.compile(nn.DataParallel(model)),
    "thrice": lambda m: nn.DataParallel(torch.compile(nn.DataParallel(compiled_part(m)))),
    "averaged": AveragedModel,
    "averaged, parallel": lambda model: AveragedModel(nn.DataParallel(model)),
    "parallel, averaged": lambda model: nn.DataParallel(AveragedModel(model)),
    "compiled, averaged": lambda model: AveragedModel(torch.compile(model)),
    "averaged, compiled": lambda model: torch.compile(AveragedModel(model)),
}


# torch.compile imports parts of torch that are deprecated by torch itself.
loading_the_compiler = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


@loading_the_compiler
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrapped_models_get_their_own_names_back(wrapper: str, tmp_path: Path) -> None:
    """Fails when a prefix of a real wrapper stays, or too much of a name goes, or a value."""
    model = net()
    expected = copy.deepcopy(model.state_dict())
    saved = WRAPPERS[wrapper](model).state_dict()
    torch.save(saved, tmp_path / "saved.pth")
    cleaned, removed = clean_names(read_weights(tmp_path / "saved.pth"))
    assert same(cleaned, expected)
    assert bool(removed) == (wrapper != "plain")
    other = net(seed=1)
    load_pretrained(other, tmp_path / "saved.pth")
    assert same(other.state_dict(), expected)


@loading_the_compiler
def test_removed_prefixes_are_counted() -> None:
    """Fails when the prefixes that are reported are not those that were removed."""
    _, removed = clean_names(AveragedModel(torch.compile(nn.Linear(2, 2))).state_dict())
    assert removed == {"module.": 2, "_orig_mod.": 2, "n_averaged": 1}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["my_module.w", "module_list.0.w", "submodule.w"], None),
        (["module.w", "head.w"], None),
        (["backbone.module.w", "backbone.module.b"], None),
        (["module.module.w", "module.w"], ["module.w", "w"]),
        (["module._orig_mod.module.x.w"], ["x.w"]),
        (["_orig_mod._orig_mod.w"], ["w"]),
        (["features._orig_mod.0.w", "module.w"], ["features.0.w", "module.w"]),
        (["features._orig_mod.module.w", "x"], ["features.module.w", "x"]),
        (["n_averaged", "w"], None),
        (["n_averaged"], None),
        (["module", "_orig_mod"], None),
        (["a_orig_mod.w", "_orig_mod_b.w"], None),
    ],
)
def test_names(names: list[str], expected: list[str] | None) -> None:
    """Fails when a name loses what is its own, or keeps a wrapper's prefix."""
    cleaned, removed = clean_names({name: torch.zeros(1) for name in names})
    assert list(cleaned) == (names if expected is None else expected)
    assert (removed == {}) == (expected is None)


PART = st.sampled_from(["module", "modules", "_orig_mod", "0", "w", "n_averaged"])
NAME = st.lists(PART, min_size=1, max_size=4).map(".".join)


@given(names=st.sets(NAME, min_size=1, max_size=5))
def test_cleaning_twice_is_cleaning_once(names: set[str]) -> None:
    """Fails when something is left for a second pass, or a tensor vanishes without a word."""
    try:
        cleaned, removed = clean_names({name: torch.zeros(1) for name in sorted(names)})
    except UsageError:
        return
    assert len(cleaned) + removed.get("n_averaged", 0) == len(names)
    again, more = clean_names(cleaned)
    assert list(again) == list(cleaned) and more == {}


def test_names_that_would_become_one_are_refused() -> None:
    """Fails when one tensor silently replaces another."""
    with pytest.raises(UsageError, match=r"a._orig_mod.w and a.w would both become a.w"):
        clean_names({"a._orig_mod.w": torch.zeros(1), "a.w": torch.ones(1)})


def below(prefix: str, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {prefix + name: tensor for name, tensor in state.items()}


@pytest.mark.parametrize(
    ("prefix", "others", "note"),
    [
        ("model.", {}, "removed from names: model. (26 times)"),
        ("net.", {"accuracy.total": torch.tensor(0)}, "lack net.: accuracy.total"),
        ("base_model.model.", {}, "removed from names: base_model.model. (26 times)"),
        ("_fsdp_wrapped_module.", {}, "removed from names: _fsdp_wrapped_module. (26 times)"),
        ("a.", {"b.0.weight": torch.zeros(3)}, "not loaded, as their names lack a.: b.0.weight"),
    ],
)
def test_a_model_that_a_trainer_kept_as_its_part(
    prefix: str, others: dict[str, torch.Tensor], note: str, tmp_path: Path
) -> None:
    """Fails if such a model is refused, or other tensors beside it vanish without a note."""
    state = net().state_dict()
    prefixed = below(prefix, state)
    torch.save({"state_dict": prefixed | others}, tmp_path / "x.ckpt")
    other = net(seed=1)
    notes = load_pretrained(other, tmp_path / "x.ckpt")
    assert same(other.state_dict(), state)
    counted = note.replace("26", str(len(state)))
    assert any(counted in it for it in notes), notes


def test_two_models_in_one_file_are_told_apart_by_the_user(tmp_path: Path) -> None:
    """Fails if the moving average, or the network before it, is chosen without a word."""
    both = below("online.", net().state_dict()) | below("average.", net(seed=1).state_dict())
    torch.save(both, tmp_path / "x.pt")
    with pytest.raises(UsageError, match=r"2 times, below average\. and online\.; save those"):
        load_pretrained(net(), tmp_path / "x.pt")


def test_a_part_of_another_shape_is_another_architecture(tmp_path: Path) -> None:
    """Fails if a prefix is removed although the tensors below it are not the model's."""
    state = below("model.", net().state_dict())
    name = next(iter(state))
    torch.save(state | {name: torch.zeros(7, 7, 7)}, tmp_path / "x.pt")
    with pytest.raises(UsageError, match="weights of another architecture"):
        load_pretrained(net(), tmp_path / "x.pt")


@pytest.mark.parametrize("model", [HoldsModule, OnlyModule])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_model_with_an_attribute_called_module(model, wrapped: bool, tmp_path: Path) -> None:
    """Fails when its names are taken for a wrapper's, and its own weights no longer fit it."""
    one, other = model(), model()
    saved = nn.DataParallel(one).state_dict() if wrapped else one.state_dict()
    save_file(saved, tmp_path / "saved.safetensors")
    load_pretrained(other, tmp_path / "saved.safetensors")
    assert same(other.state_dict(), one.state_dict())


NESTINGS = {
    "bare": lambda state: state,
    "ordered": OrderedDict,
    "lightning": lambda state: {"epoch": 3, "state_dict": state, "optimizer_states": [{}]},
    "torchvision": lambda state: {"model": state, "args": argparse.Namespace(lr=0.1), "epoch": 1},
    "averaged besides": lambda state: {
        "model_ema": {"n_averaged": torch.tensor(1)},
        "model": state,
    },
    "nanogpt": lambda state: {"model": state, "best_val_loss": torch.tensor(1.5), "iter_num": 3},
    "imagenet example": lambda state: {"state_dict": state, "best_acc1": torch.tensor(70.1)},
    "only averaged": lambda state: {"ema": state},
    "composer": lambda state: {"state": {"model": state}, "rng": []},
    "model_state": lambda state: {"model_state": state},
    "twice": lambda state: {"model": {"module": state}},
    "with extra state": lambda state: {**state, "features._extra_state": {"scale": 1}},
    "parameters": lambda state: {
        name: nn.Parameter(t) if t.is_floating_point() else t for name, t in state.items()
    },
}


@pytest.mark.parametrize("nesting", NESTINGS)
@pytest.mark.parametrize("legacy", [False, True])
def test_dictionaries_around_the_weights(nesting: str, legacy: bool, tmp_path: Path) -> None:
    """Fails when the weights in a usual training script's file are not found, or others are."""
    state = net().state_dict()
    torch.save(
        NESTINGS[nesting](state), tmp_path / "x.pt", _use_new_zipfile_serialization=not legacy
    )
    weights = read_weights(tmp_path / "x.pt")
    assert same(weights, state)
    assert not any(tensor.requires_grad for tensor in weights.values())


def write_shards(folder: Path, state: dict[str, torch.Tensor]) -> None:
    """Two files and their index, as transformers writes them."""
    names = sorted(state)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, own in parts.items():
        save_file({name: state[name] for name in own}, folder / file)
    places = {name: file for file, own in parts.items() for name in own}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


@pytest.mark.parametrize("given", [".", "model.safetensors.index.json"])
def test_an_index_of_files_is_read(given: str, tmp_path: Path) -> None:
    """Fails if the tensors of some file are missing, or the folder is not understood."""
    state = net().state_dict()
    write_shards(tmp_path, state)
    assert same(read_weights(tmp_path / given), state)


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        ("[1, 2]", "not an index of weights"),
        ('{"weight_map": {"w": "../x.safetensors"}}', "names a file outside its folder: ../x"),
        ('{"weight_map": {"w": "gone.safetensors"}}', "cannot be read: No such file"),
        ('{"weight_map": {"w": "model-1.safetensors"}}', "1 tensors are in none of its files (w)"),
    ],
)
def test_an_index_that_is_wrong(index: str, expected: str, tmp_path: Path) -> None:
    """Fails if such an index is followed out of its folder, or ends in a traceback."""
    write_shards(tmp_path, net().state_dict())
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UsageError) as caught:
        read_weights(tmp_path)
    assert expected in str(caught.value)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_a_file_name_in_another_encoding(suffix: str, tmp_path: Path) -> None:
    """Fails if a file that was named on a system with Latin-1 names cannot be read."""
    state = net().state_dict()
    path = tmp_path / os.fsdecode(b"gr\xf6\xdfe" + suffix.encode())
    if suffix == ".pt":
        torch.save(state, path)
    else:
        path.write_bytes(save(state))
    assert same(read_weights(path), state)


def write_bytes(content: bytes):
    return lambda path: path.write_bytes(content)


def truncated(path: Path) -> None:
    if path.suffix == ".safetensors":
        save_file(net().state_dict(), path)
    else:
        torch.save(net().state_dict(), path)
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("name", "write", "expected"),
    [
        ("x.pth", lambda path: None, "no such file or folder"),
        ("x.pth", write_bytes(b""), "damaged, or not a file of torch.save"),
        ("x.bin", write_bytes(b"no weights at all"), "damaged, or not a file of torch.save"),
        ("x.pt", truncated, "damaged, or not a file of torch.save"),
        ("x.safetensors", write_bytes(b""), "damaged, or not a safetensors file"),
        ("x.safetensors", write_bytes(b"\xff" * 64), "damaged, or not a safetensors file"),
        ("x.safetensors", truncated, "damaged, or not a safetensors file"),
        ("x.safetensors", lambda path: save_file({}, path), "no tensors by name in it; holds noth"),
        ("x.pt", lambda path: torch.save({"lr": 1}, path), "no tensors by name in it; holds lr"),
        ("x.pt", lambda path: torch.save(torch.ones(2), path), "no tensors by name in it"),
        ("x.pt", lambda path: torch.save({"model": {}}, path), "no tensors by name in it"),
        ("x.pt", lambda path: torch.save({"weights": [1]}, path), "in it; holds weights"),
        (
            "x.pt",
            lambda path: torch.save({"student": {"w": torch.ones(1)}, "teacher": {}}, path),
            "Save the model's: torch.save(torch.load(FILE)['teacher'], OTHER)",
        ),
        (
            "x.pt",
            lambda path: torch.save({"w": torch.ones(1), "step": 3}, path),
            "holds 'step' among the tensors, a int",
        ),
        ("x.pt", lambda path: torch.save({3: torch.ones(1)}, path), "holds 3 among the tensors"),
        (
            "x.pt",
            lambda path: torch.save({"w": torch.ones(2, 2).to_sparse()}, path),
            "tensor w is quantized or sparse",
        ),
        (
            "x.pt",
            lambda path: torch.save({"w": torch.ones(2, device="meta")}, path),
            "tensor w is without values",
        ),
        ("x", lambda path: path.mkdir(), "contains neither checkpoints/ nor model.safetensors"),
    ],
)
def test_files_that_hold_no_weights(name: str, write, expected: str, tmp_path: Path) -> None:
    """Fails when such a file is taken, or ends in a traceback, or is not named."""
    path = tmp_path / name
    write(path)
    with pytest.raises(UsageError) as caught:
        read_weights(path)
    assert str(caught.value).startswith(f"{path}: ") and expected in str(caught.value)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("suffix", [".pth", ".bin", ".ckpt"])
def test_pickled_code_is_refused_and_not_run(legacy: bool, suffix: str, tmp_path: Path) -> None:
    """Fails when a file that holds code runs it, or is refused without a way out."""
    path = tmp_path / f"x{suffix}"
    content = {"model": net().state_dict(), "extra": Malicious()}
    torch.save(content, path, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(UsageError, match=r"holds pickled code \(.+\), which is not run.*re-save"):
        read_weights(path)
    assert ran == []
    torch.load(path, weights_only=False)  # the trap does snap where code is run
    assert ran.pop() == "executed" and ran == []


@loading_the_compiler
def test_an_archive_of_torchscript_is_refused(tmp_path: Path) -> None:
    """Fails when a compiled program is loaded, or called damaged."""
    torch.jit.save(torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2)), tmp_path / "x.pt")
    with pytest.raises(UsageError, match=r"pickled code \(a TorchScript archive\)"):
        read_weights(tmp_path / "x.pt")


def test_a_whole_pickled_model_is_refused(tmp_path: Path) -> None:
    """Fails when the class in the way is not named."""
    torch.save(nn.Linear(2, 2), tmp_path / "x.pt")
    with pytest.raises(UsageError, match=r"pickled code \(torch.nn.modules.linear.Linear\)"):
        read_weights(tmp_path / "x.pt")


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run with two checkpoints: step 1 holds ones and is the best, step 2 holds twos."""
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", keep=3)
    for step in (1, 2):
        weights = {"w": torch.full((2,), float(step))}
        checkpoints.save(Snapshot(step, "", weights, {"step": step}), is_best=step == 1)
    checkpoints.wait()
    return tmp_path / "run"


def test_runs_and_checkpoints(run_folder: Path) -> None:
    """Fails when a run does not mean its best checkpoint, or a pointer not what it names."""
    folder = run_folder / "checkpoints"
    for path, value in (
        (run_folder, 1),
        (folder, 1),
        (folder / "best", 1),
        (folder / "last", 2),
        (folder / "step-00000002", 2),
        (folder / "step-00000002" / "model.safetensors", 2),
    ):
        assert read_weights(path)["w"].tolist() == [value] * 2
    assert find_weights(run_folder) == folder / "step-00000001"
    (folder / "best").unlink()
    assert read_weights(run_folder)["w"].tolist() == [2, 2]
    (folder / "step-00000002" / "manifest.json").unlink()  # copied without it
    assert read_weights(folder / "step-00000002")["w"].tolist() == [2, 2]
    (folder / "last").write_text("step-00000009\n")
    with pytest.raises(UsageError, match="last: names a checkpoint that does not exist"):
        read_weights(run_folder)


def test_a_damaged_checkpoint_is_refused(run_folder: Path) -> None:
    """Fails when a flipped bit in a checkpoint's weights goes unnoticed."""
    file = run_folder / "checkpoints" / "step-00000001" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(UsageError, match="is not what was written"):
        read_weights(run_folder)
