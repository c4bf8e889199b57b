"""What is done to a model's graph, and its inputs, before it is compiled."""
