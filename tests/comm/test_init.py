"""Rank and world size from the environment, and the resulting process group."""

from __future__ import annotations

import os
import socket
import textwrap
import threading
import time

import pytest
import torch

from deepspeed.base import constants, environment
from deepspeed.base.environment import Identity, discover, first_host
from deepspeed.comm import init
from tests import forked
from tests.pool import ROOT, free_port
from tests.tools.launcher.programs import deepspeed

OMPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}


def test_nothing_is_a_job_of_one():
    assert discover({}, 29500) is None
    assert discover({"MASTER_ADDR": "a", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, 29500) is None


def test_torchrun():
    env = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "1234"}
    assert discover({**OMPI, **env}, 29500) == Identity(
        rank=3, world_size=4, local_rank=1, master_addr="node0", master_port=1234, source="torchrun"
    )


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (OMPI | {"MASTER_ADDR": "n0"}, (5, 8, 1, 4, "n0", 29500)),
        (OMPI, (5, 8, 1, 4, None, 29500)),
        (OMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, (5, 8, 1, 8, "127.0.0.1", 29500)),
        (
            {"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_LOCAL_RANK": "0"},
            (1, 2, 0, None, None, 29500),
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}, (1, 2, 1, 2, "127.0.0.1", 29500)),
        (
            {
                "SLURM_PROCID": "6",
                "SLURM_STEP_NUM_TASKS": "8",
                "SLURM_LOCALID": "2",
                "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
                "SLURM_STEP_NODELIST": "gpu[007-008]",
            },
            (6, 8, 2, 4, "gpu007", 29500),
        ),
        (
            OMPI | {"AZUREML_EXPERIMENT_ID": "x", "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"},
            (5, 8, 1, 4, "10.0.0.4", 6000),
        ),
        (
            OMPI
            | {"AZUREML_EXPERIMENT_ID": "x", "AZ_BATCHAI_MPI_MASTER_NODE": "10.0.0.5", "MASTER_PORT": "77"},
            (5, 8, 1, 4, "10.0.0.5", 77),
        ),
    ],
)
def test_mpi_slurm_and_clouds(env, expected):
    found = discover(env, 29500)
    assert found is not None
    assert (
        *(found.rank, found.world_size, found.local_rank),
        *(found.local_size, found.master_addr, found.master_port),
    ) == expected
    assert discover(env, 29500, schedulers=False) is None
    written: dict[str, str] = {}
    found.apply(written)
    assert (written["RANK"], written["WORLD_SIZE"], written["LOCAL_RANK"]) == tuple(map(str, expected[:3]))
    assert written.get("MASTER_ADDR") == expected[4] and written["MASTER_PORT"] == str(expected[5])


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"RANK": "1"}, "WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "1"}, "RANK is not set"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, r"RANK=2 with WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "99999"}, "MASTER_PORT=99999"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "http"}, "MASTER_PORT='http'"),
    ],
)
def test_contradictions_are_named(env, message):
    with pytest.raises(ValueError, match=message):
        discover(env, 29500)


def test_first_host_of_a_slurm_list():
    lists = {"a1": "a1", "a1,b2": "a1", "a[3-5]": "a3", "a[07,09-11]": "a07", "r[1-2]n,x": "r1n", "": ""}
    assert {text: first_host(text) for text in lists} == lists


def test_clouds():
    assert environment.in_aml({"AZUREML_EXPERIMENT_ID": "1"}) and not environment.in_aml({})
    assert environment.in_aws_sm({"SM_TRAINING_ENV": "1"}) and not environment.in_aws_sm({})
    assert environment.in_dlts({"DLTS_JOB_ID": "1"}) and not environment.in_dlts({})


# ---- with processes -----------------------------------------------------------------------------------------

LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "MASTER_",
    "OMPI_",
    "PMI_",
    "MV2_",
    "SLURM_",
    "DEEPSPEED_",
)


def start(body: str, **env: str) -> forked.Process:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)}
    script = "import os, sys\nfrom deepspeed import comm as dist\nimport torch, torch.distributed\n"
    return forked.start(
        ["-c", script + textwrap.dedent(body)],
        env={**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **env},
        merged=True,
    )


def finish(process: forked.Process) -> str:
    try:
        output, _ = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 0, output
    return output


def test_one_process_without_any_environment():
    finish(
        start("""
            dist.init_distributed()
            assert torch.distributed.is_initialized() and torch.distributed.get_backend() == "gloo"
            assert (dist.get_rank(), dist.get_world_size(), dist.get_local_rank()) == (0, 1, 0)
            tensor = torch.ones(2); dist.all_reduce(tensor); torch.distributed.broadcast(tensor, 0)
            assert dist.new_group([0]) is not None
            assert not {"RANK", "MASTER_ADDR"} & set(os.environ)
            dist.init_distributed()
            dist.destroy_process_group()
            dist.init_distributed()
        """)
    )


def test_a_backend_that_needs_a_gpu_is_refused_where_the_gpu_is_missing():
    start_body = """
        torch.version.cuda = "13.0"  # a build for GPUs on a host that has none, or whose driver is broken
        try: dist.init_distributed("nccl")
        except ValueError as error: print(error)
        assert not torch.distributed.is_initialized()
    """
    said = finish(start(start_body, CUDA_VISIBLE_DEVICES=""))
    assert "dist_backend='nccl'" in said and "leave dist_backend out" in said


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built for GPUs")
def test_scripts_that_name_nccl_run_where_torch_is_built_for_cpus():
    body = """
        dist.init_distributed("nccl")
        assert torch.distributed.get_backend() == "gloo"
        tensor = torch.ones(2); dist.all_reduce(tensor)
    """
    said = finish(start(body))
    assert "dist_backend='nccl'" in said and "using gloo" in said


def test_a_batch_script_says_how_to_get_the_other_tasks():
    body = """
        dist.init_distributed()
        assert dist.get_world_size() == 1
    """
    said = finish(start(body, SLURM_NTASKS="4", SLURM_PROCID="0"))
    assert "SLURM_NTASKS=4" in said and "srun python" in said
    assert "srun" not in finish(start(body))


@pytest.mark.parametrize(
    "names",
    [
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        (
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
    ],
    ids=["torchrun", "Open MPI"],
)
def test_two_processes(names):
    body = """
        from datetime import timedelta
        dist.init_distributed(timeout=timedelta(minutes=3))
        tensor = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(tensor)
        assert tensor.item() == 3 and int(os.environ["LOCAL_RANK"]) == dist.get_rank()
        for group in (torch.distributed.group.WORLD, dist.new_group([0, 1])):
            assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(minutes=3)
    """
    port = str(free_port())
    processes = [
        start(body, MASTER_PORT=port, **dict(zip(names, (str(rank), "2", str(rank), "2"), strict=True)))
        for rank in range(2)
    ]
    for process in processes:
        finish(process)


def test_rank_and_size_as_arguments(tmp_path):
    body = f"""
        store = "file://{tmp_path}/store"
        dist.init_distributed("gloo", True, init_method=store, rank=int(sys.argv[-1]), world_size=2)
        assert dist.get_world_size() == 2
    """
    processes = [start(body.replace("sys.argv[-1]", str(rank))) for rank in range(2)]
    for process in processes:
        finish(process)


@pytest.mark.parametrize(("minutes", "expected"), [("7", "0:07:00"), ("0.5", "0:00:30")])
def test_timeout_from_the_environment(minutes, expected, monkeypatch):
    monkeypatch.setenv("DS_TEST_FRESH", "1")  # it is read when the package is imported
    output = finish(
        start(
            """
            dist.init_distributed()
            print(torch.distributed.group.WORLD._get_backend(torch.device("cpu")).options._timeout)
            """,
            DEEPSPEED_TIMEOUT=minutes,
        )
    )
    assert expected in output


@pytest.mark.parametrize("minutes", ["", "soon", "0", "-3", "nan", "inf", "1e300", "1e-9", "5m"])
def test_a_timeout_that_is_none_is_named_with_the_remedy(minutes, monkeypatch):
    monkeypatch.setenv("DEEPSPEED_TIMEOUT", minutes)
    with pytest.raises(
        ValueError, match=f"DEEPSPEED_TIMEOUT='{minutes}': set it to a positive number of minutes"
    ):
        _ = constants.default_pg_timeout


def test_a_wrong_timeout_under_the_command(tmp_path):
    """The failure is reported once, by the rank that failed, without a traceback of the launcher."""
    (tmp_path / "train.py").write_text("import deepspeed; deepspeed.init_distributed()")
    result = deepspeed("--num_gpus", 1, "train.py", cwd=tmp_path, DEEPSPEED_TIMEOUT="soon")
    assert result.returncode == 1
    assert "rank 0 of train.py failed first: ValueError: DEEPSPEED_TIMEOUT='soon'" in result.stderr
    assert result.stderr.count("Traceback") == 1


def test_a_port_in_use_is_named_with_the_remedy():
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        port = holder.getsockname()[1]
        process = start(
            "dist.init_distributed()",
            RANK="0",
            WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        output, _ = process.communicate(timeout=240)
    assert process.returncode == 1
    assert (
        f"MASTER_PORT={port}" in output
        and "another program is using it" in output
        and "--master_port" in output
    )


def test_a_missing_partner_at_the_rendezvous():
    process = start(
        """
        from datetime import timedelta
        dist.init_distributed(timeout=timedelta(seconds=2))
        """,
        RANK="1",
        WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
    )
    output, _ = process.communicate(timeout=240)
    assert (
        process.returncode == 1
        and "rank 1 of 2 could not reach the other ranks" in output
        and "MASTER_ADDR" in output
    )


def test_a_rank_goes_on_as_soon_as_rank_0_listens():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        opened: list[float] = []

        def open_late() -> None:
            time.sleep(0.1)
            opened.append(time.monotonic())
            listener.listen()

        late = threading.Thread(target=open_late)
        late.start()
        init._await_rank_zero("127.0.0.1", str(listener.getsockname()[1]))
        assert opened and time.monotonic() >= opened[0]
        late.join()


def test_waiting_for_rank_0_leaves_errors_to_torch(monkeypatch):
    monkeypatch.setattr(init, "_PATIENCE_S", 0.05)
    begin = time.monotonic()
    init._await_rank_zero("127.0.0.1", str(free_port()))  # no other rank joins
    assert time.monotonic() - begin < 60  # torch's own timeout is half an hour
    for address, port in (
        (None, "1"),
        ("127.0.0.1", None),
        ("nowhere.invalid", "29500"),
        ("::1", "x"),
        ("::1", "70000"),
    ):
        init._await_rank_zero(address, port)


def test_an_unknown_address_of_rank_0():
    process = start("dist.init_distributed()", **OMPI)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 1 and "mpirun -x MASTER_ADDR" in output


def test_mpi_tells_the_address(tmp_path):
    """The address of rank 0 comes from mpi4py, if installed (here: a stand-in)."""
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("")
    (tmp_path / "mpi4py" / "MPI.py").write_text(
        "class COMM_WORLD:\n    @staticmethod\n    def bcast(value, root): return value or '10.1.2.3'\n"
    )
    output = finish(
        start(
            f"""
            sys.path.insert(0, {str(tmp_path)!r})
            dist.mpi_discovery(distributed_port=4321)
            names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
            print(*(os.environ[name] for name in names))
            """,
            **OMPI,
        )
    )
    assert "5 8 1 10.1.2.3 4321" in output
