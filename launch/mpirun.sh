#!/usr/bin/env bash
# mpirun.sh RANKS COMMAND...: mpirun with what this program needs of it, for Open MPI and MPICH.
#
#   launch/mpirun.sh 8 hpcgen run --model ... --input ... --output ...
#
# HOSTS=node1:8,node2:8 spreads the ranks over nodes. Binding is bind.sh's, so that it is the same everywhere.
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
  if [ "$(id -u)" = 0 ]; then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi
else
  options=(-bind-to none ${HOSTS:+-hosts "$HOSTS"})
fi
exec mpirun -n "$ranks" "${options[@]}" "$bind" "$@"
