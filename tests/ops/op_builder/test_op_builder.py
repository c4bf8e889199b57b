from __future__ import annotations

import importlib
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed.ops
from deepspeed.base.accelerator import get_accelerator
from deepspeed.ops import native, op_builder
from deepspeed.ops.op_builder import ALL_OPS, OpBuilder
from deepspeed.ops.op_builder.builder import ISA_TITLES
from deepspeed.ops.op_builder.flat_tensors import flatten, unflatten
from tests.test_architecture import resolve

ROOT = Path(__file__).resolve().parents[3]
EVERY_OP = pytest.mark.parametrize("builder", ALL_OPS.values(), ids=ALL_OPS)

# Documented class names and NAMEs.
DOCUMENTED = {
    "AsyncIOBuilder": "async_io",
    "CCLCommBuilder": "deepspeed_ccl_comm",
    "CPUAdagradBuilder": "cpu_adagrad",
    "CPUAdamBuilder": "cpu_adam",
    "CPULionBuilder": "cpu_lion",
    "DeepCompileBuilder": "dc",
    "EvoformerAttnBuilder": "evoformer_attn",
    "FPQuantizerBuilder": "fp_quantizer",
    "FusedAdamBuilder": "fused_adam",
    "FusedLambBuilder": "fused_lamb",
    "FusedLionBuilder": "fused_lion",
    "GDSBuilder": "gds",
    "InferenceBuilder": "transformer_inference",
    "InferenceCoreBuilder": "inference_core_ops",
    "InferenceCutlassBuilder": "cutlass_ops",
    "PinMemoryBuilder": "pin_memory",
    "QuantizerBuilder": "quantizer",
    "RaggedOpsBuilder": "ragged_device_ops",
    "RaggedUtilsBuilder": "ragged_ops",
    "RandomLTDBuilder": "random_ltd",
    "ShareMemCommBuilder": "deepspeed_shm_comm",
    "SparseAttnBuilder": "sparse_attn",
    "SpatialInferenceBuilder": "spatial_inference",
    "StochasticTransformerBuilder": "stochastic_transformer",
    "TransformerBuilder": "transformer",
    "UtilsBuilder": "utils",
}


def test_documented_builders() -> None:
    assert {name: getattr(op_builder, name).NAME for name in DOCUMENTED} == DOCUMENTED
    assert sorted(ALL_OPS) == sorted(DOCUMENTED.values())
    with pytest.raises(AttributeError, match=r"no op builder 'NopeBuilder'.*CPUAdamBuilder"):
        _ = op_builder.NopeBuilder


def test_compatible_ops() -> None:
    compatible = deepspeed.ops.__compatible_ops__
    assert compatible == {name: builder().is_compatible() for name, builder in ALL_OPS.items()}
    assert (
        compatible["cpu_adam"]
        and compatible[importlib.import_module("deepspeed.ops.aio").AsyncIOBuilder.NAME]
    )


@EVERY_OP
def test_interface(builder: type[OpBuilder]) -> None:
    made = builder()
    assert made.name == builder.NAME and builder.BUILD_VAR.startswith("DS_BUILD_")
    assert made.absolute_name().startswith("deepspeed.")
    assert all((ROOT / source).is_file() for source in made.sources())


@EVERY_OP
def test_an_op_loads_exactly_if_it_is_compatible(
    builder: type[OpBuilder], capsys: pytest.CaptureFixture[str]
) -> None:
    made = builder()
    if made.is_compatible(verbose=True):
        module = made.load()
        assert module.__name__ == made.OP.module and made.path() and not made.why_not()
    else:
        assert made.NAME in capsys.readouterr().out and made.path() == ""
        with pytest.raises(
            NotImplementedError, match=rf"op {made.NAME}(:| needs).*{re.escape(made.OP.instead)}"
        ):
            made.load()


def test_loading_starts_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **_: object) -> None:
        raise AssertionError(f"a process was started: {arguments}")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(os, "system", refuse)
    monkeypatch.setenv("DS_BUILD_OPS", "1")
    for builder in ALL_OPS.values():
        if builder().is_compatible():
            builder().load(verbose=True)


def test_optimizers_are_what_their_op_loads() -> None:
    assert hasattr(op_builder.CPUAdamBuilder().load(), "DeepSpeedCPUAdam")
    assert hasattr(op_builder.FusedLambBuilder().load(), "FusedLamb")


def test_builder_describes_an_extension() -> None:
    extension = op_builder.CPUAdamBuilder().builder()
    assert extension.name == "deepspeed.ops.adam.cpu_adam_op" and extension.sources == ["csrc/adam/adam.cpp"]
    assert "-ffp-contract=off" in extension.extra_compile_args
    for name in ("GDSBuilder", "UtilsBuilder"):
        with pytest.raises(NotImplementedError, match=r"gds|utils"):
            getattr(op_builder, name)().builder()


def test_paths_follow_the_library_and_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    adam, fused = op_builder.CPUAdamBuilder(), op_builder.FusedAdamBuilder()
    shared, utils = op_builder.ShareMemCommBuilder(), op_builder.UtilsBuilder()
    for isa, title in (("avx2", "native AVX2"), ("plain", "native C++"), ("avx512", "native AVX-512")):
        monkeypatch.setattr(native, "isa", lambda isa=isa: isa)
        assert adam.path() == fused.path() == title and utils.path() == "pytorch"
    monkeypatch.setattr(type(get_accelerator()), "device_name", lambda self, index=None: "cuda")
    assert adam.path() == "native AVX-512" and fused.path() == "pytorch"
    monkeypatch.setattr(type(get_accelerator()), "is_triton_supported", lambda self: True)
    assert fused.path() == "triton" and op_builder.FusedLionBuilder().path() == "pytorch"
    sparse, dropout = op_builder.SparseAttnBuilder(), op_builder.TransformerBuilder()
    assert sparse.path() == dropout.path() == "pytorch"  # Triton, but no GPU that our kernels are for
    monkeypatch.setattr("deepspeed.ops.gpu.offered", lambda: True)
    assert sparse.path() == op_builder.EvoformerAttnBuilder().path() == "triton"
    assert dropout.path() == "triton (dropout)" and adam.path() == "native AVX-512"
    monkeypatch.setattr(native, "isa", lambda: None)
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr("deepspeed.comm.transports.shared_memory.is_available", lambda: False)
    assert adam.path() == "pytorch" and adam.is_compatible() and "C++20 compiler" in adam.hint()
    assert not shared.is_compatible() and "gloo" in shared.why_not() and utils.hint() == ""


def test_accelerator_finds_builders() -> None:
    accelerator = get_accelerator()
    assert accelerator.op_builder_dir() == "deepspeed.ops.op_builder"
    assert accelerator.get_op_builder("CPUAdamBuilder") is op_builder.CPUAdamBuilder
    assert isinstance(accelerator.create_op_builder("AsyncIOBuilder"), OpBuilder)
    assert accelerator.create_op_builder("NopeBuilder") is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about the host")
@pytest.mark.skipif(native.library() is None, reason="is about the native library")
def test_kernels_of_the_host_are_named() -> None:
    title = f"native {ISA_TITLES[native.isa() or '']}"
    paths = {name: builder().path() for name, builder in ALL_OPS.items()}
    for name in ("cpu_adam", "fused_lamb", "async_io", "fp_quantizer", "sparse_attn"):
        assert paths[name] == title
    assert paths["stochastic_transformer"] == f"{title} (dropout)"
    assert paths["quantizer"] == f"{title} (symmetric groups)"
    assert paths["evoformer_attn"] == paths["random_ltd"] == paths["spatial_inference"] == "pytorch"


@EVERY_OP
def test_what_is_said_instead_exists(builder: type[OpBuilder]) -> None:
    """Every dotted name of ours in the sentence is there."""
    for name in re.findall(r"deepspeed(?:\.\w+)+", builder.OP.instead):
        assert resolve(name) is not None, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flat_tensors(dtype: torch.dtype) -> None:
    tensors: list[Any] = [
        torch.arange(6, dtype=dtype).view(2, 3).t(),
        torch.ones((), dtype=dtype),
        torch.empty(0),
    ]
    tensors[2] = tensors[2].to(dtype)
    flat = flatten(tensors)
    assert flat.shape == (7,)
    parts = unflatten(flat, tensors)
    assert all(torch.equal(part, tensor) for part, tensor in zip(parts, tensors, strict=True))
    parts[1].fill_(9)
    assert flat[6] == 9 and tensors[1] == 1


def test_builders_tell_for_which_rocm_torch_was_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    assert not OpBuilder.is_rocm_pytorch() and OpBuilder.installed_rocm_version() == (0, 0)
    monkeypatch.setattr(torch.version, "hip", "6.2.41133-dd7f95766")
    assert op_builder.CPUAdamBuilder.is_rocm_pytorch()
    assert op_builder.CPUAdamBuilder.installed_rocm_version() == (6, 2)
