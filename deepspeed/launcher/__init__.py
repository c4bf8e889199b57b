"""Starting ranks: the `deepspeed` command (runner), its per-machine half (launch), and what watches the
processes.
"""
