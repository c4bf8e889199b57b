"""`ds init`: a config, a training script and a launch command for a model, a goal and the available machines."""
