"""Run folders of strangers: links, pipes, forged files and names, opened by each command."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from hvdtrain.train import checkpoint
from hvdtrain.train.checkpoint import MANIFEST_FILE
from tests.unit import forging
from tests.unit.forging import TRAIN, forged_files, make_run, problem_of

MORE = "--max-steps=5"
LAST = "step-00000004"
ESCAPE = "\x1b]0;pwned\x07\x1b[2J"

Forge = Callable[[Path], object]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps, with a checkpoint of each second one."""
    return make_run(tmp_path_factory.mktemp("base"))


@pytest.fixture
def run(base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(base, tmp_path / "run"))


def call(*arguments: object) -> tuple[int, str]:
    """Run a command here; return its exit code and all that it printed."""
    ended = forging.call(*arguments)
    return ended.exit_code, ended.output


def resumed(run: Path) -> tuple[object, ...]:
    return *TRAIN, MORE, f"--output={run.parent}", "--experiment=run", "--resume=auto"


def put(name: str, text: str) -> Forge:
    return lambda run: (run / name).write_text(text)


def in_place(name: str, make: Callable[[Path], object]) -> Forge:
    def forge(run: Path) -> None:
        (run / name).unlink()
        make(run / name)

    return forge


def edit(name: str, old: str, new: str) -> Forge:
    return lambda run: (run / name).write_text((run / name).read_text().replace(old, new))


COMMANDS: dict[str, Callable[[Path], tuple[object, ...]]] = {
    "report": lambda run: ("report", run),
    "diff": lambda run: ("diff", run, run.parent / "own"),
    "replay": lambda run: ("replay", run),
    "resume": resumed,
}
FORGED: dict[str, tuple[Forge, dict[str, int]]] = {  # the exit code of each command, report first
    **{
        f"a pipe for {name}": (
            in_place(name, os.mkfifo),
            dict(zip(COMMANDS, codes, strict=True)),
        )
        for name, codes in {
            "config.yaml": (2, 2, 2, 0),
            "summary.json": (2, 2, 2, 0),
            "metrics.jsonl": (2, 0, 0, 2),
            "trace.jsonl": (0, 2, 2, 2),
            f"checkpoints/{LAST}/manifest.json": (0, 17, 17, 0),
            "checkpoints/last": (0, 0, 0, 0),
        }.items()
    },
    "an empty configuration": (put("config.yaml", ""), {"replay": 2, "resume": 0}),
    "a summary of nothing": (put("summary.json", "[]"), {"report": 0, "diff": 2, "resume": 0}),
    "a summary of a word": (
        put("summary.json", '{"status": "finished"}'),
        {"report": 0, "diff": 0, "resume": 0},
    ),
    "a pointer that is no text": (
        lambda run: (run / "checkpoints" / "last").write_bytes(b"\xff\xfe\0\0"),
        {"replay": 0, "resume": 0},
    ),
    "a pointer elsewhere": (put("checkpoints/last", "../../../etc\n"), {"replay": 0, "resume": 0}),
    "a terminal's commands": (
        edit("config.yaml", "model: lenet", f"model: {json.dumps(ESCAPE)}"),
        {"report": 0, "diff": 17, "replay": 17, "resume": 2},
    ),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", FORGED)
def test_each_command_on_a_strange_run(kind: str, base: Path, run: Path) -> None:
    """Fails when a command hangs, ends with a trace or another code, or passes on what steers a
    terminal.
    """
    forge, codes = FORGED[kind]
    (run.parent / "own").symlink_to(base)
    forge(run)
    for command, code in codes.items():
        found, output = call(*COMMANDS[command](run))
        assert (command, found) == (command, code), output
        assert "Traceback" not in output and "\x1b" not in output


def test_what_is_resumed_from_repaired_files_is_the_same(base: Path, run: Path) -> None:
    """Fails when a run whose small files are damaged does not end as the undisturbed one."""
    whole = shutil.copytree(base, run.parent / "whole" / "run")
    hashes = []
    for folder in (whole, run):
        if folder == run:
            (run / "config.yaml").write_text("")
            (run / "summary.json").write_text("{")
            for pointer in ("last", "best"):
                (run / "checkpoints" / pointer).write_bytes(b"\xff")
        code, output = call(*resumed(folder))
        assert code == 0, output
        hashes.append(json.loads((folder / "summary.json").read_text())["params_sha256"])
    assert hashes[0] == hashes[1]
    assert "taken from step-00000004, and written again" in output
    texts = [(it / "config.yaml").read_text().splitlines() for it in (run, whole)]
    one, other = ([line for line in text if "output:" not in line] for text in texts)
    assert one == other


def test_links_in_a_run_lead_to_no_change_elsewhere(run: Path, tmp_path: Path) -> None:
    """Fails when a file that the run did not write is removed, replaced or added by way of a link
    in its folder; or when a folder of checkpoints on another disk cannot be used.
    """
    other = tmp_path / "other"
    other.mkdir()
    for name in ("index.html", "loss.png"):
        (other / name).write_text("precious")
    (run / "report").symlink_to(other)
    shutil.rmtree(run / "tensorboard")
    (run / "tensorboard").symlink_to(other)
    assert call("report", run)[0] == 2
    disk = tmp_path / "disk"
    shutil.move(run / "checkpoints", disk)
    for step in (1, 3):
        (disk / f"step-0000000{step}").mkdir(exist_ok=True)
        (disk / f"step-0000000{step}" / "precious").write_text("x")
    (run / "checkpoints").symlink_to(disk)
    (disk / ".step-00000005.replaced").symlink_to(other)
    (disk / ".x.replaced").mkdir()
    code, output = call(*resumed(run), "--keep-checkpoints=1")
    assert code == 0, output
    assert "tensorboard is a symbolic link" in output
    assert sorted(it.name for it in other.iterdir()) == ["index.html", "loss.png"]
    assert (other / "index.html").read_text() == "precious"
    assert len(list(disk.glob("*/precious"))) == 2
    assert (disk / "step-00000005" / MANIFEST_FILE).exists()
    assert not (disk / "step-00000002").exists()  # the run's own


def test_checkpoints_of_another_run_are_not_removed(run: Path, tmp_path: Path) -> None:
    """Fails when two runs have their checkpoints in one folder, and one removes the other's."""
    theirs = tmp_path / "two" / "run"
    shutil.copytree(run, theirs)
    (theirs / ".lock").write_text("another\n")
    shutil.rmtree(theirs / "checkpoints")
    (theirs / "checkpoints").symlink_to(run / "checkpoints")
    (theirs / "summary.json").unlink()
    before = {path.name for path in (run / "checkpoints").glob("step-*")}
    code, output = call(*resumed(theirs), "--keep-checkpoints=1")
    assert code == 0, output
    after = {path.name for path in (run / "checkpoints").glob("step-*")}
    assert after == before | {"step-00000005"}


def forged_manifest(run: Path, **changes: Any) -> None:
    """A checkpoint whose takeaway was changed, with a digest that fits."""
    path = run / "checkpoints" / LAST / MANIFEST_FILE
    manifest = json.loads(path.read_text())
    del manifest["manifest_sha256"]
    for name, value in changes.items():
        place = manifest["takeaway"]
        if name in place["config"] and name not in ("model", "data", "dtype"):
            place = place["config"]
        place[name] = value
    manifest["manifest_sha256"] = checkpoint._digest_of(manifest)
    path.write_text(json.dumps(manifest))


TAKEAWAYS: dict[str, tuple[dict[str, Any], str]] = {
    "a word for a number": ({"lr": "abc"}, "lr='abc': expected float"),
    "a configuration of nothing": ({"config": 3}, "takeaway.config is '3'"),
    "classes without end": ({"num_classes": 10**9}, "1,000,000,000 classes"),
    "a script of nothing": ({"config": {"script": 3}}, "script is '3', not a list"),
}


@pytest.mark.parametrize("kind", TAKEAWAYS)
def test_a_forged_takeaway_of_evaluate(kind: str, run: Path) -> None:
    """Fails when it ends in a trace, or asks for memory before it is compared with the weights."""
    changes, expected = TAKEAWAYS[kind]
    forged_manifest(run, **changes)
    code, output = call("evaluate", run / "checkpoints" / LAST, "--trust-code")
    assert code == 2 and expected in output and "Traceback" not in output, output


IMAGES = {"channels": 1, "height": 8, "width": 8, "crop": False, "mean": [0.0], "std": [1.0]}
OF_PREDICT: dict[str, tuple[dict[str, Any], str]] = {
    "no deviation": ({"images": IMAGES | {"std": [0]}}, "std=[0]: must not be 0"),
    "a large picture": ({"images": IMAGES | {"height": 10**9}}, "pixels are more than"),
    "a word for a size": ({"images": IMAGES | {"width": "8"}}, "images.width is '8'"),
    "classes that are no texts": ({"images": IMAGES, "classes": [1, 2]}, "an item of classes"),
    "a large input": ({"images": IMAGES, "shape": [1, 10**5, 10**5]}, "pixels are more than"),
    "another input": ({"images": IMAGES, "shape": [3, 8, 8]}, "its weights are not those"),
    "another type": ({"images": IMAGES, "dtype": "float1"}, "is not what a run writes"),
}


@pytest.mark.parametrize("kind", OF_PREDICT)
def test_a_forged_takeaway_of_predict(kind: str, run: Path, tmp_path: Path) -> None:
    """Fails when it ends in a trace, or makes a network or a picture of any size."""
    changes, expected = OF_PREDICT[kind]
    forged_manifest(run, **changes)
    (tmp_path / "one.png").write_bytes(b"")
    code, output = call("predict", run / "checkpoints" / LAST, tmp_path / "one.png")
    assert code == 2 and expected in output and "Traceback" not in output, output


def test_data_that_only_the_checkpoint_names_are_not_read(run: Path) -> None:
    """Fails when `evaluate` reads a folder of this machine on a stranger's word, or does not say
    how to allow it.
    """
    path = run / "checkpoints" / LAST
    manifest = json.loads((path / MANIFEST_FILE).read_text())
    forged_manifest(run, config=manifest["takeaway"]["config"] | {"data": "imagefolder:/proc"})
    code, output = call("evaluate", path)
    assert code == 2 and "give --data imagefolder:/proc, or --trust-code" in output
    code, output = call("evaluate", path, "--data=digits")
    assert code == 0, output


def test_a_name_that_is_no_text(run: Path) -> None:
    """Fails when the report of a folder whose name is not UTF-8 cannot be written or printed."""
    other = Path(os.fsdecode(os.fsencode(run.parent) + b"/\xff"))
    run.rename(other)
    code, output = call("report", other)
    assert code == 0 and "\\udcff/report/index.html" in output, output
    assert "\\udcff" in (other / "report" / "index.html").read_text("utf-8")


@pytest.mark.parametrize("name", forging.FORGED)
def test_forged_files_end_in_a_result_or_an_error(name: str, base: Path) -> None:
    """Fails when a command on a file with other values, parts or bytes than a run writes ends in a
    trace, with an exit code that is not documented, or passes on what steers a terminal.

    `python -m tests.campaigns.forged` tries more, and all commands.
    """
    original = (base / name).read_text()

    @settings(forging.FORGING, max_examples=12, derandomize=True)
    @given(forged_files(name, original))
    def attempt(content: bytes) -> None:
        for command in {"diff", "evaluate", "resume"} & {*forging.FORGED[name]}:
            problem = problem_of(base, name, content, command)
            assert not problem, f"{command}, {content!r}: {problem}"

    attempt()
