"""Results of chosen operations of a checkpointed region, kept from its first run and used in its second one.

(Selective recomputation: Korthikanti et al., *Reducing Activation Recomputation in Large Transformer Models*, 2022.)
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from deepspeed.transforms.recompute.recorded import Key, is_counted


class _Numbering(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._counts: dict[Any, int] = {}

    def __enter__(self) -> Any:
        self._counts.clear()
        return super().__enter__()

    def key(self, func: Any) -> Key:
        position = self._counts.get(func, 0)
        self._counts[func] = position + 1
        return func, position


class _Keep(_Numbering):
    """The first run."""

    def __init__(self, chosen: Collection[Key], kept: dict[Key, Any]) -> None:
        super().__init__()
        self._chosen, self._kept = chosen, kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if is_counted(func) and (key := self.key(func)) in self._chosen:
            self._kept[key] = tree_map_only(Tensor, lambda t: (t.detach(), t._version), outputs)
        return outputs


class _Reuse(_Numbering):
    """The second run, and any after it."""

    def __init__(self, kept: dict[Key, Any]) -> None:
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_counted(func):
            found = self._kept.get(self.key(func))
            if found is not None:
                return _unchanged(func, found)
        return func(*args, **(kwargs or {}))


def _unchanged(func: Any, kept: Any) -> Any:
    if (
        isinstance(kept, tuple)
        and len(kept) == 2
        and isinstance(kept[0], Tensor)
        and isinstance(kept[1], int)
    ):
        tensor, version = kept
        if tensor._version != version:
            raise RuntimeError(
                f"the result of {func} was changed in place after it was kept for recomputation: the block computes "
                "something else than when it was counted; leave activation_checkpointing.memory_budget out"
            )
        return tensor.detach()
    if isinstance(kept, (tuple, list)):
        return type(kept)(_unchanged(func, each) for each in kept)
    return kept


def keeping(chosen: Collection[Key]) -> tuple[_Keep, _Reuse]:
    """Contexts of the first and of the second run of a region (``context_fn`` of ``torch.utils.checkpoint``)."""
    kept: dict[Key, Any] = {}
    return _Keep(chosen, kept), _Reuse(kept)
