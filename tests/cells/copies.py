"""Copies of the weights that train alone between outer updates, and what the layouts of a run have to come to."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.cells.cell import CLIP, OUTER_MOMENTUM, OUTER_RATE, STEPS, SYNC_EVERY, Cell
from tests.cells.formulas import Formula
from tests.cells.oracle import Alone, Expected, Layout, wants_local_gradients
from tests.cells.wires import Wire


def replicas_of_copies(cell: Cell) -> list[range]:
    """Return the streams of data of each copy of the weights, where copies train alone."""
    size = max(1, (2 if cell.shards == "mics" else 1) // cell.axis("sp"))
    return [range(first, first + size) for first in range(0, cell.replicas, size)]


def copy_of(cell: Cell, replica: int) -> int:
    """Return the number of the copy that reads a stream of data."""
    return next(number for number, held in enumerate(replicas_of_copies(cell)) if replica in held)


class Copies:
    """Local steps (Douillard et al. 2023; Lu et al. 2022): a model for each copy, and the weights that they last agreed
    on."""

    def __init__(self, cell: Cell, seed: int = 0, noise: int = 0) -> None:
        self.cell, self.seed, self.noise = cell, seed, noise
        first = Alone(cell, seed, noise)
        self.all, self.past, self.last = [first], list[Alone](), cell
        self.agreed = first.snapshot()
        self.momenta = {name: torch.zeros_like(value) for name, value in self.agreed.items()}
        self.updates = 0
        self.expected = Expected(start=first.snapshot())

    def begin(self, layout: Layout, noise: int = 0) -> None:
        """Go on in another layout: each copy with its own weights and moments, or, where ranks hold other parts, all
        with the means."""
        held = replicas_of_copies(layout.cell)
        if not self.updates or not _alike(self.last, layout.cell):
            before = self.all
            self.all = [self._from_means(before, number) for number in range(len(held))]
            self.past += before
        for each, replicas in zip(self.all, held, strict=True):
            each.replicas = replicas
            each.begin(layout, noise if len(replicas) > 1 else 0)  # else no gradient travels
        self.last = layout.cell

    @torch.no_grad()
    def _from_means(self, before: Sequence[Alone], number: int) -> Alone:
        made = Alone(self.cell, self.seed, self.noise and self.noise + 1000 * number)
        for name, param in made.named.items():
            param.copy_(_mean([each.named[name] for each in before]))
        states = [each.optimizer.state_dict() for each in before]
        state = copy.deepcopy(states[0])
        for key, entries in state["state"].items():
            for name, value in entries.items():
                if isinstance(value, Tensor):
                    entries[name] = _mean([each["state"][key][name] for each in states])
        made.optimizer.load_state_dict(state)
        if isinstance(made.optimizer, Formula):
            made.optimizer.updates = self.updates
        made.micro = before[0].micro
        made.publish()
        return made

    def step(self, step: int, cell: Cell) -> None:
        """One update of each copy, and an outer one where it is due."""
        for each in self.all:
            each.differentiate(step, cell)
        grads = self._gradients()
        if wants_local_gradients(cell, step):
            self._share_experts(cell, grads)
        else:
            for same in grads.values():
                _spread(same)
        squares = sum(grad.square().sum() for same in grads.values() for grad in same)
        norm = float(squares / len(self.all)) ** 0.5
        if self.cell.optimizer == "local 0/1 Adam" and self.updates:
            self._fill_variances(grads, min(1.0, CLIP / norm) if cell.clip else 1.0)
        for each in self.all:
            each.update(step, cell, norm)
        self.updates += 1
        together = cell.copies_of_one_batch and self.updates > 1
        if self.updates % SYNC_EVERY == 0 or together:
            self._agree()
        self.expected.losses.append([loss for each in self.all for loss in each.expected.losses[-1]])
        self.expected.norms.append(norm)

    def _gradients(self) -> dict[str, list[Tensor]]:
        """Return each weight's gradients on all copies; zeros where only other copies use it."""
        found = {}
        for name in self.agreed:
            params = [each.named[name] for each in self.all]
            if any(param.grad is not None for param in params):
                for param in params:
                    param.grad = torch.zeros_like(param) if param.grad is None else param.grad
                found[name] = [param.grad for param in params if param.grad is not None]
        return found

    def _share_experts(self, cell: Cell, grads: dict[str, list[Tensor]]) -> None:
        """Copies that share experts have the gradient of all their tokens."""
        size = min(cell.axis("ep"), len(self.all))
        for name, same in grads.items():
            for first in range(0, len(same), size) if "deepspeed_experts" in name else ():
                _spread(same[first : first + size])

    def _fill_variances(self, grads: dict[str, list[Tensor]], scale: float) -> None:
        """A weight without a gradient so far gets the mean of all copies' squares."""
        for name, same in grads.items():
            states = [each.optimizer.state[each.named[name]] for each in self.all]
            if not any("v" in state and state["v"].any() for state in states):
                mean = 0.001 * float(_mean([(scale * grad).square().mean() for grad in same])) or 1.0
                for state in states:
                    state.update(v=torch.full_like(same[0], mean), filled=True)

    @torch.no_grad()
    def _agree(self) -> None:
        """The mean of the copies' moves; of DiLoCo's an outer update, SGD with Nesterov momentum."""
        for name, agreed in self.agreed.items():
            masters = [each.named[name] for each in self.all]
            if self.cell.optimizer == "local 0/1 Adam":
                self._agree_on_moves(masters)
                continue
            moved = agreed - _mean(masters)
            momentum = self.momenta[name].mul_(OUTER_MOMENTUM).add_(moved)
            agreed.sub_(OUTER_RATE * (moved + OUTER_MOMENTUM * momentum))
            for master in masters:
                master.copy_(agreed)
        for each in self.all:
            each.publish()

    def _agree_on_moves(self, masters: Sequence[Tensor]) -> None:
        states = [
            each.optimizer.state.get(master, {}) for each, master in zip(self.all, masters, strict=True)
        ]
        if not all(state.get("rates") for state in states):
            return  # unused, or frozen
        moved = _mean([state["moved"] for state in states])
        for each, master in zip(self.all, masters, strict=True):
            each.optimizer.agree(master, moved)  # type: ignore[attr-defined]

    def evaluate(self, cell: Cell) -> None:
        self.expected.evaluations.append(self._read(cell, Alone.evaluate, "evaluations"))

    def generate(self, cell: Cell) -> None:
        self.expected.generated.append(self._read(cell, Alone.generate, "generated"))

    def _read(self, cell: Cell, make: Callable[[Alone, Cell], None], name: str) -> list[Any]:
        """Return the last entry that ``make`` adds to each copy's ``name``, by replica."""
        found: list[Any] = []
        for each in self.all:
            make(each, cell)
            found += getattr(each.expected, name)[-1]
        return found

    def finish(self) -> None:
        """Complete ``expected``."""
        every = [*self.past, *self.all]
        for each in every:
            each.finish()
        self.expected.apart = [each.expected.weights for each in self.all]
        self.expected.weights = self.expected.apart[0]
        self.expected.rounding_decides = every[-1].expected.rounding_decides
        self.expected.chances = [one for each in every for one in each.expected.chances]
        self.expected.doubt = max(each.expected.doubt for each in every)


def _alike(before: Cell, after: Cell) -> bool:
    """Return whether ranks hold the same parts of the weights, and so their own states."""
    parts = [
        (each.ranks, each.shards, each.stage > 0, *(each.axis(name) for name in ("tp", "pp", "ep")))
        for each in (before, after)
    ]
    return parts[0] == parts[1]


def _mean(values: Sequence[Tensor]) -> Tensor:
    return torch.stack([value.detach() for value in values]).mean(0)


def _spread(values: Sequence[Tensor]) -> None:
    """Replace all by their mean."""
    mean = _mean(values)
    for value in values:
        value.copy_(mean)


def expected_of(
    cells: list[Cell],
    seed: int = 0,
    choices: list[list[list[Tensor]]] | None = None,
    wires: list[list[Wire]] | None = None,
    kept: list[list[list[Tensor]]] | None = None,
    noise: int = 0,
) -> Expected:
    """Trains ``STEPS`` steps with each of the cells in turn: the layouts of one run.

    ``choices``: the experts of its tokens, by layout, replica and forward; without them the oracle chooses.
    ``wires``: by layout; without them nothing is lost on the way. ``kept``: tokens, as ``choices``. ``noise``: as of
    ``Alone``.
    """
    alone, step = (Copies if cells[0].steps_alone else Alone)(cells[0], seed, noise), 0
    nothing: list[list[Any]] = [[]] * len(cells)
    layouts = zip(cells, choices or nothing, wires or nothing, kept or nothing, strict=True)
    for cell, chosen, sent, worked_on in layouts:
        alone.begin(Layout(cell, chosen, worked_on, sent), noise)
        for at in range(STEPS):
            alone.step(step, cell)
            step += 1
            if cell.generate and at == 0:
                alone.generate(cell)
        if cell.evaluate:
            alone.evaluate(cell)
    alone.finish()
    return alone.expected
