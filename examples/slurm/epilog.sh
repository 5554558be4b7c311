#!/usr/bin/env bash
# Epilog of Slurm: removes the mounts that prolog.sh made for the job. Processes that are left are no reason to keep one.
set -euo pipefail

below=${CKFS_SLURM_MOUNTS:-/run/ckfs}
ckfs=${CKFS:-/usr/bin/ckfs}

for point in "$below/$SLURM_JOB_ID"/*/; do
    [[ -d $point ]] || continue
    "$ckfs" umount --wait 10 "${point%/}" || "$ckfs" umount --lazy "${point%/}" || true
    if rmdir "$point"; then rm -f "${point%/}.toml"; fi
done
rmdir "$below/$SLURM_JOB_ID" 2>/dev/null || true
