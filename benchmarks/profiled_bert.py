"""A model of Transformers under the flops profiler of the environment in which this runs: ours, or the peer's."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification

from deepspeed.profiling.flops_profiler.profiler import FlopsProfiler, get_model_profile

SIZES = {
    "tiny": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512},
    "large": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
}


class Bert:
    """One rank. ``size``: of ``SIZES``; ``batch``, ``sequence``: of its inputs, which are all zeros."""

    def __init__(self, size: str, batch: int, sequence: int) -> None:
        torch.manual_seed(1)
        self.model = BertForSequenceClassification(BertConfig(**SIZES[size]))
        shape = (batch, sequence)
        self.inputs = {
            "input_ids": torch.zeros(shape, dtype=torch.long),
            "attention_mask": torch.ones(shape, dtype=torch.long),
            "labels": torch.ones(batch, dtype=torch.long),
        }

    def printed(self) -> str:
        """The whole profile as ``get_model_profile`` prints it."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "profile.txt"
            get_model_profile(self.model, kwargs=self.inputs, warm_up=1, output_file=str(file))
            return file.read_text()

    def plain(self) -> float:
        """Seconds of a forward and backward."""
        return self._timed()

    def profiled(self) -> float:
        """The same while the profiler counts, with its start and its stop."""
        profiler = FlopsProfiler(self.model)
        began = time.perf_counter()
        profiler.start_profile()
        self._timed()
        profiler.stop_profile()
        seconds = time.perf_counter() - began
        profiler.end_profile()
        return seconds

    def _timed(self) -> float:
        self.model.train()
        began = time.perf_counter()
        self.model(**self.inputs).loss.backward()
        self.model.zero_grad()
        return time.perf_counter() - began

    def close(self) -> None:
        """Nothing is left behind."""
