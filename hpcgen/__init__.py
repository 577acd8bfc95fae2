"""hpcgen: batch LLM inference for supercomputers, as sequence coroutines over MPI and Slurm."""

__version__ = "0.1.0"
