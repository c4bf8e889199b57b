"""``init_inference`` on plain modules: the config's keys, casts, weights, measuring."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import deepspeed
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.config.section import collect_notes
from deepspeed.inference.config import DeepSpeedInferenceConfig
from deepspeed.inference.engine import InferenceEngine
from deepspeed.inference.kernels import HostLinear, IntegerLinear, inject_kernels
from deepspeed.ops import huge_pages, native
from deepspeed.utils import safe_get_full_fp32_param
from tests.pool import distributed


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4)
        self.register_buffer("shift", torch.ones(4))
        self.word = "said by the module"

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.drop(self.first(inputs))) + self.shift


def test_a_module_is_cast_and_evaluates() -> None:
    module = Small()
    engine = deepspeed.init_inference(module, dtype=torch.bfloat16)
    assert type(engine) is InferenceEngine is deepspeed.InferenceEngine
    assert engine.module is module and not module.training and module.first.weight.dtype is torch.bfloat16
    inputs = torch.randn(2, 4, dtype=torch.bfloat16)
    torch.testing.assert_close(engine(inputs), module(inputs))
    assert engine.word == "said by the module" and not engine.cuda_graph_created
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = engine.no_such_thing
    with pytest.raises(AttributeError, match="generate"):
        engine.generate(torch.zeros(1, 1, dtype=torch.long))


def test_the_config_comes_as_dict_file_object_and_arguments(tmp_path: Path) -> None:
    path = tmp_path / "inference.json"
    path.write_text(json.dumps({"dtype": "fp32", "max_out_tokens": 7}))
    given: list[tuple[Any, dict[str, Any]]] = [
        ({"dtype": "fp32", "max_tokens": 7}, {}),
        ({"dtype": "float"}, {"max_out_tokens": 7}),
        (str(path), {}),
        (path, {}),
        (str(path), {"dtype": "fp32"}),
        (str(path), {"dtype": None, "mpu": None, "injection_policy": None, "moe_experts": 1}),
        (str(path), {"quantization_setting": (False, 64), "args": object()}),
        (DeepSpeedInferenceConfig(dtype=torch.float32, max_out_tokens=7), {}),
        (None, {"dtype": torch.float32, "max_out_tokens": 7, "mp_size": 1, "replace_method": "auto"}),
    ]
    for config, more in given:
        engine = deepspeed.init_inference(Small(), config, **more)
        assert (engine._config.dtype, engine._config.max_out_tokens) == (torch.float32, 7)
    assert deepspeed.default_inference_config()["max_out_tokens"] == 1024
    with pytest.raises(
        DeepSpeedConfigError, match=r"dtype is 'fp16' in the config and 'fp32' as an argument"
    ):
        deepspeed.init_inference(Small(), {"dtype": "fp16"}, dtype="fp32")
    with pytest.raises(DeepSpeedConfigError, match="dtyp"):
        deepspeed.init_inference(Small(), {"dtyp": "fp16"})
    with pytest.raises(DeepSpeedConfigError, match="given together with a"):
        deepspeed.init_inference(Small(), DeepSpeedInferenceConfig(), dtype="fp32")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"dtype": "fp33"}, "dtype: 'fp33' is not allowed; expected a torch dtype or its name: fp16"),
        ({"mp_size": 0}, "mp_size: 0 is not allowed; expected an integer >= 1"),
        ({"tensor_parallel": {"tpsize": 2}}, "unknown key; did you mean 'tensor_parallel.tp_size'"),
        ({"replace_with_kernal_inject": True}, "did you mean 'replace_with_kernel_inject'"),
        ({"quant": True}, 'quant: true is not allowed; expected an object; did you mean {"enabled": true}'),
        ({"moe": {"ep": 2}}, "moe.ep: unknown key .value: 2.. Known here: enabled, ep_group"),
        ({"zero": {"stage": 7}, "max_tokens": 0}, "2 errors in DeepSpeed config of init_inference:"),
        ("no_such_file.json", "no_such_file.json"),
    ],
)
def test_wrong_keys_and_values_are_named_with_what_is_expected(config: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words) as refused:
        deepspeed.init_inference(Small(), config)
    assert "pydantic" not in str(refused.value)


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_settings_of_integers_without_integers_are_told(dtype: str) -> None:
    quant = {"weight": {"num_bits": 4}, "activation": {"num_bits": 8}}
    with collect_notes() as notes:
        deepspeed.init_inference(Small(), dtype=dtype, quant=quant)
        deepspeed.init_inference(Small(), dtype=dtype, quant={**quant, "enabled": False})
        deepspeed.init_inference(Small(), dtype=dtype)
    expected = ["quant.weight.num_bits, quant.activation without effect"] if dtype == "fp32" else []
    assert len(notes) == len(expected) and all(a in b for a, b in zip(expected, notes, strict=True)), notes


@pytest.mark.parametrize("config", [{"moe": {"ep_size": 2}}, {"ep_size": 2}])
@distributed(world_size=1)
def test_experts_that_are_not_there_are_not_spread(config: dict[str, Any]) -> None:
    with pytest.raises(DeepSpeedConfigError, match="moe.ep_size=2: .* has no experts"):
        deepspeed.init_inference(Small(), config)
    with pytest.raises(DeepSpeedConfigError, match="either experts or layers"):
        deepspeed.init_inference(Small(), {**config, "mp_size": 2})


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(DeepSpeedConfigError, match="needs a module, not dict"):
        deepspeed.init_inference({}, dtype="fp32")  # type: ignore[arg-type]


class Pipeline:
    """Keeps modules as those of diffusers do."""

    def __init__(self) -> None:
        self.unet, self.vae, self.scheduler = Small(), nn.Linear(4, 4), object()

    def __call__(self, values: Tensor) -> Tensor:
        return self.vae(values)


@distributed(world_size=1)
def test_the_modules_of_a_pipeline_are_prepared_where_they_are() -> None:
    pipeline = Pipeline()
    parts = pipeline.unet.train(), pipeline.vae
    options = {"dtype": torch.bfloat16, "replace_with_kernel_inject": True, "enable_cuda_graph": True}
    made: Any = deepspeed.init_inference(pipeline, **options)  # type: ignore[arg-type]
    assert made is pipeline and (made.unet, made.vae) == parts and not made.unet.training
    assert {param.dtype for part in parts for param in part.parameters()} == {torch.bfloat16}
    assert made(torch.ones(1, 4).bfloat16()).shape == (1, 4)
    with pytest.raises(
        DeepSpeedConfigError, match="checkpoint is for a single model, but Pipeline has unet, vae"
    ):
        deepspeed.init_inference(Pipeline(), checkpoint="somewhere")  # type: ignore[arg-type]


@distributed(world_size=1)
def test_use_triton_is_accepted_with_a_note_whatever_is_installed() -> None:
    """Kernels are chosen by what is installed, so that the key needs no package."""
    with mock.patch.dict(sys.modules, {"triton": None}), collect_notes() as notes:
        config = DeepSpeedInferenceConfig(dtype=torch.float32, use_triton=True)
        engine: Any = deepspeed.init_inference(Small(), config)
    assert isinstance(engine, InferenceEngine) and config.use_triton
    assert any("'use_triton' has no effect" in note for note in notes)


def test_weights_come_from_files_for_a_module_without_them(tmp_path: Path) -> None:
    source = Small()
    state = source.state_dict()
    halves = [{k: v for k, v in state.items() if k.startswith("first")}, {}]
    halves[1] = {k: v for k, v in state.items() if k not in halves[0]}
    torch.save(halves[0], tmp_path / "one.bin")
    save_file(halves[1], tmp_path / "two.safetensors")
    save_file(state, tmp_path / "model.safetensors")
    listed = {"type": "GPT", "checkpoints": ["one.bin", "two.safetensors"], "version": 1.0}
    (tmp_path / "files.json").write_text(json.dumps(listed))
    torch.save(state, tmp_path / "all.pt")
    torch.save({"module": state, "optimizer": None}, tmp_path / "trained.pt")
    (tmp_path / "parts").mkdir()
    for number, half in enumerate(halves):
        torch.save(half, tmp_path / f"parts/part-{number}.bin")
    inputs = torch.randn(2, 4)
    checkpoints: list[tuple[Any, dict[str, Any]]] = [
        ([str(tmp_path / "one.bin"), str(tmp_path / "two.safetensors")], {}),
        (listed, {"base_dir": str(tmp_path)}),
        ({**listed, "base_dir": str(tmp_path)}, {}),
        (str(tmp_path / "files.json"), {}),
        (str(tmp_path), {}),
        ("model.safetensors", {"base_dir": str(tmp_path)}),
        (str(tmp_path / "all.pt"), {}),
        (str(tmp_path / "trained.pt"), {}),
        (str(tmp_path / "parts"), {}),
    ]
    for checkpoint, more in checkpoints:
        with deepspeed.OnDevice(dtype=torch.float32, device="meta"):
            module = Small()
        engine = deepspeed.init_inference(module, dtype="fp32", checkpoint=checkpoint, **more)
        torch.testing.assert_close(engine(inputs), source.eval()(inputs))


@distributed(world_size=2)
def test_weights_come_from_the_latest_checkpoint_of_a_training(tmp_path: Path) -> None:
    trained = Small()
    training, *_ = deepspeed.initialize(
        model=trained,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "Adam"},
            "zero_optimization": {"stage": 3},
        },
    )
    training.save_checkpoint(tmp_path)
    expected = {name: safe_get_full_fp32_param(param) for name, param in training.module.named_parameters()}
    training.destroy()
    engine = deepspeed.init_inference(Small().to("meta"), dtype="fp32", checkpoint=str(tmp_path))
    for name, param in engine.module.named_parameters():
        assert torch.equal(param, expected[name])


def test_missing_and_unreadable_weights_are_named(tmp_path: Path) -> None:
    source = Small()
    save_file({"first.weight": source.first.weight.detach()}, tmp_path / "part.safetensors")
    save_file({"first.weight": torch.zeros(3, 3)}, tmp_path / "other.safetensors")
    refused: list[tuple[Any, str]] = [
        (None, "on the meta device"),
        ([str(tmp_path / "part.safetensors")], "no values for first.bias, last.weight, last.bias, shift"),
        ([str(tmp_path / "other.safetensors")], r"first.weight is \[3, 3\], but the model has \[8, 4\]"),
        ([str(tmp_path / "none.bin")], "none.bin"),
        ([], "the list is empty"),
        (str(tmp_path / "none"), "neither weights"),
        ({"type": "Megatron", "checkpoints": ["a"]}, "checkpoint: there is no file a"),
        ({"type": "Megatron", "version": 0}, "but needs 'checkpoints'"),
    ]
    for checkpoint, words in refused:
        with pytest.raises(DeepSpeedConfigError, match=words):
            deepspeed.init_inference(Small().to("meta"), dtype="fp32", checkpoint=checkpoint)


def test_times_of_forwards() -> None:
    engine = deepspeed.init_inference(Small(), dtype="fp32")
    with pytest.raises(AssertionError, match="profile_model_time"):
        engine.model_times()
    engine.profile_model_time()
    engine.profile_model_time(use_cuda_events=False)
    for _ in range(3):
        engine(torch.randn(2, 4))
    times = engine.model_times()
    assert len(times) == 3 and all(time > 0 for time in times) and engine.model_times() == []
    engine.destroy()
    engine(torch.randn(2, 4))
    assert not engine.module._forward_hooks


def test_compile() -> None:
    engine = deepspeed.init_inference(Small(), dtype="fp32")
    assert not engine.is_compiled
    engine.compile(backend="eager")
    assert engine.is_compiled and engine(torch.randn(2, 4)).shape == (2, 4)


def test_computed_buffers_keep_their_precision() -> None:
    module = Small()
    module.register_buffer("frequencies", torch.ones(3), persistent=False)
    engine = deepspeed.init_inference(module, dtype="bf16")
    assert engine.shift.dtype is torch.bfloat16 and engine.frequencies.dtype is torch.float32


class Wide(nn.Module):
    """Two linear layers, of which one shares its weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.first, self.head = (
            nn.Embedding(12, 96),
            nn.Linear(96, 96),
            nn.Linear(96, 12, bias=False),
        )
        self.norm = nn.LayerNorm(96)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.first(self.table(tokens))))


@pytest.mark.parametrize("rows", [1, 5, 20])
def test_injected_kernels_give_what_the_layers_do(rows: int, caplog: pytest.LogCaptureFixture) -> None:
    plain = deepspeed.init_inference(Wide(), dtype="bf16")
    module = Wide()
    engine = deepspeed.init_inference(module, dtype="bf16", replace_with_kernel_inject=True)
    if native.library() is not None:
        assert [type(layer) for layer in (module.first, module.head)] == [HostLinear] * 2
    tokens = torch.arange(rows) % 12
    with torch.no_grad():
        torch.testing.assert_close(engine(tokens), plain(tokens), rtol=2e-2, atol=2e-2)
    assert list(module.state_dict()) == list(plain.module.state_dict())
    assert inject_kernels(Wide()).startswith("0 linear layers")  # fp32 is as fast as memory already


@pytest.mark.parametrize(("bits", "groups", "error"), [(8, 1, 0.02), (8, 2, 0.02), (4, 1, 0.25)])
def test_weights_of_few_bits(bits: int, groups: int, error: float) -> None:
    module, tokens = Wide(), torch.arange(3)
    wanted = module(tokens).detach()
    table = module.table.weight.detach().clone()
    quant = {"weight": {"num_bits": bits, "q_groups": groups}}
    engine = deepspeed.init_inference(module, dtype="int8", quant=quant)
    # Its weight is the table's.
    assert isinstance(module.first, IntegerLinear) and type(module.head) is nn.Linear
    assert module.first.words.nbytes == 96 * 128 * bits // 8 and module.first.scales.shape == (96, groups)
    torch.testing.assert_close(module.table.weight.float(), table, rtol=1e-2, atol=1e-2)
    for given in (tokens, tokens.repeat(4)):
        with torch.no_grad():
            found = engine(given)[:3].float()
        assert float((found - wanted).norm() / wanted.norm()) < error
    again = Wide()
    deepspeed.init_inference(again, dtype="int8", quant=quant)
    again.load_state_dict(module.state_dict())
    assert again.to(torch.float32).first.scales.dtype is torch.float32
    for fewer in (5, 4):  # 4 divides the 128 columns, and not into whole runs
        untouched = Wide()
        with pytest.raises(DeepSpeedConfigError, match=rf"quant\.weight\.q_groups={fewer} .*'\w+'.*1 works"):
            deepspeed.init_inference(untouched, dtype="int8", quant={"weight": {"q_groups": fewer}})
        assert type(untouched.first) is nn.Linear


def test_inputs_are_rounded_to_8_bits_where_activations_are_named() -> None:
    quant = {"weight": {"num_bits": 8}, "activation": {"num_bits": 8}}
    plain, module, tokens = Wide(), Wide(), torch.arange(3)
    deepspeed.init_inference(plain, dtype="int8", quant={"weight": {"num_bits": 8}})
    deepspeed.init_inference(module, dtype="int8", quant=quant)
    assert module.first.rounds_inputs and not plain.first.rounds_inputs
    x = module.table(tokens).float().detach()
    scales = x.abs().amax(-1, keepdim=True) / 127
    rounded = (x / scales).round() * scales
    with torch.no_grad():
        found, wanted = module.first(x), plain.first(rounded)
    torch.testing.assert_close(found.float(), wanted.float(), rtol=1e-2, atol=1e-3)
    off = deepspeed.init_inference(Wide(), dtype="int8", quant={"activation": {"enabled": False}})
    assert not off.module.first.rounds_inputs
    with pytest.raises(DeepSpeedConfigError, match="quant.activation: num_bits=4"):
        deepspeed.init_inference(Wide(), dtype="int8", quant={"activation": {"num_bits": 4}})


def test_kernel_injection_puts_weights_on_huge_pages(advised):
    deepspeed.init_inference(nn.Linear(2048, 2048), dtype="fp32")
    assert advised == []  # the module stays as it is
    module = deepspeed.init_inference(
        nn.Linear(2048, 2048), dtype="fp32", replace_with_kernel_inject=True
    ).module
    first = -(-module.weight.data_ptr() // huge_pages.HUGE_PAGE)
    assert {first, first + 1, first + 2} <= {page // huge_pages.HUGE_PAGE for page, _ in advised}
