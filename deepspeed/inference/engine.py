"""``InferenceEngine``: a module made ready for inference."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.collectives import Communicator
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.config.sections import note
from deepspeed.inference.config import DeepSpeedInferenceConfig, QuantTypeEnum
from deepspeed.inference.kernels import inject_kernels, quantize_linears
from deepspeed.inference.loading import load_weights, tensors_in, weight_files
from deepspeed.inference.splitting import (
    check_length,
    same_random_numbers,
    split_over,
    tensor_parallel_group,
)
from deepspeed.utils.logging import log_dist

__all__ = ["InferenceEngine"]


class InferenceEngine(nn.Module):
    """Runs ``module``. What is asked of the engine and is not here is asked of the module, so that it can take the
    module's place in a pipeline of Transformers.

    Args:
        model: the module; it is changed in place.
        config: what to do with it.

    Raises:
        DeepSpeedConfigError: the config asks for what this release does not have, or the model cannot be split.
    """

    def __init__(self, model: nn.Module, config: DeepSpeedInferenceConfig) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise DeepSpeedConfigError(
                f"init_inference takes a module, not {type(model).__name__}: of a pipeline give the model, and put the "
                "engine in its place"
            )
        _refuse_missing(config)
        self._config = config
        self.module = model.eval()
        self._times: list[float] = []
        self._timing: list[Any] = []
        self._compiled = False
        self.load_model_with_checkpoint(model)
        self._dtype = _compute_dtype() if config.dtype is torch.int8 else config.dtype
        _cast(model, self._dtype)
        self.mp_group = self._split()
        self._use_kernels()
        if not config.keep_module_on_host:
            model.to(get_accelerator().current_device_name())

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    # ---------------------------------------------------------------------------------------------- running

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """What the module returns. Ranks that share its layers are given the same inputs."""
        return self.module(*inputs, **kwargs)

    def generate(self, *inputs: Any, **kwargs: Any) -> Any:
        """What the module's ``generate`` returns, with all that it knows: sampling, beams, streamers, left padding.
        Ranks that share its layers draw the same random numbers.

        Raises:
            AttributeError: the module has no ``generate``.
            RuntimeError: the prompt is longer than ``max_out_tokens``.
        """
        check_length(inputs, kwargs, self._config.max_out_tokens)
        module: Any = self.module
        with same_random_numbers(self.mp_group):
            return module.generate(*inputs, **kwargs)

    # ------------------------------------------------------------------------------------------- measuring

    def profile_model_time(self, use_cuda_events: bool = True) -> None:
        """Time every forward of the module from now on, in milliseconds. ``use_cuda_events`` makes no difference: the
        device is waited for."""
        if self._timing:
            return
        started: list[float] = []

        def before(*_: Any) -> None:
            get_accelerator().synchronize()
            started.append(time.perf_counter())

        def after(*_: Any) -> None:
            get_accelerator().synchronize()
            self._times.append((time.perf_counter() - started.pop()) * 1e3)

        self._timing = [
            self.module.register_forward_pre_hook(before),
            self.module.register_forward_hook(after),
        ]

    def model_times(self) -> list[float]:
        """Milliseconds of each forward since the last call. AssertionError: ``profile_model_time`` was not called."""
        if not self._timing:
            raise AssertionError("model times are measured after engine.profile_model_time()")
        times, self._times = self._times, []
        return times

    # --------------------------------------------------------------------------------------------- changing

    def compile(self, backend: Any = None, compile_kwargs: dict[str, Any] | None = None) -> None:
        """``torch.compile`` the module in place."""
        if not self._compiled:
            self.module.compile(
                backend=backend or get_accelerator().get_compile_backend(), **(compile_kwargs or {})
            )
            self._compiled = True

    @property
    def is_compiled(self) -> bool:
        return self._compiled

    @property
    def cuda_graph_created(self) -> bool:
        """Forwards are not captured as CUDA graphs."""
        return False

    def load_model_with_checkpoint(self, r_module: nn.Module) -> None:
        """Give ``r_module`` the weights that the config's ``checkpoint`` names, if it does.

        DeepSpeedConfigError: weights are missing, also those of a module on the meta device without a ``checkpoint``.
        """
        config = self._config
        folder = config.base_dir or config.checkpoint_config.base_dir or ""
        source = config.checkpoint_config.checkpoint_dir if config.checkpoint is None else config.checkpoint
        if source is not None:
            load_weights(r_module, tensors_in(weight_files(source, folder)), "checkpoint")
        elif any(param.is_meta for param in r_module.parameters()):
            raise DeepSpeedConfigError(
                "the model has no weights (it is on the meta device): name their files as checkpoint="
            )

    def destroy(self) -> None:
        """Nothing of the engine is left on the module, which still runs."""
        for handle in self._timing:
            handle.remove()
        self._timing = []

    # -------------------------------------------------------------------------------------------- at the start

    def _split(self) -> Communicator | None:
        """The ranks that share each layer, None if this one has them all."""
        tp = self._config.tensor_parallel
        if tp.tp_size == 1 or not tp.enabled:
            return None
        group = tensor_parallel_group(tp.tp_size, tp.tp_group, tp.mpu)
        split_over(self.module, group, tp.tp_grain_size if "tp_grain_size" in tp.model_fields_set else 1)
        return group

    def _use_kernels(self) -> None:
        config = self._config
        if config.dtype is torch.int8:
            weight = config.quant.weight
            try:
                text = quantize_linears(self.module, weight.num_bits, weight.q_groups, self._dtype)
            except ValueError as error:
                raise DeepSpeedConfigError(f"init_inference: {error}") from error
            log_dist(f"inference: {text}", ranks=[0])
        if config.replace_with_kernel_inject:
            log_dist(f"inference: {inject_kernels(self.module)}", ranks=[0])


def _compute_dtype() -> torch.dtype:
    """Of activations between quantized weights."""
    return torch.bfloat16 if get_accelerator().is_bf16_supported() else torch.float16


def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Parameters, and buffers that are saved with them. Others are computed (frequencies of rotary positions, say), and
    keep the precision in which they were."""
    for layer in module.modules():
        computed = layer._non_persistent_buffers_set
        for param in layer._parameters.values():
            if param is not None and param.is_floating_point():
                param.data = param.data.to(dtype)
        for name, buffer in layer._buffers.items():
            if buffer is not None and buffer.is_floating_point() and name not in computed:
                layer._buffers[name] = buffer.to(dtype)


_WITHOUT_EFFECT = {
    "enable_cuda_graph": "forwards are not captured as CUDA graphs",
    "use_triton": "kernels are chosen by the device",
    "triton_autotune": "kernels are chosen by the device",
    "transposed_mode": "weights keep the model's layout",
    "injection_policy": "layers are split by the model's graph",
    "injection_policy_tuple": "layers are split by the model's graph",
}


def _refuse_missing(config: DeepSpeedInferenceConfig) -> None:
    """DeepSpeedConfigError: a key asks for what this release does not have. Keys without effect are remarked on."""
    refused = {
        "dtype=int8 with tensor_parallel": (
            config.dtype is torch.int8 and config.tensor_parallel.tp_size > 1,
            "layers are split, or quantized; use fp16, bf16 or fp32",
        ),
        "quant.weight.q_type=asymmetric": (
            config.dtype is torch.int8 and QuantTypeEnum(config.quant.weight.q_type) is QuantTypeEnum.asym,
            "weights are quantized symmetrically; leave it out",
        ),
        "moe.ep_size": (config.moe.ep_size > 1, "experts are not spread over ranks yet; use 1"),
        "zero.stage": (config.zero.stage > 0, "weights are not streamed from host or files yet; use 0"),
        "save_mp_checkpoint_path": (
            bool(config.save_mp_checkpoint_path or config.checkpoint_config.save_mp_checkpoint_path),
            "split weights are not saved yet; leave it out",
        ),
    }
    for key, (asked, instead) in refused.items():
        if asked:
            raise DeepSpeedConfigError(f"init_inference: {key} is not implemented in this release: {instead}")
    for key, why in _WITHOUT_EFFECT.items():
        if getattr(config, key):
            note(f"init_inference: '{key}' has no effect: {why}")
