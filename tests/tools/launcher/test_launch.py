"""The real command on small scripts: what ranks are given, what comes back, and who is blamed."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from deepspeed.comm.pending import CommunicationError
from deepspeed.tools.launcher import cores, ports
from deepspeed.tools.launcher import failures as failures_of
from deepspeed.tools.launcher.runner import encode_world_info
from tests import forked
from tests.tools.launcher.programs import COMMAND, CONFIG, TIMEOUT_S, TRAIN, deepspeed, environment

SHOW = """\
import json, os, sys
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_SIZE CROSS_RANK CROSS_SIZE MASTER_ADDR MASTER_PORT OMP_NUM_THREADS"
names += " CUDA_VISIBLE_DEVICES GOMP_SPINCOUNT"
shown = {name: os.environ.get(name) for name in names.split()}
shown |= {"argv": sys.argv, "path0": sys.path[0], "name": __name__, "file": os.path.basename(__file__)}
shown["main"] = sys.modules["__main__"].__dict__.get("shown") is shown
shown["cores"] = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
sys.stdout.write(json.dumps(shown) + "\\n")  # one write a line: print makes two, and ranks share the pipe
"""

FAIL = """\
import os, sys, time
def train():
    if os.environ["RANK"] == "1":
        open("failing", "w").close()
        raise ValueError("boom")
    {other}
train()
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "show.py").write_text(SHOW)
    return tmp_path


def start(folder, *arguments: str) -> subprocess.Popen[str]:
    """Starts `deepspeed` with these arguments and does not wait for it."""
    return subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=folder,
        env=environment(OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def told(stdout: str, pattern: str) -> list[str]:
    """Return what ranks wrote, without lines that gloo writes in between with torch 2.8."""
    return re.findall(pattern, stdout)


def shown(stdout: str) -> list[dict]:
    """Return each rank's record, by rank."""
    ranks = [json.loads(line) for line in stdout.splitlines() if line.startswith("{")]
    return sorted(ranks, key=lambda rank: int(rank["RANK"]))


def test_each_rank_gets_its_environment_and_arguments(folder):
    result = deepspeed("--num_gpus", 2, "show.py", "a", "--b", "$$ ${local_rank}", cwd=folder)
    assert result.returncode == 0, result.stderr
    ranks = shown(result.stdout)
    assert [rank["argv"] for rank in ranks] == [
        ["show.py", f"--local_rank={r}", "a", "--b", "$$ ${local_rank}"] for r in range(2)
    ]
    for r, rank in enumerate(ranks):
        assert (rank["RANK"], rank["LOCAL_RANK"], rank["WORLD_SIZE"], rank["LOCAL_SIZE"]) == (
            str(r),
            str(r),
            "2",
            "2",
        )
        assert (rank["CROSS_RANK"], rank["CROSS_SIZE"], rank["MASTER_ADDR"]) == ("0", "1", "127.0.0.1")
        assert (rank["CUDA_VISIBLE_DEVICES"], rank["path0"]) == ("0,1", str(folder))
        assert (rank["name"], rank["file"], rank["main"]) == ("__main__", "show.py", True)
        assert 1 <= int(rank["OMP_NUM_THREADS"]) <= max(1, (os.cpu_count() or 1) // 2)
        assert rank["GOMP_SPINCOUNT"] == "10000"
    # What starts where; another port than usual, if that is in use.
    assert 1 <= len(result.stderr.splitlines()) <= 2


PARSERS = """\
import argparse, json, sys
strict = argparse.ArgumentParser()
strict.add_argument("--steps", type=int)
strict.add_argument("rest", nargs="*")
print(json.dumps(["strict", vars(strict.parse_args())]))
print(json.dumps(["given", vars(strict.parse_args(sys.argv[1:]))]))
for name in ("--local_rank", "--local-rank"):
    parser = argparse.ArgumentParser(parents=[strict], add_help=False)
    parser.add_argument(name, type=int, default=-1)
    print(json.dumps([name, vars(parser.parse_args())]))
print(json.dumps(["known", vars(strict.parse_known_args()[0]), strict.parse_known_args()[1]]))
"""


def test_local_rank_reaches_the_scripts_that_take_it_and_spares_the_others(folder):
    """What a parser knows decides, wherever the option was declared."""
    (folder / "parsers.py").write_text(PARSERS)
    result = deepspeed("--num_gpus", 1, "parsers.py", "--steps", 3, "a", cwd=folder)
    plain = {"steps": 3, "rest": ["a"]}
    assert [json.loads(line) for line in result.stdout.splitlines()] == [
        ["strict", plain],
        ["given", plain],
        ["--local_rank", plain | {"local_rank": 0}],
        ["--local-rank", plain | {"local_rank": -1}],
        ["known", plain, ["--local_rank=0"]],
    ], result.stderr


def test_a_script_that_refuses_an_argument_is_told_of_no_local_rank(folder):
    (folder / "other.py").write_text(
        "import sys\nif any(a.startswith('--local_rank') for a in sys.argv): sys.exit(2)\n"
    )
    (folder / "typo.py").write_text("import argparse; argparse.ArgumentParser().parse_args()")
    result = deepspeed("--num_gpus", 1, "other.py", cwd=folder)
    assert result.returncode == 2 and "deepspeed --no_local_rank ..." in result.stderr
    assert deepspeed("--num_gpus", 1, "--no_local_rank", "other.py", cwd=folder).returncode == 0
    result = deepspeed("--num_gpus", 1, "typo.py", "--stops", cwd=folder)
    assert result.returncode == 2 and "unrecognized arguments: --stops\n" in result.stderr


def test_module_without_local_rank(folder):
    result = deepspeed("--num_gpus", 1, "--no_local_rank", "-q", "--module", "show", "x", cwd=folder)
    assert result.returncode == 0 and result.stderr == ""
    (rank,) = shown(result.stdout)
    assert rank["argv"] == [str(folder / "show.py"), "x"] and rank["main"] and rank["path0"] == str(folder)


def test_program_that_is_not_python(folder):
    result = deepspeed("--num_gpus", 2, "--no_python", "echo", "hello", cwd=folder)
    assert sorted(result.stdout.splitlines()) == ["--local_rank=0 hello", "--local_rank=1 hello"]


def test_threads_that_the_user_set_stay(folder):
    options = ("--num_gpus", 2, "--bind_core_list", 0)
    result = deepspeed(*options, "show.py", cwd=folder, OMP_NUM_THREADS="3", OMP_WAIT_POLICY="active")
    assert "--bind_core_list=0 has no effect without --bind_cores_to_rank" in result.stderr
    assert [(rank["OMP_NUM_THREADS"], rank["GOMP_SPINCOUNT"]) for rank in shown(result.stdout)] == [
        ("3", None)
    ] * 2


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot bind processes to cores")
def test_cores_are_bound(folder):
    core = min(os.sched_getaffinity(0))
    result = deepspeed(
        "--num_gpus", 1, "--bind_cores_to_rank", "--bind_core_list", core, "show.py", cwd=folder
    )
    (rank,) = shown(result.stdout)
    assert (rank["cores"], rank["OMP_NUM_THREADS"]) == ([core], "1")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot bind processes to cores")
def test_each_rank_gets_cores_of_its_own(folder):
    usable = cores.usable_cores()
    if len(usable) < 2:
        pytest.skip("needs two cores")
    result = deepspeed("--num_gpus", 2, "--bind_cores_to_rank", "show.py", cwd=folder)
    first, second = shown(result.stdout)
    share = len(usable) // 2
    assert [first["cores"], second["cores"]] == [usable[:share], usable[share : 2 * share]]
    assert first["OMP_NUM_THREADS"] == second["OMP_NUM_THREADS"] == str(share)


@pytest.mark.parametrize(
    "options, visible",
    [
        (["--include", "localhost:0,2"], "0,2"),
        (["--exclude", "localhost:1"], "0,2"),
        pytest.param(["--num_nodes", "1", "--num_gpus", "2"], "0,1", marks=pytest.mark.slow),
    ],
)
def test_devices_that_were_chosen_reach_the_ranks(folder, options, visible):
    (folder / "hosts").write_text("localhost slots=3\n")
    port = ports.find_free("127.0.0.1")
    where = ["--hostfile", "hosts", "--master_addr", "localhost", "--master_port", port]
    result = deepspeed(*where, *options, "show.py", cwd=folder)
    ranks = shown(result.stdout)
    assert [rank["CUDA_VISIBLE_DEVICES"] for rank in ranks] == [visible] * 2, result.stderr
    assert {(rank["MASTER_ADDR"], rank["MASTER_PORT"]) for rank in ranks} == {("localhost", str(port))}


def test_log_of_each_rank(folder):
    (folder / "both.py").write_text("import sys; print('out', flush=True); print('err', file=sys.stderr)")
    result = deepspeed("--num_gpus", 2, "--enable_each_rank_log", "logs", "both.py", cwd=folder)
    assert result.returncode == 0 and result.stdout == ""
    files = sorted((folder / "logs").iterdir())
    assert [re.sub(r"^\d{14}", "", file.name) for file in files] == ["_rank0.log", "_rank1.log"]
    assert [file.read_text() for file in files] == ["out\nerr\n"] * 2


def test_first_traceback_then_a_summary(folder):
    (folder / "fail.py").write_text(FAIL.format(other="time.sleep(60)"))
    result = deepspeed("--num_gpus", 3, "fail.py", cwd=folder)
    assert result.returncode == 1
    assert result.stderr.count("Traceback") == 1
    assert "shim.py" not in result.stderr  # the user's frames only
    report = result.stderr.splitlines()[-2:]
    assert report[0] == "[deepspeed] rank 1 of fail.py failed first: ValueError: boom (exit code 1)"
    assert report[1] == "  ranks 0, 2: stopped by the launcher"


def failure(rank: int, at: float, *, code: int = 1, printed: bool = False) -> failures_of.Failure:
    """One that an exception ended, or a signal if ``code`` is negative."""
    said = "" if code < 0 else "Traceback ..."
    return failures_of.Failure(
        rank=rank, at=at, exit_code=code, message="", traceback=said, first=printed, on_screen=printed
    )


@pytest.mark.parametrize(
    "failures, order",
    [
        ([failure(0, 5.0), failure(1, 4.0, printed=True)], [1, 0]),
        (
            [failure(0, 4.0), failure(1, 4.001, printed=True)],
            [1, 0],
        ),  # both at once: whose traceback is on the screen
        ([failure(0, 4.0, printed=True), failure(1, 3.0, code=-9)], [1, 0]),
        ([failure(0, 4.0), failure(1, 4.001, printed=True), failure(2, 4.0005, code=-15)], [2, 1, 0]),
        ([failure(2, 3.0, code=-6), failure(0, 2.0, code=-11)], [0, 2]),
    ],
)
def test_who_failed_first(failures, order):
    assert [each.rank for each in failures_of.in_order(failures)] == order


def test_who_left_while_others_were_training():
    """Ranks of all machines together tell: one machine may see only the loss of a peer."""

    def left(rank: int, at: float) -> failures_of.Failure:
        return failures_of.Failure.by_leaving(rank, at)

    lost = replace(failure(0, 4.0), lost_peer=True)
    stopped = replace(failure(2, 4.5, code=-15), stopped=True)
    entries = [stopped, lost, left(1, 3.0), left(3, 5.0)]
    assert [each.rank for each in failures_of.causes_first(entries)] == [1, 0, 2]  # rank 3 ended later
    assert [each.rank for each in failures_of.causes_first([*entries, failure(4, 3.5)])] == [4, 0, 2]
    assert failures_of.causes_first([left(0, 3.0), left(1, 4.0)]) == []  # all is well


@pytest.mark.parametrize(
    "message, at",
    [
        ("ValueError: boom", 4.0),
        ("RuntimeError: Connection closed by peer", 4.2),
        (str(CommunicationError.of("all_reduce", range(200), RuntimeError("timeout"), silent=1)), 4.2),
    ],
)
def test_whoever_lost_a_peer_did_not_fail_before_it_ended(tmp_path, message, at):
    report = {
        "message": {"message": message, "extraInfo": {"py_callstack": "Traceback"}},
        "time": 4.0,
        "first": True,
    }
    (tmp_path / "error.json").write_text(json.dumps(report))
    process = SimpleNamespace(error_file=str(tmp_path / "error.json"), exitcode=1, timestamp=4)
    survivor = failures_of.Failure.of(0, process, 4.2)
    assert survivor.at == at
    killed = failure(1, 4.1, code=-9)
    assert failures_of.in_order([survivor, killed])[0].rank == (0 if at == 4.0 else 1)


def test_ranks_that_fail_at_once_print_one_traceback(folder):
    (folder / "fail.py").write_text(
        "import os, pathlib\n"
        "rank = os.environ['RANK']\n"
        "pathlib.Path('here' + rank).touch()\n"
        "while not all(pathlib.Path(f'here{r}').exists() for r in range(4)): pass\n"
        "raise ValueError('boom of ' + rank)\n"
    )
    result = deepspeed("--num_gpus", 4, "fail.py", cwd=folder)
    assert result.returncode == 1 and result.stderr.count("Traceback") == 1
    (printed,) = re.findall(r"^ValueError: boom of (\d)$", result.stderr, flags=re.M)
    assert f"rank {printed} of fail.py failed first: ValueError: boom of {printed}" in result.stderr


def test_a_rank_that_fails_because_of_another_is_summarised(folder):
    after = "while not os.path.exists('failing'): time.sleep(0.01)"
    lost = "time.sleep(0.4); raise RuntimeError('lost my peer')"
    (folder / "fail.py").write_text(FAIL.format(other=f"{after}\n    {lost}"))
    result = deepspeed(
        "--num_gpus", 2, "--log_level", "debug", "fail.py", cwd=folder, DEEPSPEED_STOP_GRACE="2"
    )
    assert "ValueError: boom" in result.stderr
    assert result.stderr.index("rank 1 of fail.py failed first") > result.stderr.index("Traceback")
    assert result.returncode == 1


def test_traceback_is_shown_although_ranks_log_to_files(folder):
    (folder / "fail.py").write_text(FAIL.format(other="time.sleep(60)"))
    result = deepspeed("--num_gpus", 2, "--enable_each_rank_log", "logs", "fail.py", cwd=folder)
    assert result.stderr.count("Traceback") == 1 and "ValueError: boom" in result.stderr
    log = next((folder / "logs").glob("*_rank1.log")).read_text()
    assert log.count("Traceback") == 1 and "shim.py" not in log


@pytest.mark.parametrize("ending, code, said", [
    ("sys.exit(7)", 7, "exit code 7"),
    pytest.param("os._exit(9)", 9, "exit code 9", marks=pytest.mark.slow),
    ("os.kill(os.getpid(), 11)", 139, "killed by SIGSEGV (exit code 139)"),
    ("sys.exit('bad data')", 1, "bad data (exit code 1)"),
])  # fmt: skip
def test_exit_code_is_that_of_the_first_rank_that_failed(folder, ending, code, said):
    (folder / "end.py").write_text(
        f"import os, sys, time\nif os.environ['RANK'] == '1': {ending}\ntime.sleep(60)\n"
    )
    result = deepspeed("--num_gpus", 2, "end.py", cwd=folder)
    assert result.returncode == code
    assert f"rank 1 of end.py failed first: {said}" in result.stderr


def test_chosen_port_in_use(folder):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = deepspeed("--master_port", port, "show.py", cwd=folder)
    assert result.returncode == 2 and f"--master_port={port} is in use" in result.stderr


def test_ranks_meet_under_the_launcher(folder):
    (folder / "meet.py").write_text(
        "import sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(1)\n"
        "dist.all_reduce(total)\n"
        "sys.stdout.write(f'total {int(total)}\\n')\n"
    )
    assert told(deepspeed("--num_gpus", 2, "meet.py", cwd=folder).stdout, r"total \d+") == ["total 2"] * 2


def test_an_engine_trains_under_torchrun_and_under_plain_python(folder):
    (folder / "train.py").write_text(TRAIN)
    (folder / "ds.json").write_text(json.dumps(CONFIG))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command, where = ["train.py", "--deepspeed_config", "ds.json"], environment(OMP_NUM_THREADS="1")
    for start, ranks in ((torchrun, 2), ([], 1)):
        if start:
            result = subprocess.run(
                [sys.executable, *start, *command],
                cwd=folder, env=where, capture_output=True, text=True, timeout=TIMEOUT_S,
            )  # fmt: skip
        else:
            result = forked.run(command, cwd=folder, env=where, timeout=TIMEOUT_S)
        assert result.returncode == 0, result.stderr
        assert result.stdout.count("done") == ranks


def test_two_nodes_of_one_machine_through_the_launch_module(folder):
    world, port = encode_world_info({"a": [0], "b": [0, 1]}), ports.find_free("127.0.0.1")
    command = [
        sys.executable,
        "-m",
        "deepspeed.tools.launcher.launch",
        f"--world_info={world}",
        f"--master_port={port}",
    ]
    nodes = [
        subprocess.Popen(
            [*command, f"--node_rank={node}", "show.py"],
            cwd=folder,
            env=environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    output = "".join(node.communicate(timeout=TIMEOUT_S)[0] for node in nodes)
    assert [node.returncode for node in nodes] == [0, 0]
    facts = [
        (rank["RANK"], rank["LOCAL_RANK"], rank["LOCAL_SIZE"], rank["CROSS_RANK"]) for rank in shown(output)
    ]
    assert facts == [("0", "0", "1", "0"), ("1", "0", "2", "1"), ("2", "1", "2", "1")]
    assert {(rank["WORLD_SIZE"], rank["CROSS_SIZE"]) for rank in shown(output)} == {("3", "2")}


JOIN = """\
import os, sys, torch
from deepspeed import comm
comm.init_distributed()
number = torch.tensor([int(sys.argv[-1])])
comm.all_reduce(number)
sys.stdout.write(f"{os.environ['MASTER_PORT']} {number.item()}\\n")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ports are reserved on Linux")
@pytest.mark.parametrize(
    "attempt", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
def test_two_commands_at_once_meet_at_ports_of_their_own(folder, attempt):
    (folder / "join.py").write_text(JOIN)
    both = [start(folder, "--num_gpus", "2", "join.py", number) for number in ("1", "10")]
    said = [job.communicate(timeout=TIMEOUT_S) for job in both]
    assert [job.returncode for job in both] == [0, 0], said
    (first, first_again), (second, second_again) = (told(out, r"\d+ \d+(?=\n)") for out, _ in said)
    assert (first, second) == (first_again, second_again)
    (port, total), (other_port, other_total) = first.split(), second.split()
    assert (total, other_total) == ("2", "20") and port != other_port


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ports are reserved on Linux")
def test_a_port_that_nobody_listens_at_yet_is_the_first_ones_until_it_ends(folder):
    (folder / "wait.py").write_text(
        "import os, time; print(os.environ['MASTER_PORT'], flush=True); time.sleep(60)"
    )
    first = start(folder, "--num_gpus", "1", "wait.py")
    try:
        assert first.stdout is not None
        port = int(first.stdout.readline())
        assert ports.is_free("127.0.0.1", port)
        (rank,) = shown(deepspeed("--num_gpus", 1, "show.py", cwd=folder).stdout)
        assert int(rank["MASTER_PORT"]) != port
        with ports.PortReservation(port) as reservation:
            assert not reservation.is_ours
    finally:
        first.kill()
        first.communicate(timeout=TIMEOUT_S)
    with ports.PortReservation(port) as reservation:
        assert reservation.is_ours


def test_spawned_children_find_main(folder):
    (folder / "spawn.py").write_text(
        "import multiprocessing, sys\n"
        "def double(x): return 2 * x\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool: print(pool.map(double, [1, 2]))\n"
    )
    result = deepspeed("--num_gpus", 1, "spawn.py", cwd=folder)
    assert result.stdout.strip() == "[2, 4]", result.stderr


def test_a_long_message_is_cut_between_words() -> None:
    words = "word " * 200
    cut = failures_of._in_one_line(words)
    assert len(cut) <= failures_of.MESSAGE_LENGTH + 4 and cut.endswith(" word ...")
    assert failures_of._in_one_line("ValueError: short") == "ValueError: short"
