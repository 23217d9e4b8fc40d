"""Language: the sentences of explanations, in English or Chinese; the English template is the key."""

from __future__ import annotations

from autopar.errors import InputError
from autopar.report.chinese import CHINESE

LANGUAGES = ("en", "zh")


class Language:
    """Says sentences in one language.

    Args:
        name: ``en`` or ``zh``.

    Raises:
        InputError: another name.
    """

    def __init__(self, name: str = "en") -> None:
        if name not in LANGUAGES:
            raise InputError(f"language {name!r} is unknown", f"Use one of {', '.join(LANGUAGES)}")
        self.name = name

    def say(self, template: str, **values: object) -> str:
        """The sentence with its values; a template without a translation stays English."""
        chosen = CHINESE.get(template, template) if self.name == "zh" else template
        return chosen.format(**values) if values else chosen


ENGLISH = Language()
