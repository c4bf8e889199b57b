"""A model of Transformers under the flops profiler of the environment in which this runs: ours, or the peer's."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

import deepspeed
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


def alexnet() -> nn.Sequential:
    """As in torchvision: Krizhevsky, "One weird trick for parallelizing convolutional neural networks" (2014)."""
    channels = [
        (3, 64, 11, 4, 2),
        (64, 192, 5, 1, 2),
        (192, 384, 3, 1, 1),
        (384, 256, 3, 1, 1),
        (256, 256, 3, 1, 1),
    ]
    features = nn.Sequential()
    for place, (given, made, size, stride, padding) in enumerate(channels):
        features.append(nn.Conv2d(given, made, size, stride, padding)).append(nn.ReLU(inplace=True))
        if place in (0, 1, 4):
            features.append(nn.MaxPool2d(3, 2))
    dense = [nn.Dropout(), nn.Linear(9216, 4096), nn.ReLU(), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU()]
    classifier = nn.Sequential(*dense, nn.Linear(4096, 1000))
    return nn.Sequential(features, nn.AdaptiveAvgPool2d(6), nn.Flatten(), classifier)


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

    def printed_alexnet(self) -> str:
        """That of the documents' other example."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "profile.txt"
            get_model_profile(alexnet(), (4, 3, 224, 224), warm_up=0, output_file=str(file))
            return file.read_text()

    def printed_by_the_engine(self) -> str:
        """The profile that an engine prints of one of its steps."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "profile.txt"
            config = {
                "train_batch_size": len(self.inputs["labels"]),
                "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
                "flops_profiler": {"enabled": True, "profile_step": 1, "output_file": str(file)},
            }
            engine = deepspeed.initialize(
                model=self.model, model_parameters=list(self.model.parameters()), config=config
            )[0]
            for _ in range(3):
                engine.backward(engine(**self.inputs).loss)
                engine.step()
            engine.destroy()
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
