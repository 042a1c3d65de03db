"""`python -m dflash`."""

from dflash.cli import main

main(prog_name="dflash")
