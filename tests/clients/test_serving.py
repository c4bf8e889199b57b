"""``ds serve`` on a saved model of Transformers, with its tokenizer, asked by a real client."""

from __future__ import annotations

import http.client
import json
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

from deepspeed.inference.serving.app import ServerSettings, make_app  # noqa: E402
from deepspeed.inference.serving.tokenizers import HuggingFaceTokenizer  # noqa: E402
from deepspeed.tools import plan, serve_options  # noqa: E402
from deepspeed.tools import serve as command  # noqa: E402
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
    service, own, generator, leads = command.build(args)
    assert leads and command.problem_of(args) is None
    weights = sum(each.nbytes for each in model.parameters()) / 2**30
    assert command.memory_line(generator).startswith(f"weights {weights:.2f} GiB and key-value cache ")
    settings = ServerSettings(
        model="tiny", max_length=64, stop_token_ids=generator.runner.facts.stop_token_ids
    )
    running = uvicorn.Server(
        uvicorn.Config(make_app(service.start(), own, settings), host="127.0.0.1", port=0, log_level="error")
    )
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
        ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False)])
        settings = transformers.GenerationConfig(max_new_tokens=12, do_sample=False, pad_token_id=0)
        return tokenizer.decode(model.generate(ids, generation_config=settings)[0, ids.shape[1] :])

    try:
        assert post("/v1/completions", {"prompt": "Grüße"})["text"] == wanted("Grüße")
        messages = [{"role": "user", "content": "Hi"}]
        found = post("/v1/chat/completions", {"messages": messages})
        assert found["message"]["content"] == wanted("<user>Hi<assistant>")
        assert bool(generator.counts.accepted_tokens) == bool(guesses)
    finally:
        running.should_exit = True
        thread.join(30)
        service.close()


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
            f"ready at http://127.0.0.1:{port}: model {tmp_path}, weights ",
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
