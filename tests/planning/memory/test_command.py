"""`ds plan` from the outside, and the advice it gives: every piece of advice is planned again by the test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.planning import report
from deepspeed.planning.activations import TransformerShape
from deepspeed.planning.advice import SMALL_MASTERS, advise, hidden_updates
from deepspeed.planning.ledger import MemoryPlace
from deepspeed.planning.machine import Capacity
from deepspeed.planning.report import size
from deepspeed.planning.request import PlanRequest, answer
from deepspeed.tools import ds
from deepspeed.tools.plan import main
from tests import forked
from tests.planning.memory.models import Gpt, config_for
from tests.pool import ROOT

MODEL = "tests.planning.memory.models:small"
MIB = 2**20


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config_for(2, bf16=True)))
    return str(path)


def test_table_and_verdict(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main([config, "--model", MODEL, "--gpus", "2", "--device", "cpu", "--host-memory", "1G"])
    out = capsys.readouterr().out
    assert code == 0
    assert "Gpt: 525,312 trained parameters" in out
    assert "2 ranks, ZeRO stage 2, bf16, FusedAdam" in out
    for kind in (
        "parameters",
        "master weights",
        "optimizer state",
        "gradient buckets in flight",
        "(estimated)",
    ):
        assert kind in out
    assert "host: fits" in out
    assert "activations are not counted" in out


def test_what_does_not_fit_names_the_change(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [config, "--model", MODEL, "--gpus", "4", "--host-memory", "1G"]
    assert main([*arguments, "--device-memory", "4.5M"]) == 1
    out = capsys.readouterr().out
    assert "cuda: DOES NOT FIT" in out
    assert "cheapest change that makes it fit" in out
    assert "then: cuda" in out


def test_json(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main([config, "--model", MODEL, "--json", "--device", "cpu", "--set", "zero_optimization.stage=0"])
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == 525_312
    assert found["bytes_per_rank"]["host"]["update"]["optimizer state"] >= 8 * 525_312
    assert found["fits"] is True
    assert "activations" in found["estimated"]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_experts_spread_over_ranks(config: str, stage: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Two of four ranks share the experts: each holds a half, and the two with the same half share its states."""
    arguments = [config, "--model", "tests.planning.memory.models:mixture", "--device", "cpu", "--json"]
    main([*arguments, "--gpus", "4", "--set", f"zero_optimization.stage={stage}"])
    found = json.loads(capsys.readouterr().out)
    experts, gate = 8 * 64 * 2048 // 2, 8 * 64
    assert found["parameters"] == experts + gate
    assert "counting the experts of one rank, of 2 that share them" in found["notes"]
    shared, everyone = (2, 4) if stage else (1, 1)
    state = found["bytes_per_rank"]["host"]["update"]["optimizer state"]
    assert state == pytest.approx(8 * (experts / shared + gate / everyone), abs=1024)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--model", "tests.planning.memory.models:mixture", "--gpus", "3"],
            "'ep_size_2': expected 'ep_size_N', where N divides the 3 ranks",
        ),
        (
            ["--model", MODEL, "--set", 'expert_parallel={"enabled": true}'],
            "Gpt has no experts with stacked weights",
        ),
        (["--model", "tests.planning.memory.models:nothing"], "nothing"),
        (["--model", "tests.planning.memory.models:MODELS.keys"], "expected a torch.nn.Module"),
        (["--model", MODEL, "--set", "zero_optimization.stage=7"], "stage"),
        (["--model", MODEL, "--set", "zero_optimization"], "KEY=VALUE"),
    ],
)
def test_mistakes(config: str, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([config, *arguments]) == 2
    assert words in capsys.readouterr().err


NEEDING = """\
import torch

class Net(torch.nn.Module):
    def __init__(self, config, *, layers, bias=True, **others):
        super().__init__()

class Easy(torch.nn.Linear):
    def __init__(self, size=4):
        super().__init__(size, size)

def build(path): ...
made = Easy()
"""


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("Net", "the class Net needs arguments (config, layers)"),
        ("build", "the function build needs arguments (path)"),
        ("made", "an object of Easy"),
        ("__name__", "an object of str"),
    ],
)
def test_a_model_that_cannot_be_called_without_arguments(
    tmp_path: Path, config: str, what: str, said: str
) -> None:
    (tmp_path / "needing.py").write_text(NEEDING)
    code = "import sys; from deepspeed.tools.plan import main; sys.exit(main())"
    ended = forked.run(
        ["-c", code, config, "--model", f"needing:{what}", "--device", "cpu"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert ended.returncode == 2
    line, explained = ended.stderr.splitlines()
    assert line.startswith(f"ds plan: --model needing:{what}") and said in line
    assert explained.startswith("explained in docs/troubleshooting.md#")
    assert line.endswith("give a function that takes no arguments and returns the model, as module:function")


def test_a_class_that_needs_no_arguments(
    tmp_path: Path, config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "easy_model.py").write_text(NEEDING)
    monkeypatch.chdir(tmp_path)
    assert main([config, "--model", "easy_model:Easy", "--device", "cpu", "--host-memory", "1G"]) == 0
    assert "Easy: 20 trained parameters" in capsys.readouterr().out


def test_batch_sizes_left_to_the_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "auto.json"
    path.write_text(
        json.dumps(
            {
                **config_for(3),
                "bf16": {"enabled": "auto"},
                "gradient_clipping": "auto",
                "train_batch_size": "auto",
                "train_micro_batch_size_per_gpu": "auto",
                "gradient_accumulation_steps": "auto",
            }
        )
    )
    assert main([str(path), "--model", MODEL, "--device", "cpu", "--micro-batch", "4"]) == 0
    out = capsys.readouterr().out
    assert "micro-batch 4 x 1" in out
    assert '"auto" is counted as the default of bf16.enabled;' in out


def test_a_file_of_accelerate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "accelerate.json"
    section = {"zero_stage": 2, "gradient_accumulation_steps": 4}
    data = {"distributed_type": "DEEPSPEED", "mixed_precision": "bf16", "deepspeed_config": section}
    path.write_text(json.dumps(data))
    assert main([str(path), "--model", MODEL, "--device", "cpu", "--gpus", "2"]) == 0
    out = capsys.readouterr().out
    assert "ZeRO stage 2, bf16" in out
    assert "the config names no optimizer" in out


def test_ds_leads_to_plan_and_else_to_the_launcher(config: str) -> None:
    arguments = [config, "--model", MODEL, "--device", "cpu", "--host-memory", "1G"]
    assert ds.main(["plan", *arguments]) == 0
    shown = subprocess.run(
        [sys.executable, "-m", "deepspeed.tools.ds", "--help"], capture_output=True, text=True, timeout=240
    )
    assert shown.returncode == 0
    assert "ds plan" in shown.stdout
    assert "--num_gpus" in shown.stdout


def test_sizes_are_readable() -> None:
    assert [size(n) for n in (3, 1536, 1536 * MIB, 3 << 40)] == ["3 B", "1.50 KiB", "1.50 GiB", "3.00 TiB"]


def test_a_hugging_face_folder(tmp_path: Path, config: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    model = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
    }
    (tmp_path / "config.json").write_text(json.dumps(model))
    arguments = [
        config,
        "--model",
        str(tmp_path),
        "--device",
        "cpu",
        "--micro-batch",
        "2",
        "--sequence",
        "128",
    ]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "LlamaForCausalLM" in out
    assert "activations (estimated)" in out


# Advice ------------------------------------------------------------------------------------------------------

SHAPE = TransformerShape(
    layers=6,
    hidden=128,
    heads=4,
    kv_heads=4,
    head_dim=32,
    intermediate=256,
    vocabulary=1000,
    mlp_tensors=2,
    scores_kept=False,
)


CPU = {"device": "cpu"}
SMALL = {"reduce_bucket_size": 50_000}
OFFLOAD = 'zero_optimization.offload_{}: {{"device": "cpu"}}'


def request(device: int, host: int = 10**9, disk: int | None = None, **changes: Any) -> PlanRequest:
    zero = {"stage3_param_persistence_threshold": 1000, "stage": 0, **changes.pop("zero", {})}
    config = {**config_for(0, bf16=True), "zero_optimization": zero}
    with torch.device("meta"):
        model = Gpt()
    given: dict[str, Any] = {"module": model, "config": config, "ranks": 4, "device_type": "cuda", **changes}
    return PlanRequest(**given, capacity=Capacity(device, host, disk))


WITH_ACTIVATIONS: dict[str, Any] = {"shape": SHAPE, "sequence": 1024, "zero": {"stage": 3}, "zero_init": True}


@pytest.mark.parametrize(
    ("asked", "enough", "expected"),
    [
        ({"zero": {"stage": 0}}, {"zero": {"stage": 1}}, ["zero_optimization.stage: 1"]),
        ({"zero": {**SMALL, "stage": 1}}, {"zero": {**SMALL, "stage": 2}}, ["zero_optimization.stage: 2"]),
        (
            {"zero": {"stage": 3}, "zero_init": True},
            {"zero": {"stage": 3, "offload_optimizer": CPU}, "zero_init": True},
            [OFFLOAD.format("optimizer")],
        ),
        (
            {"zero": {"stage": 3}, "zero_init": True},
            {"zero": {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU}, "zero_init": True},
            [OFFLOAD.format("optimizer"), OFFLOAD.format("param")],
        ),
        (
            {**WITH_ACTIVATIONS, "micro_batch": 8},
            {**WITH_ACTIVATIONS, "micro_batch": 4},
            ["train_micro_batch_size_per_gpu: 4"],
        ),
        (
            {**WITH_ACTIVATIONS, "micro_batch": 1},
            {**WITH_ACTIVATIONS, "micro_batch": 1, "checkpointing": True},
            ["activation checkpointing (model.gradient_checkpointing_enable())"],
        ),
    ],
)
def test_the_cheapest_change_comes_first(
    asked: dict[str, Any], enough: dict[str, Any], expected: list[str]
) -> None:
    """There is as much memory as the plan with the expected change needs, and not what the asked one needs."""
    device = answer(request(0, **enough)).need(MemoryPlace.DEVICE)[0]
    current = answer(request(device, **asked))
    assert current.lacking()
    found = advise(current)
    assert found.result is not None
    assert not found.result.lacking()
    assert found.changes == expected


@pytest.mark.parametrize("zero", [{"stage": "auto"}, {"stage": 1, "offload_optimizer": "auto"}])
def test_what_a_client_fills_in_may_be_changed(zero: dict[str, Any]) -> None:
    assert "zero_optimization.stage: 3" in advise(answer(request(1 * MIB, zero=zero))).changes


def test_small_states_where_the_host_has_no_room() -> None:
    """Moments in 8 bits, then bf16 masters too, if no stage is enough and the host cannot take the states."""
    small: dict[str, Any] = {"lr": 0.01}
    asked = request(0, ranks=1)
    for more, expected in (
        ({"state_bits": 8}, "optimizer.params.state_bits: 8"),
        ({"state_bits": 8, "stochastic_rounding": True}, SMALL_MASTERS),
    ):
        config = {**asked.config, "optimizer": {"type": "AdamW", "params": {**small, **more}}}
        masters = {"enabled": True, "bf16_master_weights_and_grads": "stochastic_rounding" in more}
        zero = {**config["zero_optimization"], "stage": 1}
        enough = answer(replace(asked, config={**config, "bf16": masters, "zero_optimization": zero}))
        device, host = (enough.need(place)[0] for place in (MemoryPlace.DEVICE, MemoryPlace.HOST))
        config = {**asked.config, "optimizer": {"type": "AdamW", "params": small}, "zero_optimization": zero}
        current = answer(replace(asked, config=config, capacity=Capacity(device, host, 0)))
        assert current.lacking()
        found = advise(current)
        assert found.changes[-1:] == [expected]
        assert found.result is not None
        assert not found.result.lacking()


def test_what_hides_an_update_on_the_host() -> None:
    config = request(10**9, zero={"stage": 2, "offload_optimizer": CPU})
    found = dict(hidden_updates(answer(config)))
    assert [text.rsplit(".", 1)[-1] for text in found] == ["super_offload: true", "zenflow: {}"]
    before = answer(config)
    assert all(plan.need(MemoryPlace.HOST)[0] > before.need(MemoryPlace.HOST)[0] for plan in found.values())
    text = report.full_report(before, None)
    assert "super_offload: true (host" in text
    assert "DOES NOT FIT" not in text
    tight = request(10**9, host=before.need(MemoryPlace.HOST)[0], zero={"stage": 2, "offload_optimizer": CPU})
    assert report.full_report(answer(tight), None).count("DOES NOT FIT") == 2
    for zero in ({"stage": 2}, {"stage": 2, "offload_optimizer": {**CPU, "super_offload": True}}):
        assert not hidden_updates(answer(request(10**9, zero=zero)))


def test_more_ranks_where_no_change_is_enough() -> None:
    found = advise(answer(request(1 * MIB, host=2 * MIB, zero={"stage": 3})))
    assert found.result is None
    assert found.ranks is None or found.ranks > 4


def test_what_is_there_is_respected_everywhere() -> None:
    current = answer(request(10**9, host=1 * MIB))
    assert set(current.lacking()) == {MemoryPlace.HOST}


def link(config: str, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    arguments = [config, "--model", MODEL, "--gpus", "2", "--nodes", "2", "--device", "cpu", "--json", *more]
    assert main([*arguments, "--host-memory", "1G"]) == 0
    return json.loads(capsys.readouterr().out)["link"]


@pytest.mark.parametrize(
    ("stage", "plain"),
    [(0, 4), (1, 4), (2, 4), (3, 6)],  # bf16: a sum and what comes back; at stage 3 two gathers and a sum
)
def test_seconds_over_a_link(
    stage: int, plain: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of what two nodes exchange leaves each, and the first option that is enough is recommended."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config_for(stage, bf16=True)))
    numel = 525_312
    found = link(str(path), capsys, "--link-mbits", "8", "--compute-seconds", "2")
    now = found["options"][0]
    assert now["bytes"] == numel * plain / 2
    assert now["seconds"] == pytest.approx(2 + now["bytes"] / 1e6)
    by_name = {option["name"]: option for option in found["options"]}
    assert found["recommended"] == ("hpZ, qwZ in 4 bits, qgZ" if stage == 3 else "OneBitAdam after warm-up")
    if stage == 3:
        assert by_name["hpZ, qwZ, qgZ"]["bytes"] == pytest.approx(numel * 1.53125 / 2)
    else:
        assert by_name["OneBitAdam after warm-up"]["bytes"] == pytest.approx(numel * 0.25390625 / 2)
    fast = link(str(path), capsys, "--link-mbits", "100000")
    assert fast["recommended"] == "as it is"


def test_a_config_that_sends_less_already(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({**config_for(0, bf16=True), "gradient_compression": {"codec": "int8"}}))
    found = link(str(path), capsys, "--link-mbits", "100")
    by_name = {option["name"]: option["bytes"] for option in found["options"]}
    assert by_name["as it is"] == by_name["gradients in int8"]
    arguments = [
        str(path),
        "--model",
        MODEL,
        "--gpus",
        "2",
        "--nodes",
        "2",
        "--device",
        "cpu",
        "--link-mbits",
        "9",
    ]
    assert main([*arguments, "--host-memory", "1G"]) == 0
    assert "recommended: " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([str(path), "--model", MODEL, "--link-mbits", "9"])
    with pytest.raises(SystemExit):
        main([str(path), "--model", MODEL, "--nodes", "2", "--link-mbits", "0"])
