"""Starting ranks: the `deepspeed` command (runner), its per-machine half (launch), and the supervision of processes."""
