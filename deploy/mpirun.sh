#!/bin/sh
# Open MPI: mpirun starts a `lockstep run` on each host, which starts the ranks there. See docs/deploy.md.
#   deploy/mpirun.sh host0,host1
# Exit code 138: USR1 to mpirun let all ranks save. The same command goes on from there.
hosts=${1:?usage: mpirun.sh HOST,HOST,...}
ranks_per_host=4
program="lockstep train --dataset digits --checkpoint-dir run --resume auto"

LOCKSTEP_TOKEN=$(head -c 32 /dev/urandom | base64)
export LOCKSTEP_TOKEN
# TERM reaches the ranks too; the last option gives them more than a second to save.
exec mpirun --host "$hosts" --map-by ppr:1:node --bind-to none -x LOCKSTEP_TOKEN \
  --mca orte_abort_on_non_zero_status 0 --mca odls_base_sigkill_timeout 60 \
  lockstep run --nnodes "$(echo "$hosts" | tr , '\n' | wc -l)" --nproc-per-node "$ranks_per_host" \
  --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint "${hosts%%,*}:29500" $program
