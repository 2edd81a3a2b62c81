"""The examples in one process. tests/parallel/test_examples.py has them on several."""

from __future__ import annotations

import difflib
import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

import hvdtrain
from examples.language_model import CONTEXT, BatchFirst, BatchSecond
from examples.regression import Diabetes
from hvdtrain import Settings, Task, exchange
from hvdtrain.data import Shares
from hvdtrain.data.builtin import import_torchvision
from hvdtrain.data.image_folder import EXTENSIONS
from hvdtrain.data.loader_order import order_of
from hvdtrain.tasks import check_sums
from hvdtrain.train.evaluate import evaluate
from tests.unit.threads import connect, run_ranks

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
README = EXAMPLES.parent / "README.md"
GUIDE = EXAMPLES.parent / "docs" / "guide.md"
OWN_LOOP = EXAMPLES.parent / "docs" / "own-loop.md"
SINGLE_PARTS = [EXAMPLES / "your_script.py", EXAMPLES / "your_script_distributed.py"]
PACKED = [EXAMPLES / "packed_tokens_one_device.py", EXAMPLES / "packed_tokens.py"]
IMAGE_FOLDER = [EXAMPLES / "image_folder_one_device.py", EXAMPLES / "image_folder.py"]
TWINS = [EXAMPLES / "own_loop_one_device.py", EXAMPLES / "own_loop.py"]
TOLERANCE = 1e-12  # float64, a single backward pass


def make(task: type[Task]) -> Task:
    return task(Settings("none", "none", Path(), 0, torch.float64))


def gradients(task: Task, indices: list[int]) -> tuple[float, float, list[torch.Tensor]]:
    """Loss, first metric, and gradients of the sum over these samples, at the seed's weights."""
    data = task.build_data()
    torch.manual_seed(0)
    model = task.build_model().double()
    sums = task.loss(model, data.train.batch(np.array(indices)))
    check_sums(sums, task, len(indices), training=True)
    sums.loss.backward()
    found = [parameter.grad for parameter in model.parameters()]
    return sums.loss.item(), float(sums.metrics[task.metrics[0]]), found


def assert_close(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=TOLERANCE, atol=TOLERANCE)


def test_the_batch_may_be_the_second_dimension() -> None:
    """Fails if either variant takes places for samples: in its data, network or loss."""
    indices = [5, 1, 700]
    first, second = (gradients(make(task), indices) for task in (BatchFirst, BatchSecond))
    assert first[0] == pytest.approx(second[0], rel=TOLERANCE)
    assert first[1] == pytest.approx(second[1], rel=TOLERANCE)
    assert_close(first[2], second[2])


@pytest.mark.parametrize("task", [BatchFirst, BatchSecond, Diabetes])
def test_parts_of_a_batch_add_up(task: type[Task]) -> None:
    """Fails if a task gives means instead of sums."""
    whole, one, rest = (gradients(make(task), part) for part in ([4, 9, 2, 30], [4], [9, 2, 30]))
    assert whole[0] == pytest.approx(one[0] + rest[0], rel=TOLERANCE)
    assert whole[1] == pytest.approx(one[1] + rest[1], rel=TOLERANCE)
    assert_close(whole[2], [a + b for a, b in zip(one[2], rest[2], strict=True)])


@pytest.mark.parametrize("task", [BatchFirst, BatchSecond])
def test_the_model_cannot_see_ahead(task: type[BatchFirst]) -> None:
    """Fails if a character's scores depend on later ones, or on another sample."""
    torch.manual_seed(0)
    model = make(task).build_model().double()
    codes = torch.randint(128, (3, CONTEXT))
    changed = codes.clone()
    changed[1, 20:] = 7

    def scores(rows: torch.Tensor) -> torch.Tensor:
        return model(rows) if task.batch_dimension == 0 else model(rows.t()).transpose(0, 1)

    moved = (scores(codes) - scores(changed)).abs().amax(dim=2)
    assert moved[1, 20:].min() > 1e-3
    moved[1, 20:] = 0
    assert moved.max() < TOLERANCE


def test_valid_text_comes_after_the_train_text() -> None:
    """Fails if windows overlap, are lost, or are in both splits."""
    data = make(BatchFirst).build_data()
    train, valid = (part.windows.flatten().tolist() for part in (data.train, data.valid))
    text = bytes(train).decode() + bytes(valid).decode()
    assert "def bisect_left(" in text[: len(train)]
    assert "def dedent(" in text[len(train) :]
    assert len(data.train) > 1000 and len(data.valid) > 100


def test_absolute_error_is_in_units_of_the_data() -> None:
    """Fails if the error is of scaled targets, or the validation split gave the scale."""
    task = make(Diabetes)
    data = task.build_data()
    _, labels = data.train.batch(np.arange(len(data.train)))
    assert labels.mean().abs() < TOLERANCE
    assert labels.std() == pytest.approx(1)
    nothing = torch.nn.Sequential(torch.nn.Linear(10, 1), torch.nn.Flatten(0)).double()
    for parameter in nothing.parameters():
        torch.nn.init.zeros_(parameter)
    sums = task.evaluate(nothing, data.valid.batch(np.arange(len(data.valid))))
    assert 50 < float(sums.metrics["abs_error"]) / sums.samples < 80  # of 25 to 346


def changed_lines(twins: list[Path]) -> tuple[list[str], list[str]]:
    """The lines that are removed from the first, and added by the second, without empty ones."""
    ordinary, distributed = (path.read_text().splitlines() for path in twins)
    lines = list(difflib.unified_diff(ordinary, distributed, n=0, lineterm=""))[2:]
    removed, added = ([it for it in lines if it[0] == sign and it[1:].strip()] for sign in "-+")
    return removed, added


def test_the_twin_differs_by_seven_lines() -> None:
    """Fails if distributing a script takes more than the seven lines that the README promises."""
    removed, added = changed_lines(TWINS)
    assert len(added) <= 7, added
    assert len(removed) <= 7, removed


def test_the_packed_twin_differs_by_as_many_lines_as_the_page_says() -> None:
    """Fails if the page about token budgets counts otherwise than `diff` does."""
    plain, ours = (path.read_text().splitlines() for path in PACKED)
    lines = [*difflib.unified_diff(plain, ours, n=0, lineterm="")][2:]
    added, removed = (
        [line for line in lines if line[0] == sign and line[1:].strip()] for sign in "+-"
    )
    start = plain.index("class TokenBatches:")
    own = [line for line in plain[start : plain.index("def read(number):")] if line]
    text = " ".join(OWN_LOOP.read_text().split())
    assert f"with {len(own)} lines for batches of its own" in text
    assert f"{len(added)} new lines for {len(removed) - len(own)}, and none of those" in text


def test_packed_tokens_learn_what_the_original_does(
    script: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if the batches of the plain script, made those of the other, end with other weights: as
    they do if tokens weigh otherwise; or if lines that are packed together see each other.
    """
    import_torchvision()
    ours = runpy.run_path(str(PACKED[1]), run_name="__main__")
    order = order_of(ours["loader"])
    assert order is not None and len(ours["batches"]) > 5

    class Drawn:
        def __init__(self, lengths: list[int], tokens: int) -> None:
            self.epoch = 0

        def __len__(self) -> int:
            return len(ours["batches"])

        def __iter__(self) -> Iterator[list[int]]:
            epoch = order.draw(0, self.epoch, 1)
            self.epoch += 1
            return iter([it.tolist() for it in np.split(epoch.indices, epoch.edges[1:-1])])

    source = PACKED[0].read_text()
    assert "batches = TokenBatches(" in source
    plain: dict[str, Any] = {"Drawn": Drawn}
    exec(source.replace("batches = TokenBatches(", "batches = Drawn("), plain)
    for name, weight in plain["model"].state_dict().items():
        torch.testing.assert_close(ours["model"].state_dict()[name], weight, rtol=0, atol=1e-9)
    model, lines, collate = plain["model"], plain["lines"][:7], plain["collate"]
    alone = [
        (len(line["input_ids"]) - 1) * plain["mean_loss"](model, collate([line])) for line in lines
    ]
    together = plain["mean_loss"](model, collate(lines))
    tokens = sum(len(line["input_ids"]) - 1 for line in lines)
    torch.testing.assert_close(sum(alone), together * tokens, rtol=1e-12, atol=0)


def test_the_image_folder_differs_by_as_many_lines_as_the_page_says() -> None:
    """Fails if the page counts other lines than those that distributing the project changes."""
    removed, added = changed_lines(IMAGE_FOLDER)
    text = f"`diff` shows {len(added)} lines in place of {len(removed)}:"
    assert text in " ".join(OWN_LOOP.read_text().split())


def test_the_readme_shows_the_difference_as_it_is() -> None:
    """Fails if the README's diff is no longer that of the scripts."""
    readme = README.read_text()
    ordinary, distributed = (path.read_text().splitlines() for path in TWINS)
    for line in difflib.unified_diff(ordinary, distributed, n=0, lineterm=""):
        if line[0] in "+-" and line[1:].strip() and not line.startswith(("+++", "---")):
            assert f"\n{line}\n" in readme, line


def test_the_task_of_the_guide_is_complete() -> None:
    """Fails if what a user copies from there lacks an import, or is no task."""
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    (code,) = (block for block in blocks if "class Squares" in block)
    names: dict[str, Any] = {}
    exec(code, names)
    task = make(names["Squares"])
    batch = task.build_data().train.batch(np.array([3, 500]))
    sums = task.loss(task.build_model().double(), batch)
    assert check_sums(sums, task, 2, training=True).loss > 0


@pytest.mark.parametrize("size", [1, 3])
def test_the_task_of_the_guide_with_an_auc(size: int) -> None:
    """Fails if what a user copies from there is refused, or its AUC is not that of all samples."""
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    (code,) = (block for block in blocks if "class Tumours" in block)
    names: dict[str, Any] = {}
    exec(code, names)
    task, model = make(names["Tumours"]), make(names["Tumours"]).build_model().double()
    valid = task.build_data().valid

    def work(workers: Any) -> float:
        metrics = evaluate(model, task, valid, Shares(size), workers, torch.device("cpu")).metrics
        return metrics["auc"]

    scores, labels = model(valid.inputs).detach(), valid.labels
    expected = roc_auc_score(labels, scores)
    assert run_ranks(connect(size), work) == pytest.approx([expected] * size, rel=TOLERANCE)


def test_the_loop_of_the_page_with_auc_and_f1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Fails if what a user copies from there is refused, or a figure is not recorded."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", OWN_LOOP.read_text(), re.DOTALL)
    (code,) = (block for block in blocks if "finalize=finalize" in block)
    torch.manual_seed(0)
    model, labels = torch.nn.Linear(4, 3), torch.arange(30) % 3
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.randn(30, 4), labels), 10
    )
    names = {
        "hvdtrain": hvdtrain,
        "cross_entropy": torch.nn.functional.cross_entropy,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), 0.1),
        "loader": loader,
        "valid_loader": loader,
    }
    options = {"max_steps": 3, "device": "cpu", "experiment": "page"}
    monkeypatch.setenv("HVDTRAIN_OPTIONS", json.dumps(options))
    exec(code, names)
    with names["loop"] as loop:
        for step in loop:
            for x, y in step.batches():
                step.backward(mean=names["cross_entropy"](model(x), y), count=len(y))
            step.update()
    chances = model(loader.dataset.tensors[0]).softmax(1).detach()
    auc = roc_auc_score(labels, chances, multi_class="ovr")
    record = json.loads(Path("runs/page/metrics.jsonl").read_text().splitlines()[-1])
    summary = json.loads(Path("runs/page/summary.json").read_text())
    for figures in (record, summary):
        assert figures["valid_auc"] == pytest.approx(auc) and 0 < figures["valid_f1"] <= 1
    assert summary["best"]["valid_auc"] == record["valid_auc"]


def test_the_recipe_with_a_dataloader() -> None:
    """Fails when the documented loop over a DataLoader, on 3 ranks, does not take a rank's share,
    fails on an empty one, or gives another gradient than that of the mean over the global batch.
    """
    blocks = re.findall(r"```python\n(.*?)```", OWN_LOOP.read_text(), re.DOTALL)
    (code,) = (block for block in blocks if "import DataLoader" in block)
    inputs = torch.randn((10, 5), generator=torch.Generator().manual_seed(3)).double()
    dataset = torch.utils.data.TensorDataset(inputs, torch.arange(10) % 3)
    model = torch.nn.Linear(5, 3).double()

    def gradient() -> torch.Tensor | None:
        return None if model.weight.grad is None else model.weight.grad.clone()

    by_rank: list[list[torch.Tensor | None]] = [[], [], []]
    for rank, steps in enumerate(by_rank):
        names = {
            "workers": SimpleNamespace(rank=rank, size=3),
            "optimizer": SimpleNamespace(
                zero_grad=model.zero_grad, step=lambda steps=steps: steps.append(gradient())
            ),
            "model": model,
            "dataset": dataset,
            "cross_entropy": torch.nn.functional.cross_entropy,
            "hvdtrain": hvdtrain,
            "BATCH_SIZE": 4,
            "EPOCHS": 2,
        }
        exec(code, names)
    for number, found in enumerate(zip(*by_rank, strict=True)):
        assert sum(share is None for share in found) == (number % 3 == 2)  # a batch of 2 samples
        order = hvdtrain.GlobalBatchSampler(10, 4, seed=0).global_batches(number // 3 * 10)
        batch = torch.from_numpy(list(order)[number % 3])
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs[batch]), batch % 3).backward()
        mean = sum(share for share in found if share is not None) / 3
        torch.testing.assert_close(mean, model.weight.grad, rtol=TOLERANCE, atol=TOLERANCE)
    assert len(by_rank[0]) == 6


def test_the_guide_lists_the_types_of_images() -> None:
    """Fails if a type is read that is not listed there, or the other way round."""
    text = " ".join(GUIDE.read_text().split())
    (listed,) = re.findall(r"Files of the types (.*?) are images;", text)
    words = listed.replace(" (its first frame)", "").replace(" and ", ", ").split(", ")
    assert [f".{word}" for word in words] == list(EXTENSIONS)


def test_alone_the_twin_is_the_ordinary_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if one process needs a launcher or Horovod, or computes anything else."""
    monkeypatch.setattr(exchange, "_joined", None)
    ordinary, distributed = (
        runpy.run_path(str(path), run_name="__main__") for path in SINGLE_PARTS
    )
    first, second, audit = capsys.readouterr().out.splitlines()
    assert first == second
    assert audit == "audit: nothing compared: a single worker exchanges nothing"
    assert first.startswith("final loss 0.")
    expected, found = (made["model"].state_dict() for made in (ordinary, distributed))
    for name, weight in expected.items():
        assert torch.allclose(found[name], weight, rtol=0, atol=1e-9), name


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_examples_are_short(path: Path) -> None:
    """Fails at 100 lines: an example is to be read."""
    assert len(path.read_text().splitlines()) < 100
