"""Base class of our optimizers: one update of many tensors, each on the fastest available path.

An optimizer declares its per-element state (`state_names`) and implements its arithmetic twice: as a call of a native
kernel and in plain PyTorch. Tensors on the CPU go to the kernel, all tensors of a group in one call; tensors that it
does not support (other devices or dtypes, strided memory, no library) go through PyTorch with the same operations in
the same order, so that both are bit-identical.

[Note: pointer tables] A kernel reads the addresses of its tensors from a table. The table is reused between steps while
parameters, state and low-precision copies are the same tensors at the same addresses, which every step checks; new
gradients at other addresses only rewrite their column.
"""

from __future__ import annotations

import ctypes
import operator
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from deepspeed.ops import native
from deepspeed.ops.update import ALONE, Fragments, Group, Tensors, UpdateContext, UpdateTraits

_GRAD = 1  # column of gradient addresses
_MAX_TABLES = 64  # kept per optimizer: bounds them if a caller always passes new tensors

_address = Tensor.data_ptr


class Launch:
    """One call of a kernel: all segments on one device with the same storage types."""

    def __init__(self, storage: tuple[int, int, int, int], device: torch.device) -> None:
        self.device = device
        self.storage = native.Storage(*storage)
        self.storage_pointer = ctypes.addressof(self.storage)
        self.indices: list[int] = []  # positions in the lists of the step
        self.words = array("q")  # rows of struct ds_segment
        self.pointer = 0  # address of `words`, set when complete
        self.uploaded: Any = None  # copy of `words` on another device; None: out of date

    def arguments(self) -> tuple[int, int, int]:
        return self.pointer, len(self.indices), self.storage_pointer


class Table:
    """The launches for one list of parameters; see [Note: pointer tables]."""

    row_words = native.SEGMENT_WORDS

    def __init__(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        low_precision: Sequence[Tensor | None] | None,
        states: list[dict[str, Any]],
        names: tuple[str, ...],
        has_kernel: Callable[[Tensor], bool],
        starts: Sequence[int],
    ) -> None:
        self.params, self.grads = tuple(params), tuple(grads)
        self.starts = starts or (0,) * len(params)
        self.low_precision = None if low_precision is None else tuple(low_precision)
        self.states, self.names = states, names
        self.state_tensors = self._current_state()
        self.watched = [
            *self.params,
            *self.state_tensors,
            *(t for t in self.low_precision or () if t is not None),
        ]
        self.addresses = list(map(_address, self.watched))
        self.grad_addresses = list(map(_address, self.grads))
        self.launches: list[Launch] = []
        self.others: list[int] = []  # indices of tensors that no kernel supports
        self._sort_into_launches(has_kernel)

    def _current_state(self) -> list[Any]:
        return [state.get(name) for state in self.states for name in self.names]  # a script may empty states

    def _sort_into_launches(self, has_kernel: Callable[[Tensor], bool]) -> None:
        launches: dict[Any, Launch] = {}
        codes = native.DTYPE_CODES
        for i, (param, grad, state) in enumerate(zip(self.params, self.grads, self.states, strict=True)):
            low = None if self.low_precision is None else self.low_precision[i]
            row = self._row(i, param, grad, state, low) if has_kernel(param) else None
            if row is None:
                self.others.append(i)
                continue
            state_code, words = row
            low_code = 0 if low is None else codes[low.dtype]
            storage = (codes[param.dtype], codes[grad.dtype], state_code, low_code)
            launch = launches.setdefault((param.device, storage), Launch(storage, param.device))
            launch.indices.append(i)
            launch.words.extend(words)
        self.launches = list(launches.values())
        for launch in self.launches:
            launch.pointer = launch.words.buffer_info()[0]

    def _row(
        self, i: int, param: Tensor, grad: Tensor, state: dict[str, Any], low: Tensor | None
    ) -> tuple[int, Sequence[int]] | None:
        """Return the code of the state's dtype, and the row of struct ds_segment; None: no kernel supports these
        tensors."""
        elements = [state[name] for name in self.names if name != "step"]
        tensors = [param, grad, *elements] if low is None else [param, grad, *elements, low]
        fits = all(fits_kernel(tensor, param.device) for tensor in tensors)
        if not fits or len({state.dtype for state in elements}) > 1:
            return None
        for tensor in tensors:
            if tensor.numel() != param.numel():
                raise ValueError(
                    f"got a tensor of {tensor.numel()} elements for a parameter of {param.numel()}"
                )
        states = [*map(_address, elements), 0, 0][:2]
        ends = (0 if low is None else low.data_ptr(), state["step"].data_ptr(), param.numel())
        state_code = native.DTYPE_CODES[elements[0].dtype] if elements else 0
        return state_code, (param.data_ptr(), grad.data_ptr(), *states, *ends)

    def count_steps(self, indices: list[int]) -> list[int]:
        """Increment the step counts of these tensors and return them; host kernels do this themselves."""
        for i in indices:
            self.states[i]["step"] += 1
        return [int(self.states[i]["step"]) for i in indices]

    def is_current(self, low_precision: Sequence[Tensor | None] | None) -> bool:
        """Return whether state, low-precision copies and all addresses except those of gradients match the table."""
        if (low_precision is None) != (self.low_precision is None):
            return False
        if low_precision is not None and not _same(low_precision, self.low_precision or ()):
            return False
        return (
            _same(self._current_state(), self.state_tensors)
            and list(map(_address, self.watched)) == self.addresses
        )

    def follow_grads(self, grads: Sequence[Tensor]) -> bool:
        """Switch to new gradients. Return False if they differ in more than their addresses."""
        if len(grads) != len(self.grads):
            return False
        if not _same(grads, self.grads):
            for new, old in zip(grads, self.grads, strict=True):
                if new.dtype is not old.dtype or new.shape != old.shape or new.stride() != old.stride():
                    return False
                if new.device != old.device:
                    return False
            self.grads = tuple(grads)
        addresses = list(map(_address, grads))
        if addresses != self.grad_addresses:
            self.grad_addresses = addresses
            for launch in self.launches:
                launch.words[_GRAD :: self.row_words] = array("q", [addresses[i] for i in launch.indices])
                launch.uploaded = None
        return True


def result_of(closure: Callable[[], Any] | None) -> Any:
    """Return the result of a ``step``'s closure, run with gradients enabled; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def fits_kernel(tensor: Tensor, device: torch.device) -> bool:
    """Return whether a kernel on `device` can use this tensor's memory."""
    return tensor.device == device and tensor.dtype in native.DTYPE_CODES and tensor.is_contiguous()


def _same(left: Iterable[Any], right: Iterable[Any]) -> bool:
    return all(map(operator.is_, left, right))


class MultiTensorOptimizer(torch.optim.Optimizer):
    """A `torch.optim.Optimizer` whose update is one pass over memory for all tensors of a group.

    State per parameter: "step" (0-d fp32 on the CPU, as in torch.optim) and the tensors named by `state_names`, in
    fp32, or in the parameter's dtype if the group has `fp32_optimizer_states=False`.
    """

    update_traits = UpdateTraits(elementwise=True)
    state_names: tuple[str, ...] = ()
    """Per-element state, at most two tensors."""

    _starts: tuple[int, ...] = ()  # of this step

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        torch.optim.Optimizer.__init__(self, params, defaults)  # a base in between may take other arguments
        self._tables: dict[tuple[Any, ...], Table] = {}

    @property
    def fp32_optimizer_states(self) -> bool:
        """Return whether state is fp32, regardless of the parameters' dtype."""
        return self.defaults.get("fp32_optimizer_states", True)

    def add_param_group(self, param_group: Group) -> None:
        # torch hides this method from the compiler, and the first such call imports the compiler (0.6 s).
        method = torch.optim.Optimizer.add_param_group
        if "torch._dynamo" not in sys.modules:
            method = getattr(method, "__wrapped__", method)
        method(self, param_group)
        if any(param.is_complex() for param in param_group["params"]):
            del self.param_groups[-1]
            raise ValueError(
                f"{type(self).__name__} does not support complex parameters: pass "
                "torch.view_as_real(param), or use torch.optim"
            )

    # ---- what a subclass implements ------------------------------------------------------------------------

    kernel_name: ClassVar[str]
    """Name of the native kernel, which also increments the steps. Its arguments after the launch are the group's
    ``kernel_factors``, the factor of gradients, its ``kernel_switches``, and the number of threads."""
    kernel_factors: ClassVar[tuple[str, ...]]
    kernel_switches: ClassVar[tuple[str, ...]] = ()
    table_class: ClassVar[type[Table]] = Table

    def _native_update(self, lib: ctypes.CDLL, launch: Launch, group: Group, grad_scale: float) -> None:
        factors: list[float] = []
        for name in self.kernel_factors:
            factors += group[name] if name == "betas" else [float(group[name])]
        rest = (grad_scale, *map(group.__getitem__, self.kernel_switches), torch.get_num_threads())
        getattr(lib, self.kernel_name)(*launch.arguments(), *factors, *rest)

    def _has_kernel(self, param: Tensor) -> bool:
        """Return whether the optimizer has a kernel for the device of ``param``."""
        return param.is_cpu and native.library() is not None

    def _device_update(self, launch: Launch, steps: list[int], group: Group, grad_scale: float) -> None:
        """Call the kernel of a device other than the CPU; `steps` includes this update."""
        raise NotImplementedError

    def _torch_update(
        self, group: Group, params: Tensors, grads: Tensors, states: list[Tensors], steps: list[int]
    ) -> None:
        """Compute the same update in PyTorch, in place. All tensors are fp32; `states[k]` is the list for
        `state_names[k]`; `steps` includes this update. Use only single, correctly rounded operations (no `alpha=`,
        `lerp`, `addcmul`), in the kernel's order."""
        raise NotImplementedError

    def _sparse_update(self, group: Group, param: Tensor, grad: Tensor) -> None:
        """Update the rows in a sparse gradient, if the method supports that."""
        raise RuntimeError(
            f"{type(self).__name__} does not support sparse gradients (parameter of shape {tuple(param.shape)}): make "
            "the embedding with sparse=False, or use Adagrad or torch.optim.SparseAdam."
        )

    # ---- state ---------------------------------------------------------------------------------------------

    def _names_for(self, group: Group) -> tuple[str, ...]:
        return self.state_names

    def _initial_value(self, name: str, group: Group) -> float:
        return 0.0

    def state_for(self, param: Tensor, group: Group) -> dict[str, Any]:
        """Return a parameter's state, created on first use."""
        state = self.state[param]
        step = state.get("step", 0)
        if not isinstance(step, Tensor) or step.dtype is not torch.float32 or step.device.type != "cpu":
            state["step"] = torch.tensor(float(step), dtype=torch.float32)
        for name in self._names_for(group):
            if name not in state:
                value, dtype = self._initial_value(name, group), self._state_dtype(param, group)
                state[name] = torch.full_like(param, value, dtype=dtype, requires_grad=False)
        return state

    @staticmethod
    def _state_dtype(param: Tensor, group: Group) -> torch.dtype:
        if param.dtype is torch.float64 or not group.get("fp32_optimizer_states", True):
            return param.dtype
        return torch.float32

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._tables.clear()
        # torch casts every floating state to the dtype of its parameter and may share memory with
        # `state_dict`.
        saved_ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        owners = [(group, param) for group in self.param_groups for param in group["params"]]
        held = set(self.state)  # by key: an engine that has taken over the state keeps it under its masters
        for saved_id, (group, param) in zip(saved_ids, owners, strict=True):
            saved = state_dict["state"].get(saved_id)
            if saved is None or param not in held:
                continue
            state, dtype = self.state[param], self._state_dtype(param, group)
            for name in self._names_for(group):
                if isinstance(saved.get(name), Tensor):
                    state[name] = saved[name].to(param.device, dtype, copy=True)
            # torch.optim.SGD counts no steps: that it has state shows that there was one
            state["step"] = torch.tensor(float(saved.get("step", 1)), dtype=torch.float32)

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.optim.Optimizer.__setstate__(self, state)
        self._tables = {}

    # ---- step ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; return the closure's result."""
        loss = result_of(closure)
        context = self._own_context()
        for group in self.param_groups:
            params = []
            for p in group["params"]:
                if p.grad is not None and p.grad.layout is not torch.strided:
                    self._sparse_update(group, p, p.grad)
                elif p.grad is not None:
                    params.append(p)
            if params:
                self.multi_tensor_step(group, params, [p.grad for p in params], context=context)
                torch.autograd.graph.increment_version(params)  # autograd does not see a kernel's writes
        return loss

    def forget_tables(self) -> None:
        """Release the tensors of earlier steps that tables keep alive."""
        self._tables.clear()

    def _own_context(self) -> UpdateContext:
        """Return the context for ``step``, where all tensors are whole."""
        return ALONE

    def step_fragments(
        self, fragments: Sequence[Fragments], *, grad_scale: float = 1.0, context: UpdateContext = ALONE
    ) -> None:
        """See ``FragmentOptimizer``."""
        traits = self.update_traits
        for group, part in zip(self.param_groups, fragments, strict=True):
            if part.masters or traits.joins_ranks:
                positions = {"starts": part.starts} if traits.positions else {}
                self.multi_tensor_step(
                    group,
                    part.masters,
                    part.grads,
                    grad_scale=grad_scale,
                    low_precision=part.lows,
                    context=context,
                    **positions,
                )

    def multi_tensor_step(
        self,
        group: Group,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        *,
        grad_scale: float = 1.0,
        low_precision: Sequence[Tensor | None] | None = None,
        context: UpdateContext = ALONE,
        starts: Sequence[int] = (),
    ) -> None:
        """Update `params` once, with the hyperparameters of `group`.

        Args:
            params: fp32, or bf16/fp16 (computed in fp32 and rounded), any shape; contiguous for the fast path.
            grads: fp32, bf16 or fp16, one per parameter; the gradient used is `grad * grad_scale`, an fp32 product.
            low_precision: where not None, receives the updated parameter rounded to its dtype, in the same pass.
            context: the caller's operations for updates that need more than the given tensors.
            starts: index of each tensor's first element in its parameter (none: all 0), for updates that depend on it.
        """
        self._starts = tuple(starts)
        if not params:
            return
        self._update(self._table(group, params, grads, low_precision), group, grad_scale, context)

    def _update(self, table: Table, group: Group, grad_scale: float, context: UpdateContext) -> None:
        lib = native.library()
        for launch in table.launches:
            if launch.device.type == "cpu":
                self._native_update(lib, launch, group, grad_scale)  # type: ignore[arg-type]  # there is a library
            else:
                self._device_update(launch, table.count_steps(launch.indices), group, grad_scale)
        if table.others:
            self._update_in_torch(table, group, grad_scale)

    @torch.no_grad()
    def _update_in_torch(self, table: Table, group: Group, grad_scale: float) -> None:
        steps = table.count_steps(table.others)
        for batch in _batches(table, self._names_for(group), steps):
            wide = batch.widen(grad_scale)
            self._torch_update(group, wide.params, wide.grads, wide.states, batch.steps)
            batch.round_back(wide)

    def _table(
        self,
        group: Group,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        low_precision: Sequence[Tensor | None] | None,
    ) -> Table:
        key = (id(params[0]), len(params), self._starts)
        table = self._tables.get(key)
        if (
            table is None
            or not _same(params, table.params)
            or not table.is_current(low_precision)
            or not table.follow_grads(grads)
        ):
            if len(grads) != len(params) or (low_precision is not None and len(low_precision) != len(params)):
                raise ValueError("params, grads and low_precision must be lists of the same length")
            if any(grad.is_sparse for grad in grads):
                raise RuntimeError(
                    f"{type(self).__name__} does not support sparse gradients: call .to_dense() on them or "
                    "use torch.optim.SparseAdam"
                )
            if len(self._tables) >= _MAX_TABLES:
                self._tables.clear()
            states = [self.state_for(param, group) for param in params]
            names = (*self._names_for(group), "step")
            lists = (params, grads, low_precision, states)
            table = self._tables[key] = self.table_class(*lists, names, self._has_kernel, self._starts)
        return table


# ---- the PyTorch path --------------------------------------------------------------------------------------

_CHUNK_NUMEL = {"cpu": 1 << 15}  # on CPUs a batch's temporaries stay in the cache
_CHUNK_NUMEL_DEVICE = 1 << 26  # on devices they stay small compared to the tensors


@dataclass
class TensorBatch:
    """Tensors (or flat chunks of them) that are updated together in PyTorch."""

    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    states: list[list[Tensor]] = field(default_factory=list)  # one list per state name
    low_precision: list[Tensor | None] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    numel: int = 0

    def add(self, param: Tensor, grad: Tensor, states: list[Tensor], low: Tensor | None, step: int) -> None:
        self.params.append(param)
        self.grads.append(grad)
        for values, state in zip(self.states, states, strict=True):
            values.append(state)
        self.low_precision.append(low)
        self.steps.append(step)
        self.numel += param.numel()

    def widen(self, grad_scale: float) -> TensorBatch:
        """Return the batch in fp32 (fp64 stays), with gradients scaled: the same tensors where they are fp32, else
        copies."""
        return TensorBatch(
            params=[_wide(p) for p in self.params],
            grads=[_wide(g) * grad_scale for g in self.grads],
            states=[[_wide(state) for state in values] for values in self.states],
        )

    def round_back(self, wide: TensorBatch) -> None:
        for param, value in zip(self.params, wide.params, strict=True):
            _write_back(param, value)
        for states, values in zip(self.states, wide.states, strict=True):
            for state, value in zip(states, values, strict=True):
                _write_back(state, value)
        for low, value in zip(self.low_precision, wide.params, strict=True):
            if low is not None:
                low.copy_(value.reshape(low.shape))


def _batches(table: Table, names: tuple[str, ...], steps: list[int]) -> Iterator[TensorBatch]:
    """Yield the table's `others`: large contiguous tensors in chunks, small ones together."""
    batch = TensorBatch(states=[[] for _ in names])
    for i, step in zip(table.others, steps, strict=True):
        param, low = table.params[i], None if table.low_precision is None else table.low_precision[i]
        states = [table.states[i][name] for name in names]
        tensors = [param.detach(), table.grads[i], *states] + ([] if low is None else [low])
        limit = _CHUNK_NUMEL.get(param.device.type, _CHUNK_NUMEL_DEVICE)
        if param.numel() > limit and all(t.is_contiguous() for t in tensors):
            pieces = zip(*(t.view(-1).split(limit) for t in tensors), strict=True)
        else:
            pieces = iter([tuple(tensors)])
        for piece in pieces:
            batch.add(
                piece[0], piece[1], list(piece[2 : 2 + len(names)]), None if low is None else piece[-1], step
            )
            if batch.numel >= limit:
                yield batch
                batch = TensorBatch(states=[[] for _ in names])
    if batch.params:
        yield batch


def _wide(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def _write_back(tensor: Tensor, wide: Tensor) -> None:
    if tensor.data_ptr() != wide.data_ptr():
        tensor.copy_(wide)


def foreach_sqrt(tensors: list[Tensor]) -> list[Tensor]:
    """Return correctly rounded square roots. On CPUs, torch.sqrt of fp32 is MKL's, which is not correctly rounded; via
    fp64 it is."""
    if any(t.device.type == "cpu" for t in tensors):
        return [t.double().sqrt_().float() if t.dtype is torch.float32 else t.sqrt() for t in tensors]
    return list(torch._foreach_sqrt(tensors))


def refuse(optimizer: str, **arguments: Any) -> None:
    """Raise RuntimeError for unsupported arguments of the documented signature, unless None or False."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise RuntimeError(f"{optimizer} does not support {name}={value!r}: leave it out")
