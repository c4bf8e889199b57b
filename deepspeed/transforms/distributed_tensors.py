"""Support for models whose parameters are already DTensors, split over tensor-parallel ranks by
``from_pretrained(tp_plan="auto")`` of Transformers or ``parallelize_module`` of torch.

Each such parameter is replaced by a plain one with this rank's part and its placement, which is all that ZeRO needs.
The forward that uses it still sees a DTensor, made from the part for each call, so that the gradient arrives in the
layout of the part, with partial sums already reduced. State dicts of the module hold DTensors as before;
``load_state_dict`` accepts DTensors, this rank's parts, or whole tensors.

This module is imported only if a parameter is a DTensor, since torch's take most of a second to import.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement as Layout
from torch.distributed.tensor.placement_types import _StridedShard

from deepspeed.base.sharded import LAYOUTS, full_shape, is_dtensor, is_zero_param, list_params
from deepspeed.checkpoint.placement import ATTRIBUTE, Placement, local_part, place
from deepspeed.checkpoint.shards import Box
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.transforms.module_transforms import TransformContext, request
from deepspeed.transforms.record import transforms_of
from deepspeed.zero.replica_groups import DENSE, replica_group_name

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

NAME = "distributed_tensors"


@dataclass(frozen=True, slots=True)
class DTensorLayout:
    """Layout of a parameter as a DTensor: its mesh, the placements over it, and shape and stride of the whole."""

    mesh: DeviceMesh
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: DTensor) -> DTensorLayout:
        return cls(tensor.device_mesh, tuple(tensor.placements), tensor.shape, tuple(tensor.stride()))

    def distributed(self, part: Tensor) -> Tensor:
        """Return ``part`` [this rank's shape] as a DTensor, whose gradient flows to the part."""
        return DTensor.from_local(
            part, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )


class SumGradient(torch.autograd.Function):
    """Identity on a replicated parameter of which each rank's gradient covers only its part of the layer: backward sums
    the gradient over ranks."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return param.view_as(param)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def request_local_parts(model: nn.Module) -> int | None:
    """Request the transform ``LocalParts`` for ``model``, if it has DTensors. Returns the number of ranks over which
    they are split, or None.

    Raises:
        NotImplementedError: the DTensors are not tensor-parallel over a single axis (FSDP2, several axes).
    """
    found = {n: p for n, p in model.named_parameters() if is_dtensor(p)}
    if found:
        _check_meshes(model, found)
        if all(transform.name != NAME for transform in transforms_of(model).requested):
            request(model, LocalParts())
        return next(iter(found.values())).device_mesh.size()  # type: ignore[attr-defined]
    known = next((layouts for module in model.modules() if (layouts := _layouts(module))), None)
    return next(iter(known.values())).mesh.size() if known else None


def _check_meshes(model: nn.Module, params: Mapping[str, nn.Parameter]) -> None:
    if any(kind.__qualname__ == "FSDPModule" for module in model.modules() for kind in type(module).__mro__):
        raise NotImplementedError(
            f"{list_params(list(params))} are DTensors of FSDP2 (fully_shard), which already shards them: pass "
            "the plain module"
        )
    ranks = {name: param.device_mesh.mesh.flatten().tolist() for name, param in params.items()}  # type: ignore[attr-defined]
    first = next(iter(ranks.values()))
    odd = [n for n, p in params.items() if p.device_mesh.ndim != 1 or ranks[n] != first]  # type: ignore[attr-defined]
    if odd:
        mesh = params[odd[0]].device_mesh  # type: ignore[attr-defined]
        raise NotImplementedError(
            f"{list_params(odd)} are DTensors over {mesh}; expected tensor parallelism over one axis, ranks {first} "
            "here: distribute the parameters over the tensor-parallel dim of the mesh alone, as device_mesh['tp']"
        )


def _layouts(module: nn.Module) -> dict[str, DTensorLayout]:
    return vars(module).get(LAYOUTS, {})


class LocalParts:
    """Transform that replaces DTensor parameters by plain ones with this rank's part."""

    name, after = NAME, ()
    before = ("layer_reduction",)  # all others see plain parameters

    def apply(self, module: nn.Module, context: TransformContext) -> None:
        tensors = {id(p): p for p in module.parameters() if is_dtensor(p)}
        mesh: DeviceMesh = next(iter(tensors.values())).device_mesh  # type: ignore[attr-defined]
        _check_axis(mesh, context)
        parts = {key: _part(tensor) for key, tensor in tensors.items()}
        for key, tensor in tensors.items():
            context.replace_param(tensor, parts[key])
        for owner in list(module.modules()):
            owned = {n: p for n, p in owner._parameters.items() if p is not None and id(p) in parts}
            if owned:
                _replace_params(owner, owned, parts)
            _sum_gradients_of_copies(owner, context)
        for param in module.parameters():
            if not hasattr(param, ATTRIBUTE) and replica_group_name(param) == DENSE:
                first = context.mesh.rank("tp") == 0
                copies = Placement(global_shape=tuple(full_shape(param)), replicated=("tp",), counts=first)
                place(param, copies)
        context.report(f"{len(parts)} DTensors became parts over {mesh.size()} ranks")


def _check_axis(mesh: DeviceMesh, context: TransformContext) -> None:
    theirs, ours = tuple(mesh.mesh.flatten().tolist()), context.mesh.ranks("tp")
    if theirs != ours:
        raise DeepSpeedConfigError(
            f"the model's parameters are split over ranks {list(theirs)}, but the tensor-parallel ranks of this job "
            f"are {list(ours)}: split the model over neighbouring ranks, or pass mpu= with its groups"
        )


def _part(tensor: nn.Parameter) -> nn.Parameter:
    placement = placement_of_dtensor(tensor, axes=("tp",))  # type: ignore[arg-type]
    part = nn.Parameter(tensor.detach().to_local(), requires_grad=tensor.requires_grad)  # type: ignore[attr-defined]
    vars(part).update({key: value for key, value in vars(tensor).items() if key != "_is_param"})
    place(part, placement)
    return part


def _replace_params(
    owner: nn.Module, owned: Mapping[str, nn.Parameter], parts: Mapping[int, nn.Parameter]
) -> None:
    layouts = {name: DTensorLayout.of(tensor) for name, tensor in owned.items()}  # type: ignore[arg-type]
    vars(owner)[LAYOUTS] = layouts
    for name, tensor in owned.items():
        owner._parameters[name] = parts[id(tensor)]
    owner.forward = _viewing(owner, owner.forward, {name: each.distributed for name, each in layouts.items()})
    owner.register_state_dict_post_hook(_distribute_state)
    owner.register_load_state_dict_pre_hook(_load_parts)


def _viewing(
    owner: nn.Module, forward: Callable[..., Any], views: Mapping[str, Callable[[Tensor], Tensor]]
) -> Callable[..., Any]:
    """Return ``forward`` with some parameters of ``owner`` replaced, during the call, by ``views`` of them."""

    @functools.wraps(forward)
    def viewing(*args: Any, **kwargs: Any) -> Any:
        own = owner._parameters
        vars(owner)["_parameters"] = {
            name: views[name](param) if name in views and param is not None else param
            for name, param in own.items()
        }
        try:
            return forward(*args, **kwargs)
        finally:
            vars(owner)["_parameters"] = own

    return viewing


# Replicated parameters with partial gradients -----------------------------------------------------------------


def _sum_gradients_of_copies(owner: nn.Module, context: TransformContext) -> None:
    """Sum the partial gradients of norms between split layers before ZeRO's hooks take them. Transformers sums them
    (style ``replicated_with_grad_allreduce``) in hooks added during the first forward, which run after ours: too
    late."""
    found = _innermost(vars(owner).get("forward"), "ReplicatedWithGradAllReduce")
    if found is None:
        return
    names = [name for name, param in owner.named_parameters(recurse=False) if param.requires_grad]
    for name in names:
        _remove_hooks(owner._parameters[name])
    group = context.mesh.group("tp")
    summed = {name: functools.partial(_summed, group=group) for name in names}
    owner.forward = _viewing(owner, found, summed)


def _summed(param: Tensor, group: Any) -> Tensor:
    return SumGradient.apply(param, group) if param.requires_grad else param  # type: ignore[return-value]


def _innermost(forward: Any, style: str) -> Callable[..., Any] | None:
    """Return the forward wrapped by the closure of a parallel style of Transformers; None if ``forward`` is not such a
    closure."""
    if not getattr(forward, "__qualname__", "").startswith(f"{style}.install_forward"):
        return None
    return inspect.getclosurevars(forward).nonlocals.get("original_forward")


def _remove_hooks(param: Any) -> None:
    """Remove the style's hooks that an earlier forward has added."""
    hooks = getattr(param, "_post_accumulate_grad_hooks", None) or {}
    for key, hook in list(hooks.items()):
        if getattr(hook, "__qualname__", "").startswith("ReplicatedWithGradAllReduce."):
            del hooks[key]


# State dicts --------------------------------------------------------------------------------------------------


def _distribute_state(
    owner: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Mapping[str, Any]
) -> None:
    """Return DTensors in ``module.state_dict()``, as before the transform; but parameters themselves with
    ``keep_vars``, and ZeRO-sharded parameters as they are."""
    for name, value, layout in _entries(owner, state, prefix):
        if not isinstance(value, nn.Parameter) and not is_zero_param(owner._parameters[name]):
            state[prefix + name] = layout.distributed(value)


def _load_parts(owner: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Accept DTensors and whole tensors besides parts in ``module.load_state_dict``."""
    for name, value, _layout in _entries(owner, state, prefix):
        if is_dtensor(value):
            state[prefix + name] = value.to_local()  # type: ignore[attr-defined]
        else:
            state[prefix + name] = local_part(owner._parameters[name], value)


_load_parts.keeps_names = True  # type: ignore[attr-defined]


def _entries(
    owner: nn.Module, state: Mapping[str, Any], prefix: str
) -> Iterator[tuple[str, Tensor, DTensorLayout]]:
    for name, layout in _layouts(owner).items():
        value = state.get(prefix + name)
        if isinstance(value, Tensor):
            yield name, value, layout


# Placements of DTensors ---------------------------------------------------------------------------------------

Interval = tuple[int, int]


def placement_of_dtensor(tensor: DTensor, axes: Sequence[str] | None = None) -> Placement:
    """Return the placement of the local part of a DTensor. ``axes``: our names for the dims of its mesh; default: its
    own names.

    The dims of the mesh split in order, each the part left by the previous ones, into the chunks of ``torch.chunk``.
    ValueError: a placement that is neither ``Shard`` nor ``Replicate`` (partial sums), or a strided shard (each matrix
    of a fused projection is split) together with another shard of the same dim.
    """
    mesh = tensor.device_mesh
    names = tuple(axes or mesh.mesh_dim_names or (f"dim{i}" for i in range(mesh.ndim)))
    place_of, shape = mesh.get_coordinate(), tuple(tensor.shape)
    if place_of is None:
        raise ValueError("this rank is not in the device mesh of the tensor")
    held: list[list[Interval]] = [[(0, size)] for size in shape]
    split: list[str] = []
    replicated: list[str] = []
    for number, how in enumerate(tensor.placements):
        if isinstance(how, Replicate):
            replicated.append(names[number])
            continue
        dim = _dim(how, len(shape))
        if dim is None or len(held[dim]) > 1 or (_factor(how) > 1 and held[dim] != [(0, shape[dim])]):
            raise ValueError(
                f"a parameter cannot be {how} over the axis {names[number]!r} of its device mesh"
            )
        split.append(names[number])
        parts = [_chunk(held[dim][0], _factor(how), part) for part in range(_factor(how))]
        held[dim] = [_chunk(part, mesh.size(number), place_of[number]) for part in parts]
    return Placement(
        global_shape=shape,
        boxes=_boxes(held) if split else (),
        split=tuple(split),
        replicated=tuple(replicated),
        counts=all(place_of[names.index(name)] == 0 for name in replicated),
    )


def _dim(how: Layout, ndim: int) -> int | None:
    """Return the dim that a placement splits; None if it splits none."""
    return how.dim % ndim if isinstance(how, (Shard, _StridedShard)) else None


def _factor(how: Layout) -> int:
    """Return the number of matrices side by side."""
    return int(how.split_factor) if isinstance(how, _StridedShard) else 1


def _boxes(held: Sequence[Sequence[Interval]]) -> tuple[Box, ...]:
    """Return the boxes of intervals by dim, of which at most one dim has several."""
    count = max(map(len, held), default=1)
    return tuple(tuple(sides[min(number, len(sides) - 1)] for sides in held) for number in range(count))


def _chunk(interval: Interval, parts: int, number: int) -> Interval:
    low, high = interval
    step = -(-(high - low) // parts)
    return min(low + number * step, high), min(low + (number + 1) * step, high)
