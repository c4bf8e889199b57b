from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from deepspeed.base import numa


@pytest.mark.parametrize(
    ("text", "cores"),
    [("0-3,5,7-8", [0, 1, 2, 3, 5, 7, 8]), ("4", [4]), ("2-2", [2]), (" 1 - 2 , 4", [1, 2, 4])],
)
def test_core_lists(text: str, cores: list[int]) -> None:
    assert numa.parse_range_list(text) == cores
    assert numa.parse_range_list(numa.format_range_list(cores)) == cores


@pytest.mark.parametrize("text", ["3-1", "a-b", "1,1", "5,1-2", "0-3,2", "", "1-", "-1", "1,,2"])
def test_bad_core_lists(text: str) -> None:
    with pytest.raises(ValueError, match="Core list"):
        numa.parse_range_list(text)


def test_format() -> None:
    assert numa.format_range_list([5, 0, 1, 2, 7, 8]) == "0-2,5,7-8" and numa.format_range_list([]) == ""


def test_shares_of_ranks() -> None:
    assert [numa.cores_of_rank("0-3,8-11", 2, rank) for rank in (0, 1)] == [[0, 1, 2, 3], [8, 9, 10, 11]]
    assert numa.cores_of_rank("0-6", 3, 2) == [4, 5]  # the remaining core is not assigned
    everything = numa.available_cores()
    assert numa.cores_of_rank(None, 1, 0) == everything
    with pytest.raises(ValueError, match=r"--bind_core_list: 4 ranks do not fit on the 3 cores '0-2'"):
        numa.cores_of_rank("0-2", 4, 0)


def nodes(tmp_path: Path, *cpulists: str) -> Path:
    for index, cpulist in enumerate(cpulists):
        (tmp_path / f"node{index}").mkdir()
        (tmp_path / f"node{index}" / "cpulist").write_text(cpulist + "\n")
    return tmp_path


@pytest.fixture
def numactl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts a numactl on the path that says these things when it is given the option."""

    def make(**says: str) -> None:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        cases = "".join(f'    -{option}) echo "{text}" >&2; exit 1 ;;\n' for option, text in says.items())
        script = f'#!/bin/sh\nfor word in "$@"; do case "$word" in\n{cases}    *) ;;\nesac; done\n'
        (folder / "numactl").write_text(script)
        (folder / "numactl").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    monkeypatch.delenv("KMP_AFFINITY", raising=False)
    make()
    return make


@pytest.mark.usefixtures("numactl")
def test_command_binds_memory_inside_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "NODES", nodes(tmp_path, "", "0-3,8-11", "4-7,12-15"))
    assert numa.get_numa_cores() == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]
    assert numa.get_numactl_cmd("0-7", 2, 0) == (4, ["numactl", "-m", "1", "-C", "0-3"])
    assert numa.get_numactl_cmd("0-7", 2, 1) == (4, ["numactl", "-m", "2", "-C", "4-7"])
    assert numa.get_numactl_cmd("0-7", 1, 0) == (8, ["numactl", "-C", "0-7"])  # over both nodes


@pytest.mark.usefixtures("numactl")
def test_command_on_one_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "NODES", nodes(tmp_path, "0-7"))
    assert numa.get_numactl_cmd("0-7", 2, 1) == (4, ["numactl", "-m", "0", "-C", "4-7"])
    monkeypatch.setattr(numa, "NODES", tmp_path / "absent")
    assert numa.get_numa_cores() == [] and numa.get_numactl_cmd("0-3", 2, 0) == (2, ["numactl", "-C", "0-1"])


@pytest.mark.usefixtures("numactl")
def test_command_with_special_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast, pretended = tmp_path / "fast", tmp_path / "pretended"
    for folder, cpulists in ((fast, ("0-3", "4-7", "", "")), (pretended, ("0-3", "0-3", "4-7", "4-7"))):
        folder.mkdir()
        monkeypatch.setattr(numa, "NODES", nodes(folder, *cpulists))
        options = ["-p", "3"] if folder is fast else ["-m", "2,3"]
        assert numa.get_numactl_cmd("0-7", 2, 1)[1] == ["numactl", *options, "-C", "4-7"]


DENIED = "set_mempolicy: Operation not permitted"


def test_command_leaves_out_what_is_not_permitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numactl: Callable[..., None]
) -> None:
    monkeypatch.setattr(numa, "NODES", nodes(tmp_path, "0-7"))
    numactl(m=DENIED)
    assert numa.get_numactl_cmd("0-7", 2, 0) == (4, ["numactl", "-C", "0-3"])
    numactl(m=DENIED, C="sched_setaffinity: Permission denied")
    assert numa.get_numactl_cmd("0-7", 2, 0) == (4, [])


def test_command_that_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numactl: Callable[..., None]
) -> None:
    monkeypatch.setattr(numa, "NODES", nodes(tmp_path, "0-7"))
    for kind in (ValueError, RuntimeError):
        numactl(m="node argument 0 is out of range")
        with pytest.raises(kind, match=r"numactl -m 0 -C 0-3: node argument 0 is out of range"):
            numa.get_numactl_cmd("0-7", 2, 0)
    numactl(m=DENIED, C="cpu argument 0-3 is out of range")
    with pytest.raises(numa.NumactlError, match=r"numactl -C 0-3: cpu argument"):
        numa.get_numactl_cmd("0-7", 2, 0)
    monkeypatch.setenv("KMP_AFFINITY", "compact")
    with pytest.raises(ValueError, match="KMP_AFFINITY='compact'.*unset"):
        numa.get_numactl_cmd("0-7", 2, 0)


def test_command_without_numactl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KMP_AFFINITY", raising=False)
    monkeypatch.setattr(numa.shutil, "which", lambda name: None)
    with pytest.raises(numa.NumactlError, match="numactl was not found: install"):
        numa.get_numactl_cmd("0-7", 2, 0)


def test_numactl_is_looked_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(numa.shutil, "which", lambda name: None)
    assert not numa.check_for_numactl_pkg() and "install the package" in capsys.readouterr().out
    monkeypatch.setattr(numa.shutil, "which", lambda name: f"/bin/{name}")
    assert numa.check_for_numactl_pkg()
