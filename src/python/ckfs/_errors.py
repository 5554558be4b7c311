"""Exceptions and warnings of this package."""

from __future__ import annotations

import errno
from collections.abc import Sequence


class Error(Exception):
    """A call failed. The text says what was expected and found, and what to do; `code` is the program's exit code."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class UsageError(Error, ValueError):
    """A setting has a value that is refused. `problems` has a text for each."""

    def __init__(self, message: str, code: int = 2, problems: Sequence[str] | None = None) -> None:
        super().__init__(message, code)
        self.problems = list(problems or [message])


class PlanError(Error):
    """The source, or the view that the settings ask for, is refused. `problems` has a text for each reason."""

    def __init__(self, message: str, code: int = 1, problems: Sequence[str] | None = None) -> None:
        super().__init__(message, code)
        self.problems = list(problems or [message])


class ReadError(Error, OSError):
    """Bytes do not come: the source has changed since it was opened, or gives no answer. What was to be filled holds anything."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message, code)
        self.errno = errno.EIO


class ForkError(Error):
    """The process was forked from one in which a checkpoint is open, and lacks its threads."""


class LoadError(Error):
    """A state does not fit the checkpoint. `missing`, `unexpected` and `mismatched` say what, by name."""

    def __init__(
        self,
        message: str,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        mismatched: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.missing, self.unexpected, self.mismatched = list(missing), list(unexpected), list(mismatched)


class PlanWarning(UserWarning):
    """Something about a source or a view that is no error."""
