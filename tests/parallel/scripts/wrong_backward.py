"""`hvdtrain train` with one rank whose backward pass is wrong: a bit of an activation's gradient.

    wrong_backward.py RANK BIT always|owner|checker ARGUMENTS

owner: once, while the rank computes the share that is to be checked. checker: once, while it checks
a share of another rank. The bit is one of the largest gradient of a layer's output.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

from hvdtrain.audit.compute import ComputeAudit
from hvdtrain.cli import main
from hvdtrain.models import LeNet

RANKS = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK")
wrong, bit, when = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
del sys.argv[1:4]
is_wrong = wrong == int(next(os.environ[name] for name in RANKS if name in os.environ))
flips = {"always": 10**9}.get(when, 1) if is_wrong else 0
armed = when == "always"


class Flip(torch.autograd.Function):
    """The identity, whose gradient has one wrong bit while `armed`, `flips` times."""

    @staticmethod
    def forward(ctx, values):
        return values.view_as(values)

    @staticmethod
    def backward(ctx, gradient):
        global flips
        if not armed or flips == 0:
            return gradient
        flips -= 1
        spoilt = gradient.clone().contiguous()
        place = int(spoilt.abs().argmax())
        spoilt.view(-1).view(torch.int32)[place] ^= -(1 << 31) if bit == 31 else 1 << bit
        return spoilt


def build(self, *arguments, honest=LeNet.__init__):
    honest(self, *arguments)
    # Its gradient is not 0 where the activation behind it is not: so the change shows.
    self.hidden.register_forward_hook(lambda module, inputs, output: Flip.apply(output))


def begin_pass(self, *arguments, honest=ComputeAudit.begin_pass):
    global armed
    honest(self, *arguments)
    armed = armed or (when == "owner" and bool(self._passes))


def compute(self, *arguments, honest=ComputeAudit._compute):
    global armed
    armed = armed or when == "checker"
    return honest(self, *arguments)


LeNet.__init__ = build
ComputeAudit.begin_pass = begin_pass
ComputeAudit._compute = compute
sys.exit(main())
