"""A folder that lacks weights: no way in leaves them random. Without a head a decoder still gives vectors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

transformers = pytest.importorskip("transformers", reason="the clients extra is not installed")
pytest.importorskip("fastapi", reason="the extra serve is not installed")
testclient = pytest.importorskip("starlette.testclient", reason="httpx is not installed")

import deepspeed  # noqa: E402
from deepspeed.config.problems import DeepSpeedConfigError  # noqa: E402
from deepspeed.inference.model.low_rank import load_adapter  # noqa: E402
from deepspeed.inference.v2.config_v2 import RaggedInferenceEngineConfig  # noqa: E402
from deepspeed.inference.v2.engine_factory import build_hf_engine  # noqa: E402
from deepspeed.tools import serve_options  # noqa: E402
from deepspeed.tools.serve_loading import load  # noqa: E402
from tests.clients.architectures import make  # noqa: E402
from tests.clients.kit import lora  # noqa: E402
from tests.clients.test_cross_encoders import encoder, tokenizer  # noqa: E402
from tests.clients.test_serving import save_model  # noqa: E402

FORMATS = [("safetensors", 1), ("safetensors", 3), ("bin", 1), ("bin", 3)]


def save(model: Any, folder: Path, kind: str = "safetensors", count: int = 1, without: str = "") -> None:
    """Write the config and the weights of ``model``, but for those whose names have ``without``, to ``count`` files."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    state = {name: value for name, value in model.state_dict().items() if not without or without not in name}
    names = list(state)
    stem = "model" if kind == "safetensors" else "pytorch_model"
    files = [f"{stem}-{at}.{kind}" for at in range(count)] if count > 1 else [f"{stem}.{kind}"]
    for at, file in enumerate(files):
        part = {name: state[name] for name in names[at::count]}
        if kind == "safetensors":
            save_file(part, folder / file, {"format": "pt"})
        else:
            torch.save(part, folder / file)
    if count > 1:
        places = {name: files[at % count] for at, name in enumerate(names)}
        index = {"metadata": {}, "weight_map": places}
        (folder / f"{stem}.{kind}.index.json").write_text(json.dumps(index))


def decoder(name: str, **more: Any) -> Any:
    return make(name, vocab_size=256, eos_token_id=None, bos_token_id=None, tie_word_embeddings=False, **more)


def parse(*given: Any) -> Any:
    return serve_options.parser().parse_args([*map(str, given), "--dtype", "fp32", "--max-length", "64"])


@pytest.mark.parametrize(
    ("name", "kind", "count"),
    [("mistral", *FORMATS[0]), ("llama", *FORMATS[1]), ("qwen2", *FORMATS[2]), ("llama", *FORMATS[3])],
)
def test_a_decoder_without_a_head_gives_vectors_only(
    name: str, kind: str, count: int, tmp_path: Path
) -> None:
    save_model(tmp_path)  # for its tokenizer
    (tmp_path / "model.safetensors").unlink()
    model = decoder(name).eval().base_model
    save(model, tmp_path, kind, count)
    loaded = load(parse(tmp_path))
    why = "the model has no lm_head.weight, so it generates no text"  # clients need not know the folder
    assert why in loaded.summary
    services = loaded.services.start()
    try:
        client = testclient.TestClient(loaded.app, base_url="http://127.0.0.1")
        tokens = list(range(3, 12))
        found = client.post("/v1/embeddings", json={"input": [tokens], "normalize": False}).json()
        with torch.no_grad():
            wanted = model(torch.tensor([tokens])).last_hidden_state[0, -1]
        assert found["data"][0]["embedding"] == pytest.approx(wanted.tolist(), abs=1e-4)
        messages = [{"role": "user", "content": "Hi"}]
        for path, body in (
            ("completions", {"prompt": "Hi", "stream": True}),
            ("chat/completions", {"messages": messages}),
            ("responses", {"input": "Hi"}),
        ):
            answer = client.post(f"/v1/{path}", json=body)
            assert answer.status_code == 400 and answer.json()["error"]["message"] == why
        assert client.get("/v1/models").json()["data"][0]["type"] == "embedding"
        assert client.post("/v1/rerank", json={"query": "a", "documents": ["b", "a"]}).status_code == 200
        assert client.get("/").status_code == 404
    finally:
        services.close()
    with pytest.raises(ValueError, match="is for models that generate: .*lm_head"):
        load(parse(tmp_path, "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}'))


@pytest.mark.parametrize(("kind", "count"), FORMATS)
def test_every_way_in_names_what_is_missing(kind: str, count: int, tmp_path: Path) -> None:
    save_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    model, lost = decoder("llama"), "layers.1.self_attn.q_proj.weight"
    config = RaggedInferenceEngineConfig()
    save(model, tmp_path, kind, count, without=lost)
    with pytest.raises(ValueError, match=f"{tmp_path}: .*there are no values for model.{lost}$"):
        load(parse(tmp_path))
    for without in (lost, "lm_head"):
        save(model, tmp_path, kind, count, without=without)
        with pytest.raises(DeepSpeedConfigError, match=f"no values for .*{without}"):
            build_hf_engine(str(tmp_path), config)
        random = decoder("llama")
        with deepspeed.OnDevice(dtype=torch.float32, device="meta"):
            empty = transformers.AutoModelForCausalLM.from_config(model.config)
        for module in (random, empty):
            with pytest.raises(DeepSpeedConfigError, match=f"no values for .*{without}"):
                deepspeed.init_inference(module, dtype=torch.float32, checkpoint=str(tmp_path))
    save(model, tmp_path, kind, count, without="layers.1")
    with pytest.raises(ValueError, match="and 5 more"):
        load(parse(tmp_path))
    save(model, tmp_path, kind, count)
    engine = deepspeed.init_inference(decoder("llama"), dtype=torch.float32, checkpoint=str(tmp_path))
    for (name, given), found in zip(model.named_parameters(), engine.module.parameters(), strict=True):
        assert torch.equal(given, found), name


def test_a_tied_head_is_not_missing(tmp_path: Path) -> None:
    _, known = save_model(tmp_path)
    model = make("llama", vocab_size=256, eos_token_id=None, bos_token_id=None, tie_word_embeddings=True)
    save(model, tmp_path, without="lm_head")
    known.save_pretrained(tmp_path)
    assert "tool calls: none" in load(parse(tmp_path)).summary
    engine = build_hf_engine(str(tmp_path), RaggedInferenceEngineConfig())
    assert torch.equal(engine.model.lm_head.weight, model.lm_head.weight)
    random = make("llama", vocab_size=256, tie_word_embeddings=True)
    found = deepspeed.init_inference(random, dtype=torch.float32, checkpoint=str(tmp_path)).module
    assert torch.equal(found.lm_head.weight, model.lm_head.weight)


def test_a_draft_model_without_a_head_is_refused(tmp_path: Path) -> None:
    _, known = save_model(tmp_path / "model")
    known.save_pretrained(tmp_path / "draft")
    save(decoder("llama").base_model, tmp_path / "draft")
    draft = json.dumps({"model": str(tmp_path / "draft"), "num_speculative_tokens": 2})
    with pytest.raises(ValueError, match="--speculative-config: .*draft: the model has no lm_head.weight"):
        load(parse(tmp_path / "model", "--speculative-config", draft))


@pytest.mark.parametrize(("kind", "count"), FORMATS)
def test_encoders_lack_nothing_that_is_computed(kind: str, count: int, tmp_path: Path) -> None:
    model = encoder("Bert")
    tokenizer().save_pretrained(tmp_path)
    save(model, tmp_path, kind, count)
    assert "which scores pairs of texts" in load(parse(tmp_path)).summary
    for without in ("classifier.bias", "bert.pooler.dense.weight"):
        save(model, tmp_path, kind, count, without=without)
        with pytest.raises(ValueError, match=f"there are no values for {without}$"):
            load(parse(tmp_path))
    save(model.base_model, tmp_path, kind, count, without="pooler")
    assert "which computes embeddings" in load(parse(tmp_path)).summary
    save(model.base_model, tmp_path, kind, count, without="encoder.layer.1.output.dense.weight")
    with pytest.raises(ValueError, match="no values for encoder.layer.1.output.dense.weight"):
        load(parse(tmp_path))


@pytest.mark.parametrize("part", ["lora_A", "lora_B"])
def test_half_an_adapter_is_none(part: str, tmp_path: Path) -> None:
    model = decoder("llama")
    adapted = lora(decoder("llama"))
    adapted.save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    from safetensors.torch import load_file

    tensors = load_file(file)
    lost = next(name for name in tensors if part in name)
    save_file({name: value.clone() for name, value in tensors.items() if name != lost}, file)
    with pytest.raises(ValueError, match="is not supported"):
        load_adapter(model, str(tmp_path))
