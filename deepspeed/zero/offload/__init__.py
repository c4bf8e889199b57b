"""Model states outside the device: tiers, swap files, transfers."""
