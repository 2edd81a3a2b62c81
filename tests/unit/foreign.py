"""Another operating system, simulated in a child process: without the modules and the names of the
standard library that do not exist there, by the stubs of typeshed, which mypy brings along.

It shows what an import, or a line that is reached, needs of Linux. It does not show how the calls
that exist on both systems behave there, nor libraries: nothing of hvdtrain has run on another one.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import mypy

from tests.unit.commands import environment

STUBS = Path(mypy.__file__).parent / "typeshed" / "stdlib"
Missing = dict[str, list[str] | None]  # by module: the names without which it is; None: all of it
# Modules of the standard library that ask for the system themselves must find the one that is
# there: they are imported before. So are libraries, which have other files elsewhere.
CHILD = """
import contextlib, importlib, json, sys, sysconfig
from importlib.abc import MetaPathFinder

platform, missing, libraries, code = json.loads(sys.stdin.read())
for name in missing:
    with contextlib.suppress(ImportError):  # of an optional part of Python
        importlib.import_module(name)
sysconfig.get_config_vars()
exec(libraries)
for name in [name for name in sys.modules if name.partition(".")[0] == "hvdtrain"]:
    del sys.modules[name]

class Absent(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if missing.get(name, ()) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

for name, names in missing.items():
    if names is None:
        sys.modules.pop(name, None)
    elif module := sys.modules.get(name):
        for each in names:
            if hasattr(module, each):
                delattr(module, each)
sys.meta_path.insert(0, Absent())
sys.platform = platform
exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
"""
# What evaluation and reports import, as in `tests.unit.commands`.
LIBRARIES = """
import PIL.Image, filelock, jinja2, matplotlib.pyplot, rich.console, safetensors.torch
import sklearn.datasets, torch, torch.utils.tensorboard, yaml
from hvdtrain.data.builtin import import_torchvision
import_torchvision()
"""


def run_elsewhere(
    platform: str, code: str, *arguments: object, folder: Path, libraries: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run `python -c CODE ARGUMENTS` as on `platform`; `libraries`: code that imports them."""
    request = json.dumps([platform, missing(platform), libraries, code])
    return subprocess.run(
        [sys.executable, "-c", CHILD, *map(str, arguments)],
        input=request,
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )


@cache
def missing(platform: str) -> Missing:
    """What Linux has and `platform` has not, in the public modules of the standard library."""
    found: Missing = {}
    for path in sorted(STUBS.rglob("*.pyi")):
        parts = path.relative_to(STUBS).with_suffix("").parts
        module = ".".join(part for part in parts if part != "__init__")
        source = path.read_text("utf-8")
        is_public = not any(part[0] == "_" for part in module.split("."))
        if is_public and "sys.platform" in source:
            body = ast.parse(source).body
            there, here = (set(_names(body, system)) for system in (platform, "linux"))
            if here - there:
                is_there = any(name[0] != "_" for name in there)
                found[module] = sorted(here - there) if is_there else None
    return found


def _names(body: Iterable[ast.stmt], platform: str) -> Iterator[str]:
    """The names that a stub defines on a platform, for this version of Python."""
    for it in body:
        if isinstance(it, ast.If):
            yield from _names(it.body if _holds(it.test, platform) else it.orelse, platform)
        elif isinstance(it, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            yield it.name
        elif isinstance(it, ast.AnnAssign) and isinstance(it.target, ast.Name):
            yield it.target.id
        elif isinstance(it, ast.Assign):
            yield from (target.id for target in it.targets if isinstance(target, ast.Name))
        elif isinstance(it, ast.ImportFrom | ast.Import):
            yield from (name.asname for name in it.names if name.asname)


def _holds(test: ast.expr, platform: str) -> bool:
    """Whether a condition of a stub, on the platform or the version of Python, holds."""
    system = type("sys", (), {"platform": platform, "version_info": sys.version_info})
    return bool(eval(compile(ast.Expression(test), "<stub>", "eval"), {"sys": system}))
