"""Named axes of parallelism and the ranks of each group along them: pure arithmetic, no torch.distributed."""

from __future__ import annotations

from dataclasses import dataclass

BASE_AXES = ("pp", "dp", "sp", "tp")
# derived axis -> (which size field it uses, whether it is the inner one of its pair)
DERIVED_AXES = {
    "ep": ("ep", True),
    "expert_dp": ("ep", False),
    "node": ("node", True),
    "cross_node": ("node", False),
}
AXES = (*BASE_AXES, *DERIVED_AXES)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshLayout:
    """Sizes of the axes, and from them the ranks of every group. Pure arithmetic: no torch.distributed."""

    pp: int = 1
    dp: int = 1
    sp: int = 1
    tp: int = 1
    ep: int = 1
    node: int = 1

    def __post_init__(self) -> None:
        for axis in (*BASE_AXES, "ep", "node"):
            size: int = getattr(self, axis)
            if size < 1:
                raise ValueError(f"mesh axis {axis}={size}: a size is at least 1")
        for axis in ("ep", "node"):
            if self.replicas % getattr(self, axis):
                raise ValueError(
                    f"mesh axis {axis}={getattr(self, axis)} does not divide the {self.replicas} "
                    f"data-parallel ranks (dp={self.dp} x sp={self.sp}): one of {divisors(self.replicas)}"
                )

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.sp * self.tp

    @property
    def replicas(self) -> int:
        """Ranks that hold the same dense weights and average their gradients: dp * sp."""
        return self.dp * self.sp

    def size(self, *axes: str) -> int:
        """Ranks of a group over these axes (their product)."""
        result = 1
        for axis in axes:
            result *= self._size(axis)
        return result

    def coordinate(self, rank: int) -> dict[str, int]:
        """A rank's position along each base axis."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside the mesh of {self.world_size} ranks")
        result: dict[str, int] = {}
        for axis in reversed(BASE_AXES):
            rank, result[axis] = divmod(rank, self._size(axis))
        return {axis: result[axis] for axis in BASE_AXES}

    def ranks(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The group of `rank` over these axes: all ranks that differ from it only along them, ascending."""
        if len(axes) == 1 and axes[0] in DERIVED_AXES:
            return self._derived_ranks(rank, axes[0])
        for axis in axes:
            if axis not in BASE_AXES:
                raise ValueError(f"mesh axes {axes}: only {BASE_AXES} can be combined, not {axis!r}")
        self.coordinate(rank)  # checks that it is one of the mesh's
        found, stride = [rank], self.world_size
        for axis in BASE_AXES:
            size = self._size(axis)
            stride //= size
            if axis in axes:
                place = rank // stride % size
                found = [at + (index - place) * stride for at in found for index in range(size)]
        return tuple(found)

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """Every group over these axes, ordered by first rank; each rank is in exactly one."""
        result: list[tuple[int, ...]] = []
        placed: set[int] = set()
        for rank in range(self.world_size):
            if rank not in placed:
                result.append(self.ranks(rank, *axes))
                placed.update(result[-1])
        return result

    def _size(self, axis: str) -> int:
        if axis in DERIVED_AXES:
            field, inner = DERIVED_AXES[axis]
            inner_size: int = getattr(self, field)
            return inner_size if inner else self.replicas // inner_size
        if axis not in BASE_AXES:
            raise ValueError(f"unknown mesh axis {axis!r}; the axes are {', '.join(AXES)}")
        size: int = getattr(self, axis)
        return size

    def _derived_ranks(self, rank: int, axis: str) -> tuple[int, ...]:
        field, inner = DERIVED_AXES[axis]
        return split_ranks(self.ranks(rank, "dp", "sp"), rank, getattr(self, field), inner=inner)


def split_ranks(ranks: tuple[int, ...], rank: int, block: int, *, inner: bool) -> tuple[int, ...]:
    """Split `ranks` into runs of `block`; returns the run that holds `rank` (inner), or the ranks with the same
    position in every run (not inner)."""
    place = ranks.index(rank)
    if inner:
        start = place - place % block
        return ranks[start : start + block]
    return ranks[place % block :: block]


def divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]
