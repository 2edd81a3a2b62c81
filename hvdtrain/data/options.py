"""Reading options of a data set."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.errors import UsageError


@dataclass(frozen=True)
class ReadOptions:
    """Reading options chosen by the user; None: the default of the data set."""

    image_size: int | None = None
    valid_split: float | None = None
    hflip: float | None = None
    crop_padding: int | None = None
    crop_scale: float | None = None
    max_pixels: int | None = None
    readers: int = 0
    skip_bad: bool = False

    def refuse_those_of_folders(self, data: str) -> None:
        """Raise UsageError for options that do not apply to data sets in memory."""
        chosen = {
            "--crop-scale": self.crop_scale,
            "--max-image-pixels": self.max_pixels,
            "--valid-split": self.valid_split,
            "--skip-bad-samples": self.skip_bad or None,
        }
        problems = [
            f"{flag}={value}: has no meaning for --data={data}, only for image folders"
            for flag, value in chosen.items()
            if value is not None
        ]
        if problems:
            raise UsageError(*problems)
