"""What is changed in Horovod 0.28.1's published source: each edit with its reason.

edit       an edit, and how all are applied; the files of ours that are added
building   edits that let Horovod be built here
sums       edits of sums over ranks: their order, how they fail, whether they are finite
waiting    edits of how ranks and threads wait
runner     edits of horovodrun: how it starts workers
"""

import hashlib
import json
from dataclasses import asdict

from hvdtrain.horovod_build.edits import building, runner, sums, waiting
from hvdtrain.horovod_build.edits.edit import (
    ADDED,
    BUILD,
    HOROVOD_SHA256,
    HOROVOD_VERSION,
    Edit,
    SourceEditError,
    apply_edits,
)

__all__ = [
    "ADDED",
    "EDITS",
    "HOROVOD_SHA256",
    "HOROVOD_VERSION",
    "Edit",
    "SourceEditError",
    "apply_edits",
    "edits_for",
    "edits_sha256",
]

# Another order has another hash, by which cached wheels are found.
EDITS = (
    *building.CMAKE,
    *runner.PYTHON,
    *building.SOURCES_AND_LIBRARIES,
    *sums.FAULTS_AND_ORDER,
    *building.RELEASE,
    *waiting.WAITING,
    *sums.BY_HOST,
    *sums.CANONICAL,
    *runner.HOSTS,
    *sums.STALLS,
    *sums.FINITE,
    *waiting.AWAITED,
)


# Without these it cannot be built or started: to compare with.
AS_PUBLISHED = (*building.CMAKE, *runner.PYTHON, *building.SOURCES_AND_LIBRARIES, *building.RELEASE)


def edits_for(*, has_mpi: bool, as_published: bool = False) -> tuple[Edit, ...]:
    """Return all edits of a build with MPI, or without; `as_published`: only those without which
    there is none.
    """
    return (*(AS_PUBLISHED if as_published else EDITS), runner.built_controllers(has_mpi))


def edits_sha256(*, has_mpi: bool, as_published: bool = False) -> str:
    """Return a hash of these edits, and of the files that are added."""
    added = [(BUILD / name).read_text("utf-8") for name in ADDED]
    edits = map(asdict, edits_for(has_mpi=has_mpi, as_published=as_published))
    return hashlib.sha256(json.dumps([*edits, *added]).encode()).hexdigest()
