"""Launching over several hosts: ssh, pdsh, MPI and Slurm."""
