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

_IDLE = (
    "Horovod's thread wakes up every millisecond where nothing is to be reduced, on a core that "
    "others compute on"
)
_SPINNING = "Open MPI spins until the slowest rank arrives, on a core that others compute on"
# Without an operation of this rank none can begin on any other, but for those of process sets
# without it. The limit is how late a shutdown can be noticed, here or on another rank.
_SLEEP_WHILE_IDLE = """\
  if (!state.dynamic_process_sets && state.process_set_table.Ids().size() == 1) {
    state.process_set_table.Get(0).tensor_queue.WaitForEntry(std::chrono::milliseconds(50));
  }
"""
_WAIT_FOR_ENTRY = """\

  // Return once an operation is pending on this rank, or after the limit.
  void WaitForEntry(std::chrono::milliseconds limit) {
    std::unique_lock<std::mutex> guard(mutex_);
    entry_added_.wait_for(guard, limit, [this] { return !tensor_table_.empty(); });
  }

protected:
  std::condition_variable entry_added_;

"""
# The last rank to arrive is awaited in sleeps of an eighth of the time waited, 0.05 to 1 ms.
_SLEEPING_ALLREDUCE = """\
static int SleepingAllreduce(std::vector<long long>& bits, int count, MPI_Op op, MPI_Comm comm) {
  MPI_Request request;
  int code = MPI_Iallreduce(MPI_IN_PLACE, bits.data(), count, MPI_LONG_LONG_INT, op, comm, &request);
  auto began = std::chrono::steady_clock::now();
  int done = 0;
  while (code == MPI_SUCCESS) {
    code = MPI_Test(&request, &done, MPI_STATUS_IGNORE);
    if (done) {
      break;
    }
    auto waited = std::chrono::duration_cast<std::chrono::microseconds>(
        std::chrono::steady_clock::now() - began).count();
    auto rest = std::max<long long>(50, std::min<long long>(1000, waited / 8));
    std::this_thread::sleep_for(std::chrono::microseconds(rest));
  }
  return code;
}

"""


def _sleeping_allreduce(operation: str, indent: str) -> Edit:
    """Return the edit that makes one of the controller's all-reduces sleep while it waits."""
    return Edit(
        "horovod/common/mpi/mpi_controller.cc",
        f"MPI_Allreduce(MPI_IN_PLACE, bitvector.data(), count,\n{indent}MPI_LONG_LONG_INT, "
        f"{operation}, mpi_ctx_.mpi_comm);",
        f"SleepingAllreduce(bitvector, count, {operation}, mpi_ctx_.mpi_comm);",
        _SPINNING,
    )


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
    Edit(
        "setup.py",
        "'RelWithDebInfo'",
        "'Release'",
        "debug symbols are 60 of the library's 62 MB, and a third of the build's time",
    ),
    Edit(
        "horovod/common/tensor_queue.h",
        "#include <iostream>\n#include <mutex>\n",
        "#include <chrono>\n#include <condition_variable>\n#include <iostream>\n#include <mutex>\n",
        _IDLE,
    ),
    Edit(
        "horovod/common/tensor_queue.h",
        "  void RemoveJoinTensor();\n\nprotected:\n",
        "  void RemoveJoinTensor();\n" + _WAIT_FOR_ENTRY,
        _IDLE,
    ),
    Edit(
        "horovod/common/tensor_queue.cc",
        "  message_queue_.push(std::move(message));\n  return Status::OK();\n",
        "  message_queue_.push(std::move(message));\n  entry_added_.notify_one();\n"
        "  return Status::OK();\n",
        _IDLE,
    ),
    Edit(
        "horovod/common/tensor_queue.cc",
        "    message_queue_.push(std::move(messages[i]));\n  }\n  return Status::OK();\n",
        "    message_queue_.push(std::move(messages[i]));\n  }\n  entry_added_.notify_one();\n"
        "  return Status::OK();\n",
        _IDLE,
    ),
    Edit(
        "horovod/common/operations.cc",
        "  // This delay determines thread frequency and communication message latency\n",
        _SLEEP_WHILE_IDLE
        + "  // This delay determines thread frequency and communication message latency\n",
        _IDLE,
    ),
    Edit(
        "horovod/common/mpi/mpi_controller.cc",
        "#include <numeric>\n",
        "#include <algorithm>\n#include <chrono>\n#include <numeric>\n#include <thread>\n",
        _SPINNING,
    ),
    Edit(
        "horovod/common/mpi/mpi_controller.cc",
        "// MPIController\n",
        _SLEEPING_ALLREDUCE + "// MPIController\n",
        _SPINNING,
    ),
    _sleeping_allreduce("MPI_BAND", 31 * " "),
    _sleeping_allreduce("MPI_BOR", 31 * " "),
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
