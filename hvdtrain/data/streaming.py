"""Samples read one by one, ahead of time, by reader processes (torch's DataLoader).

The processes are forked by a fork server, as forking a process with a running Horovod is unsafe.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing import forkserver
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Sampler, default_collate

from hvdtrain.data.feeding import Loaded
from hvdtrain.data.fingerprint import texts_of
from hvdtrain.data.sampler import Indices
from hvdtrain.errors import TrainingError

Key = tuple[int, int]  # sample, epoch


class BadSample(TrainingError):
    """A sample that cannot be read; the message names the file."""


class Samples(Protocol):
    """Samples that are read one by one. The object is sent to the reader processes."""

    def __len__(self) -> int: ...

    def read(self, index: int, epoch: int) -> Any:
        """Return one sample. Raises BadSample."""

    def empty(self) -> Any:
        """Return a batch of no samples."""

    def finish(self, batch: Any) -> Any:
        """Complete a batch in the training process, so that readers send compact batches."""


class StreamedSplit:
    """A split that reads `Samples` ahead."""

    def __init__(
        self, samples: Samples, readers: int, may_skip: bool, stay: bool, advice: str = ""
    ) -> None:
        """`readers`: the number of processes; 0: read in this one. `may_skip`: skip samples that
        cannot be read. `stay`: keep the processes for the next epoch. `advice`: added to the error
        about a sample that cannot be read, if it may not be skipped.
        """
        self.may_skip = may_skip
        self._samples = samples
        self._reader = _Reader(samples, may_skip, advice)
        self._length = len(samples)
        self._readers = readers
        self._stay = stay
        self._order = _Order()
        self._loader: DataLoader[Loaded] | None = None

    def __len__(self) -> int:
        return self._length

    def fingerprint(self) -> list[str] | None:
        """Return the fingerprint of the samples, if they have one."""
        return texts_of(self._samples)

    def batch(self, indices: Indices, epoch: int = 0) -> Any:
        loaded = self._reader.load([(int(index), epoch) for index in indices])
        return self._samples.finish(loaded.batch)

    def stream(self, batches: Sequence[Indices], epoch: int) -> Iterator[Loaded]:
        self._order.batches = [[(int(i), epoch) for i in indices] for indices in batches]
        if self._loader is None:
            self._loader = self._make_loader()
        try:
            for loaded in self._loader:
                if isinstance(loaded, str):
                    raise TrainingError(loaded)
                yield replace(loaded, batch=self._samples.finish(loaded.batch))
        except (RuntimeError, EOFError, ConnectionError) as error:
            # A reader that ends while it sends a batch breaks the connection.
            sending = self._readers > 0 and not isinstance(error, RuntimeError)
            if "DataLoader worker" not in str(error) and not sending:
                raise
            reason = str(error) or "the connection broke while it sent a batch"
            raise TrainingError(f"a process that reads data ahead has ended: {reason}") from error

    def _make_loader(self) -> DataLoader[Loaded]:
        if self._readers:
            _start_fork_server()
        return DataLoader(
            self._reader,
            batch_sampler=self._order,
            num_workers=self._readers,
            collate_fn=_as_it_is,
            multiprocessing_context="forkserver" if self._readers else None,
            persistent_workers=self._stay and self._readers > 0,
            worker_init_fn=_end_with_parent if self._readers else None,
        )


class _Order(Sampler[list[Key]]):
    """The batches of the next epoch, for the loader."""

    def __init__(self) -> None:
        self.batches: list[list[Key]] = []

    def __iter__(self) -> Iterator[list[Key]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class _Reader(torch.utils.data.Dataset[Any]):
    """A map-style data set that reads a batch at a time, in any process."""

    def __init__(self, samples: Samples, may_skip: bool, advice: str) -> None:
        self._samples = samples
        self._may_skip = may_skip
        self._advice = advice

    def __getitems__(self, keys: list[Key]) -> Loaded | str:
        # Returned, not raised: the loader would wrap the error in its own traceback.
        try:
            return self.load(keys)
        except BadSample as error:
            return str(error)

    def load(self, keys: list[Key]) -> Loaded:
        """Return these samples as a batch. Raises BadSample, unless samples may be skipped."""
        read, bad = [], 0
        for index, epoch in keys:
            try:
                read.append(self._samples.read(index, epoch))
            except BadSample as error:
                if not self._may_skip:
                    raise BadSample(f"{error}. {self._advice}" if self._advice else error) from None
                bad += 1
                if epoch == 0:
                    print(f"skipped: {error}", file=sys.stderr, flush=True)
        batch = default_collate(read) if read else self._samples.empty()
        return Loaded(batch, len(read), bad)


def _end_with_parent(number: int) -> None:
    """Make a reader process end when the training process ends, for whatever reason.

    torch watches only the reader's parent, the fork server, which lives as long as its children.
    """
    trainer = multiprocessing.parent_process()
    assert trainer is not None

    def wait() -> None:
        trainer.join()
        os._exit(1)

    threading.Thread(target=wait, name="end-with-parent", daemon=True).start()


def _as_it_is(loaded: Any) -> Any:
    return loaded


def _start_fork_server() -> None:
    """Start the fork server, once per process, with the signals that stop a run ignored.

    These signals are for the worker; its readers inherit that they are ignored.
    """
    forkserver.set_forkserver_preload(["torch", "hvdtrain.data.streaming"])
    stopping = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    try:
        before = {number: signal.signal(number, signal.SIG_IGN) for number in stopping}
    except ValueError:  # only the main thread may change handlers
        before = {}
    try:
        forkserver.ensure_running()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
