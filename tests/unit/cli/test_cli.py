"""`hvdtrain` as a user starts it: a process of its own, its exit code, and what it leaves."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import hvdtrain
from hvdtrain.config.options import train_options
from tests.unit.commands import command, environment, run

TINY = ("--max-steps", "3", "--global-batch-size", "32", "--log-interval", "2")
PLUGIN = """
from torch import nn


class Net(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.layer = nn.Linear(64, classes)

    def forward(self, images):
        if WHEN:
            raise LookupError("a fault of the user's own")
        return self.layer(images.flatten(1))
"""


def read_tree(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def read_summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a tiny run."""
    folder = tmp_path_factory.mktemp("first")
    first = command("train", *TINY, "--output", "out")
    done = subprocess.run(
        first, cwd=folder, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    return folder / "out" / "lenet-digits"


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help-all"], ["--version"]])
def test_help_is_light(tmp_path: Path, arguments: list[str]) -> None:
    """Fails when help or version load a heavy library, or go to the wrong stream."""
    program = (
        "import sys; from hvdtrain.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'numpy', 'yaml', 'horovod', 'sklearn', 'matplotlib'}\n"
        "heavy &= set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    expected = f"hvdtrain {hvdtrain.__version__}" if "--version" in arguments else "usage: hvdtrain"
    assert done.stdout.startswith(expected)
    if arguments[0] == "train":
        flags = [f"--{name.replace('_', '-')}" for name in train_options()]
        assert all(flag in done.stdout for flag in [*flags, "--config", "--print-config"])


@pytest.mark.parametrize("module", ["hvdtrain", "hvdtrain.cli"])
def test_the_package_runs_as_a_module(module: str, tmp_path: Path) -> None:
    """Fails when `python -m hvdtrain` finds nothing to run."""
    done = subprocess.run(
        [sys.executable, "-m", module, "--version"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, f"hvdtrain {hvdtrain.__version__}\n"), done.stderr


def test_printed_configs_read_back(tmp_path: Path) -> None:
    """Fails when --print-config leaves out a flag, or --config gives another configuration."""
    flags = ("--lr", "1e-05", "--batch-size", "5", "--experiment", "1e3", "--sched", "cosine")
    first = run(tmp_path, "train", "--print-config", *flags)
    assert (first.returncode, first.stderr) == (0, "")
    (tmp_path / "again.yaml").write_text(first.stdout)
    second = run(tmp_path, "train", "--config", "again.yaml", "--print-config")
    assert second.stdout == first.stdout
    values = yaml.safe_load(second.stdout)
    assert (values["lr"], values["batch_size"], values["experiment"]) == (1e-05, 5, "1e3")
    assert values.keys() == train_options().keys()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "COMMAND"),
        (["trian"], "trian: no such command; did you mean train?"),
        (["train", "--learning-rat"], "--learning-rat: no such flag"),
        (["train", "--lr", "fast"], "--lr"),
        (["train", "--lr", "-1"], "--lr=-1.0: must be at least 0"),
        (["train", "--config", "missing.yaml"], "missing.yaml"),
    ],
)
def test_bad_usage_is_reported_in_a_line(
    tmp_path: Path, arguments: list[str], expected: str
) -> None:
    """Fails when the exit code is not 2, a traceback shows, or anything is written."""
    done = run(tmp_path, *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("hvdtrain: error: ") and expected in done.stderr
    assert len(done.stderr.splitlines()) == 1 and done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_cannot_be_used_starts_nothing(tmp_path: Path) -> None:
    """Fails when a name that only the lower layers check leaves a run directory or a traceback."""
    done = run(tmp_path, "train", "--opt=lbfgs")
    assert done.returncode == 2
    assert done.stderr.startswith("hvdtrain: error: --opt=lbfgs: ")
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_run_writes_its_files(first_run: Path) -> None:
    """Fails when a file of "Files of a run" in the guide is missing or of another run."""
    summary = read_summary(first_run)
    expected = {"status": "finished", "world_size": 1, "controller": "none", "steps": 3}
    expected |= {"epochs": 1, "samples_seen": 96, "valid_samples": 364, "resumed_from": None}
    assert {name: summary[name] for name in expected} == expected
    assert summary["audit"] == {"checked": 0, "failed": 0, "worst_error_over_bound": None}
    assert 0 <= summary["valid_accuracy"] <= 1 and summary["samples_per_s"] > 0
    assert 2 < summary["train_loss"] < 3 and len(summary["params_sha256"]) == 64
    assert summary["versions"]["hvdtrain"] == hvdtrain.__version__
    assert {"torch", "python"} <= summary["versions"].keys()
    times = [datetime.fromisoformat(summary[name]) for name in ("started", "ended")]
    assert all(time.utcoffset() == timedelta(0) for time in times)
    assert timedelta(0) <= times[1] - times[0] < timedelta(minutes=2)
    assert timedelta(0) <= datetime.now(timezone.utc) - times[1] < timedelta(hours=1)
    assert summary["hosts"] == {socket.gethostname(): "0"} and summary["git"] is None
    assert summary["command"] == f"hvdtrain train {' '.join(TINY)} --output out"

    config = yaml.safe_load((first_run / "config.yaml").read_text())
    assert (config["global_batch_size"], config["batch_size"]) == (32, None)
    assert config["experiment"] == "lenet-digits" and config.keys() == train_options().keys()

    records = [json.loads(line) for line in (first_run / "metrics.jsonl").read_text().splitlines()]
    assert [(r["kind"], r["step"], r["samples_seen"]) for r in records] == [
        ("step", 2, 64),
        ("epoch", 3, 96),
    ]
    assert records[1]["valid_accuracy"] == summary["valid_accuracy"]
    best = {"step": 3, "epoch": 1, "valid_accuracy": summary["valid_accuracy"]}
    assert summary["best"] == best
    scalars = EventAccumulator(str(first_run / "tensorboard")).Reload().Scalars("valid/accuracy")
    assert [event.step for event in scalars] == [3]


def test_a_run_saves_its_checkpoint(first_run: Path) -> None:
    """Fails when the checkpoint is missing, misnamed, or described wrongly."""
    checkpoints = first_run / "checkpoints"
    assert (checkpoints / "last").read_text() == "step-00000003\n"
    folder = checkpoints / "step-00000003"
    names = {"model.safetensors", "training_state.pt", "manifest.json"}
    assert {path.name for path in folder.iterdir()} == names
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["params_sha256"] == read_summary(first_run)["params_sha256"]
    size = (folder / "model.safetensors").stat().st_size
    assert manifest["files"]["model.safetensors"]["bytes"] == size
    assert sum(t.numel() for t in load_file(folder / "model.safetensors").values()) == 129_068


def test_a_second_run_does_not_touch_the_first(first_run: Path) -> None:
    """Fails when the same command again changes a byte of the first run, is not reported to have
    another name, or its own configuration or summary is of the first one's name.
    """
    before = read_tree(first_run)
    for number in (2, 3):
        done = run(first_run.parents[1], "train", *TINY, "--output", "out")
        assert (done.returncode, done.stderr) == (0, "")
        name = f"lenet-digits-{number}"
        line = f"out/lenet-digits holds another run: this one is out/{name} "
        assert len([it for it in done.stdout.splitlines() if it.startswith(line)]) == 1
        second = first_run.with_name(name)
        assert yaml.safe_load((second / "config.yaml").read_text())["experiment"] == name
        assert read_summary(second)["params_sha256"] == read_summary(first_run)["params_sha256"]
    assert read_tree(first_run) == before
    again = run(first_run.parents[1], "train", *TINY, "--output=out", "--resume=auto")
    assert (again.returncode, read_tree(first_run)) == (0, before)


def test_the_seed_decides_the_result(first_run: Path, tmp_path: Path) -> None:
    """Fails when its own config.yaml gives other parameters, or another seed the same ones."""
    config = ("--config", str(first_run / "config.yaml"), "--output", "out")
    runs = (("again", "0"), ("other", "1"))
    processes = [
        subprocess.Popen(
            command("train", *config, "--experiment", name, "--seed", seed),
            cwd=tmp_path,
            env=environment(),
            stdout=subprocess.DEVNULL,
        )
        for name, seed in runs
    ]
    assert [process.wait(120) for process in processes] == [0, 0]
    first = read_summary(first_run)
    again, other = (read_summary(tmp_path / "out" / name) for name in ("again", "other"))
    for field in ("params_sha256", "train_loss", "valid_accuracy"):
        assert again[field] == first[field]
    assert other["params_sha256"] != first["params_sha256"]


def test_sigterm_ends_a_run_in_good_order(tmp_path: Path) -> None:
    """Fails when the exit code is not 143, the summary is missing, a traceback shows, or it is not
    said which step was saved and how to go on.
    """
    flags = ("--max-steps", "1000000", "--global-batch-size", "8", "--log-interval", "1")
    with subprocess.Popen(
        command("train", *flags, "--output", "out"),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            metrics = tmp_path / "out" / "lenet-digits" / "metrics.jsonl"
            deadline = time.monotonic() + 90
            while not (metrics.exists() and metrics.stat().st_size > 0):
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            stdout, stderr = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 143
    assert stderr == "hvdtrain: stopped by SIGTERM\n"
    (saved,) = re.findall(r"saved at step ([\d,]+): the same command with --resume auto", stdout)
    last = (metrics.parent / "checkpoints" / "last").read_text()
    assert int(last.removeprefix("step-")) == int(saved.replace(",", ""))
    summary = read_summary(metrics.parent)
    assert (summary["status"], summary["world_size"]) == ("stopped", 1)
    assert summary["steps"] >= 1


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    """Fails when NaN trains on, is saved, or is reported with a traceback."""
    done = run(tmp_path, "train", *TINY, "--lr", "1e30", "--output", "out")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "the loss is not finite at step 2 on rank 0 (loss nan)" in done.stderr
    folder = tmp_path / "out" / "lenet-digits"
    assert read_summary(folder)["status"] == "failed"
    assert "not finite" in read_summary(folder)["error"]
    assert not (folder / "checkpoints").exists()


def test_a_fault_in_the_users_model_is_shown(tmp_path: Path) -> None:
    """Fails when an exception of a plugin is swallowed, or its place is not shown."""
    command = ("train", *TINY, "--model", "my_net:Net", "--output", "out")
    (tmp_path / "my_net.py").write_text(PLUGIN.replace("WHEN", "True"))
    done = run(tmp_path, *command)
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    assert "my_net.py:12: LookupError: a fault of the user's own" in done.stderr
    (tmp_path / "my_net.py").write_text(PLUGIN.replace("WHEN", "self.training"))
    done = run(tmp_path, *command)
    assert done.returncode == 1
    assert "LookupError: a fault of the user's own" in done.stderr
    assert 'my_net.py", line 12, in forward' in done.stderr
    summary = read_summary(tmp_path / "out" / "my_net_Net-digits")
    assert summary["status"] == "failed" and "LookupError" in summary["error"]


def test_a_run_that_the_launcher_does_not_see(tmp_path: Path) -> None:
    """Fails when a worker of a launcher on another host, where the name is taken, ends instead of
    taking the next one, or when a restart goes on with the run that was there before.
    """
    train = ["train", *TINY, "--output=out", "--experiment=x"]
    first = {"HVDTRAIN_JOB": "a", "HVDTRAIN_RESTART": "0"}
    again = {"HVDTRAIN_JOB": "a", "HVDTRAIN_RESTART": "1"}
    assert run(tmp_path, *train).returncode == 0
    before = read_tree(tmp_path / "out" / "x")
    done = run(tmp_path, *train, variables=first)
    assert done.returncode == 0, done.stderr
    assert "out/x holds another run: this one is out/x-2" in done.stdout
    done = run(tmp_path, *train, "--resume=auto", variables=again)
    assert done.returncode == 0, done.stderr
    assert "out/x-2" in done.stdout, done.stdout
    assert read_tree(tmp_path / "out" / "x") == before
