"""Comparison of the data that ranks have built, each in its own process."""

from collections.abc import Sequence
from typing import Any

from hvdtrain.data.sketch import SKETCH, alike, sketch_of
from hvdtrain.data.splits import Fingerprint, Split, Splits
from hvdtrain.errors import refuse
from hvdtrain.exchange import Exchange
from hvdtrain.exchange.agreement import run_on_all
from hvdtrain.log import complain, counted

ADVICE = (
    "Build the same data set in every process: number classes by sorted(names), not in the order "
    "of a set, and give random_split a generator=torch.Generator().manual_seed(0)"
)


def refuse_other_data(
    exchange: Exchange, data: Splits, fingerprints: dict[str, Fingerprint], hosts: Sequence[int]
) -> None:
    """Collective: raise AgreedFailure, naming the ranks, unless all of a host have the same data.

    `fingerprints`: of this rank's splits. `hosts`: the number of each rank's host; all 0 where
    hosts must have the same.
    """
    local_fields = {
        part: {name: one.get(name) for name in ("samples", "texts", "digest", SKETCH)}
        for part, one in fingerprints.items()
    }
    everyone = exchange.all_gather_object(local_fields, "hvdtrain.data_of_ranks")
    first = hosts.index(hosts[exchange.rank])

    def check() -> None:
        expected, splits = everyone[first], {"train": data.train, "valid": data.valid}
        problems = [
            f"the {part} data {text}, unlike on rank {first}"
            for part, fields in local_fields.items()
            if (text := difference(expected[part], fields, splits[part]))
        ]
        refuse(problems, f". {ADVICE}")

    run_on_all(exchange, "data_of_ranks", check)


def difference(expected: dict[str, Any], actual: dict[str, Any], split: Split) -> str | None:
    """Return how a split differs from what is expected, or None.

    Values of samples that are not the same when they are read once more, as they come from a
    generator of the data set's own, cannot be compared.
    """
    if actual["samples"] != expected["samples"]:
        return f"have {counted(actual['samples'], 'sample')} instead of {expected['samples']:,}"
    if (actual["texts"], actual["digest"]) != (expected["texts"], expected["digest"]):
        return f"have {counted(actual['samples'], 'sample')} with other names or labels"
    return changed_values(expected.get(SKETCH), actual.get(SKETCH), split)


def changed_values(expected: Any, actual: Any, split: Split | None) -> str | None:
    """Return that samples have other values than expected, or None."""
    if not expected or not actual or alike(expected, actual):
        return None
    if split is not None and actual != sketch_of(split):  # here, reading repeats to the bit
        complain(
            "the data set draws from a random generator of its own: its samples differ each time "
            "that they are read, so what is learned depends on the number of workers. Draw from "
            "the generators of torch, NumPy or random, which are seeded for each sample"
        )
        return None
    return "have samples with other values"
