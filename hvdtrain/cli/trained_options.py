"""The flags of `hvdtrain evaluate` and `hvdtrain predict`."""

from __future__ import annotations

import argparse

from hvdtrain.cli.options import train_options

VALUES = ("data", "data_dir", "image_size", "valid_split", "workers", "device")
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
    parser.add_argument("--json", metavar="FILE", help="write all figures")


def add_predict_flags(parser: argparse.ArgumentParser) -> None:
    """What to look at, and how much to tell."""
    parser.add_argument("source", metavar="RUN_OR_CHECKPOINT")
    parser.add_argument(
        "images", nargs="+", metavar="IMAGE", help="files, or folders, with all below them"
    )
    parser.add_argument("--top", type=int, default=3, help="classes to tell (default: 3)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"))
    parser.add_argument(
        "--skip-bad-samples",
        action="store_true",
        help="images that cannot be read are no failure, as long as one can",
    )
    parser.add_argument("--json", metavar="FILE", help="write the scores of all classes")
