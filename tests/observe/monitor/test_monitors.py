"""The monitors alone: what they write, where, and that none of them can stop a run.

The client libraries are replaced by fakes in this file, so that nothing depends on which are installed; the real
ones are in `test_client_libraries.py`.
"""

from __future__ import annotations

import csv
import errno
import gc
import os
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.base.logging import _once, logger
from deepspeed.config.deepspeed_config import DeepSpeedConfig
from deepspeed.config.sections.monitor import get_monitor_config
from deepspeed.observe.monitor import base
from deepspeed.observe.monitor.comet import CometMonitor, EventsLogScheduler
from deepspeed.observe.monitor.csv_monitor import csvMonitor
from deepspeed.observe.monitor.monitor import Monitor, MonitorMaster
from deepspeed.observe.monitor.tensorboard import TensorBoardMonitor
from deepspeed.observe.monitor.trackio import TrackioMonitor
from deepspeed.observe.monitor.utils import (
    check_comet_availability,
    check_tb_availability,
    check_trackio_availability,
    check_wandb_availability,
)
from deepspeed.observe.monitor.wandb import WandbMonitor

LOSS, LR = "Train/Samples/train_loss", "Train/Samples/lr"


def config(**sections: Any) -> Any:
    return get_monitor_config({name: {"enabled": True, **section} for name, section in sections.items()})


def rows(path: Path) -> list[list[str]]:
    with open(path, newline="") as file:
        return list(csv.reader(file))


@pytest.fixture
def warnings_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The warnings that come while the test runs."""
    told: list[str] = []
    monkeypatch.setattr(
        logger, "warning", lambda text, *args, **_: told.append(text % args if args else text)
    )
    _once.cache_clear()
    yield told
    _once.cache_clear()


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A clock that the test sets."""
    clock = types.SimpleNamespace(s=1000.0)
    monkeypatch.setattr(base, "time", types.SimpleNamespace(monotonic=lambda: clock.s))
    return clock


# ---- CSV -----------------------------------------------------------------------------------------------------


def test_csv_has_a_file_per_curve(tmp_path: Path) -> None:
    monitor = csvMonitor(config(csv_monitor={"output_path": str(tmp_path), "job_name": "bert"}).csv_monitor)
    assert monitor.filenames == []
    monitor.write_events([(LOSS, 1.5, 8), (LR, torch.tensor(0.1), 8), ("time per step", 3, 8)])
    monitor.write_events([(LOSS, torch.tensor([1.25]), 16)])
    folder = tmp_path / "bert"
    assert sorted(path.name for path in folder.iterdir()) == [
        "Train_Samples_lr.csv", "Train_Samples_train_loss.csv", "time_per_step.csv",
    ]  # fmt: skip
    assert monitor.filenames == ["Train_Samples_train_loss", "Train_Samples_lr", "time_per_step"]
    assert rows(folder / "Train_Samples_train_loss.csv") == [
        ["step", "train_loss"],
        ["8", "1.5"],
        ["16", "1.25"],
    ]
    assert rows(folder / "time_per_step.csv") == [["step", "time per step"], ["8", "3"]]
    assert float(rows(folder / "Train_Samples_lr.csv")[1][1]) == pytest.approx(0.1)


def test_a_resumed_run_continues_its_curves(tmp_path: Path) -> None:
    section = config(csv_monitor={"output_path": str(tmp_path)}).csv_monitor
    for samples in (8, 16):
        csvMonitor(section).write_events([(LR, 1, samples)])
    assert rows(tmp_path / "DeepSpeedJobName" / "Train_Samples_lr.csv") == [
        ["step", "lr"],
        ["8", "1"],
        ["16", "1"],
    ]


@pytest.mark.parametrize(
    "given, expected", [("", "home"), (None, "work"), ("~/curves", "home"), ("logs", "work")]
)
@pytest.mark.parametrize("key, kind", [("csv_monitor", csvMonitor), ("tensorboard", TensorBoardMonitor)])
def test_where_files_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None, expected: str, key: str, kind: Any
) -> None:
    seen: list[str] = []
    writer = types.ModuleType("torch.utils.tensorboard")
    writer.SummaryWriter = lambda log_dir: seen.append(log_dir)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", writer)
    monkeypatch.setitem(sys.modules, "tensorboard", types.ModuleType("tensorboard"))
    for name in ("home", "work"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    monitor = kind(getattr(config(**{key: {"output_path": given, "job_name": "j"}}), key))
    folder = {"": key, None: key, "~/curves": "curves", "logs": "logs"}[given]
    wanted = tmp_path / expected / folder / "j"
    assert wanted.is_dir()
    where = monitor.log_dir if key == "csv_monitor" else seen[0]
    assert (tmp_path / "work" / where).resolve() == wanted
    assert (monitor.enabled, monitor.output_path, monitor.job_name) == (True, given, "j")


def test_the_base_folder_can_be_given(tmp_path: Path) -> None:
    monitor = csvMonitor(get_monitor_config({}).csv_monitor)  # not enabled: nothing is made
    assert monitor.log_dir is None
    assert monitor.setup_log_dir(base=str(tmp_path / "b")) == str(tmp_path / "b" / "DeepSpeedJobName")


# ---- the client libraries ------------------------------------------------------------------------------------


class FakeConfig(dict[str, Any]):
    def update(self, found: dict[str, Any], allow_val_change: bool) -> None:  # type: ignore[override]
        super().update(found)


class FakeRun:
    def __init__(self, **options: Any) -> None:
        self.options = options
        self.project, self.group, self.entity = (options.get(name) for name in ("project", "group", "entity"))
        self.logged: list[tuple[dict[str, Any], Any]] = []
        self.finished = False
        self.config = FakeConfig()

    def log(self, data: dict[str, Any], step: Any = None, commit: Any = None) -> None:
        self.logged.append((data, step))

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Any:
    fake = types.ModuleType("wandb")
    fake.run, fake.made = None, []  # type: ignore[attr-defined]

    def init(**options: Any) -> FakeRun:
        fake.made.append(FakeRun(**options))  # type: ignore[attr-defined]
        fake.run = fake.run or fake.made[-1]  # type: ignore[attr-defined]
        return fake.made[-1]  # type: ignore[attr-defined]

    fake.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


class FakeExperiment:
    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, Any], int]] = []
        self.name: str | None = None
        self.ended = False

    def set_name(self, name: str) -> None:
        self.name = name

    def log_metrics(self, values: dict[str, Any], step: int) -> None:
        self.logged.append((values, step))

    def end(self) -> None:
        self.ended = True


@pytest.fixture
def comet(monkeypatch: pytest.MonkeyPatch) -> Any:
    fake = types.ModuleType("comet_ml")
    fake.calls = []  # type: ignore[attr-defined]

    def start(**options: Any) -> FakeExperiment:
        fake.calls.append(options)  # type: ignore[attr-defined]
        return FakeExperiment()

    fake.start = start  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "comet_ml", fake)
    return fake


@pytest.fixture
def trackio(monkeypatch: pytest.MonkeyPatch) -> Any:
    fake = types.ModuleType("trackio")
    fake.calls = []  # type: ignore[attr-defined]
    fake.init = lambda **options: fake.calls.append(("init", options))  # type: ignore[attr-defined]
    fake.log = lambda row, step: fake.calls.append(("log", row, step))  # type: ignore[attr-defined]
    fake.finish = lambda: fake.calls.append(("finish",))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trackio", fake)
    return fake


def test_trackio_gets_one_row_per_step(trackio: Any) -> None:
    monitor = TrackioMonitor(config(trackio={"project": "p"}).trackio)
    assert monitor.enabled and monitor.project == "p"
    monitor.write_events([(LOSS, torch.tensor(2.0), 8), (LR, 0.5, 8)])
    monitor.log({"mine": 1}, step=9)
    monitor.close()
    monitor.write_events([(LOSS, 0.0, 16)])
    rows = [("log", {LOSS: 2.0, LR: 0.5}, 8), ("log", {"mine": 1}, 9)]
    assert trackio.calls == [("init", {"project": "p"}), *rows, ("finish",)]


def test_trackio_is_one_of_the_monitors_of_a_config(trackio: Any) -> None:
    master = MonitorMaster(config(trackio={}))
    assert master.enabled and isinstance(master.trackio_monitor, TrackioMonitor)
    master.write_events([(LOSS, 1.0, 8)])
    assert trackio.calls == [("init", {"project": "deepspeed"}), ("log", {LOSS: 1.0}, 8)]
    off = MonitorMaster(get_monitor_config({"trackio": {"enabled": False, "project": "p"}}))
    assert not off.enabled and off.trackio_monitor is None


def test_wandb_gets_one_row_per_step(wandb: Any) -> None:
    monitor = WandbMonitor(config(wandb={"team": "t", "group": "g", "project": "p"}).wandb)
    assert (monitor.enabled, monitor.team, monitor.group, monitor.project) == (True, "t", "g", "p")
    assert wandb.made[0].options == {"project": "p", "group": "g", "entity": "t"}
    monitor.write_events([(LOSS, torch.tensor(2.0), 8), (LR, 0.5, 8)])
    monitor.write_events([(LOSS, 1.0, 16)])
    monitor.log({"mine": 1}, step=17)
    assert wandb.run.logged == [({LOSS: 2.0, LR: 0.5}, 8), ({LOSS: 1.0}, 16), ({"mine": 1}, 17)]
    monitor.close()
    monitor.write_events([(LOSS, 0.0, 24)])
    assert wandb.run.finished and len(wandb.run.logged) == 3


def test_wandb_shares_a_run_of_its_project_only(wandb: Any) -> None:
    section = config(wandb={"project": "p"}).wandb
    first, second = WandbMonitor(section), WandbMonitor(section)
    assert second.run is first.run and len(wandb.made) == 1
    second.close()  # the engine of a script that continues its own run
    assert not first.run.finished
    other = WandbMonitor(config(wandb={"project": "q"}).wandb)
    assert other.run is not first.run and other.run.options["reinit"] == "create_new"


def test_the_config_leaves_the_keys_of_a_script_in_wandb(wandb: Any) -> None:
    section = config(wandb={"project": "p"}).wandb
    ours = WandbMonitor(section)
    ours.write_config({"a": 1})
    assert ours.run.config == {"a": 1}
    ours.run.config["optimizer"] = "the script's"
    shared = WandbMonitor(section)
    shared.write_config({"optimizer": {"type": "Adam"}})
    shared.write_config({"seed": 3})
    assert ours.run.config == {
        "a": 1,
        "optimizer": "the script's",
        "deepspeed": {"optimizer": {"type": "Adam"}, "seed": 3},
    }


def test_a_refused_config_stops_no_curves_and_hides_no_later_failure(
    tmp_path: Path, warnings_of: list[str], now: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor = csvMonitor(config(csv_monitor={"output_path": str(tmp_path), "job_name": "j"}).csv_monitor)
    for act in ("_write_config", "_write_artifact"):
        monkeypatch.setattr(monitor, act, lambda _: 1 / 0)
    monitor.write_config({"a": 1})
    monitor.write_artifact("plot.png")
    assert [told.partition(" (")[0] for told in warnings_of] == [
        "csv_monitor: the config is not recorded in full",
        "csv_monitor: plot.png is not recorded in full",
    ]
    monitor.write_events([(LOSS, 1.0, 8)])
    assert rows(tmp_path / "j" / "Train_Samples_train_loss.csv")[1:] == [["8", "1.0"]]
    monkeypatch.setattr(monitor, "_write", lambda _: 1 / 0)
    monitor.write_events([(LOSS, 1.0, 16)])
    assert len(warnings_of) == 3 and "curves are not written" in warnings_of[2]


def test_comet_is_started_as_documented(comet: Any) -> None:
    section = {
        "api_key": "secret", "project": "p", "workspace": "w", "experiment_name": "e", "experiment_key": "0" * 32,
        "mode": "get_or_create", "online": False, "samples_log_interval": 20,
    }  # fmt: skip
    monitor = CometMonitor(config(comet=section).comet)
    name, interval = section.pop("experiment_name"), section.pop("samples_log_interval")
    assert comet.calls == [section]
    assert monitor.experiment.name == name and monitor.samples_log_interval == interval
    for samples in (8, 16, 24, 32, 40, 48):
        monitor.write_events([(LOSS, float(samples), samples), (LR, 1.0, samples)])
    assert monitor.experiment.logged == [({LOSS: float(s), LR: 1.0}, s) for s in (8, 32)]
    monitor.close()
    assert monitor.experiment.ended


def test_each_curve_has_its_own_interval() -> None:
    due = EventsLogScheduler(10)
    assert [s for s in range(1, 35) if due.needs_logging("a", s)] == [1, 11, 21, 31]
    assert due.needs_logging("b", 34) and not due.needs_logging("b", 43)
    assert due.needs_logging("b", 0), "an earlier step, after a checkpoint was loaded"


# ---- all at once ---------------------------------------------------------------------------------------------


def test_the_master_writes_to_all_that_are_enabled(wandb: Any, comet: Any, tmp_path: Path) -> None:
    ds_config = DeepSpeedConfig(
        {
            "train_batch_size": 8,
            "csv_monitor": {"enabled": True, "output_path": str(tmp_path)},
            "wandb": {"enabled": True},
            "comet": {"enabled": True},
        }
    )
    master = MonitorMaster(ds_config.monitor_config)
    assert isinstance(master, Monitor) and master.enabled and master.tb_monitor is None
    master.write_events(event for event in [(LOSS, 1.0, 8)])
    assert wandb.run.logged == [({LOSS: 1.0}, 8)]
    assert master.comet_monitor.experiment.logged == [({LOSS: 1.0}, 8)]
    assert (tmp_path / "DeepSpeedJobName" / "Train_Samples_train_loss.csv").exists()
    master.close()
    nothing = MonitorMaster(DeepSpeedConfig({"train_batch_size": 8}).monitor_config)
    assert not nothing.enabled and nothing.backends == []
    nothing.write_events([(LOSS, 1.0, 8)])


def test_each_class_also_takes_the_whole_config(wandb: Any, comet: Any, tmp_path: Path) -> None:
    whole = config(wandb={"project": "p"}, comet={}, csv_monitor={"output_path": str(tmp_path)})
    assert WandbMonitor(whole).project == "p"
    assert CometMonitor(whole).experiment is not None
    assert csvMonitor(whole).output_path == str(tmp_path)


def test_only_rank_0_opens_anything(
    wandb: Any, comet: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monitors = config(wandb={}, comet={}, csv_monitor={"output_path": str(tmp_path / "x")})
    master = MonitorMaster(monitors)
    master.write_events([(LOSS, 1.0, 8)])
    master.close()
    assert master.enabled and master.backends == []
    # read by scripts before they write their own values
    assert master.wandb_monitor is None and master.comet_monitor is None and master.csv_monitor is None
    alone = CometMonitor(monitors)
    alone.write_events([(LOSS, 1.0, 8)])
    assert alone.enabled and alone.experiment is None
    assert wandb.made == [] and comet.calls == [] and list(tmp_path.iterdir()) == []


# ---- what goes wrong -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key, package, kind, check",
    [
        ("tensorboard", "tensorboard", TensorBoardMonitor, check_tb_availability),
        ("wandb", "wandb", WandbMonitor, check_wandb_availability),
        ("comet", "comet_ml", CometMonitor, check_comet_availability),
        ("trackio", "trackio", TrackioMonitor, check_trackio_availability),
    ],
)
def test_a_missing_package_is_one_warning(
    key: str, package: str, kind: Any, check: Any, warnings_of: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=f"pip install {package}"):
        check()
    monitor = kind(getattr(config(**{key: {}}), key))
    for samples in (8, 16):
        monitor.write_events([(LOSS, 1.0, samples)])
    monitor.close()
    assert len(warnings_of) == 1
    assert f"pip install {package}" in warnings_of[0] and f"{key}.enabled" in warnings_of[0]


def test_a_folder_that_cannot_be_made_is_one_warning(tmp_path: Path, warnings_of: list[str]) -> None:
    (tmp_path / "file").touch()
    monitor = csvMonitor(config(csv_monitor={"output_path": str(tmp_path / "file")}).csv_monitor)
    monitor.write_events([(LOSS, 1.0, 8)])
    monitor.write_events([(LOSS, 1.0, 16)])
    assert (
        len(warnings_of) == 1 and "csv_monitor" in warnings_of[0] and str(tmp_path / "file") in warnings_of[0]
    )


def test_a_full_disk_is_one_warning_and_may_be_cleared(
    tmp_path: Path, warnings_of: list[str], now: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor = csvMonitor(config(csv_monitor={"output_path": str(tmp_path), "job_name": "j"}).csv_monitor)
    tries: list[int] = []

    def write(points: Any) -> None:
        tries.append(points[0][2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(monitor, "_write", write)
        for samples in (8, 16, 24):
            monitor.write_events([(LOSS, 1.0, samples)])
        now.s += base.REST_S
        monitor.write_events([(LOSS, 1.0, 32)])
    assert tries == [8, 32], "left alone for a while, then tried again"
    assert len(warnings_of) == 1 and "No space left" in warnings_of[0]
    now.s += base.REST_S
    monitor.write_events([(LOSS, 1.0, 40)])
    monitor.write_events([(LOSS, 1.0, 48)])
    assert rows(tmp_path / "j" / "Train_Samples_train_loss.csv")[1:] == [["40", "1.0"], ["48", "1.0"]]


def test_one_that_fails_does_not_keep_the_others_from_writing(
    wandb: Any, tmp_path: Path, warnings_of: list[str]
) -> None:
    master = MonitorMaster(config(wandb={}, csv_monitor={"output_path": str(tmp_path), "job_name": "j"}))
    wandb.run.log = lambda *_, **__: 1 / 0
    for samples in (8, 16):
        master.write_events([(LOSS, 1.0, samples)])
    assert len(rows(tmp_path / "j" / "Train_Samples_train_loss.csv")) == 3
    assert len(warnings_of) == 1 and warnings_of[0].startswith("wandb")
    wandb.run.finish = lambda: 1 / 0
    master.close()


def test_a_writer_of_event_files_that_has_failed_is_replaced(
    tmp_path: Path, now: Any, warnings_of: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    class Writer:
        def __init__(self, log_dir: str) -> None:
            made.append(self)
            self.points: list[tuple[Any, ...]] = []
            self.flushed = 0

        def add_scalar(self, *point: Any) -> None:
            if self is made[0] and self.points:
                raise OSError(errno.ENOSPC, "full")
            self.points.append(point)

        def flush(self) -> None:
            self.flushed += 1

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setitem(sys.modules, "tensorboard", types.ModuleType("tensorboard"))
    monitor = TensorBoardMonitor(config(tensorboard={"output_path": str(tmp_path)}).tensorboard)
    for samples in (8, 16, 24):
        monitor.write_events([(LOSS, 1.0, samples)])
    monitor.flush()
    now.s += base.REST_S
    monitor.write_events([(LOSS, 1.0, 32)], flush=False)
    assert made[0].points == [(LOSS, 1.0, 8)] and made[1].points == [(LOSS, 1.0, 32)]
    assert made[0].flushed == 1 and made[1].flushed == 0 and len(warnings_of) == 1
    monitor.flush()
    assert made[1].flushed == 1


@pytest.mark.parametrize("wrong", [("name", "text", 8), ("name", 1.0), ("name", torch.ones(2), 8), None])
def test_an_event_that_is_none_is_left_out(tmp_path: Path, wrong: Any, warnings_of: list[str]) -> None:
    monitor = csvMonitor(config(csv_monitor={"output_path": str(tmp_path), "job_name": "j"}).csv_monitor)
    for samples in (8, 16):
        monitor.write_events([wrong, (LOSS, 1.0, samples)])
    assert len(rows(tmp_path / "j" / "Train_Samples_train_loss.csv")) == 3
    assert len(warnings_of) == 1 and "(name, number, samples)" in warnings_of[0]


def test_the_writer_of_a_dropped_monitor_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has its own thread."""
    closed = threading.Event()
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = lambda log_dir: types.SimpleNamespace(close=closed.set)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setitem(sys.modules, "tensorboard", types.ModuleType("tensorboard"))
    monitor = TensorBoardMonitor(config(tensorboard={"output_path": str(tmp_path)}).tensorboard)
    monitor.get_summary_writer()
    del monitor
    gc.collect()
    assert closed.wait(10.0)
