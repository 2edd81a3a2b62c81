"""A recorded run is computed again; what was changed, in its files or while it ran, is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from hvdtrain.errors import ReplayMismatch, UsageError
from hvdtrain.records.trace_file import RecordedRun
from tests.unit import commands
from tests.unit.recorded import (
    FLAGS,
    FLIPPED,
    VIRTUAL,
    call,
    forge,
    records_of,
    sign,
    train,
    write_records,
)

RECORDED = [2, 4, 6, 8, 10, 12, 13]
# Code that runs between PyTorch and hvdtrain, before `hvdtrain train` does.
SWAPPED = """
from hvdtrain.data.sampler import GlobalBatchSampler
honest = GlobalBatchSampler.global_batches
def global_batches(self, cursor):
    for batch in honest(self, cursor):
        if cursor == self.samples:  # the first batch of epoch 1
            batch[[2, 7]] = batch[[7, 2]]
        cursor += len(batch)
        yield batch
GlobalBatchSampler.global_batches = global_batches
"""
OTHER_RATE = """
from hvdtrain.run import prepare
honest = prepare.make_schedule
prepare.make_schedule = lambda *them: lambda step: honest(*them)(step) * (1.5 if step == 5 else 1)
"""


STOPPED = """
import os, signal
from hvdtrain.train import loop
honest = loop.compute
def compute(step):
    if step.number == 7:
        os.kill(os.getpid(), signal.SIGTERM)
    honest(step)
loop.compute = compute
"""


def replay(run: Path, *flags: str, variables: dict[str, str] | None = None) -> tuple[int, str]:
    """Replay a run; return the exit code and the output."""
    return call(run.parents[1], "replay", run, "--trust-code", *flags, variables=variables)


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ([], RECORDED),
        (["--steps=5-9"], [6, 8]),
        (["--steps=12"], [12]),
        (["--sample=2", "--seed=1"], None),
    ],
)
def test_honest_steps_agree(run: Path, flags: list[str], steps: list[int] | None) -> None:
    """Fails if a step is computed from another state than the run's, or others than chosen are."""
    code, output = replay(run, *flags, "--json=found.json")
    assert code == 0, output
    found = json.loads((run.parents[1] / "found.json").read_text())
    assert found["difference"] is None
    assert found["steps"] == steps or (steps is None and len(found["steps"]) == 2)
    assert "agreed bit for bit" in output


def test_one_worker_without_virtual_ones(tmp_path: Path) -> None:
    """Fails if dropout or running statistics of a plain run are not restored."""
    code, output = replay(train(tmp_path, *FLAGS))
    assert code == 0, output
    assert "7 steps agreed bit for bit" in output


def test_a_resumed_run_has_the_trace_of_the_uninterrupted_one(honest: Path, tmp_path: Path) -> None:
    """Fails if a resume breaks the chain, repeats a record, or drops one."""
    resumed = train(tmp_path, *VIRTUAL, patch=STOPPED, ends=143)
    train(tmp_path, *VIRTUAL, "--resume=auto")
    assert records_of(resumed) == records_of(honest)
    heads = [json.loads((run / "summary.json").read_text())["trace"] for run in (resumed, honest)]
    assert heads[0] == heads[1] == {**heads[0], "step": 13, "records": 7}


def test_a_resume_refuses_a_trace_that_was_cut(tmp_path: Path) -> None:
    """Fails if a chain goes on after records that are missing."""
    run = train(tmp_path, *VIRTUAL, "--max-steps=7")
    write_records(run, records_of(run)[:2])
    done = commands.run(tmp_path, "train", *VIRTUAL, "--resume=auto")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "trace.jsonl does not end with the record of step 7" in done.stderr
    assert len(records_of(run)) == 2


def edit_record(run: Path) -> None:
    records = records_of(run)
    records[2]["gradients"][1][0] = "0" * 16
    write_records(run, records)


def edit_last_record(run: Path) -> None:
    records = records_of(run)
    records[-1]["loss"] += 1e-6
    write_records(run, records)


def cut(run: Path) -> None:
    write_records(run, records_of(run)[:-1])


def forge_gradient(run: Path) -> None:
    forge(run, lambda records: records[3]["gradients"][2].__setitem__(1, "0" * 16))


def forge_loss(run: Path) -> None:
    forge(run, lambda records: records[1].update(loss=0.5))


def damage_checkpoint(run: Path) -> None:
    path = run / "checkpoints/step-00000008/training_state.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def forge_checkpoint(run: Path) -> None:
    path = run / "checkpoints/step-00000008"
    state = torch.load(path / "training_state.pt", weights_only=True)
    state["model"]["last.bias"][1] += 1e-3
    torch.save(state, path / "training_state.pt")
    sign(path, json.loads((path / "manifest.json").read_text()))


def forge_optimizer(run: Path) -> None:
    path = run / "checkpoints/step-00000008"
    state = torch.load(path / "training_state.pt", weights_only=True)
    state["optimizer"]["state"][0]["exp_avg"] *= 1.01
    torch.save(state, path / "training_state.pt")
    sign(path, json.loads((path / "manifest.json").read_text()))


def forge_last_weights(run: Path) -> None:
    path = run / "checkpoints/step-00000013"
    weights = load_file(path / "model.safetensors")
    weights["first.weight"][0, 3] += 1e-3
    save_file(weights, path / "model.safetensors")
    sign(path, json.loads((path / "manifest.json").read_text()))


def edit_manifest(run: Path) -> None:
    path = run / "checkpoints/step-00000012/manifest.json"
    path.write_text(path.read_text().replace('"step": 12', '"step": 11', 1))


def edit_config(run: Path) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump(config | {"lr": 0.2}))


@pytest.mark.parametrize(
    ("tamper", "expected"),
    [
        (edit_record, "trace.jsonl:3: is not the record that line 4 refers to"),
        (edit_last_record, "trace.jsonl:7: is not the record of step 13 that"),
        (cut, "was cut: it has 6 records, but"),
        (forge_gradient, "step 8, computed from the checkpoint of step 4: gradient: first.bias"),
        (forge_loss, "step 4, computed from the beginning: loss: "),
        (damage_checkpoint, "training_state.pt is not what was written"),
        (
            forge_checkpoint,
            "step-00000008: last.bias (1 of 6 parameters) is not that of the record",
        ),
        (forge_optimizer, "step 10, computed from the checkpoint of step 8: gradient"),
        (forge_last_weights, "step-00000013: first.weight (1 of 6 parameters) is not that of"),
        (edit_manifest, "manifest.json is not what was written"),
        (edit_config, "the trace began with another configuration, or with other data"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_tampering_is_named(run: Path, tamper: Callable[[Path], None], expected: str) -> None:
    """Fails if a file that was changed after the run is not found, or something else is named."""
    tamper(run)
    code, output = replay(run)
    assert code == 17, output
    assert expected in output


@pytest.mark.parametrize(
    ("patch", "expected"),
    [
        (SWAPPED, "step 4, computed from the beginning: data order"),
        (OTHER_RATE, "step 6, computed from the checkpoint of step 4: update: the learning rate"),
        (FLIPPED, "step 8, computed from the checkpoint of step 4: gradient: first.weight"),
    ],
    ids=["swapped samples", "learning rate", "flipped bit"],
)
def test_what_went_wrong_while_it_ran_is_named(patch: str, expected: str, tmp_path: Path) -> None:
    """Fails if a step that was not computed as configured agrees, or something else is blamed."""
    code, output = replay(train(tmp_path, *VIRTUAL, patch=patch))
    assert code == 17, output
    assert expected in output
    if patch is FLIPPED:
        assert "of share 2 (1 of 3 shares), from equal data" in output


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("RELABEL", "with other names or labels; the first that differs is number 21"),
        ("BRIGHTER", "step 2, computed from the beginning: data: the batch of share"),
    ],
)
def test_changed_data_are_named(change: str, expected: str, run: Path) -> None:
    """Fails if the labels or the pixels of today are taken for those of the run."""
    code, output = replay(run, variables={change: "21"})
    assert code == 17, output
    assert expected in output, output


def test_a_run_that_was_extended(tmp_path: Path) -> None:
    """Fails if steps before a resume with another length are computed with the later schedule."""
    flags = [*VIRTUAL, "--sched=cosine"]
    train(tmp_path, *flags, "--max-steps=6")
    code, output = replay(train(tmp_path, *flags, "--max-steps=13", "--resume=auto"))
    assert (code, "7 steps agreed bit for bit" in output) == (0, True), output


def test_a_run_without_an_option_of_today(run: Path) -> None:
    """Fails if an option that a later version adds, and that is not used, changes what a run is."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    del config["sync_bn"], config["grad_accum_steps"]
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    code, output = replay(run, "--steps=2")
    assert (code, "1 step agreed bit for bit" in output) == (0, True), output


def test_steps_without_a_loss(tmp_path: Path) -> None:
    """Fails if a step that counts nothing breaks the chain, or its records can not be compared."""
    flags = ["--task=mine:Rare", "--global-batch-size=3", "--trace-every=1", "--experiment=run"]
    flags += ["--virtual-workers=2", "--checkpoint-interval=4", "--keep-checkpoints=9"]
    run = train(tmp_path, *flags, "--max-steps=8")
    assert {record["loss"] is None for record in records_of(run)} == {True, False}
    train(tmp_path, *flags, "--max-steps=16", "--resume=auto")
    code, output = replay(run)
    assert (code, "16 steps agreed bit for bit" in output) == (0, True), output
    assert call(tmp_path, "diff", run, run)[0] == 0


def test_a_run_that_was_killed(run: Path) -> None:
    """Fails if a run without a summary, with half a line at the end of its trace, and checkpoints
    of an earlier branch, cannot be replayed, or is called changed.
    """
    (run / "summary.json").unlink()
    records = records_of(run)
    write_records(run, records[:4])
    with (run / "trace.jsonl").open("a") as trace:
        trace.write(json.dumps(records[4])[:50])
    (run / "checkpoints/last").write_text("step-00000008")
    code, output = replay(run)
    assert (code, "4 steps agreed bit for bit" in output) == (0, True), output
    assert "trace.jsonl: its last line is not complete" in output


# Of the third line: its change, or another text in its place.
DAMAGED: dict[str, Callable[[dict], object] | str] = {
    "list": "[]",
    "number": "5",
    "nested": "[" * 100_000,
    "not JSON": '{"step": 6,',
    "no previous": lambda record: record.pop("previous"),
    "no rate": lambda record: record.pop("lr"),
    "unknown field": lambda record: record.update(more=1),
    "short row": lambda record: record["gradients"][1].pop(),
    "short parameters": lambda record: record["parameters"].pop(),
    "share too few": lambda record: record["gradients"].pop(),
    "batches": lambda record: record.update(batches=5),
    "step as text": lambda record: record.update(step="6"),
    "step 0": lambda record: record.update(step=0),
    "step again": lambda record: record.update(step=4),
    "step too far": lambda record: record.update(step=99),
    "loss as text": lambda record: record.update(loss="0.5"),
    "digest as number": lambda record: record.update(samples=5),
    "setting": lambda record: record.update(setting=None),
    "no threads": lambda record: record["setting"].update(threads=0),
}


def test_damaged_records(run: Path) -> None:
    """Fails if a line that is no record ends in a traceback, or is left out silently."""
    lines = (run / "trace.jsonl").read_text().splitlines()
    for name, change in DAMAGED.items():
        text = change
        if not isinstance(change, str):
            record = json.loads(lines[2])
            change(record)
            text = json.dumps(record)
        (run / "trace.jsonl").write_text("\n".join([*lines[:2], str(text), *lines[3:], ""]))
        with pytest.raises(UsageError, match=r"trace\.jsonl:3: is not a record of a trace"):
            RecordedRun(run)
        assert name


def test_damaged_heads(run: Path) -> None:
    """Fails if what a summary says of the trace ends in a traceback, or is accepted unread."""
    summary = json.loads((run / "summary.json").read_text())
    for head in (5, {"a": 1}, summary["trace"] | {"records": 0}, summary["trace"] | {"step": "x"}):
        (run / "summary.json").write_text(json.dumps(summary | {"trace": head}))
        with pytest.raises((ReplayMismatch, UsageError), match=r"trace.* is .*not "):
            RecordedRun(run).check()


def test_runs_that_cannot_be_replayed(tmp_path: Path) -> None:
    """Fails if a run without a trace, or a choice of no step, ends in anything but one message."""
    run = train(tmp_path, *VIRTUAL[:-2], "--virtual-workers=3", "--max-steps=1")
    code, output = replay(run)
    assert (code, "has no trace: train with --trace-every" in output) == (2, True), output
    for flags, expected in (
        (["--steps=9-4"], "--steps=9-4: give one step, or the first and the last"),
        (["--sample=0"], "--sample=0: must be at least 1"),
        (["--seed=3"], "--seed=3: has no effect without --sample: leave it out"),
    ):
        code, output = replay(run, *flags)
        assert (code, expected in output) == (2, True), output
