"""Fresh machines of Debian and Ubuntu, from the README to the hash of trained parameters.

    python -m tests.campaigns.machines --list
    python -m tests.campaigns.machines [--only NAME...] [--test lint]

Each scenario gets a new machine: a tree made by debootstrap, entered with processes, names and
devices of its own, without any cache of a compiler or of Horovod's wheels. By the README: its
packages, then its two commands in a copy of the committed files. By pip: the wheel of hvdtrain in a
new environment without a checkout, `hvdtrain install-horovod`, `verify`, and the quickstart's
training under horovodrun and under `launch`. torch comes from the package index of pip; packages,
indexes, certificates and proxies are those that this machine is configured for.

Logs and outcomes are kept in --logs, so that scenarios can be run one by one. At the end all
outcomes there are printed as a table in Markdown. Exits with 1 if a scenario failed, or if
scenarios with the same torch and architecture ended with different hashes. Needs root, debootstrap,
10 GB of disk, and for arm64 qemu-user-static and binfmt-support.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

from hvdtrain.errors import HvdtrainError
from tests.campaigns.machines import images
from tests.campaigns.machines.host_settings import HostSettings, host_settings
from tests.campaigns.machines.machine import Machine, StepFailed
from tests.campaigns.machines.scenarios import SCENARIOS, Scenario
from tests.campaigns.machines.steps import Outcome, Run, Source
from tests.campaigns.machines.table import different_hashes, table

ROOT = Path(__file__).parents[3]
OUTCOME = "outcome.json"


def main() -> int:
    arguments = parse()
    if arguments.list:
        print("\n".join(it.described() for it in SCENARIOS))
        return 0
    chosen = [it for it in SCENARIOS if not arguments.only or it.name in arguments.only]
    arguments.logs.mkdir(parents=True, exist_ok=True)
    if not arguments.table:
        own = images.own_architecture() if shutil.which("dpkg") else ""
        if reason := images.why_not({it.architecture or own for it in chosen}):
            print(f"machines: error: {reason}", file=sys.stderr)
            return 3
        run_all(chosen, arguments)
    outcomes = kept_outcomes(arguments.logs)
    print(table(outcomes))
    print(f"commits: {', '.join(sorted({it.commit for it in outcomes}))}")
    problems = [f"{it.scenario}: {it.problem}" for it in outcomes if it.problem]
    problems += different_hashes(outcomes)
    print("".join(f"\n{it}" for it in problems))
    print(f"{len(outcomes)} scenarios, {len(problems)} problems", flush=True)
    return 1 if problems else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [it.name for it in SCENARIOS]
    parser.add_argument("--list", action="store_true", help="print the scenarios, run none")
    parser.add_argument("--table", action="store_true", help="print the kept outcomes, run none")
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help="these scenarios")
    parser.add_argument("--test", default="lint", help="the part of launch/test (default: lint)")
    parser.add_argument("--commit", default="HEAD", help="the commit to try (default: HEAD)")
    parser.add_argument("--mirror", metavar="URL", help="mirror of Debian (default: that of apt)")
    parser.add_argument("--keep", action="store_true", help="keep the trees of machines")
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path("~/.cache/hvdtrain-machines").expanduser(),
        help="folder of images, of pip's downloads, and of the trees (default: %(default)s)",
    )
    parser.add_argument(
        "--logs",
        type=Path,
        default=ROOT / "runs" / "machines",
        help="folder of logs and outcomes (default: runs/machines of this checkout)",
    )
    return parser.parse_args()


def run_all(chosen: list[Scenario], arguments: argparse.Namespace) -> None:
    """Run scenarios one after another, and keep their logs and outcomes."""
    settings = host_settings(arguments.mirror)
    if settings.pip.left_out:
        print(f"of pip's settings, folders here are left out: {', '.join(settings.pip.left_out)}")
    arguments.cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="source-", dir=arguments.cache) as scratch:
        source = Source(ROOT, arguments.commit, Path(scratch))
        print(f"commit {source.commit}", flush=True)
        for scenario in chosen:
            print(scenario.described(), flush=True)
            logs = arguments.logs / scenario.name
            shutil.rmtree(logs, ignore_errors=True)
            logs.mkdir()
            outcome = run_one(scenario, source, settings, arguments)
            (logs / OUTCOME).write_text(json.dumps(dataclasses.asdict(outcome), indent=2) + "\n")
            print(f"  {outcome.problem or 'ok'}", flush=True)


def run_one(
    scenario: Scenario, source: Source, settings: HostSettings, arguments: argparse.Namespace
) -> Outcome:
    """Run one scenario on a new machine; return its outcome, also when it failed."""
    own = images.own_architecture()
    architecture = scenario.architecture or own
    outcome = Outcome(scenario.name, source.commit, architecture=architecture)
    root = arguments.cache / "trees" / f"{scenario.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    downloads = arguments.cache / "pip"
    downloads.mkdir(exist_ok=True)
    shutil.rmtree(downloads / "wheels", ignore_errors=True)  # that pip built on other machines
    try:
        kept = images.image(
            scenario.release, architecture, settings.mirror_of(scenario.release), arguments.cache
        )
        images.unpack(kept, root)
        machine = Machine(root, arguments.logs / scenario.name, downloads, settings.variables)
        run = Run(scenario, machine, outcome, arguments.test, architecture != own)
        run.prepare(settings, source.readme())
        if scenario.way == "readme":
            run.by_readme(source)
        else:
            run.by_pip(source.wheel(sys.executable))
    except (StepFailed, HvdtrainError) as error:
        outcome.problem = str(error)
    finally:
        if not arguments.keep:
            shutil.rmtree(root, ignore_errors=True)
    return outcome


def kept_outcomes(logs: Path) -> list[Outcome]:
    """Return the outcomes kept in a folder, in the order of the scenarios."""
    files = [logs / it.name / OUTCOME for it in SCENARIOS]
    return [Outcome(**json.loads(file.read_text())) for file in files if file.exists()]


if __name__ == "__main__":
    sys.exit(main())
