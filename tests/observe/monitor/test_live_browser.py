"""The page in a browser: headless Chromium draws it from a server of this process."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepspeed.observe.live.record import LiveStep
from deepspeed.observe.live.recorder import LiveRecorder
from deepspeed.observe.live.server import PageServer

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium on this machine")

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --virtual-time-budget=4000"
).split()


def dumped(url: str, profile: Path, *more: str) -> str:
    """The document after four seconds of its time."""
    assert BROWSER is not None
    command = [BROWSER, *FLAGS, f"--user-data-dir={profile}", *more, "--dump-dom", url]
    done = subprocess.run(command, capture_output=True, timeout=90)
    return done.stdout.decode()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Any]:
    clock = [1_700_000_000.0]
    ranks = [
        {"rank": 0, "step": 60, "arrival_ms": 10.0, "memory": 2**30, "seen": clock[0] + 120},
        {"rank": 1, "step": 60, "arrival_ms": 30.0, "memory": 2**30, "seen": clock[0] + 60},
    ]
    facts = {"name": "train_<i>.py", "ranks": 2, "device": "cpu", "stage": 2, "total_steps": 100}
    measured = {"memory": 2**30, "plan": {"line": 2**31}, "ranks": ranks, "slowest": 1, "skipped": 2}
    recording = LiveRecorder(tmp_path / "live", facts, lambda: measured, now=lambda: clock[0])
    recording.history.set_state(run=facts)
    for number in range(1, 61):
        clock[0] += 2.0
        spans = (100.0, 200.0, 150.0, 50.0, 30.0)
        recording.put_step(
            LiveStep(number, clock[0], 2.0, 8, 1024, 3 + math.exp(-number / 20), 1e-3, 1.5, spans)
        )
        if number == 30:
            recording.put_event("saved", 30, "out/global_step30")
        recording.put_curves({"Train/Experts/<img src=x onerror=alert(1)>": 1.0 / number})
        recording.look()
    made: list[PageServer] = []

    def serve(token: str | None = None) -> PageServer:
        made.append(PageServer(recording.history, "127.0.0.1", 0, token))
        return made[-1]

    yield serve
    for each in made:
        each.close()


def test_the_page_is_drawn(served: Any, tmp_path: Path) -> None:
    text = dumped(served().address + "/", tmp_path / "profile")
    points = {
        label: int(count) for label, count in re.findall(r'aria-label="([^"]+)" data-points="(\d+)"', text)
    }
    for chart in ("Loss", "Speed", "A step, in ms", "Gradient norm", "Learning rate", "Memory of rank 0"):
        assert points[chart] >= 59, (chart, points)
    assert 'data-ready="' in text and "running" in text
    assert "<b>60</b><small>of 100" in text and "train_&lt;i&gt;.py" in text
    assert "saved: out/global_step30" in text and "run started" in text
    assert "silent" in text and "2 GiB planned" in text and "skipped updates" in text
    assert "<img" not in text and "&lt;img src=x" in text  # names are text
    assert "tokens/s" in text and "512" in text  # 8 samples of 128 tokens in 2 s


def test_it_asks_for_a_token(served: Any, tmp_path: Path) -> None:
    text = dumped(served("secret").address + "/", tmp_path / "profile")
    assert re.search(r'id="ask" class="card">', text), "the question is shown"
    assert "data-ready" not in text


def test_it_fits_a_phone(served: Any, tmp_path: Path) -> None:
    """Nothing is wider than the window: a script of the page's own would be refused by its policy, so the picture is
    looked at. Its right edge is the page's margin, in one colour, from top to bottom."""
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    picture = tmp_path / "phone.png"
    dumped(served().address + "/", tmp_path / "profile", f"--screenshot={picture}", "--window-size=500,2400")
    with image.open(picture) as shown:
        width, height = shown.size
        edge = {shown.convert("RGB").getpixel((width - 3, y)) for y in range(0, height, 7)}
    assert len(edge) == 1
