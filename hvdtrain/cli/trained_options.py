"""The flags of `hvdtrain evaluate` and `hvdtrain predict`."""

from __future__ import annotations

import argparse

from hvdtrain.cli.options import train_options

CODE = ("model", "data", "task")  # what may name code, and is not run on a file's word alone
VALUES = (*CODE, "data_dir", "image_size", "max_image_pixels", "valid_split", "workers", "device")
OVERRIDES = (*VALUES, "skip_bad_samples")


def add_evaluate_flags(parser: argparse.ArgumentParser) -> None:
    """Those of `train` that may be others than in training."""
    parser.add_argument("source", metavar="RUN_OR_CHECKPOINT")
    options = train_options()
    for name in VALUES:
        option = options[name]
        flags = [f"--{name.replace('_', '-')}"] + ([option.short] if option.short else [])
        parser.add_argument(
            *flags,
            dest=name,
            type=option.type,
            choices=option.choices or None,
            help="as in train (default: as it was trained)",
        )
    parser.add_argument(
        "--skip-bad-samples",
        action="store_true",
        default=None,
        help="leave out, and count, images that cannot be read (default: as it was trained)",
    )
    _add_trust_code(parser)
    parser.add_argument("--json", metavar="FILE", help="write all figures")


def _add_trust_code(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trust-code",
        action="store_true",
        help="run the code that the checkpoint names, also where the command line does not name it",
    )


def add_predict_flags(parser: argparse.ArgumentParser) -> None:
    """What to look at, and how much to tell."""
    parser.add_argument("source", metavar="RUN_OR_CHECKPOINT")
    parser.add_argument(
        "images", nargs="+", metavar="IMAGE", help="files, or folders, with all below them"
    )
    parser.add_argument("--top", type=int, default=3, help="classes to tell (default: 3)")
    parser.add_argument("--model", help="as in train (default: as it was trained)")
    most = train_options()["max_image_pixels"]
    parser.add_argument("--max-image-pixels", type=most.type, help=most.help)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"))
    parser.add_argument(
        "--skip-bad-samples",
        action="store_true",
        help="images that cannot be read are no failure, as long as one can",
    )
    _add_trust_code(parser)
    parser.add_argument("--json", metavar="FILE", help="write the scores of all classes")
