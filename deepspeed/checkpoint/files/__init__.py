"""Files of a checkpoint: written so that a crash at any instant leaves one that loads, and verified when read."""
