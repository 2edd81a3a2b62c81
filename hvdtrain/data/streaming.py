"""Samples that are read one by one, ahead of time, by processes of their own (torch's DataLoader).

They come from a fork server, since forking a process with a running Horovod is not safe.
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

Key = tuple[int, int]  # a sample's number, and the epoch


class BadSample(TrainingError):
    """A sample that cannot be read; its text names the file."""


class Samples(Protocol):
    """What can be read one by one. It is sent to the reading processes."""

    def __len__(self) -> int: ...

    def read(self, index: int, epoch: int) -> Any:
        """One sample. Raises BadSample."""

    def empty(self) -> Any:
        """A batch of no samples."""

    def finish(self, batch: Any) -> Any:
        """What the training process itself does with a batch: what is sent to it stays small."""


class StreamedSplit:
    """A split of such samples."""

    def __init__(
        self, samples: Samples, readers: int, may_skip: bool, stay: bool, advice: str = ""
    ) -> None:
        """`readers`: processes; 0: this one. `may_skip`: leave out samples that cannot be read.
        `stay`: whether the processes wait for the next epoch. `advice`: what to do about a sample
        that cannot be read, where none may be left out.
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
        """Return the samples' own, where they offer it."""
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
            # It may end while it hands over a batch: the connection to it breaks off then.
            handing_over = self._readers > 0 and not isinstance(error, RuntimeError)
            if "DataLoader worker" not in str(error) and not handing_over:
                raise
            reason = str(error) or "it broke off while it handed over a batch"
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
    """The batches of the epoch that is to come; the loader asks anew at each."""

    def __init__(self) -> None:
        self.batches: list[list[Key]] = []

    def __iter__(self) -> Iterator[list[Key]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class _Reader(torch.utils.data.Dataset[Any]):
    """Reads a batch at a time, in whichever process it is."""

    def __init__(self, samples: Samples, may_skip: bool, advice: str) -> None:
        self._samples = samples
        self._may_skip = may_skip
        self._advice = advice

    def __getitems__(self, keys: list[Key]) -> Loaded | str:
        # Told rather than raised: the loader would wrap it in its own traceback.
        try:
            return self.load(keys)
        except BadSample as error:
            return str(error)

    def load(self, keys: list[Key]) -> Loaded:
        """These samples together. Raises BadSample, unless they may be skipped."""
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
    """A reading process ends when the training process is gone, however that went. torch looks at
    its own parent only, and that is the fork server, which lives as long as its children do.
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
    """Once a process. The signals that ask a run to stop are for the worker, not for its readers:
    what they are to ignore, they inherit.
    """
    forkserver.set_forkserver_preload(["torch", "hvdtrain.data.streaming"])
    stopping = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    try:
        before = {number: signal.signal(number, signal.SIG_IGN) for number in stopping}
    except ValueError:  # not the main thread: it may not change them
        before = {}
    try:
        forkserver.ensure_running()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
