#!/bin/sh
# Open MPI: mpirun starts a `lockstep run` on each host, which starts the ranks there. See docs/deploy.md.
#   deploy/mpirun.sh host0,host1
# USR1 to mpirun lets all ranks save and leave, with exit code 138. The same command goes on from there.
# INT and TERM do as well, but mpirun kills the ranks after a second.
hosts=${1:?usage: mpirun.sh HOST,HOST,...}
ranks_per_host=4
program="lockstep train --dataset digits --checkpoint-dir run --resume auto"

LOCKSTEP_TOKEN=$(head -c 32 /dev/urandom | base64)
export LOCKSTEP_TOKEN
exec mpirun --host "$hosts" --map-by ppr:1:node --bind-to none -x LOCKSTEP_TOKEN \
  lockstep run --nnodes "$(echo "$hosts" | tr , '\n' | wc -l)" --nproc-per-node "$ranks_per_host" \
  --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint "${hosts%%,*}:29500" $program
