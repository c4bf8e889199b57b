r"""ZeRO-Inference: generate with a model whose weights rest in a file, or in 4 bits, or both.

    python examples/zero_inference/generate.py
    python examples/zero_inference/generate.py --model FOLDER --prompt "Once" --path /local_nvme

The model is made on the meta device, so it is never whole in memory: each block is read, quantized and written to the
file before the next. The reference has its weights in memory, in as many bits; its tokens have to be the same.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.utils import logging as transformers_logging

import deepspeed

FOUR_BITS: dict[str, Any] = {"dtype": "int8", "quant": {"weight": {"num_bits": 4, "q_groups": 2}}}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": "fp32"},
    "bf16": {"dtype": "bf16"},
    "4 bits": FOUR_BITS,
}


def make_one(folder: Path, layers: int) -> None:
    """Save a Llama with random weights."""
    torch.manual_seed(0)
    sizes = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,  # as a trained model, it has tokens that it prefers clearly
        eos_token_id=None,
        bos_token_id=None,
    )
    AutoModelForCausalLM.from_config(sizes).save_pretrained(folder)


def load(folder: Path, precision: str, zero: dict[str, Any] | None) -> Any:
    """An inference engine; with the section ``zero`` its weights are not whole in memory at any time."""
    with deepspeed.OnDevice(dtype=torch.float32, device="meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    more = {} if zero is None else {"zero": zero}
    return deepspeed.init_inference(model, checkpoint=str(folder), **PRECISIONS[precision], **more)


def generated(engine: Any, ids: torch.Tensor, tokens: int) -> list[int]:
    found = engine.generate(ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return found[0, ids.shape[1] :].tolist()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a folder of save_pretrained; default: random weights")
    parser.add_argument("--prompt", default="def main(", help="text; its bytes are the tokens")
    parser.add_argument("--tokens", type=int, default=32, help="to generate")
    parser.add_argument("--layers", type=int, default=12, help="without --model")
    parser.add_argument("--path", type=Path, help="folder of the file with the weights; default: temporary")
    options = parser.parse_args(argv)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    ids = torch.tensor([list(options.prompt.encode())])
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.model or Path(scratch, "model")
        if options.model is None:
            make_one(folder, options.layers)
        offload = {"device": "nvme", "nvme_path": str(options.path or scratch)}
        for precision in PRECISIONS:
            wanted = generated(load(folder, precision, None), ids, options.tokens)
            engine = load(folder, precision, {"stage": 3, "offload_param": offload})
            found = generated(engine, ids, options.tokens)
            same = sum(a == b for a, b in zip(found, wanted, strict=True))
            streamed = engine.streamed
            print(
                f"{precision}: {streamed.bytes_streamed / 1e6:.1f} MB of weights in the file, "
                f"{streamed.bytes_held / 1e6:.1f} MB of buffers, {same} of {options.tokens} tokens as in memory",
                flush=True,
            )


if __name__ == "__main__":
    main()
