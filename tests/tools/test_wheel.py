"""`tools/wheel.py`: the wheel built from the source archive is complete, and trains in an empty environment."""

from __future__ import annotations

import importlib.util
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "wheel.py"
TOOL = runpy.run_path(str(SCRIPT))


def packed(wheel: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return wheel


def test_a_wheel_without_its_library_or_its_data_is_seen(tmp_path: Path) -> None:
    missing = TOOL["missing_files"](packed(tmp_path / "a.whl", {"deepspeed/__init__.py": b""}))
    assert {TOOL["LIBRARY"], "deepspeed/py.typed", "deepspeed/__init__.pyi"} <= set(missing)
    assert "deepspeed/__init__.py" not in missing and not any("__pycache__" in name for name in missing)


def test_the_newest_version_of_a_systems_library_counts_by_number(tmp_path: Path) -> None:
    content = b"\0GLIBC_2.4\0GLIBC_2.34\0GLIBC_2.9\0GLIBCXX_3.4.29\0GLIBC_PRIVATE\0"
    wheel = packed(tmp_path / "a.whl", {TOOL["LIBRARY"]: content})
    assert TOOL["system_versions"](wheel) == "GLIBC 2.34, GLIBCXX 3.4.29"


def test_what_the_wheel_asks_for_is_looked_for_here(tmp_path: Path) -> None:
    fields = (
        "Requires-Dist: torch>=2.6\nRequires-Dist: no_such_package\nRequires-Dist: other; extra == 'x'\n\n"
    )
    wheel = packed(tmp_path / "a.whl", {"a-1.dist-info/METADATA": fields.encode()})
    assert TOOL["missing_packages"](wheel) == ["no_such_package"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
@pytest.mark.skipif(importlib.util.find_spec("scikit_build_core") is None, reason="no scikit-build-core")
def test_the_wheel_of_the_source_archive_trains_alone(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trained 20 steps with the" in done.stdout
    assert sorted(file.suffix for file in tmp_path.iterdir()) == [".gz", ".whl"]
