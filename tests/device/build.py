"""Compilation of `fake_gpu.cpp`, once for each version of torch, Python and the compiler."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sysconfig
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("fake_gpu.cpp")
NAME = "_fake_gpu"
CXX_20_SINCE = (2, 14)  # the headers of torch need it from this version on


def library() -> Path:
    """Return the compiled module, from the cache if it was compiled before."""
    command = ["g++", f"-std={_standard()}", "-O1", "-fPIC", "-shared", *_directories()]
    command += [f"-DTORCH_EXTENSION_NAME={NAME}", "-Wl,--no-as-needed"]
    command += ["-ltorch_cpu", "-ltorch_python", "-lc10"]
    compiler = subprocess.run(["g++", "--version"], check=True, capture_output=True, text=True)
    key = hashlib.sha256()
    for part in (SOURCE.read_text("utf-8"), torch.__version__, compiler.stdout, *command):
        key.update(f"{part}\0".encode())
    suffix = str(sysconfig.get_config_var("EXT_SUFFIX"))
    path = _cache() / f"fake-gpu-{key.hexdigest()[:16]}" / f"{NAME}{suffix}"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{os.getpid()}.tmp")  # processes that compile at once do no harm
        subprocess.run([*command, "-o", str(partial), str(SOURCE)], check=True)
        partial.replace(path)
    return path


def _standard() -> str:
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return "c++20" if version >= CXX_20_SINCE else "c++17"


def _directories() -> list[str]:
    """Return the options that name the folders of headers and libraries."""
    home = Path(torch.__file__).parent
    headers = [home / "include", home / "include/torch/csrc/api/include"]
    headers.append(Path(sysconfig.get_paths()["include"]))
    return [*(f"-isystem{it}" for it in headers), f"-L{home / 'lib'}"]


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "hvdtrain"
