"""Commands that any login shell of another host passes on unchanged; and, as a program, an ssh that
makes them so, for Open MPI (`OMPI_MCA_plm_rsh_agent`).

sshd gives a command to the login shell, which may be csh, fish or rbash. None of them changes a
word in single quotes without a quote, a backslash or an exclamation mark, and each finds `env` on
its PATH, where rbash takes no path of a program. A part of Horovod (`horovod/runner/util`).
"""

import base64
import os
import re
import shlex
import sys
from pathlib import Path

SSH_ENDED = "ssh to "  # what horovodrun's line on a failed connection begins with
WITH_VALUE = "BbcDEeFIiJLlmOoPpQRSWw"  # options of ssh that take a value


def for_any_shell(command: str) -> str:
    """Return a command that runs `command` by `sh`, given to whatever shell."""
    encoded = base64.b64encode(command.encode(errors="surrogateescape")).decode()
    return f"""env sh -c 'eval "$(echo {encoded} | base64 -d)"'"""


def ssh_argv(arguments: list[str]) -> list[str]:
    """Return the command line of ssh for `[options] host command...`."""
    at = 0
    while at < len(arguments) and arguments[at].startswith("-"):
        option = arguments[at]
        at += 2 if option[-1] in WITH_VALUE and len(option) == 2 else 1
    before, command = arguments[: at + 1], arguments[at + 1 :]
    command[:1] = map(with_quoted_folders, command[:1])
    return ["ssh", *before, *([for_any_shell(" ".join(command))] if command else [])]


def with_quoted_folders(command: str) -> str:
    """Return a command of Open MPI with its folder, which it does not quote, as the shell needs it.

    The folder is that of OPAL_PREFIX, or that of this Python's environment.
    """
    folders = {str(Path(sys.executable).parents[1]), os.environ.get("OPAL_PREFIX")}
    longest_first = sorted(filter(None, folders), key=len, reverse=True)
    pattern = "|".join(map(re.escape, longest_first))
    return re.sub(pattern, lambda folder: shlex.quote(folder[0]), command)


if __name__ == "__main__":
    try:
        os.execvp("ssh", ssh_argv(sys.argv[1:]))
    except OSError as error:
        sys.exit(f"ssh: {error.strerror}")
