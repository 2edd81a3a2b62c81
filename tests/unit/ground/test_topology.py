"""Who has started this process, and whether Horovod connects it with the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.topology import Topology
from tests.unit.cli.test_cli import TINY
from tests.unit.commands import run, run_code

INSTEAD = "`hvdtrain launch -np 3 -- ...`, `horovodrun -np 3 ...` or, in a job of Slurm, `srun -n 3"
TORCHRUN = {"WORLD_SIZE": "3", "RANK": "2", "LOCAL_RANK": "1"}
SRUN = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "2", "SLURM_LOCALID": "1"}
SRUN["SLURM_STEP_ID"] = "0"
HYDRA = {"PMI_SIZE": "3", "PMI_RANK": "2", "MPI_LOCALRANKID": "1"}
HOROVODRUN = {"HOROVOD_SIZE": "3", "HOROVOD_RANK": "2", "HOROVOD_LOCAL_RANK": "1"}
MPIRUN = {f"OMPI_COMM_WORLD_{name}": HOROVODRUN[f"HOROVOD_{name}"] for name in ("SIZE", "RANK")}
MPIRUN["OMPI_COMM_WORLD_LOCAL_RANK"] = "1"
# Of a batch script and of an interactive shell, which are no steps, or steps of Slurm's own.
SBATCH = {"SLURM_NTASKS": "8", "SLURM_NPROCS": "8", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}
SALLOC = {**SBATCH, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "4294967290"}


@pytest.mark.parametrize(
    ("variables", "launcher", "right"),
    [
        (TORCHRUN, "torchrun", INSTEAD),
        ({"WORLD_SIZE": "3"}, "torchrun", INSTEAD),
        (SRUN, "srun", INSTEAD),
        ({**SBATCH, **SRUN, **HYDRA}, "srun", INSTEAD),  # srun --mpi=pmi2
        ({**SRUN, **TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}, "torchrun", INSTEAD),
        (HYDRA, "another MPI's launcher", INSTEAD),
        (MPIRUN, "an mpirun of another MPI than Horovod's", INSTEAD),
    ],
)
def test_processes_that_are_not_connected_are_refused(
    variables: dict[str, str], launcher: str, right: str
) -> None:
    """Fails if one of several processes passes for the only one, or the message lacks the variable,
    the launcher or the right command; or refuses those that are connected.
    """
    found = Topology.from_environment(variables)
    with pytest.raises(UsageError) as caught:
        found.check_joined(1)
    assert "SIZE=3: " in str(caught.value) or "TASKS=3: " in str(caught.value)
    assert f" {launcher}" in str(caught.value) and right in str(caught.value)
    found.check_joined(3)


@pytest.mark.parametrize(
    ("variables", "shown"),
    [
        (SBATCH, "SLURM_NTASKS=8"),
        (SALLOC, "SLURM_NTASKS=8"),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}, "SLURM_JOB_NUM_NODES=2"),
        ({"PET_NNODES": "2", "PET_NPROC_PER_NODE": "auto"}, "PET_NNODES=2"),
        ({"PET_NNODES": "1:4"}, "PET_NNODES=1:4"),
    ],
)
def test_nobody_trains_alone_in_a_job_of_several(variables: dict[str, str], shown: str) -> None:
    """Fails if each host of a job trains all of it with one worker, or says nothing of the way to
    mean that.
    """
    found = Topology.from_environment(variables)
    assert found.in_job_of_several == shown
    with pytest.raises(UsageError) as caught:
        found.check_joined(1)
    assert str(caught.value).startswith(f"{shown}: this process was started by itself")
    for words in ("`hvdtrain launch ", "`horovodrun ", "`srun ", "--single-worker"):
        assert words in str(caught.value)
    found.check_joined(8)
    found.by_itself().check_joined(1)


def test_one_worker_is_meant() -> None:
    """Fails if --single-worker leaves a process with a rank, or hides that it is one of several."""
    alone = Topology.from_environment(TORCHRUN).by_itself()
    assert (alone.rank, alone.size, alone.local_rank, alone.launched) == (0, 1, 1, False)
    with pytest.raises(UsageError, match="one of 3 workers"):
        Topology.from_environment(HOROVODRUN).by_itself()


@pytest.mark.parametrize("foreign", [TORCHRUN, SRUN, HYDRA, {"WORLD_SIZE": "9", "PMI_SIZE": "9"}])
@pytest.mark.parametrize("own", [HOROVODRUN, MPIRUN])
def test_horovods_own_launcher_wins(own: dict[str, str], foreign: dict[str, str]) -> None:
    """Fails if what `hvdtrain launch` gives to scripts (RANK, WORLD_SIZE), or a job of Slurm around
    an mpirun, hides the workers' own place.
    """
    found = Topology.from_environment({**foreign, **own})
    assert found.launched
    assert (found.rank, found.size, found.local_rank) == (2, 3, 1)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {**SALLOC, "SLURM_STEP_ID": "3"},
        {"SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1", "PET_NNODES": "1"},
        {"PET_NNODES": "", "SLURM_NTASKS": "many"},
        {"WORLD_SIZE": "1", "RANK": "0"},
        {"WORLD_SIZE": "", "PMI_SIZE": "many", "SLURM_STEP_NUM_TASKS": "0"},
    ],
)
def test_one_process_is_one(variables: dict[str, str]) -> None:
    """Fails if `hvdtrain train` cannot run by itself as a step of one task, under torchrun with one
    process, or where a variable of that name is something else.
    """
    found = Topology.from_environment(variables)
    assert found == Topology()
    found.check_joined(1)


@pytest.mark.parametrize(
    "variables", [{"OMPI_COMM_WORLD_SIZE": "2"}, {**MPIRUN, "HOROVOD_RANK": ""}]
)
def test_half_a_place_is_refused(variables: dict[str, str]) -> None:
    """Fails if a worker whose rank or size is missing trains by itself."""
    with pytest.raises(UsageError, match="a whole number was expected"):
        Topology.from_environment(variables)


def test_train_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if `train` under a foreign launcher makes a run, has another exit code than 2, or gives
    another reason, such as that the folder is taken by the next of its copies.
    """
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    done = run(tmp_path, "train", *TINY, "--output", "out")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("hvdtrain: error on rank 2 on ")
    assert "WORLD_SIZE=3: torchrun" in done.stderr and INSTEAD in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "code",
    [
        "import hvdtrain; hvdtrain.init()",
        "import torch.distributed as dist, hvdtrain\n"
        "dist.init_process_group('gloo', 'file://' + FILE, rank=0, world_size=1)\n"
        "hvdtrain.GradientAudit(torch.nn.Linear(2, 2))",
    ],
    ids=["init", "audit"],
)
def test_scripts_are_refused(code: str, tmp_path: Path) -> None:
    """Fails if a script under a foreign launcher takes each of its processes for N = 1, or ends
    with a traceback or another exit code than 2.
    """
    code = f"import torch; FILE = {str(tmp_path / 'meeting')!r}\n{code}"
    done = run_code(code, tmp_path, variables=HYDRA)
    assert done.returncode == 2, done.stderr
    message = "hvdtrain: error at <string>:"
    assert done.stderr.startswith(message), done.stderr
    assert "PMI_SIZE=3: another MPI's launcher has started" in done.stderr
