"""Edits of how sums are formed: by whom, in which order, how one fails, and is found finite."""

from hvdtrain.horovod_build.edits.edit import Edit

_BY_HOST = (
    "with several workers a host, a ring of all ranks sends up to twice the bytes over its link"
)
_READ_AGAIN = (
    "to find gradients that are not finite takes a further pass over memory, while a sum in shared "
    "memory has its elements in the cache"
)
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

FINITE = (
    Edit(
        "horovod/common/common.h",
        "  const std::string& reason() const;\n  Event event;\n",
        "  const std::string& reason() const;\n  Event event;\n"
        "  bool is_finite = false; // all elements of a sum are known to be so\n",
        _READ_AGAIN,
    ),
    Edit(
        "horovod/common/ops/mpi_operations.cc",
        "  return Status::OK();\n}\n\nbool MPIAllreduce::Enabled",
        "  Status status = Status::OK();\n"
        "  status.is_finite = sums.IsFinite() && std::abs(postscale_factor) <= 1.0;\n"
        "  return status;\n}\n\nbool MPIAllreduce::Enabled",
        _READ_AGAIN,
    ),
    Edit(
        "horovod/torch/handle_manager.h",
        "  std::shared_ptr<Status> ReleaseHandle(int handle);\n",
        """\
  std::shared_ptr<Status> ReleaseHandle(int handle);
  // Whether all elements of a sum that has ended are known to be finite (of a group's last one).
  bool IsFinite(int handle) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto found = results_.find(handle);
    return found != results_.end() && found->second && found->second->is_finite;
  }
""",
        _READ_AGAIN,
    ),
    Edit(
        "horovod/torch/mpi_ops_v2.cc",
        '  m.def("horovod_torch_poll", &PollHandle);\n',
        '  m.def("horovod_torch_poll", &PollHandle);\n'
        '  m.def("horovod_torch_is_finite",\n'
        "        [](int handle) { return handle_manager.IsFinite(handle); });\n",
        _READ_AGAIN,
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
)
