"""``ds serve``: what it refuses before anything is loaded."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from deepspeed.inference.pretrained import Pretrained
from deepspeed.inference.serving.formats import REASONING_FORMATS, TOOL_FORMATS
from deepspeed.inference.serving.models import ModelError, Models
from deepspeed.inference.serving.tool_requests import Formats
from deepspeed.tools import ds, serve_options
from deepspeed.tools import serve as command
from deepspeed.tools import serve_loading as loading


def test_beyond_this_host_a_token_is_needed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(serve_options.TOKEN_VARIABLE, raising=False)
    assert ds.main(["serve", "model", "--host", "0.0.0.0"]) == 2
    assert "set --token or $DS_SERVE_TOKEN" in capsys.readouterr().err
    monkeypatch.setenv(serve_options.TOKEN_VARIABLE, "secret")
    args = serve_options.parser().parse_args(["model", "--host", "0.0.0.0"])
    assert args.token == "secret" and "reached from other hosts" not in (command.problem_of(args) or "")


def test_a_token_that_clients_cannot_send(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty variable is none, as usual; an empty option was meant to be something."""
    monkeypatch.setenv(serve_options.TOKEN_VARIABLE, "")
    assert serve_options.parser().parse_args(["model"]).token is None
    assert ds.main(["serve", "model", "--host", "0.0.0.0"]) == 2
    assert "set --token or $DS_SERVE_TOKEN" in capsys.readouterr().err
    assert ds.main(["serve", "model", "--token", ""]) == 2
    assert "the token is empty" in capsys.readouterr().err
    for token in ("Schlüssel", "two words", "line\n"):
        monkeypatch.setenv(serve_options.TOKEN_VARIABLE, token)
        assert ds.main(["serve", "model"]) == 2
        assert "$DS_SERVE_TOKEN: the token contains a space or" in capsys.readouterr().err


def test_formats_are_guessed_unless_they_are_named(tmp_path: Path) -> None:
    assert tuple(TOOL_FORMATS) == serve_options.TOOL_CALL_PARSERS
    assert tuple(REASONING_FORMATS) == serve_options.REASONING_PARSERS
    template = "{{ tools }}<tool_call></think>"
    for given, formats in (
        ([], Formats("hermes", "qwen3")),
        (["--tool-call-parser", "none", "--reasoning-parser", "none"], Formats()),
        (
            ["--tool-call-parser", "mistral", "--reasoning-parser", "deepseek_r1"],
            Formats("mistral", "deepseek_r1"),
        ),
    ):
        assert loading.formats_of(serve_options.parser().parse_args(["model", *given]), template) == formats
    (tmp_path / "chat.jinja").write_text("a template")
    assert loading.template_of(str(tmp_path / "chat.jinja")) == "a template"
    assert loading.template_of("{{ messages }}") == "{{ messages }}"
    with pytest.raises(ValueError, match="--chat-template nothing.jinja: No such file"):
        loading.template_of("nothing.jinja")


def test_flags_by_their_names_in_vllm() -> None:
    ours = "--name n --token t --tp-size 2 --token-budget 128 --max-sequences 8 --max-length 99".split()
    theirs = (
        "--served-model-name n --api-key t --tensor-parallel-size 2 --max-num-batched-tokens 128 --max-num-seqs 8 "
        "--max-model-len 99"
    ).split()
    parse = serve_options.parser().parse_args
    assert parse(["model", *ours]) == parse(["model", *theirs])
    assert parse(["model"]).scheduling_policy == "fcfs"
    assert parse(["model", "--scheduling-policy", "priority"]).scheduling_policy == "priority"


def test_a_model_has_the_name_of_its_folder_and_answers_to_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("mine", "a/same", "b/same"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    parse = serve_options.parser().parse_args
    assert parse(["./mine"]).name == parse([str(tmp_path / "mine")]).name == "mine"
    assert parse(["./mine", "--name", "n"]).name == "n" and parse(["org/none"]).name == "org/none"
    assert [one.name for one in parse(["a/same", "--model", "b/same"]).each] == ["a/same", "b/same"]
    assert [one.name for one in parse(["./mine", "--model", "mine=a/same"]).each] == ["./mine", "mine"]
    for adapter in ("mine=folder", json.dumps({"name": "mine", "path": "folder"})):
        assert parse(["./mine", "--lora-modules", adapter]).name == "./mine"
    served = SimpleNamespace(name="mine", path="./mine", service=SimpleNamespace())
    models = Models([served])  # type: ignore[list-item]
    assert models.find("mine") == models.find("./mine") == models.find("") == (served, None)
    with pytest.raises(ModelError, match="no model 'other'; available: 'mine'"):
        models.find("other")


def test_all_missing_packages_are_named_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in command.PACKAGES:  # another test may have imported them
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(command, "find_spec", lambda name: None if name != "transformers" else 1)
    assert ds.main(["serve", "model"]) == 2
    error = capsys.readouterr().err
    assert (
        "missing: fastapi, uvicorn (extras serve): pip install " in error
        and "uvicorn" in error.split("pip")[1]
    )


def test_the_usage_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve_options.parser().parse_args([])
    assert capsys.readouterr().err.startswith("usage: ds serve [options] model\n")


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.LlamaConfig(vocab_size=8, hidden_size=8, num_attention_heads=1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"no tokenizer in {tmp_path}"):
        Pretrained(str(tmp_path)).load_tokenizer()


def test_the_tokens_of_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    def budget(*options: str, **more: int) -> int:
        return loading.token_budget_of(serve_options.parser().parse_args(["model", *options]), **more)

    assert (budget(), budget(on_cpus=512), budget("--max-num-seqs", "100")) == (128, 512, 200)
    assert budget("--max-num-batched-tokens", "48", "--max-num-seqs", "40", on_cpus=512) == 48
    monkeypatch.setattr(type(loading.get_accelerator()), "device_name", lambda self, index=None: "cuda")
    assert budget() == 512


def test_the_size_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    device = loading.get_accelerator()
    monkeypatch.setattr(device, "total_memory", lambda *_: 1000)
    monkeypatch.setattr(device, "available_memory", lambda *_: 700)
    for given, size in (
        ([], None),
        (["--cache-gb", "0.5"], 2**29),
        (["--kv-cache-memory-bytes", "12345"], 12345),
        (["--gpu-memory-utilization", "0.9"], 600),
    ):
        assert loading.cache_bytes_of(serve_options.parser().parse_args(["model", *given])) == size
    with pytest.raises(ValueError, match=r"0.2: 0.30 of the memory is already in use"):
        loading.cache_bytes_of(
            serve_options.parser().parse_args(["model", "--gpu-memory-utilization", "0.2"])
        )


def test_what_does_not_fit_the_model_is_told_before_it_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "1_Pooling" / "config.json"
    file.parent.mkdir()
    for text in ('{"pooling_mode_max_tokens": true}', "[]", "{"):
        file.write_text(text)
        assert ds.main(["serve", str(tmp_path)]) == 2
        told = capsys.readouterr().err
        assert str(file) in told and "set --pooling" in told and told.count("\n") == 1
        args = serve_options.parser().parse_args([str(tmp_path), "--pooling", "mean"])
        assert "Pooling" not in (command.problem_of(args) or "")
    file = tmp_path / "ranks" / "config.json"
    file.parent.mkdir()
    file.write_text('{"architectures": ["Qwen3ForSequenceClassification"]}')
    assert ds.main(["serve", str(file.parent), "--tp-size", "2"]) == 2
    assert "Qwen3ForSequenceClassification runs on one rank" in capsys.readouterr().err
    ngrams = '{"method": "ngram", "num_speculative_tokens": 2}'
    for option, value in (("--lora-modules", "a=folder"), ("--speculative-config", ngrams)):
        assert ds.main(["serve", str(file.parent), option, value]) == 2
        assert f"{option} is for generative models" in capsys.readouterr().err
    draft = f'{{"model": "{file.parent}", "num_speculative_tokens": 2}}'
    assert ds.main(["serve", "model", "--speculative-config", draft]) == 2
    assert "Qwen3ForSequenceClassification is a classifier" in capsys.readouterr().err
    assert ds.main(["serve", "model", "--speculative-config", '{"method": "eagle"}']) == 2
    assert "--speculative-config: " in capsys.readouterr().err
    assert ds.main(["serve", "model", "--tp-size", "2", "--lora-modules", "a=folder"]) == 2
    assert "--lora-modules needs a model on one rank" in capsys.readouterr().err


def test_the_options_of_several_models(tmp_path: Path) -> None:
    """Options of a model apply to the first one; all others apply to every model, unless its own options differ."""
    own = {"name": "c", "model": "./c", "dtype": "fp32", "cache-gb": 2, "lora_modules": ["x=./x"]}
    given = ["./a", "--model", "b=./b", "--model", json.dumps(own), "--max-length", "99", "--cache-gb", "9"]
    of_first = ["--lora-modules", "y=./y", "--pooling", "mean", "--cache-share", "3"]
    args = serve_options.parser().parse_args([*given, *of_first])
    assert [(one.model, one.name, one.dtype, one.max_length) for one in args.each] == [
        ("./a", "./a", "bf16", 99),
        ("./b", "b", "bf16", 99),
        ("./c", "c", "fp32", 99),
    ]
    assert [one.lora_modules for one in args.each] == [["y=./y"], [], ["x=./x"]]
    assert [(one.pooling, one.cache_share, one.cache_gb) for one in args.each] == [
        ("mean", 3, None),
        (None, 1, None),
        (None, 1, 2),
    ]
    file = tmp_path / "serve.json"
    file.write_text(json.dumps({"model": ["a=./a", own], "port": 9000}))
    args = serve_options.parser().parse_args(["--config", str(file), "--dtype", "fp16"])
    assert [(one.name, one.dtype, one.port) for one in args.each] == [
        ("a", "fp16", 9000),
        ("c", "fp32", 9000),
    ]
    for words in (["./d"], ["--model", "d=./d"]):
        args = serve_options.parser().parse_args(["--config", str(file), *words])
        assert [one.model for one in args.each] == ["./d"] == [args.model]
    folder = tmp_path / "with=sign"
    folder.mkdir()
    assert serve_options.parser().parse_args(["--model", str(folder)]).model == str(folder)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (["--model", "{"], "--model { is not JSON"),
        (["--model", '{"name": "a"}'], "'model' is missing (the folder or the name on the hub)"),
        (["--model", '{"model": "a", "port": 1}'], "'port' applies to all models of a server"),
        (["--model", '{"model": "a", "dtpye": "fp32"}'], "'dtpye' is not an option, did you mean 'dtype'?"),
        (["--model", "a=./b"], "the models need different names, not a, a"),
        (["--model", "./b", "--tp-size", "2"], "several models need one rank each: --tp-size 1"),
    ],
)
def test_models_that_are_refused(given: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert ds.main(["serve", "a", *given]) == 2
    except SystemExit as end:
        assert end.code == 2
    assert problem in capsys.readouterr().err


def test_the_caches_of_several_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """By shares, but for a size that a model's own options name, which is taken off first."""
    parse, sizes = serve_options.parser().parse_args, [10**9, 10**9, 10**9]
    given = ["a", "--model", "b", "--model", '{"model": "c", "kv-cache-memory-bytes": 400}']
    total = ["--kv-cache-memory-bytes", "1000"]
    assert loading.cache_parts(parse([*given, *total]), sizes) == [300, 300, 400]
    assert loading.cache_parts(parse([*given, *total, "--cache-share", "5"]), sizes) == [500, 100, 400]
    assert loading.cache_parts(parse([*given, *total]), [100, 10**9, 10**9]) == [100, 500, 400]
    assert loading.cache_parts(parse([*given, *total]), [0, 10**9, 10**9]) == [0, 600, 400]  # scores pairs
    monkeypatch.setattr(loading, "default_cache_bytes", lambda: 700)
    assert loading.cache_parts(parse(given), sizes) == [150, 150, 400]
    monkeypatch.setattr(loading, "default_cache_bytes", lambda: 400)
    with pytest.raises(ValueError, match="a: the caches of other models take the 0.00 GiB"):
        loading.cache_parts(parse(given), sizes)
