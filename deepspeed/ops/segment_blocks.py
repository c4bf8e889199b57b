"""Block tables of a device launch, in which each program updates one block of one tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed.ops.multi_tensor import Launch


class _Uploaded(NamedTuple):
    segments: Tensor
    blocks: dict[tuple[int, ...], Tensor]  # by participating segments


class Round(NamedTuple):
    """One run of the kernel, over the tensors with the same step count."""

    steps: int
    segments: Tensor
    """[n, words] int64 on the device: the rows of all segments."""
    blocks: Tensor
    """[programs, 2] int64 on the device: segment, first element."""


def rounds(launch: Launch, steps: Sequence[int], elements: int, numel_column: int) -> Iterator[Round]:
    """Yield the rounds of ``launch``: all non-empty segments, in blocks of ``elements``; ``steps[i]`` is the step count
    of segment i. ``numel_column``: column of the number of elements in a segment's row. There is usually one
    round: step counts differ only if some tensors had no gradient for a while."""
    row_words = len(launch.words) // len(launch.indices)
    if launch.uploaded is None:
        words = torch.frombuffer(launch.words, dtype=torch.int64).view(-1, row_words)
        launch.uploaded = _Uploaded(words.to(launch.device, copy=True), {})
    uploaded: _Uploaded = launch.uploaded
    numels = launch.words[numel_column::row_words]
    by_step = sorted(range(len(steps)), key=steps.__getitem__)
    for count, members in groupby(by_step, key=steps.__getitem__):
        taking_part = tuple(members)
        if taking_part not in uploaded.blocks:
            rows = [(i, first) for i in sorted(taking_part) for first in range(0, numels[i], elements)]
            table = torch.tensor(rows, dtype=torch.int64).view(-1, 2)
            uploaded.blocks[taking_part] = table.to(launch.device)
        if len(uploaded.blocks[taking_part]):
            yield Round(count, uploaded.segments, uploaded.blocks[taking_part])
