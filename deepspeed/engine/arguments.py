"""Command-line arguments that training scripts share."""

from __future__ import annotations

import argparse


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the group `DeepSpeed` to a script's parser and return the parser.

    `--deepspeed_config` is read by `initialize(args=...)`; `--deepspeed` is a flag for the script itself. The two
    `--deepscale` options are old spellings.
    """
    group = parser.add_argument_group("DeepSpeed", "configuration of DeepSpeed")
    group.add_argument(
        "--deepspeed", action="store_true", help="train with deepspeed (for the script to read)"
    )
    group.add_argument("--deepspeed_config", type=str, default=None, help="path of the JSON configuration")
    group.add_argument("--deepscale", action="store_true", help="old spelling of --deepspeed")
    group.add_argument(
        "--deepscale_config", type=str, default=None, help="old spelling of --deepspeed_config"
    )
    return parser
