"""Samples that are read one by one, ahead of their step by processes of torch's DataLoader.

The processes are forked by a fork server, as forking a process with a running Horovod is unsafe.
"""

import hashlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import forkserver, resource_tracker
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, default_collate, default_convert

from hvdtrain import cgroups
from hvdtrain.data.feeding import Loaded
from hvdtrain.data.sampler import Indices
from hvdtrain.data.splits import texts_of
from hvdtrain.errors import TrainingError, UsageError
from hvdtrain.interpreter import started_elsewhere
from hvdtrain.log import complain
from hvdtrain.pulse import STOP_SIGNALS
from hvdtrain.tensors import bytes_of

# Of the tracker, which removes the semaphores of a run that was killed: they are no mistake.
QUIET = "ignore::UserWarning:multiprocessing.resource_tracker"
Key = tuple[int, int]  # sample, epoch
BeginReader = Callable[[int], object]  # called with the number of a reader process


class BadSample(TrainingError):
    """A sample that cannot be read; the message names the file."""


class Batched(Protocol):
    """Samples that are read as batches. The object is sent to the reader processes."""

    def __len__(self) -> int: ...

    def load(self, keys: list[Key]) -> Loaded:
        """Return these samples as a batch. Raises BadSample."""


class Samples(Protocol):
    """Samples that are read one by one. The object is sent to the reader processes.

    It may also offer `finish(batch)`, which completes a batch in the training process, on the
    device where it is used.
    """

    def __len__(self) -> int: ...

    def read(self, index: int, epoch: int) -> Any:
        """Return one sample. Raises BadSample."""

    def empty_batch(self) -> Any:
        """Return a batch without samples, for one of which all were skipped."""


class StreamedSplit:
    """A split that reads samples ahead."""

    def __init__(
        self,
        samples: Samples | Batched,
        readers: int,
        may_skip: bool = False,
        stay: bool = True,
        advice: str = "",
        begin_reader: BeginReader | None = None,
        imports: Sequence[str] = (),
    ) -> None:
        """`readers`: the number of processes; 0: read in this one. `may_skip`: skip samples that
        cannot be read; `advice`: what the error adds otherwise. `stay`: keep the processes for the
        next epoch. `begin_reader`: called first in each process. `imports`: names of modules that
        reading needs, and that the processes find imported.
        """
        self.may_skip = may_skip
        self._samples = samples
        self._finish = getattr(samples, "finish", None)
        self._reader = _Reader(samples, may_skip, advice)
        self._readers = readers
        self._stay = stay
        self._begin_reader = begin_reader
        # Of the readers' seeds. A loader that draws from torch's generator each time that it starts
        # would change the random numbers of a run that is resumed within an epoch.
        self._generator = torch.Generator()
        self._batches = _Batches()
        self._loader: DataLoader[Loaded] | None = None
        self._memory_kills = cgroups.memory_kills()
        if readers and multiprocessing.parent_process() is None:  # a reader may import the script
            _start_fork_server(imports)

    def __len__(self) -> int:
        return len(self._samples)

    def fingerprint(self) -> Iterable[str] | None:
        return texts_of(self._samples)

    def batch(self, indices: Indices, epoch: int = 0) -> Any:
        batch = self._reader.load([(int(index), epoch) for index in indices]).batch
        return batch if self._finish is None else self._finish(batch)

    def stream(self, batches: Iterable[Indices], epoch: int) -> Iterator[Loaded]:
        self._batches.keys = ([(int(i), epoch) for i in indices] for indices in batches)
        if self._loader is None:
            self._loader = self._make_loader()
        self._generator.manual_seed((torch.initial_seed() + epoch) % 2**63)
        try:
            for loaded in self._loader:
                if isinstance(loaded, str):
                    raise TrainingError(loaded)
                yield replace(loaded, finish=self._finish)
        except (RuntimeError, EOFError, ConnectionError) as error:
            # A reader that ends while it sends a batch breaks the connection.
            sending = self._readers > 0 and not isinstance(error, RuntimeError)
            if "DataLoader worker" not in str(error) and not sending:
                raise
            reason = str(error) or "the connection broke while it sent a batch"
            if killed := cgroups.memory_kills() - self._memory_kills:
                reason += f"; {cgroups.explain_kills(killed, cgroups.limits()['memory'])}"
            elif full := cgroups.explain_full():
                reason += f"; {full}"
            raise TrainingError(f"a process that reads data ahead has ended: {reason}") from error

    def _make_loader(self) -> DataLoader[Loaded]:
        return DataLoader(
            self._reader,
            batch_sampler=self._batches,
            num_workers=self._readers,
            generator=self._generator,
            collate_fn=default_convert,  # leaves `Loaded` and text as they are
            multiprocessing_context=_context() if self._readers else None,
            persistent_workers=self._stay and self._readers > 0,
            worker_init_fn=partial(_begin, self._begin_reader) if self._readers else None,
        )


def _context() -> Any:
    from hvdtrain.data.reader_process import ReaderContext  # not on Windows, without readers

    return ReaderContext()


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

    samples: Any  # Samples or Batched
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
        if not hasattr(self.samples, "read"):
            return self.samples.load(keys)  # type: ignore[no-any-return]
        read = []
        for index, epoch in keys:
            try:
                read.append(self.samples.read(index, epoch))
            except BadSample as error:
                if not self.may_skip:
                    raise BadSample(f"{error}. {self.advice}" if self.advice else error) from None
                if epoch == 0:
                    complain(f"skipped: {error}")
        batch = default_collate(read) if read else self.samples.empty_batch()
        return Loaded(batch, len(read), bad=len(keys) - len(read))


def _begin(begin_reader: BeginReader | None, number: int) -> None:
    """Prepare a reader process."""
    _outlive_stops()
    _end_with_parent()
    info: Any = torch.utils.data.get_worker_info()
    # The user's own, as code that asks for it expects; the class lets no attribute be set.
    object.__setattr__(info, "dataset", getattr(info.dataset.samples, "dataset", info.dataset))
    if begin_reader:
        begin_reader(number)


def _outlive_stops() -> None:
    """Let the signals that stop a run have no effect on this reader: they often reach all processes
    of a job, by timeout(1), systemd or Slurm, and the run still needs samples until it is saved.

    The handler replaces the one that torch gives to SIGTERM. It is a function, since programs that
    a data set runs would inherit that a signal is ignored or blocked.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: None)
        signal.siginterrupt(number, False)  # native code may not expect interrupted system calls
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _end_with_parent() -> None:
    """Make a reader process end when the training process ends, for whatever reason. torch watches
    only the reader's parent, the fork server, which lives as long as its children.
    """
    trainer = multiprocessing.parent_process()
    assert trainer is not None

    def wait() -> None:
        trainer.join()
        os._exit(1)

    threading.Thread(target=wait, name="end-with-parent", daemon=True).start()


def _start_tracker() -> None:
    """Start the tracker of semaphores, once per process."""
    sys.warnoptions.append(QUIET)  # these become options of the tracker
    try:
        resource_tracker.ensure_running()
    finally:
        sys.warnoptions.remove(QUIET)


def _start_fork_server(imports: Sequence[str]) -> None:
    """Start the fork server, once per process, which imports what readers need while the run is
    prepared. The signals that stop a run are blocked in it: they are for the worker. Its readers
    inherit that, until `_begin`.
    """
    forkserver.set_forkserver_preload(["torch", "hvdtrain.data.reading", *imports])
    with started_elsewhere():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            _start_tracker()  # unblocks some of them: start it first
            signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def digest_of(*parts: Any) -> str:
    """Return a digest of what reader processes would receive of these objects.

    Raises UsageError for what cannot be sent to processes that are not forked.
    """
    digest = hashlib.blake2b()
    for part in parts:
        try:
            _Digester(digest).dump(part)
        except Exception as error:  # classes define how they are pickled
            raise UsageError(
                f"hvdtrain.MapSplit: reader processes cannot receive the data set or its functions "
                f"({type(error).__name__}: {error}). Define them at the top of a module, or read "
                "without processes (readers=0, num_workers=0)"
            ) from error
    return digest.hexdigest()


class _Digester(pickle.Pickler):
    """A pickler whose output only goes into a digest; large arrays are not copied."""

    def __init__(self, digest: Any) -> None:
        super().__init__(
            SimpleNamespace(write=digest.update),
            protocol=5,
            buffer_callback=lambda buffer: digest.update(buffer.raw()),
        )
        self._digest = digest

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor or obj.layout is not torch.strided or obj.is_quantized:
            return NotImplemented
        self._digest.update(bytes_of(obj).data)
        return str, (f"{obj.dtype} {list(obj.shape)}",)
