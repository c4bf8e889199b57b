"""Column- and row-parallel linear layers.

A column-parallel layer splits the outputs over ranks, a row-parallel one the inputs; in sequence they need one sum
(Shoeybi et al.: Megatron-LM, 2019). Both replace a layer of the model and keep its class as a base
(``isinstance(layer, nn.Linear)``), its parameter names and their layout, including Transformers' ``Conv1D``, whose
weight is [inputs, outputs]. Every parameter carries its ``Placement``.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from deepspeed.base.accelerator import get_accelerator
from deepspeed.base.module_utils import move_hooks
from deepspeed.base.tracing import untraced
from deepspeed.checkpoint.placement import place
from deepspeed.comm.collectives import Communicator, communicator_of
from deepspeed.parallel.sequence.exchange import gather_lengths
from deepspeed.parallel.tensor.cuts import Cut, replicated
from deepspeed.parallel.tensor.logits import VocabParallelLogits
from deepspeed.parallel.tensor.mappings import copy_to, gather_from, reduce_from_, shared_weight, split_to
from deepspeed.parallel.tensor.metadata import describe
from deepspeed.parallel.tensor.overlapped import column_product
from deepspeed.parallel.tensor.probing import transposed_by_trial
from deepspeed.parallel.tensor.sequence_regions import SequenceRegion
from deepspeed.zero import params as zero_params
from deepspeed.zero.gathering.gathered_parameters import GatheredParameters

__all__ = ["LinearAllreduce", "LinearLayer", "SharedInput", "TensorParallelLayer"]


InputMapping = Callable[[Tensor, Communicator, SequenceRegion | None], Tensor]
"""Processing of a column-parallel layer's input."""


class SharedInput:
    """The input of several layers (query, key and value), whose gradient is summed once for all of them.

    The layers share one instance. It caches the result for the last input tensor, as long as that is alive.
    """

    def __init__(self) -> None:
        self._seen: weakref.ref[Tensor] | None = None
        self._key: tuple[int, bool] | None = None
        self._made: Tensor | None = None

    @untraced
    def __call__(self, inputs: Tensor, group: Communicator, sequence: SequenceRegion | None) -> Tensor:
        if group.size == 1:
            return inputs
        if inputs.is_inference():  # no version counter: in-place changes would go unnoticed
            return copy_to(inputs, group) if sequence is None else sequence.gather(inputs)
        key = (inputs._version, torch.is_grad_enabled())
        if self._seen is None or self._seen() is not inputs or self._key != key or self._made is None:
            made = copy_to(inputs, group) if sequence is None else sequence.gather(inputs)
            self._seen, self._key, self._made = weakref.ref(inputs, self._forget), key, made
        return self._made

    def _forget(self, gone: weakref.ref[Tensor]) -> None:
        if gone is self._seen:
            self._seen = self._made = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy without the cached result."""
        return SharedInput, ()


@functools.cache
def _joined_class(ours: type, original: type) -> type:
    return type(ours.__name__, (ours, original), {"__doc__": ours.__doc__, "__module__": ours.__module__})


class TensorParallelLayer(nn.Module):
    """A layer that replaces ``module`` and has its class as a base. ``group``: the ranks that share it.

    ``cut``: how one dim is split over them.
    """

    group: Communicator
    cut: Cut
    keep_module_on_host: bool = False

    def __init__(self, mp_group: Communicator | ProcessGroup | None = None, **kwargs: Any) -> None:
        """Initialize a user-defined layer. ``name``: its name."""
        super().__init__()
        self.group = communicator_of(mp_group, prepared=True)
        self.name = kwargs.get("name")

    @property
    def mp_group(self) -> ProcessGroup | None:
        return self.group.group

    @property
    def tp_world_size(self) -> int:
        return self.group.size

    @classmethod
    def set_keep_module_on_host(cls, value: bool) -> None:
        """Set whether ``move`` leaves tensors in host memory."""
        cls.keep_module_on_host = value

    def move(self, tensor: Tensor) -> Tensor:
        """Return a copy of ``tensor`` on the device."""
        kept = self.keep_module_on_host
        device = tensor.device if kept else torch.device(get_accelerator().current_device_name())
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device, copy=True)

    def is_training_mode(self) -> bool:
        """Return True: layers can always be trained."""
        return True

    def config_requires_grad(self, weight: Tensor | None) -> None:
        """Do nothing: parameters keep their ``requires_grad``."""

    def config_tp_params(self, weight: Tensor | None) -> None:
        """Attach this layer's ``gather_params`` and ``_tp_partition`` to the parameter."""
        if weight is not None:
            vars(weight).update(
                {name: LayerMethod(self, name) for name in ("gather_params", "_tp_partition")}
            )

    def _adopt(self, module: nn.Module) -> None:
        """Take over everything of the module except parameters: class, attributes, buffers and hooks. (Not a
        ``forward`` set on the instance, which would compute with the old parameters.)"""
        if not isinstance(self, type(module)):
            self.__class__ = _joined_class(type(self), type(module))
        nn.Module.__init__(self)
        kept = {key: value for key, value in vars(module).items() if not key.startswith("_")}
        kept.pop("forward", None)
        vars(self).update(kept)
        move_hooks(module, self)
        for name, buffer in module.named_buffers(recurse=False):
            self.register_buffer(name, buffer, persistent=name not in module._non_persistent_buffers_set)

    def _keep(self, module: nn.Module, cuts: Mapping[str, Cut | None], *, own: bool = False) -> None:
        """Register this rank's part of each parameter of ``module``; None: all of it. ``own``: it is the part
        already."""
        given = {name: param for name, param in module.named_parameters(recurse=False) if name in cuts}
        with GatheredParameters(list(given.values())), torch.no_grad():
            for name, param in given.items():
                self.register_parameter(name, part_of(param, cuts[name], self.group, own=own))
        for name in cuts.keys() - given.keys():
            self.register_parameter(name, None)


def part_of(param: nn.Parameter, cut: Cut | None, group: Communicator, *, own: bool = False) -> nn.Parameter:
    """Return this rank's part of a whole ``param`` (None: all of it) as a new parameter with its placement.

    ``own``: ``param`` is that part already. Call it inside ``GatheredParameters`` if ``zero.Init`` has partitioned it.
    """
    data, shape = param.detach(), list(zero_params.full_shape(param))
    if cut is not None and own:
        shape[cut.dim] = cut.size
    elif cut is not None:
        data = cut.take(data, group.rank)
    made = nn.Parameter(data.clone(memory_format=torch.contiguous_format), requires_grad=param.requires_grad)
    if not zero_params.is_zero_param(param):
        vars(made).update(vars(param))
    if group.size > 1:
        found = replicated(shape, group.rank) if cut is None else cut.placement(shape, group.rank)
        place(made, found)
    return made


def check_ranks(cut: Cut, group: Communicator, size: int) -> None:
    """Raise ValueError if ``cut`` is for another number of ranks or another width."""
    if cut.ranks != group.size or cut.size != size:
        raise ValueError(
            f"a cut of {cut.size} elements over {cut.ranks} ranks does not fit a layer that is {size} wide, on "
            f"{group.size} ranks"
        )


def tp_classes_of(module: nn.Module) -> Mapping[str, type[Any]]:
    """Return the classes that a special layer (compressed, or with adapters) declares for its split forms: "column",
    "row", "vocabulary"."""
    return getattr(type(module), "tp_classes", {})


_PART = "_ds_tp_part"
"""Attribute of a temporarily gathered parameter: its local part."""


class LayerMethod:
    """A layer's method as an attribute of its parameters, holding only a weak reference to the layer."""

    def __init__(self, layer: nn.Module, name: str) -> None:
        self.layer = weakref.ref(layer)
        self.name = name

    def __call__(self, params_list: Sequence[nn.Parameter]) -> None:
        layer = self.layer()
        if layer is None:
            raise ValueError(f"{self.name}: the layer of this parameter no longer exists")
        getattr(layer, self.name)(params_list)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_of_no_layer, (self.name,))


def _of_no_layer(name: str) -> LayerMethod:
    """Return a stand-in for the method in an unpickled parameter, whose layer is unknown."""
    return LayerMethod(nn.Module(), name)


class _ParallelLinear(TensorParallelLayer):
    """Base of column- and row-parallel linear layers. ``transposed``: the weight is [inputs, outputs]."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    transposed: bool
    _splits_bias = False

    def _start(self, module: nn.Module, group: Communicator | ProcessGroup | None, name: str | None) -> None:
        self._adopt(module)
        self.group = communicator_of(group, prepared=True)
        self.transposed = _is_transposed(module)
        self.name = name

    def _choose_cut(self, module: nn.Module, cut: Cut | None, dim: int, own: bool) -> Cut:
        """Return the cut along ``dim`` of the weight (0 outputs, 1 inputs, as in ``nn.Linear``), by default even."""
        weight: Any = module.weight
        size = zero_params.full_shape(weight)[1 - dim if self.transposed else dim]
        if cut is None and own:
            cut = Cut.fused(dim, [gather_lengths(size, self.group, weight.device)])
        elif cut is None:
            cut = Cut.even(dim, size, self.group.size)
        check_ranks(cut, self.group, cut.size if own else size)
        return cut.along(1 - dim if self.transposed else dim)

    def _set_sizes(self) -> None:
        """Set the documented size attributes to this rank's sizes."""
        outputs, inputs = zero_params.full_shape(self.weight)
        if self.transposed:
            self.nx, self.nf = outputs, inputs
        else:
            self.in_features, self.out_features = inputs, outputs

    def _keep(self, module: nn.Module, cuts: Mapping[str, Cut | None], *, own: bool = False) -> None:
        super()._keep(module, cuts, own=own)
        for param in self.parameters(recurse=False):  # clients call these methods on the parameter
            self.config_tp_params(param)
        self._describe()

    def _describe(self, shape: Sequence[Any] | None = None) -> None:
        """Attach release 0.19's metadata to the parameters. ``shape``: the user's description of matrices side by
        side."""
        kind, cuts = "column" if self._splits_bias else "row", self._cuts()
        for name, param in self.named_parameters(recurse=False):
            describe(param, cuts.get(name), kind, is_bias=name == "bias", shape=shape)

    def _cuts(self) -> dict[str, Cut]:
        """Return the cuts of the parameters that are split over ranks."""
        return {"weight": self.cut, **({"bias": self.cut.along(0)} if self._splits_bias else {})}

    def gather_params(self, params_list: Sequence[nn.Parameter]) -> None:
        """Gather these parameters of the layer in place. Collective; not for layers trained at stage 3."""
        for param, cut in self._split_of(params_list):
            part = param.data
            whole = gather_from(param.detach(), self.group, cut)
            param.data = whole.clone(memory_format=torch.contiguous_format)
            vars(param)[_PART] = part

    def _tp_partition(self, params_list: Sequence[nn.Parameter]) -> None:
        """Undo ``gather_params``: copy this rank's part of the whole parameters back to its original memory, which may
        be the engine's."""
        for param, cut in self._split_of(params_list):
            taken = cut.take(param.data, self.group.rank).clone(memory_format=torch.contiguous_format)
            part = vars(param).pop(_PART, None)
            param.data = taken if part is None else part.copy_(taken)

    def _split_of(self, params_list: Sequence[nn.Parameter]) -> list[tuple[nn.Parameter, Cut]]:
        """Return the parameters that are split over ranks, with their cuts."""
        if self.group.size == 1:
            return []
        cuts = {id(self._parameters[name]): cut for name, cut in self._cuts().items()}
        return [(param, cuts[id(param)]) for param in params_list if id(param) in cuts]

    def operands(self) -> tuple[Tensor, Tensor | None]:
        """Return the weight and bias that forward uses."""
        return self.weight, self.bias

    def _product(self, inputs: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        """Compute the product. ``weight`` may be a module that holds the weight in another form."""
        if isinstance(weight, nn.Module):
            output = weight(inputs)
            return output if bias is None else output + bias
        return nn.functional.linear(inputs, weight.t() if self.transposed else weight, bias)

    def extra_repr(self) -> str:
        outputs, inputs = zero_params.full_shape(self.weight)
        if self.transposed:
            outputs, inputs = inputs, outputs
        return f"in_features={inputs}, out_features={outputs}, bias={self.bias is not None}, ranks={self.group.size}"


class LinearLayer(_ParallelLinear):
    """Column-parallel linear layer: each rank computes a part of the outputs.

    Args:
        module: ``nn.Linear`` or ``Conv1D`` with the whole weight, on any device, in any dtype, also partitioned by
            ``zero.Init`` (collective then over the ranks that hold it).
        mp_group: the ranks that share the layer.
        skip_partition: ``module`` already holds only this rank's part.
        gather_output: gather the whole output on every rank.
        gather_in_evaluation: gather only in evaluation mode or without gradients, for a head with a vocabulary-parallel
            loss.
        stand_in: as ``gather_in_evaluation``, but in training return a stand-in for the whole output
            (``VocabParallelLogits``), for the model's own loss.
        cut: of the outputs (``dim`` is ignored). By default as even as possible. Gradients of elements held by several
            ranks are summed.
        weight: this rank's existing parameter, shared with another layer (tied embeddings).
        sequence: the input is a shard of the sequence, to be gathered.
        shared_input: one instance for all layers with the same input.
        overlap_comm: communicate the input's gradient while the weight's is computed. Not with ``shared_input``, whose
            gradient is complete only later.

    Input [.., in_features], equal on all ranks; output [.., this rank's out_features].
    """

    _splits_bias = True

    def __init__(
        self,
        module: nn.Module,
        mp_group: Communicator | ProcessGroup | None = None,
        skip_partition: bool = False,
        gather_output: bool = False,
        *,
        cut: Cut | None = None,
        weight: nn.Parameter | None = None,
        sequence: SequenceRegion | None = None,
        shared_input: InputMapping | None = None,
        gather_in_evaluation: bool = False,
        stand_in: bool = False,
        overlap_comm: bool = False,
        name: str | None = None,
    ) -> None:
        self._start(module, mp_group, name)
        self.cut = self._choose_cut(module, cut, 0, skip_partition)
        self.gather_output = gather_output
        self.overlap_comm = overlap_comm and shared_input is None
        self.gather_in_evaluation = gather_in_evaluation
        self.stand_in = stand_in
        self.sequence = sequence
        self.shared_input: InputMapping = shared_input or SharedInput()
        self._overlaps = bool(self.cut.shared())
        own = {"weight": self.cut, "bias": self.cut.along(0)}
        if weight is not None:
            del own["weight"]
            self.weight = weight
        self._keep(module, own, own=skip_partition)
        self._set_sizes()

    @classmethod
    def from_weights(
        cls,
        weight_shape: Sequence[int] | None = None,
        dtype: torch.dtype = torch.half,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        gather_output: bool = False,
    ) -> LinearLayer:
        """Create a layer on one rank with ``weight`` [outputs, inputs] and ``bias``, or random ones of ``weight_shape``
        and ``dtype``."""
        if weight is None and weight_shape is None:
            raise ValueError("from_weights needs weight, or weight_shape and dtype")
        outputs, inputs = weight_shape if weight is None else weight.shape  # type: ignore[misc]
        made = nn.Linear(inputs, outputs, bias=weight is None or bias is not None, dtype=dtype)
        if weight is not None:
            made.weight = nn.Parameter(weight.detach(), requires_grad=False)
        if bias is not None:
            made.bias = nn.Parameter(bias.detach(), requires_grad=False)
        return cls(made, skip_partition=True, gather_output=gather_output)

    def operands(self) -> tuple[Tensor, Tensor | None]:
        weight, bias = self.weight, self.bias
        if not self._overlaps:
            return weight, bias
        weight = shared_weight(weight, self.group, self.cut)
        return weight, None if bias is None else shared_weight(bias, self.group, self.cut.along(0))

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.operands()
        if self.overlap_comm and self.group.size > 1 and not torch.is_autocast_enabled(input.device.type):
            weight = weight.t() if self.transposed else weight
            output = column_product(input, weight, bias, self.group, self.sequence)
        else:
            output = self._product(self.shared_input(input, self.group, self.sequence), weight, bias)
        if self._gathers_output():
            return gather_from(output, self.group, self.cut.along(-1))
        if self.stand_in and self.group.size > 1:
            return VocabParallelLogits.of(output, self.group, self.cut)
        return output

    def _gathers_output(self) -> bool:
        """Return whether to gather the output. Compiled code does not support ``VocabParallelLogits``."""
        if self.gather_output or (self.stand_in and torch.compiler.is_compiling()):
            return True
        training = self.training and torch.is_grad_enabled()
        return (self.gather_in_evaluation or self.stand_in) and not training


class LinearAllreduce(_ParallelLinear):
    """Row-parallel linear layer: each rank multiplies its part of the inputs; results are summed, then the bias added.

    Args:
        module: as for ``LinearLayer``.
        mp_group: the ranks that share the layer.
        skip_partition: ``module`` already holds only this rank's part of the weight.
        cut: of the inputs (``dim`` is ignored), without overlap between ranks. By default as even as possible.
        split_input: the input is replicated, and each rank takes its part.
        sequence: reduce-scatter the output, so that each rank gets its shard of the sequence.

    Input [.., this rank's in_features]; output [.., out_features].
    """

    def __init__(
        self,
        module: nn.Module,
        mp_group: Communicator | ProcessGroup | None = None,
        skip_partition: bool = False,
        *,
        cut: Cut | None = None,
        split_input: bool = False,
        sequence: SequenceRegion | None = None,
        name: str | None = None,
    ) -> None:
        self._start(module, mp_group, name)
        self.cut = self._choose_cut(module, cut, 1, skip_partition)
        if self.group.size > 1 and self.cut.shared():
            raise ValueError("inputs of a row-parallel layer held by two ranks would be summed twice")
        self.split_input = split_input
        self.sequence = sequence
        self._keep(module, {"weight": self.cut, "bias": None}, own=skip_partition)
        self._set_sizes()

    def forward(self, input: Tensor) -> Tensor:
        if self.split_input:
            input = split_to(input, self.group, self.cut.along(-1))
        weight, bias = self.operands()
        output = self._product(input, weight, None)
        if self.sequence is None:
            output = reduce_from_(output, self.group)
        else:
            output = self.sequence.scatter(output)
            bias = None if bias is None else shared_weight(bias, self.group)
        return output if bias is None else output.add_(bias)


def _is_transposed(module: nn.Module) -> bool:
    """Return whether the weight is [inputs, outputs]. ValueError: the layer is no known kind of linear layer."""
    if tp_classes_of(module) or (isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward):
        return False
    if any(base.__name__ == "Conv1D" and hasattr(module, "nf") for base in type(module).__mro__):
        return True
    transposed = transposed_by_trial(module)
    if transposed is not None:
        return transposed
    raise ValueError(
        f"{type(module).__name__} does not compute the same as nn.Linear or Transformers' Conv1D and cannot "
        "be split; keep it whole"
    )
