"""The edits of Horovod 0.28.1's published source, each with its reason, and their application."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from hvdtrain.errors import HvdtrainError

# Files of ours that are added, and where.
ADDED = {
    "native/waiting.h": "horovod/common",
    "native/sleeping_mpi.h": "horovod/common",
    "native/shared_memory.h": "horovod/common",
    "native/gloo_by_host.h": "horovod/common",
    "runner/any_shell.py": "horovod/runner/util",
    "runner/host_connection.py": "horovod/runner/util",
    "runner/host_starter.py": "horovod/runner/util",
}
HOROVOD_VERSION = "0.28.1"
HOROVOD_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"


@dataclass(frozen=True)
class Edit:
    """A replacement of the one occurrence of `old` in `path`, relative to the source root."""

    path: str
    old: str
    new: str
    why: str


# Paths of the libraries of torch, of NVIDIA's wheels beside it, and of PyPI's Open MPI, relative to
# the wheel's folder (site-packages/horovod/torch/), so that the cached wheel works in any
# environment.
LIBRARIES = ("torch/lib", "nvidia/nccl/lib", "nvidia/cu13/lib", "nvidia/cuda_runtime/lib", "../..")
RELATIVE_RPATH = ";".join(rf"\$ORIGIN/../../{folder}" for folder in LIBRARIES)

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
_KNOW = "def {}_built(verbose=False):\n    return {}\n"
_BOTH = "{}\n\n@_cache\n{}"
_FIND_CUDA = (
    "import torch; from torch.utils.cpp_extension import {0}_HOME; print(True if "
    "((torch.version.{1} is not None) and ({0}_HOME is not None)) else False)"
)
_CHOSEN = "import os; print(os.environ.get('HOROVOD_GPU') == '{0}')"
_NCCL_FAILS = """\
            gpu_context->WaitForEvents(evt_queue, entries, timeline,
                                       error_check_callback);
          }
        } else {
"""
_NCCL_FAILURE_IS_RETURNED = """\
            try {
              gpu_context->WaitForEvents(evt_queue, entries, timeline,
                                         error_check_callback);
            } catch (std::exception& e) {
              global_state->shut_down = true;
              gpu_evt_failed = true;
              gpu_evt_err_msg = e.what();
            }
          }
        } else {
"""

_NEWER_GCC = "gcc 13 and newer do not include it by way of other headers"
_IDLE = (
    "Horovod's thread wakes up every millisecond where nothing is to be reduced, on a core that "
    "others compute on"
)
_SPINNING = "Open MPI spins until the slowest rank arrives, on a core that others compute on"
_BY_HOST = (
    "with several workers a host, a ring of all ranks sends up to twice the bytes over its link"
)
_ANY_SHELL = (
    "the login shell on another host may be csh, fish or rbash, which change such a command"
)
_ONE_CONNECTION = (
    "one ssh a worker, all at once, is more than sshd lets in (MaxStartups): 9 of 32 are refused"
)
_ASKED = "a transfer may take the core from a thread that waits for it, not from one that computes"
_STALLED = (
    "where a wait for a rank has stalled, the operation returns the error, and Horovod's thread "
    "ends without MPI's collectives, in which it would wait for that rank for ever"
)
_STALL_IN_OPERATION = """\
  } catch (const Stalled& stalled) {
    for (auto& e : entries) {
      e.FinishWithCallback(Status::UnknownError(stalled.what()));
    }
    throw;
"""
_STALL_ENDS_LOOP = """\
  } catch (const Stalled& stalled) {
    LOG(ERROR, horovod_global.global_controller->GetRank()) << stalled.what();
    state.shut_down = true;
    for (auto id : state.process_set_table.Ids()) {
      state.process_set_table.Get(id).tensor_queue.FinalizeTensorQueue(
          Status::UnknownError(stalled.what()));
    }
    return;
"""
_OPERATION_FAILS = """\
  } catch (const std::exception& ex) {
    LOG(DEBUG, horovod_global.global_controller->GetRank())
        << "ExecuteOperation Failed";
"""
_LOOP_FAILS = """\
  } catch (const std::exception& ex) {
    LOG(ERROR, horovod_global.global_controller->GetRank())
        << "Horovod background loop uncaught exception: " << ex.what();
"""
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

_FOR_ANY_SHELL = """\
def get_ssh_command(local_command, host, port=None, identity_file=None, timeout_s=None):
    command = for_any_shell(' '.join(shlex.split(local_command)))
    return open_ssh_command(shlex.quote(command), host, port, identity_file, timeout_s)


def open_ssh_command(local_command, host, port=None, identity_file=None, timeout_s=None):
"""
# Open MPI writes commands for the local user's shell. sh takes all of them but those for csh.
_MPI_FOR_ANY_SHELL = """\
    try:
        local_shell = pwd.getpwuid(os.getuid()).pw_shell
    except KeyError:
        local_shell = ''
    agent = os.path.join(os.path.dirname(__file__), 'util', 'any_shell.py')
    if not local_shell.endswith('csh') and ' ' not in sys.executable + agent:
        env = copy.copy(env)
        env.setdefault('OMPI_MCA_plm_rsh_agent', f'{sys.executable} -I -S {agent}')

    # Execute the mpirun command.
"""
_ONE_SSH_A_WORKER = """\
            local_command = quote('cd {pwd} > /dev/null 2>&1 ; {command}'
                                  .format(pwd=os.getcwd(), command=command))
            command = get_remote_command(local_command,
                                         host=host_name,
                                         port=settings.ssh_port,
                                         identity_file=settings.ssh_identity_file)
"""
_ONE_SSH_A_HOST = """\
            command = 'cd {pwd} > /dev/null 2>&1 ; exec {command}'.format(
                pwd=quote(os.getcwd()), command=command)
            if env_util.is_kubeflow_mpi():
                command = get_remote_command(quote(command), host=host_name)
            else:
                execute = functools.partial(connections.execute, host_name)
"""


def _sleeping_controller(operation: str) -> Edit:
    """Return the edit of one of the controller's all-reduces, of the bits that ranks agree on."""
    return Edit(
        "horovod/common/mpi/mpi_controller.cc",
        "MPI_Allreduce(MPI_IN_PLACE, bitvector.data(), count,\n" + 31 * " " + "MPI_LONG_LONG_INT, "
        f"{operation}, mpi_ctx_.mpi_comm);",
        "SleepingMpi(mpi_ctx_.mpi_comm, WaitFor::kRanks)\n"
        f"      .Allreduce(bitvector.data(), count, MPI_LONG_LONG_INT, {operation});",
        _SPINNING,
    )


EDITS = (
    Edit(
        "CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD 14)\nset(CMAKE_CXX_STANDARD_REQUIRED ON)\n",
        "set(CMAKE_CXX_STANDARD $ENV{HVDTRAIN_CXX_STANDARD})\n"
        "set(CMAKE_CXX_STANDARD_REQUIRED ON)\n"
        "set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)\n"
        f'set(CMAKE_INSTALL_RPATH "{RELATIVE_RPATH}")\n',
        "torch's headers need C++17, from torch 2.14 on C++20; the libraries are found wherever "
        "the wheel is installed",
    ),
    Edit(
        "horovod/torch/CMakeLists.txt",
        "    set(CMAKE_CXX_STANDARD 14)\n",
        "    set(CMAKE_CXX_STANDARD $ENV{HVDTRAIN_CXX_STANDARD})\n",
        "torch's headers need C++17, from torch 2.14 on C++20",
    ),
    Edit(
        "horovod/torch/CMakeLists.txt",
        "SHARED ${SOURCES} ${PYTORCH_SOURCES})",
        "SHARED ${PYTORCH_SOURCES} ${SOURCES})",
        "the two files that take longest to compile begin first",
    ),
    Edit(
        "horovod/torch/CMakeLists.txt",
        "from distutils.sysconfig import get_python_inc; print(get_python_inc())",
        "import sysconfig; print(sysconfig.get_paths()['include'])",
        "Python 3.12 and newer have no distutils",
    ),
    Edit(
        "horovod/runner/js_run.py",
        "from distutils.spawn import find_executable\n",
        "from shutil import which as find_executable\n",
        "Python 3.12 and newer have no distutils, and horovodrun imports this file",
    ),
    Edit(
        "horovod/runner/launch.py",
        "def run_commandline():\n",
        "def run_commandline():\n"
        "    from multiprocessing import util\n"
        "    flags = util._args_from_interpreter_flags\n"
        "    util._args_from_interpreter_flags = lambda: ['-I', *flags()]\n\n",
        "each worker is started by a process of multiprocessing, a python -c, which would import a "
        "user's signal.py from the working folder; it is handed horovodrun's own path",
    ),
    Edit(
        "horovod/common/common.h",
        "#include <memory>\n#include <string>\n#include <unordered_map>\n",
        "#include <memory>\n#include <stdexcept>\n#include <string>\n#include <unordered_map>\n",
        f"it uses std::logic_error; {_NEWER_GCC}",
    ),
    Edit(
        "horovod/common/group_table.h",
        "#include <queue>\n#include <unordered_map>\n",
        "#include <queue>\n#include <string>\n#include <unordered_map>\n",
        f"it uses std::string; {_NEWER_GCC}",
    ),
    Edit(
        "third_party/gloo/gloo/types.h",
        "#include <iostream>\n",
        "#include <cstdint>\n#include <iostream>\n",
        f"it uses uint8_t; {_NEWER_GCC}",
    ),
    Edit(
        "third_party/flatbuffers/include/flatbuffers/stl_emulation.h",
        "  const size_type count_;\n",
        "  size_type count_;\n",
        "an assignment in the same class changes it, which gcc 14 refuses",
    ),
    Edit(
        "setup.py",
        "if not os.environ.get('HOROVOD_WITHOUT_PYTORCH'):\n"
        "    require_list.append('cffi>=1.4.0')\n",
        "",
        "nothing uses cffi",
    ),
    Edit(
        "setup.py",
        "      setup_requires=require_list if is_build_action() else [],\n",
        "",
        "setuptools would install these from an index, which a machine without a network has not",
    ),
    Edit(
        "setup.py",
        "cmake_build_args = ['--config', config]\n",
        "cmake_build_args = ['--config', config, '--target', 'pytorch']\n",
        "what torch does not use is left out: kernels and a Gloo for the other C++ ABI",
    ),
    Edit(
        "cmake/Modules/FindPytorch.cmake",
        _FIND_CUDA.format("CUDA", "cuda"),
        _CHOSEN.format("CUDA"),
        "a torch with CUDA is also used on CPUs, where there may be no CUDA to build with",
    ),
    Edit(
        "cmake/Modules/FindPytorch.cmake",
        _FIND_CUDA.format("ROCM", "hip"),
        _CHOSEN.format("ROCM"),
        "a torch with ROCm is also used on CPUs",
    ),
    Edit(
        "cmake/Modules/FindNCCL.cmake",
        '    set(NCCL_LIBNAME "nccl")\n',
        '    set(NCCL_LIBNAME "libnccl.so.2" "nccl")\n',
        "the NCCL beside torch's wheels has no libnccl.so, only libnccl.so.2",
    ),
    Edit(
        "horovod/torch/cuda_util.cc",
        'dlopen("libcuda.so", RTLD_LAZY)',
        'dlopen("libcuda.so.1", RTLD_LAZY)',
        "libcuda.so belongs to the development package; drivers in containers have libcuda.so.1",
    ),
    Edit(
        "horovod/common/ops/gpu_operations.cc",
        _NCCL_FAILS,
        _NCCL_FAILURE_IS_RETURNED,
        "an error of NCCL is raised in a thread of Horovod's own, which ends the process, instead "
        "of being returned by the operation",
    ),
    Edit(
        "horovod/common/gloo/gloo_controller.cc",
        "  global_ranks_.reserve(size_);\n",
        "  global_ranks_.resize(size_);\n",
        "reserve leaves the vector empty, so the stall inspector looks at no rank under Gloo",
    ),
    Edit(
        "horovod/common/gloo/gloo_context.cc",
        "  auto dev = CreateDevice(device_attr);\n\n  global_ctx = global_context.ctx;\n",
        "  device_attr.iface = global_context.gloo_iface_;\n"
        "  auto dev = CreateDevice(device_attr);\n\n  global_ctx = global_context.ctx;\n",
        "only the global context has the interface that was chosen; gradients go through that of a "
        "process set, which would bind to whatever address the host's own name resolves to",
    ),
    Edit(
        "horovod/__init__.py",
        "from horovod.runner import run\n",
        "from horovod.runner import run\n\n"
        'MPI_ORDER = "the ring over MPI"  # of sums, as hvdtrain.ring.orders names it\n'
        "GLOO_BY_HOST = True  # where HOROVOD_GLOO_HIERARCHICAL_ALLREDUCE is 1\n",
        "other builds of Horovod add in another order",
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
        '#include "mpi_controller.h"\n',
        '#include "mpi_controller.h"\n#include "../sleeping_mpi.h"\n',
        _SPINNING,
    ),
    _sleeping_controller("MPI_BAND"),
    _sleeping_controller("MPI_BOR"),
    Edit(
        "horovod/common/ops/mpi_operations.cc",
        '#include "mpi_operations.h"\n',
        '#include "mpi_operations.h"\n#include "../sleeping_mpi.h"\n',
        _SPINNING,
    ),
    Edit(
        "horovod/common/ops/mpi_operations.cc",
        """\
  const void* sendbuf = entries.size() > 1 || fused_input_data == buffer_data
                        ? MPI_IN_PLACE : fused_input_data;
  int op =
      MPI_Allreduce(sendbuf, buffer_data, (int)num_elements,
                    mpi_context.GetMPIDataType(first_entry.tensor),
                    mpiOp,
                    mpi_context.GetMPICommunicator(Communicator::GLOBAL));
""",
        """\
  if (fused_input_data != buffer_data) {
    std::memcpy(buffer_data, fused_input_data, buffer_len);
  }
  int op = SleepingMpi(mpi_context.GetMPICommunicator(Communicator::GLOBAL),
                       WaitFor::kMessages)
               .Allreduce(buffer_data, num_elements,
                          mpi_context.GetMPIDataType(first_entry.tensor), mpiOp);
""",
        f"{_SPINNING}; and the order of sums is then known",
    ),
    Edit(
        "horovod/common/ops/gloo_operations.h",
        "  virtual void Allreduce(void* buffer_data, int num_elements,\n"
        "                         ReduceOp reduce_op) = 0;\n",
        "  virtual void Allreduce(void* buffer_data, int num_elements,\n"
        "                         ReduceOp reduce_op, bool by_host) = 0;\n",
        _BY_HOST,
    ),
    Edit(
        "horovod/common/ops/gloo_operations.h",
        "                 ReduceOp reduce_op) override;\n",
        "                 ReduceOp reduce_op, bool by_host) override;\n",
        _BY_HOST,
    ),
    Edit(
        "horovod/common/ops/gloo_operations.cc",
        '#include "../common.h"\n',
        '#include "../common.h"\n#include "../gloo_by_host.h"\n',
        _BY_HOST,
    ),
    Edit(
        "horovod/common/ops/gloo_operations.cc",
        """\
                                  ReduceOp reduce_op) {
  gloo::AllreduceOptions opts(gloo_context_->ctx);
""",
        """\
                                  ReduceOp reduce_op, bool by_host) {
  if (by_host) {
    GlooByHost<T>(gloo_context_->local_ctx, gloo_context_->cross_ctx)
        .Sum(static_cast<T*>(buffer_data), (size_t) num_elements);
    return;
  }
  gloo::AllreduceOptions opts(gloo_context_->ctx);
""",
        _BY_HOST,
    ),
    Edit(
        "horovod/common/ops/gloo_operations.cc",
        "  gloo_algos->Allreduce(buffer_data, num_elements, glooOp);\n",
        "  bool by_host = glooOp == ReduceOp::SUM &&\n"
        "                 IsSummedByHost(*process_set.controller, num_elements);\n"
        "  gloo_algos->Allreduce(buffer_data, num_elements, glooOp, by_host);\n",
        _BY_HOST,
    ),
    Edit(
        "horovod/runner/util/remote.py",
        "from horovod.runner.common.util import env as env_util\n",
        "import shlex\n\nfrom horovod.runner.common.util import env as env_util\n"
        "from horovod.runner.util.any_shell import for_any_shell\n",
        _ANY_SHELL,
    ),
    Edit(
        "horovod/runner/util/remote.py",
        "def get_ssh_command(local_command, host, port=None, identity_file=None, "
        "timeout_s=None):\n",
        _FOR_ANY_SHELL,
        _ANY_SHELL,
    ),
    Edit(
        "horovod/runner/driver/driver_service.py",
        "            '{python} -m horovod.runner.task_fn {index} {num_hosts} ' \\\n",
        "            'cd / ; {python} -m horovod.runner.task_fn {index} {num_hosts} ' \\\n",
        "it would import a user's signal.py from the home folder of the other host",
    ),
    Edit(
        "horovod/runner/driver/driver_service.py",
        "            command = get_remote_command(command,\n",
        "            command = get_remote_command(shlex.quote(command),\n",
        _ANY_SHELL,
    ),
    Edit(
        "horovod/runner/driver/driver_service.py",
        "import os\nimport sys\n",
        "import os\nimport shlex\nimport sys\n",
        _ANY_SHELL,
    ),
    Edit(
        "horovod/runner/mpi_run.py",
        "    # Execute the mpirun command.\n",
        _MPI_FOR_ANY_SHELL,
        _ANY_SHELL,
    ),
    Edit(
        "horovod/runner/mpi_run.py",
        "import copy\n",
        "import copy\nimport pwd\n",
        _ANY_SHELL,
    ),
    Edit(
        "horovod/runner/gloo_run.py",
        "from horovod.runner.util.remote import get_remote_command\n",
        "from horovod.runner.util.host_connection import HostConnections\n"
        "from horovod.runner.util.remote import get_remote_command\n",
        _ONE_CONNECTION,
    ),
    Edit(
        "horovod/runner/gloo_run.py",
        "    terminate_all_event = None if settings.elastic else threading.Event()\n",
        "    terminate_all_event = None if settings.elastic else threading.Event()\n"
        "    connections = HostConnections(settings.ssh_port, settings.ssh_identity_file)\n",
        _ONE_CONNECTION,
    ),
    Edit(
        "horovod/runner/gloo_run.py",
        "        index = slot_info.rank\n",
        "        index = slot_info.rank\n        execute = safe_shell_exec.execute\n",
        _ONE_CONNECTION,
    ),
    Edit(
        "horovod/runner/gloo_run.py",
        "import errno\n",
        "import errno\nimport functools\n",
        _ONE_CONNECTION,
    ),
    Edit(
        "horovod/runner/gloo_run.py",
        _ONE_SSH_A_WORKER,
        _ONE_SSH_A_HOST,
        _ONE_CONNECTION,
    ),
    Edit(
        "horovod/runner/gloo_run.py",
        "            exit_code = safe_shell_exec.execute(command,\n" + 48 * " " + "index=index,\n",
        "            exit_code = execute(command,\n" + 48 * " " + "index=index,\n",
        _ONE_CONNECTION,
    ),
    Edit(
        "horovod/common/operations.cc",
        '#include "utils/env_parser.h"\n',
        '#include "utils/env_parser.h"\n#include "waiting.h"\n',
        _STALLED,
    ),
    Edit(
        "horovod/common/operations.cc",
        _OPERATION_FAILS,
        _STALL_IN_OPERATION + _OPERATION_FAILS,
        _STALLED,
    ),
    Edit("horovod/common/operations.cc", _LOOP_FAILS, _STALL_ENDS_LOOP + _LOOP_FAILS, _STALLED),
    Edit(
        "horovod/torch/handle_manager.cc",
        '#include "handle_manager.h"\n',
        '#include "handle_manager.h"\n#include "../common/waiting.h"\n',
        _ASKED,
    ),
    Edit(
        "horovod/torch/handle_manager.cc",
        "::PollHandle(int handle) {\n",
        "::PollHandle(int handle) {\n  common::LastAskedUs() = common::NowUs();\n",
        _ASKED,
    ),
)


class SourceEditError(HvdtrainError):
    """Source other than the one for which the edits were written."""


def edits_for(*, has_mpi: bool) -> tuple[Edit, ...]:
    """Return all edits of a build with MPI, or without."""
    built_edit = Edit(
        "horovod/common/util.py",
        _BOTH.format(_ASK.format("mpi", "MPI"), _ASK.format("gloo", "Gloo")),
        _BOTH.format(_KNOW.format("mpi", has_mpi), _KNOW.format("gloo", True)),
        "horovodrun would import torch, for seconds, to learn whether this wheel has MPI and Gloo",
    )
    return (*EDITS, built_edit)


def edits_sha256(*, has_mpi: bool) -> str:
    """Return a hash of the edits, and of the files that are added."""
    added = [_added(name).read_text("utf-8") for name in ADDED]
    edits = json.dumps([*(asdict(edit) for edit in edits_for(has_mpi=has_mpi)), *added])
    return hashlib.sha256(edits.encode()).hexdigest()


def apply_edits(source_root: Path, edits: tuple[Edit, ...]) -> None:
    """Apply all edits under `source_root` and add `ADDED`, or do nothing.

    Raises SourceEditError, listing every edit whose expected text does not occur exactly once.
    """
    edited: dict[Path, str] = {}
    problems = []
    for edit in edits:
        path = source_root / edit.path
        text = edited.get(path) or (path.read_text("utf-8") if path.is_file() else "")
        count = text.count(edit.old)
        if count == 1:
            edited[path] = text.replace(edit.old, edit.new)
        else:
            problems.append(
                f"{edit.path}: expected this text once, found it {count} times: {edit.old!r}"
                f" (needed because {edit.why})"
            )
    if problems:
        raise SourceEditError(
            f"Horovod's source is not the {HOROVOD_VERSION} that these edits are for:\n"
            + "\n".join(problems)
        )
    for path, text in edited.items():
        path.write_text(text, "utf-8")
    for name, folder in ADDED.items():
        shutil.copy(_added(name), source_root / folder)


def _added(name: str) -> Path:
    return Path(__file__).parent / name
