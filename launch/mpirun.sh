#!/usr/bin/env bash
# mpirun.sh RANKS COMMAND...: mpirun with what this program needs of it, for Open MPI and MPICH.
#
#   launch/mpirun.sh 8 hpcgen run --model ... --input ... --output ...
#
# HOSTS=node1:8,node2:8 spreads the ranks over nodes. Binding is bind.sh's, so that it is the same everywhere.
# FAULT_TOLERANT=1 (Open MPI): when a rank other than the first dies, the others go on without it. It costs the use of
# UCX, which does not survive a failure; so it is for networks that are fast enough by TCP, or for nodes that fail often.
set -euo pipefail
ranks=$1
shift
bind=$(dirname "$(realpath "$0")")/bind.sh

if mpirun --version 2>&1 | grep -q 'Open MPI\|OpenRTE\|PRTE'; then
  options=(--bind-to none ${HOSTS:+--host "$HOSTS"})
  if [ "$(env -u OMP_NUM_THREADS nproc)" -lt "$ranks" ] && [ -z "${HOSTS:-}" ]; then
    # Ranks that share a core must not wait for each other by spinning.
    options+=(--oversubscribe --mca mpi_yield_when_idle 1)
  fi
  if [ "${FAULT_TOLERANT:-0}" = 1 ]; then
    # Under these components no failure was seen that is neither reported nor survived.
    options+=(--with-ft ulfm --mca pml ob1 --mca osc ^ucx --mca coll ^han)
  fi
  if [ "$(id -u)" = 0 ]; then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi
else
  if [ "${FAULT_TOLERANT:-0}" = 1 ]; then echo "mpirun.sh: FAULT_TOLERANT needs Open MPI's mpirun" >&2; exit 2; fi
  options=(-bind-to none ${HOSTS:+-hosts "$HOSTS"})
fi
exec mpirun -n "$ranks" "${options[@]}" "$bind" "$@"
