"""The Dockerfiles: what they install, as whom they run, and that their commands are those of the package.

hadolint reads them (`dev` brings it along); nothing here builds an image.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

from deepspeed.tools import serve_options
from deepspeed.tools.serve import problem_of
from tests.tools.launcher.programs import REPOSITORY

FILES = sorted((REPOSITORY / "docker").glob("*.Dockerfile"))


def instructions(file: Path) -> list[tuple[str, str]]:
    """The instructions and what follows each, without comments, continued lines joined."""
    text = re.sub(r"(?m)^#.*\n", "", file.read_text(encoding="utf-8")).replace("\\\n", " ")
    return [(line.split()[0], line.split(None, 1)[1]) for line in text.splitlines() if line.strip()]


def test_there_is_one_for_each_kind_of_device_and_the_page_leads_to_them() -> None:
    assert [file.name for file in FILES] == ["cpu.Dockerfile", "cuda.Dockerfile"]
    page = (REPOSITORY / "docs/installation.md").read_text(encoding="utf-8")
    for file in FILES:
        assert f"docker build -f docker/{file.name} " in page
        assert f"# docker build -f docker/{file.name} " in file.read_text().replace("#   ", "# ")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_wheel_of_the_checkout_runs_as_nobody_special(file: Path) -> None:
    found = instructions(file)
    images = [words for name, words in found if name == "FROM"]
    assert len(images) == 2 and images[0].endswith(" AS build")
    assert ":latest" not in "".join(images) and all(":" in image for image in images)
    assert ("RUN", "make wheel PYTHON=python3") in found
    last = found[[name for name, _ in found].index("FROM", 1) :]
    assert ("COPY", "--from=build /src/dist/*.whl /tmp/dist/") in last
    assert [words for name, words in last if name == "USER"] == ["1000"]
    assert max(i for i, (name, _) in enumerate(last) if name == "RUN") < last.index(("USER", "1000"))
    makefile = (REPOSITORY / "Makefile").read_text()
    (version,) = re.findall(r"torch==[\d.]+", file.read_text())
    assert version in makefile
    installs = [words for name, words in last if name == "RUN" and "pip install" in words]
    assert all("--no-cache-dir" in words for words in installs)
    assert version in installs[0] and "/tmp/dist" in installs[1]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_serves_and_is_asked_whether_it_is_well(file: Path) -> None:
    from tests.examples.printed_commands import Command, check

    found = dict(instructions(file))
    words = json.loads(found["CMD"])
    assert words[:2] == ["ds", "serve"]
    check(Command(Path("docker"), 1, " ".join(["ds", "serve", "MODEL", *words[3:]])))
    port = found["EXPOSE"]
    assert f"--port={port}" in words and "--host=0.0.0.0" in words
    asked = json.loads(found["HEALTHCHECK"][found["HEALTHCHECK"].index("CMD") + 3 :])
    assert f"http://127.0.0.1:{port}/health" in asked[-1]
    compile(asked[-1], "healthcheck", "exec")


@pytest.mark.parametrize("source", [*FILES, REPOSITORY / "docs/installation.md"], ids=lambda file: file.stem)
def test_what_is_printed_starts_a_server(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the environment that the printed line gives a container, and no more, and the packages of the image."""
    lines = re.findall(r"docker run .* -p .*", source.read_text(encoding="utf-8"))
    (words,) = [shlex.split(line) for line in lines]
    file = REPOSITORY / "docker" / f"{words[-1].partition(':')[2]}.Dockerfile"
    found = dict(instructions(file))
    assert "[serve,transformers]" in file.read_text()
    for package in ("fastapi", "uvicorn", "transformers"):
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    monkeypatch.delenv(serve_options.TOKEN_VARIABLE, raising=False)
    arguments = json.loads(found["CMD"])[2:]
    assert "set --token" in (problem_of(serve_options.parser().parse_args(arguments)) or "")
    for flag, variable in itertools.pairwise(words):
        if flag == "-e":
            monkeypatch.setenv(*variable.split("=", 1))
    assert problem_of(serve_options.parser().parse_args(arguments)) is None
    published = words[words.index("-p") + 1].partition(":")[2]
    assert published == found["EXPOSE"] and f"--port={published}" in arguments
    mounted = words[words.index("-v") + 1].split(":")[1]
    assert mounted == arguments[0]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_hadolint_finds_nothing(file: Path) -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([hadolint, str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
