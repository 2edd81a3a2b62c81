"""Files of tensors that may be a stranger's: read only if they ask for no more than they hold.

A small file can mean a large state: an archive unpacks, a tensor of stride 0 repeats one value, a
list contains another one many times. What a file asks for is compared with its size, before any of
it is used. On Linux the process is also refused more memory while a file of torch.save is read,
since its pickle builds objects.
"""

import os
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from safetensors.torch import load, load_file

from hvdtrain.files import open_bytes
from hvdtrain.tensors import items_of, tensors_in

MOST_TIMES = 4  # the values of all tensors may take so many times the bytes of their file
ROOM_BYTES = 64 << 20  # ... and these, so that small files may repeat what they like
MOST_TENSORS = 100_000  # of a safetensors file, which may have no bytes
COMMAS_PER_TENSOR = 16  # in such a file's header: three, and one a dimension
LONGEST_HEADER = 100_000_000  # bytes, as safetensors has it
OBJECT_TIMES = 20  # the objects of a pickle may take so many times its bytes
OBJECT_BYTES = 256 << 20  # ... and these
NO_MEMORY = "can't allocate memory"  # torch's words
ZIP = b"PK\x03\x04"
ROWS = (torch.Tensor.crow_indices, torch.Tensor.col_indices, torch.Tensor.values)
COLUMNS = (torch.Tensor.ccol_indices, torch.Tensor.row_indices, torch.Tensor.values)
SPARSE_PARTS: dict[torch.layout, Sequence[Callable[[torch.Tensor], torch.Tensor]]] = {
    torch.sparse_coo: (torch.Tensor._indices, torch.Tensor._values),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ROWS),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), COLUMNS),
}


class Inflated(ValueError):
    """A file that asks for far more memory than it holds."""


def read_torch(path: Path) -> Any:
    """Return the content of a file of torch.save, on the CPU, without running code in it.

    Raises Inflated, OSError, and whatever torch raises for a damaged or forged file.
    """
    with open_bytes(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        with _memory(OBJECT_BYTES + OBJECT_TIMES * size):
            unpacked, pickled = _unpacked_bytes(stream, size)
        held = 0

        def counted(storage: Any, _: str) -> Any:
            nonlocal held
            held += storage.nbytes()
            _compare("storages", held, size, most=unpacked)
            return storage

        try:
            with _memory(unpacked + OBJECT_BYTES + OBJECT_TIMES * pickled):
                content = torch.load(stream, map_location=counted, weights_only=True)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and NO_MEMORY not in str(error):
                raise
            raise Inflated(f"asks for far more memory than its {_bytes(size)}") from error
    items, values = _extent(content, {})
    _compare("tensors", values, size, most=most_bytes(size))
    if items > MOST_TIMES * pickled + MOST_TENSORS:
        raise Inflated(f"names the same lists or dictionaries too often: {items:.1e} items in all")
    for tensor in tensors_in(content):
        _refuse_indices_outside(tensor)
    return content


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file. Raises Inflated, OSError, SafetensorError."""
    with open_bytes(path) as stream:
        header = stream.read(min(int.from_bytes(stream.read(8), "little"), LONGEST_HEADER))
    # A lower bound of neither is needed: what is counted in texts is small change.
    if header.count(b"{") > MOST_TENSORS or header.count(b",") > COMMAS_PER_TENSOR * MOST_TENSORS:
        raise Inflated(
            f"describes more than {MOST_TENSORS:,} tensors; save them in several files with an "
            "index, as transformers does"
        )
    del header
    # A name in another encoding than this system's is no text, which safetensors needs.
    is_undecodable = any("\udc80" <= character <= "\udcff" for character in str(path))
    return load(path.read_bytes()) if is_undecodable else load_file(path)


def most_bytes(size: int) -> int:
    """Return how many bytes the values of a file's tensors may take."""
    return MOST_TIMES * size + ROOM_BYTES


def _unpacked_bytes(stream: IO[bytes], size: int) -> tuple[int, int]:
    """Return how many bytes a file of torch.save unpacks to, and how many of them may be pickled.

    Raises Inflated for an archive that unpacks to far more: torch.save itself does not compress.
    """
    unpacked = pickled = size
    if stream.read(len(ZIP)) == ZIP:
        try:
            with zipfile.ZipFile(stream) as archive:
                entries = archive.infolist()
        except MemoryError as error:
            raise Inflated("is an archive with too many entries") from error
        unpacked = sum(entry.file_size for entry in entries)
        pickled = sum(entry.file_size for entry in entries if "/data/" not in entry.filename)
        _compare("entries, unpacked,", unpacked, size, most=most_bytes(size))
    stream.seek(0)
    return unpacked, pickled


def _compare(what: str, asked: int, size: int, most: int) -> None:
    if asked > most:
        raise Inflated(
            f"its {what} would take {_bytes(asked)}, and the file has {_bytes(size)}. If you trust "
            "it, save it again, with a copy of each tensor: torch.save({n: t.clone() for n, t in "
            "W.items()}, OTHER)"
        )


def _bytes(number: int) -> str:
    return f"{number / 1e9:,.1f} GB" if number >= 1e8 else f"{number:,} bytes"


def _extent(value: Any, seen: dict[int, tuple[int, int] | None]) -> tuple[int, int]:
    """Return the items of a structure and the bytes of its tensors, both as often as they occur.

    `seen`: of the structures that were met, by their id; None within one. Raises Inflated for a
    structure that contains itself.
    """
    if isinstance(value, torch.Tensor):
        return 1, sum(part.numel() * part.element_size() for part in _parts(value))
    children = items_of(value)
    if children is None:
        return 1, 0
    if id(value) not in seen:
        seen[id(value)] = None
        each = [_extent(item, seen) for item in children.values()]
        seen[id(value)] = 1 + sum(items for items, _ in each), sum(held for _, held in each)
    extent = seen[id(value)]
    if extent is None:
        raise Inflated("contains a list or dictionary that contains itself")
    return extent


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the dense tensors that one consists of."""
    if tensor.is_meta:
        return []
    return [part_of(tensor) for part_of in SPARSE_PARTS.get(tensor.layout, ())] or [tensor]


def _refuse_indices_outside(tensor: torch.Tensor) -> None:
    """Raise RuntimeError for a sparse tensor with indices that are none of it: torch reads and
    writes there.
    """
    if tensor.layout is not torch.strided and not tensor.is_meta:
        make: Callable[..., torch.Tensor] = torch.sparse_coo_tensor
        if tensor.layout is not torch.sparse_coo:
            make = partial(torch.sparse_compressed_tensor, layout=tensor.layout)
        make(*_parts(tensor), tensor.shape, check_invariants=True)


@contextmanager
def _memory(further_bytes: int) -> Iterator[None]:
    """Raise MemoryError within if this process needs more than these further bytes; Linux only."""
    try:
        import resource

        status = Path("/proc/self/status").read_text("utf-8")
    except (ImportError, OSError):
        yield
        return
    match = re.search(r"VmData:\s*(\d+) kB", status)
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    if match:
        limits.append((int(match[1]) << 10) + further_bytes)
    if limits:
        resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
