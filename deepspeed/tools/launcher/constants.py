"""Names of the programs that start ranks on several hosts, as `--launcher` takes them."""

PDSH_LAUNCHER = "pdsh"
PDSH_MAX_FAN_OUT = 1024
SSH_LAUNCHER = "ssh"
OPENMPI_LAUNCHER = "openmpi"
MPICH_LAUNCHER = "mpich"
IMPI_LAUNCHER = "impi"
SLURM_LAUNCHER = "slurm"
MVAPICH_LAUNCHER = "mvapich"
