"""JSON and YAML of run folders, as a stranger may have made them."""

from __future__ import annotations

import json
import os
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.config.options import read_recorded
from hvdtrain.documents import (
    DEEPEST,
    FIELDS,
    LARGEST_BYTES,
    check,
    lines_of,
    parse_json,
    read_json,
)
from hvdtrain.errors import UsageError
from tests.unit.forging import VALUES

BOMB = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9)
)
CONFIGURATIONS = {  # what is wrong with it
    "aliases": (BOMB + "lr: *a8\n", "has aliases"),
    "deep": ("x: " + "[" * 20_000, "nested more than"),
    "no text": ("\0", "not valid YAML"),
    "cut": ("lr: 'x", "not valid YAML"),
    "empty": ("", "does not hold named values"),
    "a list": ("- lr", "does not hold named values"),
    "a list for a number": ("lr: [1, 2]", "lr: expected a single value"),
    "a text for a number": ("seed: abc", "seed: 'abc' is not of type int"),
    "no script": ("script: []", "script: expected its path"),
    "a loop that is no number": ("loop: [1]", "invalid literal"),
    "large": ("# " + "x" * LARGEST_BYTES["config.yaml"], "is larger than"),
}


@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_a_configuration_that_no_run_wrote(kind: str, tmp_path: Path) -> None:
    """Fails if it is read, ends in another error, or takes seconds or gigabytes."""
    text, expected = CONFIGURATIONS[kind]
    (tmp_path / "config.yaml").write_text(text)
    began_s = time.monotonic()
    with pytest.raises(ValueError, match=expected):
        read_recorded(tmp_path / "config.yaml")
    assert time.monotonic() - began_s < 20


def test_values_of_a_configuration_have_the_types_of_options(tmp_path: Path) -> None:
    """Fails if 1e-3 becomes text, null is lost, or what a later version adds is an error."""
    text = "lr: 1e-3\nvirtual_workers: null\nseed: 7\nsync_bn: true\nlater: [1]\n"
    (tmp_path / "config.yaml").write_text(f"{text}script: [a.py, --x, 3]\nloop: 2\n")
    assert read_recorded(tmp_path / "config.yaml") == {
        "lr": 1e-3,
        "virtual_workers": None,
        "seed": 7,
        "sync_bn": True,
        "script": ["a.py", "--x", "3"],
        "loop": 2,
    }


SUMMARIES = {
    "a list": ("[]", "holds a list"),
    "deep": ("[" * 200_000, "is not JSON"),
    "as deep as Python reads": ('{"a":' + "[" * 500 + "]" * 500 + "}", f"more than {DEEPEST} deep"),
    "a long number": ('{"steps": ' + "9" * 10_000 + "}", "is not JSON"),
    "a text for a number": ('{"steps": "many"}', "steps is 'many', not a whole number"),
    "true for a number": ('{"epochs": true}', "epochs is 'True', not a whole number"),
    "inside": ('{"audit": {"checked": []}}', "audit.checked is"),
    "any name": ('{"best": {"valid_loss": {}}}', "best.valid_loss is"),
    "containers": ('{"x": [' + "[]," * 2_000_001 + "0]}", "values that hold others"),
    "large": ('{"x": "' + "x" * LARGEST_BYTES["summary.json"] + '"}', "is larger than"),
}


@pytest.mark.parametrize("kind", SUMMARIES)
def test_a_summary_that_no_run_wrote(kind: str, tmp_path: Path) -> None:
    """Fails if it is read, ends in another error, or takes half a gigabyte."""
    text, expected = SUMMARIES[kind]
    (tmp_path / "summary.json").write_text(text)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=expected):
            read_json(tmp_path / "summary.json")
        assert tracemalloc.get_traced_memory()[1] < 500 << 20
    finally:
        tracemalloc.stop()


def test_a_newer_summary_is_named_first(tmp_path: Path) -> None:
    """Fails if fields that a later version means otherwise are called damaged."""
    (tmp_path / "summary.json").write_text('{"format": 99, "steps": "many"}')
    with pytest.raises(UsageError, match="newer hvdtrain"):
        read_json(tmp_path / "summary.json")


NO_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pipe": (os.mkfifo, "not a regular file"),
    "a folder": (Path.mkdir, "directory|regular"),
    "an endless device": (lambda path: path.symlink_to("/dev/zero"), "symbolic link"),
    "a link to a file": (lambda path: path.symlink_to(__file__), "symbolic link"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["summary.json", "config.yaml", "metrics.jsonl"])
@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_file_of_a_run(kind: str, name: str, tmp_path: Path) -> None:
    """Fails if it is read, or waited for."""
    make, expected = NO_FILES[kind]
    make(tmp_path / name)
    read: Callable[[Path], Any] = {
        "summary.json": read_json,
        "config.yaml": read_recorded,
        "metrics.jsonl": lambda path: list(lines_of(path)),
    }[name]
    with pytest.raises(OSError, match=f"(?i){expected}"):
        read(tmp_path / name)


def test_an_endless_line_is_refused(tmp_path: Path) -> None:
    """Fails if a file without a newline is taken into memory whole."""
    with (tmp_path / "metrics.jsonl").open("wb") as file:
        file.write(b'{"step": 1}\n')
        file.truncate(1 << 30)
    lines = lines_of(tmp_path / "metrics.jsonl")
    assert next(lines) == '{"step": 1}\n'
    with pytest.raises(ValueError, match="line 2 is longer"):
        next(lines)


@pytest.mark.parametrize("name", FIELDS)
def test_any_values_are_of_the_right_kind_or_refused(name: str) -> None:
    """Fails if a document that was accepted holds a known field of another type, or refusing one
    raises another error.
    """
    fields = st.dictionaries(st.sampled_from([*FIELDS[name], "other"]), VALUES)

    @settings(max_examples=100, deadline=None)
    @given(fields)
    def attempt(document: dict[str, Any]) -> None:
        try:
            found = parse_json(json.dumps(document))
            check(found, FIELDS[name])
        except ValueError:
            return
        for field, kind in FIELDS[name].items():
            if field in found and kind in (int, str):
                assert type(found[field]) is kind

    attempt()
