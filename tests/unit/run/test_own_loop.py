"""`hvdtrain.Loop` in one process; tests/parallel/test_own_loop.py has it on several workers."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

import hvdtrain
from hvdtrain.errors import AgreedFailure, UsageError
from hvdtrain.train.step import Step
from tests.unit import commands

Run = Callable[..., Any]
SAMPLES = hvdtrain.TensorSplit(
    torch.rand(21, 4, generator=torch.Generator().manual_seed(1)), torch.arange(21) % 3
)
pytestmark = pytest.mark.usefixtures("script")


def parts() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def evaluate(model: torch.nn.Module, batch: Any) -> hvdtrain.Sums:
    x, y = batch
    return hvdtrain.Sums(cross_entropy(model(x), y, reduction="sum"), len(y))


def passes(step: Step, model: torch.nn.Module) -> None:
    for x, y in step.batches():
        step.backward(cross_entropy(model(x), y, reduction="sum"), len(y))


def make(**given: Any) -> tuple[torch.nn.Module, hvdtrain.Loop]:
    model, optimizer = parts()
    options = {"global_batch_size": 5, "epochs": 2, "device": "cpu", "experiment": "mine"} | given
    return model, hvdtrain.Loop(model, optimizer, SAMPLES, **options)


def summary() -> dict[str, Any]:
    return json.loads(Path("runs/mine/summary.json").read_text())  # type: ignore[no-any-return]


class Endless(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(())


MODEL, OPTIMIZER = parts()
WEIGHTED = torch.utils.data.DataLoader(
    range(4),  # type: ignore[arg-type]
    sampler=torch.utils.data.WeightedRandomSampler([1.0, 2.0, 1.0, 1.0], 4),
)


class Parted(torch.utils.data.DistributedSampler[int]):
    pass


PARTED = torch.utils.data.DataLoader(range(4), sampler=Parted(range(4), 2, 0))  # type: ignore[arg-type]
BATCHES = torch.utils.data.DataLoader(range(4), batch_sampler=[[0, 1], [2, 3]])  # type: ignore[arg-type]
ITERABLE = Endless()
SCHEDULED = torch.optim.SGD(MODEL.parameters(), 0.1)
SCHEDULE = torch.optim.lr_scheduler.StepLR(SCHEDULED, 5)
PLATEAUED = torch.optim.SGD(MODEL.parameters(), 0.1)
PLATEAU = torch.optim.lr_scheduler.ReduceLROnPlateau(PLATEAUED)
OTHER = torch.nn.Linear(4, 3)
# What is given, and what the message says.
REFUSED: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "unknown option": ((MODEL, OPTIMIZER, SAMPLES), {"epoch": 3}, "'epoch': did you mean epochs?"),
    "option of the script": ((MODEL, OPTIMIZER, SAMPLES), {"opt": "sgd"}, "unknown option 'opt'"),
    "type": ((MODEL, OPTIMIZER, SAMPLES), {"epochs": "3"}, "epochs='3': expected int, not str"),
    "truth": ((MODEL, OPTIMIZER, SAMPLES), {"epochs": True}, "epochs=True: expected int, not bool"),
    "value": ((MODEL, OPTIMIZER, SAMPLES), {"clip_grad": -1}, "clip_grad=-1.0: must be above 0"),
    "evaluate": ((MODEL, OPTIMIZER, SAMPLES, SAMPLES), {}, "give `valid` and `evaluate` together"),
    "model": ((4, OPTIMIZER, SAMPLES), {}, "a model is a int, not a torch module"),
    "optimizer": ((MODEL, 3, SAMPLES), {}, "an optimizer is a int, not one of torch"),
    "no optimizer": ((MODEL, [], SAMPLES), {}, "there is no optimizer"),
    "best": (
        (MODEL, OPTIMIZER, SAMPLES, SAMPLES, evaluate),
        {"best": "accuracy"},
        "best='accuracy': choose from loss",
    ),
    "finalize alone": (
        (MODEL, OPTIMIZER, SAMPLES),
        {"finalize": dict, "valid_metrics": ["auc"]},
        "finalize needs the outputs of samples that `evaluate` returns",
    ),
    "finalize without names": (
        (MODEL, OPTIMIZER, SAMPLES, SAMPLES, evaluate),
        {"finalize": dict},
        "finalize: name its figures, such as valid_metrics=['auc']",
    ),
    "finalize of another type": (
        (MODEL, OPTIMIZER, SAMPLES, SAMPLES, evaluate),
        {"finalize": 3, "valid_metrics": ["auc"]},
        "finalize is a int, neither a function nor a metric object",
    ),
    "sampler of parts": ((MODEL, OPTIMIZER, PARTED), {}, "the DataLoader has a Parted, which"),
    "iterable": ((MODEL, OPTIMIZER, ITERABLE), {}, "hvdtrain.IterableSplit(dataset, length)"),
    "iterable in a loader": (
        (MODEL, OPTIMIZER, torch.utils.data.DataLoader(ITERABLE, 2)),
        {},
        "hvdtrain.IterableSplit(dataset, length)",
    ),
    "tuple": ((MODEL, OPTIMIZER, (torch.ones(9, 4), torch.ones(9))), {}, "TensorDataset(*tensors)"),
    "dict": ((MODEL, OPTIMIZER, {"x": torch.ones(9, 4)}), {}, "StackDataset(**by_name)"),
    "validation sampler": (
        (MODEL, OPTIMIZER, SAMPLES, WEIGHTED, evaluate),
        {},
        "the DataLoader has a WeightedRandomSampler",
    ),
    "plateau": ((MODEL, PLATEAUED, SAMPLES), {}, "begin anew after a resume: give state=[sched"),
    "schedule": ((MODEL, SCHEDULED, SAMPLES), {}, "begin anew after a resume: give state=[sched"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_used_is_refused_at_once(name: str) -> None:
    """Fails if a mistake is found after the start, or ends in a traceback."""
    arguments, options, expected = REFUSED[name]
    with pytest.raises(UsageError) as found:
        hvdtrain.Loop(*arguments, **options)
    assert expected in str(found.value)


def test_data_without_a_length_need_the_number_of_steps() -> None:
    """Fails if such a run has no end, if epochs that never end are counted, or if an evaluation
    would never end; or if such a run cannot be resumed, to more steps than at first.
    """
    endless = hvdtrain.IterableSplit([*zip(SAMPLES.inputs, SAMPLES.labels, strict=True)])
    options: dict[str, Any] = {"global_batch_size": 5, "device": "cpu", "experiment": "mine"}

    def run(steps: Any = None, **given: Any) -> torch.Tensor:
        model, optimizer = parts()
        with hvdtrain.Loop(model, optimizer, endless, max_steps=steps, **options | given) as loop:
            for step in loop:
                passes(step, model)
                step.update()
        return model.weight.detach()

    with pytest.raises(AgreedFailure, match=r"to train on have no length.*: give max_steps"):
        run()
    with pytest.raises(AgreedFailure, match=r"epochs=2: the samples .* have no length.*: leave it"):
        run(3, epochs=2)
    model, optimizer = parts()
    with pytest.raises(UsageError, match=r"valid split has no length, .*IterableSplit\(dataset, l"):
        hvdtrain.Loop(model, optimizer, SAMPLES, endless, evaluate)
    whole = run(9, experiment="whole")
    run(4)
    assert torch.equal(run(9, resume="auto"), whole)
    assert (summary()["steps"], summary()["epochs"], summary()["samples_seen"]) == (9, 1, 45)


def test_a_batch_size_beside_a_batch_sampler_is_refused() -> None:
    """Fails if steps have another number of samples than was asked for."""
    with (
        pytest.raises(AgreedFailure, match=r"batch_size is 3: the batches of the list"),
        hvdtrain.Loop(*parts(), BATCHES, batch_size=3, device="cpu"),
    ):
        pass


def test_batches_of_a_batch_sampler_are_the_steps() -> None:
    """Fails if batches are cut anew, or the recorded global batch is not the largest of them."""
    data = torch.utils.data.TensorDataset(SAMPLES.inputs, SAMPLES.labels)
    loader = torch.utils.data.DataLoader(data, batch_sampler=[[3, 4, 4], [20], [0, 1]])
    model, optimizer = parts()
    with hvdtrain.Loop(model, optimizer, loader, epochs=2, device="cpu") as loop:
        sizes = []
        for step in loop:
            sizes.append(step.samples)
            passes(step, model)
            step.update()
        assert "\nglobal_batch_size: 3\n" in (loop.folder / "config.yaml").read_text()
    assert sizes == [3, 1, 2] * 2


def test_the_batch_of_a_batch_sampler_is_the_global_batch() -> None:
    """Fails if a DataLoader with a batch sampler of its own gets the default global batch."""
    order = torch.utils.data.SequentialSampler(range(21))
    batches = torch.utils.data.BatchSampler(order, 4, drop_last=False)
    data = torch.utils.data.TensorDataset(SAMPLES.inputs, SAMPLES.labels)
    loader = torch.utils.data.DataLoader(data, batch_sampler=batches)
    model, optimizer = parts()
    with hvdtrain.Loop(model, optimizer, loader, epochs=1, device="cpu") as loop:
        found = []
        for step in loop:
            found.append(step.samples)
            passes(step, model)
            step.update()
    assert found == [4, 4, 4, 4, 4, 1]


TENSORS = torch.utils.data.TensorDataset(SAMPLES.inputs, SAMPLES.labels)
LOADER = torch.utils.data.DataLoader(TENSORS, 4)


@pytest.mark.parametrize(
    ("valid", "options", "most"),
    [
        (LOADER, {}, 4),
        (LOADER, {"eval_batch_size": 8}, 8),
        (TENSORS, {}, 5),
        (TENSORS, {"grad_accum_steps": 2}, 3),
        (SAMPLES, {"eval_batch_size": 8}, 8),
        (SAMPLES, {"global_batch_size": 21}, 21),
    ],
)
def test_evaluation_takes_few_samples_at_a_time(
    valid: Any, options: dict[str, Any], most: int
) -> None:
    """Fails if evaluation takes more samples at a time than an option says, or the DataLoader for
    it, or else a pass of training, as memory may not hold more; or if it leaves any out.
    """
    sizes: list[int] = []

    def sized(model: torch.nn.Module, batch: Any) -> hvdtrain.Sums:
        sizes.append(len(batch[1]))
        return evaluate(model, batch)

    model, loop = make(valid=valid, evaluate=sized, epochs=1, **options)
    with loop:
        for step in loop:
            passes(step, model)
            step.update()
    assert sizes == [most] * (21 // most) + [21 % most] * (21 % most > 0)
    assert loop.evaluation is not None and loop.evaluation.samples == 21


# The optimizers of MODEL, and what the message says.
OWNED: dict[str, tuple[Callable[[], list[torch.optim.Optimizer]], str]] = {
    "foreign": (
        lambda: [torch.optim.SGD([*MODEL.parameters(), *OTHER.parameters()], 0.1)],
        "2 parameters of SGD are not of the models",
    ),
    "missing": (
        lambda: [torch.optim.SGD([MODEL.weight], 0.1)],
        "no optimizer has the parameter bias (1 of 2)",
    ),
    "shared": (
        lambda: [torch.optim.SGD(MODEL.parameters(), 0.1), torch.optim.Adam([MODEL.weight])],
        "two optimizers have the parameter weight",
    ),
    "closure": (
        lambda: [torch.optim.LBFGS(MODEL.parameters())],
        "LBFGS",
    ),
}


@pytest.mark.parametrize("name", OWNED)
def test_optimizers_and_models_belong_together(name: str) -> None:
    """Fails if a parameter would be trained by no optimizer, or by two, silently."""
    optimizers, expected = OWNED[name]
    with pytest.raises(UsageError) as found:
        hvdtrain.Loop(MODEL, optimizers(), SAMPLES)
    assert expected in str(found.value)


def forget_update(step: Step, model: torch.nn.Module) -> None:
    passes(step, model)


def forget_batches(step: Step, model: torch.nn.Module) -> None:
    step.update()


def forget_backward(step: Step, model: torch.nn.Module) -> None:
    for _ in step.batches():
        pass
    step.update()


def leave_passes(step: Step, model: torch.nn.Module) -> None:
    passes(step, model)
    passes(step, model)


def call_backward_twice(step: Step, model: torch.nn.Module) -> None:
    for x, y in step.batches():
        for _ in range(2):
            step.backward(cross_entropy(model(x), y, reduction="sum"), len(y))


MISUSED = {
    forget_update: "step 1: call step.update(), in place of optimizer.step(), once its batches",
    forget_batches: "step 1: iterate over step.batches() before step.update()",
    forget_backward: "step 1: call step.backward(mean=loss, count=...), in place of loss.back",
    leave_passes: "step 1: call step.update() after the passes over its batches",
    call_backward_twice: "step 1: step.backward(mean=loss, count=count) is called once for each",
}


@pytest.mark.parametrize("body", MISUSED, ids=lambda body: body.__name__)
def test_a_step_that_is_not_done_is_an_error(body: Callable[[Step, Any], None]) -> None:
    """Fails if a step without an update, or a batch without a gradient, counts as trained."""
    model, loop = make()
    with pytest.raises(UsageError) as found, loop:
        for step in loop:
            body(step, model)
    assert MISUSED[body] in str(found.value)
    assert summary()["status"] == "failed"


@pytest.mark.parametrize(
    ("last", "eval_every", "evaluations"), [(7, 0, 2), (6, 0, 2), (7, 6, 3), (7, 7, 2), (-7, 7, 3)]
)
def test_break_ends_the_run_for_good(
    last: int, eval_every: int, evaluations: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if the step that was left is lost or counted twice, or the run is not evaluated, or
    twice; also after the first step of an epoch, and after an evaluation within one. Below 0: the
    step after it is left before its batches.
    """
    model, loop = make(valid=SAMPLES, evaluate=evaluate, eval_every=eval_every)
    with loop:
        for step in loop:
            if step.number == 1 - last:
                break
            passes(step, model)
            step.update()
            if step.number == last:
                break
    last = abs(last)
    weight = model.weight.detach().clone()
    assert loop.evaluation is not None
    assert (summary()["status"], summary()["steps"], summary()["epochs"]) == ("finished", last, 2)
    assert summary()["samples_seen"] == 21 + 5 * (last - 5)
    assert summary()["valid_loss"] == loop.evaluation.loss
    again, loop = make(valid=SAMPLES, evaluate=evaluate, resume="auto")
    with loop:
        assert list(loop) == []
    assert torch.equal(again.weight, weight)
    printed = capsys.readouterr().out
    assert f"finished: 2 epochs, {last} steps" in printed
    assert printed.count("valid loss") == evaluations
    assert printed.count("epoch 2 ended") == 1


def test_the_model_has_the_saved_weights_after_the_loop() -> None:
    """Fails if a script's model is another one than that of the last checkpoint, or a second pass
    over the loop trains nothing, silently.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given: dict[str, Any] = {"global_batch_size": 7, "epochs": 1, "model_ema": True}
    with hvdtrain.Loop(model, optimizer, SAMPLES, virtual_workers=3, **given) as loop:
        for step in loop:
            passes(step, model)
            step.update()
        with pytest.raises(UsageError, match="iterate over it once"):
            iter(loop)
    saved = load_file(loop.folder / "checkpoints" / "step-00000003" / "model.safetensors")
    assert saved.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(saved[name], value), name


def test_epochs_and_a_schedule_that_follows_the_evaluation() -> None:
    """Fails if a resume forgets the newest evaluation, or a step belongs to another epoch."""
    rates: dict[str, list[float]] = {}
    for name, lengths in (("whole", [4]), ("resumed", [2, 4])):
        for epochs in lengths:
            model, optimizer = parts()
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            given = {"global_batch_size": 5, "epochs": epochs, "experiment": name}
            given |= {"resume": "auto", "state": [schedule]}
            loop = hvdtrain.Loop(model, optimizer, SAMPLES, SAMPLES, evaluate, **given)
            with loop:
                for step in loop:
                    if step.begins_epoch and loop.evaluation:
                        schedule.step(2.0 + loop.evaluation.loss * 0)  # never improves again
                        assert loop.evaluation.samples == 21
                    assert step.epoch == (step.number - 1) // 5
                    assert step.ends_epoch == (step.number % 5 == 0)
                    passes(step, model)
                    step.update()
            rates[name] = [group["lr"] for group in optimizer.param_groups]
    assert rates["whole"] == rates["resumed"] == [pytest.approx(0.1 * 0.1**2)]


def test_a_loader_as_it_is() -> None:
    """Fails if its collation is not used, or its batch is not that of a step."""
    model, optimizer = parts()
    pairs = [(SAMPLES.inputs[n], int(SAMPLES.labels[n])) for n in range(21)]

    def collate(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        assert samples  # never of nothing
        return torch.stack([x for x, _ in samples]), torch.tensor([y for _, y in samples])

    loader = torch.utils.data.DataLoader(pairs, 8, shuffle=True, collate_fn=collate)
    with hvdtrain.Loop(model, optimizer, loader, epochs=1, virtual_workers=6) as loop:
        sizes = []
        for step in loop:
            sizes.append(step.samples)
            passes(step, model)
            step.update()
    assert sizes == [8, 8, 5]
    assert loop.mean(torch.tensor(3.0), 4) == 0.75
    loop.barrier()


MINE = """
import sys, torch, hvdtrain
from torch.nn.functional import cross_entropy

torch.manual_seed(0)
samples = hvdtrain.TensorSplit(torch.rand(21, 4), torch.arange(21) % 3)
model = torch.nn.Sequential(torch.nn.Dropout(0.2), torch.nn.Linear(4, 3))
rate = float(sys.argv[1])
optimizer = torch.optim.AdamW(model.parameters(), lr=rate)

def evaluate(model, batch):
    x, y = batch
    scores = model(x)
    correct = (scores.argmax(1) == y).sum()
    return hvdtrain.Sums(cross_entropy(scores, y, reduction="sum"), len(y), {"accuracy": correct})

with hvdtrain.Loop(model, optimizer, samples, samples, evaluate, valid_metrics=["accuracy"],
                   global_batch_size=5, epochs=2, trace_every=2, virtual_workers=2) as loop:
    for step in loop:
        for x, y in step.batches():
            step.backward(cross_entropy(model(x), y, reduction="sum"), len(y))
        step.update()
print("after the loop")
"""


def test_the_run_of_a_script_is_replayed_and_evaluated(tmp_path: Path) -> None:
    """Fails if a script is run without leave, goes on after its loop, or another rate goes
    unnoticed.
    """
    script, code = tmp_path / "mine.py", f"import sys; sys.argv[0] = 'mine.py'\n{MINE}"
    script.write_text(MINE)
    done = commands.run_code(code, tmp_path, "0.01")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "after the loop" in done.stdout

    def call(*arguments: str) -> tuple[int, str]:
        found = commands.run(tmp_path, *arguments)
        assert "after the loop" not in found.stdout
        return found.returncode, found.stdout + found.stderr

    code_, output = call("replay", "runs/mine")
    assert (code_, "is the run of a script, mine.py 0.01" in output) == (2, True), output
    code_, output = call("replay", "runs/mine", "--trust-code")
    assert (code_, "5 steps agreed bit for bit" in output) == (0, True), output
    code_, output = call("evaluate", "runs/mine", "--trust-code", "--json=found.json")
    assert (code_, "mine.py, 21 samples" in output) == (0, True), output
    valid = json.loads((tmp_path / "runs/mine/summary.json").read_text())["valid_loss"]
    assert json.loads((tmp_path / "found.json").read_text())["loss"] == pytest.approx(valid)
    config = (tmp_path / "runs/mine/config.yaml").read_text()
    (tmp_path / "runs/mine/config.yaml").write_text(config.replace("'0.01'", "'0.02'"))
    code_, output = call("replay", "runs/mine", "--trust-code")
    assert (code_, "step 2, computed from the beginning: " in output) == (17, True), output
    script.unlink()
    code_, output = call("evaluate", "runs/mine", "--trust-code")
    assert (code_, "mine.py, which is not there" in output) == (2, True), output


def two_optimizers(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for matrices and AdamW for the rest, as they are used together."""
    matrices = [it for it in model.parameters() if it.ndim == 2]
    others = [it for it in model.parameters() if it.ndim < 2]
    return [torch.optim.Muon(matrices, 0.01), torch.optim.AdamW(others, 0.02)]


@pytest.mark.parametrize("virtual_workers", [None, 3])
def test_one_backward_pass_trains_several_optimizers(virtual_workers: int | None) -> None:
    """Fails if an optimizer lacks the gradients of a pass, or each is clipped by its own norm."""
    torch.manual_seed(0)
    x, y = torch.randn(23, 4).double(), torch.randn(23, 1).double()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)).double()
    plain = copy.deepcopy(model)
    expected = two_optimizers(plain)
    for numbers in hvdtrain.GlobalBatchSampler(23, 5, seed=0).global_batches(0):
        batch = torch.from_numpy(numbers)
        for optimizer in expected:
            optimizer.zero_grad()
        (plain(x[batch]) - y[batch]).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        for optimizer in expected:
            optimizer.step()
    options = {"global_batch_size": 5, "epochs": 1, "clip_grad": 0.5, "trace_every": 1}
    samples = torch.utils.data.TensorDataset(x, y)
    with hvdtrain.Loop(
        model, two_optimizers(model), samples, virtual_workers=virtual_workers, **options
    ) as loop:
        for step in loop:
            for inputs, targets in step.batches():
                step.backward((model(inputs) - targets).square().sum(), len(targets))
            step.update()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_an_optimizer_of_another_loop_is_refused() -> None:
    """Fails if its passes train nothing."""
    model, optimizer = parts()
    with (
        hvdtrain.Loop(model, optimizer, SAMPLES, global_batch_size=5, epochs=1) as loop,
        pytest.raises(UsageError, match="none of the optimizers that the loop was given"),
    ):
        next(iter(next(iter(loop)).batches(parts()[1])))


@pytest.mark.parametrize("whole", [False, True])
def test_modes_are_those_of_the_script(whole: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if the loop, or an evaluation within it, puts frozen layers back into training, or says
    nothing of a model that its library made for evaluation.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
    (model if whole else model[0]).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"global_batch_size": 5, "epochs": 2}
    with hvdtrain.Loop(model, optimizer, SAMPLES, SAMPLES, evaluate, **options) as loop:
        for step in loop:
            assert [it.training for it in model.modules()] == [not whole, False, not whole]
            passes(step, model)
            step.update()
    assert torch.equal(model[0].running_mean, torch.zeros(4))
    assert ("the model is in evaluation mode" in capsys.readouterr().out) == whole


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "needs a count, and got none"),
        ({"count": 5}, "takes one loss of the batch"),
        ({"sum": 1, "mean": 1, "count": 5}, "takes one loss of the batch"),
        ({"loss": 1}, "needs a count, and got none"),
        ({"sum": 1, "count": "five"}, "needs a count, and got 'five'"),
        ({"mean": 1, "count": -1}, "needs a count, and got -1"),
        ({"mean": 1, "count": float("nan")}, "needs a count, and got nan"),
        (
            {"loss": 1, "count": 5},
            "the sum of the losses of a batch, and this is a mean (Nll",
        ),
    ],
)
def test_a_loss_is_a_sum_or_a_mean(given: dict[str, Any], expected: str) -> None:
    """Fails if what is given can be taken for the other, or is not named."""
    model, loop = make()
    with pytest.raises(UsageError) as found, loop:
        step = next(iter(loop))
        x, y = next(iter(step.batches()))
        loss = cross_entropy(model(x), y)
        step.backward(**{n: it if n == "count" else loss for n, it in given.items()})
    assert expected in str(found.value)


def mean_of_batch(model: torch.nn.Module, batch: Any) -> hvdtrain.Sums:
    x, y = batch
    return hvdtrain.Sums(cross_entropy(model(x), y), len(y))


def test_an_evaluation_that_returns_a_mean_is_refused() -> None:
    """Fails if a validation loss that is smaller by the size of the batch is reported."""
    model, loop = make(valid=SAMPLES, evaluate=mean_of_batch)
    with pytest.raises(UsageError, match=r"with the mean of the losses .*Sums\.of_means"), loop:
        for step in loop:
            passes(step, model)
            step.update()


@pytest.mark.parametrize("virtual_workers", [None, 3])
def test_means_and_sums_learn_the_same(virtual_workers: int | None) -> None:
    """Fails if a mean, a mean of class weights or a count that is not whole weighs otherwise than
    in a plain loop over the whole batch.
    """
    torch.manual_seed(0)
    x, y = torch.randn(23, 4).double(), torch.arange(23) % 3
    weight = torch.tensor([0.2, 0.3, 0.7]).double()
    first = torch.nn.Linear(4, 3).double()
    plain = copy.deepcopy(first)
    optimizer = torch.optim.SGD(plain.parameters(), 0.5)
    for numbers in hvdtrain.GlobalBatchSampler(23, 8, seed=0).global_batches(0):
        batch = torch.from_numpy(numbers)
        optimizer.zero_grad()
        cross_entropy(plain(x[batch]), y[batch], weight=weight).backward()
        optimizer.step()
    for kind in ("sum", "mean"):
        model = copy.deepcopy(first)
        samples = torch.utils.data.TensorDataset(x, y)
        options = {"global_batch_size": 8, "epochs": 1, "virtual_workers": virtual_workers}
        own = torch.optim.SGD(model.parameters(), 0.5)
        with hvdtrain.Loop(model, own, samples, grad_accum_steps=2, **options) as loop:
            for step in loop:
                for inputs, labels in step.batches():
                    scores = model(inputs)
                    loss = cross_entropy(scores, labels, weight=weight, reduction=kind)
                    step.backward(**{kind: loss}, count=weight[labels].sum())
                step.update()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_a_mean_over_nothing_counts_nothing() -> None:
    """Fails if a batch without a label to learn makes the gradient of the others NaN."""
    model, optimizer = parts()
    x, y = torch.rand(4, 4), torch.tensor([0, 1, -100, -100])
    samples = torch.utils.data.TensorDataset(x, y)
    options = {"global_batch_size": 4, "grad_accum_steps": 4, "epochs": 1}
    with hvdtrain.Loop(model, optimizer, samples, **options) as loop:
        for step in loop:
            for inputs, labels in step.batches():
                count = (labels != -100).sum()
                step.backward(mean=cross_entropy(model(inputs), labels), count=count)
            step.update()
    assert all(it.isfinite().all() for it in model.parameters())


def left_over(kind: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A line of the loop as it was on one device."""
    if kind == "clip_grad_norm_":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)
    elif kind == "zero_grad":
        optimizer.zero_grad()
    elif kind == "zero_grad of the model":
        model.zero_grad()
    elif kind == "zeros":
        optimizer.zero_grad(set_to_none=False)
    else:
        optimizer.step()


LEFT_OVER = ("clip_grad_norm_", "zero_grad", "zero_grad of the model", "zeros", "step")


@pytest.mark.parametrize("virtual_workers", [None, 2])
@pytest.mark.parametrize("kind", [*LEFT_OVER, "step after the update", "clip within the passes"])
def test_lines_of_the_former_loop_are_refused(kind: str, virtual_workers: int | None) -> None:
    """Fails if such a line is used in silence: a gradient that is dropped, scaled or used twice."""
    model, optimizer = parts()
    options = {"global_batch_size": 6, "grad_accum_steps": 2, "epochs": 1}
    with (
        pytest.raises(UsageError) as found,
        hvdtrain.Loop(model, optimizer, SAMPLES, virtual_workers=virtual_workers, **options) as it,
    ):
        for step in it:
            for x, y in step.batches():
                step.backward(mean=cross_entropy(model(x), y), count=len(y))
                if kind == "clip within the passes":
                    left_over("clip_grad_norm_", model, optimizer)
            if kind in LEFT_OVER:
                left_over(kind, model, optimizer)
            step.update()
            if kind == "step after the update":
                left_over("step", model, optimizer)
    stepped = "the script calls optimizer.step()"
    changed = "step 1: code has changed the gradient of weight after step.backward()"
    assert (stepped if "step" in kind else changed) in str(found.value)


def test_the_optimizer_is_the_scripts_after_the_loop() -> None:
    """Fails if the guard of the loop outlives it."""
    model, loop = make(epochs=1)
    optimizer = loop._script.optimizers[0]
    with loop:
        for step in loop:
            passes(step, model)
            step.update()
    before = model.weight.clone()
    model(torch.rand(2, 4)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, model.weight)
