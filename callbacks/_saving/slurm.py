"""Putting a job back into SLURM's queue."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

from lightning.pytorch.utilities import rank_zero_warn

TIMEOUT_S = 60.0


def job_id(environment: Mapping[str, str]) -> str | None:
    """The id that ``scontrol`` knows this job by; None outside of SLURM and in an interactive job."""
    if environment.get("SLURM_JOB_NAME") in ("bash", "interactive"):
        return None
    if "SLURM_ARRAY_JOB_ID" in environment and "SLURM_ARRAY_TASK_ID" in environment:
        return f"{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
    return environment.get("SLURM_JOB_ID")


def requeue() -> bool:
    """Ask SLURM to run this job again. Call it on one process, when everything is saved.

    Returns:
        Whether SLURM accepted. A refusal is said in a warning: the run is saved, and somebody has to submit it again.
    """
    job = job_id(os.environ)
    if job is None:
        return False
    try:
        answer = subprocess.run(
            ["scontrol", "requeue", job], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    else:
        if answer.returncode == 0:
            return True
        problem = (answer.stderr or answer.stdout).strip() or f"exit code {answer.returncode}"
    rank_zero_warn(f"SLURM did not requeue job {job} ({problem}); submit it again to go on.")
    return False
