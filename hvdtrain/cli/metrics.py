"""The flags of `hvdtrain launch` that serve metrics and a status page."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvdtrain.cli.flags import Flag, Section
from hvdtrain.config.fields import Check
from hvdtrain.errors import UsageError, attempt, every_problem
from hvdtrain.launcher.addresses import LOOPBACK
from hvdtrain.launcher.metrics import Endpoint

SHORTEST_TOKEN = 16
LARGEST_PORT = 65535
LIBRARY = "prometheus_client"
A_TOKEN = "python -c 'import secrets; print(secrets.token_urlsafe())'"

METRICS_FLAGS = Section(
    "metrics and status page",
    (
        Flag(
            "--metrics-port",
            "serve OpenMetrics (/metrics) and a status page (/) on this port; 0: any free one",
            int,
            metavar="PORT",
            check=Check(
                lambda port: 0 <= port <= LARGEST_PORT,
                f"={{}}: must be a port from 1 to {LARGEST_PORT}, or 0 for any free one",
            ),
        ),
        Flag(
            "--metrics-host",
            f"serve them on this address (default: {LOOPBACK}); others than loopback need a token",
            metavar="ADDR",
        ),
        Flag(
            "--metrics-token-file",
            "demand the token in FILE, as a bearer token, a password or ?token=",
            Path,
            metavar="FILE",
        ),
    ),
)


def read_endpoint(arguments: dict[str, Any], problems: list[str]) -> Endpoint | None:
    """Return where to serve metrics, if anywhere; add the problems of METRICS_FLAGS."""
    names = ("metrics_port", "metrics_host", "metrics_token_file")
    port, host, path = (arguments[name] for name in names)
    if port is None:
        problems += every_problem(
            (host is not None, "--metrics-host: applies to metrics; add --metrics-port PORT"),
            (path is not None, "--metrics-token-file: applies to metrics; add --metrics-port PORT"),
        )
        return None
    if importlib.util.find_spec(LIBRARY) is None:
        problems.append(
            f"--metrics-port={port}: {LIBRARY} is not installed: pip install 'hvdtrain[metrics]'"
        )
    source = f"--metrics-token-file={path}"
    token = attempt(problems, lambda: read_token(path.read_text, source)) if path else None
    endpoint = Endpoint(host or LOOPBACK, port, token)
    if not 0 <= port <= LARGEST_PORT:
        return None
    if attempt(problems, lambda: endpoint.is_loopback) is False and not path:
        problems.append(
            f"--metrics-host={host}: others could read the state and the output of the job; add "
            f"--metrics-token-file FILE (a token: {A_TOKEN})"
        )
    return endpoint


def read_token(read: Callable[[str], str], source: str) -> str:
    """Return the token that `read` returns, given an encoding. Raises UsageError for another text.

    `source`: the flag, with its file, or the variable.
    """
    try:
        token = read("ascii").strip()
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "holds other characters than ASCII"
        raise UsageError(f"{source}: {reason}") from error
    if len(token) < SHORTEST_TOKEN or not token.isprintable() or " " in token:
        raise UsageError(
            f"{source}: must hold one word of {SHORTEST_TOKEN} characters or more, such as that of "
            f"{A_TOKEN}"
        )
    return token
