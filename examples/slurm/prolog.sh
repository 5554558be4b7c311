#!/usr/bin/env bash
# Prolog of Slurm: mounts what a job asks for, on each of its nodes, before the job starts.
#
#   slurm.conf:  Prolog=/etc/slurm/prolog.d/ckfs.sh  Epilog=/etc/slurm/epilog.d/ckfs.sh  PrologFlags=Alloc
#   a job:       sbatch --comment ckfs=llama train.sh          reads /run/ckfs/$SLURM_JOB_ID/llama
#
# Names are those of configurations of the administrator, /etc/ckfs/slurm/NAME.toml, so that no user has root mount a file of the
# user's own. Each configuration has `[mount] allow_other = true`: a job then reads the files whose sources its user can read.
# A mount that fails makes the prolog fail: Slurm drains the node and starts the job elsewhere.
set -euo pipefail

configs=${CKFS_SLURM_CONFIGS:-/etc/ckfs/slurm}
below=${CKFS_SLURM_MOUNTS:-/run/ckfs}
ckfs=${CKFS:-/usr/bin/ckfs}

# Slurm gives the comment to prologs of 24.05 and later; older ones have to ask for it.
comment=${SLURM_JOB_COMMENT-$(scontrol show job "$SLURM_JOB_ID" --oneliner | sed -n 's/.* Comment=\([^ ]*\).*/\1/p')}

[[ $comment =~ (^|[[:space:]\;])ckfs=([A-Za-z0-9_,-]+) ]] || exit 0
IFS=, read -ra names <<<"${BASH_REMATCH[2]}"

for name in "${names[@]}"; do
    config=$configs/$name.toml
    point=$below/$SLURM_JOB_ID/$name
    if [[ ! -r $config ]]; then
        # A misspelt name is the user's mistake, and no fault of the node.
        echo "ckfs: job $SLURM_JOB_ID asks for $name: there is no $config" >&2
        continue
    fi
    mkdir -p "$point"
    chmod 755 "$below" "$below/$SLURM_JOB_ID"
    # The configuration with this job's mount point; paths in it are absolute.
    { printf 'mountpoint = "%s"\n' "$point" && cat "$config"; } >"$point.toml"
    "$ckfs" mount --config "$point.toml"
done
