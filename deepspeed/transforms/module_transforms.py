"""Module transforms, which run before anything is moved, cast or sharded: requesting and applying them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from deepspeed.base.sharded import full_numel, full_shape, is_zero_param
from deepspeed.checkpoint.originals import Expression, Originals
from deepspeed.comm.mesh import ProcessMesh
from deepspeed.config.plan import Plan
from deepspeed.transforms.errors import TransformError, TransformRefusedError
from deepspeed.transforms.inputs import InputTransform
from deepspeed.transforms.ordering import INPUT_ORDER, MODULE_ORDER, Ordered, sort_transforms
from deepspeed.transforms.record import RECORD, Successors, TransformReport, Transforms, transforms_of
from deepspeed.zero.tensor_fragment import is_kept_by_engine

if TYPE_CHECKING:
    from deepspeed.config.deepspeed_config import DeepSpeedConfig


class ModuleTransform(Ordered, Protocol):
    """Changes a module before an engine takes it.

    ``after`` and ``before`` name transforms that run earlier and later, if present; otherwise ``MODULE_ORDER`` applies.
    A transform may change modules made by those that it names in ``after``; otherwise two transforms must not change
    the same module.
    """

    def apply(self, module: nn.Module, context: TransformContext) -> None:
        """Change ``module`` in place, in the same way on every rank; it stays the same object.

        Parameters may be on any device, of any dtype, and partitioned by ``zero.Init``. New ones are ordinary
        parameters; their values may differ between ranks, as the first rank's are broadcast later.
        """
        ...


class TransformContext:
    """Context of a transform: its environment, and the methods by which it reports its changes.

    ``plan``, ``config`` and ``mesh`` are those of the future engine.
    """

    def __init__(self, plan: Plan, config: DeepSpeedConfig, mesh: ProcessMesh) -> None:
        self.plan = plan
        self.config = config
        self.mesh = mesh
        self.notes: list[str] = []
        self.originals: dict[str, Expression] = {}
        self.dropped: set[str] = set()
        self.inputs: list[InputTransform] = []
        self.successors: dict[int, tuple[nn.Parameter, ...]] = {}
        self._old: list[nn.Parameter] = []

    def whole(self, *tensors: Tensor) -> AbstractContextManager[Any]:
        """Return a context manager in which tensors partitioned by ``zero.Init`` can be read whole. Collective."""
        from deepspeed.zero.gathering.gathered_parameters import GatheredParameters

        return GatheredParameters(list(tensors))

    def replace_param(self, old: nn.Parameter, *new: nn.Parameter) -> None:
        """Declare that ``new`` replace ``old`` in its optimizer group (``new`` may include ``old``). Needed for
        optimizers and parameter lists created before the transform."""
        self.successors[id(old)] = (*self.successors.get(id(old), ()), *new)
        self._old.append(old)

    def original(self, name: str, made_of: Expression) -> None:
        """Declare how to restore the tensor ``name``, which the module had before this transform, in exports, from the
        current tensors."""
        self.originals[name] = made_of

    def drop(self, name: str) -> None:
        """Exclude a tensor that this transform added from exports."""
        self.dropped.add(name)

    def transform_inputs(self, transform: InputTransform) -> None:
        """Register ``transform`` for the inputs of every forward."""
        self.inputs.append(transform)

    def report(self, text: str) -> None:
        """Add text to this transform's line in the startup report."""
        self.notes.append(text)


def request(module: nn.Module, transform: ModuleTransform) -> None:
    """Have ``deepspeed.initialize`` apply ``transform`` to ``module``, in addition to those of the config.

    The request is stored on the module, so that it also works if a client library calls ``initialize``.

    Raises:
        TransformError: an engine already holds the module's weights.
    """
    if _has_engine(module):
        raise TransformError(
            f"transform {transform.name!r} comes too late: an engine already holds the module's weights. "
            "Request it before deepspeed.initialize, or call engine.destroy() first"
        )
    vars(module).setdefault(RECORD, Transforms()).requested.append(transform)


def _has_engine(module: nn.Module) -> bool:
    return any(
        is_kept_by_engine(param) or (is_zero_param(param) and not vars(param)["ds_owner"].standalone)
        for param in module.parameters()
    )


def transform_module(
    module: nn.Module,
    plan: Plan,
    config: DeepSpeedConfig,
    mesh: ProcessMesh,
    from_config: Sequence[ModuleTransform],
) -> Transforms:
    """Apply the transforms ``from_config`` (``parallel/selection.py``) and those requested for the module, in order.
    Those that already ran on this module (for an earlier engine) are skipped. If one fails, all are rolled back.

    Raises:
        ValueError: their constraints have no order.
        TransformError: a transform failed, changed what another has changed, or described the original wrongly.
    """
    record = transforms_of(module)
    requested = [*from_config, *record.requested]
    pending = sort_transforms(
        [transform for transform in requested if transform.name not in record.names],
        MODULE_ORDER,
        others=[*record.names, *INPUT_ORDER],
    )
    if not pending:
        return record.record_no_op()
    if _has_engine(module):
        raise TransformError(
            f"transform {pending[0].name!r} comes too late: another engine already holds the module's weights"
        )
    run = _TransformRun(module, record)
    for transform in pending:
        context = TransformContext(plan, config, mesh)
        with run.rollback_on_error(transform):
            transform.apply(module, context)
            run.record(transform, context)
    vars(module)[RECORD] = run.result
    return run.result


class _TransformRun:
    """A run of transforms on ``module``; ``before``: the record of earlier runs."""

    def __init__(self, module: nn.Module, before: Transforms) -> None:
        self.module = module
        self.start = self.now = ModuleSnapshot(module)
        originals = before.originals or Originals(tuple(self.start.weights), {})
        self.result = Transforms(
            [], list(before.reports), originals, list(before.inputs), dict(before.claims), Successors()
        )

    @contextlib.contextmanager
    def rollback_on_error(self, transform: ModuleTransform) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            lost = self.start.restore()
            if not isinstance(error, Exception):
                raise
            state = "the module is unchanged"
            if lost:
                state = f"the module is unchanged, except for {', '.join(lost[:3])}, changed in place"
            kind = TransformRefusedError if isinstance(error, ValueError) else TransformError
            raise kind(
                f"transform {transform.name!r} failed: {type(error).__name__}: {error} ({state})"
            ) from error

    def record(self, transform: ModuleTransform, context: TransformContext) -> None:
        """Check and record the changes of ``transform``."""
        after = ModuleSnapshot(self.module)
        changes = self.now.changes_to(after)
        self._check_claims(transform, changes)
        self._check_originals(context, after)
        result, before = self.result, self.now
        assert result.originals is not None
        result.originals = result.originals.then(context.originals, context.dropped)
        result.inputs += context.inputs
        result.claims |= dict.fromkeys(changes.places, transform.name)
        result.successors.add(transform.name, context.successors, changes.removed)
        used = {name for made in context.originals.values() for name in made.names()}
        kept = after.weights.keys() - before.weights.keys() - used - context.dropped
        result.reports.append(
            TransformReport(name=transform.name, summary=_summary(context, changes), renamed=len(kept))
        )
        self.now = after

    def _check_claims(self, transform: ModuleTransform, changes: ModuleChanges) -> None:
        gone = {id(each) for each in changes.gone}
        touched = [*changes.places, *(path for path, each in self.now.modules.items() if id(each) in gone)]
        for path in touched:
            owner = self.result.claims.get(path)
            if owner is not None and owner not in transform.after:
                raise ValueError(
                    f"it changes {path or 'the whole module'}, which transform {owner!r} has already "
                    f"changed; if intended, declare it with after=({owner!r},)"
                )

    def _check_originals(self, context: TransformContext, after: ModuleSnapshot) -> None:
        for name, made in context.originals.items():
            if name not in self.now.weights:
                raise ValueError(f"it describes {name}, which the module did not have")
            missing = [each for each in made.names() if each not in after.weights]
            if missing:
                raise ValueError(f"it makes {name} of {missing[0]}, which the module does not have")
            shape = tuple(made.shape(lambda each: after.weights[each]))
            if shape != self.now.weights[name]:
                raise ValueError(f"it makes {name} of shape {shape}, which was {self.now.weights[name]}")
        unknown = context.dropped - after.weights.keys()
        if unknown:
            raise ValueError(f"it drops {min(unknown)}, which the module does not have")


def _summary(context: TransformContext, changes: ModuleChanges) -> str:
    places = len(changes.places)
    parts = [f"{places} module{'s' if places != 1 else ''} changed"] if places else []
    for what, params in (
        ("added", changes.added),
        ("removed", list(changes.removed.values())),
        ("frozen", changes.frozen),
    ):
        if params:
            parts.append(f"{count(params)} {what}")
    parts += [f"inputs: {each.name}" for each in context.inputs]
    return ", ".join([*context.notes, *parts]) or "nothing to change"


# Snapshot of a module's structure, to detect what a transform changed and to undo it.

_PARTS = ("_parameters", "_buffers", "_modules")
_IGNORED = frozenset({*_PARTS, "training"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleChanges:
    """Differences of two structures. ``places``: path -> module there now, if it is new or replaced, or its own
    tensors, attributes or children's names changed; ``gone``: modules no longer anywhere; ``frozen``: parameters that
    were trainable before."""

    places: dict[str, nn.Module]
    gone: list[nn.Module]
    added: list[nn.Parameter]
    removed: dict[str, nn.Parameter]
    frozen: list[nn.Parameter]


class ModuleSnapshot:
    """The modules, parameters and buffers of a module, by reference; values are not copied."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.modules = dict(module.named_modules(remove_duplicate=False))
        self.held = {id(each): each for each in self.modules.values()}
        self.classes = {key: type(each) for key, each in self.held.items()}
        self.attributes = {key: dict(vars(each)) for key, each in self.held.items()}
        self.tables = [
            (table, dict(table))
            for each in self.held.values()
            for table in vars(each).values()
            if isinstance(table, dict)
        ]
        self.params = dict(module.named_parameters())
        self.trainable = {id(param): param.requires_grad for param in self.params.values()}
        self.kinds = {id(param): _kind(param) for param in self.params.values()}
        self.own = {key: _own(each) for key, each in self.held.items()}
        self.weights = {
            name: tuple(full_shape(tensor))
            for name, tensor in module.state_dict(keep_vars=True).items()
            if torch.is_tensor(tensor)
        }
        """Shapes of the tensors in the state dict."""

    def changes_to(self, now: ModuleSnapshot) -> ModuleChanges:
        """Return the changes from this structure to ``now``, a later one of the same module."""
        places = {
            path: each
            for path, each in now.modules.items()
            if self.modules.get(path) is not each or self.own[id(each)] != now.own[id(each)]
        }
        for path, each in self.modules.items():  # changed modules that have moved elsewhere
            if id(each) in now.held and self.own[id(each)] != now.own[id(each)]:
                places.setdefault(path, each)
        old, new = self.params.values(), now.params.values()
        staying = {id(param) for param in new}
        return ModuleChanges(
            places=places,
            gone=[each for key, each in self.held.items() if key not in now.held],
            added=[param for param in new if id(param) not in self.trainable],
            removed={name: param for name, param in self.params.items() if id(param) not in staying},
            frozen=[p for p in old if id(p) in staying and self.trainable[id(p)] and not p.requires_grad],
        )

    def restore(self) -> list[str]:
        """Restore every module, class, tensor, attribute and flag. Returns the names of parameters whose shape or dtype
        was changed in place: their values are lost."""
        for key, attributes in self.attributes.items():
            if type(self.held[key]) is not self.classes[key]:
                self.held[key].__class__ = self.classes[key]
            own = vars(self.held[key])
            own.clear()
            own.update(attributes)
        for table, content in self.tables:
            table.clear()
            table.update(content)
        for param in self.params.values():
            param.requires_grad_(self.trainable[id(param)])
        return [name for name, param in self.params.items() if _kind(param) != self.kinds[id(param)]]


def _own(module: nn.Module) -> tuple[Any, ...]:
    """Return a comparable key of a module's own content, without that of its children."""
    tensors = [
        (name, id(tensor), _kind(tensor) if tensor is not None else None)
        for table in (module._parameters, module._buffers)
        for name, tensor in table.items()
    ]
    attributes = {name: id(value) for name, value in vars(module).items() if name not in _IGNORED}
    return tensors, sorted(module._modules), attributes


def _kind(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return full_shape(tensor), tensor.dtype


def count(params: list[nn.Parameter]) -> str:
    """Format a count of parameters, such as "2 parameters (1,024 elements)"."""
    elements = sum(map(full_numel, params))
    return f"{len(params)} parameter{'s' if len(params) != 1 else ''} ({elements:,} elements)"
