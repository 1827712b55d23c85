"""`python -m fovea` is the `fovea` command."""

from fovea.cli.main import main

main()
