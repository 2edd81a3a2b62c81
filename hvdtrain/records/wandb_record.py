"""The record of a run in Weights & Biases."""

from __future__ import annotations

import netrc
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hvdtrain.records.directory import RunDirectory

PROJECT = "hvdtrain"  # unless WANDB_PROJECT is set
EXIT_CODES = {"finished": 0}  # all others: 1, which marks the run as failed


class WandbRecord:
    """The record of a run, in its folder unless the user has logged in or set WANDB_MODE."""

    def __init__(self, directory: RunDirectory, options: dict[str, Any], recorded: int) -> None:
        """Import the library. `recorded`: the last step of an earlier start; only later count."""
        import wandb

        self._wandb = wandb
        self._directory, self._options, self._recorded = directory, options, recorded
        self._run: Any = None

    def open(self) -> str:
        run_id = self._directory.read_tracker("wandb").get("run_id")
        if not run_id:
            run_id, self._recorded = secrets.token_hex(4), 0
            self._directory.write_tracker("wandb", {"run_id": run_id})
        settings = self._wandb.setup().settings
        is_chosen = settings.mode != "online" or "WANDB_MODE" in os.environ
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=self._directory.path.name,
            id=run_id,
            resume="allow",
            dir=str(self._directory.path),
            mode=None if is_chosen or _has_login(settings) else "offline",
            reinit="create_new",  # a run of the user's own code stays apart
            # Output is in the run's folder already, and the console belongs to the progress.
            settings=self._wandb.Settings(silent=True, console="off"),
        )
        self._run.config.update(self._options, allow_val_change=True)
        if not self._run.offline:
            return str(self._run.url)
        return f"run {run_id}; to upload it: wandb sync {Path(self._run.dir).parent}"

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        if step > self._recorded:
            self._run.log(dict(values), step=step)

    def end(self, status: str, summary: dict[str, Any]) -> None:
        self._run.summary.update({"summary": summary})
        self._run.finish(exit_code=EXIT_CODES.get(status, 1))
        if self._wandb.run is None:  # otherwise it is the user's own, which goes on
            self._wandb.teardown()  # only this waits until wandb's own process has written the file


def _has_login(settings: Any) -> bool:
    """Return whether there is a key for the server, in the environment or in a netrc file."""
    if settings.api_key or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(settings.base_url).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
