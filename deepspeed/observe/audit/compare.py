"""Differences between two recorded runs, in the order in which a step computes them.

If both runs do the same arithmetic, every bit is compared. Otherwise (another world size, another precision) numbers
are compared within a tolerance:

- losses and norms by relative error; gradients relative to the larger of their own norm and a thousandth of the global
  norm, since gradients that are zero up to rounding differ arbitrarily;
- weights relative to their norm, or to a share of their distance from the start: an optimizer such as Adam turns
  rounding in small gradients into full-size steps. For the same reason, weights whose gradient is only rounding are
  skipped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from deepspeed.observe.audit.records import GRADIENT, MASTER, WEIGHT, AuditedStep, FullTensor, Run

BATCH, LOSS, SCALE, NORM, RATE = "batch", "loss", "loss scale", "gradient norm", "learning rate"
PHASES = {
    GRADIENT: "backward: summed gradient",
    MASTER: "update: master weight",
    WEIGHT: "weight for the next forward",
}
WITHOUT_WIDTH = 1e-4
"""Tolerance between fp32 runs with different summation orders."""
OF_16_BITS = 5e-2
OF_QUANTIZED_PAYLOADS = 0.25
QUIET = 1e-3
"""A gradient whose norm is below 10 times this share of the global norm, times the tolerance, counts as rounding."""


@dataclass(frozen=True)
class Difference:
    step: int
    phase: str
    tensor: str
    """Name of the parameter or the input; empty for numbers such as the loss."""
    module: str
    """Class and path of the module that owns the parameter."""
    relative: float
    text: str

    def __str__(self) -> str:
        what = f" of {self.tensor}" if self.tensor else ""
        where = f" in {self.module}" if self.module else ""
        return f"{step_name(self.step)}, {self.phase}{what}{where}: {self.text}"


def step_name(step: int) -> str:
    return f"step {step}" if step else "before the first recorded step"


@dataclass
class Comparison:
    """Result of a comparison. ``tolerance`` 0: every bit was compared. ``reasons``: numeric settings that differ.
    ``causes``: differing inputs (seeds, samples by rank). ``remarks``: problems recorded in the runs themselves."""

    steps: list[int]
    tolerance: float
    reasons: list[str]
    differences: list[Difference] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def first(self) -> Difference | None:
        return self.differences[0] if self.differences else None

    @property
    def first_tensor(self) -> Difference | None:
        """The first difference in a parameter tensor."""
        return next((each for each in self.differences if each.phase in PHASES.values()), None)


def compare(a: Run, b: Run, tolerance: float | None = None) -> Comparison:
    """Compare two runs. ``tolerance``: relative; 0: every bit; None: chosen. ValueError: no step is recorded in
    both."""
    steps = sorted(a.steps.keys() & b.steps.keys())
    if not any(steps):
        recorded = [", ".join(str(step) for step in run.steps if step) or "none" for run in (a, b)]
        raise ValueError(
            f"no step is recorded in both runs ({recorded[0]} and {recorded[1]}): give both the same audit.first_step "
            "and audit.stride"
        )
    reasons = other_numerics(a, b)
    if tolerance is None:
        tolerance = chosen_tolerance(a, b) if reasons else 0.0
    found = Comparison(steps, tolerance, reasons)
    found.causes += _other_causes(a, b, steps)
    found.remarks += [text for name, run in (("A", a), ("B", b)) for text in _remarks(name, run, steps)]
    found.differences += _other_parameters(a, b, steps[0])
    comparer = _Comparer(a, b, tolerance)
    for number in steps:
        found.differences += comparer.step(number)
    return found


def other_numerics(a: Run, b: Run) -> list[str]:
    """Return the numeric settings that differ, so that equal bits cannot be expected."""
    left, right = a.metadata["numerics"], b.metadata["numerics"]
    return [
        f"{key} {_short(left.get(key))} and {_short(right.get(key))}"
        for key in left | right
        if left.get(key) != right.get(key)
    ]


def chosen_tolerance(a: Run, b: Run) -> float:
    every = [run.metadata["numerics"] for run in (a, b)]
    if any(any(each["bits of packed gradients and weights"]) for each in every):
        return OF_QUANTIZED_PAYLOADS
    narrow = any(
        "16" in dtype or "amp" in dtype for each in every for dtype in (*each["dtypes"], each["precision"])
    )
    return OF_16_BITS if narrow else WITHOUT_WIDTH


class _Comparer:
    def __init__(self, a: Run, b: Run, tolerance: float) -> None:
        self.a, self.b, self.tolerance = a, b, tolerance
        first = min(a.steps.keys() & b.steps.keys())
        self.start = {kind: a.steps[first].tensors(kind) for kind in (MASTER, WEIGHT)}
        self.quiet: set[str] = set()

    def step(self, number: int) -> Iterator[Difference]:
        a, b = self.a.steps[number], self.b.steps[number]
        if number:
            yield from self._batch(a, b)
            yield from self._number(number, LOSS, *self._losses(a, b))
            yield from self._number(number, SCALE, a.scalar("loss_scale"), b.scalar("loss_scale"))
            yield from self._tensors(a, b, GRADIENT)
            yield from self._number(number, NORM, a.scalar("norm"), b.scalar("norm"))
            yield from self._number(number, RATE, a.scalar("lr"), b.scalar("lr"))
        yield from self._tensors(a, b, MASTER)
        yield from self._tensors(a, b, WEIGHT)

    def _batch(self, a: AuditedStep, b: AuditedStep) -> Iterator[Difference]:
        left, right = a.batch(), b.batch()
        if not left or not right:
            return
        names = [name for name in left | right if name and left.get(name) != right.get(name)]
        if names:
            yield Difference(a.number, BATCH, ", ".join(names), "", math.nan, _which_batches(a, b))
        elif left != right and not self.tolerance:
            yield Difference(a.number, BATCH, "", "", math.nan, "the same samples, batched differently")

    def _losses(self, a: AuditedStep, b: AuditedStep) -> tuple[Any, Any]:
        left, right = a.losses(), b.losses()
        if self.tolerance or len(left) != len(right):
            return _mean(left), _mean(right)
        return left, right

    def _number(self, step: int, phase: str, left: Any, right: Any) -> Iterator[Difference]:
        every = [value if isinstance(value, list) else [value] for value in (left, right)]
        if None in every[0] or None in every[1] or len(every[0]) != len(every[1]):
            return
        for place, (x, y) in enumerate(zip(*every, strict=True)):
            if x == y or (math.isnan(x) and math.isnan(y)):
                continue
            relative = abs(y - x) / max(abs(x), abs(y)) if math.isfinite(x) and math.isfinite(y) else math.inf
            if relative > self.tolerance:
                where = (
                    f" on rank {self.a.steps[step].of_data[place]}"
                    if phase == LOSS and len(every[0]) > 1
                    else ""
                )
                yield Difference(step, phase, "", "", relative, f"{x:.9g} in A, {y:.9g} in B{where}")
                return

    def _tensors(self, a: AuditedStep, b: AuditedStep, kind: str) -> Iterator[Difference]:
        left, right = a.tensors(kind), b.tensors(kind)
        if not left or not right:
            return
        everything = math.sqrt(sum(each.squares for each in left.values() if math.isfinite(each.squares)))
        if kind == GRADIENT and self.tolerance:
            limit = 10 * self.tolerance * QUIET * everything
            self.quiet |= {name for name, each in left.items() if each.norm <= limit}
        order = [name for name in left if name in right]
        for name in reversed(order) if kind == GRADIENT else order:  # in the order of backward
            x, y = left[name], right[name]
            text = self._text(kind, name, x, y, everything)
            if text:
                module = _module(self.a, name)
                yield Difference(a.number, PHASES[kind], name, module, _relative(x, y), text)
            yield from self._copies(a.number, kind, name, x, y)

    def _copies(self, step: int, kind: str, name: str, x: FullTensor, y: FullTensor) -> Iterator[Difference]:
        for run, whole in (("A", x), ("B", y)):
            if whole.copies:
                ranks = ", ".join(map(str, whole.copies))
                text = f"in {run}, rank {ranks} differs from the ranks before it"
                yield Difference(step, PHASES[kind], name, _module(self.a, name), math.nan, text)

    def _text(self, kind: str, name: str, x: FullTensor, y: FullTensor, everything: float) -> str:
        if x.numel != y.numel:
            return f"{x.numel} elements in A, {y.numel} in B"
        if x.hash == y.hash or (self.tolerance and self._near(kind, name, x, y, everything)):
            return ""
        return how_far(x, y)

    def _near(self, kind: str, name: str, x: FullTensor, y: FullTensor, everything: float) -> bool:
        far = distance(x, y)
        if math.isnan(far):
            return math.isnan(x.squares) and math.isnan(y.squares)
        if kind == GRADIENT:
            return far <= self.tolerance * max(x.norm, QUIET * everything)
        if name in self.quiet:
            return True
        start = self.start[kind].get(name)
        moved = distance(start, x) if start is not None else 0.0
        return far <= max(self.tolerance * x.norm, min(0.5, 500 * self.tolerance) * moved)


def distance(x: FullTensor, y: FullTensor) -> float:
    """Estimate the Euclidean distance of two tensors from their sketches."""
    return math.sqrt(sum((q - p) ** 2 for p, q in zip(x.sketch, y.sketch, strict=True)) / len(x.sketch))


def how_far(x: FullTensor, y: FullTensor) -> str:
    """Describe the size and the kind of the difference between ``x`` (run A) and ``y`` (run B)."""
    if not (math.isfinite(x.squares) and math.isfinite(y.squares)):
        names = [run for run, whole in (("A", x), ("B", y)) if not math.isfinite(whole.squares)]
        return f"not finite in {' and '.join(names)}"
    if not x.squares or not y.squares:
        return f"zero in {'A' if not x.squares else 'B'}, norm {max(x.norm, y.norm):.4g} in the other"
    far = distance(x, y)
    text = f"relative {far / x.norm:.2g}"
    steps = [abs(q - p) for p, q in zip(x.sketch, y.sketch, strict=True)]
    noise = 1e-15 * x.norm * math.sqrt(x.numel) + 1e-6 * max(steps)
    if max(steps) <= 2 * noise:
        return f"{text}: in the last bits or in the order of elements"
    if max(steps) - min(steps) <= noise:
        return f"{text}: like a single element that differs by {far:.3g}"
    factor = sum(p * q for p, q in zip(x.sketch, y.sketch, strict=True)) / sum(p * p for p in x.sketch)
    rest = math.sqrt(
        sum((q - factor * p) ** 2 for p, q in zip(x.sketch, y.sketch, strict=True)) / len(x.sketch)
    )
    if abs(factor - 1) > 1e-3 and rest <= 1e-4 * far:
        return f"{text}: B is {factor:.5g} times A"
    return f"{text}: norm {x.norm:.6g} in A, {y.norm:.6g} in B"


def _relative(x: FullTensor, y: FullTensor) -> float:
    return distance(x, y) / x.norm if x.squares and x.numel == y.numel else math.inf


def _module(run: Run, name: str) -> str:
    path = name.partition(" ")[0].rpartition(".")[0]
    kind = run.metadata["parameters"].get(name, {}).get("module", "")
    return f"{kind} {path}".strip()


def _which_batches(a: AuditedStep, b: AuditedStep) -> str:
    """Name the ranks and micro-batches whose inputs differ, if both runs have the same number of each."""
    left, right = a.arrangement(), b.arrangement()
    if [len(each) for each in left] != [len(each) for each in right]:
        return "other samples"
    places = [
        f"rank {a.of_data[place]}" + (f" micro-batch {micro + 1}" if len(one) > 1 else "")
        for place, (one, other) in enumerate(zip(left, right, strict=True))
        for micro, (x, y) in enumerate(zip(one, other, strict=True))
        if x != y
    ]
    return f"different samples on {', '.join(places[:4])}" + (", ..." if len(places) > 4 else "")


def _other_causes(a: Run, b: Run, steps: list[int]) -> Iterator[str]:
    for number in filter(None, steps):
        left, right = a.steps[number], b.steps[number]
        pairs = list(zip(left.ranks, right.ranks, strict=False))
        seeds = [(r, x["seed"], y["seed"]) for r, (x, y) in enumerate(pairs) if x["seed"] != y["seed"]]
        if seeds:
            rank, x, y = seeds[0]
            yield f"step {number}: the seed of rank {rank} is {x} in A and {y} in B"
            return
        if len(left.ranks) == len(right.ranks):
            if any(x["random"] != y["random"] for x, y in pairs):
                yield (f"step {number}: random numbers start from different states despite equal seeds")
                return
            if left.batch() == right.batch() and left.arrangement() != right.arrangement():
                yield f"step {number}: the samples are the same, but on other ranks or in other micro-batches"
                return


def _remarks(name: str, run: Run, steps: list[int]) -> Iterator[str]:
    for number in filter(None, steps):
        for rank, found in run.steps[number].disproved():
            yield (
                f"{name}, step {number}, rank {rank}: the sum of gradient bucket {found['bucket']} does not "
                f"match the gradients of the ranks ({', '.join(found['parameters'][:4])})"
            )
        if not run.steps[number].scalar("applied"):
            yield f"{name}, step {number}: the update was skipped (a gradient was not finite)"


def _other_parameters(a: Run, b: Run, step: int) -> Iterator[Difference]:
    known: list[dict[str, Any]] = [run.metadata["parameters"] for run in (a, b)]
    for name in known[0] | known[1]:
        missing = [run for run, names in zip("AB", known, strict=True) if name not in names]
        if missing:
            run = b if missing == ["A"] else a
            yield Difference(
                step, PHASES[WEIGHT], name, _module(run, name), math.inf, f"not trained in {missing[0]}"
            )


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _short(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text.replace("torch.", "")
