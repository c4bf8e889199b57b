"""FLOPs, multiply-accumulates, parameters and time of a model, by module."""
