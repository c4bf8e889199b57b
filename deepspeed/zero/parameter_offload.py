"""Hook a stage-3 model: report to the coordinator which module runs, and reads of parameters outside their module.

Hooks are closures: modules get deep-copied with their hooks. Every module that owns parameters has hooks, not only
whole blocks, because clients call submodules directly; the outermost module of a gather unit holds its bucket until
it returns.

[Note: hooks and torch.compile] Traced hooks would bake the swapped memory into the graph. ``compile_units`` compiles
the forward of each block, so that the block's hooks run around one graph without breaks. Inside a compiled block
there are no hooks: they differ between blocks and would cost one graph per block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.base.tracing import call_outside_transforms, inside_transform, untraced
from deepspeed.zero.gathering.coordinator import ParamCoordinator, recording
from deepspeed.zero.gathering.leaf_modules import get_z3_leaf_modules, z3_leaf_module
from deepspeed.zero.gathering.phases import Phase
from deepspeed.zero.gradients.backward import output_tensors, tensors_in
from deepspeed.zero.offload.state_moves import HasMovableStates, StateMover
from deepspeed.zero.partitioning import blocks_of

EXTERNAL = "_external_params"


class ZeROOrderedDict(OrderedDict):
    """``module._parameters`` that detects reads of a partitioned parameter in another module's forward."""

    def __init__(self, read: Callable[[nn.Parameter], None], items: Any = ()) -> None:
        super().__init__(items)
        self._read = read

    def __getitem__(self, key: str) -> Any:
        param = super().__getitem__(key)
        if param is not None:
            self._read(param)
        return param

    def __deepcopy__(self, memo: dict[int, Any]) -> OrderedDict[str, Any]:
        # A copied module belongs to no engine: it gets a plain dict.
        import copy

        return OrderedDict((key, copy.deepcopy(value, memo)) for key, value in self.items())

    def __reduce__(self) -> Any:
        return OrderedDict, (list(self.items()),)


class DeepSpeedZeRoOffload(HasMovableStates):
    """Owner of the hooks of one sharded model. ``forward_hooks`` and ``backward_hooks`` may be emptied and the model
    registered again (``_register_deepspeed_module``), as TRL does around generation."""

    def __init__(self, module: nn.Module, coordinator: ParamCoordinator) -> None:
        self.module = module
        self.param_coordinator = coordinator
        self.mover = StateMover(coordinator.buckets)
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []
        self._index = {
            id(param): b for b, bucket in enumerate(coordinator.buckets) for param in bucket.params
        }
        self._has_sharded = any(not bucket.persistent for bucket in coordinator.buckets)
        """Whether anything is ever gathered; otherwise no module has hooks."""
        self._needs: dict[nn.Module, list[int]] = {}
        self._numbers: dict[nn.Module, int] = {}  # the same on every rank
        self._parents = {child: parent for parent in module.modules() for child in parent.children()}
        self._compiled: list[nn.Module] = []
        self._watch_reads()
        self._register_deepspeed_module(module)

    def get_param_coordinator(self) -> ParamCoordinator:
        return self.param_coordinator

    @property
    def persistent_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that stay gathered (``stage3_param_persistence_threshold``)."""
        return [p for bucket in self.param_coordinator.buckets if bucket.persistent for p in bucket.params]

    @property
    def leaf_parameters(self) -> dict[nn.Module, list[nn.Parameter]]:
        """Return the parameters of each leaf module, which is gathered as one (``set_z3_leaf_modules``)."""
        return {leaf: list(leaf.parameters()) for leaf in get_z3_leaf_modules(self.module)}

    # Hooks --------------------------------------------------------------------------------------------------

    def _register_deepspeed_module(self, module: nn.Module, count: Sequence[int] = (0,)) -> None:
        """Install the hooks on ``module`` and its submodules."""
        roots = set(blocks_of(self.module)) | {self.module}
        self._walk(module, roots, set())

    def compile_units(self, **options: Any) -> None:
        """Compile the forward of every block (of the whole model, if it has no blocks) with ``torch.compile``."""
        self._compiled = blocks_of(self.module) or [self.module]
        for block in self._compiled:
            block.forward = torch.compile(block.forward, **options)
        self.rehook()

    def rehook(self) -> None:
        """Reinstall the hooks after a change of the compiled modules or of the buckets that move. Called between two
        forwards."""
        self.remove_hooks()
        self._needs.clear()
        self._has_sharded = any(not bucket.persistent for bucket in self.param_coordinator.buckets)
        self._register_deepspeed_module(self.module)

    def _walk(self, module: nn.Module, roots: set[nn.Module], seen: set[nn.Module]) -> None:
        if module in seen:
            return
        seen.add(module)
        leaf = z3_leaf_module(module)
        whole = leaf or module in self._compiled or (module in roots and module is not self.module)
        params = list(module.parameters() if whole else module.parameters(recurse=False))
        params += [param for _, param in external_parameters(module)]
        needs = self._needs.setdefault(module, [])
        for b in self._buckets_of(params):
            if b not in needs:
                needs.append(b)
        if needs or (self._has_sharded and (whole or module is self.module)):
            self._hook(module, needs)
        if not leaf and module not in self._compiled:
            for child in module.children():
                self._walk(child, roots, seen)

    def _buckets_of(self, params: Sequence[nn.Parameter]) -> list[int]:
        indices = dict.fromkeys(self._index[id(p)] for p in params if id(p) in self._index)
        return [b for b in indices if not self.param_coordinator.buckets[b].persistent]

    def _hook(self, module: nn.Module, needs: list[int]) -> None:
        coordinator, number = self.param_coordinator, self._numbers.setdefault(module, len(self._numbers))
        this_thread = coordinator.this_thread  # a local: hooks run around every module

        def before_forward(module: nn.Module, args: Any, kwargs: Any) -> None:
            transformed = inside_transform()
            if this_thread.frames:
                if transformed:
                    call_outside_transforms(coordinator.enter, needs)
                else:
                    coordinator.enter(needs)
                return
            recorded = recording()
            if recorded and not transformed:
                for value in (*args, *kwargs.values()):
                    for tensor in (value,) if isinstance(value, Tensor) else tensors_in(value):
                        if tensor.requires_grad:
                            coordinator.watch_input(tensor)
            phase = this_thread.announced_phase
            if phase is None:  # called directly, not by ``engine.forward``
                phase = Phase.FORWARD if recorded and module.training else Phase.EVALUATION
            call_outside_transforms(coordinator.enter, needs, phase, number)

        def after_forward(module: nn.Module, args: Any, outputs: Any) -> None:
            transformed = inside_transform()
            frame = call_outside_transforms(coordinator.leave) if transformed else coordinator.leave()
            if type(outputs) is not Tensor:
                self._register_returned(module, outputs)
            if frame.held and recording():
                if transformed:  # backwards at several levels reach the outputs in an unknown order
                    coordinator.transitions.keep(frame.held)
                    return

                def before_backward(grad: Tensor) -> None:
                    coordinator.backward(frame, grad)

                for tensor in output_tensors(outputs):
                    tensor.register_hook(before_backward)

        self.forward_hooks.append(
            module.register_forward_pre_hook(untraced(before_forward), prepend=True, with_kwargs=True)
        )
        self.forward_hooks.append(module.register_forward_hook(untraced(after_forward), always_call=True))

    def _register_returned(self, module: nn.Module, outputs: Any) -> None:
        """Register a parameter that a module returns (a bias, for its caller to add) as external to its parent
        module."""
        parent = self._parents.get(module)
        if parent is None:
            return
        for tensor in tensors_in(outputs):
            if isinstance(tensor, nn.Parameter) and id(tensor) in self._index:
                register_external_parameter(parent, tensor)

    # Parameters read outside their own module ---------------------------------------------------------------

    def _watch_reads(self) -> None:
        coordinator = self.param_coordinator
        this_thread, buckets = coordinator.this_thread, coordinator.buckets
        index = {key: b for key, b in self._index.items() if not buckets[b].persistent}

        def read(param: nn.Parameter) -> None:
            if not torch.compiler.is_compiling() and this_thread.frames:
                b = index.get(id(param))
                if b is not None and b not in this_thread.frames[-1].held:
                    call_outside_transforms(coordinator.use_outside_bucket, b)

        for module in self.module.modules():
            if any(id(param) in index for param in module._parameters.values()):
                module._parameters = ZeROOrderedDict(read, module._parameters.items())  # type: ignore[assignment]
            module.__dict__.setdefault(EXTERNAL, {})
            module.ds_external_parameters = lambda module=module: external_parameters(module)  # type: ignore[assignment]

    # The end ------------------------------------------------------------------------------------------------

    def partition_all_parameters(self) -> None:
        self.param_coordinator.transitions.reshard_all()

    empty_partition_cache = partition_all_parameters

    def remove_hooks(self) -> None:
        for handle in [*self.forward_hooks, *self.backward_hooks]:
            handle.remove()
        self.forward_hooks, self.backward_hooks = [], []

    def destroy(self) -> None:
        self.remove_hooks()
        for module in self.module.modules():
            if isinstance(module._parameters, ZeROOrderedDict):
                module._parameters = dict(module._parameters.items())
            module.__dict__.pop("ds_external_parameters", None)
            if not module.__dict__.get(EXTERNAL, True):
                del module.__dict__[EXTERNAL]


def external_parameters(module: nn.Module) -> list[tuple[int, nn.Parameter]]:
    """Return ``(ds_id, parameter)`` of the parameters registered for use in ``module`` but owned by other modules."""
    return list(module.__dict__.get(EXTERNAL, {}).items())


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Gather ``parameter``, which another module owns, around the forward and backward of ``module``.

    Needed only for reads that cannot be detected; reads through the owning module can.
    """
    if not isinstance(module, nn.Module):
        raise RuntimeError(f"module must be a torch.nn.Module, not {type(module).__name__}")
    if not isinstance(parameter, nn.Parameter):
        raise RuntimeError(f"parameter must be a torch.nn.Parameter, not {type(parameter).__name__}")
    module.__dict__.setdefault(EXTERNAL, {})[getattr(parameter, "ds_id", id(parameter))] = parameter


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    if not isinstance(parameter, nn.Parameter):
        raise RuntimeError(f"parameter must be a torch.nn.Parameter, not {type(parameter).__name__}")
    registered = module.__dict__.get(EXTERNAL, {})
    if registered.pop(getattr(parameter, "ds_id", id(parameter)), None) is None:
        raise RuntimeError("the parameter is not registered for this module")
