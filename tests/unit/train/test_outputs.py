"""Metrics of the whole validation set that are no sums: outputs of samples, and their figures."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sklearn.metrics import f1_score, roc_auc_score

from hvdtrain.data import PlacedShares, Shares, SharesLike, TensorSplit, VirtualShares
from hvdtrain.data.feeding import Loaded, PartSplit
from hvdtrain.errors import AgreedFailure, HvdtrainError, TrainingError
from hvdtrain.exchange import SingleProcess
from hvdtrain.tasks import Settings, Sums, Task, check_sums
from hvdtrain.train import outputs as outputs_module
from hvdtrain.train.evaluate import Evaluation, evaluate
from tests.unit.jobs import CPU
from tests.unit.threads import connect, run_ranks

Outputs = Mapping[str, torch.Tensor]
CLASSES = 3


class Small(TensorSplit):
    """Batches of two samples, so that a rank has several."""

    batch_size = 2


class Gappy(Small):
    """Every third sample cannot be read."""

    may_skip = True

    def stream(self, batches: Iterator[Any], epoch: int) -> Iterator[Loaded]:
        for indices in batches:
            read = indices[indices % 3 != 0]
            yield Loaded(self.batch(read), len(read), len(indices) - len(read))


class Scored(Task):
    """The accuracy is a sum; the AUC and the macro F1 are not."""

    valid_metrics: tuple[str, ...] | None = ("auc", "accuracy", "f1")

    def __init__(self) -> None:
        super().__init__(Settings("none", "none", Path(), 0, torch.float64))
        self.seen: list[Outputs] = []

    def evaluate(self, model: torch.nn.Module, batch: Any) -> Sums:
        scores, labels = model(batch[0]), batch[1]
        loss = torch.nn.functional.cross_entropy(scores, labels, reduction="sum")
        right = (scores.argmax(1) == labels).sum()
        given = {"scores": scores.softmax(1)[:, 0], "taken": scores.argmax(1), "labels": labels}
        return Sums(loss, len(labels), {"accuracy": right}, given)

    def finalize(self, outputs: Outputs) -> Mapping[str, Any]:
        self.seen.append(outputs)
        labels = outputs["labels"]
        is_first = labels == 0
        mixed = 0 < int(is_first.sum()) < len(labels)
        return {
            "f1": torch.tensor(
                f1_score(labels, outputs["taken"], average="macro"), dtype=torch.float64
            ),
            "auc": roc_auc_score(is_first, outputs["scores"]) if mixed else 0.5,
        }


def split_of(samples: int, kind: type[TensorSplit] = Small) -> TensorSplit:
    generator = torch.Generator().manual_seed(samples)
    inputs = torch.randn((samples, 4), generator=generator, dtype=torch.float64)
    return kind(inputs, torch.randint(CLASSES, (samples,), generator=generator))


def model_of() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(4, CLASSES).double()


def evaluate_on(
    size: int,
    task: Task,
    split: Any,
    shares: Callable[[int], SharesLike] = Shares,
) -> list[Evaluation]:
    """The evaluation on each rank."""
    model = model_of()

    def work(exchange: Any) -> Evaluation:
        return evaluate(model, task, split, shares(size), exchange, CPU)

    return [work(SingleProcess())] if size == 1 else run_ranks(connect(size), work)


def virtual(size: int) -> SharesLike:
    return VirtualShares(Shares(4), Shares(size).sizes(4))


def rank_0_has_none(size: int) -> SharesLike:
    return Shares(size, [float(rank == size - 1) for rank in range(size)])


@pytest.mark.parametrize("shares", [Shares, virtual, rank_0_has_none])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("samples", [1, 2, 5, 7, 40])
def test_figures_are_those_of_scikit_learn_over_all_samples(
    samples: int, size: int, shares: Callable[[int], SharesLike], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a sample is missed, doubled or out of order, where ranks have none, one, or several
    batches of samples, which travel in several pieces; or if a rank has other figures.
    """
    monkeypatch.setattr(outputs_module, "PIECE_BYTES", size * 3 * 32)  # 3 samples of each rank
    split, task = split_of(samples), Scored()
    scores = model_of()(split.inputs)
    chances, taken, labels = scores.softmax(1)[:, 0], scores.argmax(1), split.labels
    mixed = 0 < int((labels == 0).sum()) < samples
    expected = {
        "auc": roc_auc_score(labels == 0, chances.detach()) if mixed else 0.5,
        "accuracy": float((taken == labels).double().mean()),
        "f1": f1_score(labels, taken, average="macro"),
    }
    for evaluation in evaluate_on(size, task, split, shares):
        assert evaluation.samples == samples
        assert list(evaluation.metrics) == list(expected)
        assert evaluation.metrics == pytest.approx(expected, rel=1e-12)
    (seen,) = task.seen  # on rank 0 alone
    assert torch.equal(seen["labels"], labels) and torch.equal(seen["taken"], taken)
    torch.testing.assert_close(seen["scores"], chances.detach(), rtol=1e-12, atol=0)


def test_virtual_workers_give_the_same_bits() -> None:
    """Fails if the batches, and so the bits of outputs, depend on the number of ranks."""
    seen = []
    for size in (1, 2, 3):
        task = Scored()
        evaluate_on(size, task, split_of(23), virtual)
        seen.append(task.seen[0]["scores"])
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])


def test_samples_that_cannot_be_read_are_left_out() -> None:
    """Fails if they are in the outputs, or change the order of the others."""
    split = split_of(20, Gappy)
    for size in (1, 2, 3):
        task = Scored()
        for evaluation in evaluate_on(size, task, split):
            assert evaluation.samples == 13
        readable = torch.arange(20) % 3 != 0
        assert torch.equal(task.seen[0]["labels"], split.labels[readable])


def test_samples_of_single_hosts_come_in_their_order() -> None:
    """Fails if outputs are in the order of ranks, where a later rank has earlier samples."""
    split, task = split_of(20), Scored()

    def shares(size: int) -> SharesLike:
        return PlacedShares([12, 8], [0, 1, 0], [1.0] * size)

    evaluate_on(3, task, PartSplit(split, 0, 20), shares)
    assert torch.equal(task.seen[0]["labels"], split.labels)


def test_outputs_of_any_type_and_shape() -> None:
    """Fails if a type or a shape is changed on the way, or a buffer of the model is kept."""
    buffers = threading.local()  # each rank is a thread, and has a model

    class Various(Scored):
        valid_metrics = ("zero",)

        def evaluate(self, model: torch.nn.Module, batch: Any) -> Sums:
            if not hasattr(buffers, "buffer"):
                buffers.buffer = torch.zeros(2, 3)
            part = buffers.buffer[: len(batch[1])]
            part.copy_(batch[0][:, :3])
            given = {"half": part.bfloat16(), "buffer": part, "right": batch[1] == 0}
            return Sums(part.sum(), len(part), {}, given)

        def finalize(self, outputs: Outputs) -> Any:
            self.seen.append(outputs)
            return 0  # the value of the only figure

    split = split_of(9)
    for size in (1, 3):
        task = Various()
        assert [e.metrics for e in evaluate_on(size, task, split)] == [{"zero": 0.0}] * size
        inputs = split.inputs[:, :3].float()
        expected = {"half": inputs.bfloat16(), "buffer": inputs, "right": split.labels == 0}
        for name, output in expected.items():
            assert torch.equal(task.seen[0][name], output) and task.seen[0][name].is_contiguous()


class MeanScore:
    """A metric object, with the methods of those of torchmetrics."""

    def reset(self) -> None:
        self.scores: list[torch.Tensor] = []

    def update(self, scores: torch.Tensor, labels: torch.Tensor, taken: torch.Tensor) -> None:
        self.scores.append(scores)

    def compute(self) -> torch.Tensor:
        return torch.cat(self.scores).mean()


def test_a_metric_object_takes_the_outputs_by_name() -> None:
    """Fails if it keeps samples of an evaluation before, or is not given all samples."""
    task: Any = Scored()
    task.finalize, task.valid_metrics = MeanScore(), ("accuracy", "mean")
    split = split_of(10)
    expected = model_of()(split.inputs).detach().softmax(1)[:, 0].mean().item()
    for size in (1, 2, 2):
        for evaluation in evaluate_on(size, task, split):
            assert evaluation.metrics["mean"] == pytest.approx(expected, rel=1e-12)
    assert task.finalize.scores == []


FIGURES: dict[str, tuple[Any, str]] = {
    "names": ({"auc": 1.0}, "returned the figures ['auc'], expected ['auc', 'f1']: the names"),
    "no dict": (0.5, "returned a float, expected a dict of figures by name"),
    "NaN": ({"auc": math.nan, "f1": 1}, "auc is nan: return a finite number"),
    "vector": ({"auc": torch.ones(2), "f1": 1}, "auc must be a number, and is a Tensor"),
}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", FIGURES)
def test_wrong_figures_are_refused_on_all_ranks(name: str, size: int) -> None:
    """Fails if a figure is lost or not a number, or a rank waits for ever."""
    task: Any = Scored()
    figures, expected = FIGURES[name]
    task.finalize = lambda outputs: figures
    model = model_of()

    def work(exchange: Any) -> None:
        with pytest.raises(AgreedFailure) as raised:
            evaluate(model, task, split_of(7), Shares(size), exchange, CPU)
        assert f"Scored.finalize: {expected}" in str(raised.value)

    if size == 1:
        work(SingleProcess())
    else:
        run_ranks(connect(size), work)


def test_an_error_in_finalize_is_raised_on_all_ranks() -> None:
    """Fails if ranks other than 0 wait for figures that do not come, or the error is not shown."""
    task: Any = Scored()
    task.finalize = lambda outputs: 1 / 0
    model = model_of()

    def work(exchange: Any) -> None:
        with pytest.raises(AgreedFailure, match="rank 0: ZeroDivisionError"):
            evaluate(model, task, split_of(7), Shares(3), exchange, CPU)

    run_ranks(connect(3), work)


def test_a_loss_that_is_not_finite_comes_first() -> None:
    """Fails if a metric's error about NaN hides that the training has diverged."""
    task, split = Scored(), split_of(7)
    split.inputs[3] = math.nan
    (evaluation,) = evaluate_on(1, task, split)
    assert task.seen == [] and math.isnan(evaluation.loss) and math.isnan(evaluation.metrics["f1"])


def with_outputs(given: Any) -> Sums:
    return Sums(torch.ones(()), 3, {"accuracy": torch.ones(())}, given)


BATCHES: dict[str, tuple[Any, str]] = {
    "rows": ({"x": torch.ones(2, 3)}, "the output x must be a dense tensor of 3 rows, one for"),
    "scalar": ({"x": torch.ones(())}, "one for each sample of the batch, not []"),
    "list": ({"x": [1, 2, 3]}, "not a list"),
    "sparse": ({"x": torch.ones(3).to_sparse()}, "the output x must be a dense tensor"),
    "none": ({}, "there are no outputs, which `finalize` needs"),
    "no dict": (torch.ones(3), "outputs must be a dict of tensors by name, not a Tensor"),
}


@pytest.mark.parametrize("name", BATCHES)
def test_wrong_outputs_of_a_batch_are_refused(name: str) -> None:
    """Fails if outputs that are not of single samples are put together."""
    given, expected = BATCHES[name]
    with pytest.raises(TrainingError) as raised:
        check_sums(with_outputs(given), Scored(), 3, training=False)
    assert expected in str(raised.value)


def test_outputs_without_finalize_are_refused() -> None:
    """Fails if they are dropped silently; a loss in training may return them."""

    class Plain(Task):
        metrics = ("accuracy",)

    task: Any = Plain(Scored().settings)
    with pytest.raises(TrainingError, match=r"outputs \['x'\], and no `finalize` that takes them"):
        check_sums(with_outputs({"x": torch.ones(3)}), task, 3, training=False)
    trained = Sums(torch.ones((), requires_grad=True), 3, {"accuracy": torch.ones(())}, {"x": 1})
    check_sums(trained, task, 3, training=True)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (torch.Tensor.float, "differ in the output x: torch.float64 of shape ['samples', 4] and"),
        (lambda x: x[:, :2], "of shape ['samples', 4] and torch.float64 of shape ['samples', 2]"),
    ],
)
def test_batches_that_differ_are_refused(
    size: int, change: Callable[[torch.Tensor], torch.Tensor], expected: str
) -> None:
    """Fails if outputs of other types or shapes are joined, on one rank or over ranks."""

    class Changing(Scored):
        def evaluate(self, model: torch.nn.Module, batch: Any) -> Sums:
            is_last = bool((batch[0] == split.inputs[5]).all(1).any())
            given = {"x": change(batch[0]) if is_last else batch[0]}
            return Sums(torch.ones(()), len(batch[1]), {"accuracy": torch.ones(())}, given)

    split = split_of(6)
    model = model_of()

    def work(exchange: Any) -> str:
        with pytest.raises(HvdtrainError) as raised:
            evaluate(model, Changing(), split, Shares(size), exchange, CPU)
        return str(raised.value)

    messages = [work(SingleProcess())] if size == 1 else run_ranks(connect(size), work)
    assert all(expected in message for message in messages) and len(set(messages)) == 1


def test_only_rank_0_keeps_the_outputs_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a rank is sent more at a time than a piece, or one other than 0 keeps any."""
    monkeypatch.setattr(outputs_module, "PIECE_BYTES", 3 * 4 * 32)  # 4 samples of each rank
    largest, joined = [0], []
    in_order = outputs_module._in_order

    def counting(pieces: Any) -> Any:
        joined.append(sum(len(piece["labels"]) for piece in pieces))
        return in_order(pieces)

    monkeypatch.setattr(outputs_module, "_in_order", counting)
    model, split = model_of(), split_of(50)

    def work(exchange: Any) -> None:
        gather = exchange.all_gather_object

        def measured(value: Any, name: str) -> Any:
            gathered = gather(value, name)
            if name == "hvdtrain.evaluate.outputs":
                rows = [len(one["labels"]) for one in gathered if one]
                largest.append(max(rows, default=0))
                assert gathered[0] == {}  # rank 0 has its own already
            return gathered

        counted = SimpleNamespace(
            rank=exchange.rank,
            size=exchange.size,
            all_gather_object=measured,
            sum_later=exchange.sum_later,
            broadcast_object=exchange.broadcast_object,
        )
        evaluate(model, Scored(), split, Shares(3), counted, CPU)  # type: ignore[arg-type]

    run_ranks(connect(3), work)
    assert max(largest) == 4 and joined == [50]
