"""lm-evaluation-harness against the server gives what it gives with the same weights in Transformers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
pytest.importorskip("fastapi", reason="the extra serve is not installed")
uvicorn = pytest.importorskip("uvicorn", reason="the extra serve is not installed")

import lm_eval  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from deepspeed.tools import serve as command  # noqa: E402
from deepspeed.tools import serve_options  # noqa: E402
from tests.clients.architectures import make  # noqa: E402
from tests.clients.test_serving import save_model  # noqa: E402
from tests.inference.test_service import wait_for  # noqa: E402

LENGTH = 128
ROWS = [
    {"q": "2+2=", "a": ["3", "four", "5"], "l": 1},
    {"q": "the sky is", "a": ["red", "blue as ever", "Grün"], "l": 0},
]
TASKS = {
    "choices": """
output_type: multiple_choice
doc_to_text: "{{q}}"
doc_to_choice: "{{a}}"
doc_to_target: "{{l}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "texts": """
output_type: generate_until
doc_to_text: "{{q}}"
doc_to_target: "{{a[0]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match}]
""",
    "perplexity": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{q}}"
metric_list: [{metric: bits_per_byte}]
""",
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> TaskManager:
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, ROWS)))
    for name, rest in TASKS.items():
        (folder / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\n"
            f"test_split: test\n{rest}"
        )
    return TaskManager(include_path=str(folder), include_defaults=False)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any, Path, str]]:
    """A model of Transformers with its tokenizer, their folder, and the address of a server of it."""
    folder = tmp_path_factory.mktemp("model")
    _, tokenizer = save_model(folder)
    tokenizer.add_special_tokens({"eos_token": "<end>", "pad_token": "<pad>"})
    model = make("llama", vocab_size=260, eos_token_id=256, bos_token_id=None).eval()
    for each in (model, tokenizer):
        each.save_pretrained(folder)
    arguments = [str(folder), "--dtype", "fp32", "--max-length", str(LENGTH), "--max-sequences", "8"]
    arguments += ["--name", "tiny"]
    loaded = command.load(serve_options.parser().parse_args(arguments))
    services = loaded.services.start()
    running = uvicorn.Server(uvicorn.Config(loaded.app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    wait_for(lambda: running.started)
    port = running.servers[0].sockets[0].getsockname()[1]
    yield model, tokenizer, folder, f"http://127.0.0.1:{port}"
    running.should_exit = True
    thread.join(30)
    services.close()


def answers(
    manager: TaskManager, model: str, arguments: dict[str, Any], names: list[str], **more: Any
) -> Any:
    """For each task the harness's metrics, and what the model answered to each of its requests."""
    found = lm_eval.simple_evaluate(
        model=model,
        model_args={"max_length": LENGTH, **arguments},
        tasks=names,
        task_manager=manager,
        bootstrap_iters=0,
        **more,
    )
    responses = {name: [each["resps"] for each in found["samples"][name]] for name in names}
    metrics = {
        (task, name): float(value)
        for task, values in found["results"].items()
        for name, value in values.items()
        if name.endswith(",none") and "stderr" not in name
    }
    return metrics, responses


def flat(responses: Any) -> list[Any]:
    return (
        [each for part in responses for each in flat(part)]
        if isinstance(responses, (list, tuple))
        else [responses]
    )


def test_completions_score_as_transformers_does(served: Any, tasks: TaskManager) -> None:
    model, tokenizer, folder, address = served
    names = list(TASKS)
    metrics, wanted = answers(tasks, "hf", {"pretrained": model, "tokenizer": tokenizer}, names)
    # With its own tokenizer it sends tokens; with the server's ("remote") it has to ask for them first.
    for backend, batch in (("huggingface", 4), ("remote", 1)):
        arguments = {
            "base_url": f"{address}/v1/completions",
            "model": "tiny",
            "tokenizer": str(folder),
            "tokenizer_backend": backend,
            "batch_size": batch,
        }
        found_metrics, found = answers(tasks, "local-completions", arguments, names)
        assert found_metrics == pytest.approx(metrics, rel=1e-5)
        for name in names:
            assert flat(found[name]) == [
                pytest.approx(each, abs=1e-4) if isinstance(each, float) else each
                for each in flat(wanted[name])
            ]


def test_chats_answer_as_transformers_does(served: Any, tasks: TaskManager) -> None:
    model, tokenizer, _, address = served
    local = {"pretrained": model, "tokenizer": tokenizer}
    wanted = answers(tasks, "hf", local, ["texts"], apply_chat_template=True)
    arguments = {"base_url": f"{address}/v1/chat/completions", "model": "tiny"}
    found = answers(tasks, "local-chat-completions", arguments, ["texts"], apply_chat_template=True)
    assert found == wanted
