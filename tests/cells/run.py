"""Runs cells on the pool of ranks and says how each ended."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import logging
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests import pool
from tests.cells import models, worker
from tests.cells.cell import FAMILIES, STEPS, Cell, config_of, why_not
from tests.cells.copies import copy_of, expected_of
from tests.cells.oracle import (
    NOISED,
    Expected,
    Tolerance,
    tolerance,
    wants_local_gradients,
    widest,
)
from tests.cells.routing import by_replica, kept_by_replica, nearly_tied
from tests.cells.wires import has_formula
from tests.cells.worker import Seen

TIMEOUT_S = 90.0
COMPILING = {"no": 1, "eager": 3, "aot_eager": 3, "inductor": 6}
"""Times as long, where each rank compiles."""
WITHIN_NOISE = "no further than other roundings move the oracle"
OUTCOMES = ("equal", "refused", "late refusal", "wrong", "crash", "hang")
"""The last four are faults. A refusal is late if the config alone decides it, and ``check_config`` was silent."""


@dataclass
class Result:
    """``what``: the first difference, the error, or the last lines of a traceback."""

    cell: Cell
    outcome: str
    what: str = ""
    seconds: float = 0.0
    details: str = field(default="", repr=False)

    @property
    def is_fault(self) -> bool:
        return self.outcome not in ("equal", "refused")

    def line(self, **more: Any) -> dict[str, Any]:
        """For a file of JSON lines."""
        return {
            "cell": str(self.cell),
            "outcome": self.outcome,
            "what": self.what,
            "seconds": round(self.seconds, 2),
            **more,
        }


def layouts(cell: Cell) -> list[Cell]:
    """The layouts of one run: the cell, and where it is resumed those after it."""
    if cell.resume == "2x2, 1":
        return [cell, _usable(cell, axes="tp"), _usable(cell, ranks=1)]
    other: dict[str, dict[str, Any]] = {
        "same": {},
        "stage": {"stage": (cell.stage + 2) % 4},
        "ranks": {"ranks": {1: 2, 2: 1, 4: 2}[cell.ranks]},
        "dp": {"axes": "dp"},
    }
    if cell.resume == "no":
        return [cell]
    second = dataclasses.replace(cell, resume="same", **other[cell.resume])
    if cell.resume == "stage":
        stages = [each for each in ((cell.stage + 2) % 4, 3, 2, 1) if each < 3 or not cell.keeps_gradients]
        fitting = [each for each in stages if not why_not(dataclasses.replace(second, stage=each))]
        second = dataclasses.replace(second, stage=(fitting or stages)[0])
    return [cell, _usable(second)]


def _usable(cell: Cell, **changes: Any) -> Cell:
    """The cell resumed with changes; what the other layout has no use for is dropped. Model and data are the same."""
    second = dataclasses.replace(cell, **({"resume": "same"} if changes else {}), **changes)
    for name in ("tier", "shards", "wire", "recompute"):
        if name in why_not(second) or (why_not(second) and getattr(cell, name) != getattr(Cell(), name)):
            second = dataclasses.replace(second, **{name: getattr(Cell(), name)})
    if (
        second.keeps_gradients and second.shards != "mics" and second.stage
    ):  # one copy, which none exchanges with
        second = dataclasses.replace(second, stage=0, tier="device", wire=Cell().wire)
    return second


def run_cell(cell: Cell, seed: int = 0, timeout: float = TIMEOUT_S) -> Result:
    """Run the cell. Returns its outcome; only KeyboardInterrupt is raised."""
    began = time.perf_counter()
    timeout *= COMPILING[cell.compile]
    with tempfile.TemporaryDirectory(prefix="cell_") as folder:
        outcome, what, details = _ended(cell, seed, folder, timeout)
    return Result(cell, outcome, what, time.perf_counter() - began, details)


def _ended(cell: Cell, seed: int, folder: str, timeout: float) -> tuple[str, str, str]:
    runs = layouts(cell)
    for each in runs:
        if refusal := refused_early(each):
            return "refused", refusal, ""
    phases: list[list[Seen]] = []
    for number, each in enumerate(runs):
        try:
            seen = _on_ranks(each, folder, number * STEPS, seed, timeout)
        except pool.RankError as error:
            text = str(error)
            if refusal := _refusal(text):
                return ("late refusal" if decided_by_config(refusal) else "refused"), refusal, ""
            return ("hang" if "timeout: still running" in text else "crash"), last_line(text), text
        phases.append(seen)
    try:
        chosen = [
            by_replica(each, [rank.choices for rank in seen]) for each, seen in zip(runs, phases, strict=True)
        ]
        wires = [seen[0].wires for seen in phases]
        kept = [
            kept_by_replica(each, [rank.kept for rank in seen])
            for each, seen in zip(runs, phases, strict=True)
        ]
        expected = expected_of(runs, seed, chosen, wires, kept)
        found = compare(cell, runs, phases, expected, folder)
        if found[0] == "equal":
            return found
        # Not within the limits of all such cells: of this one, what other roundings change?
        outcome, what, details = found
        for noise in range(1, NOISED + 1):
            expected.noised.append(expected_of(runs, seed, chosen, wires, kept, noise))
            outcome, what, details = compare(cell, runs, phases, expected, folder)
            if outcome == "equal":
                break
        return outcome, what or f"{WITHIN_NOISE}: {found[1]}", details
    except Exception as error:
        return "crash", f"oracle or export: {type(error).__name__}: {error}", ""


def _on_ranks(cell: Cell, folder: str, first_step: int, seed: int, timeout: float) -> list[Seen]:
    with contextlib.redirect_stdout(io.StringIO()):
        return pool.run(
            worker.train,
            cell.ranks,
            timeout=timeout,
            line=dataclasses.asdict(cell),
            folder=folder,
            first_step=first_step,
            load=first_step > 0,
            seed=seed,
        )


def refused_early(cell: Cell) -> str:
    """Return the errors of ``ds_check`` about the config; empty: none."""
    import deepspeed

    logging.disable(logging.WARNING)
    try:
        report = deepspeed.check_config(config_of(cell), world_size=cell.ranks)
    finally:
        logging.disable(logging.NOTSET)
    return "; ".join(str(problem) for problem in report.errors)


BUFFERS = ("master_layout", "_mask")
"""Of layers that the oracle has otherwise: a layout, and what pruning keeps."""
MODEL_DECIDES = ("TransformRefusedError", "torch.optim.AdamW", "Scripts", "layer", "module", "parameter")
"""Words of refusals that depend on more than the config: on the model, or on an optimizer that a script passes."""


def _refusal(text: str) -> str:
    found = re.search(r"worker\.Refused: (.*)", text)
    return found.group(1).strip() if found else ""


def decided_by_config(refusal: str) -> bool:
    return not any(word in refusal for word in MODEL_DECIDES)


def last_line(text: str) -> str:
    """The error of a rank's traceback."""
    for line in text.splitlines():
        stripped = line.partition("] ")[2]
        if stripped and not stripped.startswith((" ", "Traceback", "--", "During", "The above")):
            return stripped[:300]
    return text[-300:]


# ----------------------------------------------------------------------------------------------- comparing


def compare(
    cell: Cell, runs: list[Cell], phases: list[list[Seen]], expected: Expected, folder: str
) -> tuple[str, str, str]:
    """The outcome ``equal``, or ``wrong`` with the first difference."""
    allowed = widest([tolerance(each) for each in runs])
    if expected.doubt > max(nearly_tied(cell, len(runs)), expected.undecided()):
        return "wrong", f"a token's expert is e^{expected.doubt:.2g} times less probable than another", ""
    for found in (
        *_losses(runs, phases, expected),
        *_weights(cell, runs[-1], phases[-1], expected, allowed),
        *_export(cell, folder, expected, allowed),
    ):
        return "wrong", found, ""
    return "equal", "", ""


def _losses(runs: list[Cell], phases: list[list[Seen]], expected: Expected) -> Iterator[str]:
    for phase, (cell, seen) in enumerate(zip(runs, phases, strict=True)):
        allowed = widest([tolerance(each) for each in runs[: phase + 1]])
        evaluation = sum(each.evaluate for each in runs[:phase])
        for rank, each in enumerate(seen):
            for at in range(STEPS):
                step = phase * STEPS + at
                micros = 1 if cell.axis("pp") > 1 else len(expected.losses[step][each.replica])
                for micro, ours in zip(range(micros), each.losses[at], strict=True):
                    read = functools.partial(_loss, cell, each.replica, step, micro)
                    if far := _off(ours, read, expected, allowed.loss, floor=0.1):
                        yield f"loss of step {step}, micro-batch {micro}, rank {rank}: {far}"
                # the oracle has no gradient of one rank's part of a sequence, of the tokens that experts divide, or
                # of one stage's use of a tied weight
                divided = (
                    cell.axis("sp") > 1
                    or (cell.model == "moe" and cell.axis("tp") > 1)
                    or ("tied" in cell.parameters and cell.axis("pp") > 1)
                )
                known = not (divided and wants_local_gradients(cell, step))
                if known and (
                    far := _off(each.norms[at], lambda it, at=step: it.norms[at], expected, allowed.norm)
                ):
                    yield f"norm of step {step}, rank {rank}: {far}"
            for at, ours in enumerate(each.generated):
                read = functools.partial(_generated, phase, each.replica, at)
                if far := _off(ours, read, expected, 5 * allowed.loss, floor=0.1):
                    yield f"generation, rank {rank}: {far}"
            for ours in each.evaluations:
                read = functools.partial(_evaluation, cell, each.replica, evaluation)
                if far := _off(ours, read, expected, allowed.loss, floor=0.1):
                    yield f"evaluation, rank {rank}: {far}"


def _loss(cell: Cell, replica: int, step: int, micro: int, expected: Expected) -> float:
    """A pipeline's is the mean of all."""
    wanted = expected.losses[step]
    if cell.axis("pp") == 1:
        return wanted[replica][micro]
    every = [loss for each in wanted for loss in each]
    return sum(every) / len(every)


def _generated(phase: int, replica: int, at: int, expected: Expected) -> float:
    return expected.generated[phase][replica][at]


def _evaluation(cell: Cell, replica: int, number: int, expected: Expected) -> float:
    wanted = expected.evaluations[number]
    return sum(wanted) / len(wanted) if cell.axis("pp") > 1 else wanted[replica]


def _off(
    ours: float, read: Callable[[Expected], float], expected: Expected, share: float, floor: float = 0.0
) -> str:
    theirs = read(expected)
    near = abs(ours - theirs) <= max(share * max(abs(theirs), floor), expected.spread(read))
    return "" if near else f"{ours:.7g}, not {theirs:.7g}"


def _far(ours: torch.Tensor, name: str, expected: Expected, allowed: Tolerance, cell: Cell) -> str:
    wanted = expected.weights[name]
    if ours.shape != wanted.shape:
        return f"has shape {tuple(ours.shape)}, not {tuple(wanted.shape)}"
    difference = float(_common(cell, expected.decided(name, ours.float() - wanted)).norm())
    moved = expected.moved(name, like_others=cell.wire in ("qgz", "int8"))
    share = max(allowed.moved, noise_of_keys(cell, name))
    of_way = max(share * moved, expected.spread(lambda each: each.weights[name]))
    if not difference <= of_way + allowed.rounding * float(wanted.norm()) + 1e-7:
        return f"is {difference:.2e} away, of {moved:.2e} moved"
    return ""


def _common(cell: Cell, difference: torch.Tensor) -> torch.Tensor:
    """``difference`` without its furthest sixteenth, where codes of an unknown layout meet frozen variances: of an
    element whose gradients they rounded to nothing before, the optimizer divides later ones by nearly zero."""
    if not cell.sends_signs or cell.wire not in ("qgz", "int8") or has_formula(cell):
        return difference
    return difference.flatten().abs().sort().values[: max(1, difference.numel() * 15 // 16)]


UNROTATED = ("bert", "roberta", "electra", "distilbert", "vit", "bart", "opt")


def noise_of_keys(cell: Cell, name: str) -> float:
    """The share of its way by which rounding to 16 bits turns a bias of keys. It changes all of a token's scores alike,
    so its gradient is what rounding leaves of zero, and Adam enlarges that; where positions rotate keys, most of it is.
    (Persimmon's is 44 % off in bf16, and equal to seven digits in fp32, which shows whether it is right.)"""
    of_keys = name.endswith(("k_proj.bias", "k_layernorm.bias", "key.bias", "k_lin.bias"))
    if not of_keys or cell.precision == "fp32":
        return 0.0
    return 1.0 if cell.model in UNROTATED else 0.6


def _weights(
    cell: Cell, last: Cell, seen: list[Seen], expected: Expected, allowed: Tolerance
) -> Iterator[str]:
    """``last``: the cell in its last layout."""
    rounding = {"bf16": 2**-8, "bf16 masters": 2**-6, "fp16": 2**-10}.get(cell.precision, allowed.rounding)
    if cell.wire == "qwz" and not has_formula(cell):  # weights that do not move travel in 8 bits as well
        rounding = max(rounding, 2**-6)
    live = dataclasses.replace(allowed, rounding=max(rounding, allowed.rounding))
    for rank, each in enumerate(seen):
        copy = expected.of_copy(copy_of(last, each.replica))
        for name, ours in each.weights.items():
            if far := _far(ours, renamed(cell, name), copy, live, cell):
                yield f"{name} on rank {rank} {far}"


def _export(cell: Cell, folder: str, expected: Expected, allowed: Tolerance) -> Any:
    from deepspeed.tools.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = get_fp32_state_dict_from_zero_checkpoint(str(Path(folder, "saved")))
    found = {renamed(cell, models.names(name)): value for name, value in whole.items()}
    if missing := expected.weights.keys() - found.keys():
        yield f"the export lacks {sorted(missing)[0]}"
    for name, ours in found.items():
        if name not in expected.weights:
            if "tied" in cell.parameters or cell.model in FAMILIES or name.endswith(BUFFERS):
                continue
            yield f"the export has {name}, which the model has not"
        elif far := _far(ours, name, expected, allowed, cell):
            yield f"{name} of the export {far}"


def renamed(cell: Cell, name: str) -> str:
    """The head of a tied pipeline has its own norm."""
    return name
