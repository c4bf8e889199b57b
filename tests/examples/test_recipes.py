"""The recipes of docs/recipes: the plan on a page is what `ds plan` prints, and each config trains a tiny twin."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys

import pytest

from tests.examples.scripts import script
from tests.pool import distributed
from tests.tools.launcher.programs import REPOSITORY

PAGES = sorted((REPOSITORY / "docs/recipes").glob("*.md"))
# The short forms that other tests run, and which.
ELSEWHERE = {
    "long_context": "tests/examples/test_clients.py",
    "rlhf": "tests/examples/test_rlhf.py",
    "serve": "tests/examples/test_clients.py",
}


def test_planned_memory_and_time_are_what_the_tool_prints() -> None:
    tool = REPOSITORY / "tools/write_plans.py"
    done = subprocess.run([sys.executable, str(tool), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_page_has_all_its_parts() -> None:
    twins = script("recipes", "twin").RECIPES
    assert {page.stem for page in PAGES} == {*twins, *ELSEWHERE}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert re.match(r"# .+\n\nFor anyone who ", text), page
        short = text.split("## Try it on a small model\n")[1]
        example = re.search(r"examples/(\w+)/\w+\.py(?: (\w+))?", short)
        assert example is not None, page
        if page.stem in ELSEWHERE:
            assert f'"{example[1]}"' in (REPOSITORY / ELSEWHERE[page.stem]).read_text(encoding="utf-8")
        else:
            assert example.groups() == ("recipes", page.stem)


@distributed(world_size=2)
def test_twins_learn() -> None:
    twin = script("recipes", "twin")
    for recipe in twin.RECIPES:
        losses = twin.train(recipe, steps=6)
        assert losses[-1] < 0.9 * losses[0], (recipe, losses)


def test_the_adapters_are_all_that_a_twin_trains() -> None:
    model = script("recipes", "twin").make_twin("lora_8b", ranks=1)
    trained = {name.rsplit(".", 2)[1] for name, param in model.named_parameters() if param.requires_grad}
    assert trained == {"down", "up"}


def test_a_plan_that_depends_on_the_machine_is_refused() -> None:
    sys.path.insert(0, str(REPOSITORY / "tools"))
    try:
        write_plans = importlib.import_module("write_plans")
    finally:
        sys.path.pop(0)
    page = '```json title="ds_config.json"\n{}\n```\n\n    ds plan ds_config.json --model gpt:10m\n\n```text\n```\n'
    with pytest.raises(ValueError, match="give --gpus, --host-memory, --sequence"):
        write_plans.planned(page)
    table = "Model\n\ncuda, GiB per rank   build\n  total    1\nhost, GiB per rank   build\n  total   2\n\ncuda: fits"
    assert write_plans.without_tables(table) == "Model\n\n...\n\ncuda: fits\n"
