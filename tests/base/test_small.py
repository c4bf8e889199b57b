"""Memory reports, profiler ranges, debugging helpers, and the package's lazy names."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed.base
from deepspeed.base.accelerator import get_accelerator
from deepspeed.base.memory import memory_usage, see_memory_usage
from deepspeed.base.module_utils import recursive_getattr, recursive_setattr
from deepspeed.compat.aliases import NAMES
from deepspeed.compat.utils import debug, nvtx
from deepspeed.compat.utils.nvtx import instrument_w_nvtx


def test_memory_is_shown_only_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    see_memory_usage("quiet")
    assert capsys.readouterr().out == ""
    see_memory_usage("title", force=True)
    lines = capsys.readouterr().out.splitlines()
    allocated = float(lines[1].split()[1])
    assert lines[0] == "title" and lines[2].startswith("CPU Virtual Memory: used = ")
    assert allocated == pytest.approx(get_accelerator().memory_allocated() / 1024**3, abs=0.02)
    assert "Max_MA" in lines[1] and "Max_CA" in lines[1]


def test_memory_is_shown_on_rank_zero_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    see_memory_usage("title", force=True)
    assert capsys.readouterr().out == ""


def test_memory_line() -> None:
    parts = dict(part.split(": ") for part in memory_usage().split(" | ")[1:])
    assert list(parts) == ["mem_allocated", "max_mem_allocated", "cache_allocated", "max_cache_allocated"]
    assert all(value.endswith(" GB") and float(value[:-3]) > 0 for value in parts.values())


def test_instrumented_functions_are_themselves() -> None:
    @instrument_w_nvtx
    def add(a: int, b: int = 2) -> int:
        """Adds."""
        if b == 0:
            raise KeyError
        return a + b

    assert add(1) == 3 and add.__name__ == "add" and add.__doc__ == "Adds."
    with torch.profiler.profile() as profile:
        add(1)
        with pytest.raises(KeyError):
            add(1, b=0)
        get_accelerator().range_pop()  # nothing was left open
    spans = [event for event in (profile.events() or []) if event.name.endswith("add")]
    assert len(spans) == 2
    compiled = torch.compile(instrument_w_nvtx(torch.sin), backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(2)), torch.ones(2).sin())


def test_ranges_have_a_domain_where_the_accelerator_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class WithDomains:
        supports_nvtx_domain = True

        def range_push(self, msg: str, domain: str | None = None) -> None:
            calls.append((msg, domain))

        def range_pop(self, domain: str | None = None) -> None:
            calls.append(domain)

    class Without:
        def range_push(self, msg: str) -> None:
            calls.append(msg)

        def range_pop(self) -> None:
            calls.append("pop")

    wrapped = instrument_w_nvtx(len)
    for kind in (WithDomains, Without):
        monkeypatch.setattr(nvtx, "get_accelerator", kind)
        assert wrapped([1]) == 1
    assert calls == [("len", "DeepSpeed"), "DeepSpeed", "len", "pop"]
    monkeypatch.setattr(nvtx, "enable_nvtx", False)
    assert wrapped([]) == 0 and len(calls) == 4


def test_attributes_by_dotted_names() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 3), nn.ReLU()))
    assert recursive_getattr(model, "0.0.weight") is model[0][0].weight
    recursive_setattr(model, "0.1", nn.Tanh())
    recursive_setattr(model, "head", nn.Linear(3, 1))
    assert isinstance(model[0][1], nn.Tanh) and model.head.in_features == 3


def test_names_for_debugging() -> None:
    linear: Any = nn.Linear(2, 3)
    model, weight = nn.Sequential(linear, nn.ReLU()), linear.weight
    assert debug.debug_param2name(weight) == debug.debug_module2name(model[0]) == "unknown"
    debug.debug_extract_module_and_param_names(model)
    assert debug.debug_param2name(weight) == "0.weight" and debug.debug_module2name(model[1]) == "1"
    debug.debug_clear_module_and_param_names()
    assert debug.debug_param2name(weight) == "unknown"


def test_documented_names_resolve() -> None:
    for name, path in NAMES["deepspeed.utils"].items():
        home, _, renamed = path.partition(":")
        found = getattr(importlib.import_module(home), renamed or name)
        assert getattr(deepspeed.utils, name) is found, name
        assert name in dir(deepspeed.utils)
    # A function with the name of its module, however the module was imported.
    assert callable(importlib.import_module("deepspeed.utils").z3_leaf_module)
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        importlib.import_module("deepspeed.utils").absent()
