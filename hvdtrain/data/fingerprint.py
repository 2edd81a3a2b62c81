"""Short identification of the samples of a split, to detect changes of the data.

`fingerprint()` of a split returns one text for each sample, in order, such as its name and label,
or a single text that changes whenever its samples do. For splits without it only the number of
samples is compared. No sample is read.
"""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

from hvdtrain.data.splits import Split

MOST_MARKS = 512
Fingerprint = dict[str, Any]  # plain values, for checkpoints


def texts_of(holder: object) -> list[str] | None:
    """Return the texts of `holder.fingerprint()` as a list, or None if it has none."""
    offered = getattr(holder, "fingerprint", None)
    texts = offered() if offered else None
    return [texts] if isinstance(texts, str) else None if texts is None else list(map(str, texts))


def fingerprint(split: Split) -> Fingerprint:
    """Return the number of samples, and cumulative digests of the texts at equally spaced marks.

    The spacing is a power of two, so that the marks of two fingerprints can be compared.
    """
    texts, distance = texts_of(split) or [], 1
    while distance * MOST_MARKS < len(texts):
        distance *= 2
    digest, marks = hashlib.sha256(), []
    for number, text in enumerate(texts, start=1):
        digest.update(f"{len(text)}:{text}".encode())
        if number % distance == 0:
            marks.append(digest.hexdigest()[:16])
    return {
        "samples": len(split),
        "texts": len(texts),
        "distance": distance,
        "marks": marks,
        "digest": digest.hexdigest(),
    }


def difference(old: Fingerprint, new: Fingerprint, split: Split | None) -> str | None:
    """Return a description of the change from `old` to `new`, or None.

    `split`: the new split, if available, for names.
    """
    before, now = old["samples"], new["samples"]
    if before != now:
        text = f"{before} samples then and {now} now"
    elif old["digest"] != new["digest"]:
        text = f"{now} samples as before, but with other names or labels"
    else:
        return None
    if not (old["texts"] == before and new["texts"] == now):  # not one for each sample
        return text
    first, distance = _first_difference(old, new)
    last = min(first + distance, now) - 1
    if first >= now:
        return f"{text}; the first {now} are the same"
    place = f"number {first}" if first == last else f"one of the numbers {first} to {last}"
    texts = texts_of(split) or []
    shown = list(dict.fromkeys((texts[first], texts[last]))) if texts else []
    ending = f", now {' to '.join(shown)}" if shown else ""
    return f"{text}; the first that differs is {place}{ending}"


def _first_difference(old: Fingerprint, new: Fingerprint) -> tuple[int, int]:
    """Return the first sample that may differ, and the number of samples in which one does."""
    distance = max(old["distance"], new["distance"])
    ratios = (distance // old["distance"], distance // new["distance"])
    marks = [one["marks"][r - 1 :: r] for one, r in zip((old, new), ratios, strict=True)]
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*marks, strict=False))
    return sum(1 for _ in same) * distance, distance
