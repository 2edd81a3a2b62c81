"""evaluate and predict on several workers, as threads: what one process gives, from the first."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hvdtrain.cli import make_parser
from hvdtrain.cli.evaluate import VALUES
from hvdtrain.data import Shares, feeding
from hvdtrain.errors import HvdtrainError
from hvdtrain.exchange import SingleProcess
from hvdtrain.pulse import Pulse
from hvdtrain.run import prediction
from hvdtrain.run.joined import JoinedWorkers
from hvdtrain.run.trained import evaluate
from hvdtrain.topology import Topology
from hvdtrain.train import evaluate as evaluation
from tests.data.make import CODE
from tests.data.small import Pictures
from tests.unit.threads import connect, run_ranks

RUN = Path(__file__).parents[2] / "data" / "0.2.0"
EARLIER = RUN / "checkpoints" / "step-00000004"


def parsed(*line: object) -> dict[str, Any]:
    return vars(make_parser().parse_args(list(map(str, line))))


def on_workers(size: int, work: Any) -> list[str]:
    """Do the work on each rank; return the errors that they raise, or ""."""

    def attempt(exchange: Any) -> str:
        topology = Topology(exchange.rank, size, exchange.rank, launched=size > 1)
        try:
            work(JoinedWorkers(exchange, topology, Pulse()))
        except HvdtrainError as error:
            return f"{error.exit_code}: {error}"
        return ""

    return [attempt(SingleProcess())] if size == 1 else run_ranks(connect(size), attempt)


def evaluate_on(size: int, file: Path, *sources: Path) -> list[str]:
    """Evaluate on each rank its source of these, or the only one."""

    def work(workers: JoinedWorkers) -> None:
        source = sources[workers.exchange.rank % len(sources)]
        evaluate(parsed("evaluate", source, *CODE, "--json", file), VALUES, workers)

    return on_workers(size, work)


def test_evaluate_gives_the_same_bits_on_any_number_of_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if a sample is missed or doubled, a sum depends on N in its last bit, or a rank other
    than 0 prints; where shares are uneven, and empty on 8 ranks; or if one process gives others
    than those of a plain evaluation.
    """
    monkeypatch.setattr(feeding, "EVALUATION_BATCH", 7)
    texts, printed = set(), set()
    for size in (1, 2, 3, 8):
        file = tmp_path / f"{size}.json"
        assert evaluate_on(size, file, RUN) == [""] * size
        texts.add(file.read_text())
        printed.add(capsys.readouterr().out)
    assert len(texts) == len(printed) == 1
    figures = json.loads(texts.pop())
    seen: dict[str, Any] = {}

    def kept(*arguments: Any, **options: Any) -> Any:
        seen["model"], seen["task"], seen["split"] = arguments[:3]
        return evaluation.sum_of_rank(*arguments, **options)

    monkeypatch.setattr("hvdtrain.run.trained.sum_of_rank", kept)
    assert evaluate_on(1, tmp_path / "again.json", RUN) == [""]
    plain = evaluation.evaluate(
        *(seen["model"], seen["task"], seen["split"]),
        *(Shares(1), SingleProcess(), torch.device("cpu")),
    )
    assert figures == plain.plain() | {"classes": figures["classes"]}


def test_a_flag_limits_the_samples_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if evaluate takes more samples at a time than the flag has, or, without it, than the
    run that it evaluates took in one pass of training, on any rank.
    """
    lengths: list[int] = []
    sums = evaluation.check_sums

    def counted(given: Any, task: Any, samples: int, training: bool) -> Any:
        lengths.append(samples)
        return sums(given, task, samples, training=training)

    monkeypatch.setattr(evaluation, "check_sums", counted)
    for size in (1, 3):
        for flags, most in (([], 20), (["--eval-batch-size", 9], 9)):
            lengths.clear()

            def work(workers: JoinedWorkers, flags: list[Any] = flags) -> None:
                line = ["evaluate", RUN, *CODE, *flags, "--json", tmp_path / "figures.json"]
                evaluate(parsed(*line), VALUES, workers)

            assert on_workers(size, work) == [""] * size
            assert max(lengths) == most and sum(lengths) == 40


def test_a_failure_of_one_rank_ends_evaluate_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if the others wait for a rank that cannot read a sample, or has other weights; if the
    rank is not named; or if figures are printed or written.
    """
    monkeypatch.setattr(feeding, "EVALUATION_BATCH", 7)
    file = tmp_path / "x.json"
    errors = evaluate_on(3, file, RUN, RUN, EARLIER)
    expected = "parameters differ between ranks in the checkpoint that each has read: rank 2 held"
    assert len(set(errors)) == 1 and errors[0].startswith(f"1: {expected}")
    errors = evaluate_on(3, file, RUN, tmp_path / "none", RUN)
    assert set(errors) == {f"2: rank 1: {tmp_path}/none: no such file or folder"}
    read = Pictures.__getitem__

    def broken(self: Pictures, index: int) -> Any:
        if index == 39:  # read by the last rank alone
            raise OSError("disk on fire")
        return read(self, index)

    monkeypatch.setattr(Pictures, "__getitem__", broken)
    errors = evaluate_on(3, file, RUN)
    assert len(set(errors)) == 1 and errors[0].startswith("1: rank 2: ")
    assert "disk on fire" in errors[0]
    assert not file.exists() and capsys.readouterr().out == ""


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A folder of seven images, and one that is none."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(7):
        image = (Pictures(8, 1000)[number][0][0].numpy() * 256).astype(np.uint8)
        Image.fromarray(image).save(folder / f"{number}.png")
    (folder / "3b.png").write_text("no picture")
    return folder


@pytest.mark.parametrize("skips", [True, False])
def test_predict_gives_one_file_in_order_on_any_number_of_workers(
    skips: bool,
    pictures: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Fails if an image is missed, doubled or out of order; if what cannot be read is not named
    once, or no failure on a rank; or if a rank other than 0 lists, prints or writes.
    """
    monkeypatch.setattr(prediction, "PREDICTED_AT_A_TIME", 2)
    (pictures / "notes.txt").write_text("something else")
    results = set()
    for size in (1, 2, 3, 5):
        file = pictures.parent / f"{size}.json"
        line = ["predict", RUN, pictures, CODE[0], "--json", file]
        line += ["--skip-bad-samples"] if skips else []
        arguments = parsed(*line)
        errors = on_workers(size, partial(prediction.predict, arguments))
        assert len(set(errors)) == 1
        printed = capsys.readouterr()
        results.add((errors[0], printed.out, printed.err, file.read_text()))
    assert len(results) == 1
    error, out, err, text = results.pop()
    assert error.startswith("" if skips else "1: 1 of 8 images could not be read")
    names = [Path(one["image"]).name for one in json.loads(text)]
    assert names == [f"{number}.png" for number in range(7)] and len(out.splitlines()) == 7
    assert err.count("3b.png") == err.count("notes.txt") == 1


def test_predict_refuses_other_weights_on_a_rank(pictures: Path) -> None:
    """Fails if images are classified by two models."""

    def work(workers: JoinedWorkers) -> None:
        source = RUN if workers.exchange.rank else EARLIER
        prediction.predict(parsed("predict", source, pictures, CODE[0]), workers)

    assert all("rank 1 held other values than rank 0" in it for it in on_workers(2, work))
