"""`python -m diagnostics`."""

from diagnostics.cli import main

main(prog_name="dflash-diag")
