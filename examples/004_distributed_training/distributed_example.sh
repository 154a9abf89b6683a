#!/usr/bin/env bash
# Starts distributed_example as a launcher does, by hand, to show what the variables are for.
#
#   distributed_example.sh [PROCESSES [FLAGS OF distributed_example ...]]
#
# One host, two processes:  examples/004_distributed_training/distributed_example.sh 2
# Two hosts, IP being the address of the first; there, and on the second with NODE_RANK=1:
#   export MASTER_ADDR=IP NNODES=2
#   NODE_RANK=0 examples/004_distributed_training/distributed_example.sh 2
#
# In one line, with all that this script does not do (ends that are reported, nothing left behind):
#   P=build/examples/004_distributed_training/distributed_example
#   build/bin/lockstep run --nproc-per-node 2 $P
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
program=${DISTRIBUTED_EXAMPLE:-$here/../../build/examples/004_distributed_training/distributed_example}
processes=${1:-2}
shift || true

# Question 4: what do the different environment variables do?
#
# Where the processes meet. The process of rank 0 listens at this address and port; the others
# connect to it, and through it they learn each other's addresses. Values that are set already win.
export MASTER_ADDR=${MASTER_ADDR:-127.0.0.1}
export MASTER_PORT=${MASTER_PORT:-29500}
# How many hosts take part, and which of them this is. Only this script reads these two.
NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-0}
# How many processes there are in all: a process waits until so many have come.
export WORLD_SIZE=$((NNODES * processes))
# How many there are on this host: how its GPUs and cores are shared out.
export LOCAL_WORLD_SIZE=$processes
# Threads that each process computes with. Without it each would take all cores, and they would be
# in each other's way.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Which network to use, when a host has several: GLOO_SOCKET_IFNAME=eth0 (NCCL_SOCKET_IFNAME for
# NCCL). On one host the loopback interface is taken. Not set here.

pids=()
stop_all() { kill "${pids[@]}" 2>/dev/null || true; }
trap 'stop_all; wait' INT TERM EXIT
for ((local_rank = 0; local_rank < processes; local_rank++)); do
  # Who a process is: its number among all (rank 0 prints, saves and listens), and its number on
  # this host, which is the number of the GPU that it uses.
  RANK=$((NODE_RANK * processes + local_rank)) LOCAL_RANK=$local_rank "$program" "$@" &
  pids+=($!)
done

# When one fails, the others would wait for it until their time-out: they are ended.
for ((left = processes; left > 0; left--)); do
  if ! wait -n; then
    echo "$0: a process failed; the others are ended" >&2
    exit 1
  fi
done
