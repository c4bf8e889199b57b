"""`ds_io` and `ds_nvme_tune`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepspeed.config.deepspeed_config import DeepSpeedConfig
from deepspeed.tools.nvme import ds_io, tune
from deepspeed.tools.parsers import byte_count


def test_byte_counts() -> None:
    assert [byte_count(text) for text in ("7", "2k", "400M", "1G", "1GB")] == [
        7,
        2048,
        400 << 20,
        1 << 30,
        1 << 30,
    ]
    for text in ("", "M", "-1", "1.5G", "0"):
        with pytest.raises(ValueError, match="expected a number of bytes"):
            byte_count(text)


@pytest.mark.parametrize("engine", ["aio_handle", "aio_basic", "torch_io", "torch_fastio"])
@pytest.mark.parametrize("read", [False, True])
def test_ds_io(tmp_path: Path, engine: str, read: bool, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--folder", str(tmp_path), "--io_size", "1M", "--engine", engine, "--fast_io_size", "256K"]
    options = ["--block_size", "128K", "--io_parallel", "2", "--validate", "--different_file_each_iteration"]
    assert ds_io.main([*arguments, *options, *(["--read"] if read else [])]) == 0
    out = capsys.readouterr().out
    assert f"{engine} {'read' if read else 'write'} of 1048576 bytes" in out and "GB/s (median of 3" in out
    assert len(list(tmp_path.iterdir())) == (4 if read else 0)
    if engine.startswith("aio"):
        section = json.loads(out[out.index("{") :])
        config = DeepSpeedConfig({"train_batch_size": 1, **section})
        assert config.aio_config["block_size"] == 128 << 10 and config.aio_config["queue_depth"] == 32
        assert config.aio_config["overlap_events"] and not config.aio_config["single_submit"]
    else:
        assert "{" not in out


def test_processes_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    places = ["--folder_to_device_mapping", f"{folders[0]}:0", f"{folders[1]}:1"]
    assert ds_io.main([*places, "--io_size", "1M", "--loops", "1"]) == 0
    assert "GB/s (median of 1" in capsys.readouterr().out
    assert not any(list(folder.iterdir()) for folder in folders)


def test_ds_io_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ds_io.main(["--folder", str(tmp_path / "no"), "--io_size", "1M"]) == 2
    assert "no such directory" in capsys.readouterr().err
    assert ds_io.main(["--folder", str(tmp_path), "--io_size", "1M", "--use_gds"]) == 2
    assert "aio_handle" in capsys.readouterr().err
    assert ds_io.main(["--folder_to_device_mapping", "oops", "--io_size", "1M"]) == 2
    assert "FOLDER:0,1" in capsys.readouterr().err


def test_ds_nvme_tune(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    space = tmp_path / "space.json"
    space.write_text(
        json.dumps({"block_size": ["64K", "1M"], "queue_depth": [4], "overlap_events": ["true"]})
    )
    disk, logs = tmp_path / "disk", tmp_path / "logs"
    disk.mkdir()
    options = ["--sweep_config", str(space), "--io_size", "2M", "--log_dir", str(logs)]
    assert tune.main(["--nvme_dir", str(disk), *options]) == 0
    out = capsys.readouterr().out
    assert f"Running DeepNVMe performance tuning on ['{disk}']" in out
    assert "Best performance (GB/sec): read = " in out and ", write = " in out
    section = json.loads(out[out.index("{") :])
    assert section["aio"]["overlap_events"] == "true" and section["aio"]["queue_depth"] == 4
    assert section["aio"]["block_size"] in (65536, 1 << 20)
    config = DeepSpeedConfig({"train_batch_size": 1, **section})
    assert config is not None
    rows = [json.loads(line) for line in (logs / "results.jsonl").read_text().splitlines()]
    assert len(rows) == 2 and all(row["read"] > 0 and row["write"] > 0 for row in rows)
    assert not list(disk.iterdir())


def test_the_best_reads_and_writes_in_least_time() -> None:
    rows = [
        {"read": 1.0, "write": 4.0, "n": 0},
        {"read": 2.0, "write": 2.0, "n": 1},
        {"read": 9.0, "write": 0.5, "n": 2},
    ]
    assert tune.best(rows)["n"] == 1
    assert tune.best([{**row, "write": None} for row in rows])["n"] == 2


def test_ds_nvme_tune_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune.main(["--nvme_dir", str(tmp_path / "no")]) == 2
    assert tune.main(["--nvme_dir", str(tmp_path), "--no_read", "--no_write"]) == 2
    assert "nothing to measure" in capsys.readouterr().err
    with pytest.raises(ValueError, match="unknown setting 'blok_size'"):
        tune.space_of({"blok_size": [1]})
    assert tune.space_of({"io_parallel": [1, 2]}) == [
        {"intra_op_parallelism": 1},
        {"intra_op_parallelism": 2},
    ]
