"""``InferenceEngine``: a module prepared for inference."""

from __future__ import annotations

import functools
import time
from typing import Any

import torch
from torch import nn

from deepspeed.base.accelerator import get_accelerator
from deepspeed.base.logging import log_dist
from deepspeed.comm.collectives import Communicator
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.config.section import note
from deepspeed.inference.config import DeepSpeedInferenceConfig
from deepspeed.inference.generation.fused import FusedGeneration
from deepspeed.inference.kernels import IntegerLinear, inject_kernels
from deepspeed.inference.loading import checkpoint_tensors, load_weights
from deepspeed.inference.quantized.selection import quantize_as_configured, settings_of_integers
from deepspeed.inference.split.layers import (
    check_length,
    same_random_numbers,
    split_over,
    spread_experts,
    tensor_parallel_group,
)
from deepspeed.inference.split.rank_files import save_parts
from deepspeed.inference.streaming import StreamedWeights, blocks_ahead
from deepspeed.inference.weight_stores import make_store
from deepspeed.ops.huge_pages import collapse, weights_of
from deepspeed.zero.params import gather_permanently


class InferenceEngine(nn.Module):
    """Runs ``module``. Attributes that the engine lacks are looked up on the module, so that the engine can replace it
    in a pipeline of Transformers.

    Args:
        model: the module; it is changed in place.
        config: the settings.

    Raises:
        DeepSpeedConfigError: the config asks for a feature that this release lacks, or the model cannot be split.
    """

    def __init__(self, model: nn.Module, config: DeepSpeedInferenceConfig) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise DeepSpeedConfigError(
                f"init_inference needs a module, not {type(model).__name__}: pass the model of a pipeline, "
                "and put the engine in its place"
            )
        _warn_of_ignored_keys(config)
        gather_permanently(model)
        self._config = config
        self.module = model.eval()
        self._times: list[float] = []
        self._timing: list[Any] = []
        self._compiled = False
        device = torch.device(get_accelerator().current_device_name())
        store = make_store(config.zero, device)
        self._keeps_dtype = store is not None
        self.load_model_with_checkpoint(model)
        self._dtype = _compute_dtype() if config.dtype is torch.int8 else config.dtype
        if store is None:
            _cast(model, self._dtype)
        self._expert_group = self._spread_experts()
        self.mp_group = self._split()
        self._save_parts()
        self.streamed: StreamedWeights | None = None
        self._generation: FusedGeneration | None = None
        if store is not None:
            self.streamed = StreamedWeights(
                model,
                store,
                device,
                ahead=blocks_ahead(model, config.zero),
                least=int(config.zero.param_persistence_threshold),
                prepare=self._prepare,
            )
            log_dist(f"inference: {self.streamed.describe()}", ranks=[0])
            return
        self._use_kernels(model)
        if config.replace_with_kernel_inject:
            self._generation = FusedGeneration()
        if not config.keep_module_on_host:
            model.to(device)
        if config.replace_with_kernel_inject:
            collapse(weights_of(model))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    # ---------------------------------------------------------------------------------------------- running

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module and return its output. Ranks of one tensor-parallel group must get the same inputs."""
        return self.module(*inputs, **kwargs)

    def generate(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module's ``generate``, with all of its features: sampling, beams, streamers, left padding.
        Ranks of one tensor-parallel group draw the same random numbers.

        Raises:
            AttributeError: the module has no ``generate``.
            RuntimeError: the prompt is longer than ``max_out_tokens``, or leaves no room for ``min_out_tokens``.
        """
        config = self._config
        kept = config.min_out_tokens if "min_out_tokens" in config.model_fields_set else 0
        check_length(inputs, kwargs, config.max_out_tokens, kept)
        module: Any = self.module
        generate = module.generate
        if self._generation is not None and getattr(generate, "__func__", None) is type(module).generate:
            generate = functools.partial(self._generation.generate, module)
        with same_random_numbers(self.mp_group or self._expert_group):
            return generate(*inputs, **kwargs)

    # ------------------------------------------------------------------------------------------- measuring

    def profile_model_time(self, use_cuda_events: bool = True) -> None:
        """Time every forward of the module from now on, in milliseconds. ``use_cuda_events`` has no effect: the device
        is synchronized."""
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
        """Return and clear the times of forwards, in ms. AssertionError: ``profile_model_time`` was not called."""
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
        """False: forwards are not captured as CUDA graphs."""
        return False

    def load_model_with_checkpoint(self, r_module: nn.Module) -> None:
        """Load the weights named by the config's ``checkpoint``, if any, into ``r_module``.

        DeepSpeedConfigError: weights are missing, or the module is on the meta device and there is no ``checkpoint``.
        """
        config = self._config
        folder = config.base_dir or config.checkpoint_config.base_dir or ""
        source = config.checkpoint_config.checkpoint_dir if config.checkpoint is None else config.checkpoint
        if source is not None:
            load_weights(
                r_module, checkpoint_tensors(source, folder), "checkpoint", cast=not self._keeps_dtype
            )
        elif any(param.is_meta for param in r_module.parameters()):
            raise DeepSpeedConfigError(
                "the model has no weights (it is on the meta device): pass their files as checkpoint="
            )

    def destroy(self) -> None:
        """Remove the engine's hooks from the module, which remains usable."""
        for handle in self._timing:
            handle.remove()
        self._timing = []
        if self.streamed is not None:
            self.streamed.destroy()
            self.streamed = None

    # -------------------------------------------------------------------------------------------- at the start

    def _split(self) -> Communicator | None:
        """Split the layers over ranks; return the tensor-parallel group, None without tensor parallelism."""
        tp = self._config.tensor_parallel
        if tp.tp_size == 1 or not tp.enabled:
            return None
        group = tensor_parallel_group(tp.tp_size, tp.tp_group, tp.mpu)
        grain = tp.tp_grain_size if "tp_grain_size" in tp.model_fields_set else 1
        split_over(self.module, group, grain, summed=_summed_layers(self._config))
        return group

    def _spread_experts(self) -> Communicator | None:
        """Split the experts over ranks; return the expert-parallel group, None without expert parallelism."""
        moe = self._config.moe
        if not moe.enabled or moe.ep_size == 1:
            return None
        if self._config.tensor_parallel.tp_size > 1:
            raise DeepSpeedConfigError(
                f"init_inference: moe.ep_size={moe.ep_size} with "
                f"tensor_parallel.tp_size={self._config.tensor_parallel.tp_size}: ranks can share either "
                "experts or layers; set one of them to 1"
            )
        return spread_experts(self.module, moe.ep_size, moe.ep_group)

    def _save_parts(self) -> None:
        """Save the weights before they are quantized: the files load at any world size, in any dtype."""
        path = self._config.save_mp_checkpoint_path or self._config.checkpoint_config.save_mp_checkpoint_path
        if path:
            written = save_parts(self.module, path, self._dtype)
            log_dist(f"inference: the weights of all ranks are in {written.parent}", ranks=[0])

    def _prepare(self, part: nn.Module) -> None:
        """Cast a part of the module and inject kernels, before its weights are offloaded."""
        _cast(part, self._dtype)
        self._use_kernels(part)

    def _use_kernels(self, part: nn.Module) -> None:
        config = self._config
        try:
            for line in quantize_as_configured(part, config, self._dtype):
                log_dist(f"inference: {line}", ranks=[0] if part is self.module else [])
        except ValueError as error:
            raise DeepSpeedConfigError(f"init_inference: {error}") from error
        if config.replace_with_kernel_inject:
            line = inject_kernels(part)
            log_dist(f"inference: {line}", ranks=[0] if part is self.module else [])


def _summed_layers(config: DeepSpeedInferenceConfig) -> tuple[str, ...]:
    """Return the layers listed in ``injection_policy`` and ``injection_policy_tuple``; policy classes list none."""
    named: list[str] = []
    for value in (*(config.injection_policy or {}).values(), config.injection_policy_tuple):
        listed = (value,) if isinstance(value, str) else value if isinstance(value, (tuple, list)) else ()
        named += [each for each in listed if isinstance(each, str)]
    return tuple(named)


def _compute_dtype() -> torch.dtype:
    """Return the dtype of activations between quantized weights."""
    return torch.bfloat16 if get_accelerator().is_bf16_supported() else torch.float16


def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters and persistent buffers. Non-persistent buffers are computed (rotary frequencies, for example) and
    keep their precision."""
    for layer in module.modules():
        if isinstance(layer, IntegerLinear):  # scales keep their dtype
            continue
        computed = layer._non_persistent_buffers_set
        for param in layer._parameters.values():
            if param is not None and param.is_floating_point():
                param.data = param.data.to(dtype)
        for name, buffer in layer._buffers.items():
            if buffer is not None and buffer.is_floating_point() and name not in computed:
                layer._buffers[name] = buffer.to(dtype)


_WITHOUT_EFFECT = {
    "enable_cuda_graph": "forward passes are not captured as CUDA graphs",
    "use_triton": "kernels are chosen by the device and by what is installed",
    "triton_autotune": "kernels are chosen by the device",
    "transposed_mode": "weights keep the model's layout",
    "triangular_masking": "the model's own masks are used",
    "return_tuple": "layers return what the model's layers do",
    "set_empty_params": "build the model with deepspeed.OnDevice(device='meta')",
    "training_mp_size": "the checkpoint files describe how its weights were split",
    "config": "settings have their own keys",
}


def _warn_of_ignored_keys(config: DeepSpeedInferenceConfig) -> None:
    """Warn about keys without effect."""
    for key, why in _WITHOUT_EFFECT.items():
        if getattr(config, key) != type(config).model_fields[key].default:
            note(f"init_inference: '{key}' has no effect: {why}")
    idle = settings_of_integers(config)
    if idle and config.dtype is not torch.int8:
        note(f"init_inference: {', '.join(idle)} without effect: weights are integers with dtype='int8'")
