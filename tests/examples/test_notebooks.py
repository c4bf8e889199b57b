"""The notebooks run from top to bottom, and hold what they once printed and drew."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.pool import ROOT

FOLDER = ROOT / "examples" / "notebooks"
NOTEBOOKS = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
NEEDS = {"serving": ("transformers", "fastapi", "uvicorn")}


def cells(name: str) -> list[dict[str, Any]]:
    return json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs(name: str, tmp_path: Path) -> None:
    for package in ("matplotlib", *NEEDS.get(name, ())):
        pytest.importorskip(package, reason=f"{package} is not installed")
    code = ["".join(cell["source"]) for cell in cells(name) if cell["cell_type"] == "code"]
    (tmp_path / "cells.py").write_text("\n\n".join(code), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"}
    environment["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), environment["PATH"]))
    done = subprocess.run(
        [sys.executable, "cells.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_shows_what_came_out(name: str) -> None:
    outputs = [output for cell in cells(name) for output in cell.get("outputs", ())]
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert "image/png" in kinds and not any(output["output_type"] == "error" for output in outputs)
    printed = "".join("".join(output.get("text", ())) for output in outputs)
    assert len(printed) > 80 and "/tmp" not in printed and "/root" not in printed
    assert (FOLDER / f"{name}.ipynb").stat().st_size < 200 * 1024
    assert len(NOTEBOOKS) == 3
