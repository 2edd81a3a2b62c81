"""Edits of how ranks and threads wait: they sleep, and notice at once what they wait for."""

from hvdtrain.horovod_build.edits.edit import Edit

_IDLE = (
    "Horovod's thread wakes up every millisecond where nothing is to be reduced, on a core that "
    "others compute on"
)
_SPINNING = "Open MPI spins until the slowest rank arrives, on a core that others compute on"
_ASKED = "a transfer may take the core from a thread that waits for it, not from one that computes"
_PAUSE = "a cycle begins up to 1 ms after the last operation, also where its result is waited for"
_LOOKED_FOR = (
    "a thread that looks again and again whether an operation has ended takes a core from those "
    "that form the sum"
)
_SUBMITTED = "  Pause::Get().Submitted();\n  entry_added_.notify_one();\n  return Status::OK();\n"


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


WAITING = (
    Edit(
        "horovod/common/tensor_queue.h",
        "#include <iostream>\n#include <mutex>\n",
        "#include <chrono>\n#include <condition_variable>\n#include <iostream>\n#include <mutex>\n"
        '#include "waiting.h"\n',
        _IDLE,
    ),
    Edit(
        "horovod/common/tensor_queue.h",
        "  void RemoveJoinTensor();\n\nprotected:\n",
        """\
  void RemoveJoinTensor();

  // Return once an operation is pending on this rank, or after the limit.
  void WaitForEntry(std::chrono::milliseconds limit) {
    std::unique_lock<std::mutex> guard(mutex_);
    entry_added_.wait_for(guard, limit, [this] { return !tensor_table_.empty(); });
  }

protected:
  std::condition_variable entry_added_;

""",
        _IDLE,
    ),
    Edit(
        "horovod/common/tensor_queue.cc",
        "  message_queue_.push(std::move(message));\n  return Status::OK();\n",
        "  message_queue_.push(std::move(message));\n" + _SUBMITTED,
        _IDLE,
    ),
    Edit(
        "horovod/common/tensor_queue.cc",
        "    message_queue_.push(std::move(messages[i]));\n  }\n  return Status::OK();\n",
        "    message_queue_.push(std::move(messages[i]));\n  }\n" + _SUBMITTED,
        _IDLE,
    ),
    # Without an operation of this rank none can begin on any other, but for those of process sets
    # without it. The limit is how late a shutdown can be noticed, here or on another rank.
    Edit(
        "horovod/common/operations.cc",
        "  // This delay determines thread frequency and communication message latency\n",
        """\
  if (!state.dynamic_process_sets && state.process_set_table.Ids().size() == 1) {
    state.process_set_table.Get(0).tensor_queue.WaitForEntry(std::chrono::milliseconds(50));
  }
  // This delay determines thread frequency and communication message latency
""",
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
  SleepingMpi sums(mpi_context.GetMPICommunicator(Communicator::GLOBAL),
                   WaitFor::kMessages);
  int op = sums.Allreduce(buffer_data, num_elements,
                          mpi_context.GetMPIDataType(first_entry.tensor), mpiOp);
""",
        f"{_SPINNING}; and the order of sums is then known",
    ),
)

AWAITED = (
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
    Edit(
        "horovod/torch/handle_manager.cc",
        "  return results_[handle] != nullptr;\n",
        "  bool is_done = results_[handle] != nullptr;\n"
        "  if (!is_done) { common::Pause::Get().End(); }\n"
        "  return is_done;\n",
        _PAUSE,
    ),
    Edit(
        "horovod/common/operations.cc",
        "    std::this_thread::sleep_for(sleep_duration);\n  }\n  state.last_cycle_start",
        "    Pause::Get().Wait(sleep_duration);\n  }\n  state.last_cycle_start",
        _PAUSE,
    ),
    Edit(
        "horovod/torch/handle_manager.h",
        "#include <memory>\n#include <mutex>\n",
        "#include <chrono>\n#include <condition_variable>\n#include <memory>\n#include <mutex>\n",
        _LOOKED_FOR,
    ),
    Edit(
        "horovod/torch/handle_manager.h",
        "  bool PollHandle(int handle);\n",
        "  bool PollHandle(int handle);\n"
        "  // Sleep until the operation has ended, or the limit is over; return whether it has.\n"
        "  bool WaitFor(int handle, std::chrono::microseconds limit);\n",
        _LOOKED_FOR,
    ),
    Edit(
        "horovod/torch/handle_manager.h",
        "  std::mutex mutex_;\n",
        "  std::mutex mutex_;\n  std::condition_variable done_;\n",
        _LOOKED_FOR,
    ),
    Edit(
        "horovod/torch/handle_manager.cc",
        "  results_[handle] = std::make_shared<Status>(status);\n}\n",
        """\
  results_[handle] = std::make_shared<Status>(status);
  done_.notify_all();
}

bool HandleManager::WaitFor(int handle, std::chrono::microseconds limit) {
  common::BriefWait wait;
  do {
    if (PollHandle(handle)) {
      return true;
    }
    std::this_thread::yield();
  } while (wait.MayStillBeBrief());
  common::LastAskedUs() = common::NowUs() + limit.count(); // until then it is being asked
  std::unique_lock<std::mutex> guard(mutex_);
  bool is_done = done_.wait_for(guard, limit, [&] {
    auto found = results_.find(handle);
    return found == results_.end() || found->second != nullptr;
  });
  common::LastAskedUs() = common::NowUs();
  return is_done;
}
""",
        _LOOKED_FOR,
    ),
    Edit(
        "horovod/torch/mpi_ops_v2.cc",
        "void WaitAndClear(int handle) {\n",
        """\
void Wait(int handle) {
  auto has_ended = [&] {
    py::gil_scoped_release release_python_gil;
    return handle_manager.WaitFor(handle, std::chrono::milliseconds(50));
  };
  while (!has_ended()) {
    if (PyErr_CheckSignals() != 0) {
      throw py::error_already_set();
    }
  }
}

void WaitAndClear(int handle) {
""",
        f"{_LOOKED_FOR}; meanwhile no signal is handled",
    ),
    Edit(
        "horovod/torch/mpi_ops.py",
        "    try:\n        mpi_lib.horovod_torch_wait_and_clear(handle)\n",
        "    mpi_lib.horovod_torch_wait(handle)\n"
        "    try:\n        mpi_lib.horovod_torch_wait_and_clear(handle)\n",
        "an error of a signal's handler is not one of Horovod",
    ),
    Edit(
        "horovod/torch/mpi_ops_v2.cc",
        '  m.def("horovod_torch_wait_and_clear", &WaitAndClear);\n',
        '  m.def("horovod_torch_wait", &Wait);\n'
        '  m.def("horovod_torch_wait_and_clear", &WaitAndClear);\n',
        _LOOKED_FOR,
    ),
)
