"""hpcgen: batch LLM inference for supercomputers, as sequence coroutines over MPI and Slurm."""

import os

__version__ = "0.1.0"

# Threads that wait for each other must not spin: where anything else wants the cores (a tokenizer, another rank, a
# neighbour on the node) spinning made small parallel regions 30 times slower. libgomp reads it once, at torch's import.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
