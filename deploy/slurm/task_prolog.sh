#!/bin/sh
# TaskProlog of slurm.conf, on every node: what it prints as `export NAME=VALUE` is in the environment of the task.
# A job that names its own service, run or spool keeps them.
# The token is not set here: the job names a file that only its team may read (deploy/slurm/train.sbatch).
set -u

[ -n "${FORESHOCK_URL:-}" ] || echo "export FORESHOCK_URL=https://foreshock.example.org"

# The same name for every rank and after a requeue, so that a restart goes on in the same run.
[ -n "${FORESHOCK_RUN:-}" ] || echo "export FORESHOCK_RUN=${SLURM_JOB_ACCOUNT:-cluster}/${SLURM_JOB_ID}"

# Tasks that train themselves have their rank from Slurm. Where a task starts torchrun or another launcher, the numbers
# that this gives to its workers go before these.
if [ -z "${RANK:-}" ] && [ -n "${SLURM_PROCID:-}" ]; then
  echo "export FORESHOCK_RANK=$SLURM_PROCID"
  echo "export FORESHOCK_WORLD_SIZE=${SLURM_NTASKS:-1}"
fi

# What is not sent yet waits on the node's own disk; a task that starts there again sends it. Everybody writes to
# /var/tmp: a folder that another user made first, or a link, is not taken, and the agent keeps its place in the home.
if [ -z "${FORESHOCK_SPOOL_DIRECTORY:-}" ]; then
  spool=/var/tmp/foreshock-$(id -u)
  mkdir -m 700 "$spool" 2>/dev/null
  if [ -d "$spool" ] && [ ! -L "$spool" ] && [ -O "$spool" ]; then
    echo "export FORESHOCK_SPOOL_DIRECTORY=$spool"
  else
    echo "print foreshock: $spool is no folder of this user; unsent batches wait in the home"
  fi
fi
