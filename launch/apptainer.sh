#!/usr/bin/env bash
# apptainer.sh IMAGE COMMAND...: the command in a container, as one rank of a job; put it between launcher and command.
#
#   launch/srun.sh launch/apptainer.sh hpcgen.sif hpcgen run --model ... --input ... --output ...
#
# The image has Python, this package and an MPI library of the same kind as the launcher's. Directories that the
# arguments name are made visible inside; APPTAINER_OPTIONS adds more options.
set -euo pipefail
image=$1
shift

binds=()
for argument in "$@"; do
  case $argument in
    /*) path=$argument ;;
    *) path=$PWD/$argument ;;
  esac
  if [ ! -d "$path" ]; then path=$(dirname "$path"); fi
  if [ -d "$path" ]; then binds+=(--bind "$(realpath "$path")"); fi
done
if [ -e /dev/nvidiactl ]; then binds+=(--nv); fi
# shellcheck disable=SC2086  # options are words
exec "${APPTAINER:-apptainer}" exec --pwd "$PWD" "${binds[@]}" ${APPTAINER_OPTIONS:-} "$image" "$@"
