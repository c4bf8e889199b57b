"""`ds plan` about time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deepspeed.tools.plan import main
from tests.planning.step_time.test_calibration import MODEL, config, made


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    given, here = tmp_path / "ds.json", tmp_path / "here.json"
    given.write_text(json.dumps(config(3)))
    made().save(here)
    return str(given), str(here)


CUDA = ("--device", "cuda", "--device-memory", "80G", "--host-memory", "512G")
CPU = ("--device", "cpu", "--host-memory", "4G")


def test_a_step_on_a_device(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [files[0], "--model", "gpt:125m", "--gpus", "8", "--nodes", "2", "--sequence", "1024", *CUDA]
    assert main([*arguments, "--on", "A100", "--network", "100GbE"]) == 0
    shown = capsys.readouterr().out
    assert "a step on 16 A100 over 100GbE: " in shown
    assert "% of it waiting, mostly for links between nodes (predicted)" in shown
    assert main([*arguments, "--on", "A100", "--network", "10GbE", "--json"]) == 0
    slow = json.loads(capsys.readouterr().out)["step"]
    assert main([*arguments, "--on", "A100", "--network", "NDR", "--json"]) == 0
    fast = json.loads(capsys.readouterr().out)["step"]
    assert slow["seconds"] > fast["seconds"]
    assert slow["waits_for"] == "between"
    assert slow["compute"] == pytest.approx(fast["compute"])


def test_a_table(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [files[0], "--model", "gpt:1.3b", "--gpus", "4", "--sequence", "1024", "--on", "H100", *CUDA]
    main([*arguments, "--choices"])
    shown = capsys.readouterr().out
    assert "fastest that fits: ZeRO" in shown
    main([*arguments, "--choices", "--json"])
    found = json.loads(capsys.readouterr().out)["step"]
    assert found["fastest"] == found["choices"][0]["way"]
    assert any(row["tensor"] > 1 for row in found["choices"]) or len(found["choices"]) > 4


def test_a_calibrated_machine(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        files[0],
        "--model",
        MODEL,
        "--nodes",
        "2",
        "--sequence",
        "64",
        "--calibration",
        files[1],
        *CPU,
    ]
    assert main([*arguments, "--network", "100Mbit", "--json"]) == 0
    slow = json.loads(capsys.readouterr().out)["step"]["seconds"]
    assert main([*arguments, "--network", "10GbE", "--json"]) == 0
    fast = json.loads(capsys.readouterr().out)["step"]["seconds"]
    assert slow > fast
    assert fast == pytest.approx(0.063, rel=0.05)  # what two ranks took


def test_own_hardware(files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chip, wire = tmp_path / "chip.json", tmp_path / "wire.json"
    numbers = {"flops": 1e15, "share": 0.5, "memory_rate": 1e12, "memory": 10**11, "host_rate": 1e10}
    chip.write_text(json.dumps({**numbers, "inside": "NVLink4"}))
    wire.write_text(json.dumps({"rate": 1e9}))
    arguments = [files[0], "--model", "gpt:10m", "--nodes", "2", "--sequence", "64", *CUDA]
    assert main([*arguments, "--on", str(chip), "--network", str(wire)]) == 0
    assert "a step on 2 chip over wire: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--network", "10GbE"], "--network needs --calibration FILE or --on DEVICE"),
        (["--choices"], "--choices needs --calibration"),
        (["--on", "H100", "--nodes", "2"], "set the network between them"),
        (["--on", "H100", "--calibration", "x.json"], "pass only one"),
        (["--on", "H200000"], "neither a known name (A100, H100) nor a JSON file"),
        (["--on", "H100", "--nodes", "2", "--network", "carrier pigeon"], "neither a known name (1GbE"),
        (["--on", "H100", "--nodes", "2", "--network=-1Gbit"], "expected a rate above 0"),
        (["--calibration", "nowhere.json"], "No such file"),
        (["--batch", "a:b"], "--batch needs --calibrate"),
        (["--on", "H100"], "depends on the tokens per sample: give --sequence"),
        (["--calibrate", "/nowhere/here.json"], "no such folder: /nowhere"),
        (["--model", "gpt:0x1x1"], "expected gpt:LAYERSxWIDTHxHEADS"),
        (["--model", "gpt:2x10x3"], "do not divide the width 10"),
    ],
)
def test_what_is_wrong(
    options: list[str], message: str, files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([files[0], "--model", "gpt:10m", *CUDA, *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "list is not a field"),
        ('{"rate": "fast"}', "rate='fast': expected a number"),
        ('{"rate": -1}', "expected a number, 0 or more"),
        ('{"speed": 1}', "speed is not a field of Network"),
        ("{}", "rate"),
    ],
)
def test_a_wrong_network(
    text: str, message: str, files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "wire.json"
    path.write_text(text)
    arguments = [files[0], "--model", "gpt:10m", "--nodes", "2", "--on", "H100", *CUDA]
    assert main([*arguments, "--network", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_another_kind_of_device(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([files[0], "--model", MODEL, "--calibration", files[1], *CUDA]) == 2
    assert "give --device cpu" in capsys.readouterr().err


def test_a_calibration_of_a_config(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([files[0], "--model", "train:build", "--calibrate", "out.json"]) == 2
    assert "give --batch module:function" in capsys.readouterr().err


def test_tensor_parallel_ranks_share_no_states(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two ranks that share the layers have half of the weights each, as two that share states have."""
    needs: list[dict[str, Any]] = []
    for given in ({**config(0)}, {**config(0), "tensor_parallel": {"autotp_size": 2}}):
        path = tmp_path / "tp.json"
        path.write_text(json.dumps(given))
        arguments = [
            str(path),
            "--model",
            "gpt:125m",
            "--gpus",
            "2",
            "--sequence",
            "64",
            "--on",
            "A100",
            *CUDA,
        ]
        assert main([*arguments, "--json"]) == 0
        needs.append(json.loads(capsys.readouterr().out))
    whole, half = (found["needed"]["device"] for found in needs)
    assert half == pytest.approx(whole / 2, rel=0.1)
    assert needs[1]["step"]["seconds"] > 0
    assert [found["ranks"] for found in needs] == [2, 2]
    main([*arguments, "--choices"])
    shown = capsys.readouterr().out
    assert "on each of 2 ranks that share all layers" in shown
    assert "2 ranks, ZeRO stage 0" in shown
    assert "a step of 1 sample (" in shown
    assert "ZeRO 0, TP 2" in shown  # the table is about all ranks
