"""The command line: what is parsed, what is refused before any process starts, and that it costs no torch."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from deepspeed.tools import ds
from deepspeed.tools.config import command as config_command
from deepspeed.tools.launcher import cores, devices, launch, ports, runner
from deepspeed.tools.launcher.errors import LaunchError
from deepspeed.tools.nvme import ds_io
from tests.tools.launcher.programs import REPOSITORY, deepspeed, environment

DOCUMENTED = {
    "hostfile": "/job/hostfile", "include": "", "exclude": "", "num_nodes": -1, "min_elastic_nodes": -1,
    "max_elastic_nodes": -1, "num_gpus": -1, "master_port": 29500, "master_addr": "", "node_rank": -1,
    "launcher": "pdsh", "launcher_args": "",
    "module": False, "no_python": False, "no_local_rank": False,
    "no_ssh": False, "no_ssh_check": False, "force_multi": False, "save_pid": False,
    "enable_each_rank_log": None,
    "autotuning": "", "elastic_training": False, "bind_cores_to_rank": False, "bind_core_list": None,
    "ssh_port": None, "venv_script": None, "log_level": "info", "quiet": False,
}  # fmt: skip


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A script in the current folder, on a machine without accelerators."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    (tmp_path / "train.py").write_text("")
    return "train.py"


def test_documented_defaults():
    parsed = vars(runner.parse_args(["train.py"]))
    assert {name: parsed[name] for name in DOCUMENTED} == DOCUMENTED


def test_all_after_the_script_is_the_scripts():
    mine = ["--num_gpus", "8", "-q", "--b", "--", "x", "--module"]
    parsed = runner.parse_args(["--num_accelerators", "2", "-i", "a", "train.py", *mine])
    assert (parsed.num_gpus, parsed.user_script, parsed.user_args) == (2, "train.py", mine)
    assert not parsed.quiet and not parsed.module


def test_options_for_the_launcher_below_may_be_a_word_of_their_own():
    given = ["--launcher", "ssh", "--launcher_args", "--x=y", "train.py", "--launcher_args", "-z"]
    parsed = runner.parse_args(given)
    assert parsed.launcher_args == "--x=y"
    assert (parsed.user_script, parsed.user_args) == ("train.py", ["--launcher_args", "-z"])
    assert runner.parse_args(["--launcher_arg", "-F file", "train.py"]).launcher_args == "-F file"
    assert runner.parse_args(["--launcher_args=-p 2", "train.py", "-q"]).user_args == ["-q"]
    assert runner.parse_args(["-q", "--num_gpus", "2", "train.py", "--launcher_args", "-z"]).user_args


@pytest.mark.parametrize(
    "arguments, named",
    [
        ("--num_gpus 1 --include localhost train.py", "--num_gpus"),
        ("--num_gpus 1 --exclude localhost train.py", "--exclude"),
        ("--num_nodes 1 --include localhost train.py", "--num_nodes"),
        ("--include localhost:0 --exclude localhost:1 train.py", "mutually exclusive"),
        ("--include localhost:99999 train.py", "No slot '99999' .*localhost"),
        ("--include elsewhere train.py", "elsewhere"),
        ("--exclude localhost train.py", "no device"),
        ("--num_gpus 0 train.py", "--num_gpus=0"),
        ("--hostfile missing train.py", "--hostfile=missing"),
        ("--module --no_python train.py", "--no_python"),
        ("nosuch.py", "nosuch.py"),
        ("--no_python nosuchprogram", "nosuchprogram"),
        ("--num_nodes 2 train.py", "--num_nodes=2: list the machines"),
        ("--no_ssh --node_rank 1 train.py", "--no_ssh needs --node_rank"),
        ("--autotuning run train.py", "--autotuning"),
        ("--min_elastic_nodes 2 train.py", "--min_elastic_nodes needs --elastic_training"),
        (
            "--elastic_training --min_elastic_nodes 3 --max_elastic_nodes 2 train.py",
            "--min_elastic_nodes=3 is above",
        ),
        ("--master_port 99999 train.py", "--master_port=99999"),
        ("--master_port 0 train.py", "--master_port=0"),
        ("--num_gpus -2 train.py", "--num_gpus=-2"),
        ("--num_gpus 99999999999 train.py", "--num_gpus=99999999999: a host has at most 4096 slots"),
        (
            "--no_ssh --node_rank 0 --num_nodes 99999999999 train.py",
            "--num_nodes=99999999999: at most 100000",
        ),
    ],
)
def test_refusals_name_the_option(script, arguments, named):
    with pytest.raises(ValueError, match=named):
        runner.main(arguments.split())


def test_the_default_number_of_ranks_cannot_be_asked_for(script):
    """-1 stands for "all" where the option is left out."""
    with pytest.raises(LaunchError, match="--num_gpus=-1: must be at least 1"):
        runner.main(["--num_gpus", "-1", script])


@pytest.mark.parametrize(
    "tool, given, meant",
    [
        (runner.parse_args, ["--num_gpu", "2", "train.py"], "--num_gpus"),
        (runner.parse_args, ["--gpus=2", "train.py"], "--num_gpus"),
        (config_command.main, ["ds.json", "--no_color"], "--no-color"),
        (ds_io.main, ["--folder", ".", "--io_size", "1M", "--queue_deph", "3"], "--queue_depth"),
    ],
)
def test_a_wrong_option_is_answered_with_the_right_one(capsys, tool, given, meant):
    with pytest.raises(SystemExit, match="2"):
        tool(given)
    said = capsys.readouterr().err
    assert f"did you mean {meant}" in said and said.count("unrecognized") == 1


def test_ds_lists_its_tools_and_runs_them(capsys, tmp_path):
    assert ds.main([]) == 0
    listed = capsys.readouterr().out
    for name, tool in ds.TOOLS.items():
        assert f"ds {name} " in listed and tool.purpose in listed
        with pytest.raises(SystemExit, match="0"):
            ds.main([name, "--help"])
        assert "usage:" in capsys.readouterr().out
    assert ds.main(["chek", "ds.json"]) == 2
    assert "did you mean 'ds check'?" in capsys.readouterr().err
    assert ds.main(["io", "--folder", str(tmp_path), "--io_size", "1M", "--gpu"]) == 2
    assert "--gpu: torch found no accelerator" in capsys.readouterr().err


def test_hostfile_of_other_machines_needs_ssh(script, tmp_path, monkeypatch):
    (tmp_path / "hosts").write_text("192.0.2.1 slots=2\n198.51.100.2 slots=2\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="no ssh on PATH"):
        runner.main(["--hostfile", "hosts", script])
    with pytest.raises(LaunchError, match="no ssh on PATH"):
        runner.main(["--hostfile", "hosts", "--num_nodes", "1", script])


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", socket.gethostname()])
def test_hostfile_of_this_machine(script, tmp_path, host):
    (tmp_path / "hosts").write_text(f"{host} slots=4\n")
    chosen = devices.choose_devices(runner.parse_args(["--hostfile", "hosts", "--num_gpus", "2", script]))
    assert chosen == {host: [0, 1]}


def test_cpu_host_runs_a_rank_per_numa_node_or_as_many_as_asked(script, monkeypatch):
    monkeypatch.setattr(cores, "numa_node_count", lambda: 2)
    monkeypatch.setattr(cores, "core_budget", lambda: 8)
    assert devices.choose_devices(runner.parse_args([script])) == {"localhost": [0, 1]}
    for none in ("", "/dev/null"):  # what scripts write for "no hostfile"
        assert devices.choose_devices(runner.parse_args(["--hostfile", none, script])) == {
            "localhost": [0, 1]
        }
    assert devices.choose_devices(runner.parse_args(["--num_gpus", "3", script])) == {"localhost": [0, 1, 2]}
    assert devices.choose_devices(runner.parse_args(["-i", "localhost:5,7", script])) == {"localhost": [5, 7]}


@pytest.mark.parametrize(
    "options, visible, chosen",
    [
        ([], None, [0, 1, 2, 3]),
        ([], "3,1", [3, 1]),
        (["--num_gpus", "2"], "3,1", [0, 1]),
        (["--include", "localhost:2"], "3,1", [2]),
        (["--exclude", "localhost:2"], None, [0, 1, 3]),
    ],
)
def test_devices_of_a_gpu_host(script, monkeypatch, options, visible, chosen):
    monkeypatch.setattr(devices, "accelerator_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert devices.choose_devices(runner.parse_args([*options, script])) == {"localhost": chosen}


def test_more_devices_than_there_are(script, monkeypatch):
    monkeypatch.setattr(devices, "accelerator_count", lambda: 4)
    with pytest.raises(ValueError, match="has 4 devices"):
        devices.choose_devices(runner.parse_args(["--num_gpus", "8", script]))


def test_cores_are_divided_in_equal_runs():
    assert cores.divide([0, 1, 2, 3, 4], 2) == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="--bind_cores_to_rank"):
        cores.divide([0], 2)
    with pytest.raises(ValueError, match="--bind_core_list"):
        cores.binding("99999", 1)
    usable = cores.usable_cores()
    assert usable and cores.core_budget() <= len(usable)


def test_taken_port_is_refused_if_chosen_and_replaced_if_not():
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        assert not ports.is_free("127.0.0.1", taken)
        with pytest.raises(ValueError, match=rf"--master_port={taken} is in use.*\d+, which is free"):
            runner.choose_port(runner.parse_args(["--master_port", str(taken), "x"]), "127.0.0.1")
        unasked = runner.parse_args(["x"])
        unasked.master_port = taken
        with runner.choose_port(unasked, "127.0.0.1") as other:
            assert other.port != taken and ports.is_free("127.0.0.1", other.port)
    assert ports.is_free("127.0.0.1", taken)
    with runner.choose_port(unasked, "127.0.0.1") as usual:
        assert usual.port == taken


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ports are reserved on Linux")
def test_port_of_another_launcher_is_kept_if_chosen_and_replaced_if_not():
    # not of those that launchers choose from, as other tests start some meanwhile
    lowest, count = 20000 + os.getpid() % 4000, 100
    port = next(port for port in range(lowest, lowest + count) if ports.is_free("127.0.0.1", port))
    unasked, asked = runner.parse_args(["x"]), runner.parse_args(["--master_port", str(port), "x"])
    unasked.master_port = port
    for first in (unasked, asked):
        with runner.choose_port(first, "127.0.0.1") as held:
            assert held.port == port and held.is_ours
            with runner.choose_port(unasked, "127.0.0.1") as other:
                assert other.port != port and other.is_ours
                with runner.choose_port(unasked, "127.0.0.1") as third:
                    assert third.port not in (port, other.port)
            with runner.choose_port(asked, "127.0.0.1") as same:
                assert same.port == port
            with runner.choose_port(unasked, "127.0.0.1") as other:  # the end of another changes nothing
                assert other.port != port


@pytest.mark.parametrize("text", ["None", "?", "bm90IGpzb24=", runner.encode_world_info({"a": 3})])  # type: ignore[dict-item]
def test_bad_world_info_is_refused(text):
    with pytest.raises(ValueError, match="--world_info"):
        launch.decode_world_info(text)


def test_usage_errors_exit_with_2_and_say_where_they_are_explained(tmp_path):
    result = deepspeed("--num_gpus", 2, "nosuch.py", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("[deepspeed] error: there is no script 'nosuch.py'")
    assert result.stderr.splitlines()[1:] == ["explained in docs/troubleshooting.md#launcherror"]


def test_the_command_imports_no_torch():
    code = (
        "import sys, deepspeed.tools.launcher.runner as r; r.parse_args(['x']); print('torch' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, cwd=REPOSITORY
    )
    assert result.stdout.strip() == "False", result.stderr


def test_help_names_every_documented_option(capsys):
    with pytest.raises(SystemExit) as end:
        runner.parse_args(["--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0
    missing = [name for name in DOCUMENTED if f"--{name}" not in text]
    assert not missing
    assert os.linesep * 4 not in text
