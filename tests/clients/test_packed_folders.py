"""Folders whose weights other libraries stored in few bits, loaded every way, and a GGUF file."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import deepspeed
from deepspeed.inference.generation.generator import Generator
from deepspeed.inference.kernels import IntegerLinear
from deepspeed.inference.scheduling.requests import SamplingParams
from deepspeed.inference.v2.config_v2 import RaggedInferenceEngineConfig
from deepspeed.inference.v2.engine_factory import build_hf_engine
from tests.checkpoint.bit_streams import bits_of

transformers = pytest.importorskip("transformers", reason="the clients extra is not installed")

from benchmarks.gguf_file import write_gguf  # noqa: E402
from deepspeed.inference.pretrained import Pretrained  # noqa: E402
from tests.clients.architectures import make  # noqa: E402

IDS = torch.arange(5, 13)[None]
GROUP = 128
Packed = tuple[dict[str, Tensor], Tensor]
"""The tensors of a layer by the ends of their names, and the weight that they stand for."""


def _gptq(weight: Tensor) -> Packed:
    levels, scales = _rounded(weight, 8)
    stored = {
        "qweight": bits_of((levels + 8).T, 4),
        "qzeros": bits_of(torch.full(scales.shape, 7), 4).T,
        "scales": scales.T,
        "g_idx": (torch.arange(weight.shape[1]) // GROUP).int(),
    }
    return stored, levels * scales.repeat_interleave(GROUP, 1)


def _awq(weight: Tensor) -> Packed:
    levels, scales = _rounded(weight, 7)
    zeros = torch.randint(4, 12, scales.shape)  # integers of five bits

    def words(numbers: Tensor) -> Tensor:
        return bits_of(numbers.unflatten(0, (-1, 8))[:, [0, 2, 4, 6, 1, 3, 5, 7]].flatten(0, 1), 4).T

    stored = {"qweight": words(levels + 7), "qzeros": words(zeros), "scales": scales.T}
    return stored, (levels + 7 - zeros.repeat_interleave(GROUP, 1)) * scales.repeat_interleave(GROUP, 1)


def _rounded(weight: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    grouped = weight.unflatten(1, (-1, GROUP))
    scales = grouped.abs().amax(-1) / 7.5
    levels = (grouped / scales[..., None]).round().clamp(-7, largest - 1).long()
    return levels.flatten(1), scales


def _fp8(weight: Tensor) -> Packed:
    scales = torch.rand(-(-weight.shape[0] // GROUP), -(-weight.shape[1] // GROUP)) + 0.5
    stored = weight.to(torch.float8_e4m3fn)
    spread = scales.repeat_interleave(GROUP, 0)[: weight.shape[0]].repeat_interleave(GROUP, 1)
    return {"weight": stored, "weight_scale_inv": scales}, stored.float() * spread[:, : weight.shape[1]]


def _int8(weight: Tensor) -> Packed:
    scales = weight.abs().amax(1, keepdim=True) / 127
    stored = (weight / scales).round().to(torch.int8)
    return {"weight": stored, "weight_scale": scales}, stored * scales


LAYOUTS: dict[str, tuple[Callable[[Tensor], Packed], dict[str, Any]]] = {
    "gptq": (_gptq, {"bits": 4, "group_size": GROUP}),
    "awq": (_awq, {"bits": 4, "group_size": GROUP, "version": "gemm"}),
    "fp8": (_fp8, {"weight_block_size": [GROUP, GROUP]}),
    "compressed-tensors": (_int8, {"format": "int-quantized", "config_groups": {}}),
}


def packed(name: str, layout: str, folder: Path) -> Any:
    """Write a folder of packed weights; the model with what they stand for."""
    pack, told = LAYOUTS[layout]
    model: Any = make(name, hidden_size=128, intermediate_size=256, num_attention_heads=4).eval()
    model.save_pretrained(folder)
    stored, whole = {}, {}
    for key, value in load_file(folder / "model.safetensors").items():
        if value.dim() != 2 or "embed" in key or "head" in key or "gate.weight" in key:
            stored[key] = whole[key] = value
            continue
        parts, whole[key] = pack(value)
        layer = key.removesuffix(".weight")
        stored |= {f"{layer}.{part}": each.contiguous() for part, each in parts.items()}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    wanted = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": layout, **told}
    (folder / "config.json").write_text(json.dumps(config))
    return wanted


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_way_in(layout: str, tmp_path: Path) -> None:
    wanted = logits_of(packed("llama", layout, tmp_path))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    with deepspeed.OnDevice(dtype=torch.float32, device="meta"):
        module = transformers.AutoModelForCausalLM.from_config(config)
    engine = deepspeed.init_inference(module, dtype="fp32", checkpoint=str(tmp_path))
    torch.testing.assert_close(logits_of(engine), wanted, rtol=1e-5, atol=1e-5)
    assert not hasattr(engine.module.config, "quantization_config")  # it has whole weights now
    found = build_hf_engine(str(tmp_path), RaggedInferenceEngineConfig()).put([0], [IDS[0]])
    torch.testing.assert_close(found[0], wanted[0, -1], rtol=1e-4, atol=1e-4)
    whole = Pretrained(str(tmp_path)).load_causal()
    torch.testing.assert_close(logits_of(whole), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("layout", "bits"), [("gptq", 4), ("awq", 8), ("fp8", None)])
def test_integers_stay_integers(layout: str, bits: int | None, tmp_path: Path) -> None:
    wanted = packed("llama", layout, tmp_path)
    module = Pretrained(str(tmp_path)).load_causal(keeps_integers=True)
    layers = [each for each in module.modules() if isinstance(each, IntegerLinear)]
    assert {each.bits for each in layers} == ({bits} if bits else set())
    assert len(layers) == (7 * wanted.config.num_hidden_layers if bits else 0)
    for name, each in module.named_modules():
        if isinstance(each, IntegerLinear):
            torch.testing.assert_close(each.weight, wanted.get_submodule(name).weight)
    engine = deepspeed.init_inference(module, dtype="fp32")
    difference = logits_of(engine) - logits_of(wanted)  # the kernels round inputs to 16 bits
    assert difference.norm() < 0.01 * logits_of(wanted).norm()
    generator = Generator(engine.module)
    (answer,) = generator.generate([IDS[0].tolist()], SamplingParams(max_new_tokens=8))
    expected = wanted.generate(IDS, max_new_tokens=8, do_sample=False)[0, IDS.shape[1] :]
    assert answer.tokens[IDS.shape[1] :] == expected.tolist()


def test_the_method_of_a_folder(tmp_path: Path) -> None:
    packed("llama", "gptq", tmp_path)
    Pretrained(str(tmp_path)).check_quantization("gptq_marlin")
    with pytest.raises(ValueError, match=r"--quantization awq: .* has weights of gptq: leave it out"):
        Pretrained(str(tmp_path)).check_quantization("awq")


def test_experts_of_fp8_are_stacked_after_they_are_unpacked(tmp_path: Path) -> None:
    wanted = packed("mixtral", "fp8", tmp_path)
    torch.testing.assert_close(
        logits_of(Pretrained(str(tmp_path)).load_causal()), logits_of(wanted), rtol=1e-5, atol=1e-5
    )


def test_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model: nn.Module = make("llama", tie_word_embeddings=False).eval()
    write_gguf(model, "fp32", tmp_path / "model.gguf")
    with monkeypatch.context() as context:
        context.setitem(sys.modules, "gguf", None)
        with pytest.raises(ValueError, match="package gguf: pip install gguf"):
            Pretrained(str(tmp_path / "model.gguf")).load_causal()
    pytest.importorskip("gguf")
    found = Pretrained(str(tmp_path / "model.gguf")).load_causal()
    torch.testing.assert_close(logits_of(found), logits_of(model), rtol=1e-5, atol=1e-5)
    with pytest.raises(FileNotFoundError, match="no file"):
        Pretrained(str(tmp_path / "other.gguf")).load_tokenizer()
