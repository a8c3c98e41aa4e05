"""The errors dpuflow raises on purpose, caught once at the command line.

    DpuflowError            exit 1: the input or the environment is at fault
    ├── CaptureError        a capture file cannot be read: names file and byte offset
    ├── FormatError         a file is whole but of a kind dpuflow does not read
    ├── OptionError         an option or a configuration value cannot be used
    ├── MissingError        an optional package, tool or privilege is not there
    └── TruthError          a truth or analysis file given to ``score`` is not usable

Data from outside raises; a broken promise inside asserts.
"""

from __future__ import annotations


class DpuflowError(Exception):
    """Base of all errors whose text is one sentence for the user."""

    exit_status = 1


class CaptureError(DpuflowError):
    """A capture cannot be read on from ``offset`` (bytes into the uncompressed stream)."""

    def __init__(self, file: str, offset: int, reason: str) -> None:
        super().__init__(f"{file}: {reason} at byte {offset}")
        self.file, self.offset, self.reason = file, offset, reason

    def __reduce__(self) -> tuple[type[CaptureError], tuple[str, int, str]]:
        """From one process to another."""
        return type(self), (self.file, self.offset, self.reason)


class FormatError(DpuflowError):
    """A file of a kind that dpuflow does not read."""

    def __init__(self, file: str, reason: str) -> None:
        super().__init__(f"{file}: {reason}")
        self.file, self.reason = file, reason

    def __reduce__(self) -> tuple[type[FormatError], tuple[str, str]]:
        """From one process to another."""
        return type(self), (self.file, self.reason)


class OptionError(DpuflowError):
    """An option or configuration value cannot be used; the text names it."""


class MissingError(DpuflowError):
    """Something optional is missing; the text says what to install or allow."""


class TruthError(DpuflowError):
    """A truth, meta or analysis file cannot be used for scoring."""
