"""`ds doctor`: what it says of facts, and that it collects them here and over ssh (a stand-in)."""

from __future__ import annotations

import argparse
import itertools
import os
import re
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from deepspeed.tools import doctor
from deepspeed.tools.doctor import (
    BAD,
    OK,
    WARNING,
    DoctorFinding,
    check_machine,
    compare_machines,
    report_this_machine,
    table,
)
from deepspeed.tools.launcher.hosts import bandwidth
from tests.pool import free_port
from tests.tools.launcher import fake_machines

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
    assert wrong(check_machine(FINE, "h")) == [] and wrong(compare_machines(FINE, FINE, "h", 0.5)) == []


@pytest.mark.parametrize(
    ("fact", "check", "state"),
    [
        ({"versions": {"python": "3.11", "torch": ""}}, "versions", BAD),
        ({"port_free": False}, "rendezvous port", WARNING),
        ({"shared_memory": 2**26}, "/dev/shm", WARNING),
        ({"open_files": 256}, "open files", WARNING),
        ({"locked": 65536}, "locked memory", WARNING),
        ({"chosen": {"GLOO_SOCKET_IFNAME": "ib0"}}, "network interface", BAD),
        ({"chosen": {"NCCL_SOCKET_IFNAME": "=eth"}}, "network interface", BAD),
        ({"left_over": ["RANK"]}, "environment", WARNING),
        ({"writable": False}, "folder", WARNING),
        ({"free_disk": 2**20}, "folder", WARNING),
    ],
)
def test_what_is_wrong_with_one_machine(fact: dict[str, Any], check: str, state: str) -> None:
    assert wrong(check_machine({**FINE, **fact}, "h")) == [(check, state)]


@pytest.mark.parametrize("value", ["eth", "eth0", "^docker0,lo", "=eth0", "^=eth", "ib0,eth0"])
def test_lists_of_interfaces(value: str) -> None:
    assert wrong(check_machine({**FINE, "chosen": {"NCCL_SOCKET_IFNAME": value}}, "h")) == []


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
    assert wrong(compare_machines(FINE, {**FINE, **fact}, "h", offset_s)) == [(check, state)]


def test_the_table_has_a_remedy_below_each_line() -> None:
    lines = table(
        [DoctorFinding(OK, "h", "clock", "+0.0 s"), DoctorFinding(BAD, "h", "ssh", "refused", "copy the key")]
    )
    assert lines[1].split() == ["ok", "h", "clock", "+0.0", "s"]
    assert lines[3].split() == ["->", "copy", "the", "key"] and lines[-1] == "2 checks: 1 bad, 0 warnings"


def test_facts_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").touch()
    monkeypatch.setenv("RANK", "0")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        facts = report_this_machine(port, str(tmp_path), "token", ("127.0.0.1", port))
    assert not facts["port_free"] and facts["sees_token"] and facts["reaches"] == "" and facts["writable"]
    assert "RANK" in facts["left_over"] and facts["versions"]["torch"]
    assert report_this_machine(port, str(tmp_path), "other", ("127.0.0.1", port))["reaches"].startswith(
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
    pair = next(line for line in lines if "localhost - worker-1" in line)
    assert pair.startswith(OK) and re.search(r"bandwidth +to worker-1 \d+ MB/s, to localhost \d+ MB/s$", pair)
    assert any(" worker-1 " in line and " names " in line and "unreachable" in line for line in lines)
    unreachable = next(
        number for number, line in enumerate(lines) if " unreachable " in line and " ssh " in line
    )
    assert lines[unreachable].startswith(BAD) and "No route to host" in lines[unreachable]
    assert "without a password" in lines[unreachable + 1]
    assert not list(hosts.parent.glob(".ds_doctor_*"))


def test_every_pair_meets_once_and_no_machine_is_in_two_pairs_of_a_round() -> None:
    for count in (2, 3, 4, 5, bandwidth.ALL_PAIRS_OF, bandwidth.ALL_PAIRS_OF + 1):
        names = [str(number) for number in range(count)]
        found = list(bandwidth.rounds(names))
        assert all(len({name for pair in each for name in pair}) == 2 * len(each) for each in found)
        met = [frozenset(pair) for each in found for pair in each]
        neighbours = {frozenset((a, b)) for a, b in zip(names, [*names[1:], names[0]], strict=True)}
        wanted = {frozenset(pair) for pair in itertools.combinations(names, 2)}
        assert len(met) == len(set(met)) and set(met) == (
            wanted if count <= bandwidth.ALL_PAIRS_OF else neighbours
        )
    assert [len(list(bandwidth.rounds([""] * count))) for count in (4, 5, 100)] == [3, 5, 2]


def test_a_slow_pair_and_one_that_does_not_connect() -> None:
    rates = {("a", "b"): 900e6, ("b", "a"): 880e6, ("a", "c"): 100e6, ("c", "a"): 890e6}
    rates |= {("b", "c"): "c:4: refused", ("c", "b"): 890e6}
    found = {each.machine: each for each in doctor.check_bandwidths(rates)}
    assert {name: each.state for name, each in found.items()} == {"a - b": OK, "a - c": WARNING, "b - c": BAD}
    assert found["a - c"].found == "to c 100 MB/s, to a 890 MB/s" and "cable" in found["a - c"].remedy
    assert found["b - c"].found == "c:4: refused; to b 890 MB/s" and "firewall" in found["b - c"].remedy


def test_only_who_knows_the_secret_is_counted() -> None:
    secret = "0" * bandwidth.SECRET_BYTES
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=bandwidth._receive_all, args=(listener, secret), daemon=True).start()
        port = listener.getsockname()[1]
        assert float(bandwidth.send("127.0.0.1", port, secret)) > 1e6
        assert isinstance(bandwidth.send("127.0.0.1", port, "1" * bandwidth.SECRET_BYTES), str)
        listener.shutdown(socket.SHUT_RDWR)  # ends the thread
    free = free_port()
    assert "refused" in str(bandwidth.send("127.0.0.1", free, secret))


def test_a_late_answer_is_not_that_of_the_next_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "ANSWER_S", 0.1)
    with bandwidth._Machine([sys.executable, "-c", "input(); print(1.0)"]) as machine:
        assert machine.answer() == "no answer"
        monkeypatch.undo()
        machine.ask([])
        assert machine.answer() == "no answer"


def test_names_of_machines() -> None:
    facts = {"host": "w0", "unknown": ["w1"], "own_address": "127.0.1.1", "chosen": {}}
    assert [each.state for each in doctor.check_names(facts, "w0")] == [WARNING, WARNING]
    facts |= {"unknown": [], "chosen": {"GLOO_SOCKET_IFNAME": "eth0"}}
    assert [each.state for each in doctor.check_names(facts, "w0")] == [OK, OK]


def test_many_machines_reach_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = []

    def report_of(host: str, ssh: Any, asked: Any, folder: str) -> tuple[str, float]:
        problems.append(doctor._reaches("127.0.0.1", asked["back_to"][1]))
        return "not asked", 0.0

    monkeypatch.setattr(doctor, "_report_of", report_of)
    monkeypatch.setattr(doctor, "master_address", lambda names, ssh: "127.0.0.1")
    others = [f"host{number}" for number in range(200)]
    options = argparse.Namespace(port=29500, ssh_port=None, launcher_args="")
    assert len(list(doctor._check_others(FINE, others, ["here", *others], options, str(tmp_path)))) == 200
    assert problems == [""] * 200


def test_a_hostfile_that_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--hostfile", "nowhere"]) == 2
    assert "nowhere: no such file" in capsys.readouterr().err
