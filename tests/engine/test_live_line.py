"""The line of progress and the lines at the start: what is in them, when they come, who is spared them."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pty
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.base import terminal
from deepspeed.base.events import Events
from deepspeed.base.logging import LEVEL_VARIABLE, level_of_environment, logger, report
from deepspeed.base.terminal import StatusLine, another_display_is_active
from deepspeed.engine.observers.progress.display import (
    VARIABLE,
    Display,
    LineFormat,
    choose_display,
    made_by_client,
)
from deepspeed.engine.observers.progress.live_line import LiveLine
from deepspeed.engine.observers.progress.readings import LossMeter, total_steps
from deepspeed.engine.observers.progress.start_report import held_bytes
from tests.pool import distributed
from tests.zero.models import batch, config_for, make_zoo

ROOT = Path(__file__).resolve().parents[2]
NEVER = float("inf")


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """These variables and no others of the live line's; the logger keeps its level."""
    before, level = dict(os.environ), logger.level
    os.environ.pop(VARIABLE, None)
    os.environ.pop(LEVEL_VARIABLE, None)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        logger.setLevel(level)


@contextlib.contextmanager
def printed() -> Iterator[list[str]]:
    """The lines on standard output, filled when the block ends."""
    lines: list[str] = []
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            yield lines
    finally:
        lines += output.getvalue().splitlines()


def start(stage: int = 1, **more: Any) -> Any:
    return deepspeed.initialize(
        model=make_zoo(), config={**config_for(stage), "steps_per_print": NEVER, **more}
    )[0]


def train(engine: Any, steps: int) -> list[float]:
    """The loss of each step on this rank."""
    losses = []
    for step in range(steps):
        mine = []
        for micro in range(engine.gradient_accumulation_steps()):
            loss = engine(batch(7 * step + micro, 0, dist.get_rank()))
            mine.append(loss.item())
            engine.backward(loss)
            engine.step()
        losses.append(sum(mine) / len(mine))
    return losses


def parts(line: str) -> dict[str, str]:
    text = line[line.index("step=") :]
    text = text.replace("(", "[").replace(")", "]")
    found, depth, current = [], 0, ""
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            found.append(current)
            current = ""
        else:
            current += letter
    return dict(part.strip().split("=", 1) for part in [*found, current])


# ---- at the start --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("bf16", [False, True])
@distributed(world_size=2)
def test_three_lines_at_the_start(stage: int, bf16: bool) -> None:
    with environment(), printed() as lines:
        engine = start(stage, bf16={"enabled": bf16}, gradient_accumulation_steps=2)
    if dist.get_rank() > 0:
        assert lines == []
    else:
        first, second, third = lines
        assert all("[INFO]" in line for line in lines)
        assert f"ZeRO stage={stage}" in first and f"precision={'bf16' if bf16 else 'fp32'}" in first
        assert "batch=8 = 2 per rank x 2 micro-batches x 2 data-parallel ranks" in first
        trained = sum(engine.core.trained.params[i].ds_numel if stage == 3 else p.numel()
                      for i, p in enumerate(engine.core.trained.params))  # fmt: skip
        assert f"{trained:,} trained parameters" in second and "planned" in second
        assert "transport " in third and VARIABLE in third
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 2, 3])
@distributed(world_size=2)
def test_what_a_rank_holds_is_what_was_planned(stage: int) -> None:
    """On a model without oddities to the byte, up to the padding of buckets."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    with environment(), printed() as lines:
        zero = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
        config = {**config_for(stage, **zero), "steps_per_print": NEVER, "bf16": {"enabled": True}}
        engine = deepspeed.initialize(model=model, config=config)[0]
    numel = 4 * (64 * 64 + 64)
    shard = numel // 2 if stage else numel
    wanted = {0: 2 * numel + 4 * numel, 2: 2 * numel + 4 * shard, 3: 2 * shard + 4 * shard}[stage]
    assert held_bytes(engine) == pytest.approx(wanted, rel=0.02)
    if dist.get_rank() == 0:
        held, planned = (lines[1].split(word)[1].split(";")[0].strip("() ") for word in ("holds", "planned"))
        assert held.split(" (")[0] == planned
    engine.destroy()


@pytest.mark.parametrize(
    "variables, config",
    [({"DEEPSPEED_PROGRESS": "0"}, {}), ({}, {"log_level": "warning"}), ({LEVEL_VARIABLE: "error"}, {})],
)
@distributed(world_size=1)
def test_silence(variables: dict[str, str], config: dict[str, Any]) -> None:
    with environment(**variables), printed() as lines:
        engine = start(1, **{"steps_per_print": 1, **config})
        if not variables.get("DEEPSPEED_PROGRESS"):
            train(engine, 2)
        engine.destroy()
    assert lines == []


@distributed(world_size=1)
def test_log_level_is_set_by_config_and_environment() -> None:
    with environment():
        logger.setLevel(logging.WARNING)
        with printed() as lines:
            engine = start(1, log_level="DEBUG")
            assert engine.log_level() == "DEBUG"
            engine.destroy()
        assert logger.level == logging.DEBUG and any("dtypes:" in line for line in lines)
        with printed():
            start(1).destroy()
        assert logger.level == logging.DEBUG, "null leaves it as it is"
        os.environ[LEVEL_VARIABLE] = "Info"
        with printed():
            start(1, log_level="error").destroy()
        assert logger.level == logging.DEBUG, "the environment goes first"


def test_level_of_the_environment_at_import() -> None:
    for text, level in (("debug", 10), ("ERROR", 40), ("loud", None), ("", None)):
        with environment(**{LEVEL_VARIABLE: text}):
            assert level_of_environment() == level
    code = "from deepspeed.utils import logger; print(logger.level)"
    variables = {**os.environ, LEVEL_VARIABLE: "debug"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=variables, cwd=ROOT, capture_output=True, check=True
    )
    assert int(done.stdout) == 10


# ---- which display -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_terminal", [False, True])
@pytest.mark.parametrize(
    "asked, steps, level, client, expected",
    [
        ("", None, None, False, "fits"),
        ("", None, None, True, Display(LineFormat.NONE)),
        ("", 5, None, False, Display(LineFormat.LINE, 5)),
        ("", 5, None, True, Display(LineFormat.LINE, 5)),
        ("", 0.5, None, False, Display(LineFormat.LINE, 1)),
        ("", NEVER, None, False, Display(LineFormat.NONE)),
        ("", None, "info", False, "fits"),
        ("", None, "warning", False, Display(LineFormat.NONE)),
        ("", 5, "error", False, Display(LineFormat.NONE)),
        ("0", 5, None, False, Display(LineFormat.NONE)),
        ("Off", None, None, False, Display(LineFormat.NONE)),
        ("line", None, None, True, Display(LineFormat.LINE)),
        ("line", 5, "error", False, Display(LineFormat.LINE, 5)),
        ("bar", NEVER, None, True, Display(LineFormat.BAR)),
        ("auto", None, None, False, "fits"),
    ],
)
def test_which_display(
    monkeypatch: pytest.MonkeyPatch,
    on_terminal: bool,
    asked: str,
    steps: float | None,
    level: str | None,
    client: bool,
    expected: Any,
) -> None:
    monkeypatch.setattr(terminal, "is_terminal", lambda stream: on_terminal)
    with environment(**{VARIABLE: asked}):
        found = choose_display(steps, level, client=client)
    assert found == (
        Display(LineFormat.BAR if on_terminal else LineFormat.LINE) if expected == "fits" else expected
    )


@pytest.mark.parametrize(
    "package", ["transformers.trainer", "accelerate.accelerator", "lightning.pytorch.x", "mine"]
)
def test_a_client_is_known_by_its_call(package: str) -> None:
    module = types.ModuleType(package)
    exec("def call(function):\n    return function()", vars(module))
    assert vars(module)["call"](made_by_client) == (package != "mine")


def test_a_bar_of_the_script_is_noticed() -> None:
    from tqdm import tqdm

    assert not another_display_is_active()
    with tqdm(total=3, file=io.StringIO()):
        assert another_display_is_active()
    assert not another_display_is_active()


# ---- the line ------------------------------------------------------------------------------------------------


@distributed(world_size=2)
def test_a_line_every_so_many_steps() -> None:
    with environment(), printed() as lines:
        engine = start(2, steps_per_print=2, gradient_accumulation_steps=2)
        losses = train(engine, 5)
    lines[:] = [line for line in lines if "step=" in line]
    if dist.get_rank() > 0:
        assert lines == []
    else:
        found = [parts(line) for line in lines]
        assert [part["step"] for part in found] == ["2", "4"]
        assert [float(part["loss"]) for part in found] == pytest.approx([losses[1], losses[3]], rel=1e-4)
        assert list(found[0])[:4] == ["step", "skipped", "lr", "mom"]
        assert found[0]["skipped"] == "0" and found[0]["lr"] == str(engine.get_lr())
        assert all(float(part[name]) > 0 for part in found for name in ("grad_norm", "samples/s", "step_ms"))
        assert all(part["memory"].endswith(" GB") for part in found)
        assert all("[INFO]" in line and "WARN" not in line for line in lines)
    engine.destroy()


@distributed(world_size=1)
def test_lines_by_the_clock() -> None:
    """Pauses double from 2 s to a minute; loss and speed are those of that moment, and nothing is read between."""
    clock = types.SimpleNamespace(s=0.0)
    with environment(), printed() as lines:
        engine = start(1, scheduler={"type": "WarmupDecayLR", "params": {"total_num_steps": 400}})
        lines.clear()
        shown = LiveLine(engine, Display(LineFormat.LINE), now_s=lambda: clock.s)
        read, losses = [], []
        take = shown.meter.take
        shown.meter.take = lambda: read.append(engine.global_steps) or take()  # type: ignore[method-assign,func-returns-value]
        for _ in range(80):
            clock.s += 1.0
            losses += train(engine, 1)
            assert not shown.meter._backward_losses or shown.meter.listening
    found = [parts(line) for line in lines if "step=" in line]
    assert [part["step"] for part in found] == ["2", "6", "14", "30", "62"]
    assert [int(part["step"]) for part in found] == read
    assert [float(part["loss"]) for part in found] == pytest.approx([losses[s - 1] for s in read], rel=1e-4)
    assert found[-1]["samples/s"] == f"{engine.train_batch_size()}" and found[-1]["step_ms"] == "1000"
    assert found[-1]["left"] == "0:05:38" and float(found[-1]["tokens/s"]) > engine.train_batch_size()
    engine.destroy()


@distributed(world_size=1)
def test_slow_steps_get_a_line_each() -> None:
    clock = types.SimpleNamespace(s=0.0)
    with environment(), printed() as lines:
        engine = start(1)
        LiveLine(engine, Display(LineFormat.LINE), now_s=lambda: clock.s)
        for _ in range(4):
            clock.s += 100.0
            train(engine, 1)
    assert [parts(line)["step"] for line in lines if "step=" in line] == ["1", "2", "3", "4"]
    assert all("loss=" in line for line in lines if "step=" in line)
    engine.destroy()


@distributed(world_size=1)
def test_after_a_checkpoint_speeds_count_anew(tmp_path: Path) -> None:
    with environment(), printed() as lines:
        engine = start(1)
        train(engine, 9)
        engine.save_checkpoint(tmp_path)
        engine.destroy()
        engine = start(1, steps_per_print=10)
        engine.load_checkpoint(tmp_path)
        train(engine, 1)
    (line,) = [line for line in lines if "step=" in line]
    assert parts(line)["step"] == "10" and "loss" in parts(line) and "samples/s" not in parts(line)
    engine.destroy()


@distributed(world_size=1)
def test_a_line_that_fails_does_not_stop_the_training() -> None:
    with environment(), printed():
        engine = start(1, steps_per_print=1)
        engine.get_lr = lambda: 1 / 0
        train(engine, 2)
        assert engine.global_steps == 2
        engine.destroy()


def test_length_of_a_run_by_its_schedule() -> None:
    assert total_steps(None) is None and total_steps(types.SimpleNamespace(total_num_steps=7)) == 7
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    assert total_steps(torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=9)) == 9
    assert total_steps(torch.optim.lr_scheduler.StepLR(optimizer, 3)) is None


def test_a_meter_that_does_not_listen_keeps_nothing() -> None:
    events = Events()
    meter = LossMeter(types.SimpleNamespace(events=events, agreed_loss=None))  # type: ignore[arg-type]
    loss = torch.ones((), requires_grad=True)
    events.emit("after_forward", outputs=loss)
    events.emit("after_backward", loss=loss, share=loss)
    assert meter._backward_losses == [] and meter._forward_losses == [] and meter.take() is None


# ---- the status line -----------------------------------------------------------------------------------------


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_status_line_stays_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(terminal.shutil, "get_terminal_size", lambda **_: os.terminal_size((10, 4)))
    line = StatusLine()
    line.show("step 1")
    line.show("step 2 and much more")
    line.close()
    line.show("step 3")
    line.close()
    assert screen.getvalue() == "\rstep 1\x1b[K\rstep 2 an\x1b[K\n"


def test_a_line_of_the_log_takes_the_place_of_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(sys, "stdout", screen)
    line = StatusLine()
    line.show("step 1")
    logger.warning("careful")
    line.close()
    logger.warning("again")
    text = screen.getvalue()
    assert text.startswith("\rstep 1\x1b[K\r\x1b[K[") and text.count("\r") == 2 and "careful\n[" in text


@pytest.mark.parametrize(
    "error", [BrokenPipeError(), ValueError("I/O operation on closed file"), OSError(28, "full")]
)
def test_a_terminal_that_is_gone_is_left_alone(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    tries = []

    class Gone(Screen):
        def write(self, text: str) -> int:
            tries.append(text)
            raise error

    monkeypatch.setattr(sys, "stderr", Gone())
    line = StatusLine()
    line.show("step 1")
    line.show("step 2")
    line.close()
    assert len(tries) == 1


@pytest.mark.parametrize("gone", [None, "closed", "broken"])
def test_a_log_that_cannot_be_written_goes_to_standard_error(
    monkeypatch: pytest.MonkeyPatch, gone: Any
) -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    closed = io.StringIO()
    closed.close()
    error = io.StringIO()
    monkeypatch.setattr(sys, "stderr", error)
    monkeypatch.setattr(sys, "stdout", {None: None, "closed": closed, "broken": Broken()}[gone])
    monkeypatch.delenv("RANK", raising=False)
    report("a line")
    deepspeed.base.logging.print_dist("another")
    assert error.getvalue().count("a line") == 1 and "Traceback" not in error.getvalue()
    monkeypatch.setattr(sys, "stderr", None)
    report("lost")


SCRIPT = """
import sys, torch, deepspeed
config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
engine, *_ = deepspeed.initialize(model=torch.nn.Linear(4, 4), config=config)
for step in range(int(sys.argv[1])):
    engine.backward(engine(torch.ones(2, 4)).square().mean())
    engine.step()
engine.destroy()
print("the end")
"""


def test_on_a_terminal(tmp_path: Path) -> None:
    """A status line on standard error, from the first step; the log of standard output is not in it."""
    master, slave = pty.openpty()
    (tmp_path / "script.py").write_text(SCRIPT)
    variables = {name: value for name, value in os.environ.items() if name not in (VARIABLE, "RANK")}
    done = subprocess.run(
        [sys.executable, "script.py", "3"],
        cwd=tmp_path,
        env={**variables, "TERM": "xterm", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=slave,
        text=True,
        timeout=300,
    )
    os.close(slave)
    seen = b""
    with contextlib.suppress(OSError):  # the end of a terminal without users is an error on Linux
        while chunk := os.read(master, 4096):
            seen += chunk
    os.close(master)
    assert done.returncode == 0 and "the end" in done.stdout and "step=" not in done.stdout
    assert done.stdout.count("[INFO]") == 3
    shown = seen.decode()
    assert "\rstep 1  loss " in shown and "lr 0.01" in shown and shown.endswith("\r\n")
