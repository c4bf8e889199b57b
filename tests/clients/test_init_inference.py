"""``init_inference`` on models of Transformers: generation as without it, over one and two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed.inference.generation.generator import Generator
from deepspeed.inference.scheduling.requests import SamplingParams
from tests.clients.kit import clean_clients
from tests.pool import distributed

transformers = pytest.importorskip("transformers", reason="the clients extra is not installed")

from tests.clients.architectures import batch, make  # noqa: E402


def left_padded() -> dict[str, torch.Tensor]:
    numbers = torch.Generator().manual_seed(3)
    tokens = torch.randint(3, 90, (3, 9), generator=numbers)
    mask = torch.ones_like(tokens)
    mask[0, :5], mask[1, :2] = 0, 0
    return {"input_ids": tokens, "attention_mask": mask}


def settings(**more: Any) -> Any:
    return transformers.GenerationConfig(max_new_tokens=8, pad_token_id=0, decoder_start_token_id=0, **more)


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 1.5},
    "beams": {"do_sample": False, "num_beams": 3},
    "penalty": {"do_sample": False, "repetition_penalty": 1.3},
}


def generated(model: Any, ways: dict[str, dict[str, Any]] = WAYS) -> dict[str, list[list[int]]]:
    made = {}
    for name, way in ways.items():
        torch.manual_seed(5)
        made[name] = model.generate(**left_padded(), generation_config=settings(**way)).tolist()
    return made


def test_all_ways_of_generating() -> None:
    model = make("llama").eval()
    wanted = generated(model)
    engine = deepspeed.init_inference(model, dtype=torch.float32, replace_with_kernel_inject=False)
    assert generated(engine) == wanted
    with pytest.raises(RuntimeError, match="9 tokens is longer than max_out_tokens=4"):
        generated(deepspeed.init_inference(make("llama"), dtype="fp32", max_out_tokens=4))
    with pytest.raises(RuntimeError, match="max_out_tokens=10 less min_out_tokens=2"):
        generated(deepspeed.init_inference(make("llama"), dtype="fp32", max_out_tokens=10, min_out_tokens=2))


def test_assisted_generation_and_streamers() -> None:
    model, helper = make("llama").eval(), make("llama", num_hidden_layers=1).eval()
    engine = deepspeed.init_inference(model, dtype="fp32")
    inputs = left_padded()["input_ids"][:1]

    class Streamer(transformers.generation.streamers.BaseStreamer):
        def __init__(self) -> None:
            self.got: list[int] = []

        def put(self, value: Any) -> None:
            self.got += value.flatten().tolist()

        def end(self) -> None:
            self.got.append(-1)

    streamer = Streamer()
    plain = engine.generate(inputs, generation_config=settings(do_sample=False), streamer=streamer)
    assert streamer.got == [*plain[0].tolist(), -1]
    assisted = engine.generate(inputs, generation_config=settings(do_sample=False), assistant_model=helper)
    assert torch.equal(assisted, plain)


def test_a_model_on_meta_gets_its_weights(tmp_path: Path) -> None:
    model = make("llama").eval()
    wanted = generated(model, {"greedy": WAYS["greedy"]})
    model.save_pretrained(tmp_path)
    with deepspeed.OnDevice(dtype=torch.float32, device="meta"):
        empty = transformers.AutoModelForCausalLM.from_config(model.config)
    engine = deepspeed.init_inference(empty, dtype="fp32", checkpoint=str(tmp_path))
    assert generated(engine, {"greedy": WAYS["greedy"]}) == wanted


def check_two_ranks(name: str) -> None:
    with clean_clients(deepspeed_state=False):
        model = make(name).eval()
        ways = WAYS if name == "llama" else {"greedy": WAYS["greedy"]}
        wanted = generated(model, {key: way for key, way in ways.items() if key != "sampling"})
        whole = sum(param.numel() for param in model.parameters())
        with torch.no_grad():
            logits = model(**batch(model)).logits
        engine = deepspeed.init_inference(model, dtype=torch.float32, tensor_parallel={"tp_size": 2})
        assert sum(param.numel() for param in engine.module.parameters()) < 0.9 * whole
        with torch.no_grad():
            torch.testing.assert_close(engine(**batch(model)).logits, logits, rtol=1e-4, atol=1e-4)
        found = generated(engine, ways)
        drawn = torch.tensor(found.pop("sampling", [[0]]))
        assert found == wanted
        assert_same_on_all_ranks(drawn)


def assert_same_on_all_ranks(numbers: torch.Tensor) -> None:
    mine = numbers.clone()
    torch.distributed.broadcast(numbers, 0)
    assert torch.equal(mine, numbers)


@distributed(world_size=2)
@pytest.mark.parametrize("name", ["llama", "codegen"])
def test_two_ranks_share_the_layers(name: str) -> None:
    """Sampling too: all ranks draw the same. CodeGen's fused projection has four blocks of (query, value, key)."""
    check_two_ranks(name)


@distributed(world_size=2)
@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_parts_of_ranks_are_saved_and_loaded(tmp_path: Path, name: str) -> None:
    """Also fused weights, of which a rank's part is in several places, and integers made from what was loaded."""
    with clean_clients(deepspeed_state=False):
        model = make(name).eval()
        config, way = model.config, {"greedy": WAYS["greedy"]}
        wanted = generated(model, way)
        with torch.no_grad():
            logits = model(**batch(model)).logits
        folder = tmp_path / "parts"
        deepspeed.init_inference(model, dtype="fp32", mp_size=2, save_mp_checkpoint_path=str(folder))
        for size in (1, 2):
            with deepspeed.OnDevice(dtype=torch.float32, device="meta"):
                empty = transformers.AutoModelForCausalLM.from_config(config)
            loaded = str(folder / "ds_inference_config.json")
            engine = deepspeed.init_inference(empty, dtype="fp32", mp_size=size, checkpoint=loaded)
            assert generated(engine, way) == wanted
        with deepspeed.OnDevice(dtype=torch.float32, device="meta"):
            empty = transformers.AutoModelForCausalLM.from_config(config)
        engine = deepspeed.init_inference(empty, dtype="int8", mp_size=2, checkpoint=str(folder))
        kinds = {type(each).__name__ for each in engine.module.modules()}
        with torch.no_grad():
            error = engine(**batch(engine.module)).logits.float() - logits
        assert "QuantizedPart" in kinds and error.norm() < 0.05 * logits.norm()


@distributed(world_size=2)
def test_experts_are_spread_over_ranks(tmp_path: Path) -> None:
    with clean_clients(deepspeed_state=False):
        model = make("mixtral").eval()
        config, wanted = model.config, generated(model, {"greedy": WAYS["greedy"]})
        whole = sum(param.numel() for param in model.parameters())
        engine = deepspeed.init_inference(
            model, dtype="fp32", moe={"ep_size": 2}, save_mp_checkpoint_path=str(tmp_path)
        )
        assert sum(param.numel() for param in engine.module.parameters()) < 0.8 * whole
        found = generated(engine, {"greedy": WAYS["greedy"], "sampling": WAYS["sampling"]})
        assert_same_on_all_ranks(torch.tensor(found.pop("sampling")))
        assert found == wanted
        with deepspeed.OnDevice(dtype=torch.float32, device="meta"):
            empty = transformers.AutoModelForCausalLM.from_config(config)
        again = deepspeed.init_inference(empty, dtype="fp32", checkpoint=str(tmp_path))
        assert generated(again, {"greedy": WAYS["greedy"]}) == wanted


def test_streamed_weights_generate_the_same(tmp_path: Path) -> None:
    """Weights from a folder to the swap file and from there to every token, also of int8, and in batches."""
    model = make("llama").eval()
    model.save_pretrained(tmp_path / "model")
    offload = {"device": "nvme", "nvme_path": str(tmp_path)}
    zero = {"stage": 3, "offload_param": offload, "stage3_param_persistence_threshold": 1000}
    for dtype in ("fp32", "int8"):
        wanted = generated(deepspeed.init_inference(make("llama"), dtype=dtype))
        with deepspeed.OnDevice(dtype=torch.float32, device="meta"):
            empty = transformers.AutoModelForCausalLM.from_config(model.config)
        engine = deepspeed.init_inference(empty, dtype=dtype, checkpoint=str(tmp_path / "model"), zero=zero)
        assert engine.streamed is not None and generated(engine) == wanted
    batched = Generator(engine.module, num_blocks=64, max_length=32)
    prompts = [row[row != 0].tolist() for row in left_padded()["input_ids"]]
    plain = Generator(
        deepspeed.init_inference(make("llama"), dtype="int8").module, num_blocks=64, max_length=32
    )
    some = SamplingParams(max_new_tokens=6)
    assert [each.generated for each in batched.generate(prompts, some)] == [
        each.generated for each in plain.generate(prompts, some)
    ]


@distributed(world_size=2)
def test_parts_of_layers_are_streamed(tmp_path: Path) -> None:
    with clean_clients(deepspeed_state=False):
        way = {"greedy": WAYS["greedy"]}
        wanted = generated(make("llama").eval(), way)
        offload = {"device": "nvme", "nvme_path": str(tmp_path)}
        zero = {"stage": 3, "offload_param": offload, "stage3_param_persistence_threshold": 1000}
        engine = deepspeed.init_inference(make("llama"), dtype="fp32", mp_size=2, zero=zero)
        assert engine.streamed is not None and len(engine.streamed.units) >= 2
        assert generated(engine, way) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "qwen2_moe", "bloom", "t5"])
@distributed(world_size=2)
def test_two_ranks_share_the_layers_of_others(name: str) -> None:
    """Fused weights, experts, ALiBi, an encoder and a decoder."""
    check_two_ranks(name)


@distributed(world_size=2)
def test_two_ranks_serve_by_continuous_batching() -> None:
    from deepspeed.inference.generation.generator import Generator
    from deepspeed.inference.scheduling.requests import SamplingParams
    from tests.clients.test_inference import NEW, expected, prompts

    with clean_clients(deepspeed_state=False):
        model = make("llama").eval()
        wanted = expected(model, prompts())
        engine = deepspeed.init_inference(model, dtype="fp32", mp_size=2)
        sizes = {"token_budget": 16, "max_sequences": 4, "block_size": 4, "max_length": 60}
        served = Generator(engine.module, group=engine.mp_group, **sizes)
        params = SamplingParams(max_new_tokens=NEW, stop_token_ids=served.runner.info.stop_token_ids)
        assert [request.tokens for request in served.generate(prompts(), params)] == wanted
        params = SamplingParams(max_new_tokens=4, temperature=1.0)
        drawn = [request.generated for request in served.generate(prompts(), params)]
        assert_same_on_all_ranks(torch.tensor(drawn))
