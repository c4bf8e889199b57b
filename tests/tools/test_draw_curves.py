"""Curves from CSV files and from what a run printed become an SVG of their own size, with a legend."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests import forked
from tests.tools.launcher.programs import REPOSITORY, environment

SVG = "{http://www.w3.org/2000/svg}"


def test_two_curves_with_a_legend(tmp_path: Path) -> None:
    plain = [f"{step},{4 - 2 * step / 1000}" for step in range(1001)]
    (tmp_path / "plain.csv").write_text("\n".join(["step,loss", *plain]))
    fast = [f"[Rank 0] step={step}, lr=[0.1], loss={4 - 3 * step / 1000}, ms=5" for step in range(1001)]
    (tmp_path / "fast.txt").write_text("\n".join(["step 0: a loss", *fast]))
    given = ["loss.svg", "plain=plain.csv", "fast & new=fast.txt", "--columns", "step", "loss", "--mean", "3"]
    done = forked.run([str(REPOSITORY / "tools/draw_curves.py"), *given], cwd=tmp_path, env=environment())
    assert done.returncode == 0, done.stderr
    picture = ElementTree.parse(tmp_path / "loss.svg").getroot()
    words = [text.text for text in picture.iter(f"{SVG}text")]
    assert {"plain", "fast & new", "step", "loss", "400", "2.5"} <= set(words)
    slow, fast = (
        [tuple(map(float, point.split(","))) for point in str(line.get("points")).split()]
        for line in picture.iter(f"{SVG}polyline")
    )
    assert 150 < len(slow) < 350 and slow[0] == pytest.approx(fast[0], abs=0.2)
    assert fast[-1][1] > slow[-1][1] > slow[0][1]  # lower losses are lower in the picture


def test_curves_of_one_file_by_their_names(tmp_path: Path) -> None:
    lines = [f"step {step}: discriminator {1 + step / 500:.3f}, generator 2.000" for step in (100, 200, 300)]
    (tmp_path / "log.txt").write_text("\n".join([*lines, "distance 0.5 -> 0.1"]))
    given = ["loss.svg", "discriminator=log.txt", "generator=log.txt", "--columns", "step"]
    done = forked.run([str(REPOSITORY / "tools/draw_curves.py"), *given], cwd=tmp_path, env=environment())
    assert done.returncode == 0, done.stderr
    picture = ElementTree.parse(tmp_path / "loss.svg").getroot()
    words = [text.text for text in picture.iter(f"{SVG}text")]
    assert {"discriminator", "generator", "step", "loss"} <= set(words)
    assert [str(line.get("points")).count(",") for line in picture.iter(f"{SVG}polyline")] == [3, 3]
