"""Versions of formats: written with each file of a run, refused by name where they are newer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from hvdtrain.documents import FORMATS, refuse_newer, stamped
from hvdtrain.errors import UsageError
from hvdtrain.records.trace_file import digest_of
from hvdtrain.train import checkpoint
from tests.data.make import CODE, INTERVAL
from tests.unit.commands import run as run_command
from tests.unit.recorded import sign

RUN = Path(__file__).parents[2] / "data" / "0.1.0"
NEWER = 3
NEXT = [*CODE, "--global-batch-size=20", "--max-steps=1", "--workers=0", "--experiment=next"]
TOLD = f"was written by a newer hvdtrain (format {NEWER}; this one reads up to 1): upgrade hvdtrain"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A copy of a run."""
    return Path(shutil.copytree(RUN, tmp_path / "runs" / "small"))


def renew_manifest(run: Path) -> None:
    """Make all checkpoints newer."""
    for path in run.glob("checkpoints/step-*"):
        sign(path, json.loads((path / "manifest.json").read_text()) | {"format": NEWER})


def renew_trace(run: Path) -> None:
    """Make the last record newer, as one of a run that a newer version has resumed."""
    change_last(run / "trace.jsonl", lambda record: record | {"format": NEWER, "of": "later"})


def renew_summary(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"format": NEWER}))


def renew_evaluation(run: Path) -> None:
    (run / "evaluation.json").write_text(json.dumps({"format": NEWER, "confusion": {}}))


def change_last(path: Path, change: Callable[[dict], dict]) -> None:
    *lines, last = path.read_text().splitlines()
    path.write_text("\n".join([*lines, json.dumps(change(json.loads(last)))]) + "\n")


RENEW = {
    "manifest.json": renew_manifest,
    "trace.jsonl": renew_trace,
    "summary.json": renew_summary,
    "evaluation.json": renew_evaluation,
    "metrics.jsonl": lambda run: change_last(run / "metrics.jsonl", lambda it: stamp(it)),
    "audit.jsonl": lambda run: change_last(run / "audit.jsonl", lambda it: stamp(it)),
}
COMMANDS = {  # that read such a file
    "manifest.json": ("resume", "evaluate", "predict", "export", "replay", "diff", "pretrained"),
    "trace.jsonl": ("resume", "replay", "diff"),
    "summary.json": ("resume", "replay", "diff", "report"),
    "evaluation.json": ("report",),
    "metrics.jsonl": ("resume", "report"),
    "audit.jsonl": ("resume", "report"),
}


def stamp(content: dict) -> dict:
    return content | {"format": NEWER}


def arguments_of(command: str, run: Path) -> list[object]:
    """The command line of a command, for a run in the current folder."""
    resume = ["train", "--config", run / "config.yaml", "--resume"]
    return {
        "resume": [*resume, "auto", "--max-steps", 9],
        "resume from": [*resume, run / "checkpoints" / f"step-{INTERVAL:08d}", "--max-steps", 9],
        "pretrained": ["train", *NEXT, "--pretrained", run],
        "evaluate": ["evaluate", run, *CODE],
        "predict": ["predict", run, run / "config.yaml", CODE[0]],
        "export": ["export", run, "out.safetensors"],
        "replay": ["replay", run, *CODE],
        "diff": ["diff", run, RUN],
        "report": ["report", run],
    }[command]


@pytest.mark.parametrize(
    ("name", "command"), [(name, command) for name, them in COMMANDS.items() for command in them]
)
def test_a_newer_file_is_refused_by_name(name: str, command: str, run: Path) -> None:
    """Fails when a file of a later version is read as one of this, is taken for a damaged one (and
    passed over for an older checkpoint), or anything of the run is changed.
    """
    RENEW[name](run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    done = run_command(run.parents[1], *arguments_of(command, run))
    assert done.returncode == 2, done.stdout + done.stderr
    assert TOLD in done.stderr and name in done.stderr and "Traceback" not in done.stderr
    assert "damaged" not in done.stdout + done.stderr
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    after.pop(run / ".lock", None)
    assert after == before


def test_a_newer_checkpoint_that_is_named_is_refused(run: Path) -> None:
    """Fails when only `--resume auto` refuses it."""
    renew_manifest(run)
    done = run_command(run.parents[1], *arguments_of("resume from", run))
    assert done.returncode == 2 and TOLD in done.stderr


def test_all_files_of_a_run_have_their_format(run: Path) -> None:
    """Fails when a file, or a line of one, is written without it, or a resumed run changes the
    records that it continues.
    """
    before = (run / "trace.jsonl").read_text().splitlines()
    done = run_command(run.parents[1], *arguments_of("resume", run))
    assert done.returncode == 0, done.stderr
    for name in ("summary.json", "evaluation.json"):
        assert json.loads((run / name).read_text())["format"] == FORMATS[name]
    newest = run / "checkpoints" / "step-00000009" / "manifest.json"
    assert json.loads(newest.read_text())["format"] == FORMATS["manifest.json"]
    *earlier, last = (run / "trace.jsonl").read_text().splitlines()
    assert earlier == before
    assert json.loads(last)["format"] == FORMATS["trace.jsonl"]
    assert json.loads(last)["previous"] == digest_of(json.loads(before[-1]))
    added = (run / "metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(added)["format"] == FORMATS["metrics.jsonl"]
    again = run_command(run.parents[1], "replay", run, *CODE, "--steps", 9)
    assert again.returncode == 0 and "5 records, to step 9: an unbroken chain" in again.stdout


def test_audits_have_their_format() -> None:
    """Fails when a kind of file is not in the table: its lines would end a run."""
    assert stamped("audit.jsonl", {"step": 4}) == {"format": 1, "step": 4}
    assert {*FORMATS} == {*COMMANDS}


def test_a_damaged_number_is_damage(tmp_path: Path) -> None:
    """Fails when a manifest with a wrong digest is taken for a newer one, so that a damaged
    checkpoint is not passed over; or one with a right digest, but no number, for a good one.
    """
    for name in checkpoint.MODEL_FILE, checkpoint.STATE_FILE:
        save_file({}, tmp_path / name)
    files = dict.fromkeys([checkpoint.MODEL_FILE, checkpoint.STATE_FILE])
    manifest = {"format": 1, "step": 1, "files": files, "manifest_sha256": ""}
    sign(tmp_path, manifest)
    assert checkpoint.read_manifest(tmp_path)["step"] == 1
    text = (tmp_path / "manifest.json").read_text()
    (tmp_path / "manifest.json").write_text(text.replace('"format": 1', '"format": 3'))
    with pytest.raises(checkpoint.DamagedCheckpoint, match="is not what was written"):
        checkpoint.read_manifest(tmp_path)
    for number in ("1", 1.0, True, None, -1):
        sign(tmp_path, manifest | {"format": number, "manifest_sha256": ""})
        with pytest.raises(checkpoint.DamagedCheckpoint, match="is not a version"):
            checkpoint.read_manifest(tmp_path)


def test_what_has_no_number_is_of_the_first_release() -> None:
    """Fails when such content is refused, or other content than objects ends in another error."""
    for content in ({}, {"step": 1}, [], None, "format", {"format": 0}, {"format": 1}):
        refuse_newer(Path("runs/one/summary.json"), content)
    with pytest.raises(UsageError, match=r"^runs/one/trace\.jsonl:7: was written by a newer"):
        refuse_newer(Path("runs/one/trace.jsonl"), {"format": 2}, line=7)
