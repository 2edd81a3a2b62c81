"""Build the reference of all public names from their docstrings: `python docs/reference.py FOLDER`.

Needs pdoc, which `launch/setup` installs with the test tools. Warnings of pdoc are errors.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import pdoc

import hvdtrain

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("folder", metavar="FOLDER", type=Path, help="write the pages here")
folder = parser.parse_args().folder
for name in hvdtrain.__all__:
    setattr(hvdtrain, name, getattr(hvdtrain, name))  # pdoc looks at what is imported already
warnings.simplefilter("error")
pdoc.pdoc("hvdtrain", output_directory=folder)
