"""The documents for newcomers: links lead somewhere, and code runs."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys

import pytest
import torch

from tests.pool import distributed
from tests.tools.launcher.programs import REPOSITORY

FOLDERS = ("docs", "examples", "benchmarks")
DOCUMENTS = [
    *REPOSITORY.glob("*.md"),
    *(file for name in FOLDERS for file in REPOSITORY.glob(f"{name}/**/*.md")),
]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(REPOSITORY).as_posix())
def test_links_lead_somewhere(document):
    text = document.read_text(encoding="utf-8")
    links = {link for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if "://" not in link}
    assert [link for link in sorted(links) if not (document.parent / link).exists()] == []
    for link, anchor in re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", text):
        target = document.parent / link if link else document
        assert anchor in anchors(target.read_text(encoding="utf-8")), f"{link}#{anchor}"


def anchors(page: str) -> set[str]:
    """Return the places of a page that a link can name: those of its headings, and those that it sets itself."""
    without_code = re.sub(r"^```.*?^```", "", page, flags=re.S | re.M)
    headings = re.findall(r"^#+ (.+)$", without_code, flags=re.M)
    plain = [
        re.sub(r"[^\w\s-]", "", re.sub(r"\]\([^)]*\)", "", heading)).strip().lower() for heading in headings
    ]
    return {re.sub(r"[-\s]+", "-", each) for each in plain} | set(re.findall(r'<a id="([^"]+)">', page))


def test_installed_commands_are_functions():
    text = (REPOSITORY / "pyproject.toml").read_text().split("[project.scripts]")[1].split("\n[")[0]
    scripts = re.findall(r'^(\w+) = "([\w.]+):(\w+)"', text, flags=re.M)
    assert {"deepspeed", "ds", "ds_report", "ds_check"} <= {name for name, *_ in scripts}
    for _, module, function in scripts:
        assert callable(getattr(importlib.import_module(module), function)), module


class Regression(torch.nn.Module):
    """A model as the README's example has it: called with a batch, it returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)

    def forward(self, inputs, targets):
        return (self.linear(inputs.to(self.linear.weight.dtype)).float() - targets).pow(2).mean()


@distributed(world_size=2)
def test_the_code_of_the_readme_runs(tmp_path):
    (code,) = re.findall(
        r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(encoding="utf-8"), flags=re.S
    )
    torch.manual_seed(0)
    dataset = torch.utils.data.TensorDataset(torch.randn(256, 4), torch.randn(256, 1))
    scope = {"model": Regression(), "dataset": dataset}
    exec(code.replace('"checkpoint"', repr(str(tmp_path / "checkpoint"))), scope)
    engine = scope["engine"]
    assert (engine.global_steps, engine.gradient_accumulation_steps()) == (4, 4)
    assert (tmp_path / "checkpoint" / "latest").read_text() == "global_step4"
    engine.destroy()


def test_numbers_come_from_saved_results(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    performance = importlib.import_module("performance")
    (tmp_path / "train_step_cpu2.txt").write_text(
        "train_step: commit abc1234, 2026-01-02 03:04 UTC\nsome machine\n\n10M GPT, fp32, 2 ranks\n"
        "               ms/step  ratio to DDP, median [min .. max]     goal\n"
        "-------------  -------  ---------------------------------  -------\n"
        "DDP              223.6                1.00 [1.00 .. 1.00]\n"
        "ours, stage 2    201.9                0.89 [0.83 .. 0.94]  <= 1.15\n"
        "peer, stage 2    311.4                1.39 [1.22 .. 1.50]  <= 1.15\n"
    )
    lines = performance.numbers_of(tmp_path).splitlines()
    assert "| stage 2 | **0.89** (1.39) |  |  |  |" in lines
    assert lines[-3] == "Machine: some machine. Results: commit abc1234, 2026-01-02: train_step."
    assert not any("stage 0" in line or "FSDP2" in line for line in lines)


def test_every_number_of_the_pages_is_one_that_a_benchmark_printed():
    command = [sys.executable, "-S", str(REPOSITORY / "benchmarks" / "performance.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    prose, table, rest = re.split(r"<!-- /?NUMBERS -->", text)
    assert len(table.strip().splitlines()) - 2 <= 8
    assert all("benchmarks/results/" in row for row in table.strip().splitlines()[2:])
    measured = r"\d (?:x|s|ms|us|%|[KMG]i?B|nats|tokens/s)(?!\w)"
    assert re.findall(measured, prose + rest) == [], (
        "a number that no saved report has: put it into the table"
    )
