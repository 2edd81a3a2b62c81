"""Audit and progress of a training loop whose gradients DistributedDataParallel exchanges.

A trainer clips gradients right after its backward pass, and calls no callback in between. So the
end of that pass is followed itself, by callbacks of autograd's engine, which it runs in the order
in which they were queued:

    forward pass      a hook on the model's outputs
    backward pass     begins there: the hook queues `_end_own_work`
      DDP             queues its wait, once all gradients are made
    its end           `_end_own_work` queues `_end_exchange`
      DDP             waits, and writes the averages to `.grad`
                      `_end_exchange` compares them, or raises the error of `backward()`

Outputs, not parameters: with reentrant activation checkpointing a backward pass contains others.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from hvdtrain.audit.script import AuditCounts, GradientAudit, check_options
from hvdtrain.errors import UsageError, refuse
from hvdtrain.log import report_uncaught, say
from hvdtrain.pulse import BEFORE_EXCHANGE, WAITING, Pulse
from hvdtrain.tensors import tensors_in
from hvdtrain.topology import Topology

DATA, COMPUTE = BEFORE_EXCHANGE


class TrainingWatch:
    """The audit of a training's gradients every `every` steps, and its reports of progress."""

    def __init__(
        self, every: int, parts: int, compression: str, evidence: str | Path | None
    ) -> None:
        """Take the options of GradientAudit; raises UsageError for an invalid one."""
        report_uncaught()
        refuse(f"AuditCallback: {text}" for text in check_options(every, parts, compression))
        self._every, self._evidence = every, evidence
        self._parts, self._compression = parts, compression
        self._audit: GradientAudit | None = None
        self._pulse = Pulse()
        self._is_training = self._is_followed = False
        self._hooks = ExitStack()

    def begin(
        self, model: torch.nn.Module, step: int, total_steps: int, exchanges: Callable[[], bool]
    ) -> None:
        """Collective: follow the training of `model`, of which `step` steps have been made.

        `exchanges`: returns whether DDP exchanges the gradients of the current backward pass, and
        does not only accumulate them. Raises UsageError as GradientAudit does.
        """
        self._hooks.close()
        self._exchanges, self._size = exchanges, joined_size()
        self._audit = None
        if self._size > 1:
            self._audit = GradientAudit(
                model,
                every=self._every,
                parts=self._parts,
                compression=self._compression,
                evidence=self._evidence,
                steps_done=step,
            )
        self._hooks.callback(model.register_forward_pre_hook(self._begin_pass).remove)
        self._hooks.callback(model.register_forward_hook(self._follow_outputs).remove)
        self._pulse, self._is_training = Pulse.from_environment(), True
        self._pulse.show(total_steps=total_steps)
        self.end_step(step)

    def begin_step(self) -> None:
        """Report that the data are there; DDP may first wait for buffers of rank 0."""
        self._pulse.beat(WAITING if self._size > 1 else COMPUTE)

    def end_step(self, step: int) -> None:
        """Report that `step` steps have been made."""
        self._pulse.step = step + 1
        self._pulse.beat(DATA)

    def evaluate(self) -> None:
        """Report that an evaluation goes on, within the training or outside."""
        self._pulse.beat("evaluate" if self._is_training else None)

    def show(self, **figures: float | int | None) -> None:
        """Report figures of the whole job."""
        self._pulse.show(**figures)

    def end(self) -> None:
        """Collective: end the audit, and print its summary on rank 0."""
        self._hooks.close()
        counts = AuditCounts(0, 1, self._every)
        summary = self._audit.summary() if self._audit else counts.summary()
        if self._size == 1 or torch.distributed.get_rank() == 0:
            say(summary)
        if self._audit:
            self._audit.close()
            atexit.register(_leave_group)
        self._audit, self._is_training = None, False
        self._pulse.finish()

    def _begin_pass(self, *_: Any) -> None:
        if torch.is_grad_enabled():
            self._is_followed = False
            self._pulse.beat(COMPUTE)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _follow_outputs(self, module: torch.nn.Module, arguments: Any, outputs: Any) -> None:
        if torch.is_grad_enabled():
            for tensor in tensors_in(outputs):
                if tensor.requires_grad:
                    tensor.register_hook(self._begin_backward)

    def _begin_backward(self, gradient: torch.Tensor) -> None:
        if not self._is_followed:
            self._is_followed = True
            _queue(self._end_own_work)

    def _end_own_work(self) -> None:
        if self._size > 1 and self._exchanges():
            self._pulse.beat(WAITING)
        _queue(self._end_exchange)

    def _end_exchange(self) -> None:
        self._is_followed = False
        if self._audit and self._exchanges():
            self._audit.check()
        self._pulse.beat("update")


class AuditOptions:
    """What the callbacks of all trainers are constructed with."""

    def __init__(
        self,
        every: int = 100,
        parts: int = 1,
        compression: str = "none",
        evidence: str | Path | None = "audit",
    ) -> None:
        """Take the options of `hvdtrain.GradientAudit`; raises UsageError for an invalid one.

        `compression`: fp16 with DDP's communication hook of that name, else none.
        """
        self._watch = TrainingWatch(every, parts, compression, evidence)


def joined_size() -> int:
    """Return the number of workers that torch connects."""
    distributed = torch.distributed
    joined = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if joined else 1


def _leave_group() -> None:
    """End the threads of Gloo, which otherwise may abort the process as it ends (torch 2.13)."""
    if joined_size() > 1 and torch.distributed.get_backend() == "gloo":
        torch.distributed.destroy_process_group()


def check_size(size: int, advice: str) -> None:
    """Raise UsageError if several workers were started, but the trainer uses `size` = 1."""
    started = Topology.from_environment()
    several = started.in_job_of_several or (joined_size() > 1 and f"{joined_size()} workers")
    if size > 1 or not several:
        return
    number = str(started.size) if started.start else "N"
    variable = started.in_job_of_several.partition("=")[0]
    alone = f"; for one worker, unset {variable}" if variable else ""
    raise UsageError(
        f"AuditCallback: {several}, but this trainer is not connected with others: each would do "
        f"all the work by itself. Start the script by `hvdtrain launch -np {number} -- python ...`"
        f"{advice}{alone}"
    )


def _queue(callback: Callable[[], None]) -> None:
    """Call `callback` at the end of the current backward pass, after those queued before."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
