"""Steps that save, for `hvdtrain bench checkpoint`: on disk, and in memory as on two hosts."""

import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from hvdtrain.exchange import Exchange
from hvdtrain.records.memory_copy import MemoryCopy
from hvdtrain.run.memory import RunMemory
from hvdtrain.train.checkpoint import Checkpoints
from hvdtrain.train.job import Job
from hvdtrain.train.metering import Meter
from hvdtrain.train.progress import State
from hvdtrain.train.state import capture

BACKGROUND, WAITED = "in the background", "waited for"
IN_MEMORY = "in memory at every step"
SHARED_MEMORY = Path("/dev/shm")  # of Linux


@contextmanager
def saving_steps(
    job: Job, step: Callable[[], None], exchange: Exchange, steps: int, folder: Path
) -> Iterator[Mapping[str, Callable[[], None]]]:
    """Yield a step, a collective, for each way to save: on disk in the middle of `steps`, in memory
    at every step, on ranks 0 and 1 as on two hosts.
    """
    checkpoints = Checkpoints(folder, keep=2)
    with tempfile.TemporaryDirectory(prefix="hvdtrain-bench-", dir=SHARED_MEMORY) as root:
        copy = MemoryCopy(Path(root, "run"), "", {}) if exchange.rank < 2 else None
        memory = RunMemory(exchange, folder, copy)

        def save(state: State, waits: bool) -> None:
            snapshot = capture(job, state, exchange, {})
            if snapshot is not None:
                checkpoints.save(snapshot, is_best=False)
            if waits:
                checkpoints.wait()

        def save_in_memory(state: State) -> None:
            progress = memory.share({"trace": None})
            memory.save(capture(job, state, exchange, progress, memory.is_partner), on_disk=False)

        def saves(save_state: Callable[[State], None], every: int) -> Callable[[], None]:
            numbers, meter = itertools.count(1), Meter(exchange, job.sampler.samples)

            def step_and_save() -> None:
                step()
                number = next(numbers)
                if number % every == every // 2:
                    save_state(State(meter, number, number))

            return step_and_save

        yield {
            BACKGROUND: saves(lambda state: save(state, False), steps),
            WAITED: saves(lambda state: save(state, True), steps),
            IN_MEMORY: saves(save_in_memory, 1),
        }
        checkpoints.wait()
        memory.remove()
