"""Files below an address in object storage, by fsspec; every error is a StorageFailure."""

import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hvdtrain.config.fields import OUTPUT, SCHEME, is_output
from hvdtrain.errors import HvdtrainError, UsageError

SECRET = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL|CONNECTION", re.IGNORECASE)
SHORTEST_SECRET = 8


class StorageFailure(HvdtrainError):
    """A read or write of the storage that failed."""


class StoredFiles:
    """The files below an address."""

    def __init__(self, output: str) -> None:
        """Load the library for the address. Raises UsageError."""
        if not is_output(output):
            raise UsageError(f"the address of a run{OUTPUT.problem}")
        self.output, protocol = output.rstrip("/"), output.partition(SCHEME)[0]
        local = {"auto_mkdir": True} if protocol in ("file", "local") else {}
        try:
            import fsspec

            if protocol == "memory":
                raise ValueError("memory is not shared between processes")
            self._fs, self._root = fsspec.url_to_fs(self.output, **local)
        except ImportError as error:
            raise UsageError(
                f"{output}: {protocol}:// needs a library: {error}. For s3:// run `pip "
                "install 'hvdtrain[storage]'`; for gs:// install gcsfs as well, for az:// adlfs"
            ) from error
        except Exception as error:  # of the address, or of what the library reads at its start
            raise UsageError(f"{output}: cannot be used: {_reason(error)}") from error

    def probe(self) -> None:
        """Write, read, list and remove a small object. Raises UsageError if that fails."""
        path, content = f"{self._root}/.hvdtrain-{secrets.token_hex(8)}", secrets.token_bytes(16)
        try:
            with translated():
                self._fs.pipe_file(path, content)
                if self._fs.cat_file(path) != content:
                    raise StorageFailure("what was written is not what is read")
                self.names()
                self._fs.rm_file(path)
        except StorageFailure as error:
            raise UsageError(
                f"--output={self.output}: a trial to write, read, list and remove a small object "
                f"there failed: {error}. Is the bucket there, and may these credentials do all"
                " four?"
            ) from error

    def names(self) -> set[str]:
        """Return the names of all runs, complete or not. Raises StorageFailure."""
        with translated(), suppress(FileNotFoundError):
            self._fs.invalidate_cache()
            return {path.rstrip("/").rpartition("/")[2] for path in self._fs.ls(self._root, False)}
        return set()

    def _get(self, path: str, file: Path, beat: Callable[[], object]) -> None:
        """Download a file, if it is there. Raises StorageFailure."""
        from fsspec.callbacks import Callback

        heard = Callback(hooks={"beat": lambda size, value, **more: beat()})
        with translated(), suppress(FileNotFoundError):
            self._fs.get_file(f"{self._root}/{path}", str(file), callback=heard)

    def _read(self, path: str) -> bytes | None:
        with translated(), suppress(FileNotFoundError):
            content: bytes = self._fs.cat_file(f"{self._root}/{path}")
            return content
        return None

    def write(self, path: str, content: bytes) -> None:
        """Write a file below the address. Raises StorageFailure."""
        with translated():
            self._fs.pipe_file(f"{self._root}/{path}", content)

    def _remove(self, path: str) -> None:
        with translated(), suppress(FileNotFoundError):
            self._fs.rm_file(f"{self._root}/{path}")


@contextmanager
def translated() -> Iterator[None]:
    """Raise StorageFailure for any error of the storage's library."""
    try:
        yield
    except HvdtrainError:
        raise
    except Exception as error:  # of several libraries, with no base in common
        raise StorageFailure(_reason(error)) from error


def _reason(error: Exception) -> str:
    """Return the text of an error, without what is secret in the environment."""
    text = " ".join(str(error).split()) or type(error).__name__
    for name, value in os.environ.items():
        if SECRET.search(name) and len(value) >= SHORTEST_SECRET:
            text = text.replace(value, "***")
    return text
