"""Which data a step sees."""
