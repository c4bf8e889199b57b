"""The deepspeed-mii package on our engine: a pipeline, alone and over two ranks, and a server with its client.

The package calls ``torch.cuda.synchronize`` whatever the device; where torch has no CUDA, the processes here start with
that call emptied, and nothing else.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the clients extra is not installed")
for needed in ("grpc", "google.protobuf", "zmq", "ujson", "requests", "flask_restful"):
    pytest.importorskip(needed, reason="the clients extra is not installed")
if importlib.util.find_spec("mii") is None:
    pytest.skip("deepspeed-mii is not installed", allow_module_level=True)

from tests.clients.test_serving import save_model  # noqa: E402
from tests.pool import free_port  # noqa: E402
from tests.tools.launcher.programs import COMMAND, environment  # noqa: E402

PROMPTS = ["hello world", "a"]
NEW_TOKENS = 6
DEEPSPEED = Path(sys.executable).parent / "deepspeed"  # the server starts it by name
PIPELINE = f"""
import json, mii
answers = mii.pipeline("model")({PROMPTS}, max_new_tokens={NEW_TOKENS}, do_sample=False, ignore_eos=True)
if answers:
    json.dump([each.generated_text for each in answers], open("answers.json", "w"))
"""
SERVER = f"""
import json, os, mii
a, b, c = (int(os.environ[name]) for name in "ABC")
ports = dict(port_number=a, torch_dist_port=b, zmq_port_number=c)
client = mii.serve("model", deployment_name="tested", **ports)
settings = dict(max_new_tokens={NEW_TOKENS}, do_sample=False, ignore_eos=True)
try:
    whole = [each.generated_text for each in client.generate({PROMPTS}, **settings)]
    pieces = []
    client.generate({PROMPTS}[:1], streaming_fn=lambda told: pieces.append(told[0].generated_text), **settings)
finally:
    client.terminate_server()
json.dump([whole, pieces], open("answers.json", "w"))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mii")
    model, tokenizer = save_model(folder / "model")
    tokenizer.add_special_tokens({"eos_token": "a", "pad_token": "b"})
    tokenizer.save_pretrained(folder / "model")
    (folder / "sitecustomize.py").write_text(
        "import torch\nif not torch.backends.cuda.is_built():\n    torch.cuda.synchronize = lambda *device: None\n"
    )
    wanted = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.no_grad():
            made = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
        wanted.append(tokenizer.decode(made[0, ids.shape[1] :]))
    (folder / "wanted.json").write_text(json.dumps(wanted))
    return folder


def run(folder: Path, command: list[str], script: str, **variables: str) -> list:
    (folder / "script.py").write_text(script)
    (folder / "answers.json").unlink(missing_ok=True)
    paths = {"PYTHONPATH": f"{folder}:{environment()['PYTHONPATH']}", "HF_HUB_OFFLINE": "1"}
    paths["PATH"] = f"{DEEPSPEED.parent}:{os.environ['PATH']}"
    ended = subprocess.run(
        [*command, "script.py"],
        cwd=folder,
        env=environment(**paths, HOME=str(folder), MII_CACHE_PATH=str(folder / "cache"), **variables),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads((folder / "answers.json").read_text())


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_pipeline_gives_the_tokens_of_generate(folder: Path, ranks: int) -> None:
    command = (
        [sys.executable] if ranks == 1 else [*COMMAND, "--num_gpus", "2", "--master_port", str(free_port())]
    )
    assert run(folder, command, PIPELINE) == json.loads((folder / "wanted.json").read_text())


@pytest.mark.skipif(not DEEPSPEED.exists(), reason="the package's commands are not installed")
def test_a_server_and_its_client(folder: Path) -> None:
    wanted = json.loads((folder / "wanted.json").read_text())
    ports = {name: str(free_port()) for name in "ABC"}
    whole, pieces = run(folder, [sys.executable], SERVER, **ports)
    assert whole == wanted
    assert "".join(pieces) == wanted[0].rstrip("\N{REPLACEMENT CHARACTER}")  # half a character is not sent
