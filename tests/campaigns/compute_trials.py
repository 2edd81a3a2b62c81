"""One worker of the campaign of wrong backward passes (`tests.campaigns.compute_faults`).

    horovodrun -np 3 --gloo python -m tests.campaigns.compute_trials FOLDER

FOLDER/faults.json maps names of experiments of FOLDER/experiments.json to their faults. The rank
that is wrong writes the step at which the audit must find it to FOLDER/NAME.expected.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.modules.module import register_module_forward_hook

from hvdtrain.audit.compute import ComputeAudit
from hvdtrain.topology import Topology
from tests.parallel.shared import main

FOLDER = Path(sys.argv[1])
RANK = Topology.from_environment().rank
BITS_OF = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


class Fault:
    """A wrong bit in the gradient of a layer's output, on one rank."""

    def __init__(self, name: str, rank: int, when: str, layer: int, bits_down: int) -> None:
        """`when`: "always"; or once, while the rank computes its own share that is to be checked
        ("owner"), or another rank's share that it checks ("checker"). `layer`: counted back from
        the last one. `bits_down`: of the wrong bit, from the highest of the exponent.
        """
        self._name, self._rank, self._when = name, rank, when
        self._layer, self._bits_down = layer, bits_down
        self._outputs: list[torch.Tensor] = []  # of layers with weights
        self._armed, self._due = False, False
        self._left = 10**9 if when == "always" else 1
        self._step = 0

    def begin(self, step: int, asked: Sequence[int]) -> None:
        """Begin a step, of which the ranks `asked` compute the chosen share: owner and checker."""
        owner, checker = asked
        roles = {"owner": (owner,), "checker": (checker,), "always": asked}
        self._step, self._due = step, self._rank in roles[self._when]
        if self._when == "always":
            self.arm()

    def arm(self) -> None:
        """Let gradients be wrong from now on, on the rank; note the step at which it is found."""
        if self._rank != RANK:
            return
        self._armed = self._armed or self._due or self._when == "always"
        expected = FOLDER / f"{self._name}.expected"
        if self._due and not expected.exists():
            expected.write_text(str(self._step))

    def see(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        """Keep the output of a layer with weights."""
        if isinstance(module, torch.nn.Linear | torch.nn.Conv2d) and output.requires_grad:
            self._outputs.append(output)

    def before_backward(self) -> None:
        """Change the gradient of the layer's output, when it is computed."""
        if self._armed:
            self._outputs[-1 - self._layer].register_hook(self._spoil)
        self._outputs.clear()

    def _spoil(self, gradient: torch.Tensor) -> torch.Tensor:
        if self._left == 0:
            return gradient
        self._left -= 1
        spoilt = gradient.clone(memory_format=torch.contiguous_format)
        bits = spoilt.view(-1).view(BITS_OF[spoilt.dtype])
        highest = 8 * spoilt.element_size() - 2
        bits[int(spoilt.abs().argmax())] ^= 1 << max(highest - self._bits_down, 0)
        return spoilt


@contextmanager
def injected(name: str) -> Iterator[None]:
    """Inject the fault of an experiment, if it has one, between torch and the audit."""
    known = json.loads((FOLDER / "faults.json").read_text())
    if name not in known:
        yield
        return
    fault, when = Fault(name, **known[name]), known[name]["when"]

    def begin(audit: Any, step: int, data: Any, honest: Any = ComputeAudit.begin) -> None:
        honest(audit, step, data)
        fault.begin(step, audit._chosen(step)[1][:2])

    def begin_pass(audit: Any, *them: Any, honest: Any = ComputeAudit.begin_pass) -> None:
        honest(audit, *them)
        if when == "owner" and audit._passes:
            fault.arm()

    def compute(audit: Any, work: Any, honest: Any = ComputeAudit._compute) -> Any:
        if when == "checker":
            fault.arm()
        return honest(audit, work)

    def backward(loss: torch.Tensor, *them: Any, honest: Any = torch.Tensor.backward) -> None:
        fault.before_backward()
        honest(loss, *them)

    changes = {"begin": begin, "begin_pass": begin_pass, "_compute": compute}
    with ExitStack() as stack:
        stack.callback(register_module_forward_hook(fault.see).remove)
        for method, changed in changes.items():
            stack.enter_context(patch.object(ComputeAudit, method, changed))
        stack.enter_context(patch.object(torch.Tensor, "backward", backward))
        yield


if __name__ == "__main__":
    main(injected)
