"""Forged files of a run: what a run wrote, of which parts were replaced, removed, nested or cut.

Forgeries keep the structure of the file, so that readers get past its first field.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from PIL import Image

from hvdtrain.cli import main
from hvdtrain.documents import DEEPEST
from hvdtrain.errors import EXIT_FAILED, EXIT_MISMATCH, EXIT_OK, EXIT_USAGE
from hvdtrain.train.checkpoint import _digest_of
from tests.unit.reported import audit_record, write_lines

ATOMS = st.sampled_from([None, True, False, 0, -1, 1, 2**63, 10**400, 0.5, 1e308, float("nan")])
TEXTS = st.sampled_from(["", "x", "finished", "../..", "\x1b[2J", "\0", "\ud800", "9" * 99])
VALUES = st.recursive(
    ATOMS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
)
BYTES = st.sampled_from(
    [b"", b"\xff", b"\0", b'"', b"[" * 99, b"{", b"&a ", b"*a", b"!!a/b ", b"\n"]
)
Way = tuple[str | int, ...]  # keys and places that lead to a part of a document


def paths_in(value: Any) -> list[Way]:
    """Return the way to each part of a document, itself left out."""
    if isinstance(value, dict):
        items = list(value.items())
    else:
        items = list(enumerate(value)) if isinstance(value, list) else []
    return [(key, *rest) for key, item in items for rest in [(), *paths_in(item)]]


@st.composite
def forged_values(draw: st.DrawFn, original: Any) -> Any:
    """Draw a document with one to three of its parts changed."""
    document = copy.deepcopy(original)
    for _ in range(draw(st.integers(1, 3))):
        places = paths_in(document)
        if not places:
            return draw(VALUES)
        *above, key = draw(st.sampled_from(places))
        holder = document
        for step in above:
            holder = holder[step]
        match draw(st.sampled_from(["replace", "replace", "remove", "nest", "repeat", "move"])):
            case "replace":
                holder[key] = draw(VALUES)
            case "remove":
                del holder[key]
            case "nest":
                for _ in range(draw(st.sampled_from([1, DEEPEST, 5 * DEEPEST]))):
                    holder[key] = draw(st.sampled_from([[holder[key]], {"x": holder[key]}]))
            case "repeat":
                holder[key] = [holder[key]] * draw(st.sampled_from([0, 2, 1000]))
            case "move":
                other = draw(st.sampled_from(places))[-1]
                if isinstance(holder, dict) and isinstance(other, str):
                    holder[other] = holder.pop(key)
    return document


@st.composite
def forged_bytes(draw: st.DrawFn, original: bytes) -> bytes:
    """Draw a file with bytes replaced in a place or two, and perhaps cut short."""
    content = original
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(content)))
        content = content[:at] + draw(BYTES) + content[at + draw(st.integers(0, 9)) :]
    return content[: draw(st.integers(0, len(content)))] if draw(st.booleans()) else content


@st.composite
def forged_files(draw: st.DrawFn, name: str, original: str) -> bytes:
    """Draw the content of a file of that name, made from what a run wrote in it."""
    if "." not in name or draw(st.integers(0, 3)) == 0:
        return draw(forged_bytes(original.encode()))
    if name.endswith(".jsonl"):
        records = [json.loads(line) for line in original.splitlines()]
        place = draw(st.integers(0, len(records) - 1))
        records[place] = draw(forged_values(records[place]))
        text = "".join(json.dumps(record) + "\n" for record in records)
    elif name.endswith(".yaml"):
        text = yaml.safe_dump(draw(forged_values(yaml.safe_load(original))), allow_unicode=False)
    else:
        text = json.dumps(draw(forged_values(json.loads(original))))
    return text.encode("utf-8", "backslashreplace")


@dataclass(frozen=True)
class Ended:
    """The end of a command that ran in this process."""

    exit_code: int
    output: str
    seconds: float  # of a processor


def call(*arguments: object) -> Ended:
    """Run a command of hvdtrain in this process."""
    before, sys.argv = sys.argv, ["hvdtrain", *map(str, arguments)]
    output = io.StringIO()
    began_s = time.process_time()  # others may use the machine
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            code = main()
    except SystemExit as error:  # of the parser
        code = error.code if isinstance(error.code, int) else 1
    finally:
        sys.argv = before
    return Ended(code, output.getvalue(), time.process_time() - began_s)


TRAIN = ("train", "--model=lenet", "--data=digits", "--trace-every=1", "--audit-every=1", "-j0")
TRAIN += ("--log-interval=1", "--max-steps=4", "--checkpoint-interval=2")
CHECKPOINT = "checkpoints/step-00000004"
COMMANDS: dict[str, Callable[[Path], tuple[object, ...]]] = {
    "diff": lambda run: ("diff", run, run.parent / "own"),
    "evaluate": lambda run: ("evaluate", run, "--data=digits", "--model=lenet"),
    "resume": lambda run: (*TRAIN, f"--output={run.parent}", "--experiment=run", "--resume=auto"),
    "predict": lambda run: ("predict", run, run.parent / "picture.png", "--model=lenet"),
    "export": lambda run: ("export", run, run.parent / "out.safetensors"),
    "replay": lambda run: ("replay", run),
    "report": lambda run: ("report", run),
}
# Of tries that start whole commands.
FORGING = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))
FORGED = {  # the commands that read each file
    "config.yaml": ("diff", "resume", "replay", "report"),
    "summary.json": ("diff", "resume", "replay", "report"),
    "evaluation.json": ("report",),
    "metrics.jsonl": ("resume", "report"),
    "audit.jsonl": ("resume", "report"),
    "trace.jsonl": ("diff", "resume", "replay"),
    f"{CHECKPOINT}/manifest.json": ("diff", "evaluate", "resume", "predict", "export", "replay"),
    "checkpoints/last": ("diff", "evaluate", "resume"),
    "checkpoints/best": ("evaluate", "resume", "predict"),
}
UNWANTED = ("Traceback", "\x1b", "\0")
LONGEST_S = 10.0  # of a processor: a report takes 2 to 4
# Done, failed, not usable, and a difference found:
EXPECTED = (EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_MISMATCH)


def make_run(folder: Path) -> Path:
    """Train for four steps; return the run's folder, with what its commands need beside it."""
    ended = call(*TRAIN, f"--output={folder}", "--experiment=run")
    assert ended.exit_code == 0, ended.output
    write_lines(folder / "run" / "audit.jsonl", [audit_record(2, 0.5)])  # needs several workers
    shutil.copytree(folder / "run", folder / "own")
    Image.new("L", (8, 8)).save(folder / "picture.png")
    return folder / "run"


def sign(content: bytes) -> bytes:
    """Return a manifest with the digest that fits it, if it can have one."""
    try:
        manifest = json.loads(content)
        manifest.pop("manifest_sha256", None)
        return json.dumps(manifest | {"manifest_sha256": _digest_of(manifest)}).encode()
    except (ValueError, TypeError, AttributeError, RecursionError):
        return content


def problem_of(run: Path, name: str, content: bytes, command: str) -> str:
    """Put a forged file into a run, run a command on it, and put the run back as it was.

    Returns what is wrong with how the command ended; empty if nothing is.
    """
    (run / name).write_bytes(sign(content) if name.endswith("manifest.json") else content)
    try:
        ended = call(*COMMANDS[command](run))
    except BaseException:
        return traceback.format_exc()
    finally:
        shutil.rmtree(run)
        shutil.copytree(run.parent / "own", run)
        (run.parent / "out.safetensors").unlink(missing_ok=True)
    if ended.exit_code in EXPECTED and not any(text in ended.output for text in UNWANTED):
        return "" if ended.seconds < LONGEST_S else f"it took {ended.seconds:.1f} s"
    return f"exit code {ended.exit_code}:\n{ended.output}"
