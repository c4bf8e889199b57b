"""What runs a training job: config, engine and the mechanisms behind it."""
