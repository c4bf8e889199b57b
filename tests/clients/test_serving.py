"""``ds serve`` on a saved model of Transformers, with its tokenizer, asked by a real client."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the clients extra is not installed")
pytest.importorskip("fastapi", reason="the extra serve is not installed")
uvicorn = pytest.importorskip("uvicorn", reason="the extra serve is not installed")

from deepspeed.inference.serving.tokenizers import HuggingFaceTokenizer  # noqa: E402
from deepspeed.tools import plan, serve_options  # noqa: E402
from deepspeed.tools import serve as command  # noqa: E402
from deepspeed.tools import serve_loading as loading  # noqa: E402
from tests.clients.architectures import make  # noqa: E402
from tests.inference.test_service import wait_for  # noqa: E402

TEMPLATE = "{% for each in messages %}<{{ each.role }}>{{ each.content }}{% endfor %}<assistant>"


def save_model(folder: Path) -> tuple[Any, Any]:
    """A tiny model and a tokenizer of single bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={each: at for at, each in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    raw.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, chat_template=TEMPLATE)
    model = make("llama", vocab_size=256, eos_token_id=None, bos_token_id=None).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


@pytest.mark.parametrize(
    "guesses", [None, '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 1}']
)
def test_a_saved_model_answers(guesses: str | None, tmp_path: Path) -> None:
    model, tokenizer = save_model(tmp_path)
    more = ["--speculative-config", guesses] if guesses else []
    args = serve_options.parser().parse_args(
        [str(tmp_path), "--dtype", "fp32", "--max-length", "64", "--max-sequences", "4", *more]
    )
    assert command.problem_of(args) is None
    loaded = command.load(args)
    weights = sum(each.nbytes for each in model.parameters()) / 2**30
    assert f", weights {weights:.2f} GiB and key-value cache " in loaded.summary
    services = loaded.services.start()
    running = uvicorn.Server(uvicorn.Config(loaded.app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    wait_for(lambda: running.started)
    port = running.servers[0].sockets[0].getsockname()[1]

    def post(path: str, body: Any) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("POST", path, json.dumps({**body, "max_tokens": 12, "temperature": 0}))
        answer = connection.getresponse()
        assert answer.status == 200
        return json.loads(answer.read())["choices"][0]

    def wanted(prompt: str) -> str:
        return greedy_text(model, tokenizer, prompt, 12)

    try:
        assert post("/v1/completions", {"prompt": "Grüße"})["text"] == wanted("Grüße")
        messages = [{"role": "user", "content": "Hi"}]
        found = post("/v1/chat/completions", {"messages": messages})
        assert found["message"]["content"] == wanted("<user>Hi<assistant>")
        accepted = re.findall(r"^deepspeed_accepted_tokens{.*} (\d+)$", services.metrics(), re.M)
        assert (accepted != ["0"]) == bool(guesses)
    finally:
        running.should_exit = True
        thread.join(30)
        services.close()


@pytest.mark.slow
def test_answers_that_were_begun_are_finished_after_sigterm(tmp_path: Path) -> None:
    save_model(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [str(tmp_path), "--dtype", "fp32", "--max-length", "2000", "--port", str(port)]
    server = subprocess.Popen(
        [sys.executable, "-m", "deepspeed.tools.serve", *arguments], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    try:
        # Accepts requests as soon as it says so, on one line.
        line = server.stdout.readline()
        for words in (
            f"ready at http://127.0.0.1:{port}: model {tmp_path.name}, weights ",
            "/v1/chat/completions",
        ):
            assert words in line
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("POST", "/v1/completions", json.dumps({"prompt": "Hi", "max_tokens": 500}))
        time.sleep(0.3)
        server.send_signal(signal.SIGTERM)
        answer = connection.getresponse()
        assert answer.status == 200 and json.loads(answer.read())["usage"]["completion_tokens"] == 500
        # Now there is no open request.
        began = time.monotonic()
        assert server.wait(60) == 0
        assert time.monotonic() - began < 2
        assert server.stdout.read() == ""
    finally:
        server.kill()


def test_tokens_that_decode_leaves_out(tmp_path: Path) -> None:
    """Also special tokens without a role; not tokens that were added and are shown."""
    from tokenizers import Tokenizer, models

    raw = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    raw.add_tokens(["<think>"])
    raw.add_special_tokens(["<|im_end|>", "<|other|>"])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>")
    assert HuggingFaceTokenizer(fast).specials == {3: "<|im_end|>", 4: "<|other|>"}


@pytest.mark.parametrize("name", ["./no-model", "/no/such/model", "runs/7/model"])
def test_a_folder_that_is_not_there(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([name]) == 2
    assert capsys.readouterr().err == f"ds serve: {name}: no such folder\n"
    config = tmp_path / "config.json"
    config.write_text('{"train_batch_size": 1}')
    assert plan.main(["--model", name, str(config)]) == 2
    assert f"--model {name}: no such folder\n" in capsys.readouterr().err


def test_several_models_of_one_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its own tokens, cache and adapters, and its config is read once."""
    models = {name: save_model(tmp_path / name) for name in ("a", "b")}
    other = make("qwen2", vocab_size=256, eos_token_id=None, bos_token_id=None).eval()
    other.save_pretrained(tmp_path / "b")
    models["b"] = other, models["b"][1]
    own = {"name": "b", "model": str(tmp_path / "b"), "max-length": 32, "cache-share": 3}
    given = ["--model", f"a={tmp_path / 'a'}", "--model", json.dumps(own), "--dtype", "fp32"]
    sizes = ["--max-length", "64", "--kv-cache-memory-bytes", "65536"]
    read: list[str] = []
    usual = transformers.AutoConfig.from_pretrained

    def noted(name: str, *args: Any, **kwargs: Any) -> Any:
        read.append(Path(name).name)
        return usual(name, *args, **kwargs)

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", noted)
    loaded = command.load(serve_options.parser().parse_args([*given, *sizes]))
    assert sorted(read) == ["a", "b"]
    services = loaded.services.start()
    try:
        blocks = dict(re.findall(r'^deepspeed_blocks{model_name="(.)"} (\d+)', services.metrics(), re.M))
        size = {name: block_bytes_of(model) for name, (model, _) in models.items()}
        assert blocks == {"a": str(16384 // size["a"]), "b": str(49152 // size["b"])}
        with httpx_of(loaded.app) as client:
            listed = client.get("/v1/models").json()["data"]
            assert [(each["id"], each["max_model_len"]) for each in listed] == [("a", 64), ("b", 32)]
            for name, (model, tokenizer) in models.items():
                body = {"model": name, "prompt": "Grüße", "max_tokens": 12, "temperature": 0}
                found = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
                assert found == greedy_text(model, tokenizer, "Grüße", 12)
    finally:
        services.close(drain=False)


def test_models_that_do_not_fit_are_refused_before_one_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = save_model(tmp_path / "a")
    monkeypatch.setattr(
        transformers.AutoModelForCausalLM, "from_pretrained", lambda **_: pytest.fail("loaded")
    )
    weights = sum(each.nbytes for each in model.parameters())
    cache = 64 * block_bytes_of(model) // 16
    device = loading.get_accelerator()
    given = [str(tmp_path / "a"), "--model", f"b={tmp_path / 'a'}", "--dtype", "fp32", "--max-length", "64"]
    for sizes, needed in (([], cache), (["--kv-cache-memory-bytes", "10000000"], 5_000_000)):
        args = serve_options.parser().parse_args([*given, *sizes])
        monkeypatch.setattr(device, "available_memory", lambda needed=needed: 2 * (weights + needed) - 1)
        with pytest.raises(
            ValueError, match="GiB are needed, but only .* GiB of memory are free .*--dtype int8"
        ):
            command.load(args)
        monkeypatch.setattr(device, "available_memory", lambda needed=needed: 2 * (weights + needed))
        with pytest.raises(pytest.fail.Exception, match="loaded"):
            command.load(args)
    with pytest.raises(ValueError, match=r"nowhere: no such folder"):
        command.load(serve_options.parser().parse_args([*given, "--model", f"c={tmp_path / 'nowhere'}"]))


def block_bytes_of(model: Any) -> int:
    """Of a block of 16 tokens in fp32."""
    config = model.config
    size = config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * config.num_key_value_heads * size * 4 * 16


def httpx_of(app: Any) -> Any:
    from starlette.testclient import TestClient

    return TestClient(app, base_url="http://127.0.0.1")


def greedy_text(model: Any, tokenizer: Any, prompt: str, tokens: int) -> str:
    ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False)])
    settings = transformers.GenerationConfig(max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return tokenizer.decode(model.generate(ids, generation_config=settings)[0, ids.shape[1] :])
