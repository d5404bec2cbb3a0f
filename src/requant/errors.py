"""The errors a user is meant to read: one line that says what was given and what is accepted.

Command lines print the message and exit with code 2, without a traceback; library callers catch
:class:`RequantError`. Anything else that escapes is a defect of requant itself.
"""


class RequantError(Exception):
    """Base of every error whose message is written for the user."""


class RecipeError(RequantError):
    """The recipe is malformed, names an unknown format, or does not fit the model."""


class CheckpointError(RequantError):
    """A checkpoint is missing something, is damaged, or holds something that cannot be loaded."""


class ModelError(RequantError):
    """The model's architecture or configuration is one that requant does not run."""


class ConfigError(RequantError):
    """A flag or an argument has a value that is not accepted, or that the machine cannot satisfy."""


class RequestError(RequantError):
    """A generation request is not acceptable: HTTP answers it with status 400."""


def one_line(error: Exception) -> str:
    """What another library's exception says, for use in a message: its first line, and what a colon there announces."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])
