"""Every error that autopar raises on purpose.

Each carries what was wrong, which value, and what would work, so that the command line can print one clear line.
"""

from __future__ import annotations


class AutoparError(Exception):
    """Base of all errors that are the user's to mend; the command line ends with :attr:`exit_code`.

    Args:
        what: what is wrong, with the offending name and value.
        remedy: what would work instead.
    """

    exit_code = 2

    def __init__(self, what: str, remedy: str = "") -> None:
        self.what, self.remedy = what, remedy
        super().__init__(f"{what}. {remedy}" if remedy else what)


class InputError(AutoparError):
    """A file, argument or value that the user gave cannot be used."""


class ModelError(AutoparError):
    """model.py (or a Hugging Face config) cannot be loaded or built."""


class CaptureError(AutoparError):
    """The model cannot be captured as an operator graph; names the module path and the source line."""


class ProfileError(AutoparError):
    """A device, cluster or measured-profile file is missing, malformed or does not belong here."""


class PlanError(AutoparError):
    """A plan does not match its model, its cluster or itself."""


class NoPlanFits(AutoparError):
    """No plan fits in memory; names the nearest miss and what would make it fit."""

    exit_code = 3


class RunError(AutoparError):
    """A run that had started failed."""

    exit_code = 1
