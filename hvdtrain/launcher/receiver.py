"""The host's end of `hvdtrain stage`: it reports what is there, receives copies and removes them.

Standard library only: staging.py sends this file as text to the host's own Python, since nothing of
hvdtrain is there yet. Requests and answers are those of the doctor's probe.

A copy is completed beside the old one, and then exchanged with it. Unchanged files are linked, and
so are files that jobs have made in the folder. A mark in the folder lists what was staged.
"""

import ctypes
import fcntl
import hashlib
import json
import os
import platform
import signal
import stat
import sys
import sysconfig
import tarfile
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NoReturn

OWN = ".hvdtrain-"  # prefix of names that are never staged
MARK = f"{OWN}staged.json"
CACHE = "__pycache__"  # what Python derives from staged files
RECORD = 1 << 16  # bytes that tar writes at once
BLOCK = 4096  # bytes of disk that a small file or a folder takes
REPORT_S = 0.5
EXCHANGE, HERE = 2, -100  # RENAME_EXCHANGE and AT_FDCWD of Linux

# ["d", mode], ["f", mode, bytes, time of change in ns] or ["l", target], by name in the folder
Files = dict[str, list[Any]]


class StageError(Exception):
    """A reason why a folder cannot be staged to this host."""


class Reporter:
    """Reports, at most every REPORT_S, that work goes on; its end, if it does not, by an alarm."""

    marker, limit_s = "", 0  # set by `main`
    moved, reported_s = 0, time.monotonic()

    def add(self, count: int = 0) -> None:
        """Count received bytes."""
        self.moved += count
        if self.marker and time.monotonic() - self.reported_s > REPORT_S:
            self.answer(moved=self.moved)

    def answer(self, errors: Mapping[str, str] | None = None, **values: Any) -> None:
        """Send an answer, and set the alarm anew."""
        signal.alarm(self.limit_s)
        self.reported_s = time.monotonic()
        text = json.dumps({"values": values, "errors": errors or {}})
        sys.stdout.write(f"\n{self.marker}\n{text}\n")
        sys.stdout.flush()


progress = Reporter()


def listing(root: str | Path, left_out: Collection[str] = ()) -> Files:
    """Return a folder (as "") and all files, folders, which precede their content, and symbolic
    links in it, but for the names `left_out` of the folder itself. Raises OSError.
    """
    files: Files = {"": ["d", stat.S_IMODE(Path(root).stat().st_mode)]}
    folders = [""]
    for folder in folders:
        with os.scandir(f"{root}/{folder}") as entries:
            for entry in entries:
                name, state = folder + entry.name, entry.stat(follow_symlinks=False)
                mode = stat.S_IMODE(state.st_mode)
                if not folder and (name.startswith(OWN) or name in left_out):
                    continue
                match stat.S_IFMT(state.st_mode):
                    case stat.S_IFLNK:
                        files[name] = ["l", str(Path(entry.path).readlink())]
                    case stat.S_IFDIR:
                        files[name] = ["d", mode]
                        folders.append(f"{name}/")
                    case stat.S_IFREG:
                        files[name] = ["f", mode, state.st_size, state.st_mtime_ns]
        progress.add()
    return files


def digest(files: Mapping[str, Any]) -> str:
    """Return a digest of names, modes, sizes, times and targets of links."""
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def identity(path: str | Path) -> list[int]:
    """Return numbers that only one folder has: those of a shared folder are the same everywhere."""
    state = Path(path).lstat()
    return [state.st_ino, state.st_ctime_ns]


def system() -> dict[str, Any]:
    """Return what an environment is made for: kind of Python, glibc, the login's home."""
    abi = sysconfig.get_config_var("SOABI")  # such as "cpython-311-x86_64-linux-gnu"
    return {"abi": abi, "glibc": platform.libc_ver()[1], "home": str(Path.home())}


def read_mark(path: Path) -> dict[str, Any] | None:
    """Return `files` and `made` (the folders above it made for it); None: it was not staged."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return dict(json.loads((path / MARK).read_text("utf-8")))
    return None


def write_mark(path: Path, files: Files, made: Collection[str]) -> None:
    """Note in a folder what was staged."""
    (path / MARK).write_text(json.dumps({"files": files, "made": made}), "utf-8")


def existing(path: Path) -> Path:
    """Return the first folder above that exists."""
    return next(folder for folder in path.parents if os.path.lexists(folder))


def users_of(path: Path) -> Iterator[str]:
    """Return the processes that work in a folder: replaced, it would be gone for them."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # gone, or another user's
            if (process / "cwd").readlink().is_relative_to(path):
                command = (process / "comm").read_text().strip()
                yield f"process {process.name} ({command}) works in {path}: end it"


def look(path: Path, at_launcher: list[int]) -> dict[str, Any]:
    """Return the state of a folder; `at_launcher`: its identity on the launching machine."""
    above, exists = existing(path), os.path.lexists(path)
    if exists and identity(path) == at_launcher:
        return {"shared": True}
    login = os.geteuid()
    if not (above.is_dir() and os.access(above, os.W_OK | os.X_OK)):
        return {"problem": f"this login (uid {login}) cannot write to {above}"}
    if not exists:
        return {"digest": ""}
    if (owner := path.lstat().st_uid) != login:
        return {"problem": f"{path} belongs to uid {owner}, and this login is {login}"}
    mark = None if path.is_symlink() else read_mark(path)
    if mark is None:
        return {"problem": f"{path} exists, and was not brought by hvdtrain stage"}
    actual = listing(path)
    return {"digest": digest({name: actual.get(name) for name in mark["files"]})}


class Copy:
    """A new copy of a folder, hidden beside the old one until it is complete."""

    def __init__(self, path: Path, files: Files) -> None:
        self.path, self.files = path, files
        self.beside = path.with_name(f"{OWN}{path.name}")
        self._mark = read_mark(path) or {"files": {}, "made": []}
        self._old = listing(path) if path.is_dir() else {}
        self._made: list[Path] = []
        self._lock: int | None = None
        self.needed = {
            name for name, new in files.items() if new[0] == "f" and self._old.get(name) != new
        }

    def room(self) -> int:
        """Return the bytes that the new files take on the disk."""
        blocks = sum(-(-self.files[name][2] // BLOCK) for name in self.needed)
        blocks += sum(entry[0] == "d" for entry in self.files.values())
        return int(blocks) * BLOCK + len(json.dumps(self.files))

    def begin(self) -> None:
        """Make the folders. Raises StageError if another command stages it."""
        absent = [above for above in self.path.parents if not os.path.lexists(above)]
        for above in reversed(absent):
            with suppress(FileExistsError):  # made meanwhile by another host that shares it
                above.mkdir()
                self._made.append(above)
        self.beside.mkdir(mode=0o700, exist_ok=True)
        self.lock()
        empty(self.beside)  # of what one that was killed has left
        for name, entry in self.files.items():
            if entry[0] == "d":
                (self.beside / name).mkdir(mode=0o700, exist_ok=True)

    def lock(self) -> None:
        """Keep other commands away from the new copy. Raises StageError."""
        lock = os.open(self.beside, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = "is being staged by another command, or to another host that shares it"
            raise StageError(f"{self.path} {text}") from None
        self._lock = lock

    def write(self, name: str, member: tarfile.TarInfo, content: IO[bytes] | None) -> None:
        """Write a file. Raises StageError if it has changed since it was listed."""
        _, mode, size, changed_ns = self.files[name]
        if content is None or (member.size, int(member.mtime)) != (size, changed_ns // 10**9):
            raise StageError(f"{self.path / name} changed while it was copied; stage again")
        with (self.beside / name).open("xb") as file:
            while part := content.read(RECORD):
                file.write(part)
                progress.add(len(part))
            os.fchmod(file.fileno(), mode)
        os.utime(self.beside / name, ns=(changed_ns, changed_ns))

    def complete(self) -> None:
        """Add links, unchanged files, those that jobs have made and their folders, modes, the mark.

        Raises StageError if a job has made a file in a folder that is a file or a link now.
        """
        staged = self._mark["files"]
        made = {name for name in self._old if name not in staged and name not in self.files}
        kept = made | {str(folder) for name in made for folder in Path(name).parents}
        both = {name: old for name, old in self._old.items() if name in kept} | self.files
        for name in kept - self.files.keys() - {"."}:
            if (above := str(Path(name).parent)) != "." and both[above][0] != "d":
                raise StageError(f"{self.path / name} is of a job, and {above} no folder any more")
        for name, entry in both.items():
            target = self.beside / name
            match entry:
                case ["d", _]:
                    target.mkdir(mode=0o700, exist_ok=True)
                case ["l", link]:
                    target.symlink_to(link)
                case _ if name not in self.needed:
                    target.hardlink_to(self.path / name)
            progress.add()
        write_mark(self.beside, self.files, self._mark["made"] + [*map(str, self._made)])
        for name in reversed(both):
            if both[name][0] == "d":
                (self.beside / name).chmod(both[name][1])

    def exchange(self) -> None:
        """Give the new copy the name of the old one, which is removed by `clean`."""
        self._made = []
        new, old = os.fsencode(self.beside), os.fsencode(self.path)
        if not self.path.exists():
            self.beside.rename(self.path)
        elif ctypes.CDLL(None).renameat2(HERE, new, HERE, old, EXCHANGE) != 0:  # as on NFS
            aside = self.path.with_name(f"{self.beside.name}-old")
            self.path.rename(aside)
            self.beside.rename(self.path)
            aside.rename(self.beside)

    def clean(self) -> None:
        """Remove what is not in use: the old copy, or an unfinished one."""
        if self._lock is not None:
            empty(self.beside)
            os.close(self._lock)
        remove_empty([*self._made, self.beside])


def empty(folder: Path) -> None:
    """Remove the content of a folder, that of write-protected ones included."""
    if not folder.is_dir():
        return
    folder.chmod(0o700)
    for inside in os.scandir(folder):
        path = Path(inside.path)
        if inside.is_dir(follow_symlinks=False):
            empty(path)
            path.rmdir()
        else:
            path.unlink()
    progress.add()


def remove_empty(folders: Collection[Path]) -> None:
    """Remove those of the folders that hold nothing, the last first."""
    for folder in reversed(list(folders)):
        with suppress(OSError):
            folder.rmdir()


def compare(copies: Collection[Copy]) -> dict[str, Any]:
    """Return the files that are needed, as a string of 0 and 1 by path, and the problems."""
    problems = [user for copy in copies for user in users_of(copy.path)]
    disks: dict[int, list[Copy]] = {}
    for copy in copies:
        disks.setdefault(existing(copy.path).stat().st_dev, []).append(copy)
    for on_it in disks.values():
        state = os.statvfs(existing(on_it[0].path))
        free, needed = state.f_bavail * state.f_frsize, sum(copy.room() for copy in on_it)
        if needed > free:
            paths = ", ".join(str(copy.path) for copy in on_it)
            problems.append(f"{paths}: {needed:,} bytes are needed, and {free:,} are free there")
    flags = {
        str(copy.path): "".join("01"[name in copy.needed] for name in copy.files) for copy in copies
    }
    return {"needed": flags, "problems": problems}


def receive(copies: Collection[Copy], stream: IO[bytes]) -> None:
    """Receive the needed files as a tar archive, then exchange all copies once "commit" follows.

    Raises OSError, TarError, StageError; whatever ends it, unfinished copies are removed.
    """
    wanted = {f"{copy.path}/{name}"[1:]: (copy, name) for copy in copies for name in copy.needed}
    try:
        for copy in copies:
            copy.begin()
        with tarfile.open(fileobj=stream, mode="r|", bufsize=RECORD) as archive:
            for member in archive:
                copy, name = wanted.pop(member.name)
                copy.write(name, member, archive.extractfile(member))
        if wanted:
            raise StageError(f"/{min(wanted)} could not be read")
        for copy in copies:
            copy.complete()
        progress.answer(received=True)
        if stream.readline().strip(b"\0\n") != b"commit":  # zeros: padding of the archive
            raise StageError("broken off")
        for copy in copies:
            copy.exchange()
    finally:
        for copy in copies:
            copy.clean()


def remove(path: Path) -> list[str]:
    """Remove what was staged and what Python derived from it; return names of files that remain:
    those that jobs have made, or changed since.
    """
    copy = Copy(path, {})
    if copy.beside.is_dir():
        copy.lock()
        copy.clean()
    mark = read_mark(path)
    if mark is None:
        return []
    staged, actual = mark["files"], listing(path)
    ours = [name for name in actual if name in staged or CACHE in name.split("/")]
    for name in ours:
        if actual[name][0] == "d":
            (path / name).chmod(0o700)  # it may be write-protected
    for name in reversed(ours):  # the content of a folder before the folder
        if actual[name][0] == "d":
            remove_empty([path / name])
        elif staged.get(name, actual[name]) == actual[name]:
            (path / name).unlink()
        progress.add()
    left = listing(path)
    del left[""]
    if left:  # it stays one of ours, so that it can be staged again
        write_mark(path, {}, mark["made"])
    else:
        (path / MARK).unlink()
        remove_empty([*map(Path, mark["made"]), path])
    return [name for name, entry in left.items() if entry[0] != "d"] or list(left)


def stop(number: int, _: object) -> NoReturn:
    """Raise StageError, so that unfinished copies are removed."""
    raise StageError(f"stopped by {signal.Signals(number).name} (SIGALRM: no progress)")


def main() -> None:
    """Answer requests until the input ends; `sys.argv`: the marker of answers, seconds without
    progress after which it ends.
    """
    progress.marker, progress.limit_s = sys.argv[1], int(sys.argv[2])
    for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    copies: list[Copy] = []
    stream = sys.stdin.buffer
    try:
        for line in iter(stream.readline, b""):
            request = json.loads(line)
            paths = {Path(path): value for path, value in request.get("paths", {}).items()}
            match request["do"]:
                case "look":
                    states = {str(path): look(path, paths[path]) for path in paths}
                    progress.answer(states=states, **system())
                case "compare":
                    copies = [Copy(path, files) for path, files in paths.items()]
                    progress.answer(**compare(copies))
                case "receive":
                    receive(copies, stream)
                    progress.answer(staged=True)
                case "remove":
                    ours = [p for p in paths if p.exists() and identity(p) != paths[p]]
                    used = [user for path in ours for user in users_of(path)]
                    left = {} if used else {str(path): remove(path) for path in ours}
                    progress.answer(used=used, left=left)
    except (OSError, StageError, tarfile.TarError) as error:
        progress.answer(errors={"stage": str(error)})


if __name__ == "__main__":
    main()
