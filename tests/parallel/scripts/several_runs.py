"""Runs scripts one after another in this process, each of them with options of its own.

several_runs.py LINES, a JSON list of [[SCRIPT, ARGUMENT, ...], OPTIONS]. torchvision may be of
another build than torch.
"""

from __future__ import annotations

import json
import os
import runpy
import sys

from hvdtrain.data.builtin import import_torchvision
from hvdtrain.run import script

import_torchvision()
for command, options in json.loads(sys.argv[1]):
    os.environ["HVDTRAIN_OPTIONS"] = json.dumps(options)
    sys.argv[:] = command
    script.loops = script.Loops()  # those of each script are numbered from 1
    print(f"begins {options.get('experiment', 'original')}", flush=True)
    runpy.run_path(command[0], run_name="__main__")
