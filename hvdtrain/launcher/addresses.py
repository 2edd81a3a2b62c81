"""Names and addresses of hosts, as users write them."""

import ipaddress
import re
import socket

from hvdtrain.errors import first_problem
from hvdtrain.network import interfaces

ANYWHERE = "0.0.0.0"  # listen on all interfaces
LOOPBACK = "127.0.0.1"


def resolves_here(name: str) -> bool:
    """Return whether horovodrun takes the name for this machine and starts workers without ssh."""
    try:
        return socket.gethostbyname(name) in {address for _, address in interfaces()}
    except (OSError, UnicodeError):
        return False


def addresses_of(name: str) -> list[str]:
    """Return the IPv4 addresses that a name stands for; empty where only ssh knows it."""
    try:
        addrinfos = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return sorted({str(address[0]) for *_, address in addrinfos})


def is_loopback(host: str) -> bool:
    """Return whether a name or address, as it is written, means this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


LONGEST_NAME = 253  # characters of a host name (RFC 1035)
LONGEST_LABEL = 63  # characters between its dots
LONGEST_USER = 64
LONGEST_SHOWN = 60
RESERVED = "hvdtrain-host-"  # prefix of aliases in the generated ssh configuration

NAME_CHARACTERS = re.compile("[A-Za-z0-9._-]+")
USER_CHARACTERS = re.compile("[A-Za-z0-9_][A-Za-z0-9._-]*")
FOUR_NUMBERS = re.compile(r"[0-9]+(\.[0-9]+){3}")


def shown(text: str) -> str:
    """Return a user's text for a message: quoted, ASCII only, cut at LONGEST_SHOWN characters."""
    return ascii(text if len(text) <= LONGEST_SHOWN else text[:LONGEST_SHOWN] + "...")


def name_problem(name: str) -> str | None:
    """Return the problem with a host's name or address; None if it is valid."""
    if not name:
        return "the name of a host is missing"
    problem = _wrong_name(name)
    return f"{shown(name)}: {problem}" if problem else None


def user_problem(user: str) -> str | None:
    """Return the problem with a user's name; None if it is valid."""
    return first_problem(
        (not user, "the user's name before @ is missing"),
        (
            len(user) > LONGEST_USER,
            f"{shown(user)}: a user's name has at most {LONGEST_USER} characters",
        ),
        (
            not USER_CHARACTERS.fullmatch(user),
            f"{shown(user)}: a user's name consists of letters, digits, '.', '-' and '_', and does "
            "not begin with '.' or '-'; give ssh any other in ~/.ssh/config (`User`)",
        ),
    )


def name_key(name: str) -> str:
    """Return a key that is equal for all spellings of one name or address."""
    if ":" in name:
        return str(ipaddress.IPv6Address(name))
    return name.lower().rstrip(".")


def _wrong_name(name: str) -> str | None:
    if len(name) > LONGEST_NAME:
        return f"a host's name has at most {LONGEST_NAME} characters, not {len(name)}"
    if ":" in name:
        return _wrong_address(name)
    bad = sorted(set(NAME_CHARACTERS.sub("", name)))
    labels = name.removesuffix(".").split(".")
    problem = first_problem(
        (
            not name.isascii(),
            "a host's name is ASCII; write an international name in its xn-- form",
        ),
        (
            name.startswith("-"),
            "a host's name does not begin with '-' (ssh would take it for an option)",
        ),
        (
            bad,
            f"{' '.join(ascii(c) for c in bad[:4])} not allowed in a host's name, which "
            "consists of letters, digits, '.', '-' and '_'",
        ),
        (
            not all(0 < len(label) <= LONGEST_LABEL for label in labels),
            f"a host's name has 1 to {LONGEST_LABEL} characters between the dots",
        ),
        (
            name.lower().startswith(RESERVED),
            f"names that begin with {RESERVED} are reserved for the launcher",
        ),
        (
            name.isdigit(),
            "a number is not a host's name (slots are written NAME:N or NAME slots=N)",
        ),
    )
    return problem or (_wrong_address(name) if FOUR_NUMBERS.fullmatch(name) else None)


def _wrong_address(text: str) -> str | None:
    """Return the problem with an IPv4 or IPv6 address, which may have a zone (%eth0)."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        if ":" not in text:
            return "not an IPv4 address"
        return "not an IPv6 address (with slots, it is written in brackets: [fe80::1]:2)"
    if address.is_unspecified or address.is_multicast:
        return "not the address of a single host"
    zone = text.partition("%")[2]
    if "%" in text and not NAME_CHARACTERS.fullmatch(zone):
        return "% must be followed by the name of a network interface"
    return None
