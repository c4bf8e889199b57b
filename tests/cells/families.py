"""Tiny models of Transformers for cells; only where it is installed. The oracle trains the same classes, alone."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from tests.cells.cell import Cell
from tests.cells.formulas import LORA_RANK, LORA_SCALE

WORDS, CLASSES = 24, 7


class Family(nn.Module):
    """``forward(input_ids)`` gives logits, with ``labels`` the loss. An image is the tokens' one-hot codes, and its
    class that of the last label. ImportError: no Transformers, or with ``lora`` no PEFT."""

    balance: Tensor | None = None
    with_sometimes = False

    def __init__(self, cell: Cell) -> None:
        from tests.clients import architectures

        super().__init__()
        self.model: Any = architectures.make(cell.model)
        self.config = self.model.config
        if cell.lora:
            self.model = with_adapters(self.model)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        from tests.cells.models import mean_loss

        if self.model.main_input_name == "pixel_values":
            codes = functional.one_hot(input_ids, WORDS).to(next(self.model.parameters()).dtype)
            logits = self.model(pixel_values=codes.view(len(codes), 3, 8, 8)).logits[:, None]
            labels = None if labels is None else labels[:, -1:] % CLASSES
        elif self.config.is_encoder_decoder:
            logits = self.model(input_ids=input_ids, decoder_input_ids=input_ids, use_cache=False).logits
        else:
            logits = self.model(input_ids=input_ids, return_dict=True).logits
        return logits if labels is None else mean_loss(logits, labels)


def with_adapters(model: Any) -> Any:
    """Add PEFT adapters to every linear layer except the head; only they are trained."""
    import peft

    config = peft.LoraConfig(r=LORA_RANK, lora_alpha=LORA_RANK * LORA_SCALE, target_modules="all-linear")
    return peft.get_peft_model(model, config)
