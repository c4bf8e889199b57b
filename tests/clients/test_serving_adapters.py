"""PEFT adapters of a served model: each request gets the numbers that PEFT computes with its adapter."""

from __future__ import annotations

import copy
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

peft = pytest.importorskip("peft", reason="the clients extra is not installed")
pytest.importorskip("fastapi", reason="the extra serve is not installed")

from deepspeed.inference.generation.generator import Generator  # noqa: E402
from deepspeed.inference.model.low_rank import adaptable_layers, load_adapter  # noqa: E402
from deepspeed.inference.scheduling.requests import SamplingParams  # noqa: E402
from deepspeed.inference.serving.models import ModelError, Models  # noqa: E402
from deepspeed.inference.serving.service import Service  # noqa: E402
from tests.clients.architectures import make  # noqa: E402
from tests.inference.standin import Bytes, Parrot, served  # noqa: E402
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
    size = generator.runner.info.vocab_size
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
        ("other", "is for another layer"),
        ("dora", "use_dora"),
        ("saves", "modules_to_save"),
        ("none", "is not an adapter folder"),
    ):
        with pytest.raises(ValueError, match=words):
            load_adapter(module, str(tmp_path / folder))


def changed(source: Path, folder: Path, **config: Any) -> Any:
    """Copy an adapter with other settings; return its weights and what writes them."""
    shutil.copytree(source, folder)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    weights = load_file(folder / "adapter_model.safetensors")
    return weights, lambda: save_file(weights, folder / "adapter_model.safetensors")


def test_adapters_that_would_fail_later_are_refused(tmp_path: Path) -> None:
    """When they are loaded: a request that they fail in ends the generator, for all its clients."""
    module = make("llama").eval()
    saved(module, tmp_path / "good", "llama", 1)
    for name, change, words in (
        ("rank", lambda key, each: each[:, :-1].contiguous() if "lora_B" in key else each, r"\[rank, "),
        ("empty", lambda key, each: each[:0] if "lora_A" in key else each[:, :0].contiguous(), r"\[rank, "),
        ("flat", lambda key, each: each.flatten(), r"\[rank, "),
        ("scalar", lambda key, each: torch.tensor(1.0), r"\[rank, "),
        ("nan", lambda key, each: each * float("nan"), "not finite"),
    ):
        weights, write = changed(tmp_path / "good", tmp_path / name)
        weights.update({key: change(key, each) for key, each in weights.items()})
        write()
        with pytest.raises(ValueError, match=words):
            load_adapter(module, str(tmp_path / name))
    for name, alpha in (("text", "16"), ("missing", None), ("list", [1])):
        changed(tmp_path / "good", tmp_path / name, lora_alpha=alpha)
        with pytest.raises(ValueError, match=f"{name}: lora_alpha="):
            load_adapter(module, str(tmp_path / name))
    for name, value in (("init_lora_weights", "pissa_niter_4"), ("alora_invocation_tokens", [5])):
        changed(tmp_path / "good", tmp_path / name, **{name: value})
        with pytest.raises(ValueError, match=f"{name}: {name}="):
            load_adapter(module, str(tmp_path / name))
    for text in ("[]", "{", "1"):
        (tmp_path / "list" / "adapter_config.json").write_text(text)
        with pytest.raises(ValueError, match="list/adapter_config.json"):
            load_adapter(module, str(tmp_path / "list"))


class Routed(torch.nn.Module):
    """In place of an MLP: a layer that computes some of the tokens, by another name than experts have."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.shared, self.some = mlp, torch.nn.Linear(mlp.hidden_size, mlp.hidden_size)
        self.experts = torch.nn.ModuleList([torch.nn.Linear(mlp.hidden_size, mlp.hidden_size)])

    def forward(self, hidden: Any) -> Any:
        made = self.shared(self.experts[0](hidden))
        return torch.cat([made[:, :-1], self.some(hidden[:, -1:])], dim=1)


def test_layers_that_do_not_compute_every_token() -> None:
    module = make("llama").eval()
    layer = module.model.layers[0]
    layer.mlp = Routed(layer.mlp)
    found = adaptable_layers(module)
    assert layer.mlp.some not in found and layer.mlp.experts[0] not in found and module.lm_head not in found
    assert {layer.self_attn.q_proj, layer.mlp.shared.down_proj} <= found
    assert not any(each._forward_hooks for each in module.modules())


def test_an_adapter_does_not_depend_on_its_file(tmp_path: Path) -> None:
    """Dtype and device are those of the file, so that nothing else is copied."""
    module = make("llama").eval()
    saved(module, tmp_path / "a", "llama", 1)
    adapter = load_adapter(module, str(tmp_path / "a"))
    before = {layer: down.clone() for layer, (down, _) in adapter.layers.items()}
    file = tmp_path / "a" / "adapter_model.safetensors"
    with file.open("r+b") as target:
        target.seek(-file.stat().st_size // 2, 2)
        target.write(b"\0" * (file.stat().st_size // 2))
    assert all(torch.equal(adapter.layers[layer][0], each) for layer, each in before.items())


def test_names(tmp_path: Path) -> None:
    def load(folder: str) -> str:
        return f"adapter of {folder}"

    models = Models([served(Service(Parrot()), name="base", load_adapter=load)])
    models.add("a", "/folder")
    assert (
        models.find("a")[1] == "adapter of /folder" and models.find("")[1] is models.find("base")[1] is None
    )
    listed = {each["id"]: (each["root"], each["parent"]) for each in models.described()}
    assert listed == {"base": ("base", None), "a": ("/folder", "base")}
    for name in ("", "a", "base"):
        with pytest.raises(ValueError, match="taken|empty"):
            models.add(name, "/other")
    models.add("a", "/other", anew=True)
    assert models.find("a")[1] == "adapter of /other"
    models.remove("a")
    for call in (models.find, models.remove, models.one):
        with pytest.raises(ModelError):
            call("a")
    with pytest.raises(ValueError, match="does not support adapters"):
        Models([served(Service(Parrot()))]).add("a", "/folder")


def test_adapters_over_http(tmp_path: Path) -> None:
    module = make("llama", vocab_size=260).eval()
    with_adapter = saved(module, tmp_path / "a", "llama", 1)
    generator: Any = Generator(module, token_budget=64, max_sequences=4, max_length=64, num_blocks=64)
    load_one = partial(load_adapter, module, adaptable=adaptable_layers(module))
    known = {"Authorization": "Bearer secret"}
    body = {"prompt": list(b"Hello"), "max_tokens": 4, "temperature": 0, "logprobs": 0, "ignore_eos": True}
    with server(
        generator, tokenizer=Bytes(), max_length=64, load_adapter=load_one, token="secret"
    ) as running:

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
