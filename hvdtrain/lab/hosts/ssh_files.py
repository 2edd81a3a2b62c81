"""Keys and configuration of SSH between such hosts; those of the machine are not used."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdtrain.lab.hosts.node import run_tool

# PYTHONPATH: a login on a host finds this package, as if it were installed there.
SSHD_CONFIG = """\
Port {port}
ListenAddress 0.0.0.0
ListenAddress ::
HostKey "{folder}/host_key"
PidFile none
AuthorizedKeysFile .ssh/authorized_keys
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
PrintMotd no
SetEnv "PYTHONPATH={python_path}"
"""


def make_key(path: Path) -> str:
    """Write a new key pair without a passphrase, and return the public key."""
    run_tool(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", path.name, "-f", str(path)])
    kind, key = path.with_suffix(".pub").read_text().split()[:2]
    return f"{kind} {key}"


def write_ssh_files(
    folders: Mapping[str, Path], names: Mapping[str, Sequence[str]], port: int, python_path: Path
) -> None:
    """Write `ssh/` (the host's ~/.ssh), `host_key` and `sshd_config` into the folder of each host.

    All hosts share one key pair. Their known_hosts holds the host keys of all, under all `names`.
    """
    first = next(iter(folders.values()))
    public = make_key(first.parent / "id_ed25519")
    known_hosts = []
    for host, folder in folders.items():
        key = make_key(folder / "host_key")
        patterns = [name if port == 22 else f"[{name}]:{port}" for name in names[host]]
        known_hosts.append(f"{','.join(patterns)} {key}\n")
        text = SSHD_CONFIG.format(port=port, folder=folder, python_path=python_path)
        (folder / "sshd_config").write_text(text)
    for folder in folders.values():
        ssh_folder = folder / "ssh"
        ssh_folder.mkdir(mode=0o700)
        for name in ("id_ed25519", "id_ed25519.pub"):
            shutil.copy2(first.parent / name, ssh_folder / name)
        (ssh_folder / "authorized_keys").write_text(f"{public}\n")
        (ssh_folder / "known_hosts").write_text("".join(known_hosts))
