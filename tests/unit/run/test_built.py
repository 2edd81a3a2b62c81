"""Resumed runs of a script that was changed, and states that a checkpoint cannot give back."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, MultiStepLR, OneCycleLR, SequentialLR

import hvdtrain
from hvdtrain.errors import HvdtrainError
from hvdtrain.run import script as script_module
from tests.unit.cli.test_cli import read_tree

pytestmark = pytest.mark.usefixtures("script")


class Notes:
    """An object with a state of its own."""

    def __init__(self, held: Any = None) -> None:
        self.held = held

    def state_dict(self) -> dict[str, Any]:
        return {"held": self.held}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held = state["held"]


@dataclasses.dataclass
class Best:
    loss: float = 1.0


Built = tuple[torch.nn.Module, Any, list[Any], dict[str, Any]]


def as_before(rate: float = 0.1, steps: int = 12) -> Built:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
    schedule = OneCycleLR(optimizer, 0.1, steps, cycle_momentum=False)
    return model, optimizer, [schedule, Notes()], {}


def another_layer() -> Built:
    model, _, state, _ = as_before()
    assert isinstance(model, torch.nn.Sequential)
    model.insert(1, torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return model, optimizer, [OneCycleLR(optimizer, 0.1, 12, cycle_momentum=False), state[1]], {}


def another_optimizer() -> Built:
    model, _, state, _ = as_before()
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    return model, optimizer, [OneCycleLR(optimizer, 0.1, 12, cycle_momentum=False), state[1]], {}


def two_optimizers() -> Built:
    model, _, state, _ = as_before()
    assert isinstance(model, torch.nn.Sequential)
    both = [torch.optim.SGD(model[place].parameters(), 0.1, momentum=0.9) for place in (0, 2)]
    return model, both, [OneCycleLR(both[0], 0.1, 12, cycle_momentum=False), state[1]], {}


def another_setting() -> Built:
    model, optimizer, state, options = as_before()
    optimizer.param_groups[0]["weight_decay"] = 0.5
    return model, optimizer, state, options


def more_state() -> Built:
    model, optimizer, state, options = as_before()
    return model, optimizer, [*state, Notes()], options


def longer() -> Built:
    model, optimizer, state, _ = as_before(steps=24)
    return model, optimizer, state, {"epochs": 6}


CHANGES: dict[Callable[[], Built], str] = {
    another_layer: "the model is another: tensor 3 of it is 1.weight",
    another_optimizer: "optimizers: they are Adam, and were SGD when the run began",
    two_optimizers: "optimizers: they are SGD, SGD, and were SGD",
    another_setting: "the optimizer SGD: 0.weight_decay is 0.5, and was 0 when",
    more_state: "state: they are OneCycleLR, Notes, Notes, and were OneCycleLR, Notes",
    longer: "of state, the OneCycleLR (number 0): total_steps is 24, and was 12",
}


def train(built: Built, after: Callable[[int], None] = id, **further: Any) -> None:
    """Train, or go on. `after`: is called after each step."""
    model, optimizer, state, options = built
    inputs = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    samples = torch.utils.data.TensorDataset(inputs, torch.arange(24) % 3)
    given: dict[str, Any] = {"global_batch_size": 6, "epochs": 3, "resume": "auto"}
    given["experiment"] = "mine"  # also in later loops of the process
    given |= options | further
    with hvdtrain.Loop(model, optimizer, samples, state=state, **given) as loop:
        for step in loop:
            for x, y in step.batches():
                loss = torch.nn.functional.cross_entropy(model(x), y)
                step.backward(mean=loss, count=len(y))
            step.update()
            state[0].step()
            after(step.number)


@pytest.mark.parametrize("steps", [5, None], ids=["in the middle", "finished"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda it: it.__name__)
def test_a_changed_script_is_refused_and_touches_nothing(
    change: Callable[[], Built], steps: int | None
) -> None:
    """Fails if settings of the script are replaced in silence, the resume ends in a traceback, or a
    file of the run changes.
    """
    torch.manual_seed(0)
    train(as_before(), max_steps=steps)
    before = read_tree(Path("runs/mine"))
    torch.manual_seed(0)
    with pytest.raises(HvdtrainError) as found:
        train(change())
    assert found.value.exit_code == 2
    assert CHANGES[change] in str(found.value) and "--" not in str(found.value)
    assert read_tree(Path("runs/mine")) == before


HELD: dict[str, Any] = {
    "scalar": np.float32(0.1),
    "double": np.float64(0.1),
    "array": np.arange(6).reshape(2, 3),
    "texts": np.array(["a", "bc"]),
    "time": np.datetime64("2026-01-31"),
    "deque": collections.deque([1.5, np.int64(2)], maxlen=3),
    "counter": collections.Counter("abca"),
    "ordered": collections.OrderedDict(b=1, a=[2, (3,)]),
    "path": Path("a/b"),
    "moment": datetime.datetime(2026, 1, 31, 12, 0, 1, 5, datetime.timezone.utc),
    "span": datetime.timedelta(days=-1, microseconds=3),
    "set": {1, 2},
}
NOT_HELD: dict[str, tuple[Any, str]] = {
    "dataclass": ([Best()], r"state\[1\]\['held'\]\[0\]\['loss'\]|is of type Best"),
    "function": ({"f": len}, "state[1]['held']['f'] is of type builtin_function_or_method"),
    "objects": (np.array([Best()], dtype=object), "state[1]['held'] is of type ndarray"),
    "factory": (collections.defaultdict(list), "state[1]['held'] is of type defaultdict"),
}


def test_what_a_state_holds_comes_back(script: None) -> None:
    """Fails if a type of Python's or NumPy's library is lost, or its values are others."""
    model, optimizer, state, options = as_before()
    state[1].held = HELD
    train((model, optimizer, state, options), max_steps=5)
    model, optimizer, state, options = as_before()
    train((model, optimizer, state, options), max_steps=5, epochs=2)
    found = state[1].held
    assert {name: type(it) for name, it in found.items()} == {
        name: type(it) for name, it in HELD.items()
    }
    assert found["deque"].maxlen == 3
    assert pickle.dumps(found["array"]) == pickle.dumps(HELD["array"])
    assert all(np.all(found[name] == it) for name, it in HELD.items())


@pytest.mark.parametrize("name", NOT_HELD)
def test_a_state_that_could_not_be_read_is_refused_before_the_first_step(name: str) -> None:
    """Fails if checkpoints are written that nobody can read, or the part is not named."""
    model, optimizer, state, options = as_before()
    state[1].held, expected = NOT_HELD[name]
    with pytest.raises(HvdtrainError) as found:
        train((model, optimizer, state, options))
    assert found.value.exit_code == 2 and expected.rpartition("|")[2] in str(found.value)
    assert not Path("runs").exists()


def test_a_state_that_becomes_unreadable_ends_the_run_with_the_last_good_checkpoint() -> None:
    """Fails if the checkpoint replaces the one before it."""
    built = as_before()

    def spoil(step: int) -> None:
        if step == 3:
            built[2][1].held = Best()

    with pytest.raises(HvdtrainError, match=r"is of type Best, which a checkpoint cannot hold"):
        train(built, spoil, checkpoint_interval=2)
    assert [it.name for it in Path("runs/mine/checkpoints").glob("step-*")] == ["step-00000002"]


def test_schedules_within_schedules_are_resumed() -> None:
    """Fails if a Counter of milestones becomes a dict, or a rate of NumPy's cannot be read."""

    def made() -> Built:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        warmup = LambdaLR(optimizer, lambda step: np.float64(0.1) * (step + 1))
        later = MultiStepLR(optimizer, [2, 4])
        return model, optimizer, [SequentialLR(optimizer, [warmup, later], [3])], {}

    models = []
    for ends in ((12,), (2, 6, 12)):
        for end in ends:
            built = made()
            train(built, max_steps=end, experiment=f"in-{len(ends)}")
        models.append(built[0])
    assert all(map(torch.equal, *(it.parameters() for it in models)))


@pytest.mark.parametrize("virtual_workers", [None, 2])
@pytest.mark.parametrize("is_added", [False, True])
def test_layers_that_were_unfrozen_stay_so_after_a_resume(
    is_added: bool, virtual_workers: int | None
) -> None:
    """Fails if a resumed run goes on with the layers frozen as the script makes them, or cannot
    load the state of a group of parameters that was added since.
    """
    samples = torch.utils.data.TensorDataset(
        torch.randn(20, 3, generator=torch.Generator().manual_seed(1)), torch.arange(20) % 2
    )

    def run(name: str, **options: Any) -> list[torch.nn.Parameter]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        model[0].requires_grad_(False)
        owned = (model[2] if is_added else model).parameters()
        optimizer = torch.optim.SGD(owned, 0.1, momentum=0.9)
        given: dict[str, Any] = {"epochs": 3, "global_batch_size": 5, "resume": "auto"}
        given |= {"experiment": name, "virtual_workers": virtual_workers}
        with hvdtrain.Loop(model, optimizer, samples, **given, **options) as loop:
            for step in loop:
                if step.begins_epoch and step.epoch == 1:
                    model[0].requires_grad_(True)
                    if is_added:
                        optimizer.add_param_group({"params": list(model[0].parameters())})
                for x, y in step.batches():
                    loss = torch.nn.functional.cross_entropy(model(x), y)
                    step.backward(mean=loss, count=len(y))
                step.update()
        return list(model.parameters())

    whole = run("whole")
    for steps in (2, 6, 7):
        run("in parts", max_steps=steps)
    assert all(map(torch.equal, run("in parts"), whole))


def test_parameters_that_are_frozen_between_passes_and_update_are_refused() -> None:
    """Fails if one worker trains what several would leave out."""
    model, optimizer, state, _ = as_before()
    samples = torch.utils.data.TensorDataset(torch.randn(6, 4), torch.arange(6) % 3)
    with (
        pytest.raises(HvdtrainError, match=r"1 removed or frozen .* before step\.batches\(\)"),
        hvdtrain.Loop(model, optimizer, samples, state=state, global_batch_size=6) as loop,
    ):
        for step in loop:
            for x, y in step.batches():
                loss = torch.nn.functional.cross_entropy(model(x), y)
                step.backward(mean=loss, count=len(y))
            next(model.parameters()).requires_grad_(False)
            step.update()


def test_a_loop_within_another_is_refused() -> None:
    """Fails if two loops train at once, or if no loop can begin after the error."""
    built = as_before()
    with pytest.raises(HvdtrainError, match="a loop begins within another: leave the"):
        train(built, lambda step: train(as_before(), experiment="inner"))
    train(as_before(), experiment="next")


def test_further_loops_of_a_script_have_runs_of_their_own() -> None:
    """Fails if a resume takes the run of one loop for that of another."""

    def script() -> list[tuple[Path, int]]:
        found: list[tuple[Path, int]] = []
        for number in range(3):
            model = torch.nn.Linear(1, 1)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            data = torch.utils.data.TensorDataset(torch.full((6, 1), float(number)))
            with hvdtrain.Loop(
                model, optimizer, data, global_batch_size=6, epochs=number + 1, resume="auto"
            ) as loop:
                steps = 0
                for step in loop:
                    for (x,) in step.batches():
                        step.backward(sum=model(x).sum(), count=len(x))
                    step.update()
                    steps += 1
            found.append((loop.folder, steps))
        return found

    names = [Path("runs") / it for it in ("mine", "mine-loop-2", "mine-loop-3")]
    assert script() == list(zip(names, (1, 2, 3), strict=True))
    script_module.loops = script_module.Loops()  # as in another process
    assert script() == list(zip(names, (0, 0, 0), strict=True))


def test_the_other_model_may_be_frozen_in_the_passes_of_one() -> None:
    """Fails if lines that many scripts of two models have are refused, or the workers agree anew in
    each step.
    """
    one, other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 3)
    optimizers = [torch.optim.SGD(it.parameters(), 0.1) for it in (one, other)]
    samples = torch.utils.data.TensorDataset(torch.randn(12, 4), torch.arange(12) % 3)
    models = {"one": one, "other": other}
    with hvdtrain.Loop(models, optimizers, samples, global_batch_size=6) as loop:
        for step in loop:
            for optimizer, is_one in zip(optimizers, (True, False), strict=True):
                other.requires_grad_(not is_one)
                one.requires_grad_(is_one)
                for x, y in step.batches(optimizer):
                    loss = torch.nn.functional.cross_entropy(other(one(x)), y)
                    step.backward(mean=loss, count=len(y))
                step.update()
