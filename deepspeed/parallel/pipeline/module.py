"""A model as a sequence of layers, split into pipeline stages."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn

from deepspeed.base.logging import logger
from deepspeed.base.rng import set_random_seed
from deepspeed.checkpoint import names
from deepspeed.checkpoint.numbered import shared_lists
from deepspeed.checkpoint.reader import first_file_of
from deepspeed.checkpoint.save_ids import FileOfSave, check_save_of
from deepspeed.comm import init_distributed
from deepspeed.comm.groups import new_group
from deepspeed.comm.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
)
from deepspeed.config.constants import PIPE_REPLICATED
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.parallel.pipeline.errors import PipelineError
from deepspeed.parallel.pipeline.meta_model import MetaModel, as_meta
from deepspeed.parallel.pipeline.partition import LayerPartition, check_bounds, stage_of
from deepspeed.parallel.pipeline.schedules.orders import chunk_position, stage_of_position
from deepspeed.parallel.pipeline.specs import Layer, LayerSpec, TiedLayerSpec, type_name
from deepspeed.transforms.recompute import checkpointing
from deepspeed.zero.gathering.gathered_parameters import GatheredParameters
from deepspeed.zero.replica_groups import SHARED, SHARED_BY

__all__ = ["LayerSpec", "PipelineError", "PipelineModule", "TiedLayerSpec"]


class PipelineModule(LayerPartition, nn.Module):
    """The layers of one pipeline stage; the pipeline engine moves activations between stages.

    Args:
        layers: modules, functions of one argument, and specs, in forward order. Each takes the output of the previous
            one as a single argument.
        num_stages: number of stages; remaining ranks form data-parallel replicas. Not needed with ``topology``.
        topology: axes "pipe" and "data", and optionally "model".
        loss_fn: ``loss_fn(outputs, labels)``, called on the last stage. None: the outputs are the loss.
        seed_layers: seed the RNG before a layer is built and before it runs, so that its random numbers do not depend
            on its stage. Uses ``seed_fn(seed)`` if given; seeds start at ``base_seed``.
        partition_method: "uniform", "parameters", "type:regex" or "profile" (``parallel/pipeline/partition.py``).
        activation_checkpoint_interval: layers per checkpointed region; 0: none.
        activation_checkpoint_func: ``func(function, *inputs)``.
        checkpointable_layers: class names of the layers to checkpoint; None: all with parameters.
        dynamic_shape: kept for old scripts; shapes may always change.
        profile_input: example input of the first layer, for "profile"; and for `tensor_parallel.autotp_size` if the
            input is neither tokens nor as wide as the first layer's weight.
        chunks: runs of layers per stage, for interleaved orders: a micro-batch passes through all stages that often.
        zigzag: traverse every second chunk in the opposite direction, so that with two chunks the last layer is on the
            first stage: for ``pipeline.schedule`` "zero-bubble-v".

    RuntimeError: ``num_stages`` does not divide the world size. Collective over all ranks. Parameters are named by the
    index of their layer in the whole model ("3.weight"), or by their tie ("tied_modules.embed.weight").
    """

    def __init__(
        self,
        layers: Iterable[Layer],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[..., Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = checkpointing.checkpoint,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
        *,
        profile_input: Any = None,
        chunks: int = 1,
        zigzag: bool = False,
    ) -> None:
        super().__init__()
        _check_arguments(chunks, zigzag, checkpointable_layers)
        self.loss_fn = loss_fn
        self.seed_layers = seed_layers
        self.seed_fn = seed_fn
        self.base_seed = base_seed
        self.micro_offset = 0
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.activation_checkpoint_func = activation_checkpoint_func
        self.checkpointable_layers = checkpointable_layers
        self.dynamic_shape = dynamic_shape
        self.checkpoint_parallel_write_pipeline = False
        self.batch_fn: Callable[[Any], Any] | None = None
        """Initial argument of the engine's ``set_batch_fn``."""
        self.chunks = chunks
        self.zigzag = zigzag
        init_distributed()
        self._topology_given = topology is not None
        """Whether the caller passed a topology."""
        self._grid = PipelineParallelGrid(_topology(num_stages, topology))
        self._topo = self._grid.topology()
        self.num_stages = self._grid.get_pipe_parallel_world_size()
        self.stage_id = self._grid.get_stage_id()
        self.global_rank = dist.get_rank()
        self._layer_specs: list[Layer] = list(layers)
        self._num_layers = len(self._layer_specs)
        self._example = as_meta(profile_input)
        self._profile_input = profile_input
        self._partition_layers(method=partition_method)
        del self._profile_input  # as large as a batch
        check_bounds(self.parts, self._num_layers, self.num_stages * chunks)
        runs = [self._layers_of(chunk) for chunk in range(chunks)]
        self._layer_indices = [number for run in runs for number in run]
        """Indices of this stage's layers in the whole model."""
        self._ends = [sum(len(run) for run in runs[:chunk]) for chunk in range(chunks + 1)]
        """Bounds of the chunks in ``_layer_indices``."""
        self._calls = [0] * chunks
        self.forward_funcs: list[Callable[[Any], Any]] = []
        """Callables of this stage's layers, in the order of ``_layer_indices``."""
        self.tied_modules = nn.ModuleDict()
        self._registered_as: dict[int, str] = {}
        """Layer index -> name under which its module is registered."""
        self._build()
        self.rebind_layers()

    # Building -------------------------------------------------------------------------------------------------

    def chunk_position(self, chunk: int) -> int:
        """Return the position of a chunk of this stage in a micro-batch's forward order."""
        return chunk_position(chunk, self.stage_id, self.num_stages, self.zigzag)

    def _layers_of(self, chunk: int) -> range:
        position = self.chunk_position(chunk)
        return range(self.parts[position], self.parts[position + 1])

    def _build(self) -> None:
        for index in self._layer_indices:
            layer = self._layer_specs[index]
            if self.seed_layers:
                self._seed(self.base_seed + index)
            if isinstance(layer, TiedLayerSpec):  # later layers of a tie on this stage reuse the first one
                if layer.key not in self.tied_modules:
                    self.tied_modules[layer.key] = layer.build()
                    self._registered_as[index] = f"tied_modules.{layer.key}"
                continue
            module = layer.build() if isinstance(layer, LayerSpec) else layer
            if isinstance(module, nn.Module):
                self._registered_as[index] = str(index)
                self.add_module(str(index), module)
        ties = sorted(self.tied_modules.items())  # stages sum the gradients of their ties in one order
        self.tied_modules = nn.ModuleDict(dict(ties))

    def rebind_layers(self) -> None:
        """Refresh the layers' callables and the tied weights, after modules or parameters were replaced."""
        self.forward_funcs = [self._function(index) for index in self._layer_indices]
        self.tied_stages = self._find_ties()

    def _function(self, index: int) -> Callable[[Any], Any]:
        layer = self._layer_specs[index]
        if isinstance(layer, TiedLayerSpec):
            module = self.tied_modules[layer.key]
            return module if layer.forward_fn is None else partial(layer.forward_fn, module)
        return self.get_submodule(str(index)) if index in self._registered_as else layer  # type: ignore[return-value]

    def _find_ties(self) -> dict[str, list[int]]:
        """Return each tie's stages, and mark parameters shared by several stages: the first stage counts and stores
        them."""
        stages: dict[str, set[int]] = {}
        for index, layer in enumerate(self._layer_specs):
            if isinstance(layer, TiedLayerSpec):
                stages.setdefault(layer.key, set()).add(self.stage_owner(index))
        found = {key: sorted(members) for key, members in stages.items()}
        for key, members in found.items():
            if len(members) < 2 or self.stage_id not in members:
                continue
            for name, param in self._tied_parameters(key):
                _check_shared_experts(key, name, param, members)
                self._mark_shared(param, f"{key}.{name}", members)
        return found

    def _mark_shared(self, param: nn.Parameter, name: str, stages: Sequence[int]) -> None:
        ranks = (self._ranks_of(stages), self._ranks_of(stages, data=self._grid.replica_id))
        setattr(param, SHARED_BY, (f"{SHARED}{name}", *ranks))
        setattr(param, PIPE_REPLICATED, self.stage_id != stages[0])

    def _tied_parameters(self, key: str) -> list[tuple[str, nn.Parameter]]:
        """Return the tied weights of a tie with a module on this stage: all weights if all its layers are of one class,
        and hence have the same names; otherwise those that the tie names. ValueError: a name is no parameter."""
        specs = [
            layer for layer in self._layer_specs if isinstance(layer, TiedLayerSpec) and layer.key == key
        ]
        module = self.tied_modules[key]
        names = dict.fromkeys(name for spec in specs for name in spec.tied_weight_attr)
        named = [(name, _named_weight(name, key, module)) for name in names]
        if len({spec.typename for spec in specs}) == 1:
            return list(module.named_parameters())
        return named

    def _ranks_of(self, stages: Sequence[int], **rest: int) -> tuple[int, ...]:
        """Return the ranks of these stages with this rank's part of a layer, at the coordinates ``rest``."""
        if "model" in self._topo.axes:
            rest["model"] = self._grid.coord.model
        rest = {axis: place for axis, place in rest.items() if axis in self._topo.axes}
        return tuple(sorted(r for stage in stages for r in self._topo.filter_match(pipe=stage, **rest)))

    def _seed(self, seed: int) -> None:
        (self.seed_fn or set_random_seed)(seed)

    # Running --------------------------------------------------------------------------------------------------

    def forward(self, forward_input: Any, chunk: int = 0) -> Any:
        """Run the layers of one chunk of this stage; without ``chunks`` that is all of its layers."""
        self._calls[chunk] += 1
        self.micro_offset = offset = self._calls[chunk]
        interval, begin, end = self.activation_checkpoint_interval, self._ends[chunk], self._ends[chunk + 1]
        if interval < 1 or not torch.is_grad_enabled():
            return self._run(begin, end, offset, forward_input)
        inputs = forward_input
        for start in range(begin, end, interval):
            stop = min(start + interval, end)
            run = partial(self._run, start, stop, offset)
            if self._is_checkpointable(self.forward_funcs[start:stop]):
                arguments = inputs if isinstance(inputs, tuple) else (inputs,)
                inputs = self.activation_checkpoint_func(run, *arguments)
            else:
                inputs = run(inputs)
        return inputs

    def _run(self, start: int, stop: int, offset: int, *arguments: Any) -> Any:
        """Run the layers [start, stop) of this stage; ``arguments``: the input, or the parts of a tuple."""
        inputs = arguments[0] if len(arguments) == 1 else arguments
        for local in range(start, stop):
            if self.seed_layers:
                self._seed(self.base_seed * offset + self._layer_indices[local])
            try:
                inputs = self.forward_funcs[local](inputs)
            except Exception as error:
                layer = self._layer_indices[local]
                # torch.utils.checkpoint ends recomputation early with an internal exception, which is no failure.
                if type(error).__module__ != torch.utils.checkpoint.__name__:
                    logger.error(
                        f"layer {layer} ({type_name(self._layer_specs[layer])}) of the pipeline failed"
                    )
                raise
        return inputs

    def _is_checkpointable(self, functions: Sequence[Callable[..., Any]]) -> bool:
        if self.checkpointable_layers is not None:
            return all(type(function).__name__ in self.checkpointable_layers for function in functions)
        modules = [function for function in functions if isinstance(function, nn.Module)]
        return any(True for module in modules for _ in module.parameters())

    @property
    def is_checkpointable_results(self) -> list[bool]:
        """Flags of the runs of ``activation_checkpoint_interval`` layers of this stage: whether each is recomputed."""
        interval, results = self.activation_checkpoint_interval, []
        for begin, end in zip(self._ends[:-1], self._ends[1:], strict=True) if interval else ():
            runs = (self.forward_funcs[at : min(at + interval, end)] for at in range(begin, end, interval))
            results += map(self._is_checkpointable, runs)
        return results

    def _precompute_checkpointable_values(self) -> None:
        """Do nothing: ``is_checkpointable_results`` follows the interval. Public tests call it."""

    def set_checkpoint_interval(self, interval: int) -> None:
        if interval < 0:
            raise ValueError(f"activation_checkpoint_interval={interval}: must be at least 0 (off)")
        self.activation_checkpoint_interval = interval

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Apply ``torch.compile`` to every layer of this stage in place."""
        for layer in self.forward_funcs:
            if isinstance(layer, nn.Module):
                layer.compile(*args, **kwargs)

    def get_additional_losses(self) -> dict[str, Tensor] | None:
        """Override to report named components of the last micro-batch's loss, on the last stage."""
        return None

    # Where things are -----------------------------------------------------------------------------------------

    def topology(self) -> ProcessTopology:
        return self._topo

    def mpu(self) -> PipelineParallelGrid:
        """Return the grid of process groups, which serves as the model-parallel unit."""
        return self._grid

    def share_layers(self, parts: int) -> None:
        """Turn every ``parts`` consecutive replicas into a tensor-parallel group, like a topology's axis "model".
        Every rank keeps its stage. Collective over all ranks.

        DeepSpeedConfigError: the given topology disagrees, or ``parts`` does not divide the replicas.
        """
        given, replicas = self._grid.model_parallel_size, len(self._grid.dp_group)
        if parts in (1, given):
            return
        if self._topology_given or given > 1:
            raise DeepSpeedConfigError(
                f"tensor_parallel.autotp_size={parts}, but the topology of the PipelineModule has {given} "
                f"ranks along its axis 'model': pass PipeModelDataParallelTopology(num_pp, num_mp={parts}, "
                "num_dp), or only num_stages"
            )
        if replicas % parts:
            raise DeepSpeedConfigError(
                f"tensor_parallel.autotp_size={parts} does not divide the {replicas} ranks of a pipeline stage"
            )
        self._grid = PipelineParallelGrid(
            PipeModelDataParallelTopology(self.num_stages, parts, replicas // parts)
        )
        self._topo = self._grid.topology()
        self.tied_stages = self._find_ties()

    def share_sequences(self, ranks: int) -> None:
        self._grid.share_sequences(ranks)

    def whole_meta(self) -> nn.Module:
        return MetaModel(self._layer_specs)

    def meta_inputs(self) -> dict[str, Any] | None:
        return {"forward_input": MetaModel(self._layer_specs).example(self._example)}

    def num_pipeline_stages(self) -> int:
        return self.num_stages

    def partitions(self) -> list[int]:
        """Return the bounds of the stages: stage ``s`` holds the layers [bound ``s``, bound ``s + 1``). With several
        chunks, the bounds of the chunks in forward order."""
        return list(self.parts)

    def stage_owner(self, layer_idx: int) -> int:
        """Return the stage of a layer. IndexError: there is no such layer."""
        return stage_of_position(stage_of(self.parts, layer_idx), self.num_stages, self.zigzag)

    def get_tied_weights_and_groups(self) -> list[tuple[nn.Parameter, Any]]:
        """Return the weights of this stage that other stages share, each with the process group of the sharing ranks.
        Collective over these ranks."""
        return [(param, new_group(getattr(param, SHARED_BY)[1])) for param in self._tied_weights()]

    def _tied_weights(self) -> list[nn.Parameter]:
        """Return the weights of this stage that other stages share."""
        tied = [param for key in self.tied_modules for _, param in self._tied_parameters(key)]
        return [param for param in tied if hasattr(param, SHARED_BY)]

    def allreduce_tied_weight_gradients(self) -> None:
        """Sum ``param.grad`` of tied weights over their stages and replicas, for loops without an engine; the engine
        does so itself. Collective over these ranks."""
        for param, group in self.get_tied_weights_and_groups():
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            dist.all_reduce(param.grad, group=group)

    # Checkpoint files of layers -------------------------------------------------------------------------------

    def ckpt_prefix(self, checkpoints_path: str, tag: str) -> str:
        """Return the path prefix of this rank's part of the model: the tag's folder and the rank's coordinates except
        the replica.
        """
        place = self._topo.get_rank_repr(rank=self._grid.global_rank, omit_axes=("data",))
        return os.path.join(checkpoints_path, str(tag), place)

    def ckpt_layer_path(self, ckpt_dir: str, local_layer_idx: int) -> str:
        """Return the file of a layer, given its index on this stage: "layer_03-model_00-model_states.pt"."""
        return self._layer_file(ckpt_dir, self._layer_indices[local_layer_idx])

    def _layer_file(self, folder: str, layer: int) -> str:
        place = self._topo.get_rank_repr(rank=self._grid.global_rank)
        return os.path.join(folder, f"layer_{layer:02d}{f'-{place}' if place else ''}-model_states.pt")

    def ckpt_layer_path_list(self, ckpt_dir: str, local_layer_idx: int) -> list[str]:
        """Return the files of a layer's tensor-parallel parts, in rank order."""
        layer = self._layer_indices[local_layer_idx]
        return names.by_numbers(glob.glob(f"{glob.escape(ckpt_dir)}/layer_{layer:02d}-*model_states.pt"))

    def _saved_modules(self) -> dict[int, nn.Module]:
        """Map layer indices to the modules that this stage saves. A tie is saved by the first stage that has it."""
        found = {}
        for index, name in self._registered_as.items():
            key = name.removeprefix("tied_modules.")
            if key == name or self.tied_stages[key][0] == self.stage_id:
                found[index] = self.get_submodule(name)
        return found

    def save_state_dict(
        self, save_dir: str | os.PathLike[str], checkpoint_engine: Any, exclude_frozen_params: bool = False
    ) -> None:
        """Write the file of every layer of this stage, each by one replica. Experts spread over replicas are excluded:
        they have separate files. Collective over replicas; errors are raised after the last layer."""
        replica = self._grid.replica_id
        replicas = len(self._grid.dp_group) if self.checkpoint_parallel_write_pipeline else 1
        failed: Exception | None = None
        for turn, (number, layer) in enumerate(self._saved_modules().items()):
            frozen = {name for name, p in layer.named_parameters() if not p.requires_grad}
            excluded = frozen if exclude_frozen_params else set()
            with GatheredParameters(list(layer.parameters())):
                if replica != turn % replicas or failed is not None:
                    continue
                state = {
                    name: value.detach().clone() if isinstance(value, Tensor) else value
                    for name, value in layer.state_dict().items()
                    if name not in excluded and not _is_shared(name, layer)
                }
                try:
                    checkpoint_engine.save(state, self._layer_file(str(save_dir), number))
                except Exception as error:  # the other replicas wait for the next layer
                    failed = error
        if failed is not None:
            raise failed

    def load_state_dir(
        self, load_dir: str | os.PathLike[str], checkpoint_engine: Any, strict: bool = True
    ) -> None:
        """Read the file of every layer of this stage, and of its experts if they are spread over replicas.
        FileNotFoundError: a file is missing. CheckpointError: a file is from another save than the folder's model file.
        Collective over replicas."""
        read = partial(self._read_layer, checkpoint_engine, first_file_of(Path(load_dir)))
        for index, name in self._registered_as.items():
            layer, key = self.get_submodule(name), name.removeprefix("tied_modules.")
            number = index if key == name else self._first_of_tie(key)
            path = Path(self._layer_file(str(load_dir), number))
            if not path.exists():
                raise FileNotFoundError(f"{path}: the file of layer {index} is missing")
            state = read(path)
            state |= self._experts_in(Path(load_dir), name, read)
            with GatheredParameters(list(layer.parameters()), modifier_rank=0):
                layer.load_state_dict(state, strict=strict)

    @staticmethod
    def _read_layer(checkpoint_engine: Any, first: FileOfSave | None, path: Path) -> dict[str, Any]:
        state = checkpoint_engine.load(str(path), map_location="cpu")
        check_save_of(path, state, first)
        return state

    def _experts_in(self, folder: Path, name: str, read: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
        """Read the weights of a layer's experts that are spread over replicas from their files."""
        found: dict[str, Any] = {}
        for path, experts in shared_lists(self.get_submodule(name)):
            for number, _ in experts.named_children():
                prefix = f"{name}.{path}.{number}."
                for file in sorted(folder.glob(f"layer_*_expert_{number}_mp_rank_*_model_states.pt")):
                    state = read(file)
                    found |= {key[len(name) + 1 :]: state[key] for key in state if key.startswith(prefix)}
        return found

    def _first_of_tie(self, key: str) -> int:
        return next(
            index
            for index, layer in enumerate(self._layer_specs)
            if isinstance(layer, TiedLayerSpec) and layer.key == key
        )


def _named_weight(name: str, key: str, module: nn.Module) -> nn.Parameter:
    """Look up a tied weight by the name in a spec: a parameter, or a property that returns one."""
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, nn.Parameter):
        raise ValueError(f"the tie {key!r} names {name!r}, which is not a parameter of its layer")
    return found


def _check_shared_experts(key: str, name: str, param: nn.Parameter, stages: Sequence[int]) -> None:
    if not getattr(param, "allreduce", True) and getattr(param, "group_name", "") != "ep_size_1":
        raise PipelineError(
            f"the tie {key!r} has experts ({name}) that ranks share, on the stages {list(stages)}: a tied "
            "weight cannot be expert-parallel too; set ep_size=1 for its layers, or do not tie them"
        )


def _is_shared(name: str, layer: nn.Module) -> bool:
    """Return whether a tensor of ``layer`` belongs to experts that are spread over replicas."""
    return any(name.startswith(f"{path}.") for path, _ in shared_lists(layer))


def _check_arguments(chunks: int, zigzag: bool, checkpointable_layers: Any) -> None:
    if chunks < (2 if zigzag else 1):
        raise ValueError(f"chunks={chunks}, zigzag={zigzag}: chunks must be at least 1, and 2 with zigzag")
    if checkpointable_layers is not None and not isinstance(checkpointable_layers, (list, tuple)):
        raise TypeError(
            f"checkpointable_layers must be a list of class names, not {type(checkpointable_layers).__name__}"
        )


def _topology(num_stages: int | None, topology: ProcessTopology | None) -> ProcessTopology:
    if topology is not None:
        return topology
    if num_stages is None:
        raise RuntimeError("PipelineModule needs num_stages or a topology")
    world = dist.get_world_size()
    if num_stages < 1 or world % num_stages:
        raise RuntimeError(f"num_stages={num_stages} does not divide the {world} ranks of this job")
    return PipeDataParallelTopology(num_pp=num_stages, num_dp=world // num_stages)
