"""Accumulation boundaries and gradient sums over ranks: ``engine.accumulation``; clearing gradients:
``engine.zero_grads``; sums of sparse tensors: ``engine.sparse_sums``."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from deepspeed.comm.sparse_tensor import SparseTensor
    from deepspeed.engine.interface import Engine

# Methods of a module or an optimizer that scripts call directly, redirected to the engine.


class PatchedMethod:
    """Replaces ``owner.name`` by the engine's method ``answer``. Holds a weak reference: once the engine is gone, the
    owner's own method is called.

    [Note: copies] The patch is an instance attribute. In copies and pickles of the owner it is replaced by the method
    of the class, to which it reduces.
    """

    def __init__(self, owner: Any, name: str, answer: Callable[..., Any]) -> None:
        self._owner: weakref.ref[Any] = weakref.ref(owner)
        self._name = name
        self._answer = weakref.WeakMethod(answer)
        vars(owner)[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        answer = self._answer()
        if answer is not None:
            return answer(*args, **kwargs)
        owner = self._owner()
        return getattr(type(owner), self._name)(owner, *args, **kwargs)

    def remove(self) -> None:
        """Restore the owner's own method, unless a newer engine has replaced it."""
        owner = self._owner()
        if owner is not None and vars(owner).get(self._name) is self:
            del vars(owner)[self._name]

    def __reduce__(self) -> Any:
        return getattr, (self._owner(), self._name)  # a copy in the making has only its class's method


MEMORY_OPT_ALLREDUCE_SIZE = 500_000_000


class Accumulation:
    """Controls boundaries, sums and batch sizes, through the engine's clock and reducer."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.inside_no_sync = False
        """True while the script pauses sums. A pipeline also pauses them, but counts its micro-batches with
        ``step``."""

    def is_gradient_accumulation_boundary(self) -> bool:
        return self._engine.clock.at_boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set whether the next backward is the last before an update, instead of counting micro-batches."""
        self._engine.clock.force(is_boundary)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate on this rank in backwards inside the block; the next backward outside sums over ranks.
        Allowed at any stage; with sharded gradients it needs a full gradient buffer."""
        reducer = self._engine._require_core("no_sync").reducer
        if self.inside_no_sync:
            raise AssertionError(
                "engine.no_sync() is already active: no_sync context manager reentry is unsupported."
            )
        self.inside_no_sync = True
        reducer.pause_sums()
        try:
            yield
        finally:
            self.inside_no_sync = False
            reducer.resume_sums()

    @contextlib.contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Sum the gradients of several backwards over ranks once, on exit."""
        with self._engine.no_sync():
            yield
        self._engine.allreduce_gradients()

    def allreduce_gradients(self, bucket_size: int = MEMORY_OPT_ALLREDUCE_SIZE) -> None:
        """Sum locally accumulated gradients over ranks."""
        self._engine._require_core("allreduce_gradients").reducer.finish()

    def clip_fp32_gradients(self) -> None:
        """Clip the current ``param.grad`` (stage 0). ``step`` itself clips at every stage."""
        engine = self._engine
        if engine._config.gradient_clipping > 0:
            from deepspeed.zero.tensor_norms import clip_grad_norm_  # only for scripts that clip themselves

            clip_grad_norm_(engine.module.parameters(), engine._config.gradient_clipping, mpu=engine.mpu)

    def set_all_reduce_hook(self, all_reduce_hook: Callable[[Tensor], None] | None) -> None:
        """Call ``all_reduce_hook`` with every tensor of summed gradients that this rank keeps, to change it in place:
        for instance to average it with replicas outside the data-parallel group (``mpu``)."""
        self._engine._require_core("set_all_reduce_hook").reducer.call_after_sums(all_reduce_hook)

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the global batch size through the accumulation steps; ValueError if it is not a multiple.

        Best called between updates: accumulated gradients keep their weight.
        """
        engine = self._engine
        per_step = engine._config.train_micro_batch_size_per_gpu * engine.dp_world_size
        if train_batch_size < 1 or train_batch_size % per_step:
            raise ValueError(
                f"train_batch_size={train_batch_size} is not a multiple of micro-batch x data-parallel ranks = "
                f"{engine._config.train_micro_batch_size_per_gpu} x {engine.dp_world_size}"
            )
        engine._config.train_batch_size = train_batch_size
        engine._config.gradient_accumulation_steps = engine.clock.steps = train_batch_size // per_step

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the micro-batch size and keep the accumulation steps."""
        engine = self._engine
        engine._config.train_micro_batch_size_per_gpu = micro_batch_size
        engine._config.train_batch_size = micro_batch_size * engine.clock.steps * engine.dp_world_size


class ZeroGrads:
    """Clears gradients between updates. Between the micro-batches of an update ``zero_grad`` does nothing: there it
    is a leftover of a loop without accumulation; ``abandon_update`` drops gradients in that case."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._patches: list[PatchedMethod] = []

    def patch_module(self) -> None:
        """Redirect ``module.zero_grad()`` to the engine."""
        self._patches.append(PatchedMethod(self._engine.module, "zero_grad", self._zero_module))

    def patch_optimizer(self) -> None:
        """Redirect ``zero_grad()`` of the base optimizer to the engine."""
        self._patches.append(PatchedMethod(self._engine.basic_optimizer, "zero_grad", self._zero_optimizer))

    def remove(self) -> None:
        """Restore the methods of module and optimizer."""
        for patch in self._patches:
            patch.remove()

    def zero_grad(self) -> None:
        """Drop every gradient, including those already reduced; do nothing between the micro-batches of an update."""
        engine = self._engine
        engine._recover()
        if engine.clock.mid_update:
            return
        if engine.core is not None:
            engine.core.reducer.clear()
        for param in engine.module.parameters():
            param.grad = None

    def _zero_module(self, *args: Any, **kwargs: Any) -> None:
        """Clear the module, and gradients kept outside ``param.grad``: from stage 1 on, all of them."""
        engine = self._engine
        engine._recover()
        if not engine.clock.mid_update:
            type(engine.module).zero_grad(engine.module, *args, **kwargs)
            engine.zero_grad()

    def _zero_optimizer(self, *args: Any, **kwargs: Any) -> None:
        """Clear through the optimizer: at stage 0 its changes to ``param.grad`` count as assignments
        (``GradReducer``)."""
        engine, optimizer = self._engine, self._engine.basic_optimizer
        engine._recover()
        if engine.clock.mid_update:
            return
        type(optimizer).zero_grad(optimizer, *args, **kwargs)  # type: ignore[arg-type]
        if engine.core is not None and not engine.core.reducer.expose:
            engine.core.reducer.clear()


# Sums of sparse gradients over ranks for scripts: ``engine.sparse_sums``.


class SparseSums:
    """Sums ``SparseTensor``s that a script keeps itself; gradients of the module's parameters are summed by
    ``backward``. Every method is collective over ``dp_group``."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def all_gather_scalar(self, value: Tensor, dp_group: Any) -> list[Tensor]:
        """Return ``value`` of every rank of the group."""
        return _gathered(value, dp_group) if value.dim() else _gathered(value.unsqueeze(0), dp_group)

    def sparse_all_gather(self, value: Tensor, dp_group: Any) -> list[Tensor]:
        """Return the rows of every rank of the group; numbers of rows may differ."""
        return _gathered(value, dp_group)

    def sparse_allreduce(
        self, sparse: SparseTensor, dp_group: Any, dp_world_size: int | None = None
    ) -> SparseTensor:
        """Set ``sparse`` to the mean over the group (the sum, without ``gradient_average``): the concatenated rows of
        all ranks, sent as ``communication_data_type``."""
        indices, values, _ = sparse.parts()
        ranks = dp_world_size or torch.distributed.get_world_size(group=dp_group)
        sent = values.to(self._engine.facts.communication_data_type) / (
            ranks if self._engine.facts.gradient_average else 1
        )
        sparse.indices = torch.cat(_gathered(indices, dp_group))
        sparse.values = torch.cat(_gathered(sent, dp_group)).to(values.dtype)
        return sparse

    def sparse_allreduce_bucket(
        self, bucket: Iterable[SparseTensor], dp_group: Any, dp_world_size: int | None = None
    ) -> list[SparseTensor]:
        return [self._engine.sparse_allreduce(sparse, dp_group, dp_world_size) for sparse in bucket]

    def sparse_allreduce_no_retain(
        self, bucket: Iterable[SparseTensor], dp_group: Any, dp_world_size: int | None = None
    ) -> None:
        """Do the same, and write the results to the sparse or dense tensors that the ``SparseTensor``s were made
        from."""
        for sparse in self._engine.sparse_allreduce_bucket(bucket, dp_group, dp_world_size):
            original = sparse.orig_dense_tensor
            if original is not None and original.is_sparse:
                original.data = sparse.to_coo_tensor()
            elif original is not None:
                original.copy_(sparse.to_dense())


def _gathered(rows: Tensor, group: Any) -> list[Tensor]:
    from deepspeed.comm.sparse_tensor import gather_rows  # only for scripts that sum rows themselves

    return gather_rows(rows, group)
