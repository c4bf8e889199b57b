"""Adapters of PEFT beside a model that is served: each request has the numbers that PEFT gives with its own."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

peft = pytest.importorskip("peft", reason="the clients extra is not installed")
pytest.importorskip("fastapi", reason="the extra serve is not installed")

from deepspeed.inference.generation.generator import Generator  # noqa: E402
from deepspeed.inference.model.low_rank import load_adapter  # noqa: E402
from deepspeed.inference.scheduling.requests import SamplingParams  # noqa: E402
from deepspeed.inference.serving.models import ModelError, Models  # noqa: E402
from tests.clients.architectures import make  # noqa: E402
from tests.inference.standin import Bytes  # noqa: E402
from tests.inference.test_http import server  # noqa: E402

TARGETS = {
    "llama": ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"],
    "gpt2": ["c_attn", "c_fc"],
    "bloom": ["query_key_value", "dense_h_to_4h"],
}


def saved(module: Any, folder: Path, kind: str, seed: int, **more: Any) -> Any:
    """An adapter of random weights in ``folder``, and the model with it, as PEFT runs it."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(
        r=4 + seed, lora_alpha=16, target_modules=TARGETS[kind], task_type="CAUSAL_LM", **more
    )
    made = peft.get_peft_model(copy.deepcopy(module), config)
    for name, param in made.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(param, std=0.2)
    made.save_pretrained(str(folder))
    return made.eval()


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("kind", list(TARGETS))
def test_requests_of_one_batch_have_their_own_adapters(kind: str, tmp_path: Path) -> None:
    """In the fused, the packed and the padded layout; the cache of one adapter is not another's."""
    module = make(kind).eval()
    models = [
        module,
        saved(module, tmp_path / "a", kind, 1),
        saved(module, tmp_path / "b", kind, 2, use_rslora=True),
    ]
    adapters = [None, load_adapter(module, str(tmp_path / "a")), load_adapter(module, str(tmp_path / "b"))]
    generator = Generator(
        module, token_budget=24, max_sequences=6, num_blocks=64, block_size=4, max_length=48
    )
    size = generator.runner.facts.vocab_size
    prompts = [[(3 + 7 * at) % size for at in range(length)] for length in (18, 18, 5)]
    pairs = [(prompt, which) for prompt in prompts for which in (0, 1, 2)]
    expected = [greedy(models[which], prompt, 6) for prompt, which in pairs]
    assert len({tuple(each) for each in expected[:3]}) > 1  # the adapters change the answer
    params = [SamplingParams(max_new_tokens=6, adapter=adapters[which]) for _, which in pairs]
    found = generator.generate([prompt for prompt, _ in pairs], params)
    assert [each.generated for each in found] == expected
    assert generator.counts.shared_tokens > 0
    # One after another, beginnings are found in the cache, and only an adapter's own.
    for (prompt, _), one, wanted in zip(pairs, params, expected, strict=True):
        assert generator.generate([prompt], one)[0].generated == wanted
    pooled = SamplingParams(max_new_tokens=0, pooling="mean", adapter=adapters[1])
    with torch.no_grad():
        states = models[1].get_base_model().base_model(torch.tensor([prompts[0]])).last_hidden_state[0]
    assert torch.allclose(generator.generate([prompts[0]], pooled)[0].pooled, states.mean(0), atol=1e-4)
    assert not any(layer._forward_hooks for layer in module.modules())


def test_adapters_that_are_refused(tmp_path: Path) -> None:
    module = make("llama").eval()
    other = make("llama", hidden_size=64).eval()
    saved(other, tmp_path / "other", "llama", 1)
    saved(module, tmp_path / "dora", "llama", 1, use_dora=True)
    saved(module, tmp_path / "saves", "llama", 1, modules_to_save=["lm_head"])
    for folder, words in (
        ("other", "is for"),
        ("dora", "use_dora"),
        ("saves", "modules_to_save"),
        ("none", "no folder"),
    ):
        with pytest.raises(ValueError, match=words):
            load_adapter(module, str(tmp_path / folder))


def test_names(tmp_path: Path) -> None:
    models = Models("base", 100, lambda folder: f"adapter of {folder}")
    models.add("a", "/folder")
    assert models.find("a") == "adapter of /folder" and models.find("") is models.find("base") is None
    listed = {each["id"]: (each["root"], each["parent"]) for each in models.described()}
    assert listed == {"base": ("base", None), "a": ("/folder", "base")}
    for name in ("", "a", "base"):
        with pytest.raises(ValueError, match="taken|empty"):
            models.add(name, "/other")
    models.add("a", "/other", anew=True)
    assert models.find("a") == "adapter of /other"
    models.remove("a")
    for call in (models.find, models.remove, models.one):
        with pytest.raises(ModelError):
            call("a")
    with pytest.raises(ValueError, match="takes no adapters"):
        Models("base", 100).add("a", "/folder")


def test_adapters_over_http(tmp_path: Path) -> None:
    module = make("llama", vocab_size=260).eval()
    with_adapter = saved(module, tmp_path / "a", "llama", 1)
    generator: Any = Generator(module, token_budget=64, max_sequences=4, max_length=64, num_blocks=64)
    models = Models("parrot", 64, lambda folder: load_adapter(module, folder))
    known = {"Authorization": "Bearer secret"}
    body = {"prompt": list(b"Hello"), "max_tokens": 4, "temperature": 0, "logprobs": 0, "ignore_eos": True}
    with server(generator, tokenizer=Bytes(), max_length=64, models=models, token="secret") as running:

        def load(**fields: Any) -> tuple[int, Any]:
            return running.post(fields, "/v1/load_lora_adapter", **known)

        assert running.post({**body, "model": "mine"}, **known)[0] == 404
        assert running.post({}, "/v1/load_lora_adapter")[0] == 401
        assert load(lora_name="mine", lora_path=str(tmp_path))[0] == 400
        assert load(lora_name="mine")[0] == 400
        status, text = load(lora_name="mine", lora_path=str(tmp_path / "a"))
        assert status == 200 and "added successfully" in text
        assert load(lora_name="mine", lora_path=str(tmp_path / "a"))[0] == 400
        assert load(lora_name="mine", lora_path=str(tmp_path / "a"), load_inplace=True)[0] == 200
        listed = running.call("GET", "/v1/models", **known)[1]["data"]
        assert [each["id"] for each in listed] == ["parrot", "mine"] and listed[1]["parent"] == "parrot"
        for name, model in (("mine", with_adapter), ("parrot", module)):
            status, found = running.post({**body, "model": name}, **known)
            assert status == 200 and found["model"] == name
            expected = bytes(greedy(model, body["prompt"], 4)).decode(errors="replace")
            assert found["choices"][0]["text"] == expected
        assert running.post({"lora_name": "mine"}, "/v1/unload_lora_adapter", **known)[0] == 200
        assert running.post({"lora_name": "mine"}, "/v1/unload_lora_adapter", **known)[0] == 404
        assert running.post({**body, "model": "mine"}, **known)[0] == 404
    with server() as running:
        assert running.post({"lora_name": "a", "lora_path": "/"}, "/v1/load_lora_adapter")[0] == 403
