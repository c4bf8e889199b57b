"""Weights in groups of few bits for ZeRO-Inference: the config section ``weight_quantization``."""
