"""A tiny Llama of Transformers whose layers or sequences are shared by the ranks, as a contender.

Runs in this environment and in the peer's; both need transformers.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist

from hf_trainer import SIZES, VOCABULARY, llama
from trainers import engine_config

Batch = dict[str, torch.Tensor]


class ParallelRank:
    """One rank of a contender.

    Args:
        how: "dp" (each rank its own sequences), "tp" (the ranks share each layer) or "sp" (they share each sequence).
        size: of ``hf_trainer.SIZES``.
        batch: sequences per data-parallel rank and step, so that all contenders have the same tokens per step: with
            "dp" this many on each rank, otherwise on all of them together, times the number of ranks.
        context: tokens per sequence.
    """

    def __init__(
        self, how: str, size: str, precision: str, stage: int, batch: int, context: int, warmup: int = 3
    ) -> None:
        import deepspeed

        self.how, self.ranks = how, int(os.environ["WORLD_SIZE"])
        self.rank = int(os.environ["RANK"])
        deepspeed.init_distributed("gloo")
        model = llama(size, context)
        rows = batch if how == "dp" else batch * self.ranks
        settings = engine_config(stage, precision, rows)
        mpu = None
        if how == "tp":
            settings["tensor_parallel"] = {"autotp_size": self.ranks}
        if how == "sp":
            settings["sequence_parallel_size"] = self.ranks
            mpu = self._sharded_attention(model, rows)
        self.engine: Any = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=settings, mpu=mpu
        )[0]
        self.batches = [self._batch(number, batch, context) for number in range(4)]
        self.cpu_seconds = 0.0
        self.losses = [self._mean(self._step(self.batches[i % 4])) for i in range(warmup)]

    def _sharded_attention(self, model: Any, rows: int) -> Any:
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        return UlyssesSPAttentionHF.register_with_transformers(
            model_name_or_path=model,
            core_attn_implementation="sdpa",
            sequence_parallel_size=self.ranks,
            micro_batch_size=rows,
            seq_length_is_variable=True,
        )

    def _batch(self, number: int, batch: int, context: int) -> Batch:
        """The same sequences for all contenders; this rank's share of them."""
        draw = torch.Generator().manual_seed(2 + number)
        tokens = torch.randint(VOCABULARY, (batch * self.ranks, context), generator=draw)
        if self.how == "dp":
            tokens = tokens[batch * self.rank : batch * (self.rank + 1)]
        if self.how != "sp":
            return {"input_ids": tokens, "labels": tokens}
        shifted = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
        positions = torch.arange(context).expand(tokens.shape)
        whole = {"input_ids": tokens, "position_ids": positions, "shift_labels": shifted}
        return {key: value.chunk(self.ranks, dim=1)[self.rank] for key, value in whole.items()}

    def _step(self, batch: Batch) -> torch.Tensor:
        if self.how != "sp":
            loss = self.engine(**batch).loss
        else:
            labels = batch["shift_labels"]
            given = {key: value for key, value in batch.items() if key != "shift_labels"}
            logits = self.engine(**given).logits.float()
            # The mean over all tokens: the engine takes the mean of the ranks' gradients.
            total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            counted = labels.shape[0] * (labels.shape[1] * self.ranks - 1)
            loss = total * self.ranks / counted
        self.engine.backward(loss)
        self.engine.step()
        return loss

    def _mean(self, loss: torch.Tensor) -> float:
        mean = loss.detach().clone().float()
        dist.all_reduce(mean)
        return mean.item() / self.ranks

    def describe(self) -> dict[str, Any]:
        """Parameters, version and the losses of the warm-up (contenders must agree on them)."""
        import deepspeed

        held = sum(p.numel() for p in self.engine.module.parameters())
        return {"held": held, "version": deepspeed.__version__, "losses": self.losses, "sizes": str(SIZES)}

    def run(self, steps: int) -> float:
        """Seconds per step over ``steps`` steps, all ranks starting together."""
        dist.barrier()
        begin, cpu_begin = time.perf_counter(), time.process_time()
        for i in range(steps):
            self._step(self.batches[i % 4])
        self.cpu_seconds = (time.process_time() - cpu_begin) / steps
        return (time.perf_counter() - begin) / steps

    def cpu(self) -> float:
        """Processor seconds per step of the last ``run``, all threads."""
        return self.cpu_seconds

    def profile(self, steps: int, rows: int = 40, sort: str = "tottime") -> str:
        """cProfile of ``steps`` steps as text."""
        import cProfile
        import io
        import pstats

        profiler = cProfile.Profile()
        with profiler:
            self.run(steps)
        text = io.StringIO()
        pstats.Stats(profiler, stream=text).sort_stats(sort).print_stats(rows)
        return text.getvalue()
