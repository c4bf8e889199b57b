"""Transformers' Trainer as a contender: its loop runs in a thread and waits between steps until it is told to go on.

Runs in this environment and in the peer's; both need transformers and accelerate.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

VOCABULARY = 4096
FOREVER = 1_000_000  # steps


@dataclass(frozen=True)
class LlamaSize:
    layers: int
    width: int
    heads: int


SIZES = {
    "tiny": LlamaSize(layers=4, width=128, heads=4),  # 1.9M parameters
    "small": LlamaSize(layers=6, width=384, heads=6),  # 16M
}


def llama(size: str, context: int) -> LlamaForCausalLM:
    """The same weights on every rank and in every contender."""
    chosen = SIZES[size]
    torch.manual_seed(1)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=chosen.width,
            intermediate_size=3 * chosen.width,
            num_hidden_layers=chosen.layers,
            num_attention_heads=chosen.heads,
            max_position_embeddings=context,
            use_cache=False,
        )
    )


class Tokens(Dataset):
    """Fixed random sequences with labels equal to the inputs."""

    def __init__(self, count: int, context: int) -> None:
        draw = torch.Generator().manual_seed(2)
        self.rows = torch.randint(VOCABULARY, (count, context), generator=draw)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Gate(TrainerCallback):
    """Holds the Trainer's loop before each step until steps are granted; the loop stays where it is in between."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.granted = 0
        self.waiting = False
        self.ended: str | None = None

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        with self.changed:
            if not self.granted:
                self.waiting = True
                self.changed.notify_all()
                self.changed.wait_for(lambda: self.granted)
                self.waiting = False
            self.granted -= 1

    def grant(self, steps: int) -> None:
        with self.changed:
            self.granted, self.waiting = steps, False
            self.changed.notify_all()

    def wait(self) -> None:
        """Until the loop waits for its next grant. RuntimeError when it has ended instead."""
        with self.changed:
            self.changed.wait_for(lambda: self.waiting or self.ended)
        if self.ended:
            raise RuntimeError(self.ended)

    def end(self, text: str) -> None:
        with self.changed:
            self.ended = text
            self.changed.notify_all()


def settings(stage: int) -> dict[str, Any]:
    """The JSON that Transformers' documentation recommends, for both."""
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": "auto", "overlap_comm": False}
    if stage == 3:
        zero |= {"stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}
    keys = "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping".split()
    return {
        "bf16": {"enabled": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
        },
        "zero_optimization": zero,
        **dict.fromkeys(keys, "auto"),
    }


class TrainerRank:
    """One rank of a Trainer run at ZeRO stage ``stage`` on CPU; ``batch`` sequences of ``context`` tokens per step."""

    def __init__(
        self,
        stage: int,
        size: str,
        precision: str = "fp32",
        batch: int = 2,
        context: int = 128,
        warmup: int = 5,
    ) -> None:
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"  # without a GPU Accelerate has to be told the backend
        PartialState(backend="gloo")
        del os.environ["ACCELERATE_USE_DEEPSPEED"]
        if precision == "bf16":
            import transformers.training_args as training_args

            training_args.is_torch_bf16_gpu_available = lambda: True  # it refuses bf16 where it sees no GPU
        self.gate = Gate()
        self.folder = tempfile.TemporaryDirectory()
        arguments = TrainingArguments(
            output_dir=self.folder.name,
            deepspeed=settings(stage),
            accelerator_config={"use_configured_state": True},
            per_device_train_batch_size=batch,
            learning_rate=1e-3,
            warmup_steps=10,
            bf16=precision == "bf16",
            max_steps=FOREVER,
            logging_steps=FOREVER,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_num_workers=0,
        )
        model = llama(size, context)
        self.parameters = sum(p.numel() for p in model.parameters())
        self.losses: list[float] = []
        self.cpu_seconds = 0.0
        self.trainer = Trainer(model, arguments, train_dataset=Tokens(256, context), callbacks=[self.gate])
        self._watch_losses(warmup)
        threading.Thread(target=self._train, daemon=True).start()
        self.run(warmup)

    def _watch_losses(self, count: int) -> None:
        compute = self.trainer.compute_loss

        def watched(*args: Any, **kwargs: Any) -> Any:
            loss = compute(*args, **kwargs)
            if len(self.losses) < count:
                self.losses.append(float(loss))
            return loss

        self.trainer.compute_loss = watched  # type: ignore[method-assign]

    def _train(self) -> None:
        try:
            self.trainer.train()
            self.gate.end("the Trainer's loop has ended")
        except BaseException:
            self.gate.end(traceback.format_exc())

    def run(self, steps: int) -> float:
        """Seconds per step over ``steps`` steps, all ranks starting together."""
        self.gate.wait()
        dist.barrier()
        begin, cpu_begin = time.perf_counter(), time.process_time()
        self.gate.grant(steps)
        self.gate.wait()
        self.cpu_seconds = (time.process_time() - cpu_begin) / steps
        return (time.perf_counter() - begin) / steps

    def cpu(self) -> float:
        """Processor seconds per step of the last ``run``, all threads; less moved by the neighbours' load."""
        return self.cpu_seconds

    def describe(self) -> dict[str, Any]:
        import deepspeed

        return {
            "parameters": self.parameters,
            "version": f"deepspeed {deepspeed.__version__}",
            "losses": self.losses,
        }

    def profile(self, steps: int, rows: int = 40, sort: str = "tottime") -> str:
        """cProfile of ``steps`` steps of the loop's thread as text."""
        import cProfile
        import io
        import pstats

        profiler = cProfile.Profile()
        inner = self.trainer.training_step

        def profiled(*args: Any, **kwargs: Any) -> Any:
            return profiler.runcall(inner, *args, **kwargs)

        self.trainer.training_step = profiled  # type: ignore[method-assign]
        self.run(steps)
        self.trainer.training_step = inner  # type: ignore[method-assign]
        text = io.StringIO()
        pstats.Stats(profiler, stream=text).sort_stats(sort).print_stats(rows)
        return text.getvalue()
