"""Runs whose folder is lost go on from object storage, and end as undisturbed ones do."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.parallel.launching import (
    check_exit_code,
    environment_of,
    horovodrun,
    hvdtrain,
    kill_all,
    run,
    wait_until_gone,
)
from tests.s3_server import BUCKET, S3Server, s3_server

OUTPUT = f"s3://{BUCKET}/runs"
# With virtual workers, so that any number of workers ends with the same bits.
FLAGS = ["--model=tests.parallel.plugins:logs_samples", "--virtual-workers=2", "--max-steps=10"]
FLAGS += ["--global-batch-size=100", "--lr=0.1", "--checkpoint-interval=2", "--resume=auto"]


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as started, pytest.MonkeyPatch.context() as patch:
        for name, value in started.variables.items():
            patch.setenv(name, value)
        import s3fs

        s3fs.S3FileSystem().mkdir(BUCKET)
        yield started


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of the parameters of a run of one process in a folder."""
    folder = tmp_path_factory.mktemp("undisturbed")
    command = hvdtrain("train", *FLAGS, "--output", str(folder), "--experiment=x")
    finished = run(command, variables={"HVDTRAIN_TEST_LOG": str(folder / "log")})
    assert finished.exit_code == 0, finished.output
    return hash_of(folder / "x")


def hash_of(folder: Path) -> str:
    return str(json.loads((folder / "summary.json").read_text())["params_sha256"])


def test_several_workers_stop_and_one_goes_on_elsewhere(
    server: S3Server, undisturbed: str, tmp_path: Path
) -> None:
    """Fails if workers that stop leave before the last checkpoint is uploaded; if another machine,
    without the folder, does not go on from there to the same bits; or if the finished run is
    trained again.
    """
    command = hvdtrain("train", *FLAGS, "--output", OUTPUT, "--experiment=several")
    folder = tmp_path / "runs/s3" / BUCKET / "runs/several"
    variables = {"HVDTRAIN_TEST_LOG": str(tmp_path / "log")}
    stopping = variables | {"HVDTRAIN_TEST_SIGNAL": str(int(signal.SIGTERM))}
    stopped = horovodrun(2, "mpi", command, cwd=tmp_path, variables=stopping)
    check_exit_code(stopped, "mpi", 128 + signal.SIGTERM)
    saved = (folder / "checkpoints" / "last").read_text()
    shutil.rmtree(tmp_path / "runs")
    resumed = run(command, cwd=tmp_path, variables=variables)
    assert resumed.exit_code == 0, resumed.output
    assert f"continuing from runs/s3/{BUCKET}/runs/several/checkpoints/{saved}" in resumed.output
    assert hash_of(folder) == undisturbed
    shutil.rmtree(tmp_path / "runs")
    again = run(command, cwd=tmp_path, variables=variables)
    assert again.exit_code == 0 and undisturbed in again.output, again.output
    assert "hvdtrain 0." not in again.output  # the header of a training


def test_killed_during_an_upload(server: S3Server, undisturbed: str, tmp_path: Path) -> None:
    """Fails if a process goes on uploading after its trainer was killed, or the checkpoint before
    the one that was cut off is not there to go on from, to the same bits.
    """
    command = hvdtrain("train", *FLAGS, "--output", OUTPUT, "--experiment=killed")
    variables = {"HVDTRAIN_TEST_LOG": str(tmp_path / "log")}
    first = run([*command, "--max-steps=2"], cwd=tmp_path, variables=variables)
    assert first.exit_code == 0, first.output
    server.held = "/training_state.pt"
    mark = uuid.uuid4().hex
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment_of(mark) | variables,
            stdout=output,
            stderr=output,
        )
        assert server.holds.wait(120), (tmp_path / "output").read_text()
        process.send_signal(signal.SIGKILL)
        process.wait()
    left = wait_until_gone(mark)
    kill_all(left)
    server.release()
    assert not left
    shutil.rmtree(tmp_path / "runs")
    resumed = run(command, cwd=tmp_path, variables=variables)
    assert resumed.exit_code == 0, resumed.output
    assert "/checkpoints/step-00000002\n" in resumed.output, resumed.output
    assert hash_of(tmp_path / "runs/s3" / BUCKET / "runs/killed") == undisturbed
