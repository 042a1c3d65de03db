"""The options of `dflash-diag fxrace`, and which part of it answers them."""

import sys

import click

from diagnostics.probes.fxrace import table
from diagnostics.render import json, text
from diagnostics.reproducers import reproducers
from diagnostics.verdict import EXIT_CODES, Status, Verdict


@click.command("fxrace", epilog=EXIT_CODES)
@click.option("--mode", multiple=True, metavar="DFNNN", help="only this failure; repeatable")
@click.option("--cure", multiple=True, metavar="NAME", help="only this cure; repeatable")
@click.option("--quick", is_flag=True, help="the flag race alone, without and with its cure")
@click.option("--full", is_flag=True, help="every cure at start-up and later")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def fxrace(
    mode: tuple[str, ...], cure: tuple[str, ...], quick: bool, full: bool, as_json: bool
) -> None:
    """Reproduce what goes wrong when threads use torch.compile at the same time.

    Runs the reproducers without a cure and with the cures that matter (--full: all of them) on
    the installed torch, and shows the table row by row, with the meaning of its words.
    """
    if quick:
        mode, cure = ("DF001",), ("shipped",)
    if unknown := sorted(set(mode) - set(reproducers())):
        raise click.BadParameter(f"{unknown[0]} is none of {', '.join(reproducers())}")
    show = (lambda _line: None) if as_json else click.echo
    try:
        verdict = table.judge(table.measure([*table.arguments(mode, cure, full)], show))
    except RuntimeError as error:
        verdict = Verdict(Status.UNKNOWN, "reproducers-did-not-run", str(error))
    click.echo(json.render(verdict) if as_json else f"\n{text.render(verdict, evidence=False)}")
    sys.exit(verdict.exit_code)
