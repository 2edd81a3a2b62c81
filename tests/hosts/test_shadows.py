"""Files named as modules of the standard library, beside a job and in the home of another host."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts.namespaces import Cluster
from tests.parallel.launching import CHECKOUT, CONTROLLERS, hvdtrain
from tests.unit.ground.test_interpreter import shadow

EXPERIMENT = ["--model=mlp", "--data=digits", "--max-steps=2", "--experiment=run"]


@pytest.mark.timeout(600)
def test_a_job_does_not_import_the_users_files(
    make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    """Fails if a process of ours on either host imports from the folder of the job, from the home
    folder where a login starts, or, by a relative entry of PYTHONPATH, from there; or if a script
    does not get the module beside it, which it would under plain python.
    """
    cluster = make_cluster([1, 1])
    folder, scripts, empty = (tmp_path / name for name in ("job", "scripts", "empty"))
    for path in (folder, scripts, empty):
        path.mkdir()
    cluster.move_home(1, shadow(tmp_path / "home"))
    shadow(folder)
    (scripts / "secrets.py").write_text("NAME = 'of the user'\n")
    (scripts / "job.py").write_text(
        "import os, secrets, sys\n"
        "print(secrets.NAME, sys.path[0], os.getcwd(), 'PYTHONSAFEPATH' in os.environ)\n"
    )

    def launch(controller: str, *command: str, cwd: Path = folder, path: str = "") -> str:
        flags = ["-H", cluster.host_list, f"--controller={controller}", "--"]
        variables = {"PYTHONPATH": f"{path}{CHECKOUT}"}
        launched = hvdtrain("launch", *flags, *command)
        done = cluster.run(launched, timeout_s=100, variables=variables, cwd=cwd)
        assert done.exit_code == 0, done.output
        return done.output

    hashes = set()
    for number, (cwd, path) in enumerate([(folder, ""), (empty, ":"), (empty, ".:")]):
        controller = CONTROLLERS[number % 2]
        runs = tmp_path / f"runs{number}"
        launch(controller, "train", *EXPERIMENT, f"--output={runs}", cwd=cwd, path=path)
        hashes.add(json.loads((runs / "run" / "summary.json").read_text())["params_sha256"])
    assert len(hashes) == 1
    output = launch("gloo", "python", str(scripts / "job.py"))
    assert output.count(f"of the user {scripts} {folder} False") == 2, output
