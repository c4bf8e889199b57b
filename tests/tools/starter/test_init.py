"""`ds init`: what it writes runs, what it chooses fits, and what it cannot do it says."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed.config.deepspeed_config import DeepSpeedConfig
from deepspeed.tools.plan import main as plan
from deepspeed.tools.starter import arguments, choices
from deepspeed.tools.starter.command import main
from tests.pool import ROOT

TINY = ["--model", "gpt:2x32x2x300", "--goal", "pretrain", "--device", "cpu", "--sequence", "16"]
LARGE = ["--goal", "pretrain", "--device", "cuda", "--host-memory", "512G"]


def test_what_it_writes_trains_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, text = tmp_path / "run", tmp_path / "text.txt"
    text.write_text("to be or not to be " * 40)
    assert main([str(folder), *TINY, "--gpus", "2", "--batch", "8"]) == 0
    printed = capsys.readouterr().out
    assert f"cd {folder} && deepspeed --num_gpus 2 train.py" in printed
    assert "Stage 1 is the first that fits." in (folder / "CHOICES.md").read_text()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "DEEPSPEED_PROGRESS": "0"}
    for arguments_ in ([], ["--resume"]):
        steps = "4" if arguments_ else "2"
        command = ["-m", "deepspeed.tools.launcher.runner", "--num_gpus", "2", "train.py", "--steps", steps]
        done = subprocess.run(
            [sys.executable, *command, "--data", str(text), *arguments_],
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        losses = [line for line in done.stdout.splitlines() if line.startswith("step ")]
        assert [line.split(":")[0] for line in losses] == (
            ["step 3", "step 4"] if arguments_ else ["step 1", "step 2"]
        )


def test_a_module_next_to_it_trains_by_the_printed_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example of docs/choosing.md, in the file that the tutorial calls train.py."""
    page = (ROOT / "docs" / "choosing.md").read_text()
    example = page.split('```python title="mine.py"\n')[1].split("```")[0].replace("256", "48")
    (tmp_path / "train.py").write_text(example)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "train", raising=False)
    given = ["--model", "train:build", *TINY[2:], "--gpus", "2", "--batch", "8"]
    try:
        assert main([".", *given]) == 0
        (tmp_path / "run.py").unlink()
        assert main(["cfg", *given]) == 0
    finally:
        sys.modules.pop("train", None)
    assert (tmp_path / "train.py").read_text() == example
    assert not (tmp_path / "cfg" / "train.py").exists()
    command = capsys.readouterr().out.splitlines()[-1].strip()
    assert command == "cd cfg && deepspeed --num_gpus 2 run.py"
    program = f"{sys.executable} -m deepspeed.tools.launcher.runner"
    done = subprocess.run(
        ["sh", "-c", command.replace("deepspeed", program) + " --steps 2"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "DEEPSPEED_PROGRESS": "0"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "step 2: loss" in done.stdout


def test_a_module_that_its_loop_could_not_call_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "from torch import nn\n\ndef build():\n    return nn.Linear(2, 2)\n"
    for name in ("linear_of_mine", "task"):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert main(["cfg", "--model", "linear_of_mine:build", *TINY[2:]]) == 2
    assert "but Linear.forward takes (input" in capsys.readouterr().err
    assert main(["cfg", "--model", "task:build", *TINY[2:]]) == 2
    assert "a task.py is written, too: rename your module" in capsys.readouterr().err
    assert not (tmp_path / "cfg").exists()


def test_the_batch_is_that_of_all_ranks_and_nothing_is_advised_that_cannot_be(tmp_path: Path) -> None:
    assert main([str(tmp_path), *TINY, "--gpus", "2", "--batch", "8"]) == 0
    config = json.loads((tmp_path / "ds_config.json").read_text())
    assert config["train_batch_size"] == 8 and "gradient_accumulation_steps" not in config
    assert config["optimizer"]["params"]["weight_decay"] == 0.1
    assert config["scheduler"]["params"]["warmup_max_lr"] == config["optimizer"]["params"]["lr"]
    chosen = (tmp_path / "CHOICES.md").read_text()
    assert "processes 4 of its 4 samples" in chosen and "more would use" not in chosen


@pytest.mark.parametrize("client", arguments.CLIENTS)
def test_scripts_pass_the_linter(tmp_path: Path, client: str) -> None:
    device = ["--device", "cuda", "--device-memory", "8G"]
    assert main([str(tmp_path), *TINY, *device, "--with", client, "--nodes", "2"]) == 0
    for name in ("train.py", "task.py", "model.py"):
        compile((tmp_path / name).read_text(), name, "exec")
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--config", str(ROOT / "pyproject.toml"), str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert "No module named ruff" in done.stderr or done.returncode == 0, done.stdout
    assert (tmp_path / "hostfile").read_text() == "node-1 slots=1\nnode-2 slots=1\n"


@pytest.mark.parametrize(
    ("machine", "stage", "offload", "checkpointing"),
    [
        (["--gpus", "8", "--device-memory", "12G"], 1, None, False),
        (["--gpus", "8", "--device-memory", "6G"], 3, None, True),
        (["--gpus", "1", "--device-memory", "16G"], 2, "cpu", True),
    ],
)
def test_the_cheapest_that_fits(
    tmp_path: Path, machine: list[str], stage: int, offload: str | None, checkpointing: bool
) -> None:
    assert main([str(tmp_path), "--model", "gpt:1.3b", *LARGE, *machine]) == 0
    config = json.loads((tmp_path / "ds_config.json").read_text())
    zero = config["zero_optimization"]
    assert (zero["stage"], zero.get("offload_optimizer", {}).get("device")) == (stage, offload)
    assert f"CHECKPOINTING = {checkpointing}" in (tmp_path / "task.py").read_text()
    DeepSpeedConfig({**config})
    again = ["--sequence", "1024", "--dtype", "fp32", *(["--checkpointing"] if checkpointing else [])]
    more = ["--host-memory", "512G", "--zero-init", "--device", "cuda"]
    assert plan([str(tmp_path / "ds_config.json"), "--model", "gpt:1.3b", *machine, *again, *more]) == 0


def test_adapters_are_what_is_trained() -> None:
    args = arguments.parse(["--model", "gpt:1.3b", "--goal", "lora", "--device-memory", "8G"])
    decision = choices.decide(args)
    model = decision.answer.setting.model
    trained = sum(spec.numel for spec in model.specs[: model.trained])
    inner = 16 * (2048 + 3 * 2048 + 2048 + 2048 + 2 * (2048 + 8192))  # rank times (in + out), of a block
    assert trained == 24 * inner
    assert decision.config["zero_optimization"]["stage"] == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--model", "gpt:1.3b", *LARGE, "--device-memory", "200M"], "no known config fits"),
        (
            [*TINY, "--gpus", "4", "--batch", "6"],
            "--batch 6 cannot be divided among 4 ranks: pass a multiple",
        ),
        (["--model", "gpt:10m", "--goal", "finetune"], "has no weights to finetune"),
        (["--model", "gpt:nonsense", "--goal", "pretrain"], "gpt:nonsense: expected gpt:LAYERS"),
    ],
)
def test_what_cannot_be_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: list[str], message: str
) -> None:
    assert main([str(tmp_path / "none"), *given]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_nothing_is_overwritten_unless_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text("mine")
    assert main([str(tmp_path), *TINY]) == 2
    assert "already has train.py: use --force to overwrite" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
    assert main([str(tmp_path), *TINY, "--force"]) == 0
    assert (tmp_path / "train.py").read_text() != "mine"


def test_it_asks_only_in_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for closed in (None, io.StringIO()):
        monkeypatch.setattr(sys, "stdin", closed)
        with pytest.raises(SystemExit) as ended:
            main([str(tmp_path)])
        assert ended.value.code == 2
        assert "give --model and --goal" in capsys.readouterr().err
        assert main([str(tmp_path), *TINY, "--force"]) == 0


def test_answers_are_read_as_options_are(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal:
        closed = False

        def isatty(self) -> bool:
            return True

    replies = iter(["", "gpt:10m", "cook", "pretrain", "", "none", "4", "24G"])
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", lambda question: next(replies))
    args = arguments.parse([])
    assert (args.model, args.goal, args.client) == ("gpt:10m", "pretrain", "torch")
    assert (args.gpus, args.device_memory) == (4, 24 * 2**30)
