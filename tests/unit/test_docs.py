"""The pages: their links, and the reference that pdoc makes of the docstrings."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import hvdtrain

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
HREF = re.compile(r'(?:href|src)="([^"]+)"')


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    found: list[str] = []
    for heading in HEADING.findall(CODE.sub("", page.read_text("utf-8"))):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("\\", "")
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        found.append(f"{slug}-{found.count(slug)}" if slug in found else slug)
    return set(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Fails when a page links to a file, or to a heading, that does not exist."""
    broken = []
    for link in LINK.findall(CODE.sub("", page.read_text("utf-8"))):
        if link.startswith(("https://", "http://")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


def test_the_reference_is_built_from_docstrings(tmp_path: Path) -> None:
    """Fails when pdoc cannot resolve a public name, one has no docstring, or a link is broken."""
    command = [sys.executable, str(ROOT / "docs" / "reference.py"), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    page = (tmp_path / "hvdtrain.html").read_text("utf-8")
    ids = set(re.findall(r'id="([^"]+)"', page))
    for name in hvdtrain.__all__:
        assert name in ids, name
        if name != "__version__":
            assert getattr(hvdtrain, name).__doc__, name
    for link in HREF.findall(page):
        name, _, anchor = link.partition("#")
        if "://" not in link and not link.startswith("data:"):
            assert (tmp_path / name).exists() if name else anchor in ids, link
