"""Edits of how sums are formed: by whom, in which order, how ranks wait, and how a sum fails."""

from hvdtrain.horovod_build.edits.edit import Edit

_IDLE = (
    "Horovod's thread wakes up every millisecond where nothing is to be reduced, on a core that "
    "others compute on"
)
_SPINNING = "Open MPI spins until the slowest rank arrives, on a core that others compute on"
_BY_HOST = (
    "with several workers a host, a ring of all ranks sends up to twice the bytes over its link"
)
_ASKED = "a transfer may take the core from a thread that waits for it, not from one that computes"
_PAUSE = "a cycle begins up to 1 ms after the last operation, also where its result is waited for"
_SUBMITTED = "  Pause::Get().Submitted();\n  entry_added_.notify_one();\n  return Status::OK();\n"
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


FAULTS_AND_ORDER = (
    Edit(
        "horovod/common/ops/gpu_operations.cc",
        """\
            gpu_context->WaitForEvents(evt_queue, entries, timeline,
                                       error_check_callback);
          }
        } else {
""",
        """\
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
""",
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
  int op = SleepingMpi(mpi_context.GetMPICommunicator(Communicator::GLOBAL),
                       WaitFor::kMessages)
               .Allreduce(buffer_data, num_elements,
                          mpi_context.GetMPIDataType(first_entry.tensor), mpiOp);
""",
        f"{_SPINNING}; and the order of sums is then known",
    ),
)

BY_HOST = (
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
)

CANONICAL = (
    Edit(
        "horovod/torch/mpi_ops_v2.cc",
        '#include "adapter_v2.h"\n',
        '#include "adapter_v2.h"\n#include "canonical_sums.h"\n',
        "canonical sums convert gradients in one pass over memory, torch's operations in several",
    ),
)

STALLS = (
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
)
