"""`hvdtrain install-horovod` of a build whose sums of GPU tensors are formed in the host's memory.

Two workers can share one GPU with it, which NCCL before 2.30 refuses. The wheel goes into a cache
of its own (XDG_CACHE_HOME), as nothing in its key tells it from the other.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hvdtrain.cli import main
from hvdtrain.horovod_build import build, install
from hvdtrain.horovod_build.cuda import Cuda, build_variables


def without_nccl(cuda: Cuda, root: Path) -> dict[str, str]:
    """Return the variables of a build with CUDA, without operations on GPUs."""
    variables = build_variables(cuda, root)
    del variables["HOROVOD_GPU_OPERATIONS"]
    return variables


if __name__ == "__main__":
    build.build_variables = without_nccl
    install.check = lambda choice, say: None  # which demands NCCL
    sys.exit(main())
