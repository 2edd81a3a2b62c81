"""The edits that Horovod 0.28.1's published source needs, and their application."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import HvdtrainError

HOROVOD_VERSION = "0.28.1"
HOROVOD_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"


@dataclass(frozen=True)
class Edit:
    """A replacement of the one occurrence of `old` in `path`, relative to the source root."""

    path: str
    old: str
    new: str
    why: str


# Paths of the libraries of torch and of pip's Open MPI, relative to the wheel's folder
# (site-packages/horovod/torch/), so that the cached wheel works in any virtual environment.
RELATIVE_RPATH = r"\$ORIGIN/../../torch/lib;\$ORIGIN/../../../.."

_ASK = """\
def {0}_built(verbose=False):
    for ext_base_name in EXTENSIONS:
        built_fn = lambda ext: ext.{0}_built()
        result = _check_extension_lambda(
            ext_base_name, built_fn, 'built with {1}', verbose)
        if result is not None:
            return result
    return None
"""
_KNOW = "def {}_built(verbose=False):\n    return True\n"
_BOTH = "{}\n\n@_cache\n{}"

EDITS = (
    Edit(
        "CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD 14)\nset(CMAKE_CXX_STANDARD_REQUIRED ON)\n",
        "set(CMAKE_CXX_STANDARD 17)\nset(CMAKE_CXX_STANDARD_REQUIRED ON)\n"
        "set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)\n"
        f'set(CMAKE_INSTALL_RPATH "{RELATIVE_RPATH}")\n',
        "torch's headers need C++17; the libraries are found wherever the wheel is installed",
    ),
    Edit(
        "horovod/torch/CMakeLists.txt",
        "    set(CMAKE_CXX_STANDARD 14)\n",
        "    set(CMAKE_CXX_STANDARD 17)\n",
        "torch's headers need C++17",
    ),
    Edit(
        "horovod/common/gloo/gloo_controller.cc",
        "  global_ranks_.reserve(size_);\n",
        "  global_ranks_.resize(size_);\n",
        "reserve leaves the vector empty, so the stall inspector looks at no rank under Gloo",
    ),
    Edit(
        "horovod/common/util.py",
        _BOTH.format(_ASK.format("mpi", "MPI"), _ASK.format("gloo", "Gloo")),
        _BOTH.format(_KNOW.format("mpi"), _KNOW.format("gloo")),
        "horovodrun would import torch, for seconds, to learn that this wheel has MPI and Gloo",
    ),
)


class SourceEditError(HvdtrainError):
    """Source other than the one for which the edits were written."""


def apply_edits(source_root: Path, edits: tuple[Edit, ...] = EDITS) -> None:
    """Apply all edits under `source_root`, or none.

    Raises SourceEditError, listing every edit whose expected text does not occur exactly once.
    """
    edited: dict[Path, str] = {}
    problems = []
    for edit in edits:
        path = source_root / edit.path
        text = edited.get(path) or (path.read_text("utf-8") if path.is_file() else "")
        found = text.count(edit.old)
        if found == 1:
            edited[path] = text.replace(edit.old, edit.new)
        else:
            problems.append(
                f"{edit.path}: expected this text once, found it {found} times: {edit.old!r}"
                f" (needed because {edit.why})"
            )
    if problems:
        raise SourceEditError(
            f"Horovod's source is not the {HOROVOD_VERSION} that these edits are for:\n"
            + "\n".join(problems)
        )
    for path, text in edited.items():
        path.write_text(text, "utf-8")
