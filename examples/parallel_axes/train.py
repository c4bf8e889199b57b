"""A Transformers model whose layers, or sequences, are shared by several ranks: one line of the config each.

    torchrun --nproc-per-node 2 examples/parallel_axes/train.py --tensor 2
    torchrun --nproc-per-node 2 examples/parallel_axes/train.py --sequence 2
    torchrun --nproc-per-node 4 examples/parallel_axes/train.py --tensor 2 --sequence 2 --stage 3

The model and the loop are those of one rank. Shows what each rank holds, and that the saved weights are those of the
whole model: a plain Transformers model that loads them has the same loss.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import deepspeed

LENGTH, VOCABULARY = 64, 256


def settings(tensor: int, sequence: int, stage: int) -> dict:
    return {
        "tensor_parallel": {"autotp_size": tensor},
        "sequence_parallel_size": sequence,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3}},
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
    }


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return LlamaForCausalLM(sizes)


class Text(torch.utils.data.Dataset):
    """Runs of bytes of this file, labels equal to the inputs."""

    def __init__(self) -> None:
        data = torch.tensor(list(Path(__file__).read_bytes()))
        self.rows = data[: len(data) // LENGTH * LENGTH].view(-1, LENGTH)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tensor", type=int, default=1, help="ranks that share each layer")
    parser.add_argument("--sequence", type=int, default=1, help="ranks that share each sequence")
    parser.add_argument("--stage", type=int, default=1, choices=range(4))
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--output", type=Path, default=Path(tempfile.gettempdir(), "ds_parallel_axes"))
    options = parser.parse_args()
    deepspeed.init_distributed(auto_mpi_discovery=False)

    model, text = make_model(), Text()
    whole = sum(param.numel() for param in model.parameters())
    # The loader gives ranks that share a layer or a sequence the same batches.
    engine, _, loader, _ = deepspeed.initialize(
        model=model, config=settings(options.tensor, options.sequence, options.stage), training_data=text
    )
    losses = []
    for _ in range(options.epochs):
        for batch in loader:
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())

    held = sum(getattr(p, "ds_tensor", p).numel() for p in engine.module.parameters())
    engine.save_16bit_model(options.output)
    probe = torch.stack([text[row]["input_ids"] for row in range(4)])
    engine.eval()
    with torch.no_grad():
        split = engine(input_ids=probe, labels=probe).loss.item()
    if deepspeed.comm.get_rank() == 0:
        alone = make_model().eval()
        alone.load_state_dict(torch.load(options.output / "pytorch_model.bin"))
        with torch.no_grad():
            joined = alone(input_ids=probe, labels=probe).loss.item()
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps")
        print(f"parameters: {whole:,}; this rank holds {held:,}")
        print(f"saved and loaded on one rank: loss {joined:.5f}, here {split:.5f}")
    deepspeed.comm.barrier()


if __name__ == "__main__":
    main()
