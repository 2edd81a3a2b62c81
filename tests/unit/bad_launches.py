"""Bad flags, commands and options of `hvdtrain launch`, and what must be reported for each.

Tried by tests/unit/cli/test_launch_bad_input.py.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Setup = Callable[[Path, pytest.MonkeyPatch], object]


def case(name: str, command: str, expected: str, code: int = 2, setup: Setup | None = None) -> Any:
    """`expected`: what must stand in the message, with | between parts. `setup`: is given the
    working folder.
    """
    return pytest.param(shlex.split(command), expected.split("|"), code, setup, id=name)


def launch(name: str, flags: str, expected: str, code: int = 2, setup: Setup | None = None) -> Any:
    return case(f"launch-{name}", f"launch {flags}", expected, code, setup)


def train(name: str, flags: str, expected: str, setup: Setup | None = None) -> Any:
    return case(f"train-{name}", f"launch -np 2 -- train {flags}", expected, 2, setup)


def script(name: str, words: str, expected: str, setup: Setup | None = None) -> Any:
    return case(f"command-{name}", f"launch -np 2 -- {words}", expected, 2, setup)


def write(name: str, content: str | bytes, mode: int = 0o600) -> Setup:
    def setup(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        path.chmod(mode)

    return setup


def folder(name: str) -> Setup:
    return lambda here, monkeypatch: (here / name).mkdir(parents=True)


def variable(name: str, value: str) -> Setup:
    return lambda here, monkeypatch: monkeypatch.setenv(name, value)


def without_commands(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither on PATH nor beside Python is there a command."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "executable", str(here / "python"))


def as_worker(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Started by mpirun."""
    for name, value in {"RANK": "0", "SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)


CASES = [
    # what to launch
    launch("nothing", "-np 2", "nothing to launch: |-- train|-- python SCRIPT"),
    launch("nothing-after-dashes", "-np 2 --", "nothing to launch: "),
    script("absent", "no-such-command x", "no-such-command: no such command|on PATH"),
    script("absent-path", "./no/such/file", "./no/such/file: no such command|python SCRIPT"),
    script("empty", "''", "'': no such command; give"),
    script("python-script", "my_script.py --lr 1", "my_script.py: |`-- python my_script.py ...`"),
    script("not-executable", "./run", "./run: is not executable", write("run", "")),
    script("a-folder", "./run", "./run: no such command", folder("run")),
    script("standard-input", "python -u -", "python -u -: reads its code from standard input"),
    script("no-script", "python -X dev", "python -X dev: reads its code from standard input"),
    script("near-train", "trian --model=mlp", "trian: no such command; did you mean train?"),
    script("alone", "report runs/x", "report: does not run on workers|`hvdtrain report runs/x`"),
    script(
        "near-file",
        "./train",
        "./train: is not executable; did you mean train?",
        write("train", ""),
    ),
    launch(
        "in-horovodrun",
        "-np 2 -- train",
        "launch starts the workers itself: run it once, not under horovodrun",
        2,
        as_worker,
    ),
    launch(
        "rank-nonsense",
        "-np 2 -- train",
        "HOROVOD_RANK='x'|whole number",
        2,
        variable("HOROVOD_RANK", "x"),
    ),
    # flags
    launch(
        "near-flag",
        "-np 2 --restart 3 -- train",
        "--restart: no such flag; did you mean --restarts",
    ),
    launch("near-np", "--np 2 -- train", "--np: no such flag; did you mean -np"),
    launch(
        "flags",
        "-np 2 --wild=1 --wilder -- train",
        "--wild: no such flag; see|--wilder: no such flag|hvdtrain launch --help",
    ),
    launch("no-number", "-- train", "how many workers? Give -np N, or hosts by -H or --hostfile"),
    launch("np-0", "-np 0 -- train", "-np 0: must be at least 1"),
    launch("np-negative", "-np -1 -- train", "-np -1: must be at least 1"),
    launch("np-word", "-np x -- train", "argument -np: invalid int value: 'x'"),
    launch("np-fraction", "-np 1.5 -- train", "argument -np: invalid int value: '1.5'"),
    launch("np-without", "-np -- train", "argument -np: expected one argument"),
    launch("np-many", "-np 65537 -- train", "-np 65537: must be at most 65,536"),
    launch(
        "slots",
        "-np 6 -H a:2,b:3 -- train",
        "-np 6: the hosts have 5 slots (a 2, b 3); lower -np to 5, add hosts",
    ),
    launch(
        "min-np", "-np 2 --min-np 3 --restarts 1 -- train", "--min-np=3: is above the 2 workers"
    ),
    launch(
        "min-np-slots",
        "-H a,b --min-np 3 --restarts 1 -- train",
        "--min-np=3: is above the 2 workers",
    ),
    launch(
        "min-np-one",
        "-np 1 --min-np 2 --restarts 1 -- train",
        "--min-np=2: is above the 1 worker of -np",
    ),
    launch("min-np-0", "-np 2 --min-np 0 --restarts 1 -- train", "--min-np=0: must be at least 1"),
    launch(
        "min-np-alone",
        "-np 2 --min-np 1 -- train",
        "--min-np: applies to restarts; add --restarts R",
    ),
    launch("restarts", "-np 2 --restarts -1 -- train", "--restarts=-1: must be at least 0"),
    launch(
        "restarts-word", "-np 2 --restarts many -- train", "--restarts: invalid int value: 'many'"
    ),
    launch(
        "watchdog-0", "-np 2 --watchdog-timeout-s 0 -- train", "--watchdog-timeout-s=0: |above 0"
    ),
    launch("watchdog-nan", "-np 2 --watchdog-timeout-s nan -- train", "--watchdog-timeout-s=nan: "),
    launch("start-inf", "-np 2 --start-timeout-s inf -- train", "--start-timeout-s=inf: |seconds"),
    launch("stop-0", "-np 2 --stop-within-s 0 -- train", "--stop-within-s=0: |seconds above 0"),
    launch(
        "stop-variable",
        "-np 2 -- train",
        "HVDTRAIN_STOP_WITHIN_S='2m': must be a number of seconds above 0",
        setup=lambda folder, patch: patch.setenv("HVDTRAIN_STOP_WITHIN_S", "2m"),
    ),
    launch(
        "metrics-port", "-np 2 --metrics-port 65536 -- train", "--metrics-port=65536: |1 to 65535"
    ),
    launch("metrics-word", "-np 2 --metrics-port x -- train", "--metrics-port: invalid int value"),
    launch(
        "metrics-alone",
        "-np 2 --metrics-host ::1 --metrics-token-file t -- train",
        "--metrics-host: applies to metrics; add --metrics-port PORT|--metrics-token-file: applies",
    ),
    launch(
        "metrics-host",
        "-np 2 --metrics-port 0 --metrics-host no.invalid -- train",
        "--metrics-host=no.invalid: no such address; give one",
    ),
    launch(
        "metrics-open",
        "-np 2 --metrics-port 0 --metrics-host 0.0.0.0 -- train",
        "--metrics-host=0.0.0.0: others could read|add --metrics-token-file FILE|secrets",
    ),
    launch(
        "metrics-no-token",
        "-np 2 --metrics-port 0 --metrics-token-file t -- train",
        "--metrics-token-file=t: No such file or directory",
    ),
    launch(
        "metrics-token-short",
        "-np 2 --metrics-port 0 --metrics-token-file t -- train",
        "--metrics-token-file=t: must hold one word of 16 characters or more|secrets",
        2,
        write("t", "fifteen-letters\n"),
    ),
    launch(
        "metrics-token-words",
        "-np 2 --metrics-port 0 --metrics-token-file t -- train",
        "--metrics-token-file=t: must hold one word",
        2,
        write("t", "several words of a phrase"),
    ),
    launch(
        "metrics-token-bytes",
        "-np 2 --metrics-port 0 --metrics-token-file t -- train",
        "--metrics-token-file=t: holds other characters than ASCII",
        2,
        write("t", b"\xff" * 20),
    ),
    launch(
        "metrics-address-of-others",
        "-np 2 --metrics-port 0 --metrics-host 192.0.2.1 --metrics-token-file t -- train",
        "--metrics-port=0: cannot listen on 192.0.2.1: ",
        2,
        write("t", "a-token-of-24-characters"),
    ),
    launch(
        "metrics-library",
        "-np 2 --metrics-port 9400 -- train",
        "--metrics-port=9400: prometheus_client is not installed: pip install 'hvdtrain[metrics]'",
        2,
        lambda here, monkeypatch: monkeypatch.setitem(sys.modules, "prometheus_client", None),
    ),
    launch("start-word", "-np 2 --start-timeout-s soon -- train", "invalid float value: 'soon'"),
    launch(
        "controller", "-np 2 --controller ucx -- train", "--controller: invalid choice: 'ucx'|gloo"
    ),
    launch(
        "no-mpirun",
        "-np 2 --controller mpi -- train",
        "--controller=mpi: there is no mpirun on PATH; use --controller gloo",
        2,
        without_commands,
    ),
    launch(
        "interface",
        "-np 2 --network-interface eth77 -- train",
        "--network-interface=eth77: this machine has no such interface (it has |lo",
    ),
    launch("interface-empty", "-np 2 --network-interface '' -- train", "--network-interface=: "),
    launch("port-0", "-np 2 -p 0 -- train", "--ssh-port=0: must be from 1 to 65535"),
    launch("port-many", "-np 2 -p 65536 -- train", "--ssh-port=65536: must be from 1 to 65535"),
    launch("port-word", "-np 2 -p ssh -- train", "-p/--ssh-port: invalid int value: 'ssh'"),
    launch(
        "identity", "-np 2 -i no/key -- train", "--ssh-identity-file=no/key: there is no such file"
    ),
    launch(
        "identity-folder",
        "-np 2 -i key -- train",
        "--ssh-identity-file=key: there is no",
        2,
        folder("key"),
    ),
    launch(
        "log-dir-file",
        "-np 2 --log-dir taken -- train",
        "--log-dir=taken: is a file; choose another",
        2,
        write("taken", ""),
    ),
    launch(
        "log-dir-below-file",
        "-np 2 --log-dir taken/x -- train",
        "taken/x: logs cannot be written: Not a directory. Or choose another --log-dir",
        2,
        write("taken", ""),
    ),
    launch(
        "log-dir-proc",
        "-np 2 --log-dir /proc/here -- train",
        "/proc/here: logs cannot be written: |--log-dir",
    ),
    launch(
        "log-taken",
        "-np 2 --log-dir logs -- train",
        "logs: logs cannot be written: Is a directory",
        2,
        folder("logs/horovodrun.log"),
    ),
    launch(
        "many-at-once",
        "-np 0 --restarts -1 -p 0 -H a:0 -- train --epochs=0",
        "-np 0: |--restarts=-1: |--ssh-port=0: |-H: entry 1: 'a:0': |train: --epochs=0: ",
    ),
    # train, before anything is started
    train("flags", "--epochs=0 --lr=-1", "train: --epochs=0: |train: --lr=-1"),
    train("near-flag", "--epoch=3", "train: --epoch: no such flag; did you mean --epochs?"),
    train("value", "--epochs=x", "train: argument --epochs: invalid int value: 'x'"),
    train(
        "both-batches",
        "--batch-size 8 --global-batch-size 8",
        "train: --batch-size=8 and --global-batch-size=8: give one",
    ),
    train("words", "mlp digits", "train: not understood: mlp digits"),
    train(
        "print-config",
        "--print-config",
        "--print-config starts no workers: give it to `hvdtrain train`",
    ),
    train(
        "config", "--config=none.yaml", "train: --config=none.yaml: cannot be read: |No such file"
    ),
    train(
        "config-folder",
        "--config=c.yaml",
        "train: --config=c.yaml: cannot be read: ",
        folder("c.yaml"),
    ),
    train(
        "config-yaml",
        "--config=c.yaml",
        "train: c.yaml:2: not valid YAML: ",
        write("c.yaml", "lr: 1\n["),
    ),
    train(
        "config-key",
        "--config=c.yaml",
        "train: c.yaml:2: unknown option 'learning_rate'",
        write("c.yaml", "lr: 1\nlearning_rate: 1\n"),
    ),
    train(
        "config-values",
        "--config=c.yaml",
        "train: c.yaml:1: epochs: 'ten' is not of type int|c.yaml:2: ",
        write("c.yaml", "epochs: ten\nlr: [1]\n"),
    ),
    train("weights", "--rank-weights=1,2,3", "--rank-weights=1,2,3: 3 weights for 2 workers"),
    train(
        "weights-words",
        "--rank-weights=a,b",
        "--rank-weights=a,b: must be auto, or comma-separated",
    ),
    launch(
        "weights-min-np",
        "-np 2 --min-np 1 --restarts 1 -- train --rank-weights=1,2",
        "--min-np=1: --rank-weights=1,2 are for 2 workers; give only one of them",
    ),
    train(
        "output-file",
        "--output=taken",
        "taken/lenet-digits/logs: logs cannot be written: Not a directory|--output",
        write("taken", ""),
    ),
]
