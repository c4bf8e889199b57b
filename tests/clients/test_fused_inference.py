"""Forwards as one call of the native library: what they give, and when they are left to the model's own code."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed.inference.cache.pages import PagePiece
from deepspeed.inference.generation.fused import FusedGeneration
from deepspeed.inference.generation.generator import Generator
from deepspeed.inference.kernels import quantize_linears
from deepspeed.inference.model import fused
from deepspeed.inference.model.runner import ModelRunner
from deepspeed.inference.scheduling.requests import SamplingParams
from deepspeed.ops import native
from deepspeed.ops.host_graph import HostGraph
from deepspeed.ops.huge_pages import HUGE_PAGE

transformers = pytest.importorskip("transformers", reason="the clients extra is not installed")

from tests.clients.architectures import make  # noqa: E402

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native library")

PROMPT = [5, 17, 3, 60, 22, 9, 41]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each forward that was one program."""
    rows: list[int] = []
    plain = HostGraph.run

    def run(self: HostGraph, step: Any, threads: int | None = None) -> None:
        if len(self._operations) > 1:
            rows.append(step.rows)
        plain(self, step, threads)

    monkeypatch.setattr(HostGraph, "run", run)
    return rows


def runner_of(module: nn.Module) -> ModelRunner:
    runner = ModelRunner(module, block_size=4)
    runner.allocate(40)
    return runner


def logits_of(module: Any, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        return module(torch.tensor([tokens])).logits[0, -1]


def test_a_row_does_not_depend_on_the_others() -> None:
    for module in (make("llama").eval(), make("qwen3").eval().to(torch.bfloat16)):
        runner = runner_of(module)
        assert runner.layout.name == "fused"
        alone = runner.forward([PagePiece(PROMPT, 0, [0, 1])])
        others = [
            PagePiece([8, 9, 10], 0, [2]),
            PagePiece(PROMPT, 0, [3, 4]),
            PagePiece(PROMPT[::-1], 0, [5, 6]),
        ]
        assert torch.equal(runner.forward(others)[1], alone[0])
        in_parts = [runner.forward([PagePiece(PROMPT[i : i + 1], i, [7, 8])]) for i in range(len(PROMPT))]
        assert torch.equal(in_parts[-1], alone)


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_other_precisions_are_close_to_the_model(bits: int, runs: list[int]) -> None:
    module = make("llama").eval()
    if bits < 16:
        quantize_linears(module, bits, 1, torch.bfloat16)
    module = module.to(torch.bfloat16)
    runner = runner_of(module)
    assert runner.layout.name == "fused" and runs
    wanted = logits_of(module, PROMPT).float()
    found = runner.forward([PagePiece(PROMPT, 0, [0, 1])])[0]
    assert found.dtype is torch.bfloat16
    assert float((found.float() - wanted).norm() / wanted.norm()) < 0.03


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_a_prompt_is_one_program(bits: int, runs: list[int]) -> None:
    """Whose buffers have grown; the same bits as in parts."""
    module = make("llama", max_position_embeddings=256).eval()
    if bits < 16:
        quantize_linears(module, bits, 1, torch.bfloat16)
    module, prompt = module.to(torch.bfloat16), (PROMPT * 22)[:150]
    runner = ModelRunner(module, block_size=16)
    runner.allocate(20)
    parts = [
        runner.forward([PagePiece(prompt[at : at + 50], at, [*range(10, 20)])]) for at in range(0, 150, 50)
    ]
    runs.clear()
    found = runner.forward([PagePiece(prompt, 0, [*range(10)])])
    assert runs == [150] and torch.equal(found, parts[-1])
    wanted = logits_of(module, prompt).float()
    assert float((found[0].float() - wanted).norm() / wanted.norm()) < 0.03


def test_long_forwards_are_left_to_torch_and_tables_grow(
    monkeypatch: pytest.MonkeyPatch, runs: list[int]
) -> None:
    monkeypatch.setattr(fused, "FIRST_POSITIONS", 8)
    monkeypatch.setattr(fused, "PROGRAM_ROWS", 64)
    monkeypatch.setattr(fused, "PROGRAM_ROWS_OF_FLOATS", 64)
    module: Any = make("llama", max_position_embeddings=256).eval()
    prompts = [(PROMPT * 12)[:length] for length in (70, 9, 30)]
    settings = transformers.GenerationConfig(max_new_tokens=40, do_sample=False, pad_token_id=0)
    wanted = [
        module.generate(torch.tensor([each]), generation_config=settings)[0].tolist() for each in prompts
    ]
    engine = Generator(module, token_budget=80, max_sequences=4, num_blocks=64, max_length=128)
    runs.clear()
    found = engine.generate(prompts, SamplingParams(max_new_tokens=40))
    assert [each.tokens for each in found] == wanted
    assert runs and max(runs) <= 64 and engine.counts.forwards > len(runs)


def test_weights_that_were_replaced_are_used(runs: list[int]) -> None:
    module: Any = make("mistral").eval()
    runner = runner_of(module)
    runner.forward([PagePiece(PROMPT, 0, [0, 1])])
    down = module.model.layers[0].mlp.down_proj
    with torch.no_grad():
        down.weight.mul_(3)  # in place
        module.model.norm.weight.data = 2 * module.model.norm.weight.data  # elsewhere
    runs.clear()
    found = runner.forward([PagePiece(PROMPT, 0, [0, 1])])[0]
    torch.testing.assert_close(found, logits_of(module, PROMPT), rtol=1e-4, atol=1e-5)
    assert runs


@pytest.mark.parametrize("what", ["hook", "forward", "module"])
def test_who_listens_to_modules_is_heard(what: str, runs: list[int]) -> None:
    module: Any = make("llama").eval()
    runner = runner_of(module)
    mlp, heard = module.model.layers[1].mlp, []
    plain = mlp.forward

    class Doubled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            heard.append(1)
            return 2 * plain(x)

    if what == "hook":
        mlp.register_forward_hook(lambda *_: heard.append(1))
    elif what == "forward":
        mlp.forward = lambda x: (heard.append(1), plain(x))[1]
    else:
        module.model.layers[1].mlp = Doubled()
    runs.clear()
    found = runner.forward([PagePiece(PROMPT, 0, [0, 1])])[0]
    assert heard and not runs
    torch.testing.assert_close(found, logits_of(module, PROMPT), rtol=1e-4, atol=1e-5)


def test_the_forward_that_trl_puts_in_the_place_of_a_model_s(runs: list[int]) -> None:
    """TRL's forward counts as the model's own if logits are requested, unless it wraps another replacement."""
    utils = pytest.importorskip("trl.trainer.utils")
    if not hasattr(utils, "add_fused_lm_head"):
        pytest.skip("this release of TRL has no such forward")
    module: Any = make("llama").eval()
    utils.add_fused_lm_head(module)
    runner = runner_of(module)
    given: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    for listens in (False, True):
        runs.clear()
        found = runner.forward([PagePiece(PROMPT, 0, [0, 1])])[0]
        torch.testing.assert_close(found, logits_of(module, PROMPT), rtol=1e-4, atol=1e-5)
        made = FusedGeneration().generate(module, torch.tensor([PROMPT]), **given)
        assert torch.equal(made, module.generate(torch.tensor([PROMPT]), **given))
        assert bool(runs) is not listens
        del module.forward
        module.forward = partial(module.forward)
        utils.add_fused_lm_head(module)


def test_code_that_reads_something_else_is_left_to_torch() -> None:
    """The cap acts on values only that no trial shows."""
    module: Any = make("llama").eval()
    kind = type(module.model.layers[0].mlp)

    class Clamped(kind):  # type: ignore[valid-type,misc]
        def forward(self, x: Tensor) -> Tensor:
            up = self.up_proj(x).clamp(-1e3, 1e3)
            return self.down_proj(self.act_fn(self.gate_proj(x)) * up)

    module.model.layers[1].mlp.__class__ = Clamped
    assert ModelRunner(module).layout.name == "packed"


def test_weights_are_on_huge_pages_once_a_runner_has_been_made(advised: list[tuple[int, int]]) -> None:
    model = make("llama", vocab_size=65536).eval()
    ModelRunner(model)
    head: Any = model.get_parameter("lm_head.weight")
    assert head.nbytes > 3 * HUGE_PAGE
    begin, end = head.data_ptr(), head.data_ptr() + head.nbytes
    assert set(range(-(-begin // HUGE_PAGE), end // HUGE_PAGE)) <= {page // HUGE_PAGE for page, _ in advised}
