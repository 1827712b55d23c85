"""`python -m fovea` is the `fovea` command."""

from fovea.cli import main

main()
