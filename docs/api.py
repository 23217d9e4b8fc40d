"""Builds the API reference of every module with pdoc; a warning is an error.

python docs/api.py FOLDER
"""

from __future__ import annotations

import pkgutil
import sys
import warnings
from pathlib import Path

import pdoc

import autopar


def modules() -> list[str]:
    """The package and all in it; pdoc walks into packages, but into this one only by ``__all__``."""
    inside = [m.name for m in pkgutil.iter_modules(autopar.__path__) if m.name not in autopar.__all__]
    return ["autopar", *(f"autopar.{name}" for name in inside)]


warnings.simplefilter("error")
for public in autopar.__all__:
    getattr(autopar, public)  # loaded on first use, and only then seen by pdoc
pdoc.render.configure(docformat="google")
pdoc.pdoc(*modules(), output_directory=Path(sys.argv[1]))
