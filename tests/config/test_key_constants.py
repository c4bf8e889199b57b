"""Constants of config keys: their spelling and their default, made from the schema."""

from __future__ import annotations

import gc
import importlib
import os
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed.base.python_gc import python_gc_manager
from deepspeed.config import constants
from tests.pool import distributed


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("GRADIENT_CLIPPING", "gradient_clipping"),
        ("FP16_ENABLED", "enabled"),
        ("FP16_INITIAL_SCALE_POWER_DEFAULT", 16),
        ("FP16_MASTER_WEIGHTS_AND_GRADS", "fp16_master_weights_and_grads"),
        ("BFLOAT16_OPTIMIZER_STATES_DEFAULT", False),
        ("TORCH_AUTOCAST_DTYPE", "dtype"),
        ("CHECKPOINT_TAG_VALIDATION", "tag_validation"),
        ("ACT_CHKPT_NUMBER_CHECKPOINTS_DEFAULT", None),
        ("DISABLE_PYTHON_GC_DEFAULT", False),
        ("BFLOAT16", "bf16"),
    ],
)
def test_constants_of_keys(name: str, expected: Any) -> None:
    assert getattr(constants, name) == expected


@pytest.mark.parametrize("name", ["FP16_NO_SUCH_KEY", "NO_SUCH_SECTION_KEY", "fp16_enabled"])
def test_other_names_are_no_constants(name: str) -> None:
    with pytest.raises(AttributeError):
        getattr(constants, name)


@distributed(world_size=1)
def test_collection_of_garbage_is_off_while_engines_want_it() -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam"},
        "disable_python_gc": True,
    }
    assert gc.isenabled()
    first, second = (deepspeed.initialize(model=torch.nn.Linear(2, 2), config=config)[0] for _ in range(2))
    assert not gc.isenabled() and python_gc_manager.active_engines == 2
    first.collect_python_gc()
    circle: list[Any] = []
    circle.append(circle)
    del circle
    assert first.collect_python_gc() >= 1
    first.destroy()
    assert not gc.isenabled()
    second.destroy()
    assert gc.isenabled()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_collects_its_garbage() -> None:
    """A worker of a data loader, for example."""
    manager = importlib.import_module("deepspeed.base.python_gc").PythonGCManager()
    held = manager.acquire()
    try:
        child = os.fork()
        if child == 0:
            as_before = gc.isenabled() and manager.active_engines == 0
            manager.release(held)
            os._exit(0 if as_before and gc.isenabled() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert not gc.isenabled()
    finally:
        manager.release(held)
    assert gc.isenabled()


def test_a_pause_ends_without_ending_what_engines_want() -> None:
    """Also if the engine is made in the pause; the second pause is inside the first."""
    manager = importlib.import_module("deepspeed.base.python_gc").PythonGCManager()
    with manager.paused(), manager.paused():
        assert not gc.isenabled() and manager.active_engines == 0
        held = manager.acquire()
    assert not gc.isenabled() and manager.active_engines == 1
    with manager.paused():
        manager.release(held)
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with manager.paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@distributed(world_size=1)
def test_initialize_waits_for_no_collection_of_garbage() -> None:
    """A full one looks at every object of torch; counted, as whether one is due depends on what went before."""
    collections: list[int] = []

    def count(phase: str, info: dict[str, int]) -> None:
        collections.append(info["generation"])

    threshold = gc.get_threshold()
    gc.set_threshold(50, 2, 1)
    gc.callbacks.append(count)
    try:
        engine, *_ = deepspeed.initialize(model=torch.nn.Linear(2, 2), config={"train_batch_size": 1})
        during = len(collections)
    finally:
        gc.callbacks.remove(count)
        gc.set_threshold(*threshold)
    engine.destroy()
    assert during <= 4, "those due before and after the call"
