"""``InferenceEngineV2``: the model runner and the paged cache, for clients with their own scheduler."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import torch
from torch import Tensor, nn

from deepspeed import comm as dist
from deepspeed.base.accelerator import get_accelerator
from deepspeed.base.exceptions import ExplainedError
from deepspeed.base.logging import log_dist
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.inference.cache.blocks import BlockManager, BlockPool, BlockTable
from deepspeed.inference.cache.pages import PagePiece, SwappedBlocks
from deepspeed.inference.model.runner import ModelRunner
from deepspeed.inference.quantized.selection import quantize_to_fp6
from deepspeed.inference.split.layers import split_over, tensor_parallel_group
from deepspeed.inference.v2.checkpoint.huggingface_engine import HuggingFaceCheckpointEngine
from deepspeed.inference.v2.config_v2 import AllocationMode, DSStateManagerConfig, RaggedInferenceEngineConfig
from deepspeed.inference.v2.policy import InferenceV2Policy

__all__ = [
    "HuggingFaceCheckpointEngine",
    "InferenceEngineV2",
    "SchedulingError",
    "SchedulingResult",
    "build_engine_from_ds_checkpoint",
    "build_hf_engine",
]

BLOCK_SIZE = 64
MARK = "ds_engine.json"
"""File that marks a folder of ``serialize``."""
_MARK_OF_OTHERS = "ds_model_config.pkl"


@dataclass(slots=True)
class TrackedSequence:
    """A client's sequence: the first ``computed`` tokens, usually all, are in the cache, or (``swapped``) their blocks
    are in host memory."""

    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    table: BlockTable = field(default_factory=BlockTable)
    swapped: SwappedBlocks | None = None


class InferenceEngineV2:
    """
    Args:
        policy: builds the model.
        engine_config: limits of the engine, and the ranks that share its layers.

    Raises:
        DeepSpeedConfigError: the config requests an unsupported feature, or memory holds no block.
        LayoutError: the model cannot be run over a paged cache.
    """

    def __init__(self, policy: InferenceV2Policy, engine_config: RaggedInferenceEngineConfig) -> None:
        self._policy = policy
        self._config = engine_config
        manager = engine_config.state_manager
        self._model = policy.build_model()
        size = engine_config.tensor_parallel.tp_size
        self._group = None if size == 1 else tensor_parallel_group(size)
        if self._group is not None:
            split_over(self._model, self._group)
        if engine_config.quantization.quantization_mode is not None:
            log_dist(f"inference: {quantize_to_fp6(self._model)}", ranks=[0])
        self.runner = ModelRunner(self._model, BLOCK_SIZE)
        self._max_context = min(manager.max_context, self.runner.info.max_length or manager.max_context)
        num_blocks = self._num_blocks(manager)
        self.runner.allocate(num_blocks)
        self._blocks = BlockManager(BlockPool(num_blocks), BLOCK_SIZE, span=self.runner.rotations.span)
        self._sequences: dict[int, TrackedSequence] = {}  # least recently put first
        self.blocks_moved = 0  # to the host and back, with state_manager.offload

    @property
    def free_blocks(self) -> Tensor:
        """Number of free blocks, int [cache groups]."""
        return torch.tensor([self._blocks.pool.num_free])

    @property
    def n_kv_cache_groups(self) -> int:
        """Number of cache groups: one, since all layers have the same blocks."""
        return 1

    @property
    def model(self) -> nn.Module:
        return self._model

    def put(
        self,
        batch_uids: Iterable[int],
        batch_tokens: Iterable[Tensor | Sequence[int]],
        do_checks: bool = True,
    ) -> Tensor:
        """Append tokens to sequences and compute them.

        Args:
            batch_uids: the client's ids of the sequences; unknown ones start a sequence.
            batch_tokens: int [tokens] for each, on any device.
            do_checks: call ``can_schedule`` first.

        Returns:
            Logits [sequences, vocabulary] after the last token of each.

        Raises:
            SchedulingError: a limit is exceeded. After this or any other error, new sequences are unknown again.
            IndexError: a token is outside the vocabulary.
            TypeError: tokens that are no integers.
            ValueError: a uid occurs twice or without tokens, or a sequence would grow beyond a length at which its
                rotations change and the model's ``generate`` is wrong.
        """
        uids = [int(uid) for uid in batch_uids]
        tokens = [_token_ids(each) for each in batch_tokens]
        if len(uids) != len(tokens) or len(set(uids)) != len(uids) or not all(tokens) or not uids:
            raise ValueError(
                f"{len(uids)} uids, {len(tokens)} lists of tokens: expected each uid once, with its tokens"
            )
        if do_checks:
            result = self.can_schedule(uids, [len(each) for each in tokens])
            if result is not SchedulingResult.Success:
                raise SchedulingError(result)
        for uid, new in zip(uids, tokens, strict=True):
            if uid in self._sequences:
                known = len(self._sequences[uid].tokens)
                self.runner.rotations.check_growth(known, known + len(new))
        begun = [uid for uid in uids if uid not in self._sequences]
        try:
            logits = self.runner.forward(self._reserve(uids, tokens))
        except BaseException:
            for uid in begun:
                self.flush(uid)
            raise
        for uid, new in zip(uids, tokens, strict=True):
            sequence = self._sequences.pop(uid)
            self._sequences[uid] = sequence  # now the most recently put
            sequence.tokens += new
            sequence.computed = len(sequence.tokens)
            self._blocks.publish(sequence.table, sequence.tokens, len(sequence.tokens))
        return logits

    def query(
        self, uid: int, max_request_tokens: int, max_request_blocks: int | Tensor
    ) -> tuple[int, Tensor]:
        """Return how many of ``max_request_tokens`` further tokens of a sequence fit into at most
        ``max_request_blocks`` further blocks, and the number of blocks [cache groups] that they need."""
        sequence = self._sequences.get(uid)
        if sequence is None and len(self._sequences) >= self._config.state_manager.max_tracked_sequences:
            return 0, torch.tensor([0])
        length = len(sequence.tokens) if sequence is not None else 0
        room = self.get_remaining_block_capacity(uid)
        allowed = room + max(0, int(max_request_blocks)) * BLOCK_SIZE
        tokens = max(0, min(int(max_request_tokens), allowed, self._max_context - length))
        return tokens, torch.tensor([self._blocks.blocks_for(max(0, tokens - room))])

    def can_schedule(self, uids: Iterable[int], lengths: Iterable[int]) -> SchedulingResult:
        """Return whether these numbers of tokens of the sequences can be put in one batch."""
        manager = self._config.state_manager
        uids, lengths = [int(uid) for uid in uids], list(lengths)
        if len(uids) > manager.max_ragged_sequence_count:
            return SchedulingResult.BatchSequenceLimitExceeded
        new = sum(uid not in self._sequences for uid in uids)
        if len(self._sequences) + new > manager.max_tracked_sequences:
            return SchedulingResult.EngineSequenceLimitExceeded
        blocks = 0
        for uid, length in zip(uids, lengths, strict=True):
            sequence = self._sequences.get(uid)
            known = len(sequence.tokens) if sequence is not None else 0
            if known + length > self._max_context:
                return SchedulingResult.SequenceTokenLimitExceeded
            blocks += self._blocks.blocks_for(known + length) - self._kept(sequence, known + length)
        if sum(lengths) > manager.max_ragged_batch_size:
            return SchedulingResult.BatchTokenLimitExceeded
        if blocks > self._blocks.pool.num_free + self._idle_blocks(uids):
            return SchedulingResult.KVCacheLimitExceeded
        return SchedulingResult.Success

    def get_remaining_block_capacity(self, uid: int) -> int:
        """Return the number of tokens that fit into a sequence's last block."""
        sequence = self._sequences.get(uid)
        return 0 if sequence is None else -len(sequence.tokens) % BLOCK_SIZE

    def flush(self, uid: int) -> None:
        """Remove a sequence; an unknown uid is ignored."""
        sequence = self._sequences.pop(uid, None)
        if sequence is not None:
            self._blocks.release(sequence.table)

    def serialize(self, save_path: str) -> None:
        """Write model and weights to a folder, from which ``build_engine_from_ds_checkpoint`` creates engines for any
        number of ranks. Call it on one rank."""
        if dist.is_initialized() and dist.get_rank() != 0:
            return
        from safetensors.torch import save_file

        folder = Path(save_path)
        folder.mkdir(parents=True, exist_ok=True)
        source = self._policy._checkpoint_engine
        source.model_config.save_pretrained(folder)
        unshared: dict[int, str] = {}
        tensors: dict[str, Tensor] = {}
        for name, value in source.parameters():  # a weight with several names is written once
            if unshared.setdefault(value.data_ptr(), name) == name or not value.numel():
                tensors[name] = value.detach().cpu().contiguous()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / MARK).write_text(json.dumps({"version": 1, "weights": "model.safetensors"}))

    # -------------------------------------------------------------------------------------------------- parts

    def _reserve(self, uids: Sequence[int], tokens: Sequence[list[int]]) -> list[PagePiece]:
        """Begin new sequences, and reserve blocks for all. SchedulingError: they do not fit."""
        pieces = []
        for uid, new in zip(uids, tokens, strict=True):
            sequence = self._sequences.get(uid)
            if sequence is None:
                sequence = self._sequences[uid] = TrackedSequence()
                sequence.computed = self._blocks.match_prefix(sequence.table, new)
            known = len(sequence.tokens)
            if (
                not self._bring_back(sequence, uids)
                or not self._restart_grown(sequence, known + len(new), uids)
                or not self._room_for(sequence, known + len(new), uids)
            ):
                raise SchedulingError(SchedulingResult.KVCacheLimitExceeded)
            table, start = sequence.table, sequence.computed
            fresh = new if start == known else (sequence.tokens + new)[start:]
            pieces.append(PagePiece(fresh, start, table.blocks, table.span))
        return pieces

    def _kept(self, sequence: TrackedSequence | None, length: int) -> int:
        """Return the number of blocks that a sequence keeps when it grows to ``length``."""
        if sequence is None or sequence.swapped is not None:
            return 0
        blocks, pool = sequence.table.blocks, self._blocks.pool
        if self._blocks.span(length) == sequence.table.span:
            return len(blocks)
        return sum(pool.uses(block) == 1 for block in blocks)

    def _restart_grown(self, sequence: TrackedSequence, length: int, uids: Sequence[int]) -> bool:
        """Restart a sequence whose tokens are rotated differently at ``length``. Recomputed tokens do not count towards
        ``max_ragged_batch_size``. Returns False if there is no room."""
        table = sequence.table
        if self._blocks.span(length) == table.span:
            return True
        free = self._blocks.pool.num_free + self._kept(sequence, length) + self._idle_blocks(uids)
        if self._blocks.blocks_for(length) > free:
            return False
        self._blocks.restart(table, length)
        sequence.computed = 0
        return True

    def _room_for(self, sequence: TrackedSequence, length: int, uids: Sequence[int]) -> bool:
        """Reserve blocks; with ``state_manager.offload``, evict those of sequences not in ``uids``, least recently put
        first. Returns False if there is no room."""
        table, pool = sequence.table, self._blocks.pool
        for uid in self._idle(uids):
            if self._blocks.missing(table, length) <= pool.num_free:
                break
            idle = self._sequences[uid]
            idle.swapped = SwappedBlocks.of(self.runner.cache, idle.table.blocks)
            self._blocks.release(idle.table)
            self.blocks_moved += idle.swapped.count
        return self._blocks.reserve(table, length)

    def _bring_back(self, sequence: TrackedSequence, uids: Sequence[int]) -> bool:
        """Restore the offloaded blocks of a sequence. Returns False if there is no room."""
        swapped = sequence.swapped
        if swapped is None:
            return True
        if not self._room_for(sequence, len(sequence.tokens), uids):
            return False
        swapped.write(self.runner.cache, sequence.table.blocks)
        sequence.swapped = None
        self.blocks_moved += swapped.count
        return True

    def _idle(self, uids: Sequence[int]) -> list[int]:
        """Return the sequences whose blocks may move to the host, least recently put first."""
        if not self._config.state_manager.offload:
            return []
        busy = set(uids)
        return [uid for uid, each in self._sequences.items() if uid not in busy and each.table.blocks]

    def _idle_blocks(self, uids: Sequence[int]) -> int:
        """Count the blocks that would be free if all idle sequences were moved."""
        uses: Counter[int] = Counter()
        for uid in self._idle(uids):
            uses.update(self._sequences[uid].table.blocks)
        return sum(self._blocks.pool.uses(block) == count for block, count in uses.items())

    def _num_blocks(self, manager: DSStateManagerConfig) -> int:
        """Return the number of blocks by ``memory_config``, at most what all sequences can use; the same on all
        ranks."""
        memory = manager.memory_config
        if AllocationMode(memory.mode) is AllocationMode.ALLOCATE:
            return memory.size
        accelerator = get_accelerator()
        free = accelerator.available_memory() - memory.size
        if accelerator.device_name() == "cpu":  # shared with everything else on the host
            free = min(free, accelerator.available_memory() // 2)
        most = manager.max_tracked_sequences * -(-self._max_context // BLOCK_SIZE)
        blocks = min(most, int(free) // self.runner.block_bytes)
        if self._group is not None:
            least = torch.tensor([-float(blocks)], dtype=torch.float64, device=self.runner.info.device)
            self._group.all_reduce_max(least).wait()
            blocks = int(-least.item())
        if blocks < 1:
            raise DeepSpeedConfigError(
                f"state_manager.memory_config: no block of {self.runner.block_bytes} bytes fits beside the "
                f"{memory.size} bytes to keep free"
            )
        return blocks


# Results of the check of a batch.


class SchedulingResult(Enum):
    """Success, or the first limit that is exceeded."""

    Success = 0
    EngineSequenceLimitExceeded = 1
    """More sequences than the engine tracks."""
    BatchSequenceLimitExceeded = 2
    """More sequences than fit into one forward."""
    BatchTokenLimitExceeded = 3
    """More tokens than fit into one forward."""
    KVCacheLimitExceeded = 4
    """More blocks than are free."""
    SequenceTokenLimitExceeded = 5
    """A sequence longer than the maximum."""


class SchedulingError(ExplainedError, RuntimeError):
    """A batch that was put cannot run; ``result`` is the reason."""

    def __init__(self, result: SchedulingResult) -> None:
        super().__init__(f"the batch cannot be scheduled: {result.name}")
        self.result = result
        self.status = result


def build_hf_engine(
    path: str, engine_config: RaggedInferenceEngineConfig, debug_level: int = logging.INFO
) -> InferenceEngineV2:
    """Create an engine of a causal model of Transformers.

    Args:
        path: a folder of ``save_pretrained`` or of ``InferenceEngineV2.serialize``, or the name of a model on the Hub.
        engine_config: limits and ranks.
        debug_level: accepted for compatibility; the log level is left to the caller.

    Raises:
        DeepSpeedConfigError: weights are missing, or the config requests an unsupported feature.
        LayoutError: the model cannot be run over a paged cache.
    """
    if (Path(path) / MARK).is_file() or (Path(path) / _MARK_OF_OTHERS).is_file():
        return build_engine_from_ds_checkpoint(path, engine_config, debug_level)
    return InferenceEngineV2(InferenceV2Policy(HuggingFaceCheckpointEngine(path)), engine_config)


def _token_ids(tokens: Tensor | Sequence[int]) -> list[int]:
    """Return one sequence's tokens, of any shape and device, as a list. TypeError: they are no integers."""
    found = torch.as_tensor(tokens)
    if found.numel() and (found.is_floating_point() or found.is_complex()):
        raise TypeError(f"tokens of {found.dtype}: put takes token ids, which are integers")
    return found.long().flatten().tolist()


def build_engine_from_ds_checkpoint(
    path: str, engine_config: RaggedInferenceEngineConfig, debug_level: int = logging.INFO
) -> InferenceEngineV2:
    """Create an engine from a folder of ``InferenceEngineV2.serialize``; arguments as in ``build_hf_engine``.

    DeepSpeedConfigError: not such a folder, or written by another implementation.
    """
    if not (Path(path) / MARK).is_file():
        pickled = (Path(path) / _MARK_OF_OTHERS).is_file()
        why = "contains pickled layers of another implementation" if pickled else f"has no {MARK}"
        raise DeepSpeedConfigError(f"{path} {why}: pass the model folder to build_hf_engine instead")
    return InferenceEngineV2(InferenceV2Policy(HuggingFaceCheckpointEngine(path)), engine_config)
