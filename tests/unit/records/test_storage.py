"""Runs in object storage: what is uploaded in which order, and what is downloaded of it."""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import fsspec
import pytest
import torch

import hvdtrain
from hvdtrain.config import RunConfig
from hvdtrain.config.options import build_config
from hvdtrain.errors import TrainingError, UsageError
from hvdtrain.records import uploader
from hvdtrain.records.directory import new_directory
from hvdtrain.records.storage import Storage, local_copy
from hvdtrain.records.storage_start import name_of_job, open_storage, taken_names
from hvdtrain.records.uploader import Uploader
from hvdtrain.train.checkpoint import Checkpoints, Snapshot, load_state, name_of
from tests.s3_server import BUCKET, SECRET, S3Server, s3_server

OUTPUT = f"s3://{BUCKET}/runs"
FOLDER = Path("runs/s3", BUCKET, "runs/x")
SAVED = "runs/x/checkpoints"


@pytest.fixture(scope="module")
def moto_server() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture
def server(
    moto_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[S3Server]:
    """The server, with an empty bucket, and a folder without runs to be in."""
    for name, value in moto_server.variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    files = fsspec.filesystem("s3")
    files.invalidate_cache()
    if files.exists(BUCKET):
        files.rm(BUCKET, recursive=True)
    files.mkdir(BUCKET)
    moto_server.changes.clear()
    yield moto_server
    moto_server.refused, moto_server.lists_nothing = "", False


def save(folder: Path, *steps: int, keep: int = 3, run: str = "r" * 32) -> None:
    """Write checkpoints of a run into its folder, the first of them the best one."""
    checkpoints = Checkpoints(folder / "checkpoints", keep, run)
    for step in steps:
        tensors = {"weight": torch.full((3,), float(step))}
        checkpoints.save(Snapshot(step, "sha", tensors, {"step": step}), step == steps[0])
        checkpoints.wait()
    (folder / "config.yaml").write_text("seed: 0\n")
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    (folder / "summary.json").write_text(f'{{"status": "stopped", "steps": {steps[-1]}}}\n')


def upload(
    folder: Path,
    last: int,
    best: int | None = None,
    keep: int = 4,
    new: Sequence[str] = (),
    output: str = OUTPUT,
) -> None:
    """As a run that has ended does; checkpoints are given by their steps."""
    second = "" if best is None else name_of(best)
    summary = (folder / "summary.json").read_bytes()
    Storage(output).upload(folder, keep, name_of(last), second, new, summary)


def names(folder: Path) -> list[str]:
    return [path.name for path in Checkpoints(folder / "checkpoints", 1).complete()]


def nothing() -> None:
    pass


def test_the_manifest_is_uploaded_last_and_removed_first(server: S3Server) -> None:
    """Fails if a cut between any two requests could leave a manifest without its files, a
    checkpoint without its records, or a summary of the end without the last checkpoint; or if too
    many are kept, or the best is not.
    """
    folder = Path("x")
    save(folder, 1, 2)
    upload(folder, 2, 1, keep=1)
    first = [path for _, path in server.changes]
    assert first[:2] == ["runs/x/.run", "runs/x/metrics.jsonl"]
    assert first[-2:] == ["runs/x/summary.json", "runs/x/config.yaml"]
    for step in (1, 2):
        ours = [path.rpartition("/")[2] for path in first if f"step-0000000{step}/" in path]
        assert ours[-1] == "manifest.json" and len(ours) == 3
    server.changes.clear()
    save(folder, 3, keep=1)
    upload(folder, 3, 3, keep=1)
    removed = [path for method, path in server.changes if method == "DELETE"]
    assert sorted(removed[0::3]) == [f"{SAVED}/step-0000000{n}/manifest.json" for n in (1, 2)]
    assert len(removed) == 6
    assert Storage(OUTPUT).names() == {"x"}


def test_the_newest_good_checkpoint_is_fetched(
    server: S3Server, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if a folder that is gone is not made again with the newest checkpoint, the best one,
    pointers and records; if a damaged or cut-off checkpoint is taken; or if one that is here is
    replaced by an older one.
    """
    save(Path("x"), 1, 2, 3, 4)
    storage, files = Storage(OUTPUT), fsspec.filesystem("s3")
    for last in (2, 3, 4):
        upload(Path("x"), last, 1)
    folder = build_config({"output": OUTPUT, "experiment": "x"}, []).folder
    assert folder == FOLDER
    storage.fetch(folder, nothing)
    assert names(folder) == ["step-00000004", "step-00000001"]
    assert (folder / "checkpoints/last").read_text() == "step-00000004\n"
    assert (folder / "checkpoints/best").read_text() == "step-00000001\n"
    assert (folder / "summary.json").is_file()
    assert load_state(folder / "checkpoints/step-00000004") == {"step": 4}
    files.rm_file(f"{BUCKET}/{SAVED}/step-00000004/manifest.json")  # cut off
    files.pipe_file(f"{BUCKET}/{SAVED}/step-00000003/training_state.pt", b"damaged")
    other = folder.with_name("other") / "x"
    capsys.readouterr()
    storage.fetch(other, nothing)
    assert names(other) == ["step-00000002", "step-00000001"]
    assert "skipping step-00000003" in capsys.readouterr().out
    assert not (other / "summary.json").exists()  # which may be of the damaged one
    storage.fetch(folder, nothing)
    assert capsys.readouterr().out == "" and names(folder)[0] == "step-00000004"
    for step in (1, 2):
        files.pipe_file(f"{BUCKET}/{SAVED}/step-0000000{step}/model.safetensors", b"damaged")
    with pytest.raises(UsageError, match=f"no checkpoint in {OUTPUT}/x can be read"):
        storage.fetch(folder.with_name("third") / "x", nothing)


def test_a_damaged_checkpoint_is_replaced_by_the_same_one(server: S3Server) -> None:
    """Fails if a resumed run, which writes the same bits again, leaves damaged ones in storage."""
    save(Path("x"), 1)
    files = fsspec.filesystem("s3")
    upload(Path("x"), 1)
    path = f"{BUCKET}/{SAVED}/step-00000001/model.safetensors"
    good = files.cat_file(path)
    files.pipe_file(path, b"damaged")
    upload(Path("x"), 1)  # of an earlier start: trusted
    assert files.cat_file(path) == b"damaged"
    upload(Path("x"), 1, new=["step-00000001"])
    assert files.cat_file(path) == good


def test_names_in_storage_are_taken(server: S3Server) -> None:
    """Fails if a new run takes the name of one that only the storage has, a resumed run does not,
    or a job that goes on elsewhere does not find the run that it has begun.
    """
    save(Path("x"), 1)
    (Path("x") / ".job").write_text("job-7\n")
    upload(Path("x"), 1)
    directory = new_directory(FOLDER, True, taken_names(OUTPUT, None))
    directory.close()
    assert directory.path.name == "x-2"
    assert taken_names(OUTPUT, "auto") == set()
    assert name_of_job(OUTPUT, FOLDER, "job-7") == "x"
    assert name_of_job(OUTPUT, FOLDER, "job-8") is None


def test_credentials_that_may_not_list(server: S3Server) -> None:
    """Fails if that is only noticed after the start."""
    server.lists_nothing = True
    with pytest.raises(UsageError, match=f"--output={OUTPUT}: a trial to write, read, list"):
        open_storage(OUTPUT, FOLDER, None, nothing)
    with pytest.raises(UsageError, match=f"--output={OUTPUT}: "):
        name_of_job(OUTPUT, FOLDER, "job-7")
    with pytest.raises(UsageError, match=f"--output={OUTPUT}: "):
        taken_names(OUTPUT, None)


@pytest.mark.parametrize(
    ("output", "problem"),
    [
        ("s3://no-such-bucket/runs", "bucket does not exist"),
        (f"s3://{BUCKET}/refused", "Access Denied|Forbidden"),
        ("gs://bucket/runs", "gcsfs"),
        ("nowhere://bucket/runs", "Protocol not known: nowhere"),
        ("memory://runs", "not shared"),
    ],
)
def test_bad_storage_is_refused_before_anything(
    output: str,
    problem: str,
    server: S3Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fails if such an address is only noticed by an upload, leaves a file here, or has no clear
    error; or if the trial takes random numbers of the training.
    """
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    server.refused = "/refused/"
    before = random.getstate()
    with pytest.raises(UsageError, match=problem) as caught:
        open_storage(RunConfig(output=output).output, FOLDER, None, nothing)
    assert output in str(caught.value) and SECRET not in str(caught.value)
    assert random.getstate() == before and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "output",
    [
        "s3://me:my-password@bucket/runs",
        "s3://b/../x",
        "s3://b/x?key=my-password",
        "s3:/b",
        "s3://",
    ],
)
def test_bad_addresses(output: str) -> None:
    """Fails if an address with credentials is taken, or shown; or one that is none is a folder."""
    with pytest.raises(UsageError, match="neither a folder nor an address") as caught:
        RunConfig(output=output)
    assert "my-password" not in str(caught.value)
    if "://" in output:
        with pytest.raises(UsageError, match="neither a folder nor an address") as caught:
            Storage(output)
        assert "my-password" not in str(caught.value)


def test_a_failed_upload_is_repeated(
    server: S3Server, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Fails if an upload that failed is not made up for by a later one, more than one warning is
    printed, or the end of a run does not fail without the last upload.
    """
    monkeypatch.setattr(uploader, "PAUSES_S", (0.1,))
    save(Path("x"), 1, 2)
    server.refused = "step-00000002/manifest"
    uploads = Uploader(OUTPUT, Path("x"), 2)
    uploads.saved("step-00000002")
    assert uploads.wait(60)
    monkeypatch.setattr(uploader, "PAUSES_S", ())
    with pytest.raises(TrainingError, match="lacks the end of the run"):
        uploads.finish(nothing)
    errors = capfd.readouterr().err
    assert errors.count("warning: not uploaded") == 1 and SECRET not in errors
    second = f"{OUTPUT}/x/checkpoints/step-00000002"
    with pytest.raises(UsageError, match="no complete checkpoint step-00000002"):
        local_copy(second).__enter__()
    server.refused = ""
    uploads.finish(nothing)
    with local_copy(f"{OUTPUT}/x") as path:
        assert names(Path(path)) == ["step-00000001"]  # the best one
    with local_copy(second) as path:
        assert names(Path(path)) == ["step-00000002"]


def test_a_folder_that_another_machine_mounts(tmp_path: Path) -> None:
    """Fails if file:// does not do the same: a folder of a file system, by its address."""
    save(tmp_path / "x", 1, 2)
    storage = Storage(f"file://{tmp_path}/far/runs")
    storage.probe()
    assert storage.names() == set()
    upload(tmp_path / "x", 2, 1, output=storage.output)
    storage.fetch(tmp_path / "back" / "x", nothing)
    assert names(tmp_path / "back" / "x") == ["step-00000002", "step-00000001"]


def trained(output: str) -> tuple[bytes, int]:
    """The weight that a script's loop ends with, and the steps that it made."""
    model, steps = torch.nn.Linear(1, 1), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = [(torch.tensor([float(n)]), torch.tensor([2.0])) for n in range(8)]
    options = {"max_steps": 3, "output": output, "experiment": "x", "log_interval": 1}
    with hvdtrain.Loop(
        model, optimizer, samples, global_batch_size=4, resume="auto", **options
    ) as loop:
        for step in loop:
            for x, y in step.batches():
                step.backward(mean=(model(x) - y).square().mean(), count=len(y))
            step.update()
            steps += 1
    return model.weight.detach().numpy().tobytes(), steps


def test_a_script_of_its_own(tmp_path: Path, script: None) -> None:
    """Fails if a script's loop does not go on from an address: here the finished run, whose folder
    is gone, is trained again, or ends with other weights.
    """
    first, steps = trained(f"file://{tmp_path}/far")
    assert steps == 3
    shutil.rmtree(tmp_path / "runs")
    assert trained(f"file://{tmp_path}/far") == (first, 0)
