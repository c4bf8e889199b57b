"""Pipeline parallelism for causal language models of Transformers, without rewriting the model.

Every piece (chunk of a stage) runs the model's own forward, so masks, positions and the rest are computed as usual; but
blocks of other pieces are identities, the first block of a piece gets the received hidden states, and embeddings and
heads of other pieces are replaced by stand-ins without weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from deepspeed.base.sharded import is_zero_param
from deepspeed.comm.mesh import ProcessMesh
from deepspeed.comm.topology import ProcessTopology
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.parallel.pipeline.block_structure import BlockStructure, hidden_of, trace_blocks
from deepspeed.parallel.pipeline.errors import PipelineError
from deepspeed.parallel.pipeline.module import PipelineModule
from deepspeed.zero.meta import meta_copy


def cut_causal_lm(
    model: nn.Module,
    num_stages: int | None = None,
    topology: ProcessTopology | None = None,
    *,
    partition_method: str = "parameters",
    loss_fn: Callable[..., Any] | None = None,
    chunks: int = 1,
    zigzag: bool = False,
) -> PipelineModule:
    """Turn ``model`` (a causal language model of Transformers, with weights) into a PipelineModule for ``initialize``.

    Weights keep their names. Stages are runs of blocks; this rank keeps its stage's weights and drops all others from
    ``model``, which is unusable on its own afterwards. A micro-batch is what collators return: a mapping of input_ids,
    labels and other model inputs; or a pair (inputs, labels). ``loss_fn(logits, labels)``: by default the model's own.
    The other arguments are those of PipelineModule. PipelineError: the model cannot be split.
    """
    config: Any = getattr(model, "config")  # noqa: B009 - of a PreTrainedModel
    if config.is_encoder_decoder:
        raise PipelineError(f"{type(model).__name__} has an encoder: only decoders can be cut into stages")
    if getattr(config, "output_router_logits", False):
        raise PipelineError(
            "output_router_logits=true adds a loss over all blocks, but no stage has all of them: set it to false"
        )
    for name, param in model.named_parameters():
        if param.is_meta or is_zero_param(param):
            raise PipelineError(
                f"{name} has no values here: load the model outside zero.Init and torch.device('meta')"
            )
    return CutModel(
        trace_blocks(model),
        meta_copy(model),
        loss_fn or _OwnLoss(model),
        num_stages=num_stages,
        topology=topology,
        partition_method=partition_method,
        chunks=chunks,
        zigzag=zigzag,
    )


class _OwnLoss:
    """The model's own causal language model loss."""

    def __init__(self, model: Any) -> None:
        self._function = model.loss_function
        self._vocabulary = model.config.get_text_config().vocab_size

    def __call__(self, logits: Tensor, labels: Tensor, **more: Tensor) -> Tensor:
        """Compute the loss of ``labels``; with ``shift_labels=labels`` they are already shifted."""
        loss: Tensor = self._function(logits=logits, labels=labels, vocab_size=self._vocabulary, **more)
        return loss


def pair_of(batch: Any) -> Any:
    """Return a collator's batch as (inputs, labels)."""
    if not isinstance(batch, Mapping):
        return batch
    inputs = dict(batch)
    return inputs, inputs.pop("labels", None)


class _BoundaryStates:
    """Hidden states that enter and leave the piece that is running."""

    def __init__(self) -> None:
        self.incoming: Tensor | None = None
        self.outgoing: Tensor | None = None

    @property
    def hidden(self) -> Tensor:
        assert self.incoming is not None
        return self.incoming


class _IdentityBlock(nn.Module):
    """Identity stand-in for a block of another piece. Keeps the block's plain attributes, which the model's loop over
    blocks may read."""

    def __init__(self, block: nn.Module, in_tuple: bool) -> None:
        super().__init__()
        self.in_tuple = in_tuple
        plain = {name: value for name, value in vars(block).items() if name[0] != "_" and name != "training"}
        vars(self).update({name: value for name, value in plain.items() if not isinstance(value, nn.Module)})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = self.passed(hidden_of(args, kwargs))
        return (hidden,) if self.in_tuple else hidden

    def passed(self, hidden: Tensor) -> Tensor:
        return hidden


class _BlockBefore(_IdentityBlock):
    """Stand-in for the last block before a piece: returns the received hidden states."""

    boundary: _BoundaryStates

    def passed(self, hidden: Tensor) -> Tensor:
        return self.boundary.hidden


class _BlockAfter(_IdentityBlock):
    """Stand-in for the first block after a piece: captures the piece's output."""

    boundary: _BoundaryStates

    def passed(self, hidden: Tensor) -> Tensor:
        self.boundary.outgoing = hidden
        return hidden


class _EarlierModule(nn.Module):
    """Stand-in for an embedding of another piece: returns zeros, which are never read."""

    def __init__(self, boundary: _BoundaryStates, shape: tuple[int | None, ...]) -> None:
        super().__init__()
        self.boundary, self.shape = boundary, shape

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        hidden = self.boundary.hidden
        sizes = [hidden.shape[axis] if size is None else size for axis, size in enumerate(self.shape)]
        return hidden.new_zeros(sizes)


class _LaterModule(nn.Module):
    """Identity stand-in for a norm or head of another piece."""

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden


class CutModel(PipelineModule):
    """This stage's pieces of a causal language model; parameters have their names in the whole model."""

    config: Any
    _structure: BlockStructure
    _whole: nn.Module
    _boundary: _BoundaryStates
    _stand_ins: dict[str, nn.Module]
    _shared: dict[str, list[int]]
    """Weights of this stage that other stages have too -> all stages that have them."""
    _views: list[nn.ModuleList]

    def __init__(
        self, structure: BlockStructure, whole: nn.Module, loss_fn: Callable[..., Any], **arguments: Any
    ) -> None:
        """Keep this stage's weights. ``whole``: the whole model, on the meta device."""
        vars(self).update(
            _structure=structure, _whole=whole, _boundary=_BoundaryStates(), config=structure.model.config
        )
        layers: list[nn.Module] = list(structure.block_list())
        for names, place in ((structure.before, 0), (structure.after, -1)):
            others = [structure.model.get_submodule(name) for name in names]
            layers[place] = nn.ModuleList([layers[place], *others])
        super().__init__(layers, loss_fn=loss_fn, **arguments)
        # Error messages need only the types; keeping the blocks would keep their weights.
        self._layer_specs = [type(block) for block in structure.block_list()]
        self.batch_fn = pair_of

    @cached_property
    def _blocks(self) -> list[nn.Module]:
        return list(self._structure.block_list())

    # What this stage keeps --------------------------------------------------------------------------------------

    def _build(self) -> None:
        model, blocks = self._structure.model, self._blocks
        members = {id(p): (name, self._stages_with(p)) for name, p in model.named_parameters()}
        self._shared = {
            name: sorted(stages)
            for name, stages in members.values()
            if len(stages) > 1 and self.stage_id in stages
        }
        kept = set(self._outside_of(self.stage_id))
        structure = self._structure
        self._stand_ins = {name: _LaterModule() for name in structure.after}
        self._stand_ins |= {
            name: _EarlierModule(self._boundary, structure.shapes[name]) for name in structure.before
        }
        for name in self._stand_ins.keys() - kept:
            _replace(model, name, self._stand_ins[name])
        own = self._structure.block_list()
        for number in range(len(blocks)):
            if number not in self._layer_indices:
                own[number] = _IdentityBlock(blocks[number], self._structure.in_tuples)
        self._views = [self._view(chunk) for chunk in range(self.chunks)]
        del self._blocks
        del self._modules["tied_modules"]
        vars(self).update(_modules=model._modules, _parameters=model._parameters, _buffers=model._buffers)
        vars(self)["_non_persistent_buffers_set"] = model._non_persistent_buffers_set

    def _outside_of(self, stage: int) -> list[str]:
        """Return the modules outside the blocks that a stage keeps: those that it calls, and those that share a weight
        with them, so that a weight has one name on all stages."""
        structure, pieces = self._structure, self.num_stages * self.chunks
        names: list[str] = []
        if self.stage_owner(0) == stage:
            names += structure.before
        if self.stage_owner(self.parts[pieces] - 1) == stage:
            names += structure.after
        weights = {id(p) for name in names for p in structure.model.get_submodule(name).parameters()}
        return [
            name
            for name in (*structure.before, *structure.after)
            if any(id(p) in weights for p in structure.model.get_submodule(name).parameters())
        ]

    def _stages_with(self, param: nn.Parameter) -> set[int]:
        def has(module: nn.Module) -> bool:
            return any(own is param for own in module.parameters())

        found = {self.stage_owner(number) for number, block in enumerate(self._blocks) if has(block)}
        for stage in range(self.num_stages):
            if any(has(self._structure.model.get_submodule(name)) for name in self._outside_of(stage)):
                found.add(stage)
        return found

    def _view(self, chunk: int) -> nn.ModuleList:
        """Return the list of blocks for a chunk, with stand-ins for blocks of other pieces."""
        run, view = self._layers_of(chunk), nn.ModuleList()
        for number, block in enumerate(self._blocks):
            kind = {run.start - 1: _BlockBefore, run.stop: _BlockAfter}.get(number, _IdentityBlock)
            if number in run:
                view.append(block)
                continue
            other = kind(block, self._structure.in_tuples)
            vars(other)["boundary"] = self._boundary
            view.append(other)
        return view

    def rebind_layers(self) -> None:
        own = self._structure.block_list()
        for chunk, view in enumerate(self._views):
            for number in self._layers_of(chunk):
                view[number] = own[number]
        self.forward_funcs = [own[number] for number in self._layer_indices]
        self.tied_stages = self._find_ties()

    def whole_meta(self) -> nn.Module:
        return self._whole

    def meta_inputs(self) -> dict[str, Any] | None:
        return None

    def shard_sequences(self, mesh: ProcessMesh) -> str | None:
        if mesh.size("sp") == 1:
            return None
        own = self.loss_fn
        if not isinstance(own, _OwnLoss):
            raise DeepSpeedConfigError(
                "sequence_parallel_size with cut_causal_lm(loss_fn=...): only the model's own loss supports "
                "sharded sequences; leave out loss_fn"
            )
        # imported lazily: sixty modules
        from deepspeed.parallel.sequence.hf.attention import shard_attention
        from deepspeed.parallel.sequence.hf.dataloader import IGNORED
        from deepspeed.parallel.sequence.hf.loss import token_mean
        from deepspeed.parallel.sequence.transform import shard_of_pair

        def batch_fn(batch: Any) -> Any:
            if not self.training:  # whole sequences
                return pair_of(batch)
            inputs, labels = pair_of(batch)
            return shard_of_pair(inputs, labels, mesh)

        def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
            if not self.training:
                return own(logits, labels)
            return token_mean(own(logits, labels, shift_labels=labels), (labels != IGNORED).sum(), group)

        group = mesh.group("sp")
        self.batch_fn, self.loss_fn = batch_fn, loss_fn
        core = shard_attention(self, group, disable_in_eval=True, layers=len(self._layers_of(0)))
        return f"each sequence on {mesh.size('sp')} ranks, attention by {core}"

    def _find_ties(self) -> dict[str, list[int]]:
        params = dict(self.named_parameters())
        for name, stages in self._shared.items():
            self._mark_shared(params[name], name, stages)
        return self._shared

    def _tied_weights(self) -> list[nn.Parameter]:
        params = dict(self.named_parameters())
        return [params[name] for name in self._shared]

    # Running ----------------------------------------------------------------------------------------------------

    def forward(self, forward_input: Any, chunk: int = 0) -> Any:
        """Run a chunk. ``forward_input``: the model's inputs for the first piece, else (hidden states, model inputs).
        Returns such a pair, or from the last piece the logits [batch, length, vocabulary]."""
        piece, boundary = self.chunk_position(chunk), self._boundary
        boundary.incoming, inputs = (None, forward_input) if piece == 0 else forward_input
        inputs = inputs if isinstance(inputs, dict) else {"input_ids": inputs}
        with self._as_piece(chunk):
            outputs = self._structure.model(**inputs, use_cache=False)
        hidden, boundary.incoming, boundary.outgoing = boundary.outgoing, None, None
        return outputs.logits if piece == self.num_stages * self.chunks - 1 else (hidden, inputs)

    @contextmanager
    def _as_piece(self, chunk: int) -> Iterator[None]:
        """Install this chunk's list of blocks, and stand-ins for the modules of other pieces, in the model."""
        structure, piece = self._structure, self.chunk_position(chunk)
        put: dict[str, nn.Module] = {structure.blocks: self._views[chunk]}
        if piece > 0:
            put |= {name: self._stand_ins[name] for name in structure.before}
        if piece < self.num_stages * self.chunks - 1:
            put |= {name: self._stand_ins[name] for name in structure.after}
        before = {name: structure.model.get_submodule(name) for name in put}
        try:
            for name, module in put.items():
                _replace(structure.model, name, module)
            yield
        finally:
            for name, module in before.items():
                _replace(structure.model, name, module)

    def train(self, mode: bool = True) -> CutModel:
        self._structure.model.training = mode
        for view in self._views:
            view.train(mode)
        super().train(mode)
        return self

    def set_checkpoint_interval(self, interval: int) -> None:
        """Refuse: the model itself checkpoints activations. ValueError: ``interval`` is not 0."""
        if interval:
            raise ValueError(
                f"activation_checkpoint_interval={interval}: call gradient_checkpointing_enable() of the model instead"
            )

    # Files ------------------------------------------------------------------------------------------------------

    def save_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: there are no layer files; an engine checkpoint has the weights under the model's names."""

    def load_state_dir(self, *args: Any, **kwargs: Any) -> None:
        raise PipelineError("a split model has no per-layer files: use engine.load_checkpoint()")


def _replace(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    model.get_submodule(parent)._modules[name] = module
