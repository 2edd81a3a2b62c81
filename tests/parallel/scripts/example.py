"""Runs examples/your_script_distributed.py as it is, and keeps what each rank has learned.

horovodrun -np 2 python -m tests.parallel.scripts.example FOLDER
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from safetensors.torch import save_file

SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "your_script_distributed.py"

made = runpy.run_path(str(SCRIPT), run_name="__main__")
rank = made["workers"].rank
save_file(made["model"].state_dict(), Path(sys.argv[1]) / f"rank-{rank}.safetensors")
print(f"rank {rank}: {made['audit'].checked} steps checked")
