"""The axes of parallelism over the ranks of a job: one layout, from all sources that may define it.

The config (`sequence_parallel_size`, `data_parallel_size`, `tensor_parallel.autotp_size`) and `mesh_param` of
`initialize` become one `MeshLayout`. A model-parallel unit or device mesh passed by the caller already has groups; then
only the number of data-parallel ranks is read here. Errors are reported as problems of the config.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepspeed.base.environment import ALONE, Identity, default_group, this_process
from deepspeed.config.problems import DeepSpeedConfigError, Problem, shown

BASE_AXES = ("pp", "dp", "sp", "tp")
# Derived axis -> (field with the inner size of its pair, whether it is the inner one).
DERIVED_AXES = {
    "ep": ("ep", True),
    "expert_dp": ("ep", False),
    "node": ("node", True),
    "cross_node": ("node", False),
}
AXES = (*BASE_AXES, *DERIVED_AXES)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshLayout:
    """Sizes of the axes, from which the ranks of every group follow. Pure arithmetic, without torch.distributed."""

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
                raise ValueError(f"mesh axis {axis}={size}: the size must be at least 1")
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
        """Number of ranks that hold the same dense weights and average their gradients: dp * sp."""
        return self.dp * self.sp

    def size(self, *axes: str) -> int:
        """Return the number of ranks in a group over these axes (the product of their sizes)."""
        result = 1
        for axis in axes:
            result *= self._size(axis)
        return result

    def ranks(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Return the group of `rank` over these axes: all ranks that differ from it only along them, ascending."""
        if len(axes) == 1 and axes[0] in DERIVED_AXES:
            field, inner = DERIVED_AXES[axes[0]]
            return split_ranks(self.ranks(rank, "dp", "sp"), rank, getattr(self, field), inner=inner)
        for axis in axes:
            if axis not in BASE_AXES:
                raise ValueError(f"mesh axes {axes}: only {BASE_AXES} can be combined, not {axis!r}")
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside the mesh of {self.world_size} ranks")
        found, stride = [rank], self.world_size
        for axis in BASE_AXES:
            size = self._size(axis)
            stride //= size
            if axis in axes:
                place = rank // stride % size
                found = [at + (index - place) * stride for at in found for index in range(size)]
        return tuple(found)

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """Return every group over these axes, ordered by first rank; each rank is in exactly one."""
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


def split_ranks(ranks: tuple[int, ...], rank: int, block: int, *, inner: bool) -> tuple[int, ...]:
    """Split `ranks` into runs of `block`; return the run of `rank` (inner), or the ranks with its position in every run
    (not inner)."""
    place = ranks.index(rank)
    if inner:
        start = place - place % block
        return ranks[start : start + block]
    return ranks[place % block :: block]


def divisors(number: int) -> list[int]:
    """Return the divisors in ascending order."""
    small = [low for low in range(1, math.isqrt(number) + 1) if number % low == 0]
    return sorted({*small, *(number // low for low in small)})


SEQUENCE, DATA, TENSOR = "sequence_parallel_size", "data_parallel_size", "tensor_parallel.autotp_size"
MESH_PARAM = "mesh_param"


@dataclass(frozen=True)
class Axes:
    """The resolved axes: `data_parallel` ranks read different data. `layout`: None if the caller has own groups."""

    data_parallel: int
    origin: str
    layout: MeshLayout | None = None
    problems: list[Problem] = field(default_factory=list)


def axes_of(
    data: Mapping[str, Any],
    ranks: int,
    origin: str = "",
    *,
    mpu: Any = None,
    mesh_device: Any = None,
    mesh_param: Sequence[int] | None = None,
    split_over: int | None = None,
) -> Axes:
    """Return the axes of a job of `ranks` ranks, given the config as written; `origin` names the source of that number.
    `split_over`: number of tensor-parallel ranks that the model is already split over.

    The ranks of a sequence are consecutive, and within it those of a tensor-parallel group. Inconsistencies are
    recorded as problems; the returned axes then only serve to find more of them.
    """
    if mpu is not None:
        if hasattr(mpu, "get_data_parallel_world_size"):
            return Axes(int(mpu.get_data_parallel_world_size()), "from mpu")
        if hasattr(mpu, "get_sequence_parallel_world_size"):
            return Axes(ranks // int(mpu.get_sequence_parallel_world_size()), "from mpu")
    if mesh_device is not None:
        return Axes(_data_axis(mesh_device), "from the device mesh")
    problems: list[Problem] = []
    sizes = _sizes_in(data)
    if mesh_param is not None:
        sizes = _with_mesh_param(sizes, mesh_param, problems)
    if split_over is not None:
        sizes = _with_split(sizes, split_over, problems)
    _check_product(sizes, ranks, origin, problems)
    sp, tp = sizes.get(SEQUENCE, 1), sizes.get(TENSOR, 1)
    data_parallel = max(1, ranks // (sp * tp))
    layout = None
    if not problems:
        layout = MeshLayout(dp=data_parallel, sp=sp, tp=tp, node=data_parallel * sp)
    return Axes(data_parallel, origin, layout, problems)


def least_ranks(data: Mapping[str, Any]) -> int:
    """Return the smallest world size that fits the sizes in a config."""
    return math.prod(_sizes_in(data).values())


def tensor_parallel_size(data: Mapping[str, Any]) -> int:
    """Return the number of ranks that the config splits each layer over."""
    return _sizes_in(data).get(TENSOR, 1)


def sequence_parallel_size(data: Mapping[str, Any]) -> int:
    """Return the number of ranks that share a sequence."""
    return _sizes_in(data).get(SEQUENCE, 1)


def _sizes_in(data: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes in the config; anything that is not a number is reported by type validation."""
    tensor = data.get("tensor_parallel")
    stated = {
        SEQUENCE: data.get(SEQUENCE),
        TENSOR: tensor.get("autotp_size") if isinstance(tensor, Mapping) else None,
        DATA: data.get(DATA),
    }
    return {
        key: size
        for key, size in stated.items()
        if isinstance(size, int) and not isinstance(size, bool) and size >= 1
    }


def _with_mesh_param(sizes: dict[str, int], mesh_param: Any, problems: list[Problem]) -> dict[str, int]:
    try:
        shape = tuple(int(size) for size in mesh_param)
    except (TypeError, ValueError):
        shape = ()
    if len(shape) != 2 or min(shape) < 1:
        text = "expected the mesh sizes (data-parallel ranks, ranks that share a sequence), such as (4, 2)"
        problems.append(Problem(MESH_PARAM, f"{shown(mesh_param)}: {text}"))
        return sizes
    asked = {DATA: shape[0], SEQUENCE: shape[1]}
    problems.extend(
        Problem(
            MESH_PARAM,
            f"{shape} asks for {key} {size}, but the config says {sizes[key]}; set it in one place only",
        )
        for key, size in asked.items()
        if sizes.get(key, size) != size
    )
    return {**sizes, **asked}


def _with_split(sizes: dict[str, int], split_over: int, problems: list[Problem]) -> dict[str, int]:
    if sizes.get(TENSOR, split_over) != split_over:
        text = (
            f"{sizes[TENSOR]} was given, but the model's parameters are split over {split_over} ranks already; "
            "leave it out, or pass a model that is not split"
        )
        problems.append(Problem(TENSOR, text))
    return {**sizes, TENSOR: split_over}


def _check_product(sizes: dict[str, int], ranks: int, origin: str, problems: list[Problem]) -> None:
    wide = {key: size for key, size in sizes.items() if size > 1 and key != DATA}
    share = math.prod(wide.values())
    factors = " x ".join(f"{key} {size}" for key, size in wide.items())
    of = f"{ranks} rank{'s' if ranks != 1 else ''}" + (f" ({origin})" if origin else "")
    if share and ranks % share:
        total = f" = {share}" if len(wide) > 1 else ""
        fitting = ", ".join(map(str, divisors(ranks)))
        text = f"{factors}{total} does not divide the job's {of}; these do: {fitting}"
        problems.append(Problem(next(iter(wide)), text))
    elif DATA in sizes and sizes[DATA] * share != ranks:
        product = " x ".join([f"{DATA} {sizes[DATA]}", *([factors] if factors else [])])
        text = (
            f"{product} = {sizes[DATA] * share} does not match the job's {of}; set {DATA} to "
            f"{ranks // share}, or leave it out"
        )
        problems.append(Problem(DATA, text))


def _data_axis(mesh: Any) -> int:
    """Return the size of the data-parallel axis of a torch DeviceMesh or of our ProcessMesh."""
    names = getattr(mesh, "mesh_dim_names", None)
    if names:
        axis = next((name for name in ("data_parallel", "dp") if name in names), names[0])
        return int(mesh[axis].size())
    return int(mesh.size("dp"))


# The world size of the job that a config is read for, and the rank of this process.


NO_LAUNCHER = "no launcher and no process group found"


def global_rank() -> int:
    """Return this process's rank: in the default process group, else from the launcher's environment, else 0."""
    group = default_group()
    return _identity().rank if group is None else group[0]


def world_size() -> tuple[int, str]:
    """Return the world size of the job and its source; a process group need not exist yet."""
    group = default_group()
    if group is not None:
        return group[1], "from torch.distributed"
    identity = _identity()
    if identity.source == ALONE:
        return 1, NO_LAUNCHER
    return identity.world_size, "from the launcher's environment"


def _identity() -> Identity:
    """Read the environment in the same way as `init_distributed` will."""
    try:
        return this_process(os.environ)
    except ValueError as error:
        text = f"cannot determine the number of ranks: {error}"
        raise DeepSpeedConfigError(text, problems=[Problem("world size", str(error))]) from None
