"""`--resume` as a user meets it: processes of their own, and the folder that they go on from."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from hvdtrain.config.options import build_config
from hvdtrain.data import TensorSplit
from hvdtrain.data.splits import fingerprint
from hvdtrain.errors import UsageError
from hvdtrain.exchange import SingleProcess
from hvdtrain.records.directory import RunDirectory
from hvdtrain.run.resume import Resumable, find_resumable, refuse_changed_data
from hvdtrain.run.tasks import find_source
from hvdtrain.train.checkpoint import Checkpoints, Snapshot, load_checkpoint, read_manifest
from tests.unit.cli.test_cli import read_summary, read_tree
from tests.unit.commands import command, environment

NAME = "lenet-digits"
OPTIONS: dict[str, Any] = {
    "max_steps": 60,
    "global_batch_size": 64,
    "seed": 3,
    "lr": 0.02,
    "sched": "cosine",
    "model_ema": True,
    "model_ema_decay": 0.9,
    "log_interval": 5,
    "eval_interval": 2,
    "checkpoint_interval": 10,
    "keep_checkpoints": 2,
    "resume": "auto",
}
TIMES = {"samples_per_s", "data_s", "compute_s", "exchange_s", "update_s"}


def start(folder: Path, output: str, **changes: Any) -> subprocess.Popen[str]:
    flags = []
    for name, value in (OPTIONS | {"output": output} | changes).items():
        flag = f"--{name.replace('_', '-')}"
        flags += [flag] if value is True else [f"{flag}={value}"]
    return subprocess.Popen(
        command("train", *flags),
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def records(run: Path) -> list[dict]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if name not in TIMES}
        for line in lines
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds `whole`, an undisturbed run, and `cut`, one that had a SIGTERM on its way."""
    folder = tmp_path_factory.mktemp("resume")
    cut, whole = start(folder, "cut"), start(folder, "whole")
    metrics = folder / "cut" / NAME / "metrics.jsonl"
    deadline = time.monotonic() + 90
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 4):
        assert cut.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    cut.send_signal(signal.SIGTERM)
    code, _, err = finish(cut)
    assert (code, err) == (143, "hvdtrain: stopped by SIGTERM\n")
    code, _, err = finish(whole)
    assert (code, err) == (0, "")
    shutil.copytree(folder / "whole", folder / "kept")  # for tests that change their copy
    return folder


def test_nothing_to_resume_starts_from_the_beginning(folder: Path) -> None:
    """Fails when `--resume auto` needs a run to be there, or prints that it has resumed."""
    summary = read_summary(folder / "whole" / NAME)
    assert (summary["status"], summary["steps"]) == ("finished", 60)
    assert summary["resumed_from"] is None


def test_a_stopped_run_ends_as_the_undisturbed_one(folder: Path) -> None:
    """Fails when the parameters, a record or a figure of the summary differ after a SIGTERM."""
    run, whole = folder / "cut" / NAME, folder / "kept" / NAME
    stopped = read_summary(run)
    assert stopped["status"] == "stopped" and 20 <= stopped["steps"] < 60
    saved = load_checkpoint(run / "checkpoints" / (run / "checkpoints/last").read_text().strip())[1]
    code, out, err = finish(start(folder, "cut"))
    assert (code, err) == (0, "") and "continuing from" in out
    resumed, undisturbed = read_summary(run), read_summary(whole)
    assert resumed.pop("resumed_from") == saved["step"] > 0
    undisturbed.pop("resumed_from")
    for summary in (resumed, undisturbed):
        own = ("samples_per_s", "wall_s", "peak_memory_mib", "started", "ended", "command")
        for figure in own:
            summary.pop(figure)
    assert resumed == undisturbed
    assert records(run) == records(whole)
    kept = [{path.name for path in (r / "checkpoints").iterdir()} for r in (run, whole)]
    assert kept[0] == kept[1]


def test_a_checkpoint_records_the_best_one(folder: Path) -> None:
    """Fails when a run that goes on from its best checkpoint has forgotten how good that was, or
    the summary names another one as the best.
    """
    run = folder / "kept" / NAME
    best = read_summary(run)["best"]
    name = (run / "checkpoints" / "best").read_text().strip()
    assert name == f"step-{best['step']:08}"
    accuracies = {r["step"]: r["valid_accuracy"] for r in records(run) if "valid_accuracy" in r}
    assert best["valid_accuracy"] == max(accuracies.values()) == accuracies[best["step"]]
    progress = load_checkpoint(run / "checkpoints" / name)[1]["progress"]
    assert progress["best"] == best["valid_accuracy"] and progress["summary"]["best"] == best


def test_a_finished_run_is_left_alone(folder: Path) -> None:
    """Fails when resuming a finished run changes a byte of it, or does not end in 0."""
    before = read_tree(folder / "whole")
    code, out, err = finish(start(folder, "whole"))
    assert (code, err) == (0, "")
    assert read_tree(folder / "whole") == before
    sha = read_summary(folder / "whole" / NAME)["params_sha256"]
    assert sha[:8] in out or f"{read_summary(folder / 'whole' / NAME)['valid_accuracy']:.2%}" in out


def test_another_experiment_is_refused(folder: Path) -> None:
    """Fails when resuming with another --lr trains on, changes a byte, or hides the flag."""
    before = read_tree(folder / "whole")
    code, _, err = finish(start(folder, "whole", lr=0.03))
    assert code == 2 and len(err.splitlines()) == 1
    assert "--lr=0.03: the run in whole/lenet-digits was started with 0.02" in err
    assert "give --lr 0.02; or give all its options: --config whole/lenet-digits/config.yaml" in err
    assert read_tree(folder / "whole") == before


@pytest.fixture
def unfinished(folder: Path, tmp_path: Path) -> Path:
    """A copy of a run with the checkpoints of the steps 50 and 60 that was killed."""
    run = tmp_path / "out" / NAME
    shutil.copytree(folder / "kept" / NAME, run)
    (run / "summary.json").unlink()
    assert {path.name for path in (run / "checkpoints").glob("step-*")} >= {
        *("step-00000050", "step-00000060")
    }
    return run


def find(run: Path, size: int = 1, **changes: Any) -> Resumable:
    options = OPTIONS | {"output": str(run.parent)} | changes
    exchange = SingleProcess()
    exchange.size = size
    found = find_resumable(build_config(options), exchange)
    assert found is not None
    if found.resumed.finished is None:
        found.make_ready()
    found.directory.close()
    return found


def refused(run: Path, **changes: Any) -> str:
    """The message, once it is sure that nothing was touched and the lock is free."""
    before = read_tree(run)
    with pytest.raises(UsageError) as caught:
        find(run, **changes)
    assert read_tree(run) == before
    RunDirectory(run, reopen=True).close()
    return str(caught.value)


def steps(run: Path) -> list[int]:
    return [record["step"] for record in records(run)]


def test_the_newest_checkpoint_is_found(unfinished: Path, capsys) -> None:
    """Fails when an older one is taken, or the batch is not the one of the run."""
    found = find(unfinished, global_batch_size=None)
    assert found.resumed.state is not None and found.resumed.finished is None
    assert (found.resumed.state["step"], found.resumed.global_batch_size) == (60, 64)
    assert "continuing from" in capsys.readouterr().out
    assert max(steps(unfinished)) == 60


@pytest.mark.parametrize("name", ["model.safetensors", "training_state.pt", "manifest.json"])
def test_a_damaged_checkpoint_is_passed_over(unfinished: Path, name: str, capsys) -> None:
    """Fails when the one before is not used, nothing is printed, or later records stay."""
    place = unfinished / "checkpoints" / "step-00000060" / name
    place.write_bytes(place.read_bytes()[:-20])
    found = find(unfinished)
    assert found.resumed.state is not None and found.resumed.state["step"] == 50
    out = capsys.readouterr().out
    assert "skipping a damaged checkpoint" in out and str(place) in out
    assert max(steps(unfinished)) == 50


PLACES = {
    "parameter": (("model", "hidden.weight"), "the parameter hidden.weight is not finite"),
    "optimizer": (("optimizer", "state", 3, "momentum_buffer"), "momentum_buffer of conv2.bias"),
    "average": (("update", "average", "module.conv1.bias"), "moving average of conv1.bias"),
}


def poison(path: Path, keys: tuple[Any, ...]) -> None:
    """Save a checkpoint again with NaN in one element of its state, as an older version could."""
    weights, state = load_checkpoint(path)
    place = state
    for key in keys:
        place = place[key]
    place.reshape(-1)[-1] = torch.nan
    checkpoints = Checkpoints(path.parent, keep=9, run=read_manifest(path)["run"])
    checkpoints.save(Snapshot(state["step"], "", weights, state), is_best=True)
    checkpoints.wait()


@pytest.mark.parametrize("place", PLACES)
def test_a_state_that_is_not_finite_is_passed_over(unfinished: Path, place: str, capsys) -> None:
    """Fails if a run goes on from NaN, the reason is not said, or `last` still names it."""
    keys, reason = PLACES[place]
    newest, before = (unfinished / "checkpoints" / f"step-000000{step}" for step in (60, 50))
    poison(newest, keys)
    reported = refused(unfinished, resume=str(newest))
    assert reported.startswith(f"--resume={newest}: {newest}: ") and reason in reported
    found = find(unfinished)
    assert found.resumed.state is not None and found.resumed.state["step"] == 50
    out = capsys.readouterr().out
    assert f"skipping a damaged checkpoint: {newest}" in out and reason in out
    assert (unfinished / "checkpoints" / "last").read_text() == f"{before.name}\n"


def test_a_checkpoint_set_aside_by_a_kill_is_found(unfinished: Path) -> None:
    """Fails if a run goes on from an older checkpoint than the one whose replacing was killed."""
    newest = unfinished / "checkpoints" / "step-00000060"
    newest.rename(newest.with_name(f".{newest.name}.replaced"))
    (newest.parent / "best").unlink()
    found = find(unfinished)
    assert found.resumed.state is not None and found.resumed.state["step"] == 60
    best = found.resumed.state["progress"]["summary"]["best"]["step"]
    kept = newest.with_name(f"step-{best:08d}").is_dir()
    assert (newest.parent / "best").exists() == kept


def test_other_data_are_refused(unfinished: Path) -> None:
    """Fails if a run goes on with a sample more, or with other labels; or it is not said what has
    changed; or a byte of the folder is.
    """
    config = build_config(OPTIONS | {"output": str(unfinished.parent)})
    source = find_source(config, SingleProcess(), 0)
    found = find(unfinished)
    before = read_tree(unfinished)
    refuse_changed_data(config, found, source, "--data=digits")
    train = source.data.train
    labels = train.labels.clone()
    labels[1000] += 1
    more = TensorSplit(torch.cat([train.inputs, train.inputs[:1]]), torch.cat([labels, labels[:1]]))
    for split, expected in (
        (
            TensorSplit(train.inputs, labels),
            "1,433 samples as before, but with other names or label",
        ),
        (more, "1,433 samples then and 1,434 now"),
    ):
        changed = replace(
            source, fingerprints=[source.fingerprints[0] | {"train": fingerprint(split)}]
        )
        with pytest.raises(UsageError) as caught:
            refuse_changed_data(config, found, changed, "--data=digits")
        reported = str(caught.value)
        assert reported.startswith("--data=digits: the data have changed since the checkpoint: ")
        assert expected in reported and "one of the numbers 1000 to 1003, now label" in reported
        assert "start another --experiment" in reported
    assert read_tree(unfinished) == before


def test_without_a_readable_checkpoint_it_is_refused(unfinished: Path) -> None:
    """Fails if the run starts again from the beginning, and so replaces checkpoints that another
    version, or a repaired disk, could read; or if one is not named.
    """
    for place in unfinished.glob("checkpoints/step-*/manifest.json"):
        place.write_text("{}")
    before = read_tree(unfinished)
    with pytest.raises(UsageError) as caught:
        find(unfinished)
    assert all(f"step-000000{step}/manifest.json" in str(caught.value) for step in (50, 60))
    assert "remove " in str(caught.value) and read_tree(unfinished) == before


def test_without_any_checkpoint_it_starts_from_the_beginning(unfinished: Path, capsys) -> None:
    """Fails if a run that was killed before its first checkpoint cannot begin, or keeps records."""
    shutil.rmtree(unfinished / "checkpoints")
    found = find(unfinished)
    assert found.resumed.state is None and found.resumed.finished is None
    assert "starting from the beginning" in capsys.readouterr().out and steps(unfinished) == []


def test_a_finished_run_needs_nothing_more(unfinished: Path, folder: Path) -> None:
    """Fails when a finished run is trained again, loses its records, or cannot be made longer."""
    shutil.copy(folder / "kept" / NAME / "summary.json", unfinished)
    before = read_tree(unfinished)
    found = find(unfinished)
    assert found.resumed.finished == read_summary(unfinished)
    assert read_tree(unfinished) == before
    longer = find(unfinished, max_steps=70)
    assert longer.resumed.finished is None and longer.resumed.state["step"] == 60


def test_a_path_names_the_checkpoint(unfinished: Path) -> None:
    """Fails when another one is taken than was named, or a damaged one is taken or replaced."""
    places = [unfinished / "checkpoints" / f"step-000000{step}" for step in (50, 60)]
    assert find(unfinished, resume=str(places[0])).resumed.state["step"] == 50
    (places[1] / "manifest.json").write_text("{}")
    reported = refused(unfinished, resume=str(places[1]))
    assert reported.startswith(f"--resume={places[1]}: ")
    reported = refused(unfinished, resume="auto", experiment=None, seed=4, opt="adam")
    assert "--seed=4: " in reported and "--opt=adam: " in reported


def test_a_path_that_is_no_checkpoint_is_answered_with_what_is_one(unfinished: Path) -> None:
    """Fails when the path of a run is taken for a damaged checkpoint, when it is not said how to go
    on with that run, or when the place that is named is not the one that was looked at.
    """
    newest = unfinished / "checkpoints" / "step-00000060"
    reported = refused(unfinished, resume=str(unfinished))
    assert reported.startswith(f"--resume={unfinished}: is not a checkpoint. Give auto")
    assert reported.endswith(f"such as {newest}")
    for path in (unfinished, newest):
        with pytest.raises(UsageError) as caught:
            find(unfinished, resume=str(path), experiment="none")
        assert f"there is no run in {unfinished.with_name('none')}, which" in str(caught.value)
        config = unfinished / "config.yaml"
        assert str(caught.value).endswith(f"{unfinished}: --config {config} --resume auto")
    with pytest.raises(UsageError, match="Give those of the run to resume"):
        find(unfinished, resume="somewhere", experiment="none")


def test_the_way_back_to_an_experiment_is_given_as_flags(unfinished: Path) -> None:
    """Fails when a flag is advised that does not exist, or None is given as a value."""
    without = {"model_ema": False, "model_ema_decay": 0.9998}
    reported = refused(unfinished, **without, clip_grad=1.0, seed=4, sync_bn=True)
    advice = [line.rpartition(": ")[2] for line in reported.splitlines()[:-1]]
    averages = ["give --model-ema", "give --model-ema-decay 0.9"]
    assert advice == ["leave --clip-grad out", *averages, "give --no-sync-bn"]
    assert "give --seed 3; or give all its options: --config" in reported.splitlines()[-1]


@pytest.mark.parametrize("content", [b"", b"lr: [", b"lenet", b"\xff\xfe", b"- 1"])
def test_a_damaged_configuration_is_reported(unfinished: Path, content: bytes) -> None:
    """Fails when a config.yaml that was cut short, and that no checkpoint can replace, ends in a
    traceback, or holds the lock.
    """
    shutil.rmtree(unfinished / "checkpoints")
    (unfinished / "config.yaml").write_bytes(content)
    assert "config.yaml" in refused(unfinished)


def test_a_run_killed_before_its_configuration_starts_from_the_beginning(tmp_path: Path) -> None:
    """Fails when a SIGKILL at the very start makes every later start exit with 2."""
    directory = RunDirectory(tmp_path, NAME)
    (directory.path / ".config.yaml.partial").write_text("lr: ")
    directory.close()
    options = OPTIONS | {"output": str(tmp_path)}
    assert find_resumable(build_config(options), SingleProcess()) is None
    RunDirectory(tmp_path, NAME).close()


def test_a_live_run_is_not_resumed(unfinished: Path) -> None:
    """Fails when two jobs write one folder."""
    directory = RunDirectory(unfinished, reopen=True)
    with pytest.raises(UsageError, match="a live job is using"):
        find(unfinished)
    directory.close()


def test_other_buckets_are_told_of(unfinished: Path, capsys) -> None:
    """Fails when a resumed run adds gradients in another order and does not say so, or says so of
    virtual workers or two ranks, whose sums have the same bits in any order.
    """
    find(unfinished, 3)
    find(unfinished, 2, bucket_bytes="4096")
    assert "--bucket-bytes" not in capsys.readouterr().out
    find(unfinished, 3, bucket_bytes="4096")
    assert "--bucket-bytes 4096, and auto before" in capsys.readouterr().out
    config = unfinished / "config.yaml"
    stored = yaml.safe_load(config.read_text()) | {"virtual_workers": 2}
    config.write_text(yaml.safe_dump(stored | {"bucket_bytes": "4096"}))
    assert find(unfinished, 3, virtual_workers=2).resumed.state is not None
    assert "--bucket-bytes" not in capsys.readouterr().out


def test_options_without_effect_need_not_be_given_again(unfinished: Path) -> None:
    """Fails when a run of a version that took them can be resumed neither with them nor without."""
    config = unfinished / "config.yaml"
    idle = {"lr_base_batch_size": 64, "data_dir": "there"}
    config.write_text(yaml.safe_dump(yaml.safe_load(config.read_text()) | idle))
    assert find(unfinished).resumed.state is not None
    with pytest.raises(UsageError, match="--lr-base-batch-size=64: has no effect without"):
        find(unfinished, **idle)


def test_a_micro_batch_is_not_chosen_again(unfinished: Path) -> None:
    """Fails when `--micro-batch auto` does not take the passes that the run has recorded."""
    config = unfinished / "config.yaml"
    recorded = {"grad_accum_steps": 4, "micro_batch": None}
    config.write_text(yaml.safe_dump(yaml.safe_load(config.read_text()) | recorded))
    assert find(unfinished, micro_batch="auto").resumed.grad_accum_steps == 4
    with pytest.raises(UsageError, match="give --grad-accum-steps 4"):
        find(unfinished)


def test_free_options_may_change(unfinished: Path) -> None:
    """Fails when an option that teaches nothing cannot be changed on resume."""
    stored = yaml.safe_load((unfinished / "config.yaml").read_text())
    free = {"log_interval": 1, "keep_checkpoints": 9, "audit_every": 3, "hash_every": 7}
    found = find(unfinished, **free, global_batch_size=None, batch_size=8, rank_weights="2")
    assert found.resumed.global_batch_size == stored["global_batch_size"] == 64
