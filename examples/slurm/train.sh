#!/usr/bin/env bash
#SBATCH --nodes=2 --ntasks-per-node=1 --exclusive
set -euo pipefail
model=${1:?usage: sbatch train.sh SOURCE COMMAND…} && shift
export mnt=/tmp/ckfs-$SLURM_JOB_ID
trap 'srun ckfs umount "$mnt" --wait 30' EXIT
srun ckfs mount "$model" "$mnt" --mkdir --layout hf --mesh "fsdp=$((SLURM_NNODES * 8))"
srun bash -c 'ckfs sums "$mnt" --only hf -o "sums.$SLURM_NODEID"'
for sums in sums.*; do cmp sums.0 "$sums"; done
srun "$@"
