"""Fingerprints of tensors, independent of how a tensor is sharded over ranks or buckets.

Each is a sum over elements of a function of an element's value and its index in the global tensor. The fingerprints of
the parts therefore add up to the tensor's, without a gather:

- *hash*: sum of bits(x_i) * r_i modulo 2^64 with fixed odd numbers r_i. A single changed bit always changes it, since
  an odd factor loses none; two different tensors collide about once in 2^32 (multilinear hashing, Carter and Wegman
  1979). -0 counts as 0.
- *sketch*: s_j = sum of sign_j(i) * x_i in fp64 with fixed pseudo-random signs. For two tensors, the mean of
  (s_j(x) - s_j(y))^2 estimates |x - y|^2 (Alon, Matias and Szegedy 1996): the distance of two runs, from separately
  recorded numbers.
- *squares*: sum of x_i^2.

Narrower dtypes are converted to fp32 first, so that 16-bit and fp32 runs have a common scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

SKETCHES = 8
"""Signed sums per tensor; with 8, the distance of two tensors is known to about 25%."""

_RUN = 1 << 16
"""Elements per table of signs and factors; each repetition uses different signs and a different factor."""
_MASK = (1 << 64) - 1


class Fingerprints:
    """Computes fingerprints on one device, and holds the tables for it."""

    def __init__(self, device: torch.device) -> None:
        mixed = _mixed(torch.arange(_RUN, dtype=torch.int64) + 1)
        bits = torch.stack([(mixed >> j) & 1 for j in range(8, 8 + SKETCHES)], dim=1)
        self.signs = (bits * 2 - 1).to(torch.float64).to(device)
        self.factors = (_mixed(mixed) | 1).to(device)
        self.device = device

    def part(self, flat: Tensor, start: int = 0) -> Tensor:
        """Return the fingerprint of a tensor's elements from index ``start`` on, [2 + SKETCHES] fp64: squares, the hash
        in the bits of the second number, signed sums."""
        total = torch.zeros(1 + SKETCHES, dtype=torch.float64, device=self.device)
        hashed = torch.zeros((), dtype=torch.int64, device=self.device)
        for run, place, values in _runs(flat.detach().reshape(-1), start):
            values = _comparable(values).to(self.device)
            wide = values.double()
            factor, signs = _of_run(run)
            hashed += (_bits(values) * self.factors[place]).sum() * factor
            total[0] += wide @ wide
            total[1:] += (wide @ self.signs[place]) * signs.to(self.device)
        return torch.cat([total[:1], hashed.view(1).view(torch.float64), total[1:]])

    def samples(self, rows: Tensor) -> Tensor:
        """Return a hash of each row (first dim) of an input, [samples] int64."""
        flat = rows.detach().reshape(rows.shape[0], -1) if rows.dim() else rows.detach().reshape(1, 1)
        hashed = torch.zeros(flat.shape[0], dtype=torch.int64, device=self.device)
        for low in range(0, flat.shape[1], _RUN):
            values = _comparable(flat[:, low : low + _RUN]).to(self.device)
            hashed += (_bits(values) * self.factors[: values.shape[1]]).sum(1) * _of_run(low // _RUN)[0]
        return _mixed(hashed + flat.shape[1])


def entry(start: int, numel: int, part: Tensor) -> list[Any]:
    """Return the JSON record of a part: [start, elements, hash, squares, [signed sums]]."""
    bits = int(part[1:2].view(torch.int64).item()) & _MASK
    squares, _, *sketch = part.tolist()
    return [start, numel, f"{bits:016x}", squares, sketch]


def batch_entry(fingerprints: Fingerprints, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the fingerprints of one forward's inputs: by name the sum of its samples' hashes, and under "" the sum of
    hashes over all inputs of a sample together. They are sums since another world size batches samples differently."""
    found: dict[str, str] = {}
    together: dict[int, Tensor] = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        rows = fingerprints.samples(tensor)
        found[name] = _hexadecimal(rows.sum())
        joint = together.get(len(rows))
        together[len(rows)] = rows if joint is None else joint + rows * (2 * number + 1)
    found[""] = _hexadecimal(sum((_mixed(rows).sum() for rows in together.values()), torch.tensor(0)))
    return found


def _hexadecimal(number: Tensor) -> str:
    return f"{int(number.item()) & _MASK:016x}"


def _comparable(values: Tensor) -> Tensor:
    """Convert to fp32 (fp64 and integers unchanged), with -0 as 0."""
    if not values.is_floating_point():
        return values.view(torch.uint8) if values.dtype == torch.bool else values
    return (values if values.dtype == torch.float64 else values.float()) + 0.0


def _bits(values: Tensor) -> Tensor:
    if values.dtype == torch.float64:
        return values.view(torch.int64)
    if values.dtype == torch.float32:
        return values.contiguous().view(torch.int32).to(torch.int64)
    return values.to(torch.int64)


def _runs(flat: Tensor, start: int) -> Iterator[tuple[int, slice, Tensor]]:
    """Yield (index of the repetition, slice of the tables, values)."""
    position, stop = start, start + flat.numel()
    while position < stop:
        run, low = divmod(position, _RUN)
        taken = min(stop - position, _RUN - low)
        yield run, slice(low, low + taken), flat[position - start : position - start + taken]
        position += taken


def _of_run(run: int) -> tuple[int, Tensor]:
    """Return the factor of a repetition (odd, as a signed int64), and its signs."""
    mixed = _mixed(torch.tensor(-(run + 1), dtype=torch.int64))
    signs = torch.tensor([((int(mixed) >> j) & 1) * 2 - 1 for j in range(8, 8 + SKETCHES)])
    return int(mixed) | 1, signs.to(torch.float64)


def _mixed(numbers: Tensor) -> Tensor:
    """Mix int64 numbers so that every bit of the result depends on every input bit (the finalizer of splitmix64, Steele
    et al. 2014)."""
    numbers = numbers + -7046029254386353131
    numbers = (numbers ^ ((numbers >> 30) & ((1 << 34) - 1))) * -4658895280553007687
    numbers = (numbers ^ ((numbers >> 27) & ((1 << 37) - 1))) * -7723592293110705685
    return numbers ^ ((numbers >> 31) & ((1 << 33) - 1))
