"""FLOPs, multiply-accumulates, parameters and time of a model, module by module."""
