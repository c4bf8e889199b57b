"""The tokens of many sequences as one batch, with the numbers that kernels need of them."""

from __future__ import annotations

import torch
from torch import Tensor

from deepspeed.base.accelerator import get_accelerator
from deepspeed.inference.v2.inference_utils import ceil_div
from deepspeed.inference.v2.ragged.manager_configs import DSStateManagerConfig
from deepspeed.inference.v2.ragged.sequence_descriptor import BaseSequenceDescriptor
from deepspeed.inference.v2.scheduling_utils import SchedulingError, SchedulingResult

_MULTIPLE = 64


def to_padded(original_size: int) -> int:
    """The next multiple of 64: batches come in few sizes then."""
    return ceil_div(original_size, _MULTIPLE) * _MULTIPLE


class RaggedBatchWrapper:
    """Filled by ``insert_sequence`` after ``clear``; ``finalize`` brings it to the device, and then the other methods
    give it. Everything is int32 but the addresses of block numbers, which are int64.

    ``config``: its limits.
    """

    def __init__(self, config: DSStateManagerConfig) -> None:
        self._config = config
        self._device = get_accelerator().current_device_name()
        self.clear()

    def clear(self) -> None:
        """Begin a new batch."""
        self._tokens: list[Tensor] = []
        self._sequences: list[tuple[int, int, int, int]] = []  # first token, tokens, seen tokens, blocks
        self._pointers: list[int] = []
        self._count = 0
        self._host: dict[str, Tensor] = {}
        self._on_device: dict[str, Tensor] = {}

    def insert_sequence(
        self, seq_descriptor: BaseSequenceDescriptor, tokens: Tensor, do_checks: bool = True
    ) -> None:
        """Add the next tokens [n] of a sequence. SchedulingError: more sequences or tokens than a batch has, if that is
        to be checked."""
        new = tokens.reshape(-1).to("cpu", torch.int32)
        if do_checks and len(self._sequences) >= self._config.max_ragged_sequence_count:
            raise SchedulingError(SchedulingResult.BatchSequenceLimitExceeded)
        if do_checks and self._count + new.numel() > self._config.max_ragged_batch_size:
            raise SchedulingError(SchedulingResult.BatchTokenLimitExceeded)
        self._tokens.append(new)
        self._sequences.append(
            (self._count, new.numel(), seq_descriptor.seen_tokens, seq_descriptor.cur_allocated_blocks)
        )
        self._pointers.append(seq_descriptor.kv_blocks_ptr)
        self._count += new.numel()

    @property
    def tensor_toks(self) -> Tensor:
        """The tokens inserted so far, on the host."""
        return torch.cat(self._tokens) if self._tokens else torch.empty(0, dtype=torch.int32)

    def finalize(self, padding: bool | None = False) -> None:
        """Bring the batch to the device. ``padding``: tokens up to ``to_padded``, which belong to no sequence (their
        number is -1)."""
        tokens = self.tensor_toks
        lengths = torch.tensor([count for _, count, _, _ in self._sequences], dtype=torch.int64)
        owners = torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32), lengths)
        if padding:
            more = to_padded(self._count) - self._count
            tokens = torch.nn.functional.pad(tokens, (0, more))
            owners = torch.nn.functional.pad(owners, (0, more), value=-1)
        self._host = {
            "input_ids": tokens,
            "tokens_to_seq": owners,
            "metadata": torch.tensor([len(tokens), len(self._sequences)], dtype=torch.int32),
            "sequences": torch.tensor(self._sequences, dtype=torch.int32).view(-1, 4),
            "kv_ptrs": torch.tensor(self._pointers, dtype=torch.int64),
        }
        self._on_device = {name: value.to(self._device) for name, value in self._host.items()}

    def input_ids(self, on_device: bool = True) -> Tensor:
        """[tokens]."""
        return self._get("input_ids", on_device)

    def batch_metadata_buffer(self, on_device: bool = True) -> Tensor:
        """[2]: tokens (with padding), sequences."""
        return self._get("metadata", on_device)

    def tokens_to_seq(self, on_device: bool = True) -> Tensor:
        """[tokens]: to which sequence of the batch a token belongs."""
        return self._get("tokens_to_seq", on_device)

    def inflight_seq_descriptors(self, on_device: bool = True) -> Tensor:
        """[sequences, 4]: first token, tokens, tokens in the cache, blocks."""
        return self._get("sequences", on_device)

    def kv_ptrs(self, on_device: bool = True) -> Tensor:
        """[sequences]: addresses of the numbers of their blocks."""
        return self._get("kv_ptrs", on_device)

    def masks(self, on_device: bool = True) -> Tensor | None:
        """None: every token sees those before it of its sequence."""
        return None

    @property
    def current_tokens(self) -> int:
        """Without padding."""
        return self._count

    @property
    def current_sequences(self) -> int:
        return len(self._sequences)

    def _get(self, name: str, on_device: bool) -> Tensor:
        if not self._host:
            raise ValueError("the batch is not complete: call finalize() first")
        return (self._on_device if on_device else self._host)[name]
