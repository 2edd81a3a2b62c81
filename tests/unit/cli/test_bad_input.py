"""Bad input to `hvdtrain train`: reported in one paragraph, and nothing is left behind."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import hvdtrain.models  # noqa: F401  # before a test replaces the import of torchvision
from hvdtrain.cli import main
from hvdtrain.data import builtin
from tests.unit.bad_plugins import linear
from tests.unit.folders import make_class, make_folder

SMALL = ("--max-steps=2", "--global-batch-size=8", "--device=cpu", "--workers=0")
HERE = "tests.unit.bad_plugins"
GOOD_MODEL = f"--model={HERE}:linear"
GOOD_DATA = f"--data={HERE}:good"
LONGEST = 900  # characters: a paragraph, no list of everything
FOLDER = "--data=imagefolder:images"

Setup = Callable[[Path], object]


def case(name: str, flags: str, expected: str, code: int = 2, setup: Setup | None = None) -> Any:
    """`expected`: what must stand in the message, with | between parts. `setup`: is given the
    working directory.
    """
    return pytest.param(flags.split(), expected.split("|"), {code}, setup, id=name)


def data(name: str, expected: str, code: int = 2) -> Any:
    flags = f"--data={HERE}:{name} {GOOD_MODEL}"
    return case(f"data-{name}", flags, f"--data={HERE}:{name}: |{expected}", code)


def task(name: str, expected: str, code: int = 2) -> Any:
    """`code` 1: known once it has computed; it may be 2 where that is tried beforehand."""
    flag = f"--task={HERE}:{name}"
    codes = {1, 2} if code == 1 else {2}
    named = [] if code == 1 else [f"{flag}: "]
    return pytest.param([flag], [*named, *expected.split("|")], codes, None, id=f"task-{name}")


def forward(name: str, expected: str) -> Any:
    """A model that cannot take its data; where this is found, and hence the code, is open."""
    flags = [f"--model={HERE}:{name}", GOOD_DATA]
    return pytest.param(flags, expected.split("|"), {1, 2}, None, id=f"model-{name}")


def folder(name: str, flags: str, expected: str, setup: Setup, code: int = 2) -> Any:
    return case(
        f"folder-{name}", f"{FOLDER} --image-size=12 --model=mlp {flags}", expected, code, setup
    )


def weights(name: str, expected: str, setup: Setup) -> Any:
    flags = f"--pretrained=w.pt {GOOD_MODEL} {GOOD_DATA}"
    return case(f"pretrained-{name}", flags, f"--pretrained=w.pt: |{expected}", 2, setup)


def write(name: str, text: str) -> Setup:
    return lambda here: (here / name).write_text(text)


def images(change: Setup) -> Setup:
    """A good folder `images`, and then one thing that spoils it."""
    return lambda here: (make_folder(here / "images"), change(here / "images"))


def save(**changes: torch.Tensor | None) -> Setup:
    """w.pt with the weights of `linear`, some left out (None), some others."""
    state = {f"1.{name}": tensor for name, tensor in linear(None, 3)[1].state_dict().items()}
    state |= {name.replace("_", "."): tensor for name, tensor in changes.items()}
    kept = {name: tensor for name, tensor in state.items() if tensor is not None}
    return lambda here: torch.save(kept, here / "w.pt")


class Code:
    """Pickled, it would be run when it is read."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("run-by-pickle",)


def truncate(here: Path) -> None:
    save()(here)
    (here / "w.pt").write_bytes((here / "w.pt").read_bytes()[:500])


def break_all(images: Path, but: tuple[str, ...] = ()) -> None:
    for file in images.rglob("*.png"):
        if file.name not in but:
            file.write_bytes(b"broken")


CASES = [
    # plug-ins that cannot be had
    case("path", "--data=a.b.c:d", "--data=a.b.c:d: |No module named 'a'"),
    case("no-attribute", f"--data={HERE}:nowhere", f"--data={HERE}:nowhere: |has no 'nowhere'"),
    case("data-unknown", "--data=digit", "--data=digit: |unknown; choose from digits"),
    case("opt-unknown", f"--opt=sdg {GOOD_MODEL} {GOOD_DATA}", "--opt=sdg: |did you mean sgd?"),
    case("not-callable", f"--model={HERE}:NOT_CALLABLE", "NOT_CALLABLE: |type int"),
    case(
        *(
            "import-raises",
            "--data=plug_a:make",
            "--data=plug_a:make: |plug_a.py:2: |ValueError: no",
        ),
        setup=write("plug_a.py", "\nraise ValueError('no luck')\n"),
    ),
    case(
        *("syntax", "--task=plug_b:Make", "--task=plug_b:Make: |plug_b.py:1: |SyntaxError"),
        setup=write("plug_b.py", "def make(:\n"),
    ),
    case(
        *(
            "import-lacks",
            "--model=plug_c:make",
            "--model=plug_c:make: |plug_c.py:1: |'absent_one'",
        ),
        setup=write("plug_c.py", "import absent_one\n"),
    ),
    # data of a user
    data("raises", "bad_plugins.py:|OSError: the disk of the lab is away"),
    data("leaves", "SystemExit: 3"),
    data("needs_arguments", "bad_plugins.py:|missing 1 required positional argument: 'folder'"),
    data("number", "returned int|hvdtrain.Dataset"),
    data("no_split", "its train split, a int, has no __len__ and no batch"),
    data("other_shape", "[40, 1, 4, 4]|[3, 4, 4]"),
    data("flat_shape", "shape must be (channels, height, width), and is (16,)"),
    data("one_class", "classes must be a whole number of 2 or more, and is 1"),
    data("few_names", "names must be 3, one for each class, and are 2"),
    data("no_format", "must be an hvdtrain.ImageFormat of 1 or 3 channels, and is RGB"),
    data("other_format", "its images have 3 channels, its shape is (1, 4, 4)"),
    data("empty_train", "its train split has no samples"),
    data("empty_valid", "its valid split has no samples"),
    data("labels_beyond", "labels must be int64 from 0 to 2|from 0 to 3"),
    data("negative_labels", "from -1 to 1"),
    data("float_labels", "labels must be int64|torch.float32"),
    data("one_hot_labels", "[40, 3]"),
    data("list_labels", "expected tensors|'list'"),
    data("fewer_labels", "[39]|[40, 1, 4, 4]"),
    data("nan_pixels", "train split: inputs must be finite"),
    data("byte_pixels", "floating-point"),
    data("late_bad_label", "sample 7: class 2: out of range for 2 classes", code=1),
    # models
    case("model-near", "--model=resnet81", "--model=resnet81: unknown|did you mean|resnet18"),
    case(
        "model-no_module", f"--model={HERE}:no_module", "no_module: returned str, expected torch.nn"
    ),
    case("model-empty", f"--model={HERE}:nothing_to_train", "nothing_to_train: has no parameter"),
    case("model-raises", f"--model={HERE}:model_raises", "model_raises: |no such layer"),
    case(
        *(
            "model-large-images",
            "--model=squeezenet1_1",
            "too small|8x8|--image-size|resnet18-small",
        ),
    ),
    forward("for_other_shape", "mat1 and mat2 shapes cannot be multiplied|x16 and 999x3"),
    forward("fewer_classes", "2]|3]"),
    case(
        *("model-vit", f"{FOLDER} --model=vit_b_16 --image-size=50", "vit_b_16|50"),
        setup=images(lambda _: None),
    ),
    case(
        "batch-norm",
        f"--model={HERE}:with_batch_norm {GOOD_DATA} --global-batch-size=1",
        "--global-batch-size=1: |normalises over the batch|--sync-bn",
    ),
    case(
        "batch-norm-accumulated",
        f"--model={HERE}:with_batch_norm {GOOD_DATA} --grad-accum-steps=8",
        "--global-batch-size=8: |--grad-accum-steps=8",
    ),
    # tasks
    case("task-form", "--task=nonsense", "--task=nonsense: expected package.module:callable"),
    task("NotATask", "returned NotATask, expected hvdtrain.Task"),
    task("NoMethods", "NoMethods does not define build_data, build_model, loss"),
    task("NoModel", "NoModel does not define build_model"),
    task("NoData", "build_data returned list, expected hvdtrain.Splits"),
    task("NoBatch", "its train split, a list, has no batch"),
    task("Raising", "bad_plugins.py:|OSError: the disk of the lab is away"),
    task("NoNetwork", "returned int, expected torch.nn.Module"),
    task("NoSums", "NoSums.|returned Tensor, expected hvdtrain.Sums", code=1),
    task("Detached", "Detached.|the loss does not depend on any parameter", code=1),
    task("Unreduced", "Unreduced.|the loss must be a scalar|is [5]", code=1),
    task("OneElement", "OneElement.|the loss must be a scalar|is [1]", code=1),
    task("Number", "Number.|the loss must be a scalar|is a float", code=1),
    task("Miscounting", "Miscounting.|a batch of |was counted as 1", code=1),
    task("OtherMetrics", "metrics ['left'], expected ['right']", code=1),
    task("PlainMetrics", "right must be a tensor of shape [], not a int", code=1),
    task("LongMetrics", "right must be a tensor of shape [], not [2]", code=1),
    # folders of images
    case("folder-missing", "--data=imagefolder:absent", "absent is not a folder"),
    case("folder-nameless", "--data=imagefolder:", "--data=imagefolder:: |no train/ and valid/"),
    case(
        *("folder-a-file", "--data=imagefolder:pictures", "pictures is not a folder"),
        setup=write("pictures", ""),
    ),
    folder("empty", "", "images has no train/ and valid/", lambda at: (at / "images").mkdir()),
    folder(
        *("no-valid", "", "images has train/, but no valid/"),
        images(lambda at: (at / "valid").rename(at.with_name("away"))),
    ),
    folder(
        *("classes", "", "for the same classes|first: ['emu']|second: []"),
        images(lambda at: make_class(at / "train" / "emu", 1)),
    ),
    folder(
        *("empty-class", "", "train/emu has no images|valid/emu has no images"),
        images(lambda at: [(at / part / "emu").mkdir() for part in ("train", "valid")]),
    ),
    folder("twice", "--valid-split=0.2", "--valid-split=0.2: |already", images(lambda at: None)),
    folder(
        *("one-class", "--valid-split=0.2", "has 1 folder of classes (cat)"),
        lambda at: make_class(at / "images" / "cat", 9),
    ),
    folder(
        *("no-valid-images", "--valid-split=0.01", "--valid-split=0.01: of 4 images in images"),
        lambda at: [make_class(at / "images" / name, 2) for name in ("cat", "dog")],
    ),
    folder(
        *(
            "corrupt",
            "",
            "images/train/cat/003.png cannot be read as an image: it is damaged|--skip-bad-samples",
        ),
        images(lambda at: (at / "train" / "cat" / "003.png").write_bytes(b"broken")),
        code=1,
    ),
    folder(
        *("padding", "--crop-padding=4", "--crop-padding=4: |--crop-scale"),
        images(lambda _: None),
    ),
    case("crop-scale", "--crop-scale=0.5", "--crop-scale=0.5: |--data=digits"),
    case("skip", "--skip-bad-samples", "--skip-bad-samples=True: |--data=digits"),
    case(
        *("valid-split-0", "--valid-split=0", "--valid-split=0.0: must be above 0"),
    ),
    # data by name
    case("data-near", "--data=imagenet", "--data=imagenet: unknown; choose from digits"),
    case("synthetic", "--data=synthetic:28x28", "--data=synthetic:28x28: expected synthetic:"),
    case("cifar10", "--data=cifar10", "--data=cifar10: |unreachable|batches.meta|--data-dir"),
    case("num-classes", "--num-classes=9", "--num-classes=9: digits has 10 classes"),
    case("num-classes-0", "--num-classes=0", "--num-classes=0: must be above 0"),
    case("batch", "--global-batch-size=2000", "--global-batch-size=2000: digits has only 1,433 s"),
    case(
        "micro-batch-cpu",
        "--micro-batch=auto --device=cpu",
        "--micro-batch=auto: the run computes on the CPU|--grad-accum-steps",
    ),
    case("micro-batch-8", "--micro-batch=8", "--micro-batch=8: must be auto|--grad-accum-steps"),
    case(
        "micro-batch-balanced",
        "--micro-batch=auto --rank-weights=auto",
        "--micro-batch=auto and --rank-weights=auto: each is measured|give weights",
    ),
    case("rank-weights", "--rank-weights=1,2", "--rank-weights=1,2: |1 worker"),
    # weights
    case("pretrained-missing", "--pretrained=absent.pt", "--pretrained=absent.pt: no such file"),
    weights("code", "holds pickled code|mkdir", lambda at: torch.save({"a": Code()}, at / "w.pt")),
    weights("truncated", "damaged, or not a file of torch.save", truncate),
    weights("text", "damaged, or not a file of torch.save", write("w.pt", "weights")),
    weights("lacking", "1 missing in the file (1.bias)", save(**{"1_bias": None})),
    weights("more", "1 not in the model (2.more)", save(**{"2_more": torch.zeros(2)})),
    weights("shapes", "1.weight 3x17 and 3x16 here", save(**{"1_weight": torch.zeros(3, 17)})),
    weights("nan", "1 not finite (1.bias)", save(**{"1_bias": torch.full((3,), torch.nan)})),
    weights("list", "no tensors by name", lambda at: torch.save([1, 2], at / "w.pt")),
    case(
        "pretrained-other",
        f"--pretrained=w.safetensors {GOOD_MODEL} {GOOD_DATA}",
        "--pretrained=w.safetensors: weights of another architecture: |missing|not in the model",
        setup=lambda at: save_file({"conv.weight": torch.zeros(3, 3)}, at / "w.safetensors"),
    ),
    # training itself
    case("lr", f"--lr=1e38 {GOOD_DATA} {GOOD_MODEL} --sched=constant", "not finite|--lr", code=1),
    folder(
        *("all-valid-corrupt", "--skip-bad-samples", "none of the samples to validate with"),
        images(lambda at: break_all(at / "valid")),
        code=1,
    ),
    folder(  # the first two are tried beforehand, and not among those of the only step
        "all-train-corrupt",
        "--skip-bad-samples --max-steps=1 --global-batch-size=2",
        "none of the samples to train on",
        images(lambda at: break_all(at / "train", but=("000.png", "001.png"))),
        code=1,
    ),
    case("optimizer", "--opt=adamx", "--opt=adamx: "),
    case("flag", "--learning-rate=1", "--learning-rate"),
    case("run-name", "--experiment=a/b", "--experiment='a/b': must be"),
]


@pytest.fixture
def quiet_machine(tmp_path: Path, monkeypatch) -> Iterator[None]:
    """An empty working directory, no network, and afterwards the modules as before."""

    def unreachable() -> Any:
        raise OSError("Network is unreachable")

    monkeypatch.setattr(builtin, "import_torchvision", unreachable)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    modules, threads = set(sys.modules), torch.get_num_threads()
    yield
    for name in set(sys.modules) - modules:
        if name.startswith("plug_"):
            del sys.modules[name]
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("quiet_machine")
@pytest.mark.parametrize(("flags", "expected", "codes", "setup"), CASES)
def test_bad_input_is_reported(flags, expected, codes, setup, tmp_path, monkeypatch, capfd) -> None:
    """Fails when bad input is trained on, ends in a traceback or in another exit code, when the
    message does not name the flag or file and what is wrong with it, or when anything is left
    behind of a run that never started.
    """
    if setup:
        setup(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(sys, "argv", ["hvdtrain", "train", *SMALL, *flags])
    code = main()
    reported = re.sub(r"(?m)^skipped: .*\n", "", capfd.readouterr().err)
    assert code in codes, reported
    assert reported.startswith("hvdtrain: error: ") and "Traceback" not in reported
    missing = [text for text in expected if text not in reported]
    assert not missing, reported
    assert len(reported) < LONGEST and not re.search(r"\n\s*\n", reported.strip())
    if code == 2:
        kept = ("data", "__pycache__")  # where files are fetched to, and what Python itself writes
        after = [path for path in sorted(tmp_path.rglob("*")) if not {*kept} & {*path.parts}]
        assert after == before


@pytest.mark.usefixtures("quiet_machine")
@pytest.mark.parametrize(
    "flags",
    [[GOOD_DATA, GOOD_MODEL], [f"--data={HERE}:doubles", GOOD_MODEL], [f"--task={HERE}:Good"]],
)
def test_what_the_bad_ones_differ_from_is_good(flags, tmp_path, monkeypatch, capfd) -> None:
    """Fails when the cases above fail for another reason than theirs."""
    monkeypatch.setattr(sys, "argv", ["hvdtrain", "train", *SMALL, *flags])
    assert main() == 0, capfd.readouterr().err
    assert (tmp_path / "runs").is_dir()
