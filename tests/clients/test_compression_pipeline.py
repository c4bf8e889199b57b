"""Compression of causal language models that are cut into stages: the numbers of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.compression import init_compression, redundancy_clean
from deepspeed.compression.config import get_compression_config
from deepspeed.compression.helper import convert_conv1d_to_linear
from deepspeed.compression.scheduler import compression_scheduler
from deepspeed.compression.techniques import Compressible
from deepspeed.pipe import cut_causal_lm
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.clients.kit import clean_clients
from tests.compression.models import SNIP, config, technique
from tests.pool import distributed

pytest.importorskip("transformers", reason="the clients extra is not installed")

TOKENS, LENGTH, MICRO, COUNT, STEPS, HEADS = 32, 6, 2, 2, 6, 2
BITS = {"start_bits": 8, "target_bits": 4, "quantization_period": 2}
IN_FORWARD = {"quantize_weight_in_forward": True, "quantize_groups": 4}


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(
        vocab_size=TOKENS,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
    )
    return LlamaForCausalLM(shape)


def gpt2() -> Any:
    """Embedding and head share their weight."""
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.pytorch_utils import Conv1D

    shape = GPT2Config(
        vocab_size=TOKENS,
        n_embd=16,
        n_layer=3,
        n_head=HEADS,
        n_positions=8,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return convert_conv1d_to_linear(GPT2LMHeadModel(shape), Conv1D)


KINDS: dict[str, tuple[Any, list[dict[str, Any]]]] = {
    "llama": (
        llama,
        [
            technique(
                "weight_quantization", ["q_proj", "mlp", "embed_tokens", "lm_head"], BITS, **IN_FORWARD
            ),
            technique(
                "head_pruning",
                ["o_proj"],
                {"dense_ratio": 0.5},
                [["q_proj", "k_proj", "v_proj"]],
                method="topk",
                num_heads=HEADS,
            ),
        ],
    ),
    "gpt2": (
        gpt2,
        [
            technique("weight_quantization", ["attn", "wte", "lm_head"], BITS, **IN_FORWARD),
            technique("row_pruning", ["c_fc"], {"dense_ratio": 0.5}, [["mlp.c_proj"]], method="l1"),
        ],
    ),
}


def section_of(kind: str, stage: int, ranges: str = "dynamic", **more: Any) -> dict[str, Any]:
    inputs = technique(
        "activation_quantization",
        ["mlp"],
        {"bits": 8},
        quantization_type="asymmetric",
        range_calibration=ranges,
    )
    return config(
        *KINDS[kind][1],
        inputs,
        SNIP,
        zero_optimization={"stage": stage, "stage3_param_persistence_threshold": 0},
        optimizer={"type": "SGD", "params": {"lr": 0.1}},  # Adam would enlarge the noise of zero gradients
        gradient_clipping=0.0,
        **{"train_micro_batch_size_per_gpu": MICRO, "gradient_accumulation_steps": COUNT, **more},
    )


def model_of(kind: str, section: dict[str, Any] | None = None) -> Any:
    torch.manual_seed(7)
    model = KINDS[kind][0]()
    return init_compression(model, section) if section is not None else model


def batch(number: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(TOKENS, (MICRO, LENGTH), generator=torch.Generator().manual_seed(number))
    return {"input_ids": tokens, "labels": tokens}


def micro_batches(step: int, replica: int) -> list[dict[str, torch.Tensor]]:
    return [batch(1000 * replica + COUNT * step + i) for i in range(COUNT)]


def alone(kind: str, section: dict[str, Any], replicas: int) -> tuple[list[float], Any]:
    """Losses and model of one process that has all replicas' batches, in plain PyTorch."""
    model = model_of(kind, section)
    scheduler = compression_scheduler(model, get_compression_config(section))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        data = [one for replica in range(replicas) for one in micro_batches(step, replica)]
        parts = []
        for one in data:
            loss = model(**one, use_cache=False).loss
            (loss / len(data)).backward()
            parts.append(loss.item())
        losses.append(sum(parts) / len(parts))
        for pruner in vars(model).get("pruners", []):
            pruner.on_before_optimizer_step()
        optimizer.step()
        for pruner in vars(model).get("pruners", []):
            pruner.on_after_optimizer_step()
        scheduler.step()
    return losses, model


def engine_of(kind: str, section: dict[str, Any], *, cut_first: bool = True) -> Any:
    if cut_first:
        module = init_compression(cut_causal_lm(model_of(kind), num_stages=2), section)
    else:
        module = cut_causal_lm(model_of(kind, section), num_stages=2)
    engine, *_ = deepspeed.initialize(model=module, config=section)
    return engine


def trained(engine: Any, first: int, last: int) -> list[float]:
    replica = engine.grid.get_data_parallel_id()
    return [engine.train_batch(iter(micro_batches(step, replica))).item() for step in range(first, last)]


def check_run(kind: str, section: dict[str, Any], *, cut_first: bool, folder: Path, parts: int = 1) -> None:
    expected, plain = alone(kind, section, dist.get_world_size() // 2 // parts)
    engine = engine_of(kind, section, cut_first=cut_first)
    torch.testing.assert_close(trained(engine, 0, 4), expected[:4], rtol=1e-5, atol=1e-6)
    engine.save_checkpoint(str(folder / "middle"))
    dist.barrier()
    resumed = engine_of(kind, section, cut_first=cut_first)
    resumed.load_checkpoint(str(folder / "middle"))
    losses = trained(resumed, 4, STEPS)
    torch.testing.assert_close(losses, expected[4:], rtol=1e-5, atol=1e-6)
    assert losses == trained(engine, 4, STEPS)
    check_masks(resumed, plain)
    resumed.save_checkpoint(str(folder / "end"))
    dist.barrier()
    redundancy_clean(plain, section)
    check_whole(kind, section, folder / "end", plain)
    if parts == 1:
        redundancy_clean(resumed, section)
        theirs = plain.state_dict()
        for name, value in resumed.module.state_dict().items():
            torch.testing.assert_close(
                value, theirs[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )
        assert not any(isinstance(each, Compressible) for each in resumed.module.modules())
    engine.destroy()


def check_masks(engine: Any, plain: Any) -> None:
    theirs = dict(plain.named_buffers())
    own = {name: buffer for name, buffer in engine.module.named_buffers() if name.endswith("mask")}
    assert own
    for name, mask in own.items():
        assert torch.equal(mask, theirs[name]), name
    assert 0 < sum(int(mask.sum()) for mask in own.values()) < sum(mask.numel() for mask in own.values())


def check_whole(kind: str, section: dict[str, Any], folder: Path, clean: Any) -> None:
    """The checkpoint's weights in a plain model that was prepared in the same way."""
    model = model_of(kind, section)
    missing, unexpected = model.load_state_dict(
        get_fp32_state_dict_from_zero_checkpoint(str(folder)), strict=False
    )
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    redundancy_clean(model, section).eval()
    one = batch(99)["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(
            model(one, use_cache=False).logits,
            clean.eval()(one, use_cache=False).logits,
            rtol=1e-3,
            atol=1e-4,
        )


@distributed(world_size=2)
@pytest.mark.parametrize(
    ("kind", "stage", "ranges", "cut_first"),
    [("llama", 2, "static", True), ("gpt2", 1, "dynamic", True), ("gpt2", 0, "dynamic", False)],
)
def test_two_stages(kind: str, stage: int, ranges: str, cut_first: bool, tmp_path: Path) -> None:
    with clean_clients():
        check_run(kind, section_of(kind, stage, ranges), cut_first=cut_first, folder=tmp_path)


@distributed(world_size=4)
def test_two_stages_of_two_replicas(tmp_path: Path) -> None:
    with clean_clients():
        check_run("gpt2", section_of("gpt2", 1), cut_first=False, folder=tmp_path)


@distributed(world_size=4)
def test_two_stages_of_two_parts(tmp_path: Path) -> None:
    """PP 2 x TP 2."""
    with clean_clients():
        section = section_of("llama", 1, tensor_parallel={"autotp_size": 2})
        check_run("llama", section, cut_first=True, folder=tmp_path, parts=2)
