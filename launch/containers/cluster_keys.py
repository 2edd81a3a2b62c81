"""SSH keys of a cluster of containers: `python cluster_keys.py [FOLDER]`.

They are generated when the cluster starts, in a volume that its containers share and that is
removed with it; no image holds a key. All containers have the same host key, so known_hosts lists
it for any name, and ssh refuses a host with another key.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from hvdtrain.errors import HvdtrainError, PreflightError, UsageError
from hvdtrain.log import complain, say

PORT = 2222  # docker/sshd_config
USER_KEY, HOST_KEY = "id_ed25519", "host_ed25519"


def main() -> int:
    """Run the command line; return the exit code."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path.home() / ".ssh"
    try:
        made = make_keys(folder)
    except HvdtrainError as error:
        complain(f"cluster: error: {error}")
        return error.exit_code
    say(f"cluster: {'made' if made else 'found'} the cluster's keys in {folder}")
    return 0


def make_keys(folder: Path) -> bool:
    """Create the files of ~/.ssh in `folder`; return False if they all exist already.

    Raises UsageError if only some exist, and PreflightError if they cannot be made.
    """
    names = (USER_KEY, HOST_KEY, "authorized_keys", "known_hosts", "config")
    present = [name for name in names if (folder / name).exists()]
    if len(present) == len(names):
        return False
    if present:
        held = f"{folder} holds {', '.join(present)}, but not all key files of a cluster"
        raise UsageError(f"{held}: give an empty folder")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".new-") as scratch:
            _write_files(Path(scratch))
            for path in sorted(Path(scratch).iterdir(), reverse=True):  # authorized_keys is last
                path.chmod(0o600)
                path.rename(folder / path.name)
    except OSError as error:
        raise PreflightError(
            f"the cluster's keys cannot be written to {folder}: {error.strerror or error}"
        ) from error
    return True


def _write_files(folder: Path) -> None:
    for name in (USER_KEY, HOST_KEY):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "hvdtrain", "-f", name]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise PreflightError(f"ssh-keygen failed: {(done.stderr or done.stdout).strip()}")
    (folder / "authorized_keys").write_text((folder / f"{USER_KEY}.pub").read_text())
    (folder / "known_hosts").write_text(f"* {(folder / f'{HOST_KEY}.pub').read_text()}")
    (folder / "config").write_text(f"Host *\n    Port {PORT}\n    StrictHostKeyChecking yes\n")


if __name__ == "__main__":
    sys.exit(main())
