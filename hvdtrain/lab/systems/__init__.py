"""Ways to make the same update on N devices, each behind one small contract, one file a system.

`hvdtrain compare` runs them side by side. A system is one class derived from `Strategy`; what it
computes on is a `Work`, which is the same for all of them, and where its process stands is a
`Place`. Every process of a system runs `hvdtrain.lab.systems.process`.
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
    """The class of a system, or of the user's own, package.module:Class. Raises UsageError."""
    if name in SYSTEMS:
        module, _, kind = SYSTEMS[name].partition(":")
        found = getattr(importlib.import_module(f"{__name__}.{module}"), kind)
    elif is_plugin(name):
        found = import_callable("--systems", name)
    else:
        raise UsageError(
            f"--systems={name}: unknown; choose from {', '.join(SYSTEMS)}, or "
            "package.module:Class of your own"
        )
    if not (isinstance(found, type) and issubclass(found, Strategy)):
        raise UsageError(
            f"--systems={name}: is no class derived from hvdtrain.lab.systems.Strategy"
        )
    return found


__all__ = ["ORACLE", "SYSTEMS", "Strategy", "find_strategy"]
