"""`dflash-diag report`: run every probe that applies, and put it all on one page."""

import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click

from diagnostics.everything import EXISTING, chosen, run_all, summed_up
from diagnostics.render import whole
from diagnostics.report.content import INTERLEAVINGS, LAUNCHES, Content, gather
from diagnostics.report.launches import WORDS
from diagnostics.verdict import EXIT_CODES

# A comment on GitHub takes no more characters; the parts that can be left out until it fits.
MARKDOWN_LIMIT = 65536
PARTS = ("launch script", "lines", "stacks", "races", "planted bugs", "launches", "environment")
CUT = "\n\n(cut here: too long for a comment)\n"


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
    if output.suffix not in RENDERERS:
        raise click.UsageError(f"-o {output}: must end in {' or '.join(RENDERERS)}")
    if not output.absolute().parent.is_dir():
        raise click.UsageError(f"-o {output}: there is no directory {output.absolute().parent}")
    asked, left_out = chosen(quick, config, launch, run, manifest)
    beside = [] if quick else [INTERLEAVINGS]
    answers = run_all([*asked, *beside], click.echo)
    told, measured = answers[: len(asked)], answers[len(asked) :]
    measured += run_all([LAUNCHES], click.echo)  # alone: a busy machine loses more
    verdict = summed_up(told, left_out)
    from diagnostics.environment.command import fingerprint

    click.echo("the environment")
    content = gather(told, left_out, verdict, measured, fingerprint(None))
    # For the user only: it tells much about the machine.
    whole.write(output, RENDERERS[output.suffix](content), 0o600)
    click.echo(f"{verdict.status}: {verdict.summary}\nwritten: {output}")
    sys.exit(verdict.exit_code)


def html(content: Content) -> str:
    """The page; whatever was found is escaped."""
    return _rendered("page.html.j2", content, autoescape=True, launch_words=WORDS)


def markdown(content: Content) -> str:
    """The text to paste. The longest parts are left out until it fits a comment; it says so."""
    dropped: list[str] = []
    while True:
        text = _rendered("page.md.j2", content, dropped=dropped)
        rest = [part for part in PARTS if part not in dropped]
        if len(text) <= MARKDOWN_LIMIT:
            return text
        if not rest:
            return text[: MARKDOWN_LIMIT - len(CUT)] + CUT
        without = {
            part: len(_rendered("page.md.j2", content, dropped=[*dropped, part])) for part in rest
        }
        dropped.append(min(rest, key=without.__getitem__))


RENDERERS = {".html": html, ".md": markdown}


def _rendered(template: str, content: Content, autoescape: bool = False, **more: Any) -> str:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=autoescape,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"cell": _cell, "fenced": _fenced}
    return environment.get_template(template).render(content=content, version=_version(), **more)


def _cell(text: object) -> str:
    """Text for a cell of a Markdown table, or a line: of its own markup only code in backticks."""
    line = " ".join(str(text).split())
    escaped = re.sub(r"(`[^`]*`)|([\\_*~\[\]<])", lambda m: m[1] or f"\\{m[2]}", line)
    return escaped.replace("|", "\\|")


def _fenced(text: str) -> str:
    """A block of code that nothing in it can end."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"


def _version() -> str:
    try:
        return version("dflash-diag")
    except PackageNotFoundError:
        return "(not installed)"
