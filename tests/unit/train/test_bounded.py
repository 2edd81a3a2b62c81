"""Small files that mean a large state: refused within little time and memory, with a way out."""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file

from hvdtrain.errors import UsageError
from hvdtrain.train import checkpoint
from hvdtrain.train.bounded import MOST_TIMES, ROOM_BYTES, read_torch
from hvdtrain.train.checkpoint import (
    Checkpoints,
    DamagedCheckpoint,
    Snapshot,
    load_checkpoint,
    load_state,
    load_weights,
)
from hvdtrain.weights import read_weights
from hvdtrain.weights.export import export

MOST_MIB = 450
MOST_S = 10  # of a shared machine: the work itself takes below 2
GIB = 1 << 30


def refusal(read: Callable[[], Any]) -> str:
    """Return the text of the error that `read` raises, in a process of its own which must not grow
    by more than MOST_MIB nor take more than MOST_S of computing.
    """
    receiving, sending = os.pipe()
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() >> 20
    pid = os.fork()
    if pid == 0:
        try:
            torch.set_num_threads(1)  # those of the parent do not exist here
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CPU, (MOST_S, MOST_S))
            signal.alarm(10 * MOST_S)
            try:
                read()
                text = "not refused"
            except (UsageError, DamagedCheckpoint) as error:
                text = str(error)
            except BaseException as error:
                text = f"traceback of {error!r}"
            os.write(sending, text.encode())
        finally:
            os._exit(0)
    os.close(sending)
    with os.fdopen(receiving, "rb") as stream:
        text = stream.read().decode()
    _, status, used = os.wait4(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, "killed"
    assert (used.ru_maxrss >> 10) - before < MOST_MIB, text
    return text


def rezipped(path: Path, compression: int, **replaced: bytes) -> None:
    """Write an archive of torch.save again, with other entries."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in entries.items():
            archive.writestr(name, replaced.get(Path(name).name.partition(".")[0], content))


def packed(path: Path) -> None:
    torch.save({"w": torch.zeros(GIB // 8)}, path)
    rezipped(path, zipfile.ZIP_DEFLATED)


def stretched(path: Path, legacy: bool = False) -> None:
    values = {"w": torch.zeros(1).expand(2_000_000_000)}
    torch.save(values, path, _use_new_zipfile_serialization=not legacy)


def overlapping(path: Path) -> None:
    base = torch.zeros(1 << 20)
    torch.save({f"w{start}": base[start : start + (1 << 19)] for start in range(2000)}, path)


def tied_too_often(path: Path) -> None:
    base = torch.zeros(1 << 20)
    torch.save({f"w{number}": base for number in range(2000)}, path)


def claims_storage(path: Path) -> None:
    """A legacy file whose storage is longer than the file."""
    torch.save({"w": torch.zeros(5)}, path, _use_new_zipfile_serialization=False)
    length = b"K\x05"
    assert path.read_bytes().count(length) == 2
    path.write_bytes(path.read_bytes().replace(length, b"J\xff\xff\xff\x7f"))


def one_storage_by_many_names(path: Path) -> None:
    """Archives are searched without regard to case."""
    torch.save({"w": torch.zeros(1 << 22)}, path)
    with zipfile.ZipFile(path) as archive:
        content = archive.read("x/data.pkl")
    key = b"X\x01\x00\x00\x000"
    assert content.count(key) == 1
    start, end = content.index(b"X\x01\x00\x00\x00w"), content.index(b"s.")
    body = bytearray()
    for number in range(256):
        name = "".join(c.upper() if number >> n & 1 else c for n, c in enumerate("abcdefgh"))
        piece = content[start:end].replace(key, b"X\x08\x00\x00\x00" + name.encode())
        body += piece.replace(b"X\x01\x00\x00\x00w", b"X\x08\x00\x00\x00" + name.encode()) + b"s"
    forged = content[:start] + bytes(body) + b"."
    with zipfile.ZipFile(path) as archive:
        values = archive.read("x/data/0")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", forged)
        archive.writestr("x/data/abcdefgh", values)
        archive.writestr("x/version", "3\n")


def pickled(content: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        torch.save({"w": torch.zeros(2)}, path)
        rezipped(path, zipfile.ZIP_STORED, data=content)

    return write


def doubled(times: int) -> list[Any]:
    inner: list[Any] = [0]
    for _ in range(times):
        inner = [inner, inner]
    return inner


def containing_itself() -> list[Any]:
    inner: list[Any] = []
    inner.append(inner)
    return inner


BYTEARRAY = b"\x80\x02cbuiltins\nbytearray\nJ" + struct.pack("<i", 2**31 - 1) + b"\x85R."


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (packed, "its entries, unpacked, would take 0.5 GB"),
        (stretched, "its tensors would take 8.0 GB, and the file has"),
        (lambda path: stretched(path, legacy=True), "its tensors would take 8.0 GB"),
        (overlapping, "its tensors would take 4.2 GB"),
        (tied_too_often, "its tensors would take 8.4 GB"),
        (claims_storage, "asks for far more memory than its"),
        (one_storage_by_many_names, "its storages would take"),
        (pickled(BYTEARRAY), "asks for far more memory than its"),
    ],
    ids=lambda it: getattr(it, "__name__", "")[:20],
)
def test_small_files_of_much_memory(write, expected: str, tmp_path: Path) -> None:
    """Fails if such a file is unpacked, or its values are made, before its size is compared."""
    write(tmp_path / "x")
    out = tmp_path / "out.safetensors"
    text = refusal(lambda: export(tmp_path / "x", out))
    assert text.startswith(f"{tmp_path / 'x'}: ") and expected in text, text
    assert not out.exists()


def test_a_safetensors_file_of_very_many_tensors(tmp_path: Path) -> None:
    """Fails if a million tensors of no byte, or of a million dimensions, are made one by one."""
    empty = {f"t{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(10**6)}
    flat = {"t": {"dtype": "U8", "shape": [1] * 4 * 10**6, "data_offsets": [0, 1]}}
    for content in (empty, flat):
        header = json.dumps(content).encode()
        path = tmp_path / "x.safetensors"
        path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0")
        text = refusal(lambda path=path: read_weights(path))
        assert text.startswith(f"{path}: describes more than 100,000 tensors; save them in sev")


def test_what_legitimate_files_share_is_read(tmp_path: Path) -> None:
    """Fails if tied weights, or small expanded tensors, count as more than the file holds."""
    shared = torch.randn(1 << 23)
    tied = dict.fromkeys(("shared", "encoder", "decoder", "head"), shared)
    expanded = {"mask": torch.ones(1, 1).expand(1 << 10, 1 << 10), "w": torch.zeros(2)}
    for number, content in enumerate((tied, expanded)):
        for legacy in (False, True):
            path = tmp_path / f"{number}{legacy}.pt"
            torch.save(content, path, _use_new_zipfile_serialization=not legacy)
            found = read_weights(path)
            assert all(torch.equal(found[name], it) for name, it in content.items())
    assert MOST_TIMES >= 4 and ROOM_BYTES >= 1 << 22  # what SECURITY.md states


def forged(folder: Path, state: Any = None, weights: bytes | None = None, **manifest: Any) -> Path:
    """Return a checkpoint with other content, which its manifest describes."""
    checkpoints = Checkpoints(folder, keep=1)
    checkpoints.save(Snapshot(1, "", {"w": torch.zeros(2)}, {"step": 1}), is_best=False)
    checkpoints.wait()
    (path,) = checkpoints.complete()
    if state is not None:
        torch.save(state, path / "training_state.pt")
    if weights is not None:
        (path / "model.safetensors").write_bytes(weights)
    return described(path, **manifest)


def described(path: Path, **changed: Any) -> Path:
    content = json.loads((path / "manifest.json").read_text()) | changed
    del content["manifest_sha256"]
    for name in content["files"]:
        content["files"][name] = checkpoint._describe(path / name)
    content["manifest_sha256"] = checkpoint._digest_of(content)
    (path / "manifest.json").write_text(json.dumps(content))
    return path


def sparse(values: torch.Tensor, size: int = 4) -> torch.Tensor:
    indices = torch.zeros(1, 1, dtype=torch.int64).expand(1, len(values))
    return torch.sparse_coo_tensor(indices, values, (size,), check_invariants=False)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({"model": {"w": torch.zeros(1).expand(10**9)}}, "its tensors would take 4.0 GB"),
        ({"model": {"w": sparse(torch.zeros(1).expand(10**9))}}, "its tensors would take 12.0 GB"),
        (
            {
                "a": {
                    "hvdtrain.kind": "ndarray",
                    "value": torch.zeros(1, dtype=torch.uint8).expand(10**9),
                }
            },
            "its tensors would take 1.0 GB",
        ),
        ({"progress": doubled(50)}, "the same lists or dictionaries too often"),
        ({"progress": containing_itself()}, "contains itself"),
        (
            {
                "w": torch.sparse_coo_tensor(
                    torch.tensor([[10**9]]), torch.ones(1), (4,), check_invariants=False
                )
            },
            "cannot be read",
        ),
    ],
    ids=["stretched", "sparse", "array", "doubled", "itself", "outside"],
)
def test_forged_states_of_much_memory(state: Any, expected: str, tmp_path: Path) -> None:
    """Fails if the state of a forged checkpoint is made before it is compared with its file, or a
    sparse tensor has elements outside it.
    """
    path = forged(tmp_path, state)
    text = refusal(lambda: load_state(path))
    assert text.startswith(str(path)) and expected in text, text
    assert expected in refusal(lambda: load_checkpoint(path))


def test_a_forged_form_makes_no_large_sparse_tensor(tmp_path: Path) -> None:
    """Fails if a dense tensor of many dimensions, each of which costs 8 bytes an element in sparse
    form, is taken for a sparse one.
    """
    values = torch.ones([1] * 62 + [1 << 22], dtype=torch.int8)
    path = forged(tmp_path, None, save({"w": values}), forms={"w": "sparse"})
    text = refusal(lambda: load_weights(path))
    assert "its sparse tensors would take far more memory" in text
    few = forged(tmp_path / "few", None, save({"w": torch.eye(3)}), forms={"w": "sparse"})
    assert torch.equal(load_weights(few)[0]["w"].to_dense(), torch.eye(3))


def test_pipes_and_devices_are_not_read(tmp_path: Path) -> None:
    """Fails if a pipe, or a link to a device without an end, blocks or fills the memory, also as
    one part of a checkpoint or of an index; or if a link to a file is refused.
    """
    os.mkfifo(tmp_path / "pipe.pt")
    (tmp_path / "zero.safetensors").symlink_to("/dev/zero")
    for path in (tmp_path / "pipe.pt", tmp_path / "zero.safetensors", Path("/dev/zero")):
        assert refusal(lambda path=path: read_weights(path)) == f"{path}: is not a regular file"
    index = tmp_path / "model.safetensors.index.json"
    for name in ("pipe.pt", "zero.safetensors"):
        index.write_text(json.dumps({"weight_map": {"w": name}}))
        assert f"{name} is not a regular file" in refusal(lambda: read_weights(index))
    for number, name in enumerate(("model.safetensors", "training_state.pt", "manifest.json")):
        for make in (os.mkfifo, lambda it: it.symlink_to("/dev/zero")):
            path = forged(tmp_path / f"{number}{getattr(make, '__name__', '')}")
            (path / name).unlink()
            make(path / name)
            assert name in refusal(lambda path=path: load_state(path))
    save_file({"w": torch.ones(2)}, tmp_path / "blob")
    (tmp_path / "link.safetensors").symlink_to(tmp_path / "blob")
    assert read_weights(tmp_path / "link.safetensors")["w"].tolist() == [1, 1]


def test_the_limit_ends_with_the_reading(tmp_path: Path) -> None:
    """Fails if the process keeps a limit of memory after a file is read, or is refused."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    torch.save({"w": torch.zeros(2)}, tmp_path / "x")
    read_torch(tmp_path / "x")
    pickled(BYTEARRAY)(tmp_path / "x")
    with pytest.raises(ValueError, match="asks for far more memory"):
        read_torch(tmp_path / "x")
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
