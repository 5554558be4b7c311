#!/usr/bin/env bash
# An export by the tasks of a Slurm array, each on a node of its own: sbatch --array=1-8 export.sh SOURCE DIR [FLAGS]
#
# DIR is on a file system that all nodes have, or an address of a bucket. `--array=0-7` does the same. A task that Slurm starts
# again goes on where it was.
#SBATCH --requeue --ntasks=1
set -euo pipefail
exec "${CKFS:-ckfs}" export "$@" --part "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT"
