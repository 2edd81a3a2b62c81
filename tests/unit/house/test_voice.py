"""The voice of docstrings, comments and pages, as far as a machine can hold it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SOURCES = [*ROOT.glob("hvdtrain/**/*.py"), *ROOT.glob("launch/**/*.py")]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
PREFIX = re.compile(r'"""Collective: (\w)')
TRANSLATED = (
    *("told", "afresh", "all the same", "foretell", "is said", "put down to", "in vain", "rightly"),
    *("put right", "mended"),
)


def test_docstrings_are_imperative(tmp_path: Path) -> None:
    """Fails when a function's docstring does not begin with an imperative, after "Collective: "."""
    for source in SOURCES:
        copy = tmp_path / source.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(PREFIX.sub(lambda match: f'"""{match[1].upper()}', source.read_text()))
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "D401,D419", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("phrase", TRANSLATED)
def test_no_translated_phrases(phrase: str) -> None:
    """Fails when a source or a page has a phrase that the field does not use."""
    pattern = re.compile(rf"\b{phrase}\b", re.IGNORECASE)
    found = [str(path) for path in [*SOURCES, *PAGES] if pattern.search(path.read_text("utf-8"))]
    assert not found
