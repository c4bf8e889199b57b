"""Number of Python calls of a save, including torch's, counted instead of timed; and the types that need no proof."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import deepspeed
from deepspeed.checkpoint.files.archive_reader import read_archive
from deepspeed.checkpoint.files.archive_writer import LazyTensor, write_archive
from deepspeed.checkpoint.files.round_trip import difference, is_plain
from tests.pool import distributed


def calls_of(work: Callable[[], Any]) -> int:
    count = 0

    def note(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


PLAIN = {"epoch": 1, "best": 0.5, "history": [1.0, 2.0]}
PROVED = {**PLAIN, "numpy": np.arange(4), "seen": {1, 2}}


@pytest.mark.parametrize(
    ("stage", "client_state", "calls"),
    [(0, PLAIN, 2650), (2, PLAIN, 3130), (3, PLAIN, 3330), (2, PROVED, 4000)],  # 25 % above what was counted
    ids=["0", "2", "3", "2-proved"],
)
@distributed(world_size=1)
def test_a_save_costs_no_more_calls(tmp_path, stage, client_state, calls):
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
    }
    model = torch.nn.Linear(4, 4)
    engine: Any = deepspeed.initialize(model=model, config=config)[0]
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    engine.save_checkpoint(tmp_path, tag="first", client_state=client_state)
    found = calls_of(lambda: engine.save_checkpoint(tmp_path, tag="second", client_state=client_state))
    assert found <= calls
    assert found >= calls * 0.6, "the ceiling can be lowered"


def some_value(rng: random.Random, depth: int) -> Any:
    """Return a random nest of plain types, some of whose parts occur in several places."""
    shared = [1, "x"]
    leaves: list[Callable[[], Any]] = [
        lambda: rng.choice(["", "name", "a" * 300, "\x00\x7f\n"]),
        lambda: rng.choice([0, -1, 255, 256, 2**31, -(2**63), 2**1999, -(2**1500)]),
        lambda: rng.choice([0.0, -0.0, float("nan"), float("inf"), 1e-300]),
        lambda: rng.choice([True, False, None]),
        lambda: torch.zeros(
            rng.choice([(), (0,), (2, 3)]), dtype=rng.choice([torch.float32, torch.bfloat16])
        ),
        lambda: torch.arange(6.0).view(2, 3).t().requires_grad_(rng.random() < 0.5),
        lambda: LazyTensor((2,), torch.int64, lambda: [torch.tensor([1, 2])]),
        lambda: shared,
    ]
    if depth == 0 or rng.random() < 0.3:
        return rng.choice(leaves)()
    parts = [some_value(rng, depth - 1) for _ in range(rng.randrange(5))]
    named = OrderedDict((rng.choice([f"k{i}", i, -i]), part) for i, part in enumerate(parts))
    if rng.random() < 0.3:
        named._metadata = {"version": parts}  # type: ignore[attr-defined]  # as a module's state dict has it
    return rng.choice([parts, tuple(parts), dict(named), named, torch.Size([2, 3])])


def test_what_is_plain_loads_back_equal(tmp_path, monkeypatch):
    """The comparison that is left out finds nothing."""
    rng = random.Random(0)
    values = [some_value(rng, 4) for _ in range(150)]
    assert all(is_plain(value, LazyTensor) for value in values)
    write_archive(tmp_path / "f.pt", {"all": values})
    loaded = read_archive(tmp_path / "f.pt")["all"]
    monkeypatch.setattr("deepspeed.checkpoint.files.round_trip.is_plain", lambda value, lazy: False)
    for value, other in zip(values, loaded, strict=True):
        assert difference(value, other, LazyTensor) is None
    assert sum(map(len, map(str, values))) > 20_000


class Text(str):
    pass


class Mapping(dict):
    pass


def test_what_is_not_known_to_be_plain():
    cycle: list[Any] = []
    cycle.append((cycle,))
    with_cycle: dict[str, Any] = {}
    with_cycle["itself"] = with_cycle
    with_attribute = OrderedDict()
    with_attribute.mine = {1}  # type: ignore[attr-defined]
    for value in (
        *(
            cycle,
            with_cycle,
            with_attribute,
            Text("a"),
            Mapping(),
            {1},
            b"x",
            1j,
            deque(),
            np.float64(1),
            np.arange(2),
        ),
        *(
            "\u00e9",
            "\udc80",
            2**2100,
            {(1,): 2},
            {1.0: 2},
            {True: 2},
            {"\u00e9": 1},
            int,
            object(),
            Path("x"),
        ),
        *(
            torch.zeros(2, dtype=torch.complex64),
            torch.zeros(2, device="meta"),
            torch.nn.Parameter(torch.zeros(2)),
        ),
        *(torch.eye(2).to_sparse(), torch.zeros(2).untyped_storage(), torch.float32),
    ):
        assert not is_plain(value, LazyTensor), value
        assert not is_plain({"a": [1, (value,)]}, LazyTensor), value
