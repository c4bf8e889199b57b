"""Multi-node launchers, by the names that `--launcher` accepts."""

PDSH_LAUNCHER = "pdsh"
PDSH_MAX_FAN_OUT = 1024
SSH_LAUNCHER = "ssh"
OPENMPI_LAUNCHER = "openmpi"
MPICH_LAUNCHER = "mpich"
IMPI_LAUNCHER = "impi"
SLURM_LAUNCHER = "slurm"
MVAPICH_LAUNCHER = "mvapich"
