"""Systems that compute the same update on N devices, each a class derived from `Strategy`.

`hvdtrain compare` runs them one after the other. Every process of a system runs `process`, with the
same `Work` and a `Place` of its own.

contract          `Strategy`, `Spec`, `Place`; traffic and how it is counted
work              model, data, global batches and optimizer, the same for all systems
process           the main program of each process
messages          point-to-point messages over Gloo
single            one device, the reference
towers            one process, one model replica per thread
data_parallel     torch.nn.DataParallel
ddp               torch's DistributedDataParallel
gather_broadcast  gather to rank 0, sum, broadcast
parameter_server  sharded parameter servers, synchronous and asynchronous
ring              the ring all-reduce of `hvdtrain.ring`
horovod           the training step of `hvdtrain train`
model_parallel    layers split over processes
"""

from __future__ import annotations

import importlib

from hvdtrain.errors import UsageError
from hvdtrain.lab.systems.contract import Strategy
from hvdtrain.plugins import import_callable, is_plugin

ORACLE = "single"
SYSTEMS = {  # in the order of the table
    ORACLE: "single:Single",
    "towers": "towers:Towers",
    "data_parallel": "data_parallel:TorchDataParallel",
    "ddp": "ddp:TorchDistributedDataParallel",
    "gather_broadcast": "gather_broadcast:GatherBroadcast",
    "parameter_server": "parameter_server:ParameterServer",
    "parameter_server_async": "parameter_server:AsynchronousParameterServer",
    "ring": "ring:Ring",
    "horovod": "horovod:Horovod",
    "model_parallel": "model_parallel:ModelParallel",
}


def find_strategy(name: str) -> type[Strategy]:
    """Return the class of a system, or import package.module:Class. Raises UsageError."""
    if name in SYSTEMS:
        module, _, kind = SYSTEMS[name].partition(":")
        found = getattr(importlib.import_module(f"{__name__}.{module}"), kind)
    elif is_plugin(name):
        found = import_callable("--systems", name)
    else:
        raise UsageError(
            f"--systems={name}: unknown; choose from {', '.join(SYSTEMS)}, or "
            "your own package.module:Class"
        )
    if not (isinstance(found, type) and issubclass(found, Strategy)):
        raise UsageError(f"--systems={name}: not a subclass of hvdtrain.lab.systems.Strategy")
    return found


__all__ = ["ORACLE", "SYSTEMS", "Strategy", "find_strategy"]
