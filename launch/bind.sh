#!/usr/bin/env bash
# bind.sh COMMAND...: runs the command on this rank's share of the node: one GPU, the cores and the network device near it.
#
#   mpirun -n 8 launch/bind.sh hpcgen run ...
#
# What the launcher has bound already (CUDA_VISIBLE_DEVICES of one GPU, a share of the cores, UCX_NET_DEVICES) is left
# as it is. BIND_REPORT=1 prints the choice.
set -euo pipefail

sysfs=${BIND_SYSFS:-/sys}  # another root for tests

# The first of these variables that is set: Slurm, Open MPI, MPICH, Cray PALS, MVAPICH.
first_set() {
  local name
  for name in "$@"; do
    if [ -n "${!name:-}" ]; then echo "${!name}"; return; fi
  done
}

# Numbers of a list such as 0-3,8, one a line.
expand() {
  local part
  for part in ${1//,/ }; do seq "${part%-*}" "${part#*-}"; done
}

rank=$(first_set SLURM_LOCALID OMPI_COMM_WORLD_LOCAL_RANK MPI_LOCALRANKID PALS_LOCAL_RANKID MV2_COMM_WORLD_LOCAL_RANK)
ranks=$(first_set OMPI_COMM_WORLD_LOCAL_SIZE MPI_LOCALNRANKS PALS_LOCAL_SIZE MV2_COMM_WORLD_LOCAL_SIZE)
# Slurm says 4(x2),3 for two nodes of four tasks and one of three.
ranks=${ranks:-$(first_set SLURM_STEP_TASKS_PER_NODE SLURM_TASKS_PER_NODE)}
ranks=${ranks%%[!0-9]*}
rank=${rank:-0} ranks=${ranks:-1}

gpus=()
if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
  mapfile -t gpus < <(tr ',' '\n' <<< "$CUDA_VISIBLE_DEVICES")
elif command -v nvidia-smi > /dev/null; then
  mapfile -t gpus < <(nvidia-smi --query-gpu=index --format=csv,noheader)
fi
numa=-1
if [ ${#gpus[@]} -gt 0 ]; then
  if [ ${#gpus[@]} -gt 1 ]; then export CUDA_VISIBLE_DEVICES=${gpus[$((rank % ${#gpus[@]}))]}; fi
  address=$(nvidia-smi --query-gpu=pci.bus_id --format=csv,noheader --id="${CUDA_VISIBLE_DEVICES:-${gpus[0]}}" 2> /dev/null || true)
  # nvidia-smi writes the domain with eight digits and in capitals, the kernel with four and in small letters.
  address=$(tr 'A-F' 'a-f' <<< "${address#0000}")
  if [ -r "$sysfs/bus/pci/devices/$address/numa_node" ]; then numa=$(< "$sysfs/bus/pci/devices/$address/numa_node"); fi
fi

# A share of the cores of the GPU's NUMA node, or of all, unless the launcher has given out cores itself.
allowed=$(expand "$(awk '/^Cpus_allowed_list/ { print $2 }' "${BIND_STATUS:-/proc/self/status}")")
online=$(expand "$(< "$sysfs/devices/system/cpu/online")")
cores=
if [ "$ranks" -gt 1 ] && [ "$(wc -l <<< "$allowed")" -eq "$(wc -l <<< "$online")" ]; then
  # Ranks with GPUs near the same node divide it; how many those are is the ranks over the nodes.
  near=$allowed sharing=$ranks place=$rank
  if [ "$numa" -ge 0 ] && [ -r "$sysfs/devices/system/node/node$numa/cpulist" ]; then
    near=$(expand "$(< "$sysfs/devices/system/node/node$numa/cpulist")")
    nodes=("$sysfs"/devices/system/node/node[0-9]*)
    sharing=$(((ranks + ${#nodes[@]} - 1) / ${#nodes[@]})) place=$((rank % sharing))
  fi
  count=$(wc -l <<< "$near") share=$((count / sharing))
  if [ "$share" -gt 0 ]; then
    cores=$(sed -n "$((place * share + 1)),$(((place + 1) * share))p" <<< "$near" | paste -sd, -)
  fi
fi

if [ -z "${UCX_NET_DEVICES:-}" ] && [ "$numa" -ge 0 ]; then
  devices=
  for directory in "$sysfs"/class/infiniband/*; do
    if [ -r "$directory/device/numa_node" ] && [ "$(< "$directory/device/numa_node")" = "$numa" ]; then
      devices=${devices:+$devices,}${directory##*/}:1
    fi
  done
  if [ -n "$devices" ]; then export UCX_NET_DEVICES=$devices; fi
fi

if [ "${BIND_REPORT:-0}" = 1 ]; then
  echo "rank $rank of $ranks: gpu ${CUDA_VISIBLE_DEVICES:-none}, cores ${cores:-as given}, network ${UCX_NET_DEVICES:-any}" >&2
fi
if [ -n "$cores" ] && command -v taskset > /dev/null; then exec taskset --cpu-list "$cores" "$@"; fi
exec "$@"
