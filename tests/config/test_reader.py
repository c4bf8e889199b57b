from __future__ import annotations

import base64
import json
import time
from pathlib import Path
from typing import Any

import pytest

from deepspeed.config.reader import UnreadableConfig, key_places, parse_text, read_config
from deepspeed.tools.config.command import check_config

CONFIG = {"train_batch_size": 8, "zero_optimization": {"stage": 2}, "steps_per_print": 10}


def test_dict_is_copied_and_leaves_are_kept() -> None:
    group = object()
    raw = {"tensor_parallel": {"tp": {"tp_group": group}}, "x": [1, {"y": 2}]}
    source = read_config(raw)
    assert source.data == raw
    assert source.data["tensor_parallel"] is not raw["tensor_parallel"]
    assert source.data["tensor_parallel"]["tp"]["tp_group"] is group


def test_json_file(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(CONFIG, indent=2))
    for given in (file, str(file)):
        source = read_config(given)
        assert source.data == CONFIG
        assert str(source.place(("zero_optimization", "stage"))) == f"{file}:4:5"
        assert str(source.place(("zero_optimization", "not there"))) == f"{file}:3:3"


def test_hjson_file(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.hjson"
    file.write_text(
        "{\n  # how much\n  train_batch_size: 8\n  zero_optimization: { stage: 2 }\n  steps_per_print: "
        "10,\n}\n"
    )
    source = read_config(file)
    assert source.data == CONFIG
    assert str(source.place(("train_batch_size",))) == f"{file}:3:3"
    assert str(source.place(("zero_optimization", "stage"))) == f"{file}:4:24"
    assert str(source.place(("steps_per_print",))) == f"{file}:5:3"


def test_text_in_an_argument_has_places_without_a_file() -> None:
    text = base64.urlsafe_b64encode(b'{"a": 1,\n  "b": 2}').decode()
    assert str(read_config(text).place(("b",))) == "line 2, column 3"
    assert read_config({"a": 1}).place(("a",)) is None


def test_base64_text() -> None:
    text = json.dumps(CONFIG | {"comment": "??>>~~"})
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    assert read_config(encoded).data == json.loads(text)
    assert read_config(encoded.rstrip("=")).data == json.loads(text)


@pytest.mark.parametrize("given", ["no/such/file.json", "ds_config.json", "", "e30", 3, None, [1]])
def test_neither_file_nor_text(given: object) -> None:
    if given == "e30":  # base64 of "{}"
        assert read_config(given).data == {}
        return
    with pytest.raises(UnreadableConfig, match=r"a config is a dict, a path to a JSON or HJSON file"):
        read_config(given)  # type: ignore[arg-type]


def test_a_folder_is_no_config(tmp_path: Path) -> None:
    with pytest.raises(UnreadableConfig, match="folder"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    "text", ['{"a": 1,\n "b": {"c": 1,\n "c": 2}}', "{a: 1\n b: {c: 1\n c: 2}}"], ids=["json", "hjson"]
)
def test_duplicate_keys_are_named_with_their_lines(text: str) -> None:
    with pytest.raises(UnreadableConfig, match=r"Duplicate keys .*'b\.c' \(lines 2, 3\)"):
        parse_text(text, "file")


def test_duplicate_keys_in_hjson_file_through_the_config(tmp_path: Path) -> None:
    from deepspeed.config.deepspeed_config import DeepSpeedConfig

    file = tmp_path / "c.hjson"
    file.write_text("{\ntrain_batch_size: 8\ntrain_batch_size: 16\n}")
    with pytest.raises(ValueError, match="train_batch_size"):
        DeepSpeedConfig(str(file))


def test_broken_text_names_the_place() -> None:
    with pytest.raises(UnreadableConfig, match=r"line 2, column"):
        parse_text('{"a": 1,\n "b": [1, 2}', "file")


def test_top_level_must_be_an_object() -> None:
    with pytest.raises(UnreadableConfig, match="list"):
        parse_text("[1, 2]", "file")


def test_places_in_nested_lists() -> None:
    text = '{"a": [\n {"b": 1},\n {"b": "x, y: {z}",\n  "c": 2}],\n "d": 3}'
    places = key_places(text)
    assert places[("a",)] == [(1, 2)]
    assert places[("a", 0, "b")] == [(2, 3)]
    assert places[("a", 1, "b")] == [(3, 3)]
    assert places[("a", 1, "c")] == [(4, 3)]
    assert places[("d",)] == [(5, 2)]


def test_hjson_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "hjson", None)
    assert parse_text('{"a": 1}', "file").data == {"a": 1}
    with pytest.raises(UnreadableConfig, match=r"line 1.*install the package 'hjson'"):
        parse_text("{a: 1}", "file")


def nested(depth: int) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for _ in range(depth):
        config = {"a": config}
    return config


@pytest.mark.parametrize("form", ["json", "list", "hjson", "dict"])
def test_a_config_that_nests_too_deep_is_refused_in_a_sentence(form: str, tmp_path: Path) -> None:
    depth = 50_000
    texts = {
        "json": '{"a": ' * depth + "1" + "}" * depth,
        "list": '{"a": ' + "[" * depth + "]" * depth + "}",
        "hjson": "{a: " * depth + "1" + "}" * depth,
    }
    given: Any = nested(depth) if form == "dict" else tmp_path / "ds.json"
    if form != "dict":
        given.write_text(texts[form])
    with pytest.raises(UnreadableConfig, match="more than 100 deep"):
        read_config(given)
    assert "more than 100 deep" in check_config(given, 1).errors[0].message


def test_a_dict_that_contains_itself_is_refused() -> None:
    config: dict[str, Any] = {"train_batch_size": 1}
    config["again"] = config
    with pytest.raises(UnreadableConfig, match="more than 100 deep"):
        read_config(config)


MANY = 20_000
LONG = "x" * 1_000_000


@pytest.mark.parametrize(
    "section",
    [
        {f"zork{i}": i for i in range(MANY)},
        {"zero_optimization": {f"zork{i}": i for i in range(MANY)}},
        {"optimizer": {"type": "Adam", "params": {f"zork{i}": i for i in range(MANY)}}},
        {"zero_optimization": {"stage": ["auto"] * MANY}},
        {"elasticity": {"enabled": True, "max_train_batch_size": 4, "micro_batch_sizes": ["a"] * MANY}},
        {"zero_optimization": {"stage": LONG}},
        {LONG: LONG},
        {"optimizer": {"type": LONG, "params": {LONG: LONG}}},
        {"scheduler": {"type": "WarmupLR", "params": {LONG: LONG, "warmup_type": LONG}}},
    ],
    ids=["top", "strict", "arguments", "auto", "list", "value", "key", "optimizer", "scheduler"],
)
def test_a_huge_config_takes_linear_time_and_a_short_message(section: Any, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"train_batch_size": 1, **section}))
    start = time.process_time()
    report = check_config(file, 1)
    assert time.process_time() - start < 10  # quadratic, it was minutes
    assert report.errors or report.warnings
    assert len(str(report)) < 150_000


def test_duplicate_keys_do_not_hide_other_errors(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"train_batch_size": 4,\n "train_batch_size": 8,\n "zero_optimization": {"stag": 2}}')
    report = check_config(file, 1)
    assert [problem.key for problem in report.errors] == ["config", "zero_optimization.stag"]
    assert "'train_batch_size' (lines 1, 2)" in report.errors[0].message
    assert report.batch is not None and report.batch.train == 8  # the last, as json reads it


def test_what_only_the_reader_of_hjson_takes_is_said(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"train_batch_size": 4\n "steps_per_print": 5}')
    report = check_config(file, 1)
    assert report.ok and report.batch is not None and report.batch.train == 4
    (warning,) = report.warnings
    assert "is not JSON (line 2, column 2" in warning and "Transformers" in warning
    file.write_text('{"train_batch_size": 4}')
    assert not check_config(file, 1).warnings
