"""``deepspeed.linear.Init`` around models of Transformers: quantized while they load, trained, saved, merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed.linear import Init, LoRAConfig, QuantizationConfig, merged_state_dict, quantization
from deepspeed.linear.optimized_linear import LoRAOptimizedLinear
from deepspeed.linear.quantization import QuantizedLinear, QuantizedParameter
from tests.clients.kit import Tokens, clean_clients, llama, llama_config
from tests.pool import distributed

pytest.importorskip("transformers", reason="the clients extra is not installed")

BITS = QuantizationConfig(q_bits=8, group_size=64)
ADAPTERS = LoRAConfig(lora_r=4, lora_alpha=8.0)


def load(folder: Path, lora: LoRAConfig | None = ADAPTERS, bits: QuantizationConfig | None = BITS) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(2)
    with Init(lora, bits):
        return AutoModelForCausalLM.from_pretrained(folder)


def layers(model: torch.nn.Module) -> dict[str, LoRAOptimizedLinear]:
    return {path: m for path, m in model.named_modules() if isinstance(m, LoRAOptimizedLinear)}


def settings(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }


def train(engine: Any, steps: int) -> list[float]:
    rows = torch.stack([Tokens()[i]["input_ids"] for i in range(4)])
    found = []
    for _ in range(steps):
        loss = engine(input_ids=rows, labels=rows).loss
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def test_weights_are_quantized_one_by_one_as_they_load(tmp_path: Path, monkeypatch: Any) -> None:
    base = llama()
    base.save_pretrained(tmp_path)
    adapters_before = []
    made = quantization.make_quantized

    def watched(data: torch.Tensor, config: QuantizationConfig | None) -> QuantizedParameter:
        adapters_before.append(any(hasattr(layer, "lora_weight_1") for layer in seen))
        return made(data, config)

    seen: list[LoRAOptimizedLinear] = []
    created = LoRAOptimizedLinear.__init__

    def create(self: LoRAOptimizedLinear, *args: Any, **kwargs: Any) -> None:
        created(self, *args, **kwargs)
        seen.append(self)

    monkeypatch.setattr(quantization, "make_quantized", watched)
    monkeypatch.setattr(LoRAOptimizedLinear, "__init__", create)
    model = load(tmp_path)
    targets = {path: m for path, m in layers(model).items() if not m.disabled}
    assert len(targets) == 14 and len(adapters_before) == 14  # each once
    assert not any(adapters_before)  # before anything of `init_lora`: while they were loaded
    for path, layer in targets.items():
        assert isinstance(layer.weight, QuantizedParameter)
        plain = base.get_submodule(path).weight.detach()
        assert torch.equal(layer.full_weight(), made(plain, BITS).dequantized())
    assert torch.equal(model.lm_head.weight, base.lm_head.weight)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {f"{path}.lora_weight_{n}.weight" for path in targets for n in (1, 2)}
    deepspeed.linear.init_lora(model)  # as scripts do that know no better
    assert trained == {name for name, p in model.named_parameters() if p.requires_grad}


def test_models_made_from_a_config_or_by_their_class(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    makers = AutoModelForCausalLM.from_pretrained, LlamaForCausalLM.from_pretrained
    base = llama()
    base.save_pretrained(tmp_path)
    torch.manual_seed(3)
    plain = AutoModelForCausalLM.from_config(llama_config())
    torch.manual_seed(3)
    with Init(ADAPTERS):
        fresh = AutoModelForCausalLM.from_config(llama_config())
        by_class = LlamaForCausalLM.from_pretrained(tmp_path)
    for path, layer in layers(fresh).items():  # weights of a new model are initialized as usual
        assert layer.weight.std().item() == pytest.approx(
            plain.get_submodule(path).weight.std().item(), rel=0.2
        )
    assert any(p.requires_grad for p in fresh.parameters())
    for path, layer in layers(by_class).items():
        assert torch.equal(layer.full_weight(), base.get_submodule(path).weight)
    assert makers == (AutoModelForCausalLM.from_pretrained, LlamaForCausalLM.from_pretrained)
    assert type(torch.nn.Linear(2, 2)) is torch.nn.Linear


def test_without_adapters_all_layers_are_quantized(tmp_path: Path) -> None:
    base = llama()
    base.save_pretrained(tmp_path)
    model = load(tmp_path, lora=None)
    found = [m for m in model.modules() if isinstance(m, QuantizedLinear)]
    assert len(found) == 15 and all(isinstance(m.weight, QuantizedParameter) for m in found)
    assert all(m.weight.is_quantized_now for m in found)
    rows = Tokens()[0]["input_ids"][None]
    assert (model(rows).logits - base(rows).logits).norm() < 0.1 * base(rows).logits.norm()


@pytest.mark.parametrize(("stage", "in_parts"), [(1, False), (2, False), (3, False), (3, True)])
@distributed(world_size=2)
def test_training_saving_and_merging(tmp_path: Path, stage: int, in_parts: bool) -> None:
    """``in_parts``: Transformers knows the config, and loads under ``zero.Init``."""
    from transformers import LlamaForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    with clean_clients():
        if torch.distributed.get_rank() == 0:
            llama().save_pretrained(tmp_path / "base")
        torch.distributed.barrier()
        alone, *_ = deepspeed.initialize(model=load(tmp_path / "base"), config=settings(0))
        expected = train(alone, 5)
        keep = HfDeepSpeedConfig(settings(stage)) if in_parts else None
        model = load(tmp_path / "base")
        engine, *_ = deepspeed.initialize(model=model, config=settings(stage))
        assert train(engine, 3) == pytest.approx(expected[:3], rel=1e-5)
        assert expected[-1] < expected[0]
        if stage == 3:
            weights: list[Any] = [p for p in model.parameters() if isinstance(p, QuantizedParameter)]
            assert len(weights) == 14 and all(w.ds_tensor.dtype == torch.uint8 for w in weights)
            values = sum(w.full_shape.numel() for w in weights)
            held = torch.tensor(sum(w.ds_tensor.nbytes for w in weights))
            assert held < 0.6 * values * (1 + 4 / 64)
            torch.distributed.all_reduce(held)
            assert values * (1 + 4 / 64) <= held < 1.02 * values * (1 + 4 / 64)
        engine.save_checkpoint(str(tmp_path))
        other, *_ = deepspeed.initialize(model=load(tmp_path / "base"), config=settings(stage))
        other.load_checkpoint(str(tmp_path))
        assert train(other, 2) == pytest.approx(expected[3:], rel=1e-5)
        rows = Tokens()[0]["input_ids"][None]
        state = merged_state_dict(other.module)
        del keep
        plain = LlamaForCausalLM(llama_config())
        plain.load_state_dict(state)
        with torch.no_grad():
            torch.testing.assert_close(plain(rows).logits, other(input_ids=rows).logits, rtol=1e-4, atol=1e-5)
            answer = plain.generate(rows, max_new_tokens=3, do_sample=False)
        assert answer.shape == (1, rows.shape[1] + 3)
        for each in (alone, engine, other):
            each.destroy()
