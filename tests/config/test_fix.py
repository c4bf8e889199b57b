"""`ds_check --fix`, and all errors at once when one of them is of type."""

from __future__ import annotations

import json
import random
import stat
from pathlib import Path
from typing import Any

import pytest

import deepspeed
from deepspeed.config.deepspeed_config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.tools.config.command import main
from deepspeed.tools.config.fix import Edit, apply_edits, spans


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


# ------------------------------------------------------------------------------------------ all errors at once


@pytest.mark.parametrize(
    ("config", "key", "meant"),
    [
        ({"fp16": True}, "fp16", '{"enabled": true}'),
        ({"bf16": False}, "bf16", '{"enabled": false}'),
        ({"optimizer": "AdamW"}, "optimizer", '{"type": "AdamW"}'),
        ({"scheduler": "WarmupLR"}, "scheduler", '{"type": "WarmupLR"}'),
        ({"zero_optimization": 2}, "zero_optimization", '{"stage": 2}'),
        ({"zero_optimization": {"offload_optimizer": "cpu"}}, "zero_optimization.offload_optimizer", ""),
        ({"activation_checkpointing": 1}, "activation_checkpointing", ""),
        ({"flops_profiler": True}, "flops_profiler", '{"enabled": true}'),
    ],
)
def test_an_error_of_type_hides_no_other(config: dict[str, Any], key: str, meant: str) -> None:
    rest: dict[str, Any] = {
        "train_batch_size": 3,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_cliping": 1.0,
        "steps_per_print": -1,
    }
    others = {"train_batch_size", "gradient_cliping", "steps_per_print"}
    if "optimizer" not in config:
        rest["optimizer"] = {"type": "AdamW", "params": {"lr": -1, "betass": [0.9, 0.99]}}
        others.add("optimizer.params.lr")
    report = deepspeed.check_config(rest | config, 1)
    assert {problem.key for problem in report.errors} == others | {key} | (
        {"optimizer.params.betass"} if "optimizer" not in config else set()
    )
    (told,) = [problem.message for problem in report.errors if problem.key == key]
    assert told.endswith(f"did you mean {meant}?") if meant else "did you mean" not in told
    with pytest.raises(DeepSpeedConfigError) as caught:
        DeepSpeedConfig(rest | config)
    assert {problem.key for problem in caught.value.problems} == others | {key}


# ---------------------------------------------------------------------------------------------- text of a file

LAID_OUT = """{
  "a": {"b":  1, "c.d": [true, {"e": "x, \\" }"}],   "f": null},

\t"g"  :\t-2.5e3,
  "h": {}, "i": []
}
"""


def test_edits_touch_nothing_else() -> None:
    found = spans(LAID_OUT)
    assert set(found) == {
        ("a",),
        ("a", "b"),
        ("a", "c.d"),
        ("a", "c.d", 1, "e"),
        ("a", "f"),
        ("g",),
        ("h",),
        ("i",),
    }
    edits = [
        Edit(("a", "b"), value={"on": True}, replaces_value=True),
        Edit(("a", "c.d", 1, "e"), rename="E"),
        Edit(("g",), rename="gg", value=[1], replaces_value=True),
    ]
    expected = LAID_OUT.replace('"b":  1', '"b":  {"on": true}').replace('"e"', '"E"')
    assert apply_edits(LAID_OUT, edits) == expected.replace('"g"  :\t-2.5e3', '"gg"  :\t[1]')
    for path in [("a",), ("a", "f"), ("g",), ("i",), ("h",)]:
        left = json.loads(apply_edits(LAID_OUT, [Edit(path, removes=True)]))
        whole: Any = json.loads(LAID_OUT)
        owner = whole
        for part in path[:-1]:
            owner = owner[part]
        del owner[path[-1]]
        assert left == whole


def test_edits_of_any_text() -> None:
    draw = random.Random(0)

    def value(depth: int) -> Any:
        kind = draw.randrange(6 if depth else 4)
        if kind == 4:
            return {f"k{draw.randrange(9)}": value(depth - 1) for _ in range(draw.randrange(4))}
        if kind == 5:
            return [value(depth - 1) for _ in range(draw.randrange(3))]
        return (draw.random(), 'te"xt,}', None, True)[kind]

    for _ in range(100):
        data = {"top": 1} | {f"k{i}": value(3) for i in range(3)}
        text = json.dumps(data, indent=draw.choice((None, 1, 4, "\t")))
        key = draw.choice(list(data))
        new = value(2)
        changed = json.loads(apply_edits(text, [Edit((key,), value=new, replaces_value=True)]))
        assert changed == data | {key: new}
        del data[key]
        assert json.loads(apply_edits(text, [Edit((key,), removes=True)])) == data


# ------------------------------------------------------------------------------------------------- corrections

FIXES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"gradient_cliping": 1.0}, {"gradient_clipping": 1.0}),
    ({"fp16": True}, {"fp16": {"enabled": True}}),
    ({"optimizer": "AdamW"}, {"optimizer": {"type": "AdamW"}}),
    (
        {"optimiser": {"type": "AdamW", "parms": {"lr": 0.1}}},
        {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}},
    ),
    (
        {"optimizer": {"type": "AdamW", "params": {"lr": "1e-3", "wieght_decay": "0", "amsgrad": "False"}}},
        {"optimizer": {"type": "AdamW", "params": {"lr": 0.001, "weight_decay": 0, "amsgrad": False}}},
    ),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lrs": "0.1", "warmup_num_steps": "10"}}},
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 10}}},
    ),
    ({"gradient_allreduce_op": "maen"}, {"gradient_allreduce_op": "mean"}),
    ({"zero_optimization": 2}, {"zero_optimization": {"stage": 2}}),
    ({"zero_optimization": True}, {"zero_optimization": {"stage": 1}}),
    ({"bfloat16": {"enabled": True}}, {"bf16": {"enabled": True}}),
    ({"bfloat16": True}, {"bf16": {"enabled": True}}),
    (
        {"zero_optimization": {"stage": 2, "cpu_offload": True}},
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    ),
    (
        {
            "zero_optimization": {
                "stage": 2,
                "cpu_offload": False,
                "cpu_offload_params": False,
                "grad_hooks": True,
            }
        },
        {"zero_optimization": {"stage": 2}},
    ),
    (
        {"zero_optimization": {"stage": 3, "stage3_gather_fp16_weights_on_model_save": True}},
        {"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}},
    ),
    (
        {"zero_optimisation": {"stge": 2, "offload_optimizer": {"devise": "gpuu"}}},
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "gpuu"}}},
    ),
]


@pytest.mark.parametrize(("written", "meant"), FIXES)
def test_what_is_plain_is_corrected(
    written: dict[str, Any], meant: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    before = json.dumps({"train_batch_size": 1} | written, indent=3)
    path.write_text(before)
    path.chmod(0o640)
    code = main([str(path), "--fix"])
    assert json.loads(path.read_text()) == {"train_batch_size": 1} | meant
    assert (tmp_path / "ds.json.bak").read_text() == before
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    shown = capsys.readouterr().out
    assert f"--- {path}" in shown and "\n-" in shown and "\n+" in shown
    assert code == ("error" in shown and "no errors" not in shown) == ("gpuu" in before)
    assert path.read_text().startswith('{\n   "train_batch_size": 1,\n   ')  # as its author laid it out


def test_what_would_be_a_guess_is_left_to_the_author(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    config = {
        "train_batch_size": 3,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "gradient_cliping": 2.0,
        "optimizer": {"type": "AdamW", "params": {"lr": -1}},
        "steps_per_printt": 1,
        "step_per_print": 2,
        "bfloat16": {"enabled": False},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 9, "cpu_offload": True, "offload_optimizer": {"device": "cpu"}},
    }
    path.write_text(json.dumps(config))
    assert main([str(path), "--fix"]) == 1
    assert json.loads(path.read_text()) == config and not path.with_suffix(".json.bak").exists()
    shown = capsys.readouterr().out
    assert "nothing to correct" in shown
    for key in ("train_batch_size", "optimizer.params.lr", "steps_per_printt", "zero_optimization.stage"):
        assert key in shown


def test_another_file_and_kept_backups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, other = tmp_path / "ds.json", tmp_path / "out" / "new.json"
    other.parent.mkdir()
    path.write_text('{"train_batch_size": 1, "fp16": true}')
    assert main([str(path), "--fix", "--output", str(other)]) == 0
    assert path.read_text() == '{"train_batch_size": 1, "fp16": true}' and list(tmp_path.glob("*.bak*")) == []
    assert other.read_text() == '{"train_batch_size": 1, "fp16": {"enabled": true}}'
    (tmp_path / "ds.json.bak").write_text("precious")
    link = tmp_path / "link.json"
    link.symlink_to(path)
    assert main([str(link), "--fix"]) == 0
    assert link.is_symlink() and json.loads(path.read_text())["fp16"] == {"enabled": True}
    assert (tmp_path / "ds.json.bak").read_text() == "precious"
    assert (tmp_path / "ds.json.bak1").read_text() == '{"train_batch_size": 1, "fp16": true}'
    assert main([str(path), "--fix"]) == 0 and "nothing to correct" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([str(path), "--output", str(other)])
    assert "--output needs --fix" in capsys.readouterr().err


def test_files_that_are_not_corrected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hjson, broken, client = (tmp_path / name for name in ("ds.hjson", "broken.json", "accelerate.json"))
    hjson.write_text("{\n  # as before\n  train_batch_size: 1\n  fp16: true\n}")
    broken.write_text('{"train_batch_size": 1, "train_batch_size": 2}')
    client.write_text('{"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2}}')
    for path, told in (
        (hjson, "give --output FILE"),
        (broken, "by hand"),
        (client, "is a file of Accelerate"),
        (tmp_path / "no.json", "is not a file"),
    ):
        before = path.read_text() if path.exists() else None
        assert main([str(path), "--fix"]) == 2
        assert told in capsys.readouterr().err
        assert (path.read_text() if path.exists() else None) == before
    new = tmp_path / "new.json"
    pytest.importorskip("hjson")
    assert main([str(hjson), "--fix", "--output", str(new)]) == 0
    assert json.loads(new.read_text()) == {"train_batch_size": 1, "fp16": {"enabled": True}}
