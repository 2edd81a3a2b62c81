"""Systems that compute the same update on N devices, each a class derived from `Strategy`.

`hvdtrain compare` runs them one after the other. Every process of a system runs `process`, with the
same `Work` and a `Member` of its own.

contract          `Strategy`, `Spec`, `Member`; messages and traffic
work              model, data, global batches and optimizer, the same for all systems
process           the processes: how they are started, and their main program
plain_torch       one device, the reference; torch's DataParallel and DistributedDataParallel
towers            one process, one model replica per thread
all_reduce        gather to rank 0, sum, broadcast; the ring all-reduce of `hvdtrain.ring`
parameter_server  sharded parameter servers, synchronous and asynchronous
horovod           the training step of `hvdtrain train`
model_parallel    layers split over processes
"""

import importlib

from hvdtrain.config.plugins import import_callable
from hvdtrain.errors import UsageError
from hvdtrain.lab.systems.contract import Strategy

ORACLE = "single"
SYSTEMS = {  # in the order of the table
    ORACLE: "plain_torch:Single",
    "towers": "towers:Towers",
    "data_parallel": "plain_torch:TorchDataParallel",
    "ddp": "plain_torch:TorchDistributedDataParallel",
    "gather_broadcast": "all_reduce:GatherBroadcast",
    "parameter_server": "parameter_server:ParameterServer",
    "parameter_server_async": "parameter_server:AsynchronousParameterServer",
    "ring": "all_reduce:Ring",
    "horovod": "horovod:Horovod",
    "model_parallel": "model_parallel:ModelParallel",
}


def find_strategy(name: str) -> type[Strategy]:
    """Return the class of a system, or import package.module:Class. Raises UsageError."""
    if name in SYSTEMS:
        module, _, kind = SYSTEMS[name].partition(":")
        strategy_class = getattr(importlib.import_module(f"{__name__}.{module}"), kind)
    else:
        strategy_class = import_callable("--systems", name)
    if not (isinstance(strategy_class, type) and issubclass(strategy_class, Strategy)):
        raise UsageError(f"--systems={name}: not a subclass of hvdtrain.lab.systems.Strategy")
    return strategy_class


__all__ = ["ORACLE", "SYSTEMS", "Strategy", "find_strategy"]
