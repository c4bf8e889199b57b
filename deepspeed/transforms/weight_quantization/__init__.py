"""Groupwise weight quantization for ZeRO-Inference: the config section ``weight_quantization``."""
