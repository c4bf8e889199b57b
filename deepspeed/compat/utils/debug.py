"""Names of modules and parameters, for debugging."""

from __future__ import annotations

import weakref

from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary


class _Names:
    """Qualified names of the last registered model, by weak references."""

    def __init__(self) -> None:
        self.modules: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self.params = WeakTensorKeyDictionary()  # keyed by identity: tensors compare element-wise


_names = _Names()


def debug_clear_module_and_param_names() -> None:
    _names.modules.clear()
    _names.params.clear()


def debug_extract_module_and_param_names(model: nn.Module) -> None:
    """Register the names of ``model`` for the functions below."""
    debug_clear_module_and_param_names()
    _names.modules.update({module: name for name, module in model.named_modules()})
    for name, param in model.named_parameters():
        _names.params[param] = name


def debug_module2name(module: nn.Module) -> str:
    return _names.modules.get(module, "unknown")


def debug_param2name(param: nn.Parameter) -> str:
    return str(_names.params.get(param, "unknown"))
