#!/usr/bin/env bash
# srun.sh COMMAND...: the ranks of a Slurm job, with the process manager that the MPI library speaks.
#
#   sbatch or salloc ..., then: launch/srun.sh hpcgen run --model ... --input ... --output ...
#
# A library and a process manager that do not fit give ranks that each believe to be alone. SRUN_MPI overrides the
# choice, SRUN_OPTIONS adds to it. (Where Slurm "can not load PMIx library", it misses libpmix.so: Debian has it in
# libpmix-dev.)
set -euo pipefail
bind=$(dirname "$(realpath "$0")")/bind.sh

if [ -z "${SRUN_MPI:-}" ]; then
  library=$(python -c 'from mpi4py import MPI; print(MPI.Get_library_version().strip(chr(0)))' 2> /dev/null || true)
  case $library in
    *'Open MPI'*) SRUN_MPI=pmix ;;
    *MPICH* | *'Intel(R) MPI'* | *MVAPICH*) SRUN_MPI=pmi2 ;;
    *) SRUN_MPI=none ;;  # no MPI: one rank
  esac
fi
# shellcheck disable=SC2086  # options are words
exec srun --mpi="$SRUN_MPI" --kill-on-bad-exit=1 --unbuffered ${SRUN_OPTIONS:-} "$bind" "$@"
