"""Errors that tell a user what to change."""


class ConfigError(ValueError):
    """A user's setting is wrong.

    The message is one sentence that names the setting, its value, the rule and the way out.
    """


class DataError(ConfigError):
    """A file that a user gave is missing, empty, truncated or of the wrong kind."""


class RankError(RuntimeError):
    """A rank process failed; the message holds its traceback."""


class Preempted(SystemExit):
    """A signal asked the run to end; it has saved and can go on from there.

    Raised out of ``Trainer.fit``. A ``SystemExit``: a script that does not catch it ends at once, without a traceback,
    with an exit code that schedulers do not take for success.

    Args:
        signal: Name of the signal, such as ``SIGTERM``.
        step: Updates done when it saved.
        checkpoint: What it saved.
        requeued: Whether the job was put back into SLURM's queue.
    """

    EXIT_CODE = 75
    """EX_TEMPFAIL of sysexits.h: try again later."""

    def __init__(self, *, signal: str, step: int, checkpoint: str, requeued: bool = False) -> None:
        super().__init__(self.EXIT_CODE)
        self.signal = signal
        self.step = step
        self.checkpoint = checkpoint
        self.requeued = requeued

    def __str__(self) -> str:
        queue = "; the job is back in the queue" if self.requeued else ""
        return f"{self.signal}: saved {self.checkpoint} at update {self.step} and stopped{queue}"
