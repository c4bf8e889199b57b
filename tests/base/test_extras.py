"""Hints to optional dependencies: they name the package that is missing, never ours as a package index knows it."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest

from deepspeed.base import extras
from deepspeed.base.extras import install_hint, requirements_of

ROOT = Path(__file__).resolve().parents[2]


def test_versions_come_from_the_extra() -> None:
    assert install_hint("transformers", extra="transformers") == "pip install 'transformers>=4.45'"
    assert requirements_of("demo") == ["tokenizers", "matplotlib"]
    assert install_hint("Tokenizers", extra="demo") == "pip install tokenizers"


def test_without_an_installation_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(extras.metadata, "requires", missing)
    assert install_hint("transformers", extra="transformers") == "pip install transformers"


def test_nobody_is_sent_to_another_project() -> None:
    """``pip install deepspeed`` would fetch what a package index has under this name."""
    wrong = re.compile(r"(pip|uv) install[^\n]*?\bdeepspeed\b(?!/|-[\d*])|['\"]deepspeed\[\w")
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "Makefile"]
    files += [path for folder in ("deepspeed", "examples") for path in (ROOT / folder).rglob("*.[pm][yd]")]
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in files
        for line in path.read_text(encoding="utf-8").splitlines()
        if wrong.search(line)
    ]
    assert found == []
