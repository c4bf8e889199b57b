"""Text and JSON form of a memory plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deepspeed.base.tables import counted
from deepspeed.planning.advice import Advice, hidden_updates
from deepspeed.planning.ledger import ESTIMATED, MemoryKind, MemoryPhase, MemoryPlace
from deepspeed.planning.request import PlanAnswer

_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))

_PHASES = {
    MemoryPhase.BUILD: ("build", "the model is built"),
    MemoryPhase.INITIALIZE: ("initialize", "initialize works"),
    MemoryPhase.READY: ("ready", "nothing runs"),
    MemoryPhase.FORWARD: ("forward", "forward runs"),
    MemoryPhase.BACKWARD: ("backward", "backward runs"),
    MemoryPhase.FIRST_UPDATE: ("1st update", "the first update runs"),
    MemoryPhase.STEP: ("update", "an update runs"),
}
"""Heading of a phase's column, and what happens in it."""


def size(nbytes: int) -> str:
    """Format a number of bytes: "1.50 GiB"."""
    for unit, name in _UNITS:
        if abs(nbytes) >= unit:
            value = nbytes / unit
            return f"{value:.2f} {name}" if value < 100 else f"{value:.0f} {name}"
    return f"{nbytes} B"


def headline(answer: PlanAnswer) -> str:
    model, request, config = answer.setting.model, answer.request, answer.config
    trained = sum(spec.numel for spec in model.specs[: model.trained])
    frozen = model.numel - trained
    nodes = f" on {request.nodes} nodes" if request.nodes > 1 else ""
    shared = request.split.tensor
    part = f", on each of {shared} ranks that share all layers" if shared > 1 else ""
    lines = [
        f"{type(request.module).__name__}: {trained:,} trained parameters"
        + (f", {frozen:,} frozen" if frozen else "")
        + part,
        f"{counted(request.all_ranks, 'rank')}{nodes}, ZeRO stage {answer.plan.zero.stage}, "
        f"{answer.plan.precision.name}, {answer.setting.optimizer.name}, "
        f"micro-batch {config.train_micro_batch_size_per_gpu} x {config.gradient_accumulation_steps}",
    ]
    return "\n".join(lines)


def table(answer: PlanAnswer) -> Iterator[str]:
    """Yield one block of lines per place: a row per kind, a column per phase."""
    for place in MemoryPlace:
        if answer.ledger.peak(place)[0]:
            yield from _block(answer, place)


def _block(answer: PlanAnswer, place: MemoryPlace) -> Iterator[str]:
    ledger = answer.ledger
    largest = ledger.peak(place)[0]
    unit, name = next(((u, n) for u, n in _UNITS if largest >= u), (1, "B"))
    rows: list[tuple[str, list[int]]] = []
    for kind in MemoryKind:
        values = [ledger.entries[phase, place, kind] for phase in MemoryPhase]
        if any(values):
            rows.append((kind.value + (" (estimated)" if kind in ESTIMATED else ""), values))
    rows.append(("total", [ledger.total(phase, place) for phase in MemoryPhase]))
    width = max(len(label) for label, _ in rows)
    title = f"{_place_name(answer, place)}, {name} per rank"
    yield f"{title:<{width + 2}}" + "".join(f"{_PHASES[phase][0]:>12}" for phase in MemoryPhase)
    for label, values in rows:
        cells = "".join(f"{value / unit:>12.3f}" if value else f"{'-':>12}" for value in values)
        yield f"  {label:<{width}}{cells}"


def _place_name(answer: PlanAnswer, place: MemoryPlace) -> str:
    return answer.request.device_type if place is MemoryPlace.DEVICE else place.value


def verdict(answer: PlanAnswer) -> Iterator[str]:
    """Yield a line per place that compares the need with the available memory."""
    for place in MemoryPlace:
        need, phase = answer.need(place)
        if not need:
            continue
        sharing = answer.request.neighbours(place)
        whose = f" ({counted(sharing, 'rank')} x {size(need // sharing)})" if sharing > 1 else ""
        have = answer.capacity.of(place)
        name = _place_name(answer, place)
        when = f"most while {_PHASES[phase][1]}"
        if have is None:
            yield f"{name}: {size(need)}{whose}, {when}; available amount unknown"
        elif need > have:
            yield f"{name}: DOES NOT FIT: {size(need)}{whose} needed, {when}; {size(have)} available"
        else:
            yield f"{name}: fits: {size(need)}{whose} of {size(have)}, {when}"


def advice_lines(advice: Advice) -> Iterator[str]:
    if advice.result is not None:
        yield (
            "cheapest change that makes it fit:"
            if len(advice.changes) == 1
            else "changes that make it fit together:"
        )
        yield from (f"  {text}" for text in advice.changes)
        peaks = [(place, advice.result.need(place)[0]) for place in MemoryPlace]
        yield "  then: " + ", ".join(f"{_place_name(advice.result, p)} {size(n)}" for p, n in peaks if n)
    elif advice.ranks is not None:
        with_changes = f" with {'; '.join(advice.changes)}" if advice.changes else ""
        yield f"no change of the config is enough; {advice.ranks} ranks on as many more nodes are{with_changes}"
    else:
        yield "no known change makes it fit: use a smaller model, or machines with more memory"


def waiting_lines(answer: PlanAnswer) -> Iterator[str]:
    """Yield the changes that would overlap the host's update with the device, and their additional memory."""
    changes = hidden_updates(answer)
    if changes:
        yield f"the {answer.request.device_type} idles while the host updates; to overlap the two:"
    for text, planned in changes:
        more = {place: planned.need(place)[0] - answer.need(place)[0] for place in MemoryPlace}
        costs = ", ".join(f"{_place_name(planned, p)} {size(n)} more" for p, n in more.items() if n > 0)
        lacking = planned.lacking() and not answer.lacking()
        yield f"  {text} ({costs or 'no more memory'}{'; DOES NOT FIT' if lacking else ''})"


def full_report(answer: PlanAnswer, advice: Advice | None) -> str:
    lines: list[str] = [headline(answer), "", *table(answer), "", *verdict(answer)]
    if advice is not None:
        lines += advice_lines(advice)
    lines += waiting_lines(answer)
    if answer.ledger.notes:
        lines += ["", *(f"note: {note}" for note in answer.ledger.notes)]
    return "\n".join(lines)


def as_json(answer: PlanAnswer, advice: Advice | None) -> dict[str, Any]:
    """Return the content of the report for JSON, with bytes as numbers."""
    ledger = answer.ledger
    return {
        "ranks": answer.request.all_ranks,
        "nodes": answer.request.nodes,
        "parameters": answer.setting.model.numel,
        "bytes_per_rank": {
            place.value: {
                _PHASES[phase][0]: {kind.value: nbytes for kind, nbytes in ledger.kinds(phase, place).items()}
                for phase in MemoryPhase
            }
            for place in MemoryPlace
        },
        "needed": {place.value: answer.need(place)[0] for place in MemoryPlace},
        "available": {place.value: answer.capacity.of(place) for place in MemoryPlace},
        "fits": not answer.lacking(),
        "changes": advice.changes if advice is not None else [],
        "estimated": [kind.value for kind in ESTIMATED],
        "notes": ledger.notes,
    }
