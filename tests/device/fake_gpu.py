"""The device for tests in this process: torch's module of it, and its names in Horovod.

Environment: FAKE_GPUS, how many each process sees (2); FAKE_GPU_NAMES and FAKE_GPU_UUIDS, what they
are, by local rank.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from tests.device.build import NAME, library

DEVICE = "gpu"


@cache
def register() -> Any:
    """Register the device in torch, and return its compiled module."""
    torch.utils.rename_privateuse1_backend(DEVICE)
    found = importlib.util.spec_from_file_location(NAME, library())
    assert found is not None and found.loader is not None
    compiled = importlib.util.module_from_spec(found)
    found.loader.exec_module(compiled)
    compiled.set_device_count(int(os.environ.get("FAKE_GPUS", "2")))
    torch._register_device_module(DEVICE, _module(compiled))
    torch.utils.generate_methods_for_privateuse1_backend()
    _keep_moved_parameters()
    return compiled


def _keep_moved_parameters() -> None:
    """Let a parameter stay the same object when a module is moved, as on CUDA."""
    honest = torch.nn.Module._apply

    def apply(module: torch.nn.Module, *arguments: Any, **named: Any) -> torch.nn.Module:
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            return honest(module, *arguments, **named)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)

    torch.nn.Module._apply = apply  # type: ignore[method-assign]


def _module(compiled: Any) -> Any:
    """Return `torch.gpu`, with the functions of `torch.cuda` that are in use."""
    module: Any = types.ModuleType(f"torch.{DEVICE}")

    def number_of(device: Any) -> int:
        index = torch.device(device).index if not isinstance(device, int) else device
        return compiled.current_device() if index is None else index

    def set_device(device: Any) -> None:
        compiled.set_device(number_of(device))
        compiled.keep_to(number_of(device))  # a rank that asks for memory of another is refused

    @contextmanager
    def on_device(device: Any) -> Iterator[None]:
        before = compiled.current_device()
        compiled.set_device(number_of(device))
        try:
            yield
        finally:
            compiled.set_device(before)

    def properties(device: Any) -> Any:
        # By local rank: a process may see its own device only.
        place = int(os.environ.get("HOROVOD_LOCAL_RANK", number_of(device)))
        names = os.environ.get("FAKE_GPU_NAMES", "Fake").split(",")
        uuids = os.environ.get("FAKE_GPU_UUIDS", "fake-0,fake-1,fake-2,fake-3").split(",")
        return types.SimpleNamespace(
            name=names[place % len(names)], uuid=uuids[place % len(uuids)],
            major=1, minor=0, multi_processor_count=1,
        )  # fmt: skip

    @contextmanager
    def stream(chosen: Any) -> Iterator[None]:
        yield

    module.is_available = lambda: compiled.device_count() > 0
    module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = compiled.device_count
    module.current_device = compiled.current_device
    module.set_device, module.device, module.stream = set_device, on_device, stream
    module.Stream = lambda device=None: torch.Stream(torch.device(DEVICE, number_of(device or 0)))
    module.Event = lambda enable_timing=False: torch.Event(DEVICE, enable_timing=enable_timing)
    module.synchronize = lambda device=None: compiled.synchronize()
    module.manual_seed = module.manual_seed_all = compiled.seed
    module.get_rng_state = lambda device=None: compiled.rng_state()
    module.set_rng_state = lambda state, device=None: compiled.set_rng_state(state)
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.get_device_properties = properties
    module.max_memory_allocated = lambda device=None: 1 << 20
    module.reset_peak_memory_stats = lambda device=None: None
    module.empty_cache = lambda: None
    return module


def let_train() -> Any:
    """Let hvdtrain choose the device, and Horovod exchange its tensors; return its module."""
    from hvdtrain.train import devices

    devices.ACCELERATORS = (*devices.ACCELERATORS, DEVICE)
    compiled = register()
    if any(name in os.environ for name in ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK")):
        library = importlib.import_module("horovod.torch.mpi_ops").mpi_lib
        for name in dir(library):  # such as horovod_torch_allreduce_async_torch_FloatTensor
            operation, _, kind = name.rpartition("_torch_")
            if operation and kind.endswith("Tensor") and "cuda" not in kind:
                own = f"{operation}_torch_{DEVICE}_{kind}"
                setattr(library, own, getattr(library, name))
    return compiled
