"""The end of a command that answers with one verdict."""

import sys
from typing import NoReturn

import click

from diagnostics.render import json, text
from diagnostics.verdict import Verdict


def finish(verdict: Verdict, as_json: bool) -> NoReturn:
    """Show the verdict, and exit with its code."""
    click.echo((json if as_json else text).render(verdict))
    sys.exit(verdict.exit_code)
