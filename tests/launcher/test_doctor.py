"""`ds doctor`: what it says of facts, and that it collects them here and over ssh (a stand-in)."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from deepspeed.launcher import doctor
from deepspeed.launcher.doctor import BAD, OK, WARNING, Finding, collect, findings_between, findings_of, table
from tests.launcher import fake_machines

FINE: dict[str, Any] = {
    "host": "h",
    "time": 0.0,
    "versions": {"python": "3.11", "deepspeed": "1.0", "torch": "2.6"},
    "port": 29500,
    "port_free": True,
    "shared_memory": 2**30,
    "open_files": None,
    "locked": None,
    "interfaces": ["lo", "eth0"],
    "chosen": {},
    "left_over": [],
    "folder": "/data",
    "writable": True,
    "free_disk": 100 * 2**30,
    "sees_token": True,
    "reaches": "",
}


def wrong(findings: Any) -> list[tuple[str, str]]:
    found = [finding for finding in findings if finding.state != OK]
    assert all(finding.remedy for finding in found)
    return [(finding.check, finding.state) for finding in found]


def test_a_good_machine_has_nothing_to_remedy() -> None:
    assert wrong(findings_of(FINE, "h")) == [] and wrong(findings_between(FINE, FINE, "h", 0.5)) == []


@pytest.mark.parametrize(
    ("fact", "check", "state"),
    [
        ({"versions": {"python": "3.11", "torch": ""}}, "versions", BAD),
        ({"port_free": False}, "rendezvous port", WARNING),
        ({"shared_memory": 2**26}, "/dev/shm", WARNING),
        ({"open_files": 256}, "open files", WARNING),
        ({"locked": 65536}, "locked memory", WARNING),
        ({"chosen": {"GLOO_SOCKET_IFNAME": "ib0"}}, "network interface", BAD),
        ({"left_over": ["RANK"]}, "environment", WARNING),
        ({"writable": False}, "folder", WARNING),
        ({"free_disk": 2**20}, "folder", WARNING),
    ],
)
def test_what_is_wrong_with_one_machine(fact: dict[str, Any], check: str, state: str) -> None:
    assert wrong(findings_of({**FINE, **fact}, "h")) == [(check, state)]


@pytest.mark.parametrize("value", ["eth", "eth0", "^docker0,lo", "=eth0", "ib0,eth0"])
def test_lists_of_interfaces(value: str) -> None:
    assert wrong(findings_of({**FINE, "chosen": {"NCCL_SOCKET_IFNAME": value}}, "h")) == []


@pytest.mark.parametrize(
    ("fact", "offset_s", "check", "state"),
    [
        ({"versions": {**FINE["versions"], "torch": "2.7"}}, 0.0, "same versions", BAD),
        ({}, -3.0, "clock", WARNING),
        ({"sees_token": False}, 0.0, "shared folder", WARNING),
        ({"reaches": "10.0.0.1:4711: timed out"}, 0.0, "reaches rank 0", BAD),
    ],
)
def test_what_only_a_comparison_shows(fact: Any, offset_s: float, check: str, state: str) -> None:
    assert wrong(findings_between(FINE, {**FINE, **fact}, "h", offset_s)) == [(check, state)]


def test_the_table_has_a_remedy_below_each_line() -> None:
    lines = table([Finding(OK, "h", "clock", "+0.0 s"), Finding(BAD, "h", "ssh", "refused", "copy the key")])
    assert lines[1].split() == ["ok", "h", "clock", "+0.0", "s"]
    assert lines[3].split() == ["->", "copy", "the", "key"] and lines[-1] == "2 checks: 1 bad, 0 warnings"


def test_facts_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").touch()
    monkeypatch.setenv("RANK", "0")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        facts = collect(port, str(tmp_path), "token", ("127.0.0.1", port))
    assert not facts["port_free"] and facts["sees_token"] and facts["reaches"] == "" and facts["writable"]
    assert "RANK" in facts["left_over"] and facts["versions"]["torch"]
    assert collect(port, str(tmp_path), "other", ("127.0.0.1", port))["reaches"].startswith(
        f"127.0.0.1:{port}: "
    )


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    fake_machines.install(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "calls"))
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "hosts"
    file.write_text("localhost slots=1\nworker-1 slots=1\nunreachable slots=1\n")
    return file


def test_machines_of_a_hostfile(hosts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--hostfile", str(hosts)]) == 1
    lines = capsys.readouterr().out.splitlines()
    of_worker = {" ".join(line.split()[2:4]): line for line in lines if " worker-1 " in line}
    assert of_worker["same versions"].split()[0] == OK and of_worker["shared folder"].split()[0] == OK
    assert of_worker["clock +0.0"].split()[0] == OK
    unreachable = next(number for number, line in enumerate(lines) if " unreachable " in line)
    assert lines[unreachable].startswith(BAD) and "No route to host" in lines[unreachable]
    assert "without a password" in lines[unreachable + 1]
    assert not list(hosts.parent.glob(".ds_doctor_*"))


def test_a_hostfile_that_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--hostfile", "nowhere"]) == 2
    assert "nowhere: no such file" in capsys.readouterr().err
