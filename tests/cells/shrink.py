"""Makes a failing cell small, and writes it as a script that needs nothing of this folder."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

from tests.cells.cell import BATCH, CHOICES, REMOVABLE_LAST, STEPS, Cell, config_of, why_not


def shrunk(cell: Cell, fails: Callable[[Cell], bool]) -> Cell:
    """The smallest cell that still fails: features are made plain one by one, until none can be.

    ``fails`` runs a cell; it is known to be true of ``cell``.
    """
    again = True
    while again:
        again = False
        for name in sorted(cell.features(), key=lambda each: (each in REMOVABLE_LAST, each)):
            for value in _plainer(name, getattr(cell, name)):
                smaller = dataclasses.replace(cell, **{name: value})
                if not why_not(smaller) and fails(smaller):
                    cell, again = smaller, True
                    break
    return cell


def _plainer(name: str, value: object) -> list[object]:
    """The plain value; for numbers all that come before, the plainest first; for axes each alone."""
    values = list(CHOICES[name])
    if name in ("ranks", "stage"):
        return values[: values.index(value)]
    if name == "axes" and "+" in str(value):
        return ["dp", *str(value).split("+")]
    return [values[0]]


SCRIPT = '''"""{cell}

{what}
Run: {run}
"""
import torch
import deepspeed
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
deepspeed.init_distributed("gloo")
rank = torch.distributed.get_rank()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(24, 16), nn.Linear(16, 16), nn.Linear(16, 24)

    def forward(self, tokens, labels):
        return F.cross_entropy(self.head(torch.tanh(self.body(self.embed(tokens)))).flatten(0, 1), labels.flatten())


model = Model()
config = {config}
engine, *_ = deepspeed.initialize(model=model, config=config)
for step in range({steps}):
    for micro in range(engine.gradient_accumulation_steps()):
        tokens, labels = torch.randint(24, (2, {batch}, 8), generator=torch.Generator().manual_seed(100 * step + rank))
        loss = engine(tokens, labels)
        engine.backward(loss)
        engine.step()
    print(rank, step, loss.item(), engine.get_global_grad_norm())
'''

HARNESS = '''"""{cell}

{what}
Run from the root of the repository: {run}
"""
from tests.cells.cell import parse
from tests.cells.run import run_cell

result = run_cell(parse({cell!r}), seed={seed})
print(result.outcome, result.what)
'''


def script(cell: Cell, what: str, seed: int = 0) -> str:
    """A script of fewer than 40 lines: plain torch and deepspeed where the model does not matter, else the cell."""
    needs_more = {
        "model",
        "axes",
        "parameters",
        "data",
        "resume",
        "recompute",
        "backward",
        "batch_change",
        "evaluate",
    }
    text = " ".join(what.split())[:200].replace('"""', "'''")
    if needs_more & cell.features().keys() or cell.optimizer in ("client", "callable"):
        return HARNESS.format(cell=str(cell), what=text, seed=seed, run="python this_file.py")
    config = json.dumps(config_of(cell, "/tmp/cells")).replace("true", "True").replace("false", "False")
    run = f"deepspeed --num_gpus {cell.ranks} this_file.py"
    return SCRIPT.format(cell=str(cell), what=text, config=config, steps=STEPS, batch=BATCH, run=run)
