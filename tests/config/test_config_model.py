"""The base class of all sections, as client libraries subclass it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from pydantic import Field, ValidationError, field_validator, model_validator

from deepspeed.base.dtypes import Dtype
from deepspeed.config.section import (
    DeepSpeedConfigModel,
    ScientificNotationEncoder,
    collect_notes,
    dict_raise_error_on_duplicate_keys,
    get_scalar_param,
    parse_dtype,
    pp_int,
)
from deepspeed.config.sections.offload import OffloadDeviceEnum
from deepspeed.config.sections.zero import DeepSpeedZeroConfig, ZeroStageEnum, get_zero_config
from deepspeed.inference.config import DeepSpeedInferenceConfig, DtypeEnum
from deepspeed.inference.v2.config_v2 import DSStateManagerConfig, KVCacheConfig, RaggedInferenceEngineConfig


class Child(DeepSpeedConfigModel):
    size: int = 1


class Parent(DeepSpeedConfigModel):
    child: Child = {}  # type: ignore[assignment]  # a dict default is validated into the model
    number: int = Field(default=3, alias="num")
    replace_method: str = "x"
    old_size: int = Field(default=1, json_schema_extra={"deprecated": True, "new_param": "child.size"})
    gone: int = Field(default=0, json_schema_extra={"deprecated": True, "deprecated_msg": "it never helped"})
    halved: int = Field(
        default=0,
        json_schema_extra={
            "deprecated": True,
            "new_param": "number",
            "new_param_fn": lambda value: value // 2,
        },
    )
    named_only: int = Field(
        default=0, json_schema_extra={"deprecated": True, "new_param": "number", "set_new_param": False}
    )

    @field_validator("number")
    @classmethod
    def even_or_three(cls, value: int) -> int:
        if value != 3 and value % 2:
            raise ValueError("must be even")
        return value


def test_dict_defaults_become_models() -> None:
    assert Parent().child == Child(size=1)
    assert json.loads(Parent().model_dump_json())["child"] == {"size": 1}


def test_unknown_keys_are_refused() -> None:
    with pytest.raises(ValidationError, match="extra"):
        Parent(bogus=1)
    with pytest.raises(ValidationError):
        Parent(child={"bogus": 1})


def test_name_and_alias() -> None:
    assert Parent(num=4).number == Parent(number=4).number == 4


def test_auto_counts_as_absent_unless_strict() -> None:
    with collect_notes() as notes:
        made = Parent(num="auto", child={"size": "auto"}, old_size="auto", replace_method="auto")
    assert (made.number, made.child.size, made.replace_method, notes) == (3, 1, "auto", [])
    with pytest.raises(ValidationError):
        Parent(strict=True, number="auto")


def test_assignments_are_validated() -> None:
    made = Parent()
    made.number = 8
    with pytest.raises(ValidationError):
        made.number = 7
    with pytest.raises(ValidationError):
        made.child.size = "big"  # type: ignore[assignment]
    assert made.number == 8


def test_deprecated_fields_are_carried_over_with_one_note() -> None:
    with collect_notes() as notes:
        made = Parent(old_size=5, gone=1, halved=8)
    assert (made.child.size, made.number) == (5, 4)
    assert len(notes) == 3
    assert "'old_size' is deprecated, use 'child.size'" in notes[2]
    assert "it never helped" in notes[0]
    with collect_notes():
        assert Parent(named_only=8).number == 3


def test_old_and_new_spelling_together() -> None:
    with collect_notes(), pytest.raises(ValueError, match="'halved'"):
        Parent(halved=8, number=2)


def test_notes_are_logged_outside_of_the_collector(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.base.logging import logger

    said: list[str] = []
    monkeypatch.setattr(logger, "warning", said.append)
    Parent(gone=1)
    assert len(said) == 1 and "'gone' is deprecated" in said[0]


def test_dtypes_are_serialised_as_text() -> None:
    assert json.loads(DeepSpeedInferenceConfig(dtype="bf16").model_dump_json())["dtype"] == "torch.bfloat16"


def test_zero_config_alone() -> None:
    zero = DeepSpeedZeroConfig(
        stage=3, stage3_max_live_parameters=1e6, max_reuse_distance=7, stage3_prefetch_bucket_size="auto"
    )
    assert (zero.max_live_parameters, zero.max_reuse_distance, zero.prefetch_bucket_size) == (
        10**6,
        7,
        50_000_000,
    )
    assert zero.stage == ZeroStageEnum.weights and zero.overlap_comm is True
    assert "overlap_comm" not in zero.model_fields_set
    assert DeepSpeedZeroConfig(stage=2).overlap_comm is False
    assert DeepSpeedZeroConfig(stage=3, overlap_comm=False).overlap_comm is False
    assert (
        DeepSpeedZeroConfig(offload_optimizer={"device": "cpu"}).offload_optimizer.device
        == OffloadDeviceEnum.cpu
    )  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"cpu_offload": True}, {"offload_optimizer.device": "cpu"}),
        ({"cpu_offload": False}, {"offload_optimizer": None}),
        (
            {"cpu_offload": False, "offload_optimizer": {"device": "nvme"}},
            {"offload_optimizer.device": "nvme"},
        ),
        ({"cpu_offload_param": True}, {"offload_param.device": "cpu"}),
        ({"cpu_offload_use_pin_memory": True}, {"offload_param": None}),
        ({"stage3_gather_fp16_weights_on_model_save": True}, {"gather_16bit_weights_on_model_save": True}),
        ({"elastic_checkpoint": True}, {"elastic_checkpoint": True}),
        ({"grad_hooks": False}, {"grad_hooks": False}),
    ],
)
def test_old_zero_keys(section: dict[str, object], expected: dict[str, object]) -> None:
    with collect_notes() as notes:
        zero = DeepSpeedZeroConfig(**section)
    assert len(notes) == 1 and "deprecated" in notes[0]
    for dotted, value in expected.items():
        found: object = zero
        for part in dotted.split("."):
            found = getattr(found, part)
        assert found == value


def test_zero_as_a_boolean() -> None:
    with collect_notes() as notes:
        zero = get_zero_config({"zero_optimization": True, "allgather_size": 7})
        off = get_zero_config({"zero_optimization": False})
    assert (zero.stage, zero.allgather_bucket_size, off.stage) == (1, 7, 0)
    assert "deprecated" in notes[0]


def test_inference_config() -> None:
    with collect_notes() as notes:
        made = DeepSpeedInferenceConfig(
            kernel_inject=True, mp_size=2, tm=False, max_tokens=5, moe=False, replace_method="auto"
        )
    assert made.replace_with_kernel_inject and made.tensor_parallel.tp_size == 2
    assert (made.triangular_masking, made.max_out_tokens, made.moe.enabled) == (False, 5, False)
    assert len(notes) == 2
    assert DeepSpeedInferenceConfig(dtype="half").dtype is DeepSpeedInferenceConfig(dtype=torch.float16).dtype
    with pytest.raises(TypeError):
        DeepSpeedInferenceConfig(dtype=16)
    assert DtypeEnum.from_str("bfloat16") is DtypeEnum.bf16
    with pytest.raises(ValueError, match="fp4"):
        DtypeEnum.from_str("fp4")


def test_ragged_config() -> None:
    class Server(DeepSpeedConfigModel):  # as MII declares its own
        inference_engine_config: RaggedInferenceEngineConfig = {}  # type: ignore[assignment]

    server = Server()
    server.inference_engine_config.tensor_parallel.tp_size = 4
    assert server.inference_engine_config.tensor_parallel.tp_size == 4
    assert RaggedInferenceEngineConfig(manager={"offload": True}).state_manager.offload
    with pytest.raises(ValidationError, match="max_ragged_batch_size"):
        DSStateManagerConfig(max_ragged_batch_size=100, max_ragged_sequence_count=200)
    assert KVCacheConfig(cache_shape=(2, 4, 8), cache_dtype="bfloat16").cache_dtype is torch.bfloat16


def test_helpers() -> None:
    assert get_scalar_param({"a": 1}, "a", 2) == get_scalar_param({}, "a", 1) == 1
    assert repr(pp_int(5e8)) == "500,000,000" and repr(pp_int(3, "three")) == "three" and pp_int(3) == 3
    assert dict_raise_error_on_duplicate_keys([("a", 1), ("b", 2)]) == {"a": 1, "b": 2}
    with pytest.raises(ValueError, match="'a'"):
        dict_raise_error_on_duplicate_keys([("a", 1), ("b", 2), ("a", 3)])
    text = json.dumps(
        {"big": 5e8, "small": 3, "list": [1, 2], "on": True, "none": None}, cls=ScientificNotationEncoder
    )
    assert json.loads(text) == {"big": 5e8, "small": 3, "list": [1, 2], "on": True, "none": None}
    assert "5.000000e+08" in text


@pytest.mark.parametrize("word", ["bf16", "bfloat16", "BF16", "bfp16", "torch.bfloat16", torch.bfloat16])
def test_dtype_words(word: object) -> None:
    dtype = parse_dtype(word)
    assert dtype is Dtype.bf16 and dtype == "bf16" and dtype.torch is torch.bfloat16
    assert (str(dtype), dtype.long_name) == ("bf16", "bfloat16")


def test_the_two_dtype_enums() -> None:
    from deepspeed.config.deepspeed_config import DtypeEnum as ByDtype

    assert ByDtype("torch.half") is ByDtype(torch.float16) is ByDtype.fp16
    assert ByDtype.bf16.value is DtypeEnum.bf16.value[0] is torch.bfloat16
    with pytest.raises(ValueError, match="fp8"):
        ByDtype("fp8")


def test_threads_of_aio_under_either_name() -> None:
    from deepspeed.config.sections.offload import get_aio_config

    with collect_notes() as notes:
        assert get_aio_config({"aio": {"thread_count": 4}})["intra_op_parallelism"] == 4
        assert (
            get_aio_config({"aio": {"thread_count": 1, "intra_op_parallelism": 8}})["intra_op_parallelism"]
            == 8
        )
        assert get_aio_config({})["intra_op_parallelism"] == 1
    assert notes == []


@pytest.mark.parametrize("word", ["fp8", "", 16, "int8", torch.int8, "torch."])
def test_unknown_dtype_words(word: object) -> None:
    with pytest.raises(ValueError, match="'bf16'"):
        parse_dtype(word)


def _sections(model: type[DeepSpeedConfigModel]) -> Iterator[type[DeepSpeedConfigModel]]:
    for below in model.__subclasses__():
        yield below
        yield from _sections(below)


def test_a_section_that_no_config_names_is_as_if_it_had_been_validated() -> None:
    for model in {*_sections(DeepSpeedConfigModel)}:
        check_defaults(model)


def check_defaults(model: type[DeepSpeedConfigModel]) -> None:
    for name, field in model.model_fields.items():
        unnamed = field.get_default(call_default_factory=True)
        if isinstance(unnamed, DeepSpeedConfigModel):
            validated = vars(type(unnamed)())
            assert {key: (type(value), value) for key, value in vars(unnamed).items()} == {
                key: (type(value), value) for key, value in validated.items()
            }, name


class Fork(DeepSpeedConfigModel):
    fork_size: int = 1

    @model_validator(mode="after")
    def odd(self) -> Fork:
        if self.fork_size % 2 == 0:
            raise ValueError("must be odd")
        return self


class Holder(DeepSpeedConfigModel):
    named: Fork = Fork.model_construct()
    perhaps: Fork | None = None


def test_a_section_is_built_when_a_config_names_it() -> None:
    assert Holder().named == Fork(fork_size=1) and Holder().perhaps is None
    holder = Holder.model_validate({"perhaps": {"fork_size": 3}})
    assert holder.perhaps is not None and holder.perhaps.fork_size == 3
    assert json.loads(Holder().model_dump_json()) == {"named": {"fork_size": 1}, "perhaps": None}
    with pytest.raises(ValidationError) as refused:
        Holder.model_validate({"named": {"fork_size": "x"}, "perhaps": {"fork_size": 2, "forks": 1}})
    assert [error["loc"] for error in refused.value.errors()] == [
        ("named", "fork_size"),
        ("perhaps", "forks"),
    ]
    with pytest.raises(ValidationError, match=r"named\n.*a valid dictionary or instance of Fork"):
        Holder.model_validate({"named": None})
    holder.named.fork_size = 5
    assert Holder().named.fork_size == 1  # defaults are not shared
