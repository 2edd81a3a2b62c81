"""The batches of one rank, step by step, read ahead by processes, or from a host's own samples.

The samples of every step of a rank are determined up to the end of the epoch, and computed as far
ahead as they are read: by a split that reads from disks, with reader processes (of torch's
DataLoader). They are forked by a fork server, as forking a process with a running Horovod is
unsafe.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing import forkserver
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import DataLoader, default_collate, default_convert

from hvdtrain.data.sampler import GlobalBatchSampler, Indices, SharesLike
from hvdtrain.data.splits import Split, texts_of
from hvdtrain.errors import TrainingError
from hvdtrain.ring import split_evenly

Key = tuple[int, int]  # sample, epoch
Parts = dict[tuple[int, int], Indices]  # of a global batch, by share and micro-batch


@dataclass(frozen=True)
class Loaded:
    """A batch of `samples` samples; `bad` further ones could not be read."""

    batch: Any
    samples: int
    bad: int = 0


@runtime_checkable
class StreamingSplit(Protocol):
    """A split that reads ahead."""

    may_skip: bool  # whether unreadable samples are skipped

    def stream(self, batches: Iterable[Indices], epoch: int) -> Iterator[Loaded]:
        """Yield the batches of these samples, in this order. `batches` may be as long as an epoch:
        take no more of them than are read ahead.
        """


@dataclass(frozen=True)
class StepData:
    """The data of one step on one rank."""

    indices: Indices  # of the samples of the global batch, over all ranks
    passes: Sequence[tuple[int, int]]  # for each of this rank's batches: its share, and its number
    batches: Iterator[Loaded]  # each share's part of each micro-batch

    @property
    def samples(self) -> int:
        """Return the number of samples in the global batch."""
        return len(self.indices)


def stream(split: Split, batches: Iterable[Indices], epoch: int) -> Iterator[Loaded]:
    """Yield the batches of these samples, in this order; read ahead if the split supports it."""
    if isinstance(split, StreamingSplit):
        yield from split.stream(batches, epoch)
        return
    for indices in batches:
        yield Loaded(split.batch(indices, epoch), len(indices))


def may_skip(split: Split) -> bool:
    """Return whether a batch of this split may have fewer samples than requested."""
    return isinstance(split, StreamingSplit) and split.may_skip


@dataclass(frozen=True)
class Feed:
    """The distribution of a split's samples over steps, ranks and micro-batches."""

    split: Split
    sampler: GlobalBatchSampler
    shares: SharesLike
    micro_batches: int
    everyone: bool  # every rank takes part in each micro-batch, even without samples

    def epoch(self, cursor: int, steps: int, rank: int) -> Iterator[StepData]:
        """Yield up to `steps` steps from `cursor` samples into the run, within that epoch."""
        steps_ahead: deque[tuple[Indices, Parts]] = deque()  # read from, and not yielded yet
        wanted: deque[Indices] = deque()  # yielded, and not read yet
        batches = itertools.islice(self.sampler.global_batches(cursor), steps)
        planned = ((batch, self._parts(batch, rank)) for batch in batches)

        def to_read() -> Iterator[Indices]:
            while True:
                while wanted:
                    yield wanted.popleft()
                if (ahead := next(planned, None)) is None:
                    return
                steps_ahead.append(ahead)
                wanted.extend(ahead[1].values())

        loaded = stream(self.split, to_read(), cursor // self.sampler.samples)
        while True:
            if steps_ahead:
                batch, own = steps_ahead.popleft()
            elif (now := next(planned, None)) is not None:
                batch, own = now
                wanted.extend(own.values())
            else:
                return
            yield StepData(batch, list(own), itertools.islice(loaded, len(own)))

    def step(self, indices: Indices, rank: int, epoch: int = 0) -> StepData:
        """Return the step of `rank` on the global batch `indices`."""
        parts = self._parts(indices, rank)
        return StepData(indices, list(parts), stream(self.split, parts.values(), epoch))

    def _parts(self, batch: Indices, rank: int) -> Parts:
        """Return the parts of the rank's shares, by share and micro-batch. Micro-batches
        are cut from the global batch first, so they are the same for every N.
        """
        cuts = [batch[part] for part in split_evenly(len(batch), self.micro_batches)]
        return {
            (share, number): part
            for share in self.shares.of_rank(rank)
            for number, cut in enumerate(cuts)
            if len(part := self.shares.of(cut, share)) or (self.everyone and len(cut))
        }


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the same structure with its tensors on `device`."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(item, device) for key, item in batch.items()}
    if isinstance(batch, list | tuple):
        moved = [to_device(item, device) for item in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    return batch


class PartSplit:
    """A split of which only samples start .. start + len(part) - 1 can be read, those of `part`."""

    def __init__(self, part: Split, start: int, samples: int) -> None:
        self._part = part
        self._start = start
        self._samples = samples
        self.may_skip = may_skip(part)

    def __len__(self) -> int:
        return self._samples

    def batch(self, indices: Indices, epoch: int = 0) -> Any:
        return self._part.batch(self._own(indices), epoch)

    def stream(self, batches: Iterable[Indices], epoch: int) -> Iterator[Loaded]:
        return stream(self._part, map(self._own, batches), epoch)

    def _own(self, indices: Indices) -> Indices:
        own = indices - self._start
        if len(own) and not 0 <= own.min() <= own.max() < len(self._part):
            raise IndexError(f"samples {own.min()} to {own.max()} of a part of {len(self._part)}")
        return own


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
        cannot be read; `advice`: what the error adds otherwise. `stay`: keep the processes for the
        next epoch.
        """
        self.may_skip = may_skip
        self._samples = samples
        self._reader = _Reader(samples, may_skip, advice)
        self._readers = readers
        self._stay = stay
        # Of the readers' seeds. A loader that draws from torch's generator each time that it starts
        # would change the random numbers of a run that is resumed within an epoch.
        self._generator = torch.Generator()
        self._batches = _Batches()
        self._loader: DataLoader[Loaded] | None = None

    def __len__(self) -> int:
        return len(self._samples)

    def fingerprint(self) -> Iterable[str] | None:
        return texts_of(self._samples)

    def batch(self, indices: Indices, epoch: int = 0) -> Any:
        loaded = self._reader.load([(int(index), epoch) for index in indices])
        return self._samples.finish(loaded.batch)

    def stream(self, batches: Iterable[Indices], epoch: int) -> Iterator[Loaded]:
        self._batches.keys = ([(int(i), epoch) for i in indices] for indices in batches)
        if self._loader is None:
            self._loader = self._make_loader()
        self._generator.manual_seed((torch.initial_seed() + epoch) % 2**63)
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
            batch_sampler=self._batches,
            num_workers=self._readers,
            generator=self._generator,
            collate_fn=default_convert,  # leaves `Loaded` and text as they are
            multiprocessing_context="forkserver" if self._readers else None,
            persistent_workers=self._stay and self._readers > 0,
            worker_init_fn=_end_with_parent if self._readers else None,
        )


class _Batches:
    """The batches of the epoch to read next. A loader whose processes stay keeps this object."""

    def __init__(self) -> None:
        self.keys: Iterator[list[Key]] = iter(())

    def __iter__(self) -> Iterator[list[Key]]:
        # A loader calls this twice before it takes the first.
        return self.keys


@dataclass(eq=False)
class _Reader(torch.utils.data.Dataset[Any]):
    """A map-style data set that reads a batch at a time, in any process."""

    samples: Samples
    may_skip: bool
    advice: str

    def __getitems__(self, keys: list[Key]) -> Loaded | str:
        # Returned, not raised: the loader would wrap the error in its own traceback.
        try:
            return self.load(keys)
        except BadSample as error:
            return str(error)

    def load(self, keys: list[Key]) -> Loaded:
        """Return these samples as a batch. Raises BadSample, unless samples may be skipped."""
        read = []
        for index, epoch in keys:
            try:
                read.append(self.samples.read(index, epoch))
            except BadSample as error:
                if not self.may_skip:
                    raise BadSample(f"{error}. {self.advice}" if self.advice else error) from None
                if epoch == 0:
                    print(f"skipped: {error}", file=sys.stderr, flush=True)
        batch = default_collate(read) if read else self.samples.empty()
        return Loaded(batch, len(read), bad=len(keys) - len(read))


def _end_with_parent(number: int) -> None:
    """Make a reader process end when the training process ends, for whatever reason. torch watches
    only the reader's parent, the fork server, which lives as long as its children.
    """
    trainer = multiprocessing.parent_process()
    assert trainer is not None

    def wait() -> None:
        trainer.join()
        os._exit(1)

    threading.Thread(target=wait, name="end-with-parent", daemon=True).start()


def _start_fork_server() -> None:
    """Start the fork server, once per process, with the signals that stop a run ignored. These
    signals are for the worker; its readers inherit that they are ignored.
    """
    forkserver.set_forkserver_preload(["torch", "hvdtrain.data.feeding"])
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
