"""The one exception that reaches a user: what is wrong, what to do, and the exit code."""

from __future__ import annotations

EXIT_FAILURE = 1
"""Something that should have worked did not."""
EXIT_USAGE = 2
"""The command line or its input was wrong (click's own convention)."""
EXIT_UNAVAILABLE = 3
"""What the command needs is not there: a process, a permission, a kernel feature, a database."""


class ArgusError(Exception):
    """An expected failure, shown to the user as one line, with no traceback.

    Args:
        message: What is wrong, in one line, naming the thing concerned.
        hint: What the user can do about it, in one line; may be empty.
        exit_code: The process's exit code.
    """

    def __init__(self, message: str, hint: str = "", exit_code: int = EXIT_FAILURE) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = exit_code

    def __str__(self) -> str:
        return f"{self.message}. {self.hint}" if self.hint else self.message
