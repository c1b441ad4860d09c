"""Errors that tell a user what to change."""


class ConfigError(ValueError):
    """A user's setting is wrong.

    The message is one sentence that names the setting, its value, the rule and the way out.
    """


class DataError(ConfigError):
    """A file that a user gave is missing, empty, truncated or of the wrong kind."""


class RankError(RuntimeError):
    """A rank process failed; the message holds its traceback."""
