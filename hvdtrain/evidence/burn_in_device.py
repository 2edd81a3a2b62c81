"""The known answer of one GPU, or another device of torch: for `hvdtrain doctor --burn-in`.

    python -m hvdtrain.evidence.burn_in_device list
    python -m hvdtrain.evidence.burn_in_device DEVICE SECONDS RANK SIZE STORE

The first prints the devices of this host, and their UUIDs. The second repeats the training of the
cores (known_answer.py) on a device, and products of matrices that keep all of it busy, in each
format for which devices have units of their own. Then SIZE such processes, which find one another
through the file STORE, measure their all-reduce.
"""

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from hvdtrain.evidence.known_answer import digest_of, end_with_parent, repeat, train
from hvdtrain.exchange.gpus import find_devices, synchronize, uuid_of
from hvdtrain.log import say

PRODUCTS, BETWEEN_DIGESTS = 200, 20
# The side of the matrices, and the bytes of a sum, by type of device: of others, which may compute
# on a CPU, nothing is known.
SIDES, SUM_BYTES = {"cuda": 4096, "xpu": 4096}, {"cuda": 1 << 28, "xpu": 1 << 28}
SIDE, BYTES = 128, 1 << 24
FORMATS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
FIRST_WITH_BFLOAT16 = (8, 0)  # compute capability
SUMS, WARM_UP = 20, 3
JOIN_S = 60.0  # for the other devices to finish their last repetition, and for a sum


def _multiply(device: torch.device) -> Iterator[tuple[str, str]]:
    """Yield name and digest of products of matrices, of which each is a factor of the next."""
    side, formats = SIDES.get(device.type, SIDE), dict(FORMATS)
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FIRST_WITH_BFLOAT16:
        del formats[torch.bfloat16]
    drawn = torch.randn(side, 2 * side, generator=torch.Generator().manual_seed(2))
    for dtype, bits in formats.items():
        factor, product = drawn.to(device, dtype).chunk(2, dim=1)
        factor = factor / side**0.5  # products keep their magnitude
        for number in range(1, PRODUCTS + 1):
            product = factor @ product
            if number % BETWEEN_DIGESTS == 0:
                # Sums of bits as integers: exact, and changed by every wrong bit.
                sums = product.contiguous().view(bits).sum(dim=0, dtype=torch.int64)
                yield f"product {number} in {str(dtype).removeprefix('torch.')}", digest_of(sums)
                product = product / product.abs().amax()


def kind_of(device: torch.device) -> str:
    """Return what decides which bits are computed: the device's model, and software."""
    module = torch.get_device_module(device)
    questions = ("get_device_name", "get_device_capability")
    hardware = [str(getattr(module, name)(device)) for name in questions if hasattr(module, name)]
    if hasattr(module, "get_device_properties"):
        properties = module.get_device_properties(device)
        hardware += [f"{getattr(properties, 'multi_processor_count', '?')} multiprocessors"]
    versions = [f"torch {torch.__version__}"]
    if device.type == "cuda":
        versions += [f"cuDNN {torch.backends.cudnn.version()}"]
    return ", ".join([device.type, *(hardware or [platform.machine()]), *versions])


def measure_sums(device: torch.device, rank: int, size: int, store: str) -> dict[str, Any]:
    """Collective: check and time the all-reduce of all devices of this host.

    Return `backend`, `bytes`, `seconds` (a median) and `wrong`, a text or None; only `missing`
    where torch has no collectives for such devices.
    """
    backend = distributed.Backend.default_device_backend_map.get(device.type)
    if backend is None:
        return {"missing": f"torch has no collectives for {device.type}"}
    distributed.init_process_group(
        backend,
        store=distributed.FileStore(store, size),  # type: ignore[attr-defined]  # public
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=JOIN_S),
        device_id=device if backend == "nccl" else None,
    )
    count = SUM_BYTES.get(device.type, BYTES) // 4
    pattern = torch.arange(count, device=device).remainder_(251).float()
    total, seconds = pattern * (rank + 1), []
    distributed.all_reduce(total)
    # Such sums are exact in float32.
    wrong = int((total != pattern * sum(range(1, size + 1))).sum())
    for number in range(WARM_UP + SUMS):
        total.zero_()
        synchronize(device)
        distributed.barrier()
        began = time.perf_counter()
        distributed.all_reduce(total)
        synchronize(device)
        seconds += [time.perf_counter() - began] * (number >= WARM_UP)
    distributed.destroy_process_group()
    return {
        "backend": backend,
        "bytes": 4 * count,
        "seconds": statistics.median(seconds),
        "devices": size,
        "wrong": f"{wrong:,} of {count:,} elements" if wrong else None,
    }


def main() -> int:
    """List the devices, or burn one in; return the exit code."""
    end_with_parent()
    if sys.argv[1] == "list":
        say(json.dumps([(str(device), uuid_of(device)) for device in find_devices()]))
        return 0
    name, seconds, rank, size, store = sys.argv[1:]
    device = torch.device(name)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    torch.set_num_threads(1)
    # Nothing here has only a form that does not repeat; should a device have no other, the
    # comparison shows it.
    torch.use_deterministic_algorithms(True, warn_only=True)
    results = repeat(
        lambda: train(device) | dict(_multiply(device)), kind_of(device), float(seconds)
    )
    if int(size) > 1:
        try:
            sums = measure_sums(device, int(rank), int(size), store)
        except RuntimeError as error:  # another device has failed, or the library does not work
            sums = {"missing": str(error).partition("\n")[0][:300]}
        say(json.dumps(results | {"sums": sums}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
