"""Graph passes (DeepCompile)."""
