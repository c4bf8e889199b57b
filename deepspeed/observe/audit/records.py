"""Files of an audit: one JSON Lines file per rank, which a reader combines.

A rank records its own parts, without communication. Parts of a tensor that start at different elements add up
(``fingerprints.py``); parts that start at the same one are copies, which must be equal.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepspeed.base.exceptions import ExplainedError

GRADIENT, MASTER, WEIGHT = "gradients", "master", "weights"


class UnreadableRecord(ExplainedError, ValueError):
    """A folder does not hold the complete record of a run."""


def file_of(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank:05d}.jsonl"


class AuditFile:
    """One rank's file. ``write`` closes it after each line, so that a crashed process leaves its finished steps."""

    def __init__(self, folder: Path, rank: int, metadata: Mapping[str, Any]) -> None:
        self.path = file_of(folder, rank)
        self._mode = "w"
        self.write({"facts": dict(metadata)})

    def write(self, line: Mapping[str, Any]) -> None:
        with self.path.open(self._mode, encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._mode = "a"


@dataclass(frozen=True)
class FullTensor:
    """Fingerprint of a full tensor, combined from the parts on its ranks."""

    numel: int
    hash: int
    squares: float
    sketch: tuple[float, ...]
    copies: dict[int, str] = field(default_factory=dict)
    """Ranks whose copy of a part differs from the first one, with its hash."""

    @property
    def norm(self) -> float:
        return math.sqrt(self.squares) if self.squares >= 0 else math.nan


@dataclass(frozen=True)
class AuditedStep:
    """One recorded step of all ranks; ``number`` 0: the weights before the first recorded step."""

    number: int
    ranks: list[dict[str, Any]]
    """Recorded lines, by rank."""
    of_data: list[int]
    """Ranks with their own inputs: the first tensor-parallel rank of the first pipeline stage, in each replica."""

    def tensors(self, kind: str) -> dict[str, FullTensor]:
        parts: dict[str, list[tuple[int, list[Any]]]] = {}
        for rank, line in enumerate(self.ranks):
            for name, part in line.get(kind, {}).items():
                parts.setdefault(name, []).append((rank, part))
        return {name: _joined(found) for name, found in parts.items()}

    def scalar(self, key: str) -> Any:
        return self.ranks[0].get(key)

    def losses(self) -> list[float]:
        values = [self.ranks[rank].get("loss") for rank in self.of_data]
        return [value for value in values if value is not None]

    def arrangement(self) -> list[list[dict[str, str]]]:
        """Return the input fingerprints, by data rank and micro-batch."""
        return [self.ranks[rank].get("batches", []) for rank in self.of_data]

    def batch(self) -> dict[str, str]:
        """Return, by input, a fingerprint of all samples of the step, independent of their order."""
        totals: dict[str, int] = {}
        for batches in self.arrangement():
            for batch in batches:
                for name, value in batch.items():
                    totals[name] = (totals.get(name, 0) + int(value, 16)) % 2**64
        return {name: f"{value:016x}" for name, value in totals.items()}

    def disproved(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield (rank, proof) of each bucket whose reduced gradient was not the sum of the ranks' gradients."""
        for rank, line in enumerate(self.ranks):
            for found in line.get("proof", ()):
                if not found["equal"]:
                    yield rank, found


@dataclass(frozen=True)
class Run:
    folder: Path
    metadata: dict[str, Any]
    """Rank 0's description of the run, with the parameters of all ranks."""
    steps: dict[int, AuditedStep]


def read_run(folder: Path) -> Run:
    """Read the record in a folder. UnreadableRecord: there is none, or files are missing or malformed."""
    first = file_of(folder, 0)
    if not first.is_file():
        raise UnreadableRecord(
            f"{folder} has no {first.name}: pass the audit.record folder of a run with at least one step"
        )
    metadata = _lines(first)[0]["facts"]
    missing = [file_of(folder, r).name for r in range(metadata["ranks"]) if not file_of(folder, r).is_file()]
    if missing:
        raise UnreadableRecord(
            f"{folder} is the record of {metadata['ranks']} ranks, but {', '.join(missing[:4])} is missing: "
            "copy the files of all hosts into one folder"
        )
    files = [_lines(file_of(folder, rank)) for rank in range(metadata["ranks"])]
    for lines in files:
        metadata["parameters"] = metadata["parameters"] | lines[0]["facts"]["parameters"]
    of_data = [rank for rank, lines in enumerate(files) if lines[0]["facts"]["data"]]
    by_step = [{line["step"]: line for line in lines[1:]} for lines in files]
    common = set(by_step[0]).intersection(*by_step[1:])
    steps = {
        number: AuditedStep(number, [lines[number] for lines in by_step], of_data)
        for number in sorted(common)
    }
    return Run(folder, metadata, steps)


def _lines(path: Path) -> list[dict[str, Any]]:
    found = []
    for number, text in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines()):
        try:
            found.append(json.loads(text))
        except json.JSONDecodeError:
            if number == 0:
                raise UnreadableRecord(f"{path} is not an audit file") from None
            break  # the rank died while writing this line
    if not found or not isinstance(found[0], dict) or "facts" not in found[0]:
        raise UnreadableRecord(f"{path} is not an audit file")
    return found


def _joined(parts: Iterable[tuple[int, list[Any]]]) -> FullTensor:
    seen: dict[tuple[int, int], str] = {}
    copies: dict[int, str] = {}
    numel, hashed, squares, sketch = 0, 0, 0.0, [0.0] * 8
    for rank, (start, count, content, part_squares, part_sketch) in parts:
        known = seen.get((start, count))
        if known is not None:
            if known != content:
                copies[rank] = content
            continue
        seen[start, count] = content
        numel += count
        hashed = (hashed + int(content, 16)) % 2**64
        squares += part_squares
        sketch = [a + b for a, b in zip(sketch, part_sketch, strict=True)]
    return FullTensor(numel, hashed, squares, tuple(sketch), copies)
