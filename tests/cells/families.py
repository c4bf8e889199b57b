"""Tiny models of Transformers for cells; only where it is installed. The oracle trains the same classes, alone."""

from __future__ import annotations

from typing import Any

import torch
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
        super().__init__()
        if cell.model == "unet":
            self.model: Any = UNet()
            return
        from tests.clients import architectures

        self.model = architectures.make(cell.model)
        self.config = self.model.config
        if cell.lora:
            self.model = with_adapters(self.model)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        from tests.cells.models import mean_loss

        if self.model.main_input_name == "pixel_values":
            codes = functional.one_hot(input_ids, WORDS).to(next(self.model.parameters()).dtype)
            found = self.model(pixel_values=codes.view(len(codes), 3, 8, 8))
            logits = (found if torch.is_tensor(found) else found.logits)[:, None]
            labels = None if labels is None else labels[:, -1:] % CLASSES
        elif self.config.is_encoder_decoder:
            logits = self.model(input_ids=input_ids, decoder_input_ids=input_ids, use_cache=False).logits
        else:
            logits = self.model(input_ids=input_ids, return_dict=True).logits
        return logits if labels is None else mean_loss(logits, labels)


class Residual(nn.Module):
    """Norm and convolution, with the time added to each channel, beside the input."""

    def __init__(self, inputs: int, outputs: int, time: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, inputs)
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Linear(time, outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.beside = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        hidden = self.first(functional.silu(self.norm(x))) + self.time(time)[:, :, None, None]
        return self.beside(x) + self.second(functional.silu(hidden))


class UNet(nn.Module):
    """A diffusion model's: convolutions down and up again, attention between them, the way down joined on the way up.
    From an image [batch, 3, 8, 8], whose first channel tells the time, channels averaged over places [batch, CLASSES].
    """

    main_input_name = "pixel_values"

    def __init__(self, width: int = 4, time: int = 6) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, time), nn.SiLU(), nn.Linear(time, time))
        self.into = nn.Conv2d(3, width, 3, padding=1)
        self.down = Residual(width, 2 * width, time)
        self.smaller = nn.Conv2d(2 * width, 2 * width, 3, stride=2, padding=1)
        self.attention = nn.MultiheadAttention(2 * width, 2, batch_first=True)
        self.middle = Residual(2 * width, 2 * width, time)
        self.larger = nn.ConvTranspose2d(2 * width, 2 * width, 2, stride=2)
        self.up = Residual(4 * width, width, time)
        self.out = nn.Conv2d(width, CLASSES, 1)

    def forward(self, pixel_values: Tensor) -> Tensor:
        time = self.time(pixel_values[:, :1].mean((2, 3)))
        whole = self.down(self.into(pixel_values), time)
        half = self.middle(self.smaller(whole), time)
        places = half.flatten(2).transpose(1, 2)
        half = half + self.attention(places, places, places)[0].transpose(1, 2).view_as(half)
        return self.out(self.up(torch.cat((whole, self.larger(half)), 1), time)).mean((2, 3))


def with_adapters(model: Any) -> Any:
    """Add PEFT adapters to every linear layer except the head; only they are trained."""
    import peft

    config = peft.LoraConfig(r=LORA_RANK, lora_alpha=LORA_RANK * LORA_SCALE, target_modules="all-linear")
    return peft.get_peft_model(model, config)
