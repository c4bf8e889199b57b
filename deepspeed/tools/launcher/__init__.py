"""Starting ranks: the `deepspeed` command (runner), its per-machine part (launch), and process supervision."""
