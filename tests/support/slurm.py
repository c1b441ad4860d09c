"""``sbatch``, ``srun`` and ``sacct`` of a cluster that is this machine, for submitit: as much as it asks for.

A job runs at once, in its own session, with the variables that SLURM sets for one task; an array is a job each.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

SBATCH = """#!/bin/bash
job=$((10000 + $$))
cp "$1" "$FAKE_SLURM/$job.sh"
last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$1")
for task in $(seq 0 "${last:-0}"); do
  (
    name=$job
    export SLURM_JOB_ID=$((job + task)) SLURM_NTASKS=1 SLURM_JOB_NUM_NODES=1 SLURM_JOB_NAME=submitit
    export SLURM_JOB_NODELIST=$(hostname)
    if [ -n "$last" ]; then
      name=${job}_$task
      export SLURM_ARRAY_JOB_ID=$job SLURM_ARRAY_TASK_ID=$task
    fi
    export FAKE_JOB=$name
    touch "$FAKE_SLURM/$name.state"
    setsid bash "$FAKE_SLURM/$job.sh" >"$FAKE_SLURM/$name.log" 2>&1 </dev/null
    if [ $? = 0 ]; then echo COMPLETED; else echo FAILED; fi >"$FAKE_SLURM/$name.state"
  ) >/dev/null 2>&1 </dev/null &
done
echo "Submitted batch job $job"
"""

SRUN = """#!/bin/bash
while [ "${1#-}" != "$1" ]; do
  case $1 in --output | --error) shift 2 ;; *) shift ;; esac
done
export SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_STEP_ID=0
echo $$ >"$FAKE_SLURM/$FAKE_JOB.pid"
exec "$@"
"""

SACCT = """#!/bin/bash
echo "JobID|State|NodeList"
for file in "$FAKE_SLURM"/*.state; do
  state=$(cat "$file")
  echo "$(basename "$file" .state)|${state:-RUNNING}|$(hostname)"
done
"""


def install(folder: Path) -> dict[str, str]:
    """Make the commands; gives the environment in which they are found.

    Args:
        folder: New; the cluster's logs go there too.
    """
    programs = folder / "bin"
    programs.mkdir(parents=True)
    for name, text in {"sbatch": SBATCH, "srun": SRUN, "sacct": SACCT}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(stat.S_IRWXU)
    return {"FAKE_SLURM": str(folder), "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
