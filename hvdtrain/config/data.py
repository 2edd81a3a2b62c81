"""Configuration of the data set."""

from dataclasses import dataclass

from hvdtrain.config.fields import (
    NOT_EMPTY,
    NOT_NEGATIVE,
    POSITIVE,
    Check,
    FlagGroup,
    flag,
    free_flag,
)


@dataclass(frozen=True)
class DataConfig(FlagGroup):
    """The data set, and how its samples are placed, read and augmented."""

    data: str = flag(
        "digits",
        "train on digits, fashion-mnist, cifar10, imagefolder:DIR (train/CLASS/*.jpg, "
        "valid/CLASS/*.jpg), synthetic:SHAPE (synthetic:1x28x28), or package.module:callable",
        NOT_EMPTY,
    )
    data_dir: str = free_flag("data", "read data set files from this folder")
    data_placement: str = flag(
        "shared",
        "place the samples; per-host: each host reads its own part ({host} in a path: its number)",
        ("shared", "per-host"),
    )
    valid_split: float | None = flag(
        None,
        "hold out this fraction of a folder without train/ and valid/ for validation",
        Check(lambda part: 0 < part < 1, "={}: must be above 0 and below 1"),
    )
    image_size: int | None = flag(
        None,
        "resize folder images to this many pixels square (default: 224, or by model)",
        POSITIVE,
    )
    hflip: float | None = flag(
        None,
        "mirror training images with this probability (default: by data set)",
        Check(lambda probability: 0 <= probability <= 1, "={}: must be from 0 to 1"),
    )
    crop_padding: int | None = flag(
        None,
        "pad training images by this many pixels, then crop the original size at random",
        NOT_NEGATIVE,
    )
    crop_scale: float | None = flag(
        None,
        "crop at least this fraction of a folder's training image at random (default: .08)",
        Check(lambda part: 0 < part <= 1, "={}: must be above 0, and at most 1"),
    )
    mixup: float = flag(
        0.0,
        "blend each training sample with another, by shares of Beta(ALPHA, ALPHA) (0: off)",
        NOT_NEGATIVE,
    )
    cutmix: float = flag(
        0.0,
        "paste a rectangle of another training sample, its area by Beta(ALPHA, ALPHA) (0: off)",
        NOT_NEGATIVE,
    )
    max_image_pixels: int | None = free_flag(
        None, "reject images of more than this many pixels (default: 89478485)", POSITIVE
    )
    workers: int | None = free_flag(
        None,
        "read ahead with this many processes per worker (default: its cores, at most 8; 0: none)",
        NOT_NEGATIVE,
        short="-j",
    )
    skip_bad_samples: bool = flag(False, "skip and count images that cannot be read")

    def problems(self) -> list[str]:
        return super().problems() + [
            f"{mix} and --skip-bad-samples: a sample cannot be mixed with one that is skipped: "
            "leave one of them out"
            for mix in self.mixes
            if self.skip_bad_samples
        ]

    @property
    def mixes(self) -> list[str]:
        """Return the flags that mix samples, as they are given."""
        alphas = {"--mixup": self.mixup, "--cutmix": self.cutmix}
        return [f"{name}={alpha}" for name, alpha in alphas.items() if alpha]
