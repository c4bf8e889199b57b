"""Activation checkpointing: keep a region's inputs instead of its activations, and recompute it in backward.

(Chen et al., *Training Deep Nets with Sublinear Memory Cost*, 2016.)

The settings for keeping inputs, and the named RNG states, belong to an engine whose config has the section, and apply
inside its ``forward``; all other regions use the process-wide settings. Functions called outside a forward, such as
``configure``, act on the newest such engine, else on the process-wide settings. Torch (``torch.utils.checkpoint``)
handles recomputation, RNG states of the default generators, autocast and detached inputs. This module adds structured
arguments and results, the named RNG states of ``rng.py``, storage of inputs (``kept_inputs.py``), and timing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from deepspeed.base.accelerator import get_accelerator, synchronize_stream
from deepspeed.base.logging import print_dist
from deepspeed.base.memory import GIB
from deepspeed.base.newest import Newest
from deepspeed.comm.collectives import Communicator, Network, process_network
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.config.reader import read_config
from deepspeed.config.sections.model import DeepSpeedActivationCheckpointingConfig
from deepspeed.observe.timer import SynchronizedWallClockTimer
from deepspeed.transforms.recompute.kept_inputs import Arena, HostInputs, KeptInputs
from deepspeed.transforms.recompute.rng import CudaRNGStatesTracker as CudaRNGStatesTracker
from deepspeed.transforms.recompute.rng import reseed_tensor_parallel, seed_model_parallel
from deepspeed.transforms.recompute.scope import PROCESS, begin_forward, end_forward, running

SECTION = "activation_checkpointing"


@dataclass(eq=False)
class Settings:
    """Settings of one engine, or process-wide."""

    configured: bool = False
    mpu: Any = None
    section: DeepSpeedActivationCheckpointingConfig = field(default_factory=lambda: _section_of(None))
    arena: Arena | None = None
    host_inputs: HostInputs = field(default_factory=HostInputs)
    tracker: CudaRNGStatesTracker = field(default_factory=CudaRNGStatesTracker)
    network: Network = process_network
    layers: list[Any] = field(default_factory=list)
    """Handles of hooks on layers that the model checkpoints itself."""
    tensor_ranks: Communicator | None = None
    """The engine's tensor-parallel ranks, for use without a model-parallel unit."""

    def group(self) -> Communicator:
        """Return the ranks across which inputs are partitioned: one unless partitioning is on and there is a group."""
        if not self.section.partition_activations:
            return Communicator(None)
        for getter in ("get_tensor_model_parallel_group", "get_model_parallel_group"):
            if hasattr(self.mpu, getter):
                group = getattr(self.mpu, getter)()
                return Communicator(None) if group is None else self.network.communicator(group)
        return self.tensor_ranks or Communicator(None)

    def keep_layers(self, module: Any) -> None:
        """Offload the inputs of layers that ``module`` checkpoints itself to host memory too, if configured."""
        if self is not _state.process and self.section.cpu_checkpointing:
            self.layers = keep_inputs_of_layers(module, lambda: _keeping_inputs(self))

    def leave(self) -> None:
        """Unregister the settings of a destroyed engine: module functions then act on the previous one."""
        for handle in self.layers:
            handle.remove()
        self.layers = []
        _state.engines.remove(self)

    def kept_inputs(self) -> KeptInputs:
        section = self.section
        regions = section.number_checkpoints if section.partition_activations else None
        in_arena = section.contiguous_memory_optimization and bool(regions)
        if in_arena and self.arena is None:
            self.arena = Arena(regions or 1)
        arena = self.arena if in_arena else None
        return KeptInputs(
            self.group(), offload=section.cpu_checkpointing, arena=arena, host_inputs=self.host_inputs
        )


# --- Settings -------------------------------------------------------------------------------------


def configure(
    mpu_: Any,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Configure how checkpointed regions keep their inputs. Given arguments override the config.

    Args:
        mpu_: model-parallel unit, whose tensor-parallel ranks share the inputs. None: those of the newest engine.
        deepspeed_config: path, dict or object with an ``activation_checkpointing`` section.
        partition_activations: partition inputs across the tensor-parallel ranks, which hold replicas of them.
        contiguous_checkpointing: keep inputs in preallocated buffers, for ``num_checkpoints`` regions. Needs
            ``partition_activations``.
        checkpoint_in_cpu: offload inputs to host memory.
        synchronize: synchronize with the device at the boundaries of each region.
        profile: print the time and memory of each region.
    """
    given = {
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": num_checkpoints,
        "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize,
        "profile": profile,
    }
    section = _section_of(deepspeed_config).model_dump()
    section.update({key: value for key, value in given.items() if value is not None})
    checked = DeepSpeedActivationCheckpointingConfig.model_validate(section)
    if checked.contiguous_memory_optimization:
        if not checked.partition_activations:
            raise DeepSpeedConfigError(
                f"{SECTION}.contiguous_memory_optimization is true and partition_activations is false: "
                f"contiguous buffers are for partitioned inputs; set partition_activations to true too."
            )
        if checked.number_checkpoints is None:
            raise DeepSpeedConfigError(
                f"{SECTION}.contiguous_memory_optimization is true and number_checkpoints is not given: set "
                f"it to the number of layers that a forward pass checkpoints, whose inputs the buffers hold."
            )
    settings = _current()
    settings.mpu, settings.section, settings.configured = mpu_, checked, True
    settings.arena = None


def _section_of(config: Any) -> DeepSpeedActivationCheckpointingConfig:
    validated = DeepSpeedActivationCheckpointingConfig.model_validate
    if config is None:
        return validated({})
    if isinstance(config, (str, os.PathLike, Mapping)):
        return validated(read_config(config).data.get(SECTION, {}))
    for name in (f"{SECTION}_config", SECTION):
        section = getattr(config, name, None)
        if section is not None:
            return validated(section if isinstance(section, Mapping) else section.model_dump())
    raise DeepSpeedConfigError(
        f"deepspeed_config={config!r} holds no section {SECTION}; give a path, a dict or a DeepSpeedConfig."
    )


class _CheckpointState:
    """All settings. ``process``: process-wide, configured before any engine had its own."""

    def __init__(self) -> None:
        self.process = Settings()
        self.engines: Newest[Settings] = Newest()


_state = _CheckpointState()


def _current() -> Settings:
    """Return the settings of the engine whose forward or recomputation runs; else of the newest; else the process's."""
    found = running.get()
    if found is PROCESS:
        return _state.process
    return found or _state.engines.get() or _state.process


def settings_for(
    config: Any, mpu: Any, network: Network, tensor_ranks: Communicator | None = None
) -> Settings:
    """Create the settings of a new engine whose config has the section.

    If no other engine has settings, it takes over the process-wide ones: arguments of ``configure`` stay in effect, and
    seeded RNG states become the engine's. Otherwise it starts with a copy of the newest engine's RNG states.
    """
    given: DeepSpeedActivationCheckpointingConfig = config.activation_checkpointing_config
    newest, settings = _state.engines.get(), _state.process
    if newest is not None or not settings.configured:
        tracker = settings.tracker if newest is None else newest.tracker.copy()
        settings = Settings(mpu=mpu, section=given.model_copy(), tracker=tracker, network=network)
    settings.tensor_ranks = tensor_ranks
    _state.engines.add(settings)
    return settings


@contextlib.contextmanager
def applied(settings: Settings) -> Iterator[None]:
    """Apply an engine's ``settings`` inside the block."""
    before = begin_forward(settings)
    try:
        yield
    finally:
        end_forward(before)


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """Return the tracker whose states are restored when checkpointed regions are recomputed."""
    return _current().tracker


def __getattr__(name: str) -> Any:
    if name == "_CUDA_RNG_STATE_TRACKER":  # some clients read this instead of calling get_cuda_rng_tracker()
        return get_cuda_rng_tracker()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def is_configured() -> bool:
    """Return whether ``configure`` has been called."""
    return _current().configured


def set_num_layers(nlayers: int) -> None:
    """Set the number of checkpointed regions per forward, i.e. of inputs that a contiguous buffer holds."""
    settings = _current()
    settings.section.number_checkpoints = nlayers
    settings.arena = None


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Turn partitioning of inputs on or off."""
    _current().section.partition_activations = partition_activation


def reset() -> None:
    """Release the contiguous buffers, for steps with a different number or size of regions."""
    arena = _current().arena
    if arena is not None:
        arena.clear()


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the RNG for numbers that tensor-parallel ranks draw equally with ``seed``, and the named state for numbers
    drawn independently with a different seed on each rank.
    """
    seed_model_parallel(get_cuda_rng_tracker(), seed, _current().mpu)


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Reseed only the named state, for numbers that tensor-parallel ranks draw independently."""
    reseed_tensor_parallel(get_cuda_rng_tracker(), seed, _current().mpu)


# --- Regions --------------------------------------------------------------------------------------


class _Region:
    """One call of a checkpointed function, adapted to torch's checkpoint: flat inputs and outputs, run twice.

    It holds no tensor: ``KeptInputs`` decides how the inputs are kept until backward.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.settings = _current()  # the recomputation uses them too, whatever is current then
        self._input_spec: Any = None
        self._output_spec: Any = None
        self._rng_states: dict[str, Tensor] | None = None

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        leaves, self._input_spec = tree_flatten((args, kwargs))
        return leaves

    def __call__(self, *leaves: Any) -> tuple[Any, ...]:
        args, kwargs = tree_unflatten(leaves, self._input_spec)
        tracker = self.settings.tracker
        if self._rng_states is None:
            self._rng_states = tracker.get_states()
            outputs = self._function(*args, **kwargs)
        else:
            with applied(self.settings), tracker.replay(self._rng_states):
                outputs = self._function(*args, **kwargs)
        flat, self._output_spec = tree_flatten(outputs)
        return tuple(flat)

    def result(self, leaves: tuple[Any, ...]) -> Any:
        """Return the function's result, except that a list or tuple of one element becomes that element (as
        documented).
        """
        outputs = tree_unflatten(leaves, self._output_spec)
        return outputs[0] if type(outputs) in (tuple, list) and len(outputs) == 1 else outputs

    @property
    def name(self) -> str:
        return getattr(self._function, "__qualname__", type(self._function).__name__)


class CheckpointFunction(torch.utils.checkpoint.CheckpointFunction):
    """Reentrant checkpointing: one autograd node for the region, whose backward runs the region again and
    backpropagates through it.

    ``apply(run_function, all_outputs, *args)``: returns the results of ``run_function(*args)``, with tensor arguments
    passed flat, and appends them to the list ``all_outputs``.
    """

    @staticmethod
    def forward(ctx: Any, run_function: Callable[..., Any], all_outputs: list[Any], *args: Any) -> Any:
        preserve_rng_state = True
        outputs = torch.utils.checkpoint.CheckpointFunction.forward(
            ctx, run_function, preserve_rng_state, *args
        )
        # Autograd makes this node the grad_fn of the returned tensors themselves. For one that was not computed here (a
        # constant of the module, a parameter), backward would then re-enter this region endlessly.
        if isinstance(outputs, Tensor):
            outputs = outputs.detach()
        else:
            outputs = tuple(each.detach() if isinstance(each, Tensor) else each for each in outputs)
        all_outputs += outputs if isinstance(outputs, tuple) else [outputs]
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        with _boundary("backward", ctx.run_function):
            return torch.utils.checkpoint.CheckpointFunction.backward(ctx, *grads)


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Compute ``function(*args, **kwargs)`` without keeping activations; it is recomputed in backward.

    Arguments and results may be tensors in dicts, lists and tuples, or anything else. The function must not depend on
    state that changes between forward and backward. Works with ``.backward()`` but not with ``torch.autograd.grad``. If
    no argument requires a gradient, ``non_reentrant_checkpoint`` is used, as parameters would get no gradients
    otherwise.
    """
    region = _Region(function)
    leaves = region.flatten(args, kwargs)
    if not any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
        return _without_reentry(region, leaves)
    with _boundary("forward", region), _keeping_inputs(region.settings):
        outputs = CheckpointFunction.apply(region, [], *leaves)
    return region.result(outputs)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Do as ``checkpoint``, with saved-tensor hooks: also works with ``torch.autograd.grad`` and frozen inputs, and
    stops recomputing as soon as backward has what it needs."""
    region = _Region(function)
    return _without_reentry(region, region.flatten(args, kwargs))


def selective_checkpoint(
    function: Callable[..., Any], contexts: Callable[[], tuple[Any, Any]], args: Any, kwargs: Any
) -> Any:
    """Do ``non_reentrant_checkpoint(function, *args, **kwargs)`` with its two runs inside ``contexts()``."""
    region = _Region(function)
    return _without_reentry(region, region.flatten(args, kwargs), context_fn=contexts)


def _without_reentry(region: _Region, leaves: list[Any], **options: Any) -> Any:
    with _boundary("forward", region), _keeping_inputs(region.settings):
        outputs = torch.utils.checkpoint.checkpoint(region, *leaves, use_reentrant=False, **options)
    return region.result(outputs)


@contextlib.contextmanager
def _keeping_inputs(settings: Settings) -> Iterator[None]:
    """Keep what autograd saves inside the block (a region's inputs) as configured."""
    section = settings.section
    if not (section.partition_activations or section.cpu_checkpointing) or not torch.is_grad_enabled():
        yield
        return
    kept = settings.kept_inputs()
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
        yield


@contextlib.contextmanager
def _boundary(phase: str, region: Any) -> Iterator[None]:
    """Synchronize and measure at the boundaries of a region's forward or backward, as configured."""
    section = region.settings.section if isinstance(region, _Region) else _current().section
    if section.synchronize_checkpoint_boundary:
        synchronize_stream()
    timer = SynchronizedWallClockTimer.Timer(phase) if section.profile else None
    before = 0.0
    if timer is not None:
        before = get_accelerator().memory_allocated() / GIB
        timer.start()
    yield
    if section.synchronize_checkpoint_boundary:
        synchronize_stream()
    if timer is not None:
        timer.stop()
        name = region.name if isinstance(region, _Region) else getattr(region, "__qualname__", str(region))
        allocated = get_accelerator().memory_allocated() / GIB
        print_dist(
            f"checkpoint {phase} {name}: {timer.elapsed():.2f} ms, {allocated:.4f} GB allocated "
            f"({allocated - before:+.4f})",
            ranks=[0],
        )


# ``cpu_checkpointing`` for models that checkpoint their layers themselves, such as Transformers models.


SWITCH = "gradient_checkpointing"
"""Module attribute that enables ``torch.utils.checkpoint``."""


def keep_inputs_of_layers(
    module: nn.Module, keeping: Callable[[], AbstractContextManager[None]]
) -> list[Any]:
    """Enter ``keeping()`` around each call of a checkpointed layer of ``module``. Returns hook handles.

    Tensors that a checkpoint inside saves internally bypass the surrounding context; its inputs do not.
    """
    handles: list[Any] = []
    for layer in _checkpointed(module):
        handles += _around(layer, keeping)
    return handles


def _checkpointed(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the innermost modules with the switch: layers, or a model that checkpoints its layers."""
    for each in module.modules():
        below = (child for child in each.modules() if child is not each)
        if hasattr(each, SWITCH) and not any(hasattr(child, SWITCH) for child in below):
            yield each


def _around(layer: nn.Module, keeping: Callable[[], AbstractContextManager[None]]) -> tuple[Any, Any]:
    open_calls: list[AbstractContextManager[None] | None] = []

    def enter(layer: nn.Module, args: Any) -> None:
        context = keeping() if getattr(layer, SWITCH) and layer.training and torch.is_grad_enabled() else None
        open_calls.append(context)
        if context is not None:
            context.__enter__()

    def leave(layer: nn.Module, args: Any, outputs: Any) -> None:
        context = open_calls.pop() if open_calls else None
        if context is not None:
            context.__exit__(None, None, None)

    return layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave, always_call=True)
