"""`python -m hotlap` is the `hotlap` command."""

from hotlap.cli import main

main()
