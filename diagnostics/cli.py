"""The `dflash-diag` command: one probe, one subcommand; a probe's docstring is its help."""

import sys
from collections.abc import Callable

import click

from diagnostics.deploy.command import deploy_check
from diagnostics.environment.command import env
from diagnostics.everything import everything
from diagnostics.launch.command import explain, launch_check
from diagnostics.launch.launch_command import launch
from diagnostics.probes import preflight
from diagnostics.probes.fxrace.command import fxrace
from diagnostics.probes.gate_check import gate_check
from diagnostics.render import json, text
from diagnostics.report.command import report
from diagnostics.stacks.command import stacks
from diagnostics.verdict import EXIT_CODES, Verdict


@click.group(
    epilog=EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="dflash-diag", prog_name="dflash-diag")
def main() -> None:
    """Find out what is wrong with a threaded training run, or with the way it is launched."""


def _add_probe(name: str, probe: Callable[[], Verdict]) -> None:
    @main.command(name, help=probe.__doc__, epilog=EXIT_CODES)
    @click.option("--json", "as_json", is_flag=True, help="print one JSON object")
    def command(as_json: bool) -> None:
        verdict = probe()
        click.echo((json if as_json else text).render(verdict))
        sys.exit(verdict.exit_code)


_add_probe("preflight", preflight.probe)
main.add_command(env)
main.add_command(fxrace)
main.add_command(gate_check)
main.add_command(stacks)
main.add_command(deploy_check)
main.add_command(everything)
main.add_command(report)
main.add_command(launch_check)
main.add_command(explain)
main.add_command(launch)
