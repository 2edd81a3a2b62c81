"""Canonical sums: sums of gradients whose bits do not depend on the number of ranks.

A step's gradient is the sum of V shares, those of the virtual workers. Floating-point addition is
not associative, so the sum would depend on which rank adds which shares. Here each share is rounded
to integers first, and integers are added, whose sum is exact in any order. The definition, the
proof of its error bound, and the reference are in `hvdtrain.ring.canonical`. In short, for each
block of 256 elements of a parameter:

1. All ranks agree on the exponent e of the largest finite magnitude over all shares (int32, Max).
2. Each share is multiplied by 2^s, s = bits - ceil(log2 V) - e, and rounded to integers. They are
   added on each rank, then over ranks (int32 for float32, int64 for float64: as many bytes as the
   gradients).
3. The sum is converted back once, and multiplied by 2^-s.

Infinities and NaNs count as 0 in the integers. They are added as floats, in which their sum does
not depend on the order either, and put back.

Parameters travel in buckets. A bucket begins as soon as the last share's backward pass has made its
gradients, so that both exchanges overlap with the rest of that pass. The small buckets are complete
at its end, where every exchange is waited for. Where their shares are few bytes in all, each rank
gathers those of all ranks, in one exchange, and adds them itself.
"""

from collections.abc import Callable

import torch

from hvdtrain.errors import TrainingError, UsageError
from hvdtrain.exchange import Exchange, Pending
from hvdtrain.exchange.buckets import messages_of, suitable_bucket_bytes
from hvdtrain.exchange.canonical_rows import CanonicalRows
from hvdtrain.exchange.distributed_optimizer import Trainable
from hvdtrain.exchange.gradients import added_dtype, make_gradients_dense
from hvdtrain.exchange.rounding import FORMATS, finite

BUCKET_BYTES = 1 << 18  # of parameters that travel together, at least


class CanonicalSums:
    """The sums of the gradients of one model over the shares of all ranks.

    Per step: `begin`; `begin_pass` before each backward pass, and `next_share` between shares;
    `finish`. The first step does not overlap: it shows whether a backward pass makes any gradient
    in several parts, as activation checkpointing can. Then no step does.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        shares: int,
        exchange: Exchange,
        index: int = 0,
    ) -> None:
        """Prepare buckets and hooks for the parameters of `optimizer`, one of those of `model`,
        whose gradients are dense from now on (`make_gradients_dense`).

        `shares`: number of shares over all ranks. `index`: of the optimizer, if there are several.
        The trainable parameters must be those of `check_types`.
        """
        make_gradients_dense(model, optimizer)
        self._exchange, self._share = exchange, 0  # of this rank, the one that is computed
        self._name = "hvdtrain.canonical" + (f".{index}" if index else "")
        self._optimizer = optimizer
        self._trainable = Trainable(model, optimizer)
        self._may_overlap: bool | None = None  # unknown before the first step has ended
        self._overlaps = False  # in this pass
        self._made: set[torch.Tensor] = set()  # parameters whose gradients this pass has made
        most = suitable_bucket_bytes(exchange.ring_size, BUCKET_BYTES)
        self._buckets = [
            CanonicalRows(number, list(message.values()), shares, exchange)
            for number, message in enumerate(messages_of(model, optimizer, most))
        ]
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(bucket))
            for bucket in self._buckets
            for parameter in bucket.parameters
        ]

    def are_of_others(self) -> bool:
        """Return whether other parameters are trainable now than those that are summed."""
        return self._trainable.has_changed(self._optimizer)

    def close(self) -> None:
        """Leave the gradients alone from now on."""
        for hook in self._hooks:
            hook.remove()

    def begin(self, first_share: int) -> None:
        """Begin a step, without any share; `first_share`: the number of this rank's first one."""
        self._overlaps, self._share = False, first_share
        for bucket in self._buckets:
            bucket.clear()

    def next_share(self) -> None:
        """Keep the gradients of the share that has ended; the next one begins without any."""
        for bucket in self._buckets:
            bucket.add_share(self._share)
            for parameter in bucket.parameters:
                parameter.grad = None
        self._share += 1

    def begin_pass(self, is_last: bool) -> None:
        """Begin a backward pass; the exchange overlaps with the last one of this rank."""
        self._made.clear()
        self._overlaps = is_last and self._may_overlap is True

    def finish(self) -> bool:
        """Collective: make every `.grad` the sum over all shares; zero if no share has a gradient.

        Returns whether they are known to be finite, the same on every rank. Raises TrainingError if
        trainable parameters have been added, removed or converted.
        """
        self._overlaps = False
        if self._may_overlap is None:
            self._may_overlap = True
        self._trainable.check(self._optimizer)
        for bucket in self._buckets:
            if not bucket.is_sent:
                self._send(bucket)
        for bucket in self._buckets:
            if bucket.gathered is not None:
                bucket.gathered.wait()
                bucket.shares = [*bucket.places]
                self._send_exponents(bucket)
            if bucket.added is None:
                self._send_integers(bucket)
        for bucket in self._buckets:
            bucket.receive()
        return all(bucket.is_finite for bucket in self._buckets)

    def _hook(self, bucket: CanonicalRows) -> Callable[[torch.Tensor], None]:
        def gradient_is_ready(parameter: torch.Tensor) -> None:
            if parameter in self._made:
                self._may_overlap = False
                if bucket.is_sent:
                    raise TrainingError(
                        f"a backward pass has made the gradient of a parameter of shape "
                        f"{list(parameter.shape)} in several parts, for the first time: with "
                        "--virtual-workers it must do so from the first step on, or never"
                    )
            self._made.add(parameter)
            if not self._overlaps:
                return
            bucket.missing -= 1
            if bucket.missing == 0:
                self._send(bucket)
            for other in self._buckets:
                if other.agreed is not None and other.added is None and other.agreed.done():
                    self._send_integers(other)

        return gradient_is_ready

    def _send(self, bucket: CanonicalRows) -> None:
        """Collective: begin the exchange of a bucket whose last share of this rank is complete."""
        bucket.add_share(self._share)
        if not bucket.is_gathered:
            self._send_exponents(bucket)
            return
        # Each place has the bits of one share, and zeros on all other ranks: a sum of integers.
        places = bucket.places.view(bucket.integers.dtype)
        name = f"{self._name}.shares.{bucket.number}"
        bucket.gathered = self._exchange.begin_reduction(places, "sum", name)

    def _send_exponents(self, bucket: CanonicalRows) -> None:
        """Collective: begin to agree on the exponents of a bucket's blocks."""
        bucket.fields.zero_()
        for share in bucket.shares:
            bucket.rounding.raise_fields(share, bucket.fields)
        bucket.agreed = self._begin(bucket, bucket.fields, "max", "exponents")

    def _send_integers(self, bucket: CanonicalRows) -> None:
        """Collective: once exponents are agreed on, round the shares and begin to add them."""
        assert bucket.agreed is not None
        bucket.agreed.wait()
        bucket.largest = int(bucket.fields.max()) if len(bucket.integers) else 0
        shares = bucket.shares
        if bucket.is_marked:
            others = torch.zeros_like(bucket.integers, dtype=bucket.dtype)
            for share in shares:
                others += share.masked_fill(share.isfinite(), 0)
            shares = [finite(share) for share in shares]
            bucket.marked = self._begin(bucket, others, "sum", "not_finite")
        if shares:
            bucket.rounding.add_rounded(shares, bucket.fields, bucket.top, bucket.integers)
        else:
            bucket.integers.zero_()
        bucket.shares.clear()
        bucket.added = self._begin(bucket, bucket.integers, "sum", "integers")

    def _begin(self, bucket: CanonicalRows, values: torch.Tensor, op: str, what: str) -> Pending:
        """Collective: begin to reduce values of a bucket."""
        return bucket.exchange.begin_reduction(values, op, f"{self._name}.{what}.{bucket.number}")


def check_types(model: torch.nn.Module) -> None:
    """Raise UsageError for a trainable parameter of a type whose sums are not canonical."""
    others = [
        f"{name} ({parameter.dtype})"
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and added_dtype(parameter.dtype) not in FORMATS
    ]
    if others:
        raise UsageError(
            f"--virtual-workers: {len(others)} parameters have no canonical sum, such as "
            f"{others[0]}: supported types are float32, float64, bfloat16 and complex ones"
        )
