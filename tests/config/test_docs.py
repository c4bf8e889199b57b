from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "gen_config_docs.py"


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
        "- `nebula.enabled`: checkpoints are written the ordinary way",
        "Also: `tp`.",
        "*Deprecated.*",
    ):
        assert words in text
