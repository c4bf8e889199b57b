"""``ds plan`` against engines whose configs are drawn: bytes of what an engine owns before its first step."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.planning.ledger import MemoryPhase
from deepspeed.planning.request import PlanRequest, answer
from deepspeed.zero.offload import swap_file
from tests import pool
from tests.cells import draw, worker
from tests.cells.cell import CHOICES, Cell, config_of, why_not
from tests.cells.models import Kit, Language
from tests.cells.run import refused_early
from tests.planning.memory.counting import owned_bytes
from tests.planning.memory.test_engines import kept

SEED, COUNT = 47, 10
PLANNED = "ranks stage shards tier precision optimizer accumulation wire buckets".split()
"""Features that decide how many bytes there are; the others are plain here. Parts of split layers have tests of their
own (tests/planning)."""


def drawn() -> Iterator[Cell]:
    """Every one has something that takes memory elsewhere, or otherwise, than plain training."""
    for cell in draw.cells(SEED):
        plain = {name: values[0] for name, values in CHOICES.items() if name not in PLANNED}
        cell = dataclasses.replace(cell, **plain)
        apart = cell.stage > 0 and (cell.tier, cell.precision, cell.optimizer) != ("device", "fp32", "AdamW")
        by_config = cell.optimizer not in ("client", "callable")
        if apart and by_config and not why_not(cell) and not refused_early(cell):
            yield cell


@pytest.mark.parametrize("cell", list(itertools.islice(drawn(), COUNT)), ids=str)
def test_planned_bytes_are_owned(cell: Cell, tmp_path: Path) -> None:
    with torch.device("meta"):
        module = Language(cell, Kit())
    config = config_of(cell, str(tmp_path))
    plan = answer(PlanRequest(module=module, config=config, ranks=cell.ranks, device_type="cpu"))
    found = pool.run(owned, cell.ranks, line=dataclasses.asdict(cell), config=config)
    assert found[0] == kept(
        plan.ledger, (MemoryPhase.READY,)
    )  # the plan is of the rank with the least padding


def owned(line: dict[str, Any], config: dict[str, Any]) -> int:
    with mock.patch.object(swap_file, "GROW_BYTES", swap_file.PAGE):
        engine = deepspeed.initialize(model=worker.build(Cell(**line)), config=config)[0]
        found = owned_bytes(engine)
        dist.barrier()
        engine.destroy()
    return found
