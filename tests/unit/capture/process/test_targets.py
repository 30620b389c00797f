"""Who a process is, from its environment, cgroup and command line; and what may go wrong when looking at it."""

from __future__ import annotations

import pytest

from argus.capture.process import targets
from argus.model.errors import ArgusError

POD = "0::/kubepods.slice/kubepods-pod0f3a1c52_9f6e_4a53_8d1c_3b2f7f0c9a11.slice/cri-containerd-ab.scope\n"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (
            {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "llama-7b"},
            (3, 8, 1, "torchrun", "llama-7b"),
        ),
        (
            {"SLURM_PROCID": "12", "SLURM_NTASKS": "16", "SLURM_LOCALID": "4", "SLURM_JOB_ID": "99"},
            (12, 16, 4, "slurm", "slurm-99"),
        ),
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "99", "SLURM_JOB_NAME": "gpt"},
            (0, 2, -1, "slurm", "gpt-99"),
        ),
        (
            {
                "OMPI_COMM_WORLD_RANK": "5",
                "OMPI_COMM_WORLD_SIZE": "6",
                "OMPI_COMM_WORLD_LOCAL_RANK": "5",
            },
            (5, 6, 5, "openmpi", "train"),
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"}, (1, 4, 1, "pmi", "train")),
        # torchrun inside Slurm: the rank is torchrun's, the job Slurm's
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_JOB_ID": "7", "RANK": "2", "WORLD_SIZE": "4"},
            (2, 4, -1, "torchrun", "slurm-7"),
        ),
        ({"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "1"}, (0, 1, -1, "torchrun", "train")),
        ({}, (-1, 0, -1, "unknown", "train")),
        # nonsense is not a rank
        ({"RANK": "first", "WORLD_SIZE": "4"}, (-1, 0, -1, "unknown", "train")),
        ({"RANK": "9", "WORLD_SIZE": "4"}, (-1, 0, -1, "unknown", "train")),
        ({"RANK": "-1"}, (-1, 0, -1, "unknown", "train")),
        ({"RANK": "²"}, (-1, 0, -1, "unknown", "train")),
    ],
)
def test_identity_comes_from_the_launcher_s_environment(
    environment: dict[str, str], expected: tuple[int, int, int, str, str]
) -> None:
    identity = targets.identify(environment, b"python3\0-u\0/srv/code/train.py\0--lr\0" + b"1e-4\0")
    assert (identity.rank, identity.world_size, identity.local_rank, identity.launcher, identity.job) == expected


@pytest.mark.parametrize("run_id", ["c8302b7c-4c33-4222-9d5a-0123456789ab", "c8302b7c4c3342229d5a0123456789ab"])
def test_an_id_that_torchrun_made_up_names_no_job(run_id: str) -> None:
    """All ranks, wherever they run, are called after their script, also in pods, which are others on each node."""
    environment = {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": run_id}
    for cgroup in ("", POD):
        identity = targets.identify(environment, b"/usr/bin/python3.11\0-u\0/srv/ddp.py\0", cgroup)
        assert identity.job == "ddp"
        assert run_id in identity.lineage, "two runs of one script at a time are distinguished"
    assert targets.identify({**environment, "JOB_NAME": "llama"}, b"python\0ddp.py\0").job == "llama"


def test_a_pod_names_the_job_where_nothing_else_does() -> None:
    identity = targets.identify({}, b"train\0", POD)
    assert identity.launcher == "kubernetes"
    assert identity.job == "pod-0f3a1c52-9f6e-4a53-8d1c-3b2f7f0c9a11"


def test_a_process_that_does_not_exist_is_named() -> None:
    with pytest.raises(ArgusError, match="there is no process 4194303"):
        targets.open_target(4194303)


def test_a_kernel_thread_is_named_as_such() -> None:
    with pytest.raises(ArgusError, match="process 2 is a kernel thread"):
        targets.open_target(2)
