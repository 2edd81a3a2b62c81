"""The pages: links, names of files and flags, and the reference that pdoc makes of docstrings."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import hvdtrain

ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
OF_THIS_VERSION = [
    *(page for page in PAGES if page.name != "CHANGELOG.md"),
    ROOT / "hvdtrain" / "horovod_build" / "README.md",
]
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
HREF = re.compile(r'(?:href|src)="([^"]+)"')
FOLDERS = (".ci", "docker", "docs", "examples", "hvdtrain", "launch", "tests")
TREE_PATH = re.compile(
    rf"(?<![\w/.@-])(?:\.\./)*((?:{'|'.join(map(re.escape, FOLDERS))})/[\w./-]+)"
)
SOURCE_NAME = re.compile(r"`(?:\./)?([\w/-]+\.(?:py|h|cpp))`")
MODULE = re.compile(r"(?<![\w./-])((?:examples|hvdtrain|tests)(?:\.[A-Za-z_]\w*)+)(?!/)")
FLAG = re.compile(r"(?<![\w-])--[a-zA-Z][\w-]*")
QUOTED_FLAG = re.compile(r"""["'](--[a-z][\w-]*)""")
PLACEHOLDER = re.compile(r"\b(NAME|VERSION)\b")
OF_OTHERS = {  # paths and names of a reader's own files, and of other projects
    *("docs/benchmarks.rst", "numpy.py", "secrets.py", "train.py", "types.py"),
}
FLAGS_OF_OTHERS = {
    "build, pip, twine": ("--help", "--no-deps", "--strict"),
    "docker": (
        *("--build-arg", "--cap-drop", "--cpus", "--cpuset-cpus", "--env", "--format", "--gpus"),
        *("--ipc", "--memory", "--name", "--pids-limit", "--read-only", "--rm", "--security-opt"),
        *("--shm-size", "--tmpfs", "--user", "--workdir"),
    ),
    "fairseq": ("--max-tokens",),
    "horovodrun, mpirun, torchrun": (
        *("--check-build", "--gloo", "--mpi", "--mpi-args", "--nproc-per-node", "--prefix"),
    ),
    "Slurm": (
        *("--cpus-per-task", "--distribution", "--gpus-per-task", "--nodes", "--ntasks-per-node"),
        *("--signal", "--wait"),
    ),
    "tensorboard": ("--logdir",),
}
LONGEST_CELL = 200


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


def exists(path: str) -> bool:
    """Return whether a path stands in this checkout, or is one that a reader fills in."""
    return path in OF_OTHERS or bool(PLACEHOLDER.search(path)) or (ROOT / path).exists()


def is_module_or_name(dotted: str) -> bool:
    """Return whether it is a module of this checkout, or a name that one defines."""
    name = dotted.rpartition(".")[2]
    if dotted.count(".") == 1 and name in hvdtrain.__all__:
        return True
    path = ROOT / dotted.replace(".", "/")
    if path.is_dir() or path.with_suffix(".py").exists() or PLACEHOLDER.search(dotted):
        return True
    source = path.parent.with_suffix(".py")
    if path.parent.is_dir():
        source = path.parent / "__init__.py"
    return source.exists() and bool(re.search(rf"\b{name}\b", source.read_text("utf-8")))


@pytest.mark.parametrize("page", OF_THIS_VERSION, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_modules_exist(page: Path) -> None:
    """Fails when a page names a file, a module or a name of one that this checkout lacks."""
    text = page.read_text("utf-8")
    files = [f"/{path.relative_to(ROOT)}" for top in FOLDERS for path in (ROOT / top).rglob("*.*")]
    lost = [path for path in TREE_PATH.findall(text) if not exists(path.rstrip("./"))]
    for name in SOURCE_NAME.findall(text):
        is_named = name.startswith("horovod/") or exists(name)
        if not is_named and not any(path.endswith(f"/{name}") for path in files):
            lost.append(name)
    lost += [dotted for dotted in MODULE.findall(text) if not is_module_or_name(dotted)]
    assert not lost


@pytest.mark.parametrize("page", OF_THIS_VERSION, ids=lambda page: str(page.relative_to(ROOT)))
def test_flags_exist(page: Path) -> None:
    """Fails when a page names a flag of no command here, and of none of the tools listed above."""
    ours = [ROOT / "tests" / "unit" / "flags.txt"]
    ours += [path for top in ("examples", "launch", "tests") for path in (ROOT / top).rglob("*.py")]
    named = QUOTED_FLAG.findall("".join(path.read_text("utf-8") for path in ours))
    allowed = {*named, *FLAG.findall(ours[0].read_text("utf-8"))}.union(*FLAGS_OF_OTHERS.values())
    assert sorted(set(FLAG.findall(page.read_text("utf-8"))) - allowed) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_cells_are_short(page: Path) -> None:
    """Fails when a cell of a table is too long to be read in one."""
    cells = [
        cell.strip()
        for line in page.read_text("utf-8").splitlines()
        if line.startswith("|")
        for cell in re.split(r"(?<!\\)\|", line)
    ]
    assert [cell for cell in cells if len(cell) > LONGEST_CELL] == []


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
