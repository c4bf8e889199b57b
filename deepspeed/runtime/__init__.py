"""What runs a training job: the config, the engine and the mechanisms behind them."""
