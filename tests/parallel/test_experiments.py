"""Experiments on 1 to 4 workers: what is learned does not depend on N, and failures are named.

All experiments on the same number of workers share one start (tests.parallel.shared).
"""

from __future__ import annotations

import functools
import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.campaigns.agreement import CASES, flags_for
from tests.parallel.experiments import Weights, largest_difference, summary_and_weights
from tests.parallel.launching import CONTROLLERS, Finished, horovodrun, run
from tests.unit.folders import make_folder

ALONE, GLOO_2, MPI_2 = (1, "none"), (2, "gloo"), (2, "mpi")
GLOO_3, MPI_4 = (3, "gloo"), (4, "mpi")
Start = tuple[int, str]  # number of workers, and controller
BITS_STARTS = [ALONE, GLOO_2, MPI_2, GLOO_3, MPI_4]
SAME = 1e-9  # of each tensor's largest weight, in float64: the promise of the README
PLUGINS = "tests.parallel.plugins"

# 1,433 samples in batches of 100: an epoch ends with a short batch of 33.
DIGITS = ["--dtype=float64", "--global-batch-size=100", "--max-steps=30", "--lr=0.1", "--seed=5"]
DIGITS += ["--weight-decay=1e-3", "--warmup-epochs=1", "--sched=cosine"]
LOWER = ["--epochs=4", "--global-batch-size=64", "--lr=0.1", "--audit-every=5"]
# 53 samples a step: uneven on 2. Plain SGD, as Adam would magnify the rounding of gradients that
# are zero but for it (those of attention's key biases).
LANGUAGE = ["--dtype=float64", "--global-batch-size=53", "--max-steps=8", "--lr=0.1"]
REGRESSION = ["--task=examples.regression:Diabetes", "--dtype=float64", "--global-batch-size=33"]
PICTURES = ["--model=tests.unit.jobs:plain", "--dtype=float64", "--image-size=12", "--epochs=2"]
PICTURES += ["--lr=0.01", "--data=imagefolder:{pictures}", "--global-batch-size=10"]
COMPILED = ["--model=tests.unit.jobs:with_dropout", "--compile", "--virtual-workers=4"]
COMPILED += ["--global-batch-size=40", "--max-steps=6", "--lr=0.05", "--audit-compute=2"]
EXACT = ["--audit-every=1", "--audit=exact"]
EVERY_THIRD = ["--audit-every=3", "--audit=exact"]
CHECKED = ["--trace-every=3", "--audit-compute=2"]
OWN_BUFFERS = "batch norm, dropout, own buffers"
# One hash for each, in float32, on 1 to 4 workers and over both controllers.
BITS = {
    # Shares of 20 samples, and of 6 or 7 at the end of an epoch.
    OWN_BUFFERS: [f"--model={PLUGINS}:dropout_everywhere", "--opt=adamw"]
    + ["--virtual-workers=5", "--global-batch-size=100", "--max-steps=17", "--lr=0.01"]
    + ["--clip-grad=0.5", "--model-ema", "--model-ema-decay=0.9", "--sched=cosine"],
    # Passes of 0 and 1 sample: 7 or 8 samples, three at a time, by 8 virtual workers.
    "empty shares, accumulation": [f"--model={PLUGINS}:lenet_with_dropout", "--virtual-workers=8"]
    + ["--global-batch-size=23", "--grad-accum-steps=3", "--max-steps=12", "--lr=0.05"],
    "resnet": [f"--model={PLUGINS}:resnet_with_dropout", "--virtual-workers=4", "--channels-last"]
    + ["--global-batch-size=101", "--max-steps=3", "--lr=0.05"],
    "transformer": ["--task=examples.language_model:WithDropout", "--virtual-workers=6"]
    + ["--opt=adamw", "--lr=0.003", "--global-batch-size=53", "--max-steps=8", "--amp=bf16"],
    "tokens, rank weights": ["--task=tests.parallel.tasks:Tokens", "--virtual-workers=5"]
    + ["--global-batch-size=33", "--max-steps=20", "--lr=0.1", "--rank-weights"],
    # Evaluations after the steps 4, 8 and 12, of which none can improve on the first.
    "patience": [f"--model={PLUGINS}:lenet_with_dropout", "--virtual-workers=4", "--lr=0.05"]
    + ["--global-batch-size=100", "--eval-every=4", "--patience=2", "--min-delta=1"],
    # On two workers over Gloo, processes read ahead.
    "folder": ["--model=tests.unit.jobs:with_dropout", "--image-size=12", "--epochs=3"]
    + ["--mixup=0.4", "--cutmix=1", "--lr=0.01", "--data=imagefolder:{pictures}"]
    + ["--global-batch-size=22", "--workers={readers}", "--virtual-workers=4"],
    "double": [
        f"--model={PLUGINS}:dropout_and_lazy_buffer",
        "--dtype=float64",
        "--virtual-workers=5",
    ]
    + ["--global-batch-size=96", "--max-steps=5", "--lr=0.05"],
}
FEATURES = {
    "lenet batch 100 accumulation 3": MPI_4,
    "lenet rank weights, one of them 0": GLOO_3,
    "lenet adamw, clipping, average of weights": MPI_2,
}  # a few of the campaign's cases: `python -m tests.campaigns.agreement` runs them all
TRAIN_PICTURES, VALID_PICTURES = 2 * 11, 2 * 4

SHARED = "from tests.parallel.shared import main; main()"
WITHOUT_HOROVOD = "import sys; sys.modules['horovod'] = sys.modules['mpi4py'] = None; "

# Name: flags of `train`, and the starts that it is part of. Those that fail come last.
EXPERIMENTS: dict[str, tuple[list[str], list[Start]]] = {
    "digits": ([*DIGITS, "--audit-every=3"], [ALONE, GLOO_2, MPI_2, GLOO_3, MPI_4]),
    **{  # three epochs; the campaign's are longer
        case: ([*CASES[case][0], "--max-steps=40"], [ALONE, start])
        for case, start in FEATURES.items()
    },
    "fp16 compression": ([*LOWER, "--compression=fp16"], [GLOO_2]),
    "bf16": ([*LOWER, "--amp=bf16"], [GLOO_2]),
    # A small network: without hardware for it, float16 is slow.
    "fp16": ([*LOWER, "--model=tests.unit.jobs:plain", "--amp=fp16", "--clip-grad=1"], [GLOO_2]),
    **{
        task: ([f"--task=examples.language_model:{task}", *LANGUAGE, "--audit-every=4"], starts)
        for task, starts in {"BatchFirst": [ALONE, MPI_2], "BatchSecond": [GLOO_2]}.items()
    },
    **{
        name: ([*flags, "--seed=3", *EVERY_THIRD, *CHECKED], BITS_STARTS)
        for name, flags in BITS.items()
    },
    "regression": ([*REGRESSION, "--epochs=3", "--lr=0.05"], [ALONE, GLOO_2]),
    "pictures": ([*PICTURES, "--audit-every=1", "--workers=1"], [ALONE, GLOO_3, MPI_2]),
    "mixed, channels last": (
        [*DIGITS, "--mixup=0.4", "--cutmix=1", "--channels-last", "--audit-every=5"],
        [ALONE, GLOO_2],
    ),
    "compiled": ([*COMPILED, "--trace-every=3"], [ALONE, GLOO_2]),
    "digits, computed again": ([*DIGITS, "--audit-every=3", "--grad-checkpointing"], [GLOO_2]),
    "computed again": (
        [*BITS[OWN_BUFFERS], "--seed=3", *EVERY_THIRD, *CHECKED, "--grad-checkpointing"],
        [ALONE, GLOO_2],
    ),
    "exact": (
        ["--max-steps=20", "--global-batch-size=50", "--bucket-bytes=9999", *EXACT],
        [GLOO_3, MPI_4],
    ),
    "slow worker": (
        [f"--model={PLUGINS}:throttled", "--virtual-workers=3", "--max-steps=41", "--lr=0.01"]
        + ["--global-batch-size=30", "--log-interval=10"],
        [ALONE, GLOO_3],
    ),
    # The last batch of an epoch holds 3 samples: a share of 1 would meet batch norm.
    "small shares": ([f"--model={PLUGINS}:small_resnet", "--global-batch-size=130"], [MPI_2]),
    "infinite loss": (["--lr=1e30"], [MPI_2]),
    "no derivative": (
        [f"--model={PLUGINS}:has_no_derivative", "--checkpoint-interval=1", "--max-steps=8"],
        [GLOO_2, MPI_2],
    ),
    "unfrozen layer": ([f"--model={PLUGINS}:grows"], [MPI_2]),
    # It spoils the exchange for all that follows.
    "flipped bit": ([f"--model={PLUGINS}:flips_a_bit", "--max-steps=9", *EXACT], [GLOO_2, MPI_2]),
}


@functools.cache
def train_all(start: Start, root: Path) -> tuple[Path, Finished]:
    """Run all experiments of a start in one job; return the folder of their runs, and its end."""
    size, controller = start
    folder, pictures = root / f"{controller}-{size}", root / "pictures"
    readers = int(start == GLOO_2)
    if not pictures.exists():
        make_folder(pictures, TRAIN_PICTURES // 2, VALID_PICTURES // 2)
    folder.mkdir()
    flags = {
        name: [flag.format(pictures=pictures, readers=readers) for flag in flags_for(flags, size)]
        for name, (flags, starts) in EXPERIMENTS.items()
        if start in starts
    }
    (folder / "experiments.json").write_text(json.dumps(flags))
    command = [sys.executable, "-c", SHARED if size > 1 else WITHOUT_HOROVOD + SHARED, str(folder)]
    try:
        done = run(command) if size == 1 else horovodrun(size, controller, command, timeout_s=560)
    except AssertionError as error:  # it hung: once is enough for all tests of this start
        done = Finished(-1, str(error), 0)
    return folder, done


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Start], Path]:
    """Return a function of a start: the folder of its runs, once all of them have ended."""
    root = tmp_path_factory.mktemp("experiments")

    def find(start: Start) -> Path:
        folder, done = train_all(start, root)
        assert done.exit_code == 0, done.output
        return folder

    return find


Result = Callable[[str, Start], tuple[dict, Weights]]


@pytest.fixture(scope="module")
def result(folder: Callable[[Start], Path]) -> Result:
    """Return a function of the name and the start of an experiment: its summary and weights."""

    def read(name: str, start: Start) -> tuple[dict, Weights]:
        assert errors_of(name, folder(start), start[0]) == [""] * start[0]
        summary, weights = summary_and_weights(folder(start) / name)
        assert summary["audit"]["failed"] == 0
        return summary, weights

    return read


@pytest.mark.parametrize("start", [GLOO_2, MPI_2, GLOO_3, MPI_4])
def test_n_workers_learn_what_one_does(start: Start, result: Result) -> None:
    """Fails if an audit fails or is left out, a sample is lost, N changes the result, or a single
    process imports horovod or mpi4py.
    """
    (summary, weights), (alone, expected) = result("digits", start), result("digits", ALONE)
    assert summary["status"] == "finished"
    assert (summary["world_size"], summary["controller"]) == start
    assert (summary["steps"], summary["samples_seen"]) == (30, 2 * 1433)
    assert summary["valid_samples"] == 364
    assert (summary["audit"]["checked"], alone["audit"]["checked"]) == (10, 0)
    worst = summary["audit"]["worst_error_over_bound"]
    assert worst == 0 if start[0] == 2 else 0 < worst <= 1  # two float64 terms: one order only
    assert summary["train_loss"] == pytest.approx(alone["train_loss"], rel=1e-9)
    assert summary["valid_accuracy"] == alone["valid_accuracy"]
    assert largest_difference(weights, expected) <= SAME


@pytest.mark.parametrize(("case", "start"), FEATURES.items())
def test_features_do_not_depend_on_n(case: str, start: Start, result: Result) -> None:
    """Fails if accumulation, weights, clipping or averages make N matter.

    (Batch norm over ranks is in `checks.py`.)
    """
    (summary, weights), (alone, expected) = result(case, start), result(case, ALONE)
    assert summary["samples_seen"] == alone["samples_seen"]
    assert largest_difference(weights, expected) <= CASES[case][1]


@pytest.mark.parametrize("precision", ["fp16 compression", "bf16", "fp16"])
def test_lower_precisions_are_audited(precision: str, result: Result) -> None:
    """Fails if their own bound raises a false alarm, or nothing is learned any more."""
    summary, _ = result(precision, GLOO_2)
    assert summary["audit"]["checked"] == 18
    assert summary["valid_accuracy"] > 0.8


@pytest.mark.parametrize(("task", "start"), [("BatchFirst", MPI_2), ("BatchSecond", GLOO_2)])
def test_the_language_model(task: str, start: Start, result: Result) -> None:
    """Fails if the number of workers, or the place of the batch among the dimensions, matters."""
    (summary, weights), (alone, expected) = result(task, start), result("BatchFirst", ALONE)
    assert largest_difference(weights, expected) < SAME
    for figure in ("train_loss", "valid_loss", "valid_accuracy"):
        assert summary[figure] == pytest.approx(alone[figure], rel=1e-9), figure
    assert summary["audit"]["checked"] == 2


def test_the_regression(result: Result, folder: Callable[[Start], Path]) -> None:
    """Fails if uneven shares change what is learned, the metric, or which checkpoint is best."""
    (one, expected), (two, weights) = result("regression", ALONE), result("regression", GLOO_2)
    assert largest_difference(weights, expected) < SAME
    assert two["valid_abs_error"] == pytest.approx(one["valid_abs_error"], rel=1e-9)
    assert one["valid_abs_error"] < 60  # of about 66 for the mean
    best = [folder(start) / "regression/checkpoints/best" for start in (ALONE, GLOO_2)]
    assert best[0].read_text() == best[1].read_text()


@pytest.mark.parametrize("start", [GLOO_3, MPI_2])
def test_readers_make_no_difference(
    start: Start, result: Result, folder: Callable[[Start], Path]
) -> None:
    """Fails if the transform of an image depends on who reads it, an image is lost, an audit
    alarms, or a reading process is left behind.
    """
    (summary, weights), (_, expected) = result("pictures", start), result("pictures", ALONE)
    assert largest_difference(weights, expected) < SAME
    seen = (summary["samples_seen"], summary["valid_samples"])
    assert seen == (2 * TRAIN_PICTURES, VALID_PICTURES)
    assert summary["audit"]["checked"] == 6
    run_folder = folder(start) / "pictures"
    steps = map(json.loads, (run_folder / "metrics.jsonl").read_text().splitlines())
    assert next(step for step in steps if "epoch" in step)["valid_accuracy"] is not None
    assert json.loads((run_folder / "evaluation.json").read_text())["classes"] == ["cat", "dog"]


@pytest.mark.parametrize("name", BITS)
def test_the_same_bits_on_any_number_of_workers(name: str, result: Result) -> None:
    """Fails if a random number, a statistic, a sum or a metric depends on the rank that adds it, an
    exact audit fails, another rank computes other gradients of a share, or the number of workers
    changes the best checkpoint or the trace.
    """
    alone, _ = result(name, ALONE)
    assert alone["samples_seen"] > 0 < alone["train_loss"]
    assert (alone["end_reason"] is not None) == (name == "patience")
    assert name != "patience" or alone["steps"] == 12
    same = ("params_sha256", "train_loss", "valid_loss", "best", "samples_seen", "trace")
    assert alone["trace"]["records"] == -(-alone["steps"] // 3)  # and the last step
    for start in BITS_STARTS[1:]:
        summary, _ = result(name, start)
        assert {key: summary[key] for key in same} == {key: alone[key] for key in same}, start
        assert summary["audit"]["checked"] == summary["steps"] // 3
        computed = summary["compute_audit"]
        assert computed["failed"] == 0 < computed["checked"] <= summary["steps"] // 2


def test_recipes_do_not_depend_on_n(result: Result) -> None:
    """Fails if samples are mixed otherwise on another number of workers, or Horovod refuses or
    permutes the gradients of kernels with the channels last.
    """
    (summary, weights), (alone, expected) = (
        result("mixed, channels last", start) for start in (GLOO_2, ALONE)
    )
    assert largest_difference(weights, expected) <= SAME
    assert summary["train_loss"] == pytest.approx(alone["train_loss"], rel=1e-9)
    assert summary["audit"]["checked"] == 6


def test_compiled_networks_have_the_same_bits(result: Result) -> None:
    """Fails if compiled code depends on the rank, or another rank's copy is not compiled."""
    summary, alone = (result("compiled", start)[0] for start in (GLOO_2, ALONE))
    for key in ("params_sha256", "train_loss", "valid_loss", "trace"):
        assert summary[key] == alone[key], key
    assert summary["compute_audit"] == {"checked": 3, "failed": 0}


@pytest.mark.parametrize(
    ("name", "plain", "starts"),
    [
        ("digits, computed again", "digits", [GLOO_2]),
        ("computed again", OWN_BUFFERS, [ALONE, GLOO_2]),
    ],
)
def test_activations_that_are_computed_again(
    name: str, plain: str, starts: list[Start], result: Result
) -> None:
    """Fails if a second computation has other random numbers or buffers, changes them, or makes an
    audit alarm.
    """
    for start in starts:
        summary, expected = result(name, start)[0], result(plain, start)[0]
        for key in ("params_sha256", "train_loss", "valid_loss", "audit", "trace"):
            assert summary[key] == expected[key], (key, start)
        assert summary.get("compute_audit") == expected.get("compute_audit")


@pytest.mark.parametrize("start", [GLOO_3, MPI_4], ids=["gloo", "mpi"])
def test_exact_audits_of_training(result: Result, start: Start) -> None:
    """Fails if the order of summation is not reproduced to the bit in live training."""
    summary, _ = result("exact", start)
    assert summary["audit"] == {"checked": 20, "failed": 0, "worst_error_over_bound": 0.0}


def test_a_slow_worker_is_named(result: Result, folder: Callable[[Start], Path]) -> None:
    """Fails if the worker that computes for longer is not named within 40 steps, or another is, or
    what is learned depends on it.
    """
    (alone, _), (summary, _) = (result("slow worker", start) for start in (ALONE, GLOO_3))
    assert (alone["stragglers"], alone["params_sha256"]) == ([], summary["params_sha256"])
    (record,) = [record for record in summary["stragglers"] if record["phase"] == "compute"]
    assert (record["rank"], record["host"]) == (1, socket.gethostname())
    assert record["steps"] >= 30 and record["ratio"] > 1.4
    lines = (folder(GLOO_3) / "slow worker/metrics.jsonl").read_text().splitlines()
    named = [slow for line in map(json.loads, lines) for slow in line.get("stragglers", ())]
    assert {slow["rank"] for slow in named if slow["phase"] == "compute"} == {1}
    _, done = train_all(GLOO_3, folder(GLOO_3).parent)
    assert done.output.count(f"rank 1 on {record['host']} is slow: compute ") == 1


def errors_of(name: str, folder: Path, size: int) -> list[str]:
    return [(folder / f"{name}.rank-{rank}").read_text() for rank in range(size)]


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_a_lowest_bit_is_found_by_an_exact_audit(
    controller: str, folder: Callable[[Start], Path]
) -> None:
    """Fails if one bit of one element, within every bound, passes."""
    runs = folder((2, controller))
    for error in errors_of("flipped bit", runs, 2):
        assert error.startswith("exit code 17: audit: reduced gradients are wrong at step 4"), error
        assert "parameter conv1.weight, index [3, 0, 1, 2]: reduced" in error
        assert "and not a bit may differ" in error
        assert "All ranks hold the same wrong values" in error
    assert len(list((runs / "flipped bit/audit/step-00000004").iterdir())) == 2


@pytest.mark.parametrize(
    ("name", "start", "texts"),
    [
        ("small shares", MPI_2, ["some worker gets 1 at a time", "Add --sync-bn"]),
    ],
)
def test_refused_before_training(
    name: str, start: Start, texts: list[str], folder: Callable[[Start], Path]
) -> None:
    """Fails if what cannot be kept is promised, or a folder is made for a run that never was."""
    runs = folder(start)
    for error in errors_of(name, runs, start[0]):
        assert error.startswith("exit code 2: "), error
        assert all(error.count(text) == 1 for text in texts), error
    assert not (runs / name).exists()


@pytest.mark.parametrize(
    ("name", "start", "text", "kept"),
    [
        ("infinite loss", MPI_2, "the loss is not finite at step 2 on rank 0 (loss nan)", None),
        (
            "no derivative",
            GLOO_2,
            "the gradient of root is not finite at step 4 on rank 1, while the loss is",
            "step-00000003\n",
        ),
        (
            "no derivative",
            MPI_2,
            "the gradient of root is not finite at step 4 on rank 1, while the loss is",
            "step-00000003\n",
        ),
        ("unfrozen layer", MPI_2, "2 added or unfrozen (such as hidden.", None),
    ],
)
def test_failures_during_training(
    name: str, start: Start, text: str, kept: str | None, folder: Callable[[Start], Path]
) -> None:
    """Fails if training goes on, a rank reports something else, the message does not name step,
    parameter or rank, or unusable weights are saved.
    """
    runs = folder(start)
    for error in errors_of(name, runs, start[0]):
        assert error.startswith("exit code 1: ") and error.count(text) == 1, error
    assert json.loads((runs / name / "summary.json").read_text())["status"] == "failed"
    last = runs / name / "checkpoints" / "last"
    assert (last.read_text() if last.exists() else None) == kept
