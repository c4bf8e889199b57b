"""Splitting the linear layers of a model by rules, for scripts that do it themselves.

Engines need none of this: they follow the model's graph (``deepspeed/parallel/tensor/planning``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from deepspeed.compat.module_inject.layers import TensorParallel_Layer
from deepspeed.compat.module_inject.replace_policy import replace_policies
from deepspeed.compat.module_inject.tensor_slicing import Loading, ReplaceWithTensorSlicing, move
from deepspeed.compat.module_inject.tp_shard import AutoTPMeta, get_shard_size_list
from deepspeed.parallel.tensor.applying import ParameterSum
from deepspeed.parallel.tensor.fused_layers import SubParamLinearAllreduce, SubParamLinearLayer
from deepspeed.parallel.tensor.layers import LinearAllreduce, LinearLayer
from deepspeed.parallel.tensor.planning.autotp_config import AutoTPConfig, PartitionType, TPLayerSpec
from deepspeed.parallel.tensor.planning.plan import PlanError
from deepspeed.parallel.tensor.planning.planner import plan_module
from deepspeed.parallel.tensor.planning.rules import linear_dims
from deepspeed.parallel.tensor.ranks import communicator_of

__all__ = ["AutoTP", "Loading", "ReplaceWithTensorSlicing", "move"]

_PER_RANK = (
    "n_heads",
    "inner_dim",
    "num_heads",
    "num_kv",
    "num_attention_heads",
    "num_attn_heads",
    "all_head_size",
    "embed_dim",
    "hidden_size",
    "num_key_value_heads",
    "num_kv_heads",
    "kv_n_heads",
    "d_model",
    "num_attention_heads_per_partition",
    "num_multi_query_groups_per_partition",
    "hidden_size_per_partition",
)
"""Numbers of modules that count what its linear layers give."""

_SUMMED = re.compile(r"(^|\.)(o_proj|out_proj|down_proj|dense_4h_to_h|c_proj|fc2|fc_out|out_lin|lin2|wo)$")
"""What layers whose outputs are sums over ranks are called."""

Policies = list[tuple[type, list[str]]]


class AutoTP:
    """Puts parallel layers in the place of linear ones.

    Args:
        module: the model, or one of its blocks.
        all_reduce_linears: names of the layers whose outputs are summed; the other linear layers are split by outputs.
        prefix: of the names of ``module``'s parameters.
        state_dict: whole weights, by name, to take instead of those of the layers.
        linear_layer_setting: the classes that are split; by default all that are linear layers.
        orig_layer_impl: the class of the blocks. It is not needed.
        keep_module_on_host: leave weights in host memory.
        partition_config: rules by the parameters' names, instead of ``all_reduce_linears``.
    """

    def __init__(
        self,
        module: nn.Module,
        all_reduce_linears: Sequence[str] = (),
        prefix: str = "",
        state_dict: Mapping[str, Any] | None = None,
        linear_layer_setting: Sequence[type] | None = None,
        orig_layer_impl: type | None = None,
        keep_module_on_host: bool = False,
        partition_config: AutoTPConfig | None = None,
    ) -> None:
        self.module = module
        self.all_reduce_linears = all_reduce_linears
        self.prefix = prefix
        self.state_dict = state_dict
        self.linear_layer_setting = linear_layer_setting
        self.orig_layer_impl = orig_layer_impl
        self.partition_config = partition_config
        self.mp_size: int = 1
        self.mp_group: Any = None
        self.linear_policies: dict[type, Callable[..., Any]] | None = None
        self.conv_linear_layer = False
        TensorParallel_Layer.set_keep_module_on_host(keep_module_on_host)

    # ------------------------------------------------------------------------------------- what a model has

    @staticmethod
    def in_module_list(module: nn.Module, module_list: Sequence[nn.Module]) -> bool:
        """Whether there is a module of its class in the list."""
        return any(type(each).__name__ == type(module).__name__ for each in module_list)

    @staticmethod
    def get_module_list(model: nn.Module) -> list[nn.Module]:
        """The first block of each class: modules in an ``nn.ModuleList``."""
        found: list[nn.Module] = []
        for child in model.children():
            more = child.children() if isinstance(child, nn.ModuleList) else AutoTP.get_module_list(child)
            for each in more:
                if not AutoTP.in_module_list(each, found):
                    found.append(each)
        return found

    @staticmethod
    def supported(model: nn.Module | str) -> bool:
        """Whether the model can be split: there is no list of those that cannot."""
        return True

    @staticmethod
    def get_layers(parent: str, module: nn.Module) -> list[str]:
        """The linear layers below ``module`` in order, by their last two names; "ln" for a norm."""
        found: list[str] = []
        for key, child in module.named_children():
            if _is_linear(child):
                found.append(f"{parent}.{key}")
            elif _is_norm(child, key):
                found.append("ln")
            else:
                found += AutoTP.get_layers(key, child)
        return found

    @staticmethod
    def update_policy_list(policy_list: Policies, new_module: nn.Module, new_gems: Sequence[str]) -> Policies:
        """Add layers whose outputs are summed to those of the module's class; the list itself."""
        for position, (kind, gems) in enumerate(policy_list):
            if kind is type(new_module):
                policy_list[position] = (kind, list(dict.fromkeys([*gems, *new_gems])))
                return policy_list
        policy_list.append((type(new_module), list(dict.fromkeys(new_gems))))
        return policy_list

    @staticmethod
    def kernel_supported(module_list: Sequence[nn.Module]) -> bool:
        """Whether there is a policy for the class of one of the modules."""
        kinds = {kind for policy in replace_policies for kind in policy(None)._orig_layer_class or ()}
        return any(type(module) in kinds for module in module_list)

    @staticmethod
    def tp_parser(model: nn.Module) -> Policies:
        """The classes of the model's blocks, each with the names of the layers whose outputs are sums over ranks: by
        the model's graph, or, where that cannot be followed, those before a norm and those with usual names.

        ValueError: no block has such a layer.
        """
        blocks = AutoTP.get_module_list(model)
        try:
            summed = {n for n, p in plan_module(model, 2).parameters.items() if p.kind == "row"}
        except PlanError:
            summed = _summed_by_order(blocks, model)
        paths = {id(module): path for path, module in model.named_modules()}
        found: Policies = []
        for block in blocks:
            start = f"{paths[id(block)]}."
            mine = [name.removesuffix(".weight") for name in summed if name.startswith(start)]
            gems = [f".{path[len(start) :]}".rsplit(".", 2)[-2:] for path in sorted(mine)]
            if gems:
                AutoTP.update_policy_list(found, block, [".".join(each) for each in gems])
        if not found:
            raise ValueError(
                f"{type(model).__name__}: no layer was found whose outputs are sums over ranks; name them with a "
                "policy: injection_policy={BlockClass: ('attention.out', 'mlp.out')}"
            )
        return found

    @staticmethod
    def get_model_num_kv_heads(config: Any) -> int | None:
        """Groups of attention heads that share keys and values, as a model's config calls them."""
        return AutoTPMeta.from_model_config(config).num_kv_heads

    # --------------------------------------------------------------------------------------------- splitting

    def set_tensor_parallel_config(self, mp_size: int, mp_group: Any) -> None:
        """The ranks that share the layers. ValueError: the group has another size."""
        ranks = communicator_of(mp_group).size if mp_group is not None else mp_size
        if ranks != mp_size:
            raise ValueError(f"mp_size={mp_size}, but the group that is given has {ranks} ranks")
        self.mp_size, self.mp_group = mp_size, mp_group

    def update_linear_policies(self) -> None:
        """What becomes of which class."""
        kinds = self.linear_layer_setting or _linear_classes(self.module)
        self.linear_policies = {kind: self._replace for kind in kinds if not issubclass(kind, nn.Embedding)}

    def _replace_module(
        self, r_module: nn.Module, prev_name: str = "", prev_class_name: str = ""
    ) -> nn.Module:
        """Replace the linear layers below ``r_module``, which it returns. ``prev_name``: of itself."""
        if self.linear_policies is None:
            self.update_linear_policies()
        policies = self.linear_policies or {}
        for name, child in r_module.named_children():
            full = f"{prev_name}.{name}" if prev_name else name
            make = next((policies[kind] for kind in type(child).__mro__ if kind in policies), None)
            if make is not None and not isinstance(child, (LinearLayer, LinearAllreduce)):
                setattr(r_module, name, make(child, full, self.conv_linear_layer))
            else:
                if self.partition_config is None:
                    self.update_mp_params(child, full)
                self._replace_module(child, full, prev_class_name)
        if not prev_name and self.partition_config is not None:
            self.register_replicated_grad_hooks(r_module)
        return r_module

    def _replace(self, child: nn.Module, name: str, conv_linear_layer: bool = False) -> nn.Module:
        self._load(child, name)
        group = self.mp_group
        if self.partition_config is not None:
            return self._replace_with_config(child, name)
        if any(f".{name}".endswith(f".{each.lstrip('.')}") for each in self.all_reduce_linears):
            return LinearAllreduce(child, group, name=name)
        return LinearLayer(child, group, name=name)

    def _replace_with_config(self, child: nn.Module, name: str) -> nn.Module:
        """As the first rule for its weight says; itself without one."""
        assert self.partition_config is not None
        spec = self.partition_config.find_matching_spec(f"{name}.weight", self._get_model_type())
        if spec is None or (spec.gather_output and self._is_tied(child)):
            return child  # a tied table stays whole, as the output is anyway
        return _by_spec(child, spec, self.mp_group, name)

    def _get_model_type(self) -> str | None:
        return getattr(getattr(self.module, "config", None), "model_type", None)

    def _is_tied(self, child: nn.Module) -> bool:
        """Whether another module has the same weight."""
        return any(
            each is not child and getattr(each, "weight", None) is child.weight
            for each in self.module.modules()
        )

    def _load(self, child: nn.Module, name: str) -> None:
        start = f"{self.prefix.rstrip('.')}.{name}." if self.prefix else f"{name}."
        if self.state_dict is not None and any(key.startswith(start) for key in self.state_dict):
            Loading.load(child, dict(self.state_dict), start)

    def register_replicated_grad_hooks(self, model: nn.Module) -> None:
        """Sum the gradients of whole parameters whose rule says ``grad_allreduce``."""
        group = communicator_of(self.mp_group)
        if self.partition_config is None or group.size == 1:
            return
        for name, param in model.named_parameters():
            spec = next((each for each in self.partition_config.layer_specs if each.matches(name)), None)
            if spec is not None and spec.grad_allreduce and param.requires_grad:
                param.register_hook(ParameterSum(group))

    def update_mp_params(self, child: nn.Module, name: str | None = None) -> None:
        """Numbers of heads and widths of a module as this rank has them, once; not of one whose weights stay whole."""
        if getattr(child, "replaced", False) or not any(map(_is_linear, child.children())):
            return
        rank = communicator_of(self.mp_group).rank
        for attribute in _PER_RANK:
            value = getattr(child, attribute, None)
            if isinstance(value, int) and not isinstance(value, bool):
                setattr(child, attribute, get_shard_size_list(value, self.mp_size, name)[rank])
        vars(child)["replaced"] = True


def _by_spec(child: nn.Module, spec: TPLayerSpec, group: Any, name: str) -> nn.Module:
    if spec.partition_type is PartitionType.SKIP:
        return child
    row = spec.partition_type is PartitionType.ROW
    if spec.shape is not None:
        made = SubParamLinearAllreduce if row else SubParamLinearLayer
        return made(child, group, spec.shape, spec.get_partition_dim(), name=name)
    if row:
        return LinearAllreduce(child, group, name=name)
    return LinearLayer(child, group, gather_output=spec.gather_output, name=name)


def _summed_by_order(blocks: Sequence[nn.Module], model: nn.Module) -> set[str]:
    """Weights of the layers of blocks behind which a norm stands, or that have a usual name."""
    found: set[str] = set()
    paths = {id(module): path for path, module in model.named_modules()}
    for block in blocks:
        before: str | None = None
        for path, module in block.named_modules():
            if _is_linear(module):
                before = f"{paths[id(block)]}.{path}.weight"
                found |= {before} if _SUMMED.search(path) else set()
            elif before is not None and _is_norm(module, path.rpartition(".")[2]):
                found.add(before)
                before = None
    return found


def _is_linear(module: nn.Module) -> bool:
    return linear_dims(module) is not None


def _is_norm(module: nn.Module, key: str) -> bool:
    return (
        "norm" in type(module).__name__.lower()
        or re.fullmatch(r"(layer_?norm|ln)\w*", key.lower()) is not None
    )


def _linear_classes(module: nn.Module) -> Iterator[type]:
    return iter({type(each) for each in module.modules() if _is_linear(each)})
