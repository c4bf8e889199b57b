"""Loading of causal language models with Transformers: from a folder, the Hub or a GGUF file, quantized or not."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepspeed.base.extras import install_hint
from deepspeed.base.tables import first_of
from deepspeed.checkpoint.foreign.packed_weights import can_unpack, method_of
from deepspeed.inference.model.info import DEFAULT_LENGTH
from deepspeed.inference.v2.checkpoint.huggingface_engine import HuggingFaceCheckpointEngine
from deepspeed.inference.v2.policy import InferenceV2Policy

_CLASSIFIER = "ForSequenceClassification"


def classifier_in(folder: str) -> str | None:
    """Return the class name if the model in ``folder`` classifies texts (a cross-encoder), which would get a random
    head if loaded as a generating model. Reads only the config file."""
    try:
        named = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))["architectures"]
    except (OSError, ValueError, LookupError, TypeError):
        return None  # loading it will report the error
    return _classifier_of(named)


def _classifier_of(architectures: Iterable[Any] | None) -> str | None:
    return next((str(each) for each in architectures or () if str(each).endswith(_CLASSIFIER)), None)


class Pretrained:
    """A model in a folder, on the Hub, or in a ``.gguf`` file. Its config is read once.

    OSError, ValueError: there is no such model. ``config`` is None for a GGUF file, which Transformers reads whole.
    """

    def __init__(self, name: str) -> None:
        from transformers import AutoConfig

        self.name = name
        self.no_text = ""  # why it generates none, as `load_causal` finds and clients are told
        self._arguments = _from_pretrained_arguments(name)
        self.config: Any = None
        if "gguf_file" not in self._arguments:
            self.config = AutoConfig.from_pretrained(name)
        self._quantization = getattr(self.config, "quantization_config", None)

    @property
    def is_classifier(self) -> bool:
        """Return whether the model classifies texts: see `classifier_in`."""
        return _classifier_of(getattr(self.config, "architectures", None)) is not None

    def load_causal(self, *, dtype: torch.dtype | None = None, keeps_integers: bool = False) -> nn.Module:
        """Load the model, in evaluation mode, on the host: whoever splits it over ranks moves a rank's part to its
        device. A folder without a head that is not tied, as of ``LlamaModel``, is loaded too, and noted.

        Args:
            dtype: of weights that were packed; None: that of the config. Other weights keep the dtype of the folder.
            keeps_integers: keep integer weights for which there are kernels (`kernels.py`).

        OSError, ValueError: its weights cannot be read, or some are missing.
        """
        import transformers
        from transformers import AutoModelForCausalLM

        if can_unpack(self._quantization):
            source = HuggingFaceCheckpointEngine(self.name, config=copy.deepcopy(self.config))
            return InferenceV2Policy(source, dtype=dtype, keeps_integers=keeps_integers).build_model("cpu")
        more = {} if self.config is None else {"config": self.config}
        if self.config is not None and int(transformers.__version__.split(".")[0]) < 5:
            more["torch_dtype"] = "auto"  # later releases do so by themselves
        module, missing = self._loaded(AutoModelForCausalLM, **self._arguments, **more)
        head = module.get_output_embeddings()
        of_head = {name for name, part in module.named_modules() if part is head}
        self._refuse([name for name in missing if name.rpartition(".")[0] not in of_head])
        if missing:
            self.no_text = f"the model has no {first_of(missing)}, so it generates no text"
        return module

    def _loaded(self, kind: Any, **arguments: Any) -> tuple[Any, list[str]]:
        """Return a model of ``kind``, and the names of parameters that it has and the files lack, which are random."""
        module, found = kind.from_pretrained(**arguments, output_loading_info=True)
        return module, sorted(found["missing_keys"])

    def _refuse(self, missing: Sequence[str]) -> None:
        if missing:
            raise ValueError(f"{self.name}: there are no values for {first_of(missing)}")

    @property
    def is_encoder(self) -> bool:
        """Return whether tokens attend in both directions; loaded as a generating model, it would have random
        weights."""
        from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as ENCODERS

        if self.config is None or self.config.model_type not in ENCODERS:
            return False
        return not (self.config.is_encoder_decoder or getattr(self.config, "is_decoder", False))

    @property
    def _kind(self) -> Any:
        """Return the class to load the model with."""
        from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

        if self.is_classifier:
            return AutoModelForSequenceClassification
        return AutoModel if self.is_encoder else AutoModelForCausalLM

    def load_encoder(self) -> nn.Module:
        """Load an encoder, with its head if it classifies. OSError, ValueError: its weights cannot be read, or some
        that are needed are missing."""
        given = {"pretrained_model_name_or_path": self.name, "config": self.config}
        module, missing = self._loaded(self._kind, **given)
        # Hidden states need no pooler, which models that fill in masked words do not have.
        self._refuse([name for name in missing if self.is_classifier or not name.startswith("pooler.")])
        return module

    def load_tokenizer(self) -> Any:
        """Load the tokenizer; for a GGUF file, the one next to it, else the one in it. OSError, ValueError: there is
        none."""
        from transformers import AutoTokenizer

        arguments: dict[str, Any] = dict(self._arguments)
        if self.config is not None:
            arguments["config"] = self.config
        elif (Path(self.name).parent / "tokenizer_config.json").is_file():
            del arguments["gguf_file"]
        try:
            return AutoTokenizer.from_pretrained(**arguments)
        except Exception as error:
            kinds = ("*token*", "vocab*", "*.model", "*.gguf")
            if not Path(self.name).is_dir() or any(any(Path(self.name).glob(kind)) for kind in kinds):
                raise
            raise ValueError(f"no tokenizer in {self.name}: save the model's there, too") from error

    def check_quantization(self, method: str) -> None:
        """Check the quantization. ValueError: weights are not stored by ``method``, a vLLM name (``gptq_marlin`` is
        gptq)."""
        found = self._quantization
        stored = None if found is None else method_of(found)
        if method.removesuffix("_marlin") != stored:
            raise ValueError(
                f"--quantization {method}: {self.name} has {f'weights of {stored}' if stored else 'whole weights'}: "
                "leave it out; --dtype int8 quantizes weights to 8 bits"
            )

    def least_bytes(self, dtype: torch.dtype | None, tokens: int | None) -> tuple[int, int]:
        """Return lower bounds in bytes: of the weights in ``dtype`` (None: the config's), and of keys and values of
        ``tokens`` tokens (None: the default of a server). Loads nothing."""
        if self.config is None:
            return Path(self.name).stat().st_size, 0
        config = copy.deepcopy(self.config)
        with torch.device("meta"):
            module = self._kind.from_config(config)
        used: torch.dtype = dtype or getattr(config, "dtype", None) or torch.float32
        # Packed weights may partly have 2 bits.
        weights = sum(param.numel() for param in module.parameters()) * used.itemsize
        weights = weights // 8 if can_unpack(self._quantization) else weights
        if self.is_classifier or self.is_encoder:
            return weights, 0
        text = config.get_text_config(decoder=True)
        tokens = tokens or min(
            getattr(text, "max_position_embeddings", None) or DEFAULT_LENGTH, DEFAULT_LENGTH
        )
        heads = getattr(text, "num_key_value_heads", None) or 1  # models that do not say may share one
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return weights, 2 * text.num_hidden_layers * heads * size * max(used.itemsize, 2) * tokens


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
            f"reading a GGUF file needs the package gguf: {install_hint('gguf', extra='transformers')}"
        ) from error
    return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
