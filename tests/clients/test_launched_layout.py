"""The launched layout under models of Transformers, its kernels interpreted."""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

import pytest
import torch

from deepspeed.inference.cache.pages import PagedCache
from tests.ops.gpu.triton_kit import interpreted

pytest.importorskip("transformers", reason="the clients extra is not installed")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", torch.float32),
        ("qwen3", torch.float32),
        ("phi3", torch.float16),
        ("mistral", torch.bfloat16),
    ],
    ids=str,
)
@interpreted
def test_it_is_chosen_and_gives_the_tokens_of_the_model(name: str, dtype: torch.dtype) -> None:
    from deepspeed.inference.generation.generator import Generator
    from deepspeed.inference.model import runner as runners
    from deepspeed.inference.scheduling.requests import SamplingParams
    from tests.clients.architectures import make

    module: Any = make(name).eval().to(dtype)
    prompts = [[5, 17, 3, 60, 22, 9, 41], [8, 9, 10]]
    write = PagedCache.__init__

    def on_device(self: PagedCache, *args: Any) -> None:
        write(self, *args)
        self.is_on_host = False  # the host's kernel would do the attention

    with (
        mock.patch("deepspeed.ops.gpu.usable", lambda *tensors: True),
        mock.patch.object(runners, "_ON_HOST", runners._ON_DEVICE),
        mock.patch.object(PagedCache, "__init__", on_device),
    ):
        runner = runners.ModelRunner(module, block_size=4)
        assert runner.layout.name == "launched" and "triton" in sys.modules
        if dtype is torch.float32:
            generator = Generator(runner, num_blocks=20, max_length=32)
            for request in generator.generate(prompts, SamplingParams(max_new_tokens=4)):
                wanted = module.generate(
                    torch.tensor([request.prompt]), max_new_tokens=4, do_sample=False, pad_token_id=0
                )
                assert request.generated == wanted[0, len(request.prompt) :].tolist()
