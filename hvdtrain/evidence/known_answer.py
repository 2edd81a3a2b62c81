"""A short training with a known answer, repeated on one core: for `hvdtrain doctor --burn-in`.

    python -m hvdtrain.evidence.known_answer CORE SECONDS

Data, seeds and the number of threads are fixed, so every core of the same kind must compute the
same bits. After each repetition a line of JSON holds all results so far: for each answer, how often
it was given, and when first. An answer is a SHA-256 over all tensors of the training, and its trace
the digest of each tensor in order of computation.
"""

import ctypes
import hashlib
import json
import os
import re
import signal
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from hvdtrain.log import say
from hvdtrain.tensors import CPU, bytes_of

STEPS = 4  # about half a second
SAMPLES, SIDE, CLASSES = 32, 32, 10
LEAST_REPETITIONS = 2  # a single core is compared with itself
ANSWERS_KEPT, NUMBERS_KEPT, DIGITS_KEPT = 20, 5, 8
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def build_network() -> nn.Sequential:
    """Return a network with convolutions, batch norm, dropout, and large matrix products."""
    layers = {
        "conv1": nn.Conv2d(3, 32, kernel_size=3, padding=1),
        "norm": nn.BatchNorm2d(32),
        "relu1": nn.ReLU(),
        "conv2": nn.Conv2d(32, 64, kernel_size=3, padding=1),
        "pool": nn.MaxPool2d(4),
        "flatten": nn.Flatten(),
        "dropout": nn.Dropout(0.25),
        "hidden": nn.Linear(64 * (SIDE // 4) ** 2, 512),
        "relu2": nn.ReLU(),
        "output": nn.Linear(512, CLASSES),
    }
    return nn.Sequential(OrderedDict(layers))


def train(device: torch.device = CPU) -> dict[str, str]:
    """Train from the beginning; return name -> SHA-256 of each tensor, in order of computation."""
    digests: dict[str, str] = {}
    torch.manual_seed(1)
    network = build_network().to(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    drawn = torch.randn(SAMPLES, 3, SIDE, SIDE), torch.randint(CLASSES, (SAMPLES,))
    samples, labels = (tensor.to(device) for tensor in drawn)
    digests["input"] = digest_of(samples)
    for step in range(1, STEPS + 1):
        values = samples
        for name, layer in network.named_children():
            values = layer(values)
            digests[f"step {step}, output of {name}"] = digest_of(values)
        loss = F.cross_entropy(values, labels)
        digests[f"step {step}, loss"] = digest_of(loss)
        optimizer.zero_grad()
        loss.backward()
        for name, parameter in reversed(list(network.named_parameters())):
            assert parameter.grad is not None
            digests[f"step {step}, gradient of {name}"] = digest_of(parameter.grad)
        optimizer.step()
        for name, tensor in network.state_dict().items():
            digests[f"step {step}, {name} after the update"] = digest_of(tensor)
    return digests


def digest_of(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of a tensor's values."""
    return hashlib.sha256(bytes_of(tensor).data).hexdigest()


def kind_of(core: int, root: Path = Path("/")) -> str:
    """Return what decides which bits are computed: processor, torch, and its instructions.

    Virtual machines shorten the model's name, so its numbers are part of the kind. So are the sizes
    of caches, by which kernels choose blocks: they differ between the cores of hybrid processors.
    """
    cpu_info = "".join(
        entry
        for entry in (root / "proc/cpuinfo").read_text().split("\n\n")
        if re.search(rf"^processor\s*: {core}$", entry, re.MULTILINE)
    )
    names = "model name|cpu family|model|CPU implementer|CPU part"
    fields = map(" ".join, re.findall(rf"(?m)^({names})\s*: (.*)$", cpu_info))
    caches = sorted((root / f"sys/devices/system/cpu/cpu{core}/cache").glob("index*/size"))
    sizes = "/".join(path.read_text().strip() for path in caches)
    software = f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"
    return ", ".join([os.uname().machine, *fields, f"caches {sizes}", software])


def repeat(compute: Callable[[], dict[str, str]], kind: str, seconds: float) -> dict[str, Any]:
    """Compute until the time is over, print the results so far each time, and return them.

    `compute` returns a trace: name -> digest, in order of computation.
    """
    began = time.monotonic()
    answers: dict[str, dict[str, Any]] = {}
    results: dict[str, Any] = {"kind": kind, "answers": answers, "repetitions": 0}
    while results["repetitions"] < LEAST_REPETITIONS or time.monotonic() - began < seconds:
        trace = compute()
        results["repetitions"] += 1
        answer = hashlib.sha256("".join(trace.values()).encode()).hexdigest()
        if answer not in answers and len(answers) < ANSWERS_KEPT:
            short = {name: digest[:DIGITS_KEPT] for name, digest in trace.items()}
            answers[answer] = {"count": 0, "at": [], "trace": short}
        if answer in answers:
            answers[answer]["count"] += 1
            answers[answer]["at"] = [*answers[answer]["at"], results["repetitions"]][:NUMBERS_KEPT]
        say(json.dumps(results))
    return results


def end_with_parent() -> None:
    """Let the kernel end this process with the probe, which may be killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> int:
    """Repeat the training on one core until the time is over; return the exit code."""
    core, seconds = int(sys.argv[1]), float(sys.argv[2])
    end_with_parent()
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    repeat(train, kind_of(core), seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
