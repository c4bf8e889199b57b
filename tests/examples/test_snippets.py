"""Code on the pages: it parses, what it imports of this package is there, and configs are valid."""

from __future__ import annotations

import ast
import importlib
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepspeed.config.analysis import analyse
from deepspeed.config.reader import ConfigSource
from deepspeed.config.schema import TrainingConfig
from deepspeed.config.sections.zero import DeepSpeedZeroConfig
from tests.examples.printed_commands import FENCE
from tests.pool import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, language: str) -> Iterator[str]:
    for name, text in FENCE.findall(page.read_text(encoding="utf-8")):
        if name == language:
            yield textwrap.dedent(text)


def imported(tree: ast.AST) -> Iterator[tuple[str, str | None]]:
    """Module and name; the parts of ``deepspeed.a.b`` where it is written out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "deepspeed":
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names if alias.name.split(".")[0] == "deepspeed")
        elif isinstance(node, ast.Attribute):
            chain = dotted(node)
            if chain is not None and chain[0] == "deepspeed":
                yield ".".join(chain[:-1]), chain[-1]


def dotted(node: ast.expr) -> list[str] | None:
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)) is not None:
        return [*before, node.attr]
    return None


def found(module: str, name: str | None) -> Any:
    value = importlib.import_module(module.split(".")[0])
    for part in [*module.split(".")[1:], *([name] if name else [])]:
        try:
            value = getattr(value, part)
        except AttributeError:
            value = importlib.import_module(f"{value.__name__}.{part}")
    return value


def of_session(text: str) -> str:
    """The statements of an interactive session; a text without prompts as it is."""
    lines = re.findall(r"(?m)^(?:>>>|\.\.\.) ?(.*)$", text)
    return "\n".join(lines) if text.startswith(">>>") else text


def section_of(text: str) -> dict[str, Any]:
    """A config, also where a page shows some of its keys without braces, or those of ``zero_optimization``."""
    value = json.loads(text if text.lstrip().startswith(("{", "[")) else f"{{{text}}}")
    if not isinstance(value, dict):
        return {}
    if value.keys() <= NAMES:
        return value
    return {"zero_optimization": {"stage": 2, **value}} if value.keys() <= ZERO_NAMES else {}


NAMES, ZERO_NAMES = (
    {field.alias or name for name, field in model.model_fields.items()}
    for model in (TrainingConfig, DeepSpeedZeroConfig)
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_on_a_page(page: Path) -> None:
    for text in blocks(page, "python"):
        for module, name in imported(ast.parse(of_session(text))):
            found(module, name)
    for text in blocks(page, "json"):
        config = section_of(text)
        problems = analyse(ConfigSource(config, str(page)), None).errors if config else []
        assert not problems, (text, problems)


def test_configs_are_found() -> None:
    pages = [page for page in PAGES if any(map(section_of, blocks(page, "json")))]
    assert len(pages) > 15
