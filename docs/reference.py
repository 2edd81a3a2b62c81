"""Build the reference of all public names from their docstrings: `python docs/reference.py FOLDER`.

Needs pdoc, which `launch/setup` installs with the test tools. Warnings of pdoc are errors.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pdoc

import hvdtrain

for name in hvdtrain.__all__:
    setattr(hvdtrain, name, getattr(hvdtrain, name))  # pdoc looks at what is imported already
warnings.simplefilter("error")
pdoc.pdoc("hvdtrain", output_directory=Path(sys.argv[1]))
