"""The examples with client libraries, each in a short form: it runs, and what it prints is what it promises."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests import forked
from tests.tools.launcher.programs import COMMAND, REPOSITORY, environment

for client in ("transformers", "accelerate", "peft", "trl", "lightning"):
    pytest.importorskip(client, reason="the clients extra is not installed")

OUR_LINE = re.compile(r"^\[\d{4}-\d\d-\d\d [^]]*\] \[([A-Z]+)\] ", re.MULTILINE)  # of the logger "DeepSpeed"
SECONDS = 180  # what a short form may take


def numbers(pattern: str, text: str) -> list[float]:
    found = re.search(pattern, text)
    assert found, f"no {pattern!r} in:\n{text}"
    return [float(group.replace(",", "")) for group in found.groups()]


def trainer_shows(text: str, ranks: int) -> None:
    reached, alone = numbers(r"evaluation loss (\S+) nats per byte; byte frequencies alone reach (\S+)", text)
    assert reached < 1.2 * alone
    straight, resumed = numbers(r"straight through (\S+), resumed half-way (\S+)", text)
    assert straight == resumed
    assert numbers(r"saved whole: (\S+) parameters", text)[0] > 500_000


def loop_shows(text: str, ranks: int) -> None:
    lines = re.findall(r"stage (\d): loss (\S+) -> (\S+); from the saved state: equal = (\w+)", text)
    assert [line[0] for line in lines] == ["0", "3"] and all(line[3] == "True" for line in lines)
    assert lines[0][1] == lines[1][1] and float(lines[0][2]) < 0.5 * float(lines[0][1])
    assert abs(float(lines[0][2]) - float(lines[1][2])) < 1e-3


def lora_shows(text: str, ranks: int) -> None:
    first, last = numbers(r"loss (\S+) -> (\S+) in", text)
    whole, trained, held = numbers(r"parameters: (\S+), trained (\S+); this rank's slices hold (\S+)", text)
    assert last < first and trained < 0.1 * whole and held <= whole / ranks * 1.01
    assert "base unchanged: True" in text


def module_shows(text: str, ranks: int) -> None:
    first, last = numbers(r"loss (\S+) -> (\S+) in", text)
    (converted,) = numbers(r"converted to one file and loaded: loss (\S+)", text)
    assert last < 0.5 * first and converted < 0.5 * first


def preferences_show(text: str, ranks: int) -> None:
    first, last = numbers(r"loss (\S+) \(ln 2 = 0.6931\) -> (\S+)", text)
    begin, end = numbers(r"margin (\S+) -> (\S+)", text)
    assert abs(first - 0.6931) < 1e-3 and last < first and end > begin


def parts_show(text: str, ranks: int, *, tensors_are_split: bool = True) -> None:
    first, last = numbers(r"loss (\S+) -> (\S+) in", text)
    whole, held = numbers(r"parameters: (\S+); this rank holds (\S+)", text)
    joined, split = numbers(r"saved and loaded on one rank: loss (\S+), here (\S+)", text)
    assert last < 0.8 * first and abs(joined - split) < 1e-4
    assert held < 0.8 * whole if tensors_are_split else held == whole


def few_bits_show(text: str, ranks: int) -> None:
    first, last = numbers(r"loss (\S+) -> (\S+) in", text)
    values, held = numbers(r"base: (\S+) values; this rank holds (\S+) bytes", text)
    apart = numbers(r"merged model: logits (\S+) apart", text)[0]
    assert last < first - 0.1 and held <= 1.03 * values / 2 and apart < 1e-4


def memory_shows(text: str, ranks: int) -> None:
    first, last = numbers(r"tokens: loss (\S+) -> (\S+) in", text)
    without = numbers(r"without tiles: loss (\S+) -> (\S+)", text)
    assert last < first and abs(first - without[0]) < 1e-3 and abs(last - without[1]) < 1e-3
    needed, plain = numbers(r"a step needs (\S+) MiB, without tiles (\S+) MiB", text)
    assert needed < 0.5 * plain


def pattern_shows(text: str, ranks: int) -> None:
    dense = numbers(r"dense:  loss (\S+) -> (\S+),", text)
    sparse = numbers(r"sparse: loss (\S+) -> (\S+),", text)
    assert sparse[-1] < sparse[0] and abs(sparse[0] - dense[0]) < 0.02 and sparse != dense


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
OURS = [*COMMAND[1:], "--num_gpus", "2"]

EXAMPLES: dict[str, tuple[list[str], list[str], Callable[[str, int], None]]] = {
    "hf_trainer": ([], ["--steps", "40"], trainer_shows),
    "accelerate_loop": (OURS, ["--stages", "0", "3"], loop_shows),
    "lora_zero3": (TORCHRUN, ["--steps", "20"], lora_shows),
    "qlora": (TORCHRUN, ["--steps", "20"], few_bits_show),
    "lightning_module": ([], ["--epochs", "6"], module_shows),
    "parallel_axes": (TORCHRUN, ["--tensor", "2", "--stage", "2", "--epochs", "2"], parts_show),
    "long_sequence": ([], ["--length", "2048", "--steps", "2"], memory_shows),
    "sparse_attention": (TORCHRUN, ["--length", "1024", "--steps", "3", "--stage", "3"], pattern_shows),
    "dpo_trl": ([], ["--steps", "20"], preferences_show),
}

MAKES_ITS_ENGINE = {
    "lora_zero3",
    "qlora",
    "lightning_module",
    "long_sequence",
    "parallel_axes",
    "sparse_attention",
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_short_form(name: str, tmp_path: Path) -> None:
    run_short(name, *EXAMPLES[name], tmp_path)


def run_short(
    name: str, launcher: list[str], arguments: list[str], check: Callable[[str, int], None], tmp_path: Path
) -> None:
    script = [str(REPOSITORY / "examples" / name / "train.py"), *arguments, "--output", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, *launcher, *script],
        env=environment() | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert not re.search(r"deepspeed/\S+: FutureWarning", done.stderr)
    levels = set(OUR_LINE.findall(done.stdout + done.stderr))
    # A client shows its own progress. An engine that the script makes itself speaks, and warns of nothing.
    assert levels == ({"INFO"} if name in MAKES_ITS_ENGINE else set())
    check(done.stdout, int(launcher[-1]) if launcher else 1)


# What else is printed for them.
MORE: dict[str, tuple[str, list[str], list[str], Callable[[str, int], None]]] = {
    "sequence": (
        "parallel_axes",
        TORCHRUN,
        ["--sequence", "2", "--epochs", "2"],
        partial(parts_show, tensors_are_split=False),
    ),
    "all axes": (
        "parallel_axes",
        [*TORCHRUN[:-1], "4"],
        ["--tensor", "2", "--sequence", "2", "--stage", "3", "--epochs", "2"],
        parts_show,
    ),
    "long, sharded": (
        "long_sequence",
        TORCHRUN,
        ["--sequence", "2", "--length", "2048", "--steps", "2"],
        memory_shows,
    ),
    "six bits": ("qlora", TORCHRUN, ["--stage", "3", "--bits", "6", "--steps", "20"], few_bits_show),
    "windows": (
        "sparse_attention",
        [],
        ["--mode", "bslongformer", "--length", "1024", "--steps", "3"],
        pattern_shows,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", MORE)
def test_other_forms(form: str, tmp_path: Path) -> None:
    name, launcher, arguments, check = MORE[form]
    run_short(name, launcher, arguments, check, tmp_path)


def test_generate_text(tmp_path: Path) -> None:
    script = str(REPOSITORY / "examples" / "generate_text" / "generate.py")

    def printed(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command],
            env=environment() | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    alone = printed(script, "--steps", "40", "--tokens", "24", "--output", str(tmp_path))
    assert "init_inference on 1 rank(s): the first 24 of 24 tokens" in alone
    assert numbers(r"int8 weights: the first (\S+) of", alone)[0] > 0
    assert re.search(r"weights in a file, \S+ of \S+ MB in memory: the first 24 of 24 tokens", alone)
    one_by_one, together, same = numbers(
        r"one by one (\S+) tokens/s, together (\S+); (\S+) with the same", alone
    )
    assert same == 16 and together > one_by_one
    split = printed(*OURS, script, "--model", str(tmp_path / "model"), "--tokens", "24", "--prompt", "Once")
    assert "init_inference on 2 rank(s): the first 24 of 24 tokens" in split


def test_zero_inference() -> None:
    script = str(REPOSITORY / "examples" / "zero_inference" / "generate.py")
    done = subprocess.run(
        [sys.executable, script, "--layers", "4", "--tokens", "6"],
        env=environment() | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = r"(\S+) MB of weights in the file, (\S+) MB of buffers, 6 of 6 tokens as in memory"
    found = [(float(whole), float(held)) for whole, held in re.findall(line, done.stdout)]
    assert len(found) == 3 and all(held < 0.6 * whole for whole, held in found)
    assert found[2][0] < 0.3 * found[1][0] < 0.16 * found[0][0]


def test_zero_inference_of_a_saved_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.1,
        eos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    script = str(REPOSITORY / "examples" / "zero_inference" / "generate.py")
    more = ["--model", str(tmp_path / "model"), "--prompt", "Once", "--path", str(tmp_path), "--tokens", "6"]
    done = forked.run([script, *more], env=environment() | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("6 of 6 tokens as in memory") == 3


def test_the_tiny_model_of_the_page_on_serving_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    page = (REPOSITORY / "docs" / "serving.md").read_text(encoding="utf-8")
    (code,) = re.findall(r'```python title="tiny.py"\n(.*?)```', page, flags=re.S)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "tiny.py", "exec"), {})
    tokenizer = transformers.AutoTokenizer.from_pretrained("my-model")
    model = transformers.AutoModelForCausalLM.from_pretrained("my-model")
    made = model.generate(
        **tokenizer("the model reads", return_tensors="pt", return_token_type_ids=False), max_new_tokens=4
    )
    assert tokenizer.decode(made[0]).startswith("the model reads ")
