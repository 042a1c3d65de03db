"""The `dflash-diag` command: one probe, one subcommand; a probe's docstring is its help."""

import click

from diagnostics.deploy.command import deploy_check
from diagnostics.environment.command import env
from diagnostics.everything import everything
from diagnostics.launch.command import explain, launch_check
from diagnostics.launch.launch_command import launch
from diagnostics.preflight.command import preflight
from diagnostics.probes.fxrace.command import fxrace
from diagnostics.probes.gate_check import gate_check
from diagnostics.report.command import report
from diagnostics.stacks.command import stacks
from diagnostics.verdict import EXIT_CODES


@click.group(
    epilog=EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="dflash-diag", prog_name="dflash-diag")
def main() -> None:
    """Find out what is wrong with a threaded training run, or with the way it is launched."""


for command in (
    deploy_check,
    env,
    everything,
    explain,
    fxrace,
    gate_check,
    launch,
    launch_check,
    preflight,
    report,
    stacks,
):
    main.add_command(command)
