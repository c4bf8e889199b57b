"""Which tokens go through which layers: random layerwise token dropping."""
