"""A profile and files for tests of `hvdtrain plan`."""

from __future__ import annotations

import json
from pathlib import Path

from hvdtrain.lab.plan.profiles import Gradient, Profile

PROFILE = Profile(
    name="two $layers",
    batch_size=8,
    forward_s=0.01,
    backward_s=0.02,
    update_s=0.001,
    gradients=(Gradient("last", 4_000_000, 0.004), Gradient("first", 1_000_000, 0.02)),
    step_times_s=(0.030, 0.031, 0.033),
    source="by hand",
)


def write(folder: Path, content: object) -> Path:
    path = folder / "file.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path
