"""Runs a script where torchvision, which transformers imports, is of another build than torch.

with_torchvision.py SCRIPT [ARGUMENT ...]
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from hvdtrain.data.builtin import import_torchvision

import_torchvision()
del sys.argv[0]
sys.path[0] = str(Path(sys.argv[0]).parent)
runpy.run_path(sys.argv[0], run_name="__main__")
