"""Operations of mixture-of-experts layers, in PyTorch."""
