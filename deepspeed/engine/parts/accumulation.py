"""The part of an engine that says which backward is the last of an update, and when gradients are summed over ranks:
``engine.accumulation``; and the part that clears gradients for scripts: ``engine.zero_grads``."""

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

# Methods of a module or an optimizer that its engine answers, for scripts that call them beside the engine.


class PatchedMethod:
    """Replaces ``owner.name``: ``answer``, a method of the engine, is called instead. The engine is not kept
    alive; once it is gone, the owner's own method is called.

    [Note: copies] The patch is an attribute of this one object. Copies and pickles of it have the method of their
    class in its place: it reduces to that.
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
        """Give the owner its own method back, unless an engine made since has replaced it."""
        owner = self._owner()
        if owner is not None and vars(owner).get(self._name) is self:
            del vars(owner)[self._name]

    def __reduce__(self) -> Any:
        return getattr, (self._owner(), self._name)  # of a copy in the making, which has only its class's


MEMORY_OPT_ALLREDUCE_SIZE = 500_000_000


class Accumulation:
    """Control of boundaries, sums and the size of a batch, over the engine's clock and reducer."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.inside_no_sync = False
        """The script pauses sums. A pipeline does too, but counts its micro-batches with ``step`` meanwhile."""

    def is_gradient_accumulation_boundary(self) -> bool:
        return self._engine.clock.at_boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set whether the next backward is the last before an update, instead of counting micro-batches."""
        self._engine.clock.force(is_boundary)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only accumulate on this rank; the next one outside sums over ranks. Allowed at any stage;
        with sharded gradients it costs a full gradient buffer."""
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
        """Sum over ranks what has so far only been accumulated locally."""
        self._engine._require_core("allreduce_gradients").reducer.finish()

    def clip_fp32_gradients(self) -> None:
        """Clip what is in ``param.grad`` now (stage 0). ``step`` itself clips at every stage."""
        engine = self._engine
        if engine._config.gradient_clipping > 0:
            from deepspeed.zero.tensor_norms import clip_grad_norm_  # for scripts that clip by themselves

            clip_grad_norm_(engine.module.parameters(), engine._config.gradient_clipping, mpu=engine.mpu)

    def set_all_reduce_hook(self, all_reduce_hook: Callable[[Tensor], None] | None) -> None:
        """Call ``all_reduce_hook`` with every tensor of summed gradients that stays on this rank, to change in place:
        for instance to average it with other replicas, which are no part of the data-parallel group (``mpu``)."""
        self._engine._require_core("set_all_reduce_hook").reducer.call_after_sums(all_reduce_hook)

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the global batch by changing the accumulation steps; ValueError if it is not a multiple.

        Best called between updates: gradients already accumulated keep the weight they had.
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
    """Clears gradients outside of an update. Between the micro-batches of one every ``zero_grad`` does nothing: there
    it is a leftover of a loop that updated after each of them, and ``abandon_update`` drops them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._patches: list[PatchedMethod] = []

    def patch_module(self) -> None:
        """Let the engine answer ``module.zero_grad()`` from now on."""
        self._patches.append(PatchedMethod(self._engine.module, "zero_grad", self._zero_module))

    def patch_optimizer(self) -> None:
        """Let the engine answer ``zero_grad()`` of the optimizer that ``engine.optimizer`` is or wraps from now on."""
        self._patches.append(PatchedMethod(self._engine.basic_optimizer, "zero_grad", self._zero_optimizer))

    def remove(self) -> None:
        """Give module and optimizer their own methods back."""
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
        """Also drop what is kept elsewhere than in ``param.grad``: from stage 1 on, all of it."""
        engine = self._engine
        engine._recover()
        if not engine.clock.mid_update:
            type(engine.module).zero_grad(engine.module, *args, **kwargs)
            engine.zero_grad()

    def _zero_optimizer(self, *args: Any, **kwargs: Any) -> None:
        """Let the optimizer clear: what it does to ``param.grad`` at stage 0 counts as if assigned
        (``GradReducer``)."""
        engine, optimizer = self._engine, self._engine.basic_optimizer
        engine._recover()
        if engine.clock.mid_update:
            return
        type(optimizer).zero_grad(optimizer, *args, **kwargs)  # type: ignore[arg-type]
        if engine.core is not None and not engine.core.reducer.expose:
            engine.core.reducer.clear()


# The part of an engine that sums gradients of rows over ranks for a script: ``engine.sparse_sums``.


class SparseSums:
    """Sums of ``SparseTensor`` that a script keeps apart; the gradients of the module's parameters are summed by
    ``backward``. Every method is collective over ``dp_group``."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def all_gather_scalar(self, value: Tensor, dp_group: Any) -> list[Tensor]:
        """``value`` of every rank of the group."""
        return _gathered(value, dp_group) if value.dim() else _gathered(value.unsqueeze(0), dp_group)

    def sparse_all_gather(self, value: Tensor, dp_group: Any) -> list[Tensor]:
        """The rows of every rank of the group, of which each may have another number."""
        return _gathered(value, dp_group)

    def sparse_allreduce(
        self, sparse: SparseTensor, dp_group: Any, dp_world_size: int | None = None
    ) -> SparseTensor:
        """Make ``sparse`` the mean over the group (the sum, without ``gradient_average``): the rows of all ranks, sent
        as ``communication_data_type``."""
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
        """The same, written to the tensors, sparse or dense, that the ``SparseTensor`` were made of."""
        for sparse in self._engine.sparse_allreduce_bucket(bucket, dp_group, dp_world_size):
            original = sparse.orig_dense_tensor
            if original is not None and original.is_sparse:
                original.data = sparse.to_coo_tensor()
            elif original is not None:
                original.copy_(sparse.to_dense())


def _gathered(rows: Tensor, group: Any) -> list[Tensor]:
    from deepspeed.comm.sparse_tensor import gather_rows  # for scripts that sum rows by themselves

    return gather_rows(rows, group)
