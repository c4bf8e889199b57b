"""Load causal language models with Transformers: from a folder or the hub, quantized or not, or from a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepspeed.base.extras import install_hint
from deepspeed.checkpoint.foreign.packed_weights import can_unpack, method_of
from deepspeed.inference.v2.checkpoint.huggingface_engine import HuggingFaceCheckpointEngine
from deepspeed.inference.v2.policy import InferenceV2Policy


def load_causal(name: str, *, dtype: torch.dtype | None = None, keeps_integers: bool = False) -> nn.Module:
    """Load a model, in evaluation mode, on the host: whoever splits it over ranks moves a rank's part to its device.

    Args:
        name: of a folder, of a model in the hub, or of a ``.gguf`` file.
        dtype: of weights that were packed; None: what the config says. Other weights have the folder's.
        keeps_integers: leave integers as they are where kernels compute with them (`quantized/stored.py`).

    OSError, ValueError: there is no such model, or its weights cannot be read.
    """
    import transformers
    from transformers import AutoModelForCausalLM

    arguments = _from_pretrained_arguments(name)
    if can_unpack(_quantization_of(name)):
        source = HuggingFaceCheckpointEngine(name)
        return InferenceV2Policy(source, dtype=dtype, keeps_integers=keeps_integers).build_model("cpu")
    if "gguf_file" not in arguments and int(transformers.__version__.split(".")[0]) < 5:
        arguments["torch_dtype"] = "auto"  # later releases do so by themselves
    return AutoModelForCausalLM.from_pretrained(**arguments)


def load_tokenizer(name: str) -> Any:
    """Load the tokenizer of what ``load_causal`` loads: of a GGUF file, the one beside it, if there is one, else its
    own. OSError, ValueError: there is none."""
    from transformers import AutoTokenizer

    arguments = _from_pretrained_arguments(name)
    if "gguf_file" in arguments and (Path(name).parent / "tokenizer_config.json").is_file():
        del arguments["gguf_file"]
    return AutoTokenizer.from_pretrained(**arguments)


def check_quantization(name: str, method: str) -> None:
    """ValueError: the weights of ``name`` are not stored by ``method``, as vLLM calls it (``gptq_marlin`` is gptq)."""
    found = _quantization_of(name)
    stored = None if found is None else method_of(found)
    if method.removesuffix("_marlin") != stored:
        raise ValueError(
            f"--quantization {method}: {name} has {f'weights of {stored}' if stored else 'whole weights'}: leave it "
            "out; --dtype int8 rounds weights to 8 bits"
        )


def _quantization_of(name: str) -> Any:
    from transformers import AutoConfig

    if "gguf_file" in _from_pretrained_arguments(name):
        return None
    return getattr(AutoConfig.from_pretrained(name), "quantization_config", None)


def _from_pretrained_arguments(name: str) -> dict[str, str]:
    path = Path(name)
    if path.suffix != ".gguf":
        return {"pretrained_model_name_or_path": name}
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {name}")
    try:
        import gguf  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError(
            f"a GGUF file is read by the package gguf: {install_hint('gguf', extra='transformers')}"
        ) from error
    return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
