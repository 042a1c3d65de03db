"""The `dflash-diag` command: one probe, one subcommand; a probe's docstring is its help."""

import sys
from collections.abc import Callable

import click

from diagnostics.probes import env, fxrace
from diagnostics.render import json, text
from diagnostics.reproducers import reproducers
from diagnostics.verdict import Status, Verdict

_EXIT_CODES = "Exit codes: 0 nothing wrong, 1 something found, 2 usage, 3 could not check."


@click.group(
    epilog=_EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="dflash-diag", prog_name="dflash-diag")
def main() -> None:
    """Find out what is wrong with a threaded training run, or with the way it is launched."""


def _add_probe(name: str, probe: Callable[[], Verdict]) -> None:
    @main.command(name, help=probe.__doc__, epilog=_EXIT_CODES)
    @click.option("--json", "as_json", is_flag=True, help="print one JSON object")
    def command(as_json: bool) -> None:
        verdict = probe()
        click.echo((json if as_json else text).render(verdict))
        sys.exit(verdict.exit_code)


_add_probe("env", env.probe)


@main.command("fxrace", epilog=_EXIT_CODES)
@click.option("--mode", multiple=True, metavar="DFNNN", help="only this failure; repeatable")
@click.option("--cure", multiple=True, metavar="NAME", help="only this cure; repeatable")
@click.option("--quick", is_flag=True, help="the flag race alone, without and with its cure")
@click.option("--full", is_flag=True, help="every cure at start-up and later")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def fxrace_command(
    mode: tuple[str, ...], cure: tuple[str, ...], quick: bool, full: bool, as_json: bool
) -> None:
    """Reproduce what goes wrong when threads use torch.compile at the same time.

    Runs every reproducer without a cure and with each cure on the installed torch, and shows the
    table row by row. BAD: it happens. holds: it happens without the cure and not with it. absent:
    it does not happen here. ?, crash, HANG: the run could not tell. -: there was nothing to cure.
    """
    if quick:
        mode, cure = ("DF001",), ("thread-local-flag",)
    if unknown := sorted(set(mode) - set(reproducers())):
        raise click.BadParameter(f"{unknown[0]} is none of {', '.join(reproducers())}")
    show = (lambda _line: None) if as_json else click.echo
    try:
        verdict = fxrace.judge(fxrace.measure([*fxrace.arguments(mode, cure, full)], show))
    except RuntimeError as error:
        verdict = Verdict(Status.UNKNOWN, "reproducers-did-not-run", str(error))
    click.echo(json.render(verdict) if as_json else f"\n{text.render(verdict, evidence=False)}")
    sys.exit(verdict.exit_code)
