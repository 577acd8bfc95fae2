# Sourced by the batch scripts of this folder: runs `hpcgen run "$@"` on all nodes of the job and requeues the job where
# the run stopped but is not done. Set in the environment, all optional:
#   HPCGEN_SETUP         file of shell to source first: modules, variables
#   HPCGEN_PYTHON        interpreter that has hpcgen (default: python)
#   HPCGEN_CONTAINER     Apptainer image to run it in
#   HPCGEN_MAX_REQUEUES  default 1000
#   SRUN_MPI, SRUN_OPTIONS, BIND_REPORT   see launch/

if [ -n "${HPCGEN_SETUP:-}" ]; then source "$HPCGEN_SETUP"; fi
python=$(command -v "${HPCGEN_PYTHON:-python}") || { echo "there is no ${HPCGEN_PYTHON:-python} here" >&2; exit 2; }
PATH=$(dirname "$python"):$PATH

run_directory=
for ((i = 1; i < $#; i++)); do
  if [ "${!i}" = --run-dir ]; then next=$((i + 1)) run_directory=${!next}; fi
done
if [ -z "$run_directory" ]; then echo "name the run directory: --run-dir RUN_DIR" >&2; exit 2; fi

command=("$python" -m hpcgen.cli run "$@")
if [ -n "${HPCGEN_CONTAINER:-}" ]; then command=("$launch/apptainer.sh" "$HPCGEN_CONTAINER" "${command[@]}"); fi

# The shell outlives the stop signals, so that it can requeue the job.
trap stopped=--stopped TERM USR2
trap : CONT
"$launch/srun.sh" "${command[@]}"
"$python" -m hpcgen.jobs.requeue "$?" "$run_directory" --max-requeues "${HPCGEN_MAX_REQUEUES:-1000}" ${stopped:-}
exit "$?"
