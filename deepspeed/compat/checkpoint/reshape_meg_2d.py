"""Mapping of a grid of pipeline stages and tensor-parallel ranks to a smaller grid."""

from __future__ import annotations

from typing import Any

from deepspeed.compat.checkpoint.reshape_utils import partition_data


class meg_2d_parallel_map:
    """A list of items for each place (pipeline stage, tensor-parallel rank) of a grid."""

    def __init__(self, pp_degree: int, tp_degree: int) -> None:
        self.pp_degree = pp_degree
        self.tp_degree = tp_degree
        self.map: dict[str, list[Any]] = {}

    def simple_init(self) -> None:
        """Each place holds its own number, counted stage by stage."""
        self.map = {
            self._key(pp, tp): [pp * self.tp_degree + tp]
            for pp in range(self.pp_degree)
            for tp in range(self.tp_degree)
        }

    def add_data(self, pp_index: int, tp_index: int, data: list[Any]) -> None:
        """Append ``data`` to what a place holds. IndexError: there is no such place; TypeError: it is not a list."""
        self._check(pp_index, tp_index)
        if not isinstance(data, list):
            raise TypeError(f"data must be a list, not {type(data).__name__}")
        self.map.setdefault(self._key(pp_index, tp_index), []).extend(data)

    def get_data(self, pp_index: int | None = None, tp_index: int | None = None) -> list[Any]:
        """Return the data of a stage, of a tensor-parallel rank, or (both) of one place, end to end; of all places by
        default. IndexError: there is no such place; KeyError: it holds nothing."""
        self._check(pp_index or 0, tp_index or 0)
        stages = range(self.pp_degree) if pp_index is None else [pp_index]
        ranks = range(self.tp_degree) if tp_index is None else [tp_index]
        return [item for pp in stages for tp in ranks for item in self.map[self._key(pp, tp)]]

    def print_data(self, tag: str) -> None:
        print(tag)
        for key, value in self.map.items():
            print(f"{key} = {value}")

    def _check(self, pp_index: int, tp_index: int) -> None:
        if not (0 <= pp_index < self.pp_degree and 0 <= tp_index < self.tp_degree):
            raise IndexError(
                f"stage {pp_index}, tensor-parallel rank {tp_index} is not in a grid of {self.pp_degree} x "
                f"{self.tp_degree}"
            )

    @staticmethod
    def _key(pp_index: int, tp_index: int) -> str:
        return f"{pp_index},{tp_index}"


def reshape_meg_2d_parallel(
    old_pp_degree: int, old_tp_degree: int, new_pp_degree: int, new_tp_degree: int, verbose: bool = False
) -> meg_2d_parallel_map:
    """The numbers of the old ranks that each place of the new grid is joined from: neighbours in each direction.

    ValueError: a degree grows, or does not divide the old one.
    """
    for what, old, new in (
        ("pp_degree", old_pp_degree, new_pp_degree),
        ("tp_degree", old_tp_degree, new_tp_degree),
    ):
        if old % new:
            raise ValueError(f"{what} {old} cannot become {new}: the new degree must divide the old one")
    old = meg_2d_parallel_map(old_pp_degree, old_tp_degree)
    old.simple_init()
    new = meg_2d_parallel_map(new_pp_degree, new_tp_degree)
    stages = partition_data(range(old_pp_degree), new_pp_degree)
    ranks = partition_data(range(old_tp_degree), new_tp_degree)
    for pp, old_stages in enumerate(stages):
        for tp, old_ranks in enumerate(ranks):
            new.add_data(
                pp,
                tp,
                [
                    number
                    for stage in old_stages
                    for rank in old_ranks
                    for number in old.get_data(stage, rank)
                ],
            )
    if verbose:
        old.print_data("before:")
        new.print_data("after:")
    return new


def get_mpu_ranks(
    tp_size: int = 1, pp_size: int = 1, dp_size: int = 1, virtual_pp_size: int | None = None
) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Return Megatron-LM's groups of ``tp_size * pp_size * dp_size`` ranks: tensor-parallel neighbours, replicas (all
    stages and all tensor-parallel ranks of each, which are pipelines where ``tp_size`` is 1), and data-parallel groups.

    ``virtual_pp_size`` changes which layers a rank has, not the groups.
    """
    per_stage = tp_size * dp_size
    world = range(per_stage * pp_size)
    tensor = partition_data(world, len(world) // tp_size)
    data = [
        list(range(stage * per_stage + tp, (stage + 1) * per_stage, tp_size))
        for stage in range(pp_size)
        for tp in range(tp_size)
    ]
    replicas = [[group[number] for group in data] for number in range(dp_size)]
    return tensor, replicas, data


def reshape(src: tuple[int, int, int], tgt: tuple[int, int, int]) -> None:
    """Print how ranks of the degrees ``src`` (tp, pp, dp) are joined to those of ``tgt``."""
    print(f"\n\n*** Reshaping: {src} => {tgt}")
    steps = {"TP": (tgt[0], src[1], src[2]), "PP": tgt}
    before = src
    for number, (what, after) in enumerate(steps.items()):
        old, new = get_mpu_ranks(*before)[number], get_mpu_ranks(*after)[number]
        print(f"\n*** {what} contraction:")
        for one, other in zip(old, new, strict=False):
            print(f"{one} => {other}")
        before = after
