"""Jobs over several machines, whose ssh, pdsh, mpirun and srun are stand-ins that run everything here."""

from __future__ import annotations

import json
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest

from deepspeed.tools import ssh_all as ds_ssh
from deepspeed.tools.launcher import runner
from deepspeed.tools.launcher.addresses import master_address
from deepspeed.tools.launcher.cores import usable_cores
from deepspeed.tools.launcher.errors import LaunchError
from deepspeed.tools.launcher.hostfile import checked_host
from deepspeed.tools.launcher.hosts import multinode_runner, ssh
from deepspeed.tools.launcher.hosts.multi_host import exports, read_environment_file
from deepspeed.tools.launcher.launcher_helper import env_mapping
from tests.tools.launcher import fake_machines
from tests.tools.launcher.programs import COMMAND, TIMEOUT_S, environment

psutil = pytest.importorskip("psutil")
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs the Linux kernel's help")

SHOW = """\
import json, os, sys
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_SIZE CROSS_RANK CROSS_SIZE MASTER_ADDR MASTER_PORT CUDA_VISIBLE_DEVICES"
names += " FAKE_HOST SECRET AWKWARD PYTHONPATH DEEPSPEED_NODE_REPORT"
shown = {name: os.environ.get(name) for name in names.split()}
shown |= {"argv": sys.argv[1:], "folder": os.getcwd(), "stdin": sys.stdin.read()}
sys.stdout.write(json.dumps(shown) + "\\n")
"""
END = """\
import os, signal, sys, time
open("ready" + os.environ["RANK"], "w").close()
what = sys.argv[-1]
if os.environ["RANK"] == "1":
    while not os.path.exists("ready0"):
        time.sleep(0.01)
    if what == "raise":
        raise ValueError("boom")
    if what == "leave":
        sys.exit(0)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
elif what in ("raise", "kill", "leave"):
    time.sleep(0.3 if what == "raise" else 2)
    raise ConnectionError("gloo/transport: Connection closed by peer")
time.sleep(120)
"""
HOSTILE = "a b'c\"d;$(touch pwned)`touch pwned`%n%h\\ *&|"
SECRET = "hf_0123456789"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A job's folder with two hosts of one slot each; the stand-ins come first on PATH."""
    fake_machines.install(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "calls"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    (tmp_path / "home").mkdir()
    (tmp_path / "show.py").write_text(SHOW)
    (tmp_path / "end.py").write_text(END)
    (tmp_path / "hosts").write_text("worker-0 slots=1  # the first\nworker-1 slots=1\n")
    return tmp_path


def started(folder, *arguments: object) -> subprocess.Popen[str]:
    where = ["--hostfile", "hosts", "--master_addr", "127.0.0.1"]
    return subprocess.Popen(
        [*COMMAND, *where, *map(str, arguments)],
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(folder, *arguments: object) -> subprocess.CompletedProcess[str]:
    process = started(folder, *arguments)
    out, err = process.communicate(timeout=TIMEOUT_S)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def shown(stdout: str) -> list[dict]:
    ranks = [json.loads(line[line.index("{") :]) for line in stdout.splitlines() if "{" in line]
    return sorted(ranks, key=lambda rank: int(rank["RANK"]))


def calls(folder) -> str:
    return (folder / "calls").read_text()


def nothing_left(folder) -> bool:
    """Within five seconds no process runs in the folder."""
    limit = time.monotonic() + 5
    while time.monotonic() < limit:
        alive = [p for p in psutil.process_iter(["cwd", "status"]) if p.info["cwd"] == str(folder)]
        if all(process.info["status"] == psutil.STATUS_ZOMBIE for process in alive):
            return True
        time.sleep(0.05)
    return False


# ------------------------------------------------------------------------------------------------ over ssh


def test_every_machine_gets_its_ranks_and_its_environment(folder):
    (folder / ".deepspeed_env").write_text(f"# exported\nSECRET={SECRET}\nAWKWARD={HOSTILE}\n")
    result = run(folder, "--launcher", "ssh", "show.py", HOSTILE, "--flag")
    assert result.returncode == 0, result.stderr
    ranks = shown(result.stdout)
    assert [rank["FAKE_HOST"] for rank in ranks] == ["worker-0", "worker-1"]
    assert [(rank["RANK"], rank["CROSS_RANK"], rank["LOCAL_RANK"]) for rank in ranks] == [
        ("0", "0", "0"),
        ("1", "1", "0"),
    ]
    for rank in ranks:
        assert (rank["WORLD_SIZE"], rank["LOCAL_SIZE"], rank["CROSS_SIZE"]) == ("2", "1", "2")
        assert rank["argv"] == ["--local_rank=0", HOSTILE, "--flag"]
        assert (rank["AWKWARD"], rank["SECRET"]) == (HOSTILE, SECRET)
        assert (rank["folder"], rank["stdin"]) == (str(folder), "")
        assert rank["DEEPSPEED_NODE_REPORT"] is None
    assert not (folder / "pwned").exists()
    assert SECRET not in calls(folder) and SECRET not in result.stderr
    assert {line.split(": ")[0] for line in result.stdout.splitlines()} == {"worker-0", "worker-1"}


def test_options_of_ssh(folder):
    options = ["--launcher", "ssh", "--ssh_port", 2222, "--launcher_args", "-F 'my config'", "--num_nodes", 1]
    (folder / "venv.sh").write_text("export SECRET=from_script")
    result = run(folder, *options, "--venv_script", folder / "venv.sh", "show.py")
    assert result.returncode == 0, result.stderr
    (call,) = [json.loads(line) for line in calls(folder).splitlines()]
    assert call[call.index("-p") + 1] == "2222" and call[call.index("-F") + 1] == "my config"
    assert shown(result.stdout)[0]["SECRET"] == "from_script"
    assert result.stdout.startswith("{")  # one machine: no names


@pytest.mark.parametrize("how, code, said", [
    ("raise", 1, "rank 1 (worker-1) of end.py failed first: ValueError: boom (exit code 1)"),
    pytest.param("kill", 137, "rank 1 (worker-1) of end.py failed first: killed by SIGKILL", marks=pytest.mark.slow),
    ("leave", 1, "rank 1 (worker-1) of end.py exited with code 0 while others were training\n"
     "  rank 0 (worker-0): ConnectionError: gloo/transport: Connection closed by peer, "),
])  # fmt: skip
def test_the_first_failure_is_told_once_for_all_machines(folder, how, code, said):
    result = run(folder, "--launcher", "ssh", "end.py", how)
    assert result.returncode == code, result.stderr
    assert said in result.stderr
    assert result.stderr.count("failed first") == (how != "leave")
    assert result.stderr.count("Traceback") == (how == "raise")
    assert nothing_left(folder)


def test_a_host_that_does_not_answer_is_named(folder):
    (folder / "hosts").write_text("worker-0 slots=1\nunreachable slots=1\n")
    result = run(folder, "--launcher", "ssh", "end.py", "wait")
    assert result.returncode == 255
    assert "unreachable: ssh could not connect" in result.stderr
    assert nothing_left(folder)


@pytest.mark.parametrize(
    "victim", ["interrupt", pytest.param("command", marks=pytest.mark.slow), "connection"]
)
def test_whatever_ends_leaves_nothing(folder, victim):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    command = started(folder, "--launcher", "ssh", "end.py", "wait")
    limit = time.monotonic() + TIMEOUT_S
    while not all((folder / f"ready{rank}").exists() for rank in range(2)):
        assert time.monotonic() < limit and command.poll() is None, command.stderr
        time.sleep(0.02)
    if victim == "connection":
        clients = [
            child for child in psutil.Process(command.pid).children() if "ssh.py" in str(child.cmdline())
        ]
        clients[0].kill()
    else:
        command.send_signal(signal.SIGINT if victim == "interrupt" else signal.SIGKILL)
    _, err = command.communicate(timeout=TIMEOUT_S)
    expected = {"interrupt": 130, "command": -signal.SIGKILL, "connection": 137}
    assert command.returncode == expected[victim], err
    assert nothing_left(folder)


# ---------------------------------------------------------------------------------------- other launchers


@pytest.mark.parametrize("launcher", ["pdsh", "openmpi", "mpich", "slurm"])
def test_other_launchers_start_the_same_ranks(folder, launcher):
    (folder / "hosts").write_text("worker-0 slots=3\nworker-1 slots=3\n")
    (folder / ".deepspeed_env").write_text(f"SECRET={SECRET}\nAWKWARD={HOSTILE}\n")
    where = ["--launcher", launcher, "--include", "worker-0:0,2@worker-1:1,2"]
    result = run(folder, *where, "--no_local_rank", "show.py", HOSTILE)
    assert result.returncode == 0, result.stderr
    ranks = shown(result.stdout)
    assert [(r["FAKE_HOST"], r["RANK"], r["LOCAL_RANK"], r["CROSS_RANK"]) for r in ranks] == [
        ("worker-0", "0", "0", "0"),
        ("worker-0", "1", "1", "0"),
        ("worker-1", "2", "0", "1"),
        ("worker-1", "3", "1", "1"),
    ]
    assert [rank["CUDA_VISIBLE_DEVICES"] for rank in ranks] == ["0,2", "0,2", "1,2", "1,2"]
    for rank in ranks:
        assert (rank["WORLD_SIZE"], rank["LOCAL_SIZE"], rank["CROSS_SIZE"]) == ("4", "2", "2")
        assert (rank["AWKWARD"], rank["SECRET"], rank["argv"]) == (HOSTILE, SECRET, [HOSTILE])
    assert not (folder / "pwned").exists()
    assert launcher == "pdsh" or SECRET not in calls(folder)


@pytest.mark.skipif(len(usable_cores()) < 2, reason="needs two cores")
def test_ranks_of_other_launchers_are_bound_to_cores_of_their_own(folder):
    (folder / "hosts").write_text("worker-0 slots=2\nworker-1 slots=2\n")
    (folder / "bound.py").write_text(
        "import json, os\n"
        "names = 'RANK', 'LOCAL_RANK', 'OMP_NUM_THREADS'\n"
        "shown = {name: os.environ[name] for name in names} | {'cores': sorted(os.sched_getaffinity(0))}\n"
        "os.write(1, (json.dumps(shown) + '\\n').encode())\n"
    )
    core_list = ",".join(map(str, usable_cores()[:2]))
    options = ["--launcher", "mpich", "--bind_cores_to_rank", "--bind_core_list", core_list]
    result = run(folder, *options, "bound.py")
    assert result.returncode == 0, result.stderr
    ranks = shown(result.stdout)
    first, second = usable_cores()[:2]
    assert [rank["cores"] for rank in ranks] == [[first], [second], [first], [second]]
    assert {rank["OMP_NUM_THREADS"] for rank in ranks} == {"1"}
    result = run(folder, *options[:-1], "99999", "bound.py")
    assert result.returncode != 0 and "--bind_core_list: core 99999 is not available" in result.stderr


def test_pdsh_ends_what_it_started(folder):
    command = started(folder, "--launcher", "pdsh", "end.py", "wait")
    limit = time.monotonic() + TIMEOUT_S
    while not all((folder / f"ready{rank}").exists() for rank in range(2)):
        assert time.monotonic() < limit and command.poll() is None
        time.sleep(0.02)
    command.send_signal(signal.SIGTERM)
    command.communicate(timeout=TIMEOUT_S)
    assert command.returncode == 128 + signal.SIGTERM
    assert nothing_left(folder)


def test_machines_that_are_started_by_hand(folder):
    port = 29873
    where = ["--no_ssh", "--master_port", port, "show.py"]
    nodes = [started(folder, "--node_rank", rank, *where) for rank in (1, 0)]
    printed = [node.communicate(timeout=TIMEOUT_S) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], printed
    ranks = shown("".join(out for out, _ in printed))
    assert [(rank["RANK"], rank["CROSS_RANK"], rank["MASTER_PORT"]) for rank in ranks] == [
        ("0", "0", str(port)),
        ("1", "1", str(port)),
    ]
    assert not (folder / "calls").exists()


# --------------------------------------------------------------------------------------- command lines


def runner_of(kind: type, *options: str):
    hosts = {"worker-0": 4, "worker-1": 4}
    args = runner.parse_args([*options, "test_launcher.py"])
    args.master_addr, args.master_port = "10.0.0.1", 29500
    rest = () if kind is multinode_runner.PDSHRunner else (hosts,)
    return kind(args, runner.encode_world_info(hosts), *rest), hosts


@pytest.mark.parametrize("kind, program", [
    (multinode_runner.OpenMPIRunner, "mpirun"), (multinode_runner.MPICHRunner, "mpirun"),
    (multinode_runner.IMPIRunner, "mpirun"), (multinode_runner.MVAPICHRunner, "mpirun"),
    (multinode_runner.SlurmRunner, "srun"),
])  # fmt: skip
def test_command_lines_of_launchers_that_start_ranks(folder, kind, program):
    made, hosts = runner_of(kind, "--launcher_args", "--own 'two words'")
    made.add_export("KEY ", " value")
    env: dict[str, str] = {}
    command = made.get_cmd(env, hosts)
    assert command[0] == program and made.backend_exists()
    assert "8" in command[:4] and "two words" in command
    assert env["KEY"] == "value" and "value" not in command
    assert made.name == kind.__name__.removesuffix("Runner").lower()


@pytest.mark.parametrize("kind, off", [
    (multinode_runner.OpenMPIRunner, ["--bind-to", "none"]), (multinode_runner.SlurmRunner, ["--cpu-bind=none"]),
    (multinode_runner.MPICHRunner, []), (multinode_runner.IMPIRunner, []),
])  # fmt: skip
def test_command_lines_that_bind_ranks_to_cores(folder, kind, off):
    plain, hosts = runner_of(kind)
    command = plain.get_cmd({}, hosts)
    assert not [word for word in command if "bind" in word]
    made, hosts = runner_of(kind, "--bind_cores_to_rank", "--bind_core_list", "0-3")
    environment: dict[str, str] = {}
    binding = made.get_cmd(environment, hosts)
    helper = binding.index("deepspeed.tools.launcher.launcher_helper")
    assert {"--bind_cores_to_rank", "--bind_core_list=0-3"} <= set(binding[helper:])
    assert " ".join(off) in " ".join(binding[:helper])
    assert environment.get("I_MPI_PIN") == ("0" if kind is multinode_runner.IMPIRunner else None)
    if off:  # the launcher's own binding is kept if requested
        own = "--cpu-bind=cores" if "=" in off[0] else "-bind-to core"
        made, hosts = runner_of(kind, "--bind_cores_to_rank", f"--launcher_args={own}")
        assert "none" not in " ".join(made.get_cmd({}, hosts))


@pytest.mark.parametrize(("options", "resources", "expected"), [
    ("", {"a": 4, "b": 4}, {"-w": "a,b", "--nodes": "2", "-n": "8"}),
    ("--exclude b", {"a": 4}, {"--nodelist": "a", "--nodes": "1", "-n": "4"}),
    ("--include a:0,1@b:0,1", {"a": 2, "b": 2}, {"--nodelist": "a,b", "--nodes": "2", "-n": "4"}),
    ("--num_gpus 2", {"a": 2, "b": 2}, {"--gpus-per-node": "2", "-n": "4", "--nodes": "2"}),
    ("--num_nodes 1", {"a": 4}, {"--nodes": "1", "-n": "4"}),
])  # fmt: skip
def test_command_line_of_slurm(folder, monkeypatch, options, resources, expected):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    made, hosts = runner_of(multinode_runner.SlurmRunner, *options.split())
    left = runner.parse_inclusion_exclusion(dict.fromkeys("ab", 4), made.args.include, made.args.exclude)
    left = runner.apply_num_nodes_and_gpus(left, made.args.num_nodes, made.args.num_gpus)
    assert {host: len(slots) for host, slots in left.items()} == resources
    command = made.get_cmd({}, left)
    assert all(command.count(flag) == 1 and command[command.index(flag) + 1] == value
               for flag, value in expected.items())  # fmt: skip
    flags = {"--nodelist", "-w", "--gpus-per-node"} & set(command)
    assert flags - set(expected) <= {"-w"}
    monkeypatch.setenv("SLURM_JOB_ID", "1")  # an allocation without GPUs has none to give
    assert "--gpus-per-node" not in made.get_cmd({}, left)


def test_slots_that_a_launcher_cannot_serve(folder):
    uneven = {"a": [0, 1], "b": [0]}
    for kind in multinode_runner.RUNNERS.values():
        if kind is not multinode_runner.SlurmRunner:
            kind.validate_active_resources(uneven)
    with pytest.raises(ValueError, match="same slot count on every host.*a: 2, b: 1"):
        multinode_runner.SlurmRunner.validate_active_resources(uneven)
    (folder / "hosts").write_text("a slots=4\nb slots=4\n")
    with pytest.raises(ValueError, match="same slot count"):
        runner.main(["--hostfile", str(folder / "hosts"), "--launcher", "slurm", "--exclude", "b:0", "t.py"])


def test_command_line_of_pdsh(folder):
    made, hosts = runner_of(multinode_runner.PDSHRunner, "--ssh_port", "2222")
    made.add_export("AWKWARD", "100% 'sure'")
    command, end, env = made.get_cmd({}, hosts)
    assert command[:6] == ["pdsh", "-S", "-f", "1024", "-w", "worker-0,worker-1"]
    assert (env["PDSH_RCMD_TYPE"], env["PDSH_SSH_ARGS_APPEND"]) == ("ssh", "-p 2222")
    assert "100%% " in command[-1] and "--node_rank=%n" in command[-1]
    kill = shlex.split(end[-1].replace("%%", "%"))
    assert end[0] == "pdsh" and kill[:3] == ["pkill", "-TERM", "-f"]
    started = " ".join(shlex.split(command[-1].rpartition("exec ")[2].replace("%%", "%")))
    assert re.search(kill[3], started) and not re.search(kill[3], " ".join(kill))


def test_exports_are_kept_as_a_shell_takes_them(folder):
    made, hosts = runner_of(multinode_runner.OpenMPIRunner)
    for value, shown in (
        ("64(x2)", '"64(x2)"'),
        ("/a/b-c:1", "/a/b-c:1"),
        ('say "$HOME"', '"say \\"\\$HOME\\""'),
    ):
        made.add_export("VALUE", value)
        assert made.exports["VALUE"] == shown
        env: dict[str, str] = {}
        made.get_cmd(env, hosts)
        assert env["VALUE"] == value
        told = subprocess.run(["sh", "-c", f"printf %s {shown}"], capture_output=True, text=True, check=True)
        assert told.stdout == value


def test_the_network_of_open_mpi_can_be_chosen(folder):
    made, hosts = runner_of(multinode_runner.OpenMPIRunner)
    command = made.get_cmd({}, hosts)  # of other machines nothing is known: the documented default
    assert command[command.index("btl_tcp_if_include") + 1] == "eth0"
    for given in ("-mca btl_tcp_if_include eth1", "--mca btl_tcp_if_include eth1"):
        made, hosts = runner_of(multinode_runner.OpenMPIRunner, "--launcher_arg", given)
        command = made.get_cmd({}, hosts)
        assert "eth1" in command and "eth0" not in command


@pytest.mark.parametrize("options, words", [
    ("--launcher rsh", "--launcher=rsh: must be one of ssh, pdsh"),
    ("--launcher mpich --include worker-0:0@worker-1:0,1", "the same number of ranks"),
    ("--launcher openmpi --enable_each_rank_log logs", "--enable_each_rank_log is only supported by"),
    ("--no_ssh", "--no_ssh needs --node_rank"),
    ("--no_ssh --node_rank 2", "0 to 1"),
    ("--no_ssh --node_rank 0", "--master_addr"),
    ("--node_rank 0", "add --no_ssh"),
    ("--num_nodes 1:2", "MIN:MAX needs --elastic_training"),
])  # fmt: skip
def test_what_cannot_be_started_is_refused(folder, monkeypatch, options, words):
    monkeypatch.chdir(folder)
    (folder / "hosts").write_text("worker-0 slots=2\nworker-1 slots=2\n")
    address = [] if "--no_ssh" in options else ["--master_addr", "127.0.0.1"]
    with pytest.raises(LaunchError, match=words):
        runner.main(["--hostfile", "hosts", *address, *options.split(), "show.py"])


def test_a_launcher_that_is_missing_is_named(folder, monkeypatch):
    (folder / "bin" / "mpirun").unlink()
    monkeypatch.setenv("PATH", str(folder / "bin"))
    monkeypatch.chdir(folder)
    with pytest.raises(LaunchError, match="--launcher=openmpi: not installed"):
        runner.main(["-H", "hosts", "--master_addr", "127.0.0.1", "--launcher", "openmpi", "show.py"])


@pytest.mark.parametrize("host", ["-oProxyCommand=touch", "a,b", "a;b", "$(x)", "n[1-2]", ""])
def test_host_names_that_would_be_something_else_are_refused(host):
    with pytest.raises(LaunchError, match="host name"):
        checked_host(host)


def test_the_check_of_the_first_host(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "hosts").write_text("unreachable slots=1\nworker-1 slots=1\n")
    with pytest.raises(LaunchError, match="ssh to unreachable failed: .*No route to host"):
        runner.main(["-H", "hosts", "--launcher", "pdsh", "--master_addr", "127.0.0.1", "show.py"])


# ------------------------------------------------------------------------------------------------- parts


def test_what_is_exported(folder, monkeypatch):
    here = {
        "NCCL_DEBUG": "INFO",
        "HF_TOKEN": SECRET,
        "PYTHONPATH": "x",
        "DEEPSPEED_RUNNER_PID": "1",
        "PATH": "p",
    }
    (folder / "home" / ".deepspeed_env").write_text("A=1\nB=home\n")
    (folder / ".deepspeed_env").write_text("B = c=d \n\n")
    found = exports(here, (str(folder / "home"), str(folder)))
    assert found == {"NCCL_DEBUG": "INFO", "PYTHONPATH": "x", "PATH": "p", "A": "1", "B": " c=d "}
    (folder / "bad").write_text(f"{SECRET}\n")
    with pytest.raises(LaunchError, match="line 1: each line must read NAME=VALUE") as refusal:
        read_environment_file(folder / "bad")
    assert SECRET not in str(refusal.value)


def test_more_can_be_exported(monkeypatch):
    monkeypatch.setenv("MINE_TOO", "1")
    assert "MINE_TOO" not in exports(folders=("nowhere",))
    runner.EXPORT_ENVS.append("MINE")
    try:
        assert exports(folders=("nowhere",))["MINE_TOO"] == "1"
    finally:
        runner.EXPORT_ENVS.remove("MINE")


def test_number_of_nodes():
    assert runner.parse_num_nodes("3", elastic_training=False) == (3, -1)
    assert runner.parse_num_nodes("2:4", elastic_training=True) == (2, 4)
    for text, elastic in (("2:4", False), ("a", False), ("1:2:3", True)):
        with pytest.raises(LaunchError, match="--num_nodes"):
            runner.parse_num_nodes(text, elastic)


def test_ranks_from_the_variables_of_a_launcher():
    env = env_mapping(
        {"PMI_RANK": "3", "MPI_LOCALRANKID": "1"}, ["PMIX_RANK", "PMI_RANK"], ["MPI_LOCALRANKID"]
    )
    assert (env["RANK"], env["LOCAL_RANK"]) == ("3", "1")
    with pytest.raises(EnvironmentError, match="RANK is ambiguous: A=1, B=2"):
        env_mapping({"A": "1", "B": "2"}, ["A", "B"])


def test_the_address_of_rank_0(folder):
    assert master_address(["localhost", "127.0.0.2"], ["ssh"]) == "127.0.0.1"
    (folder / "bin" / "hostname").write_text("#!/bin/sh\necho fe80::1 10.1.2.3\n")
    (folder / "bin" / "hostname").chmod(0o755)
    (folder / "bin" / "ssh").write_text('#!/bin/sh\necho "name 10.1.2.3"\n')
    assert master_address(["only-ssh-knows", "b"], ["ssh"]) == "10.1.2.3"


class WaitingQueue:
    """A queue that counts how often it is waited for."""

    def __init__(self, *events):
        self.events, self.waits = list(events), 0

    def get(self, timeout):
        self.waits += 1
        if self.events:
            return self.events.pop()
        time.sleep(timeout)
        raise queue.Empty


class StuckConnection:
    """A node that only ends when it is killed."""

    def __init__(self, node):
        self.node, self.asked = node, []

    def ask(self, signum):
        self.asked.append(signum)

    def kill(self):
        self.node.exit_code = 137


def test_a_job_that_ends_does_not_try_lost_machines_again(monkeypatch):
    monkeypatch.setattr(ssh, "grace_seconds", lambda: 0.0)
    monkeypatch.setattr(ssh, "LAST_RESORT_S", 0.3)
    stuck = StuckConnection(ssh.SshNode("a", []))
    job = ssh.RemoteJob(script="train.py", environment={}, min_nodes=1)
    machines = ssh._Machines(job, [stuck], lambda node: pytest.fail("reconnected"))
    machines._away.append(ssh.SshNode("b", []))
    machines.retry_at = time.monotonic() + 0.05
    ended = WaitingQueue(None)
    ssh._watch(machines, ended, [signal.SIGINT])
    assert stuck.asked == [signal.SIGINT]
    assert ended.waits < 10


def test_a_command_on_every_machine(folder, capfd):
    assert ds_ssh.main(["-f", str(folder / "hosts"), "--ssh_port", "22", "echo", "$FAKE_HOST"]) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["worker-0: worker-0", "worker-1: worker-1"]
    assert ds_ssh.main(["-f", str(folder / "hosts"), "-e", "worker-0", "exit 7"]) == 7
    assert ds_ssh.main(["-f", str(folder / "none"), "true"]) == 2
    assert "no such file" in capfd.readouterr().err
