"""The methods by which a ``PipelineModule`` assigns layers to stages; trainers override them under these names."""

from __future__ import annotations

from typing import Any

from deepspeed.base.staged import Staged
from deepspeed.parallel.pipeline.errors import PipelineError
from deepspeed.parallel.pipeline.measured import agreed, measure
from deepspeed.parallel.pipeline.partition import layers_of_type, partition
from deepspeed.parallel.pipeline.specs import Layer, trained_numel


class Partitioned(Staged):
    """The part of ``PipelineModule`` that sets ``parts``."""

    num_stages: int
    stage_id: int
    chunks: int
    parts: list[int]
    _layer_specs: list[Layer]
    _profile_input: Any

    def _partition_layers(self, method: str = "uniform") -> None:
        """Set ``parts``: the bounds of the runs of layers, ``chunks`` for each stage. A subclass may set others; it
        is called while the module is made, after the topology and the layers' specs are known."""
        kind, layers, durations, counts = method.strip().lower(), self._layer_specs, None, None
        if kind == "profile" and self._profile_input is not None:
            durations = agreed(measure(layers, self._profile_input))
        if kind == "parameters":
            counts = self._count_layer_params()
        self.parts = partition(layers, self.num_stages * self.chunks, method, durations, counts)
        if self.chunks == 1:
            self._set_bounds(start=self.parts[self.stage_id], stop=self.parts[self.stage_id + 1])

    def _set_bounds(self, start: int, stop: int) -> None:
        """Tell which layers this stage holds. PipelineError: ``parts`` says otherwise."""
        expected = self.parts[self.stage_id : self.stage_id + 2]
        if [start, stop] != list(expected):
            raise PipelineError(
                f"_set_bounds({start}, {stop}) of stage {self.stage_id}, whose bounds in self.parts are {expected}: "
                "set self.parts for all stages first"
            )
        self._local_start, self._local_stop = start, stop

    def _count_layer_params(self) -> list[int]:
        """Trained elements of every layer of the model: what "parameters" balances."""
        return [trained_numel(layer) for layer in self._layer_specs]

    def _find_layer_type(self, layername: str) -> list[int]:
        """The numbers of the layers whose class matches a regex. ValueError: there is none."""
        return layers_of_type(self._layer_specs, layername)
