"""The shape of the package: sizes, names, narrow values, and one place for each concept."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.house.test_layers import MODULES, layer_of

LONGEST_FILE, LONGEST_FUNCTION = 350, 40  # lines
SENT_AS_ONE_TEXT = "hvdtrain.launcher.receiver"  # to a host that has nothing of this package
VAGUE = {"it", "found", "own", "place", "known", "given"}
KEPT_NAMES = {"hvdtrain.evidence.verify_n.parting": {"found"}}  # a key of a certificate's JSON
WHOLE_CONFIGURATION = "TrainConfig"
RUN_LAYER = layer_of("hvdtrain.run")

# What betrays a second implementation, and the modules that may hold it.
CONCEPTS = {
    "the names of a run's files": (
        r'"(metrics|audit|trace)\.jsonl"|"(summary|evaluation)\.json"',
        {"hvdtrain.records.folders", "hvdtrain.documents"},  # with the largest size of each
    ),
    "a walk over nested values (named tuples too)": (r'"_fields"', {"hvdtrain.tensors"}),
    "the columns of a printed table": (r"\bljust\(\w+\[", {"hvdtrain.lab.bench.rounds"}),
    "horovodrun's command line": (r"--disable-cache", {"hvdtrain.launcher.horovodrun"}),
    "a proof that a peer holds the token": (
        r"hmac\.(digest|new)\(",
        {"hvdtrain.network", "hvdtrain.launcher.protocol"},  # one step; and the launcher's orders
    ),
    "reading what torch.save wrote": (
        r"torch\.load\(",
        {
            "hvdtrain.train.bounded",  # what anyone may have written
            "hvdtrain.train.portable",  # what this process has just written
            "hvdtrain.lab.bench.saving",  # is measured
            "hvdtrain.weights",
        },
    ),
    "hooks around every module": (
        r"\.register_forward_hook\(",
        {
            "hvdtrain.audit.digests",  # of all
            "hvdtrain.evidence.verify_n.passes",  # of suspects
            "hvdtrain.integrations.ddp",  # of the whole model
        },
    ),
    "reading YAML": (r"yaml\.compose\(", {"hvdtrain.config.options"}),
    "ratios of paired rounds": (r"statistics\.quantiles\(", {"hvdtrain.lab.bench.rounds"}),
}


def functions_of(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method of a module."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def problems_of(module: str, source: str) -> list[str]:
    """What is too long, named vaguely, or given the whole configuration."""
    tree, lines = ast.parse(source), source.count("\n")
    problems = []
    if lines > LONGEST_FILE and module != SENT_AS_ONE_TEXT:
        problems.append(f"{module}: {lines} lines, {LONGEST_FILE} at most")
    for function in functions_of(tree):
        length = (function.end_lineno or 0) - function.lineno + 1
        if length > LONGEST_FUNCTION:
            problems.append(f"{module}.{function.name}: {length} lines, at most {LONGEST_FUNCTION}")
        if (layer_of(module) or 0) < (RUN_LAYER or 0) and not module.startswith("hvdtrain.config"):
            problems += [
                f"{module}.{function.name} takes the whole {WHOLE_CONFIGURATION}"
                for argument in [*function.args.args, *function.args.kwonlyargs]
                if argument.annotation is not None
                and WHOLE_CONFIGURATION in ast.unparse(argument.annotation)
            ]
    for node in ast.walk(tree):
        name = node.id if isinstance(node, ast.Name) else getattr(node, "arg", None)
        if name in VAGUE - KEPT_NAMES.get(module, set()):
            problems.append(f"{module}:{node.lineno}: {name} does not say what it is")
    return problems


@pytest.mark.parametrize("module", MODULES)
def test_files_and_functions_are_short_and_names_say_what_things_are(module: str) -> None:
    """Fails for a file or function over its limit, a vague name, or a whole configuration below
    `run/`.
    """
    assert problems_of(module, MODULES[module].read_text("utf-8")) == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = 1\n" * 351, "351 lines"),
        ("def f():\n" + "    x = 1\n" * 40, "f: 41 lines"),
        ("def f(config: TrainConfig | None): ...", "takes the whole TrainConfig"),
        ("def f(*, config: 'TrainConfig'): ...", "takes the whole TrainConfig"),
        ("for it in (): pass", "it does not say"),
        ("def f(own): ...", "own does not say"),
        ("f(found=1)", "found does not say"),
    ],
)
def test_the_checker_catches(source: str, expected: str) -> None:
    """Fails when the checker lets this pass."""
    assert any(expected in problem for problem in problems_of("hvdtrain.train.loop", source))


def test_no_class_name_means_two_things() -> None:
    """Fails when a second public class has the name of another."""
    places = defaultdict(list)
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module)
    del places["AuditCallback"]  # the same for each library
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}


@pytest.mark.parametrize("concept", CONCEPTS)
def test_each_concept_has_one_place(concept: str) -> None:
    """Fails when another module does the same, or the place in the table has moved."""
    pattern, expected = CONCEPTS[concept]
    sources = {module: _without_docstrings(path) for module, path in MODULES.items()}
    assert {module for module, text in sources.items() if re.search(pattern, text)} == expected


def _without_docstrings(path: Path) -> str:
    """The code of a module, with its strings in double quotes."""
    tree = ast.parse(path.read_text("utf-8"))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [  # type: ignore[attr-defined]
                each
                for each in body
                if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
            ] or [ast.Pass()]
    return ast.unparse(tree).replace("'", '"')
