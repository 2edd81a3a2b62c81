"""Bad input to `hvdtrain launch --print-kubernetes`, and what must be reported for each.

Tried by tests/unit/cli/test_launch_bad_input.py.
"""

from __future__ import annotations

from typing import Any

from tests.unit.bad_launches import case, launch


def pods(name: str, flags: str, expected: str) -> Any:
    form = "" if flags.startswith("pods ") else "job "
    return case(f"pods-{name}", f"launch --print-kubernetes {form}{flags}", expected)


CASES = [
    pods("image", "-np 2 -- train", "--print-kubernetes: which image? Give --image NAME"),
    pods("image-name", "--image 'a b' -- train", "--image=a b: is not the name of an image"),
    launch("image-alone", "--image a -np 2 -- train", "--image: names the image of --print-k"),
    pods("form", "pods --image a -- train", "invalid choice: 'pods' (choose from 'job', 'mpijob')"),
    pods("nothing", "--image a", "nothing to launch: give `-- train ...`"),
    pods("no-nodes", "--image a --nnodes 0 -- train", "--nnodes=0: must be at least 1"),
    pods("nodes", "--image a --nnodes 99999 -- train", "--nnodes=99999: must be at most 16384"),
    pods("no-workers", "--image a -np 0 -- train", "-np 0: must be from 1 to 65536"),
    pods(
        "workers",
        "--image a --nnodes 4 -np 6 -- train",
        "-np 6: must be a multiple of --nnodes=4",
    ),
    pods("min-np", "--image a --nnodes 2 --min-np 3 -- train", "--min-np=3: is above the number"),
    pods(
        "hosts",
        "--image a -H b:2 -p 22 --detach -- train",
        "--hosts: does not apply to pods; leave it out|--ssh-port: |--detach: ",
    ),
    pods("mpi", "--image a --nnodes 2 --controller mpi -- train", "use --print-kubernetes mpijob"),
    pods("flags", "--image a -- train --epochs=0 --lr=-1", "train: --epochs=0: |train: --lr=-1"),
    pods("misspelt", "--image a -- trian", "trian: no such command; did you mean train?"),
    pods("alone", "--image a -- doctor", "doctor: does not run on workers"),
    pods(
        "output",
        "--image a -- train --output /runs",
        "train: --output=/runs: is lost with the pod; give a folder below /job",
    ),
    pods(
        "resume",
        "--image a -- train --resume runs/a",
        "train: --resume=runs/a: a pod that is started again|use --resume auto",
    ),
]
