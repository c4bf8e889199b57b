from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from deepspeed.config.keys import walk
from deepspeed.config.schema import TrainingConfig

TOOL = Path(__file__).resolve().parents[2] / "tools" / "gen_config_docs.py"
FACTS = Path(__file__).resolve().parents[1] / "files" / "config_schema.json"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gen_config_docs", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_config_page_is_up_to_date(tool: ModuleType) -> None:
    assert tool.main(["--check"]) == 0, "run python tools/gen_config_docs.py"


def test_config_page_shows_what_it_should(tool: ModuleType) -> None:
    text = tool.TARGET.read_text(encoding="utf-8")
    for words in (
        "| `stage3_prefetch_bucket_size` | integer | `50000000` | >= 0 |",
        "### `zero_optimization.offload_param`",
        "- `nebula.enabled`: checkpoints are written as usual",
        "Also: `tp`.",
        "*Deprecated.*",
    ):
        assert words in text


def test_defaults_are_those_that_the_table_says(tool: ModuleType) -> None:
    """Each row's value of the release is that of its schema, ours is one of the two, and the row says which."""
    facts = json.loads(FACTS.read_text(encoding="utf-8"))["ds_config"]
    ours = {".".join(path): tool.default_of(key) for path, key in walk(TrainingConfig)}
    rows = json.loads(tool.DEFAULTS.read_text(encoding="utf-8"))
    assert len({row["key"] for row in rows}) == len(rows) > 26
    for row in rows:
        assert row["document"] != row["release"] and row["ours"] in ("document", "release") and row["why"]
        assert ours[row["key"]] == tool.in_cell(row[row["ours"]]), row["key"]
        fact = {"fields": facts}
        for part in row["key"].split("."):
            below = fact["fields"]
            fact = below.get(part) or below["<group>"]
        assert fact["default"] == row["release"], row["key"]


def test_a_table_between_markers_is_replaced_and_nothing_else(tool: ModuleType) -> None:
    page = f"before\n{tool.BEGIN}\nOLD ROW\n{tool.END}\nafter\n"
    made = tool.with_defaults(page)
    assert made.startswith(f"before\n{tool.BEGIN}\n\n| key |") and made.endswith(f"|\n\n{tool.END}\nafter\n")
    assert "OLD ROW" not in made and tool.with_defaults(made) == made
