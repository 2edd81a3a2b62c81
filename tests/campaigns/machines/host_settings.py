"""How this machine reaches package registries, for a fresh machine that has no settings yet.

Carried over: the Debian mirrors and the settings under Acquire of apt, the configuration of pip,
certificates, and the variables of proxies. Nothing else of this machine is, so folders of packages
that pip has been given here are left out: a fresh machine has none.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hvdtrain.errors import PreflightError
from tests.campaigns.machines.inside import NAME

ORIGIN = "Debian"
UBUNTU = ("jammy", "noble")  # releases of Ubuntu; all others are Debian's
UBUNTU_MIRROR = "http://archive.ubuntu.com/ubuntu"
LOCAL_CERTIFICATES = Path("/usr/local/share/ca-certificates")
PROXIES = ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy")
CERTIFICATES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO")
APT_OWN = "Acquire::IndexTargets"  # the kinds of index files, which each release describes itself
PIP_FILES = ("cert", "client-cert")  # settings whose files are carried over with them
PIP_OWN = ("cache-dir", "config-file")  # settings that the campaign makes itself
PIP_LINE = re.compile(r"(?P<section>[^.=]+)\.(?P<key>[^=]+)=(?P<value>'.*'|\".*\")")
NO_CONFIGURATION = 'Dir::Etc::parts "/nonexistent";\nDir::Etc::main "/dev/null";\n'


@dataclass(frozen=True)
class PipSettings:
    """Configuration of pip: the text of its file, variables, files, and what was left out."""

    file: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    certificates: tuple[Path, ...] = ()
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class HostSettings:
    """Settings of this machine that a fresh machine receives."""

    mirror: str
    security_mirror: str | None
    apt: str  # lines of apt.conf
    pip: PipSettings
    variables: Mapping[str, str]
    certificates: tuple[Path, ...]

    def mirror_of(self, release: str) -> str:
        return UBUNTU_MIRROR if release in UBUNTU else self.mirror

    def sources(self, release: str) -> str:
        """Return the sources.list of a release."""
        if release in UBUNTU:
            suites = (release, f"{release}-updates", f"{release}-security")
            return "".join(f"deb {UBUNTU_MIRROR} {suite} main universe\n" for suite in suites)
        lines = [f"deb {self.mirror} {release} main\n"]
        if release != "sid":
            lines.append(f"deb {self.mirror} {release}-updates main\n")
            if self.security_mirror:
                lines.append(f"deb {self.security_mirror} {release}-security main\n")
        return "".join(lines)

    def write(self, root: Path, release: str) -> None:
        """Write the settings into the tree of a fresh machine."""
        texts = {
            "etc/apt/sources.list": self.sources(release),
            "etc/apt/apt.conf.d/99host": self.apt,
            "etc/pip.conf": self.pip.file,
        }
        texts["etc/resolv.conf"] = Path("/etc/resolv.conf").read_text()
        texts["etc/hosts"] = f"127.0.1.1 {NAME}\n{Path('/etc/hosts').read_text()}"
        for name, text in texts.items():
            _replace(root / name, text.encode())
        self.write_certificates(root)

    def write_certificates(self, root: Path) -> None:
        """Write the certificates into a tree, also where its own package has written others."""
        for path in self.certificates:
            _replace(root / path.relative_to("/"), path.read_bytes())


def host_settings(mirror: str | None = None) -> HostSettings:
    """Return the settings of this machine; `mirror` replaces that of its apt.

    Raises PreflightError.
    """
    found, security = debian_mirrors(_output("apt-get", "indextargets", "--format", _TARGET))
    if not (mirror or found):
        raise PreflightError(
            "apt on this machine has no mirror of Debian, or apt-get update did not run: "
            "name one with --mirror URL"
        )
    names = (*PROXIES, *(name.upper() for name in PROXIES), *CERTIFICATES)
    variables = {name: os.environ[name] for name in names if os.environ.get(name)}
    pip = pip_settings(_output(sys.executable, "-m", "pip", "config", "list"))
    files = {Path(variables[name]) for name in CERTIFICATES if name in variables}
    files |= {*pip.certificates, *LOCAL_CERTIFICATES.rglob("*.crt")}
    return HostSettings(
        mirror=mirror or found or "",
        security_mirror=security,
        apt=_apt_settings(),
        pip=pip,
        variables=variables | dict(pip.variables),
        certificates=tuple(sorted(path for path in files if path.is_file())),
    )


_TARGET = "$(REPO_URI) $(RELEASE) $(COMPONENT) $(ORIGIN)"


def debian_mirrors(targets: str) -> tuple[str | None, str | None]:
    """Return the mirrors of Debian and of its security updates among the sources of apt."""
    main, security = None, None
    for line in targets.splitlines():
        place, release, component, origin = (*line.split(), *[""] * 4)[:4]
        if (component, origin) != ("main", ORIGIN):
            continue
        if release.endswith("-security"):
            security = security or place
        elif "-" not in release:
            main = main or place
    return main, security


def _apt_settings() -> str:
    """Return the settings of apt under Acquire that are not those of an apt without settings."""
    with tempfile.NamedTemporaryFile("w", suffix=".conf") as file:
        file.write(NO_CONFIGURATION)
        file.flush()
        defaults = _output("apt-config", "dump", "Acquire", APT_CONFIG=file.name)
    own = _output("apt-config", "dump", "Acquire").splitlines()
    return "".join(
        f"{line}\n"
        for line in own
        if line not in defaults.splitlines() and not line.startswith(APT_OWN)
    )


def pip_settings(listing: str) -> PipSettings:
    """Return what a fresh machine receives of the output of `pip config list`."""
    sections: dict[str, dict[str, str]] = {}
    variables: dict[str, str] = {}
    certificates: list[Path] = []
    left_out: list[str] = []
    for line in listing.splitlines():
        match = PIP_LINE.fullmatch(line.strip())
        if match is None or match["key"] in PIP_OWN:
            continue
        section, key, value = match["section"], match["key"], ast.literal_eval(match["value"])
        if key in PIP_FILES:
            certificates.append(Path(value))
        else:
            parts = value.split()
            local = [part for part in parts if part.startswith(("/", "./", "~", "file:"))]
            left_out += [f"{key} {part}" for part in local]
            value = " ".join(part for part in parts if part not in local)
        if value and section == ":env:":
            variables[f"PIP_{key.upper().replace('-', '_')}"] = value
        elif value:
            sections.setdefault(section, {})[key] = value
    lines = []
    for section, settings in sections.items():
        lines += [f"[{section}]", *(f"{key} = {value}" for key, value in settings.items())]
    left_out = list(dict.fromkeys(left_out))
    return PipSettings(
        "".join(f"{line}\n" for line in lines), variables, tuple(certificates), tuple(left_out)
    )


def _output(*command: str, **variables: str) -> str:
    done = subprocess.run(
        command, env=os.environ | variables, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise PreflightError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done.stdout


def _replace(path: Path, content: bytes) -> None:
    """Write a file in a tree, in place of a link that could lead out of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_bytes(content)
