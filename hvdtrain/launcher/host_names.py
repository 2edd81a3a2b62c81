"""Which names of hosts and users the launcher takes.

They end up on command lines, in ssh's configuration and in a remote shell, so that only
characters without a meaning there are let in; nothing is quoted or mended silently.
"""

from __future__ import annotations

import ipaddress
import re

LONGEST_NAME = 253  # of a host, by RFC 1035
LONGEST_LABEL = 63  # between its dots
LONGEST_USER = 64
LONGEST_SHOWN = 60
RESERVED = "hvdtrain-host-"  # aliases in the generated configuration of ssh

NAME_CHARACTERS = re.compile("[A-Za-z0-9._-]+")
USER_CHARACTERS = re.compile("[A-Za-z0-9_][A-Za-z0-9._-]*")
FOUR_NUMBERS = re.compile(r"[0-9]+(\.[0-9]+){3}")


def shown(text: str) -> str:
    """Text from a user as it stands in a message: in quotes, ASCII only, not too long."""
    return ascii(text if len(text) <= LONGEST_SHOWN else text[:LONGEST_SHOWN] + "...")


def name_problem(name: str) -> str | None:
    """What is wrong with a host's name or address; None when it is good."""
    if not name:
        return "the name of a host is missing"
    if len(name) > LONGEST_NAME:
        what: str | None = f"a host's name has at most {LONGEST_NAME} characters, not {len(name)}"
    else:
        what = _wrong_address(name) if ":" in name else _wrong_name(name)
    return f"{shown(name)}: {what}" if what else None


def user_problem(user: str) -> str | None:
    """What is wrong with a user's name; None when it is good."""
    if not user:
        return "the user's name before @ is missing"
    if len(user) > LONGEST_USER:
        return f"{shown(user)}: a user's name has at most {LONGEST_USER} characters"
    if not USER_CHARACTERS.fullmatch(user):
        return (
            f"{shown(user)}: a user's name is made of letters, digits, '.', '-' and '_', and does "
            "not begin with '.' or '-'; give ssh any other in ~/.ssh/config (`User`)"
        )
    return None


def name_key(name: str) -> str:
    """The same for two ways of writing one name or address."""
    if ":" in name:
        return str(ipaddress.IPv6Address(name))
    return name.lower().rstrip(".")


def _wrong_name(name: str) -> str | None:
    if not name.isascii():
        return "a host's name is ASCII; write an international name in its xn-- form"
    if name.startswith("-"):
        return "a host's name does not begin with '-' (ssh would take it for an option)"
    if not NAME_CHARACTERS.fullmatch(name):
        bad = sorted(set(re.sub(NAME_CHARACTERS, "", name)))
        return (
            f"{' '.join(ascii(c) for c in bad[:4])} cannot stand in a host's name, which is made "
            "of letters, digits, '.', '-' and '_'"
        )
    labels = name.removesuffix(".").split(".")
    if not all(0 < len(label) <= LONGEST_LABEL for label in labels):
        return f"between the dots of a host's name stand 1 to {LONGEST_LABEL} characters"
    if name.lower().startswith(RESERVED):
        return f"names that begin with {RESERVED} are the launcher's own"
    if name.isdigit():
        return "a number is no host's name (slots are written NAME:N or NAME slots=N)"
    return _wrong_address(name) if FOUR_NUMBERS.fullmatch(name) else None


def _wrong_address(text: str) -> str | None:
    """Of an IPv4 address, or of an IPv6 address with or without a zone (%eth0)."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        if ":" not in text:
            return "not an IPv4 address"
        return "not an IPv6 address (with slots, it is written in brackets: [fe80::1]:2)"
    if address.is_unspecified or address.is_multicast:
        return "this address is not that of one host"
    zone = text.partition("%")[2]
    if "%" in text and not NAME_CHARACTERS.fullmatch(zone):
        return "after % stands the name of a network interface"
    return None
