"""Scripts with a training loop of their own: any number of workers, kills, several optimizers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.parallel.experiments import largest_difference, summary_and_weights
from tests.parallel.launching import (
    BIN,
    CHECKOUT,
    Finished,
    check_exit_code,
    horovodrun,
    hvdtrain,
    run,
)

EXAMPLES = CHECKOUT / "examples"
PYTHON = str(BIN / "python")
RAGGED = "../tests/parallel/scripts/ragged_loop.py"
TWO_OPTIMIZERS = "../tests/parallel/scripts/two_optimizers.py"
KINDS = CHECKOUT / "tests" / "parallel" / "scripts" / "kinds_of_loops.py"
TOLERANCE = 1e-9  # of each tensor's largest weight, in float64


def options(folder: Path, **values: object) -> dict[str, str]:
    """The environment of a script whose run is written to `folder`."""
    place = {"output": str(folder.parent), "experiment": folder.name}
    return {"HVDTRAIN_OPTIONS": json.dumps(place | values)}


def train(line: str, folder: Path, size: int, controller: str, **values: object) -> Finished:
    """Run an example on `size` workers; a single one runs by itself. `line`: name and arguments."""
    name, *arguments = line.split()
    command = [PYTHON, str(EXAMPLES / name), *arguments]
    if name in ("gpt2.py", "lora.py", "packed_tokens.py"):
        command.insert(1, str(CHECKOUT / "tests" / "parallel" / "scripts" / "with_torchvision.py"))
    variables = options(folder, **values)
    if size == 1:
        done = run(command, variables=variables)
    else:
        done = horovodrun(size, controller, command, variables=variables)
    assert done.exit_code == 0, done.output
    return done


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The run of a script on one worker."""

    @cache
    def run_of(script: str) -> Path:
        folder = tmp_path_factory.mktemp("own_loop") / "alone"
        assert "final loss" in train(script, folder, 1, "none").output
        return folder

    return run_of


@pytest.mark.parametrize(
    ("script", "size", "controller", "values"),
    [
        ("own_loop.py", 2, "gloo", {}),
        (RAGGED, 2, "mpi", {"rank_weights": "0,1"}),
        (RAGGED, 3, "gloo", {"audit_every": 5, "audit": "exact", "bucket_bytes": 0}),
    ],
)
def test_own_loop_learns_the_same_on_any_number_of_workers(
    alone: Callable[[str], Path],
    script: str,
    size: int,
    controller: str,
    values: dict[str, object],
    tmp_path: Path,
) -> None:
    """Fails if tokens of uneven shares weigh differently, an empty share fails, gradients are not
    audited, or the size of buckets that is asked for is not used; or if the outputs of validation
    samples come together in another order, or not all of them, where rank 0 has none of them too.
    """
    done = train(script, tmp_path / "x", size, controller, **values)
    expected = summary_and_weights(alone(script))
    summary, weights = summary_and_weights(tmp_path / "x")
    assert largest_difference(weights, expected[1]) < TOLERANCE
    assert summary["train_loss"] == pytest.approx(expected[0]["train_loss"], rel=TOLERANCE)
    if script == RAGGED:
        assert summary["valid_in_order"] == 1 and 0 < summary["valid_auc"] < 1
        assert summary["valid_auc"] == pytest.approx(expected[0]["valid_auc"], rel=TOLERANCE)
    assert summary["bucket_bytes"] == values.get("bucket_bytes", 1 << 20)
    assert summary["audit"]["checked"] == (3 if "audit_every" in values else 0)
    assert done.output.count("final loss") == size  # the script's own last line


def test_the_run_of_a_script_is_evaluated_by_all_workers(
    alone: Callable[[str], Path], tmp_path: Path
) -> None:
    """Fails if `launch -- evaluate` gives other figures than the run has found, or more than once;
    or if a script that fails on one rank, before its loop, leaves the others waiting.
    """
    run_folder, file = alone(RAGGED), tmp_path / "figures.json"
    last = str(run_folder / "checkpoints" / "last")
    line = ["evaluate", last, "--trust-code", "--json", str(file)]
    done = run(hvdtrain("launch", "-np", "3", f"--log-dir={tmp_path}", "--", *line))
    assert done.exit_code == 0, done.output
    figures, (summary, _) = json.loads(file.read_text()), summary_and_weights(run_folder)
    assert figures["samples"] == summary["valid_samples"]
    for name, value in {"loss": figures["loss"], **figures["metrics"]}.items():
        assert value == pytest.approx(summary[f"valid_{name}"], rel=TOLERANCE), name
    assert done.output.count(f" loss {figures['loss']:.6g}") == 1, done.output
    failing = {"FAILS_ON": "1"}
    done = horovodrun(2, "mpi", hvdtrain(*line[:3]), variables=failing)
    check_exit_code(done, "mpi", 1)
    assert done.output.count("rank 1: OSError: a file is not there") == 1, done.output


@pytest.mark.parametrize(
    ("name", "size", "controller"),
    [("gpt2", 3, "gloo"), ("lora", 2, "mpi"), ("packed_tokens", 3, "gloo")],
)
def test_own_loop_of_transformers_learns_the_same_on_any_number_of_workers(
    name: str, size: int, controller: str, tmp_path: Path
) -> None:
    """Fails if tokens weigh differently where shares have other numbers of them."""
    train(f"{name}.py", tmp_path / "alone", 1, "none", max_steps=12)
    train(f"{name}.py", tmp_path / "shared", size, controller, max_steps=12)
    alone, summary = (summary_and_weights(tmp_path / it) for it in ("alone", "shared"))
    assert summary[1].keys() == alone[1].keys()
    assert largest_difference(summary[1], alone[1]) < TOLERANCE
    assert summary[0]["train_loss"] == pytest.approx(alone[0]["train_loss"], rel=TOLERANCE)
    of_the_base = [it for it in alone[1] if "lora_" not in it]
    assert bool(of_the_base) == (name != "lora")


@pytest.mark.parametrize(
    ("script", "size", "controller", "cut"),
    [
        (RAGGED, 3, "gloo", None),
        (RAGGED, 2, "mpi", 7),
        ("weighted_sampler.py", 3, "gloo", 7),
        ("weighted_sampler.py batches", 2, "mpi", 30),
        ("gan.py", 2, "mpi", None),
        (TWO_OPTIMIZERS, 3, "mpi", 7),
        ("gpt2.py --dropout=0.1 --float32", 2, "gloo", None),
        ("lora.py --dropout=0.1 --float32", 2, "gloo", 7),
    ],
)
def test_own_loop_with_virtual_workers_ends_with_the_same_bits(
    script: str, size: int, controller: str, cut: int | None, tmp_path: Path
) -> None:
    """Fails if the number of workers, virtual workers that may move, or a stop after the step `cut`
    and a resume at another number, changes a bit of the parameters or of the trace; of lora.py, if
    a checkpoint of the adapter is not enough; of two_optimizers.py, if iterated data begin anew at
    another sample.
    """
    values = {"virtual_workers": 4, "trace_every": 3, "audit_every": 4}
    train(script, tmp_path / "one", 1, "none", **values)
    several = values | {"rank_weights": "auto"} | ({"max_steps": cut} if cut else {})
    train(script, tmp_path / "several", size, controller, **several)
    if cut:
        train(script, tmp_path / "several", 1, "none", **values, resume="auto")
    runs = [tmp_path / it for it in ("one", "several")]
    hashes = {summary_and_weights(it)[0]["params_sha256"] for it in runs}
    assert len(hashes) == 1
    traces = [(it / "trace.jsonl").read_text() for it in runs]
    assert traces[0].count("\n") >= 6
    assert cut or traces[0] == traces[1]  # the last step before a stop is recorded too


def test_own_loop_is_verified_by_verify_n(tmp_path: Path) -> None:
    """Fails if a script's options do not reach its runs, or a mean loss given for a sum passes."""
    script = tmp_path / "mean_loop.py"
    text = (EXAMPLES / "own_loop.py").read_text()
    changed = text.replace("step.backward(mean=loss", "step.backward(sum=loss")
    assert changed != text
    script.write_text(changed)
    done = run(hvdtrain("verify-n", "-np", "1,2", "--", PYTHON, str(script)), cwd=tmp_path)
    assert done.exit_code == 17, done.output
    assert "first difference: step 1, parameter " in done.output
    assert "a mean loss given for a sum" in done.output
    variables = {"HVDTRAIN_OPTIONS": '{"virtual_workers": 2}'}
    command = hvdtrain("verify-n", "-np", "1,2", "--", PYTHON, str(script))
    done = run(command, cwd=tmp_path, variables=variables)
    assert done.exit_code == 17, done.output  # the same bits on every N, of something else
    assert "wrong in the same way on every N. Likely cause: a mean loss given for" in done.output
    command[-1] = str(EXAMPLES / "own_loop.py")
    done = run(command, cwd=tmp_path, variables=variables)
    assert (done.exit_code, "(the same bits)" in done.output) == (0, True), done.output
    assert re.search(r"one unsplit batch: loss (\S+), in 2 shares \1$", done.output, re.MULTILINE)


def test_own_loop_is_verified_by_verify_resume(tmp_path: Path) -> None:
    """Fails if a script is not found among the processes, or not resumed as it was."""
    script = tmp_path / "long_loop.py"
    text = (EXAMPLES / "own_loop.py").read_text()
    script.write_text(text.replace("BATCH_SIZE = 3", "BATCH_SIZE = 10"))
    values = {"checkpoint_interval": 10, "virtual_workers": 2}
    command = hvdtrain("verify-resume", "-np", "2", "--cuts", "2", "--", PYTHON, str(script))
    variables = {"HVDTRAIN_OPTIONS": json.dumps(values)}
    done = run(command, timeout_s=300, cwd=tmp_path, variables=variables)
    assert done.exit_code == 0, done.output
    expected = r"2 cuts in [12] runs? on 2 workers \(gloo\): every run ended with the same"
    assert re.search(expected, done.output), done.output


@pytest.mark.parametrize("values", [{}, {"virtual_workers": 3}])
def test_own_loop_that_one_rank_leaves_ends_on_all(
    values: dict[str, object], tmp_path: Path
) -> None:
    """Fails if the others wait for a rank that has left the loop, or it is not named."""
    script = str(CHECKOUT / "tests" / "parallel" / "scripts" / "leaving_loop.py")
    variables = {"HVDTRAIN_OPTIONS": json.dumps(values)}
    done = horovodrun(2, "gloo", [PYTHON, script, str(tmp_path)], variables=variables)
    check_exit_code(done, "gloo", 1)
    assert "rank 0 left the loop before step 9, and others did not" in done.output, done.output
    summary = json.loads((tmp_path / "leaving_loop" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("failed", 6)  # noted at the epoch


def test_data_that_differ_between_workers_are_refused(tmp_path: Path) -> None:
    """Fails if workers whose classes have other numbers train together, or if they have under
    `launch`, which gives all of them one order of sets.
    """
    script = str(CHECKOUT / "tests" / "parallel" / "scripts" / "classes_of_a_set.py")
    command = [PYTHON, script, str(tmp_path)]
    done = horovodrun(2, "gloo", command, variables={"PYTHONHASHSEED": "random"})
    check_exit_code(done, "gloo", 2)
    assert "rank 1: the train data have samples with other values, unlike on rank 0" in done.output
    assert not any(tmp_path.iterdir())
    launched = hvdtrain("launch", "-np", "2", f"--log-dir={tmp_path / 'logs'}", "--", *command)
    done = run(launched)
    assert done.exit_code == 0, done.output


def test_own_loop_killed_six_times_ends_with_the_undisturbed_hash(tmp_path: Path) -> None:
    """Fails if a restart loses or repeats a sample, a step of the schedule, or the optimizer's
    state; or if it does not resume by itself.
    """
    values = {"virtual_workers": 3, "checkpoint_interval": 2}
    train(RAGGED, tmp_path / "calm", 1, "none", **values)
    script = str(CHECKOUT / "tests" / "parallel" / "scripts" / "killed_loop.py")
    own = [PYTHON, script, str(EXAMPLES / RAGGED), "3,5,8,10,13,17"]
    command = hvdtrain("launch", "-np", "2", "--restarts=6", f"--log-dir={tmp_path}", "--", *own)
    variables = options(tmp_path / "killed", **values)
    done = run(command, timeout_s=400, variables=variables)
    assert done.exit_code == 0, done.output
    summaries = [summary_and_weights(tmp_path / it)[0] for it in ("calm", "killed")]
    assert summaries[0]["params_sha256"] == summaries[1]["params_sha256"]
    assert summaries[1]["resumed_from"] == 16
    assert done.output.count("killed by SIGKILL") >= 6, done.output


PLAIN = (
    *("reentrant", "reentrant, of a gradient that is sent alone", "bfloat16 before float64"),
    *("not reentrant", "complex", "sparse", "sparse rows", "unfrozen later", "added later"),
)
NORMALISED = ("activated batch norm", "batch norm of SyncBatchNorm", "penalty")


@pytest.mark.parametrize(
    ("size", "controller", "values", "kinds"),
    [
        (1, "none", {"sync_bn": True}, [*PLAIN, *NORMALISED, "contrastive"]),
        (3, "gloo", {"grad_accum_steps": 2}, PLAIN),
        (2, "mpi", {"bucket_bytes": 0}, PLAIN),
        (2, "mpi", {"virtual_workers": 3}, [*PLAIN, "contrastive"]),
        (3, "gloo", {"sync_bn": True}, [*NORMALISED, "contrastive"]),
        (2, "mpi", {"sync_bn": True, "rank_weights": "0,1"}, [*NORMALISED, "contrastive"]),
    ],
)
def test_kinds_of_loops_learn_what_a_plain_one_does(
    size: int, controller: str, values: dict[str, object], kinds: Sequence[str], tmp_path: Path
) -> None:
    """Fails if such a loop is refused on some number of workers, or learns something else there; if
    several loops of one script are not told apart; or if a loop is disturbed by one before it.
    """
    command = [PYTHON, str(KINDS), json.dumps(values | {"output": str(tmp_path)}), *kinds]
    done = run(command) if size == 1 else horovodrun(size, controller, command)
    assert done.exit_code == 0, done.output
    found = re.findall(r"rank \d: ([^:]+): relative difference ([\d.e+-]+)", done.output)
    assert sorted(kind for kind, _ in found) == sorted([*kinds] * size)
    tolerances = {"bfloat16 before float64": 0.02}  # 2 of its 8 bits
    beyond = [it for it in found if float(it[1]) > tolerances.get(it[0], TOLERANCE)]
    assert not beyond, done.output
    audited = done.output.count("10 steps compared with the ring reference, 0 failed")
    assert audited == (len(kinds) if size > 1 else 0)
    further = {f"kinds_of_loops-loop-{number + 2}" for number in range(len(kinds) - 1)}
    assert {it.name for it in tmp_path.iterdir()} == {"kinds_of_loops", *further}


def test_loops_of_a_script_are_resumed_and_numbered_under_launch(tmp_path: Path) -> None:
    """Fails if a restart trains a fold again, or goes on with the run of another fold or of another
    job; if a second job is refused; or if the logs are not in the folder of the run.
    """
    script = str(CHECKOUT / "tests" / "parallel" / "scripts" / "folds.py")
    command = hvdtrain("launch", "-np", "2", "--restarts=1", "--", PYTHON, script)
    (tmp_path / "killed").touch()
    done = [run(command, cwd=tmp_path)]
    (tmp_path / "killed").unlink()
    done.append(run(command, cwd=tmp_path))
    assert [it.exit_code for it in done] == [0, 0], done
    found = [re.findall(r"rank 0: fold (\d): (\d) steps, runs/(\S+)", it.output) for it in done]
    names = ["folds", "folds-loop-2", "folds-loop-3"]
    assert found[0] == [(str(fold), "8", name) for fold, name in enumerate(names)]
    # The first start ends in the second fold.
    (_, steps, first), *others = found[1]
    assert (steps, first) == ("8", "folds-2") and "killed by SIGKILL" in done[1].output
    assert [it[2] for it in others] == ["folds-2", "folds-loop-2-2", "folds-loop-3-2"]
    assert others[0][1] == "0" and 0 < int(others[1][1]) < 8 and others[2][1] == "8"
    second = (tmp_path / "runs" / it for it in ("folds-loop-2", "folds-loop-2-2"))
    assert largest_difference(*(summary_and_weights(it)[1] for it in second)) == 0
    for name in ("folds", "folds-2"):
        logs = tmp_path / "runs" / name / "logs"
        assert {it.name for it in logs.iterdir()} == {
            *("rank.0.log", "rank.1.log", "horovodrun.log")
        }
    assert not (tmp_path / "logs").exists()


def test_a_line_of_the_former_loop_is_refused_as_on_one_worker(tmp_path: Path) -> None:
    """Fails if several workers give another error for it than one does, or one that is about
    Horovod.
    """
    command = [PYTHON, str(KINDS), "{}", "with a line of the former loop"]
    done = horovodrun(2, "gloo", command, variables=options(tmp_path / "run"))
    assert "step 1: code has changed the gradient of weight after step.backward()" in done.output
    assert "finished" not in done.output


def test_own_loop_ends_at_one_step_whichever_rank_asks_for_it(tmp_path: Path) -> None:
    """Fails if a request of one rank ends another step on another number of workers, or leaves the
    others waiting; if a rank is not called with an evaluation, or twice; or if patience counts
    otherwise after a cut and a resume on other numbers of workers.
    """
    script, cut_runs = str(CHECKOUT / "tests/parallel/scripts/ending_loop.py"), tmp_path / "cut"
    results, called = {}, {}
    for size, controller, cut in ((3, "gloo", "6"), (2, "mpi", "9"), (1, "none", "0")):
        output = tmp_path / str(size)
        output.mkdir()
        if cut_runs.exists():
            cut_runs.rename(output / "cut")
        command = [PYTHON, script, str(output), cut]
        done = run(command) if size == 1 else horovodrun(size, controller, command)
        assert done.exit_code == 0, done.output
        printed = re.findall(r"{\"rank\".*}", done.output)
        assert len(printed) == 5 * size
        for line in map(json.loads, printed):
            each = called.setdefault(line["name"], {}).setdefault(size, line["called"])
            assert each == line["called"]
        for name in called.keys() - {"cut"}:
            summary, _ = summary_and_weights(output / name)
            reason = summary["end_reason"].replace(f"rank {size - 1}", "the last rank")
            result = (summary["steps"], reason, summary["params_sha256"], called[name][size])
            assert results.setdefault(name, result) == result, (name, size)
        (output / "cut").rename(cut_runs)
    ends = {name: result[:2] for name, result in results.items()}
    assert ends["before the update"] == (7, "the last rank, before")
    assert ends["after the update"] == (8, "the last rank, after")
    assert ends["in the hook"] == (12, "the last rank, hook")
    steps, reason = ends["patience"]
    assert 9 < steps < 45 and "did not improve on" in reason and "in 3 evaluations" in reason
    summary, _ = summary_and_weights(cut_runs)
    resumed = summary["steps"], summary["end_reason"], summary["params_sha256"]
    assert resumed == results["patience"][:3]
    before = [[number for number, *_ in called["cut"][size]] for size in (3, 2, 1)]
    assert before[:2] == [[4, 5, 6], [8, 9]]
    assert [*before[0][:2], 8, *before[2]] == [number for number, *_ in called["patience"][1]]
