"""Checks of one process that trains on the device, and beside it on the CPU.

    python -m tests.device.alone FOLDER [NAME ...]

Each check gets a folder of its own below FOLDER. Writes FOLDER/alone.json: the error of each, or
null. With `--first` it ends at the first error.
"""

from __future__ import annotations

import json
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file

from hvdtrain.audit.auditor import Auditor
from hvdtrain.data import TensorSplit
from hvdtrain.data.feeding import to_device
from hvdtrain.data.mixing import MixedSplit
from hvdtrain.data.transforms import AugmentedSplit
from hvdtrain.errors import AuditMismatch, UsageError
from hvdtrain.exchange import SingleProcess
from hvdtrain.exchange.buckets import Bucket
from hvdtrain.exchange.canonical import CanonicalSums
from hvdtrain.ring.transports import in_process_ring
from hvdtrain.topology import Topology
from tests.device import fitting, running
from tests.device.fake_gpu import DEVICE, let_train
from tests.device.running import (
    DEVICES,
    PLAIN,
    SMALL,
    TASK,
    VIRTUAL,
    check_same,
    check_saved,
    hvdtrain,
    remove,
    script,
    summary,
    train,
)

GPU = torch.device("privateuseone", 0)  # has its name only once it is registered
REPLAYED = "bits may differ"


def check_plain(folder: Path) -> None:
    """Dropout, batch norm, AdamW, accumulation, clipping and a moving average; resumed as well."""
    for device in DEVICES:
        train(folder, device, PLAIN, device)
    check_same(folder / "cuda", folder / "cpu")
    check_saved(folder / "cuda")
    found = summary(folder / "cuda")
    assert found["machine"]["device"].startswith("Fake, compute capability 1.0")
    assert found["peak_gpu_mib"] == 1 and summary(folder / "cpu")["peak_gpu_mib"] is None
    shutil.copytree(folder / "cuda", folder / "resumed")
    for path in ("checkpoints/step-00000004", "summary.json"):
        remove(folder / "resumed" / path)
    printed = train(folder, "resumed", [*PLAIN, "--resume=auto"], "cuda")
    assert "step-00000002" in printed and REPLAYED not in printed, printed
    check_same(folder / "resumed", folder / "cpu")


def check_resumed_elsewhere(folder: Path) -> None:
    """A run that goes on on another device is the same with virtual workers, with a notice."""
    flags = [*VIRTUAL, "--resume=auto"]
    for device, other in zip(DEVICES, reversed(DEVICES), strict=True):
        train(folder, f"from-{device}", VIRTUAL, device)
        for path in ("checkpoints/step-00000004", "summary.json"):
            remove(folder / f"from-{device}" / path)
        printed = train(folder, f"from-{device}", flags, other)
        assert "resume: device: " in printed and REPLAYED in printed, printed
    check_same(folder / "from-cuda", folder / "from-cpu")


def check_virtual(folder: Path) -> None:
    """Virtual workers have the bits of the CPU; each run is replayed where it was made."""
    for device in DEVICES:
        train(folder, device, VIRTUAL, device)
        printed = hvdtrain("replay", folder / device, "--trust-code")
        assert "4 steps agreed" in printed and REPLAYED not in printed, printed
    check_same(folder / "cuda", folder / "cpu")
    check_saved(folder / "cuda")
    printed = hvdtrain("replay", folder / "cuda", "--trust-code", "--device=cpu")
    assert "4 steps agreed" in printed and f"now: {REPLAYED}" in printed, printed


def check_pictures(folder: Path) -> None:
    """A task of one's own, with a buffer that has no value at first, in fp16 and in bf16."""
    for device in DEVICES:
        flags = [TASK, "--max-steps=4", "--global-batch-size=15", "--checkpoint-interval=2"]
        train(folder, device, [*flags, "--virtual-workers=2"], device)
        train(folder, f"plain-{device}", flags, device)
    check_same(folder / "cuda", folder / "cpu")
    check_same(folder / "plain-cuda", folder / "plain-cpu")
    for name, own in (("cuda", ["--virtual-workers=2"]), ("plain-cuda", [])):
        for path in ("checkpoints/step-00000004", "summary.json"):
            remove(folder / name / path)
        train(folder, name, [*flags, *own, "--resume=auto"], "cuda")
        check_same(folder / name, folder / name.replace("cuda", "cpu"))
    # Autocast leaves the types of this device as they are; with fp16 the optimizer is another one,
    # whose last bits differ.
    plain = summary(folder / "plain-cpu")
    for amp in ("fp16", "bf16"):
        train(folder, amp, [*flags, f"--amp={amp}"], "cuda")
        assert summary(folder / amp)["train_loss"] == pytest.approx(plain["train_loss"], rel=1e-6)
    assert summary(folder / "bf16")["params_sha256"] == plain["params_sha256"]


def check_image_files(folder: Path) -> None:
    """Images of files, normalised on the device; mixed; evaluated, predicted, and trained on."""
    generator = np.random.default_rng(5)
    for part, count in (("train", 8), ("valid", 3)):
        for label in ("cat", "dog"):
            own = folder / "images" / part / label
            own.mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(0, 256, (20, 24, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(own / f"{number}.png")
    data = [SMALL[0], f"--data=imagefolder:{folder / 'images'}", "--image-size=10"]
    flags = [*data, "--global-batch-size=6", "--max-steps=3", "--trace-every=1", "--workers=0"]
    for device in DEVICES:
        train(folder, device, flags, device)
        train(folder, f"mixed-{device}", [*flags, "--mixup=0.5", "--cutmix=0.5"], device)
        given = ["--device", device, "--trust-code", "--json", folder / f"{device}.json"]
        hvdtrain("evaluate", folder / "cpu", *given)
        images = folder / "images" / "valid"
        predicted = ["--device", device, "--trust-code", "--json", folder / f"{device}-images.json"]
        hvdtrain("predict", folder / "cpu", images, *predicted)
        best = (folder / "cpu" / "checkpoints" / "best").read_text().strip()
        weights = folder / "cpu" / "checkpoints" / best / "model.safetensors"
        train(folder, f"tuned-{device}", [*flags, f"--pretrained={weights}"], device)
    for name in ("", "mixed-", "tuned-"):
        check_same(folder / f"{name}cuda", folder / f"{name}cpu")
    for end in ("", "-images"):
        texts = [(folder / f"{device}{end}.json").read_text() for device in DEVICES]
        assert texts[0] == texts[1]


def check_batches(folder: Path) -> None:
    """Batches of any structure are moved; data that are on the device are changed there."""
    moved = to_device({"a": torch.ones(2), "b": [torch.ones(1), ("text", torch.ones(3))]}, GPU)
    assert all(it.device == GPU for it in (moved["a"], moved["b"][0], moved["b"][1][1]))
    assert to_device(moved["a"], GPU) is moved["a"] and moved["b"][1][0] == "text"
    inputs, labels = torch.rand(9, 3, 6, 6), torch.arange(9) % 4
    batches = []
    for device in (torch.device("cpu"), GPU):
        split = TensorSplit(inputs.to(device), labels.to(device))
        for changed in (AugmentedSplit(split, 1, 0.5, 2), MixedSplit(split, 1, 0.4, 0.4)):
            batches.append([it.cpu() for it in changed.batch(np.arange(7), 2)])
    for one, other in (batches[::2], batches[1::2]):
        assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def check_own_loop(folder: Path) -> None:
    """A script's loop with two optimizers and a frozen part; evaluated, resumed and replayed."""
    for device in DEVICES:
        script(folder, "", device)
        given = ["--device", device, "--trust-code", "--json", folder / f"{device}.json"]
        hvdtrain("evaluate", folder / device, *given)
        printed = hvdtrain("replay", folder / device, "--trust-code")
        assert "8 steps agreed" in printed and REPLAYED not in printed, printed
    check_same(folder / "cuda", folder / "cpu")
    check_saved(folder / "cuda")
    assert (folder / "cuda.json").read_text() == (folder / "cpu.json").read_text()


def check_a_bad_gradient(folder: Path) -> None:
    """A gradient that is not finite ends the run with the same message."""
    flags = ["--model=tests.device.models:without_derivative", *SMALL[1:], "--max-steps=5"]
    printed = [train(folder, device, flags, device, exit_code=1) for device in DEVICES]
    text = "the gradient of root is not finite at step 3"
    assert all(text in it for it in printed), printed


def check_choice(folder: Path) -> None:
    """A rank takes the GPU of its number, or the only one that it sees."""
    from hvdtrain.train.devices import choose_device

    compiled = let_train()
    try:
        compiled.set_device_count(3)
        assert choose_device("auto", Topology(2, 3, 2)) == torch.device(DEVICE, 2)
        with pytest.raises(UsageError, match="local rank 3 has no CUDA device, 3 visible"):
            choose_device("cuda", Topology(3, 4, 3))
        compiled.set_device_count(1)
        assert choose_device("cuda", Topology(2, 3, 2)) == torch.device(DEVICE, 0)
        compiled.set_device_count(0)
        assert choose_device("auto", Topology(2, 3, 2)) == torch.device("cpu")
    finally:
        compiled.set_device_count(2)
        torch.get_device_module(GPU).set_device(0)


def check_repetition(folder: Path) -> None:
    """Where bits are promised torch chooses deterministic operations, and warns without one."""
    for name, flags in (("plain", PLAIN), ("bits", [*PLAIN, "--trace-every=0"])):
        torch.use_deterministic_algorithms(False)
        train(folder, name, [*flags, "--max-steps=1"], "cuda")
        state = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        assert state == ((True, True) if name == "plain" else (False, False)), (name, state)
    train(folder, "cpu", [*PLAIN, "--max-steps=1"], "cpu")
    assert not torch.are_deterministic_algorithms_enabled()


def check_evidence(folder: Path) -> None:
    """A changed gradient is found, and both gradients are saved."""
    model = torch.nn.Linear(70_000, 2).to(GPU)
    (ring,) = in_process_ring(1)
    auditor = Auditor(model, ring, 1, evidence=folder)
    auditor.begin(1)
    model(torch.ones(1, 70_000, device=GPU)).sum().backward()
    with torch.no_grad():
        model.weight.grad[1, 69_999] += 1
    with pytest.raises(AuditMismatch, match="weight"):
        auditor.reduced(1)
    saved = load_file(folder / "step-00000001" / "rank-0.safetensors")
    assert saved["reduced"][-1] == 2 and len(saved) > 1
    auditor.close()


def check_waits(folder: Path) -> None:
    """The host waits for the device a fixed number of times a step, whatever the model."""
    compiled = let_train()

    def grown(run: Callable[[], object]) -> tuple[int, int]:
        before = compiled.counts()
        run()
        after = compiled.counts()
        return after[0] - before[0], after[1] - before[1]

    flags = [*SMALL, "--log-interval=100", "--opt=sgd"]
    few, many = (
        grown(lambda n=n: train(folder, str(n), [*flags, f"--max-steps={n}"], "cuda"))
        for n in (2, 12)
    )
    # One for the finiteness of the gradients, one for the sums of the step before.
    assert many[1] - few[1] == 10 * 2, (few, many)
    # Canonical sums of a large parameter take as many operations as those of a small one.
    counts = []
    for length in (2_560, 2_560_000):
        model = torch.nn.ParameterDict({"a": torch.nn.Parameter(torch.zeros(length, device=GPU))})
        optimizer = torch.optim.SGD(model.parameters())
        sums = CanonicalSums(model, optimizer, 4, SingleProcess())
        counts.append(grown(lambda sums=sums, model=model: _summed(sums, model["a"])))
    assert counts[0] == counts[1] and counts[0][1] <= 1, counts
    # An audit of 16 blocks copies them together.
    linear = torch.nn.Linear(1024, 1024).to(GPU)
    (ring,) = in_process_ring(1)
    auditor = Auditor(linear, ring, 1)
    auditor.begin(1)
    linear(torch.ones(1, 1024, device=GPU)).sum().backward()
    assert grown(lambda: auditor.reduced(1))[1] == 1
    auditor.close()


def check_buckets(folder: Path) -> None:
    """Gradients that are reduced together are on the device, too."""
    bucket = Bucket({"a": torch.nn.Parameter(torch.zeros(3, device=GPU))}, 1)
    assert bucket.flat.device == bucket.flat.grad.device == torch.zeros(1, device=GPU).device


def check_clock(folder: Path) -> None:
    """Phases are timed by events of the device, and add up to the time of the steps."""
    from hvdtrain.pulse import Pulse
    from hvdtrain.train.clock import PHASES, PhaseClock

    clock = PhaseClock(Pulse(), GPU)
    clock.restart(1)
    for phase in PHASES[1:]:
        torch.ones(1_000_000, device=GPU).sum()
        clock.enter(phase)
    clock.leave()
    seconds = clock.take()
    assert all(it > 0 for it in seconds[:3]) and sum(seconds) < 5, seconds
    assert clock.take() == [0.0] * len(PHASES)


def check_two_workers(folder: Path) -> None:
    """Runs of two workers, made by `together`, agree with one process and with the CPU."""
    two = folder.parent / "two"
    train(folder, "virtual", VIRTUAL, "cpu")
    check_same(two / "virtual", folder / "virtual")
    for name in ("plain", "sync", "compressed"):
        check_same(two / f"{name}-cuda", two / f"{name}-cpu")
    for name in ("virtual", "plain-cuda", "sync-cuda", "loop-cuda"):
        check_saved(two / name)
    check_same(two / "resumed", two / "plain-cuda")
    printed = hvdtrain("replay", two / "plain-cuda", "--trust-code")
    assert "4 steps agreed" in printed and REPLAYED not in printed, printed
    check_same(two / "loop-cuda", two / "loop-cpu")
    assert yaml.safe_load((two / "fitted" / "config.yaml").read_text())["grad_accum_steps"] == 2
    check_same(two / "fitted", two / "fitted-fixed")


def _summed(sums: CanonicalSums, parameter: torch.nn.Parameter) -> None:
    sums.begin(0)
    for share in range(2):
        sums.begin_pass(share == 1)
        parameter.grad = torch.ones_like(parameter)
        if share == 0:
            sums.next_share()
    sums.finish()


CHECKS = {
    name.removeprefix("check_"): it
    for name, it in [*vars(fitting).items(), *globals().items()]
    if name.startswith("check_") and not hasattr(running, name)
}
AFTERWARDS = ("two_workers",)  # once the runs of `together` are there


def main(place: Path, names: list[str], first: bool) -> int:
    """Run the checks; return the number of those that failed."""
    torch.set_num_threads(1)
    let_train()
    errors: dict[str, str | None] = {}
    for name in names or [it for it in CHECKS if it not in AFTERWARDS]:
        folder = place / name
        folder.mkdir(parents=True)
        try:
            CHECKS[name](folder)
            errors[name] = None
        except (Exception, SystemExit):
            errors[name] = traceback.format_exc()
            if first:
                break
    file = "afterwards" if names else "alone"
    (place / f"{file}.json").write_text(json.dumps(errors))
    return sum(error is not None for error in errors.values())


if __name__ == "__main__":
    rest = [it for it in sys.argv[1:] if it != "--first"]
    sys.exit(main(Path(rest[0]).resolve(), rest[1:], first="--first" in sys.argv))
