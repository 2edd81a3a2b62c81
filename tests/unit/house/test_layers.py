"""The import rule of docs/architecture.md: imports go to the same floor or down, never up."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hvdtrain

PACKAGE = Path(hvdtrain.__file__).parent
TOOLS = PACKAGE.parent / "launch"  # what only a checkout needs
LAUNCHER = "hvdtrain.launcher"
BUILD = "hvdtrain.horovod_build"
PARTS_OF_HOROVOD = f"{BUILD}.runner."  # imported there, under other names

# A name covers the modules below it too, except for the package itself.
LAYERS = {
    "hvdtrain": 6,  # the public names
    "hvdtrain.__main__": 6,
    "hvdtrain.api": 6,
    "hvdtrain.cli": 6,
    "hvdtrain.notebook": 6,
    "hvdtrain.lab": 5,
    "hvdtrain.lab.peers.hvdtrain_loop": 6,  # uses the public names, as a user's script does
    "hvdtrain.lab.peers.train_task": 6,
    "hvdtrain.evidence": 5,
    "hvdtrain.report": 5,
    LAUNCHER: 5,
    "launch.containers": 5,
    "launch.install": 5,
    "hvdtrain.run": 4,
    "hvdtrain.integrations": 4,
    "hvdtrain.records": 3,
    "hvdtrain.train": 3,
    "hvdtrain.audit": 3,
    "hvdtrain.weights": 3,
    "hvdtrain.exchange": 2,
    "hvdtrain.data": 2,
    "hvdtrain.models": 2,
    "hvdtrain.tasks": 2,
    "hvdtrain.tensors": 2,
    "hvdtrain.horovod_build": 1,
    "hvdtrain.ring": 1,
    "hvdtrain.config": 1,
    "hvdtrain.cgroups": 0,
    "hvdtrain.dynamo": 0,
    "hvdtrain.documents": 0,
    "hvdtrain.errors": 0,
    "hvdtrain.files": 0,
    "hvdtrain.network": 0,
    "hvdtrain.interpreter": 0,
    "hvdtrain.log": 0,
    "hvdtrain.pulse": 0,
    "hvdtrain.slurm": 0,
    "hvdtrain.topology": 0,
}
LIBRARIES = {  # used late
    "hvdtrain.config.options": {"yaml"},
    "hvdtrain.launcher.view": {"rich"},
    "hvdtrain.launcher.doctor.gpu_facts": {"pynvml"},
}
VERSION = "hvdtrain.__version__"  # a plain constant
TORCH_STARTS_AT = 2
LAB = "hvdtrain.lab"
MAY_IMPORT_LAB = (LAB, "hvdtrain.cli")  # what trains does not know how it is measured
ONLY_IMPORTERS = {
    "horovod": "hvdtrain.exchange.horovod",
    "mpi4py": "hvdtrain.ring.transports.mpi",
    "accelerate": "hvdtrain.integrations.transformers",
    "transformers": "hvdtrain.integrations.transformers",
    "lightning": "hvdtrain.integrations.lightning",
    "pytorch_lightning": "hvdtrain.integrations.lightning",
}
PEERS = "hvdtrain.lab.peers."  # scripts of other systems, to measure beside


def source_files() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    files = {}
    for path in sorted([*PACKAGE.rglob("*.py"), *TOOLS.rglob("*.py")]):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        files[".".join(part for part in parts if part != "__init__")] = path
    return files


MODULES = source_files()


def layer_of(module: str) -> int | None:
    """The layer of a module, or of a name in one; None where the table does not hold it."""
    name = module
    if name == VERSION:
        return 0
    while name not in LAYERS and "." in name:
        name = name.rpartition(".")[0]
    if name == "hvdtrain" and module in MODULES and module != name:
        return None
    return LAYERS.get(name)


def imported_names(source: str, package: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, inside functions too; `package` resolves dots."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*(above if node.level else []), *filter(None, [node.module])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            function = ast.unparse(node.func).rpartition(".")[2]
            if function in ("import_module", "__import__") and isinstance(
                node.args[0], ast.Constant
            ):
                yield node.lineno, str(node.args[0].value)


def violations(module: str, source: str, is_package: bool = False) -> list[str]:
    """Every import of `module` that the rule forbids."""
    own = layer_of(module)
    if own is None:
        return [f"{module} has no layer: add it to the table"]
    package = module if is_package else module.rpartition(".")[0]
    found = []
    for line, name in imported_names(source, package):
        top = name.partition(".")[0]
        if top in sys.stdlib_module_names or top == "__future__":
            continue
        if problem := _problem(module, own, name, top):
            found.append(f"{module}:{line}: {problem}")
    return found


def _problem(module: str, own: int, name: str, top: str) -> str | None:
    light = module.startswith((LAUNCHER, BUILD, "launch."))
    if top in ("hvdtrain", "launch"):
        other = layer_of(name)
        if light and not name.startswith((LAUNCHER, BUILD, "launch.")) and other != 0:
            return f"the launcher imports {name}, which is not in layer 0"
        if name.startswith(LAB) and not module.startswith(MAY_IMPORT_LAB):
            return f"only {' and '.join(MAY_IMPORT_LAB)} may import {name}"
        if other is None or other > own:
            return f"layer {own} imports {name} of layer {other}"
        return None
    if top == "horovod" and module.startswith(PARTS_OF_HOROVOD):
        return None
    if top in ONLY_IMPORTERS:
        only = ONLY_IMPORTERS[top]
        is_allowed = module == only or module.startswith(PEERS)
        return None if is_allowed else f"only {only} may import {top}"
    if top in LIBRARIES.get(module, ()):
        return None
    if own == 0 or light:
        return f"{top} is not in the standard library"
    if own < TORCH_STARTS_AT and top != "numpy":
        return f"{top} below layer {TORCH_STARTS_AT}: numpy only"
    return None


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down_only(module: str) -> None:
    """Fails for a module without a layer, an import upwards, or a library where it must not be."""
    path = MODULES[module]
    assert violations(module, path.read_text("utf-8"), path.name == "__init__.py") == []


def test_every_name_in_the_table_is_there() -> None:
    """Fails when the table names a module that no longer exists, and so holds nothing."""
    assert [name for name in LAYERS if name not in MODULES] == []


def test_the_restricted_libraries_are_used_where_they_may_be() -> None:
    """Fails when a module that may import such a library moves, and the rule holds nothing."""
    for library, module in ONLY_IMPORTERS.items():
        names = imported_names(MODULES[module].read_text("utf-8"), module.rpartition(".")[0])
        assert library in {name.partition(".")[0] for _, name in names}


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("hvdtrain.errors", "import hvdtrain.ring", "layer 0 imports hvdtrain.ring"),
        ("hvdtrain.ring.bound", "def f():\n    from hvdtrain import audit", "bound:2: layer 1"),
        ("hvdtrain.ring.transports.tcp", "from ...audit import GradientAudit", "of layer 3"),
        ("hvdtrain.ring.bound", "import torch.nn", "torch below layer 2"),
        ("hvdtrain.log", "import numpy", "not in the standard library"),
        ("hvdtrain.config", "import yaml", "yaml below layer 2"),
        ("hvdtrain.exchange", "from hvdtrain.train.loop import Job", "of layer 3"),
        (
            "hvdtrain.train.loop",
            "import horovod.torch as hvd",
            "only hvdtrain.exchange.horovod may import",
        ),
        (
            "hvdtrain.run.training",
            "from horovod import run",
            "only hvdtrain.exchange.horovod may import",
        ),
        ("hvdtrain.exchange.horovod", "from mpi4py import MPI", "mpi may import mpi4py"),
        ("hvdtrain.audit", "import importlib\nimportlib.import_module('hvdtrain.cli')", "layer 6"),
        ("hvdtrain.evidence.trials", "from hvdtrain.lab import compare", "only hvdtrain.lab and"),
        ("hvdtrain.launcher.agent", "import torch", "not in the standard library"),
        ("hvdtrain.launcher.agent", "import hvdtrain.exchange", "not in layer 0"),
        ("hvdtrain.launcher.agent", "from hvdtrain.ring import gamma", "not in layer 0"),
    ],
)
def test_the_checker_catches(module: str, source: str, expected: str) -> None:
    """Fails when the checker lets this violation pass."""
    (found,) = violations(module, source)
    assert expected in found


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("hvdtrain.errors", "import os\nfrom hvdtrain import __version__"),
        ("hvdtrain.ring.algorithm", "import numpy as np\nfrom .segments import split_evenly"),
        (
            "hvdtrain.exchange.horovod",
            "import horovod.torch as hvd\nfrom hvdtrain.ring import gamma",
        ),
        ("hvdtrain.launcher.agent", "from hvdtrain.errors import UsageError"),
        ("hvdtrain.cli.launch", "from hvdtrain.launcher import agent\nimport torch"),
    ],
)
def test_the_checker_lets_pass(module: str, source: str) -> None:
    """Fails when the checker complains of an import that the rule allows."""
    assert violations(module, source) == []


def test_a_new_module_needs_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when a file that the table does not hold goes unnoticed."""
    monkeypatch.setitem(MODULES, "hvdtrain.brand_new", PACKAGE / "brand_new.py")
    assert violations("hvdtrain.brand_new", "") == [
        "hvdtrain.brand_new has no layer: add it to the table"
    ]
    assert violations("hvdtrain.run.training", "import hvdtrain.brand_new") != []


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("hvdtrain.cli.flags", ["numpy", "torch", "horovod"]),
        ("hvdtrain.launcher.agent", ["numpy", "torch", "horovod", "yaml", "mpi4py"]),
        ("hvdtrain.ring.transports.tcp", ["torch", "horovod", "mpi4py"]),
        ("hvdtrain.ring.transports.mpi", ["torch", "horovod", "mpi4py"]),
        ("hvdtrain.report.page", ["torch", "horovod", "mpi4py"]),
        ("hvdtrain.train.loop", ["horovod", "mpi4py"]),
    ],
)
def test_imports_where_libraries_are_absent(module: str, absent: list[str]) -> None:
    """Fails when the module cannot be imported on a machine without these libraries."""
    program = f"import sys; sys.modules.update(dict.fromkeys({absent})); import {module}"
    path = f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r}); "
    done = subprocess.run([sys.executable, "-c", path + program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
