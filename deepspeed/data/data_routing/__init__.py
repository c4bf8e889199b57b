"""Routing of tokens through layers: random layerwise token dropping."""
