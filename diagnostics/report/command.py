"""`dflash-diag report`: run every probe that applies, and put it all on one page."""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click

from diagnostics.everything import EXISTING, chosen, run_all, summed_up
from diagnostics.render import whole
from diagnostics.report.content import Content, gather
from diagnostics.verdict import EXIT_CODES

TEMPLATES = {".html": "page.html.j2", ".md": "page.md.j2"}
STACKS_LIMIT_S = 60.0


@click.command("report", epilog=EXIT_CODES)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    metavar="FILE",
    help="report.html: one page without any network; report.md: for pasting",
)
@click.option("--quick", is_flag=True, help="the short form of those that have one")
@click.option("--config", type=EXISTING, metavar="run.toml", help="the run that is to start")
@click.option("--launch", type=EXISTING, metavar="SCRIPT", help="how it is launched")
@click.option("--run", type=EXISTING, metavar="DIR", help="a run's --output-dir: what is stuck")
@click.option("--manifest", type=EXISTING, metavar="FILE", help="of the dflash that is meant")
def report(
    output: Path,
    quick: bool,
    config: Path | None,
    launch: Path | None,
    run: Path | None,
    manifest: Path | None,
) -> None:
    """Run every probe that applies, and write one page about it, for an issue.

    Secrets are hidden as far as they can be told by their shape and their name.
    """
    if output.suffix not in TEMPLATES:
        raise click.UsageError(f"-o {output}: must end in {' or '.join(TEMPLATES)}")
    if not output.absolute().parent.is_dir():
        raise click.UsageError(f"-o {output}: there is no directory {output.absolute().parent}")
    asked, left_out = chosen(quick, config, launch, run, manifest)
    told = run_all(asked, click.echo)
    verdict = summed_up(told, left_out)
    from diagnostics.environment.command import fingerprint

    click.echo("the environment")
    content = gather(told, left_out, verdict, _stacks(run), fingerprint(None))
    # For the user only: it tells much about the machine.
    whole.write(output, rendered(content, TEMPLATES[output.suffix]), 0o600)
    click.echo(f"{verdict.status}: {verdict.summary}\nwritten: {output}")
    sys.exit(verdict.exit_code)


def rendered(content: Content, template: str) -> str:
    """The page; whatever was found is escaped."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=template.endswith(".html.j2"),
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["cell"] = lambda text: str(text).replace("|", "\\|").replace("\n", " ")
    return environment.get_template(template).render(content=content, version=_version())


def _stacks(run: Path | None) -> str:
    """The threads of a run, as `stacks` shows them."""
    if run is None:
        return ""
    command = [sys.executable, "-m", "diagnostics", "stacks", "--run", str(run)]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=STACKS_LIMIT_S
        ).stdout
    except subprocess.TimeoutExpired:
        return f"no answer within {STACKS_LIMIT_S:g} s"


def _version() -> str:
    try:
        return version("dflash-diag")
    except PackageNotFoundError:
        return "(not installed)"
