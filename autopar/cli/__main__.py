"""``python -m autopar.cli``."""

from autopar.cli.main import main

main()
