"""The runs of `hvdtrain verify-n`, one for each N, and what is printed and written about them."""

import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hvdtrain.config import TrainConfig
from hvdtrain.errors import EXIT_MISMATCH, EXIT_OK, TrainingError, UsageError
from hvdtrain.evidence.trials import Training, Trial, scratch_folder
from hvdtrain.evidence.verify_n.causes import Cause, likely_causes
from hvdtrain.evidence.verify_n.parting import (
    AGREEMENT,
    PARTS,
    Gap,
    Pair,
    Parting,
    checkpoint_options,
    gap_above,
    largest_gap,
    newest,
    read_saved,
)
from hvdtrain.files import write_json
from hvdtrain.log import counted, say

IN_A_SCRIPT = (
    "Causes are looked for in the tasks of `train` alone. In a script the usual ones are: a mean "
    "loss given for a sum, dropout or batch norm without virtual_workers, numbers drawn outside of "
    "the passes, and a model in float32"
)
# Of a loss: more than a mean over other numbers of samples, dropout or batch norm explains.
UNSPLIT_DIFFERENCE = 0.3
UNSPLIT_ROUNDING = 1e-5
# What the runs need to be comparable to rounding errors of float64.
IN_FLOAT64 = ("--dtype=float64", "--amp=none", "--compression=none")


@dataclass(frozen=True)
class TrialResult:
    """A finished run on N workers, and its largest relative difference from the reference."""

    workers: int
    params_sha256: str
    gap: Gap | None  # None: this is the reference
    same: bool

    def line(self) -> str:
        """Return the line that is printed."""
        text, gap = f"N={self.workers:<3} {self.params_sha256}", self.gap
        if gap is None:
            return f"{text}  the reference"
        if not gap.relative:
            return f"{text}  no difference" + (" but in bits" if not self.same else "")
        return f"{text}  largest relative difference {gap.relative:.1e}, {gap.tensor}"


@dataclass(frozen=True)
class Explanation:
    """Where and why two runs part."""

    workers: tuple[int, int]  # of the reference, and of the other
    parting: Parting
    causes: Sequence[Cause]
    note: str | None  # why none were found

    def lines(self) -> list[str]:
        """Return the lines that are printed."""
        (one, other), parting = self.workers, self.parting
        lines = [
            f"first difference: step {parting.step}, {parting.gap.described()} "
            f"on N={one} and N={other} (relative difference {parting.gap.relative:.1e})"
        ]
        if parting.step > parting.last_equal + 1:
            lines.append(
                f"Equal after step {parting.last_equal}; in between it did not repeat when both "
                "runs were made again"
            )
        lines += [
            line
            for cause in self.causes
            for line in (f"likely cause: {cause.text}", f"what to do: {cause.advice}")
        ]
        return [*lines, self.note] if self.note else lines


@dataclass(frozen=True)
class Unsplit:
    """The loss of the first step, of the whole batch at once and of the shares of it.

    What is wrong in the same way on every N shows here.
    """

    shares: int
    whole_loss: float
    loss: float

    @property
    def relative(self) -> float:
        return abs(self.loss - self.whole_loss) / max(abs(self.whole_loss), abs(self.loss), 1e-300)

    @property
    def same(self) -> bool:
        """Return whether the loss may be the same; dropout and batch norm make a difference."""
        return self.relative < UNSPLIT_DIFFERENCE

    def line(self) -> str:
        """Return the line that is printed."""
        whole, split = f"{self.whole_loss:.6g}", f"{self.loss:.6g}"
        text = f"one unsplit batch: loss {whole}, in {self.shares} shares {split}"
        noise = ", as dropout or batch norm makes it" if self.relative > UNSPLIT_ROUNDING else ""
        if self.same:
            return text + noise
        ratio = self.loss / self.whole_loss if self.whole_loss else math.inf
        cause = "a loss of a batch that is not the sum over its samples"
        if math.isclose(ratio, self.shares, rel_tol=UNSPLIT_DIFFERENCE):
            cause = "a mean loss given for a sum, which trains at a smaller rate"
        return f"{text}: wrong in the same way on every N. Likely cause: {cause}"


def unfit_for_every_n(config: TrainConfig, counts: tuple[int, ...]) -> list[str]:
    """Return the problems of a configuration that is another experiment for each N."""
    batch, virtual = config.batch, config.batch.virtual_workers
    problems = {
        f"--batch-size={batch.batch_size}: is per worker, so each N is another experiment; give "
        "--global-batch-size": batch.batch_size is not None,
        f"--rank-weights={batch.rank_weights}: holds for one N only; leave it out": (
            batch.rank_weights not in (None, "auto")
        ),
        f"--micro-batch={batch.micro_batch}: may choose other passes for each N; give "
        "--grad-accum-steps": batch.micro_batch is not None and virtual is None,
    }
    for workers in counts:
        text = f"-np: {counted(workers, 'worker')} for --virtual-workers={virtual}: give at most"
        problems[f"{text} {virtual}"] = virtual is not None and workers > virtual
    return [problem for problem, applies in problems.items() if applies]


def verify_n(
    training: Training, config: TrainConfig | None, counts: tuple[int, ...], json: str | None
) -> int:
    """Run the verification; return the exit code (17: what is learned depends on N).

    `config`: what the flags of `train` mean; None: a script. `counts`: of workers, ascending; the
    first is the reference. Raises UsageError if the configuration is refused for some N,
    TrainingError if training fails.
    """
    if config is not None:
        exact = config.batch.virtual_workers is not None
        training = replace(training, words=[*training.words, *(() if exact else IN_FLOAT64)])
        say(_how(training, config, counts, exact))
    with scratch_folder("verify-n") as scratch:
        results, virtual_workers = _run_every_n(training, config, counts, scratch)
        exact, explained, unsplit = virtual_workers is not None, None, None
        if apart := next((result for result in results if not result.same), None):
            pair = Pair(training, (counts[0], apart.workers), scratch, 0.0 if exact else AGREEMENT)
            explained = _explain(pair, config, apart.gap or Gap())
        elif virtual_workers is not None and virtual_workers > 1:
            unsplit = _compare_unsplit(training, virtual_workers, scratch)
            say(unsplit.line())
    is_wrong = unsplit is not None and not unsplit.same
    say(_verdict(results, exact, explained, is_wrong))
    write_json(json, _as_json(results, exact, explained, unsplit))
    return EXIT_MISMATCH if explained or is_wrong else EXIT_OK


def _run_every_n(
    training: Training, config: TrainConfig | None, counts: tuple[int, ...], scratch: Path
) -> tuple[list[TrialResult], int | None]:
    """Run and compare with each N; return the results, printed at once, and the number of virtual
    workers.
    """
    results: list[TrialResult] = []
    virtual_workers: int | None = None
    for workers in counts:
        run = _run_to_end(training, config, workers, scratch)
        virtual_workers = run.summary()["virtual_workers"]
        exact = virtual_workers is not None
        if config is None and not results:  # only now it is known what the script demands
            say(_how(training, config, counts, exact))
        reference = results[0] if results else None
        results.append(_compare(run, workers, reference, exact))
        say(results[-1].line())
        if len(results) > 1 and (results[-1].same or not all(r.same for r in results[:-1])):
            shutil.rmtree(run.path)  # of those that differ, only the first is looked into
    return results, virtual_workers


def _compare_unsplit(training: Training, shares: int, scratch: Path) -> Unsplit:
    """Return the losses of the first step on one worker, with one virtual worker and with all."""
    losses = []
    for virtual in (1, shares):
        trial = Trial(
            training,
            1,
            scratch,
            f"unsplit-{virtual}",
            virtual_workers=virtual,
            grad_accum_steps=1,
            max_steps=1,
        )
        losses.append(float(trial.wait_for_success()["train_loss"]))
    return Unsplit(shares, *losses)


def _how(training: Training, config: TrainConfig | None, counts: Sequence[int], exact: bool) -> str:
    """Return what is run, and how far runs must agree."""
    text = f"verify-n: one run for each N of {_listed(counts)}, {training.controller}; "
    if exact:
        return f"{text}every N must end with the same bits"
    if config is None:
        return f"{text}every N must agree to {AGREEMENT:g}, which takes a model in float64"
    text += "in float64, as float32 rounds differently for each N"
    precision = config.precision
    flags = {"--amp": precision.amp, "--compression": precision.compression}
    left_out = [f"{flag} {value}" for flag, value in flags.items() if value != "none"]
    return f"{text}, and without {' and '.join(left_out)}" if left_out else text


def _run_to_end(
    training: Training, config: TrainConfig | None, workers: int, scratch: Path
) -> Trial:
    """Return the finished run on N workers. Raises UsageError and TrainingError."""
    # Without --max-steps checkpoints are those of the evaluations.
    steps = config.schedule.max_steps if config else None
    interval = math.ceil(steps / PARTS) if steps else 0
    trial = Trial(training, workers, scratch, str(workers), **checkpoint_options(interval))
    trial.wait()
    if refused := trial.refusal():
        raise UsageError(f"on {counted(workers, 'worker')}: {refused}")
    try:
        trial.wait_for_success()
    except TrainingError as error:
        raise TrainingError(f"on {counted(workers, 'worker')} {error}") from error
    return trial


def _compare(run: Trial, workers: int, reference: TrialResult | None, exact: bool) -> TrialResult:
    """Return the difference of a finished run from the reference, unless this is it."""
    digest = run.summary()["params_sha256"]
    if reference is None:
        return TrialResult(workers, digest, None, same=True)
    one, other = map(read_saved, map(newest, (run.path.parent / str(reference.workers), run.path)))
    gap = gap_above(AGREEMENT, one, other)
    same = digest == reference.params_sha256 if exact else gap is None
    gaps = [gap] if gap else [largest_gap(one[kind], other[kind]) for kind in one]
    return TrialResult(workers, digest, max(gaps, key=lambda gap: gap.relative), same)


def _explain(pair: Pair, config: TrainConfig | None, at_end: Gap) -> Explanation:
    """Return where the run that differs parts from the reference, and why.

    `at_end`: the difference of the final tensors.
    """
    one, other = pair.workers
    say(f"N={other} differs from N={one}: looking for the first step, and the cause")
    parting = pair.first_difference(at_end)
    if config is None:
        return Explanation(pair.workers, parting, [], IN_A_SCRIPT)
    causes, note = likely_causes(config, parting, other, pair.limit == 0.0, pair.scratch)
    return Explanation(pair.workers, parting, causes, note)


def _verdict(
    results: list[TrialResult], exact: bool, explained: Explanation | None, is_wrong: bool
) -> str:
    counts = _listed([result.workers for result in results])
    if is_wrong:
        return f"verdict: the same is learned on {counts} workers, but not from the batch as it is"
    if explained is not None:
        return "\n".join([*explained.lines(), "verdict: what is learned DEPENDS ON N"])
    measure = "the same bits" if exact else f"every tensor to {AGREEMENT:g} of its largest value"
    return f"verdict: the same is learned on {counts} workers ({measure})"


def _listed(numbers: Sequence[int]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def _as_json(
    results: list[TrialResult],
    exact: bool,
    explained: Explanation | None,
    unsplit: Unsplit | None,
) -> dict[str, Any]:
    content: dict[str, Any] = {
        "same": explained is None,
        "demanded": "same bits" if exact else AGREEMENT,
        "runs": [asdict(result) for result in results],
    }
    if explained is not None:
        parting = asdict(explained.parting)
        del parting["before"]  # a path in the scratch folder
        content |= {
            "difference": {"workers": explained.workers, **parting},
            "causes": [asdict(cause) for cause in explained.causes],
            "note": explained.note,
        }
    return content | {"unsplit": asdict(unsplit) if unsplit else None}
