"""Command-line options derived from the configuration tree: one section, one help group.

Every click option defaults to None, "not given", so that a --config file can fill the gap before
the dataclass default does. The merged values are validated once, as a whole.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from dflash.config import SECTIONS, TrainConfig, read_toml
from dflash.errors import ConfigError, DflashError, Exit
from dflash.fields import Option, Section, as_text, flag_of, key_of

_NUMBERS: dict[Any, Any] = {
    int: click.INT,
    int | None: click.INT,
    float: click.FLOAT,
    float | None: click.FLOAT,
}


CHECK_THE_FILE = "Look whether it is there, whether you may use it, and whether the disk has room."


class DflashCommand(click.Command):
    """A command that reports a DflashError as message and remedy, without a traceback.

    Its callback gets one value of each class in `sections`, under that name, validated.
    """

    def __init__(
        self, *args: Any, sections: Mapping[str, type[Section]] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.sections = sections or {}
        self.params.extend(section_options(self.sections))

    def invoke(self, ctx: click.Context) -> Any:
        with reported(ctx):
            for name, cls in self.sections.items():
                given = {f.name: ctx.params.pop(f.name) for f in dataclasses.fields(cls)}  # type: ignore[arg-type]  # dataclasses
                ctx.params[name] = cls(**{k: v for k, v in given.items() if v is not None})
            return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """One titled group for each section, in their order."""
        groups: dict[str, list[tuple[str, str]]] = {"Options": []}
        for param in self.get_params(ctx):
            title = param.title if isinstance(param, SectionOption) else "Options"
            if record := param.get_help_record(ctx):
                groups.setdefault(title, []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)


class ConfigCommand(DflashCommand):
    """A command that takes every option of TrainConfig; its callback gets the `config`.

    Options of its own come to the callback as they are.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._own = tuple(self.params)
        self.params.append(_config_file_option())
        self.params.extend(section_options(SECTIONS))

    def invoke(self, ctx: click.Context) -> Any:
        with reported(ctx):
            own = {param.name for param in self._own}
            others = {name: value for name, value in ctx.params.items() if name in own}
            given = {name: value for name, value in ctx.params.items() if name not in own}
            ctx.params = {"config": self._resolve(**given), **others}
        return super().invoke(ctx)

    def _resolve(self, config_file: Path | None, **given: Any) -> TrainConfig:
        """Defaults, overridden by the file, overridden by the command line; validated once."""
        nested = read_toml(config_file) if config_file else {}
        for param in self.params:
            if isinstance(param, SectionOption) and given[param.field.name] is not None:
                table = nested.setdefault(param.section, {})
                table[key_of(param.field.name)] = given[param.field.name]
        return TrainConfig.from_dict(nested, source=str(config_file))


class SectionOption(click.Option):
    """The click option of one field of one section."""

    def __init__(self, section: str, title: str, field: dataclasses.Field[Any]) -> None:
        about: Option = field.metadata["option"]
        flag = flag_of(field.name)
        super().__init__(
            [f"{flag}/--no-{flag[2:]}" if field.type is bool else flag],
            type=click.Choice(about.choices) if about.choices else _NUMBERS.get(field.type),
            metavar=about.unit and about.unit.upper().replace(" ", "-"),
            help=about.help + _default_note(field),
            default=None,  # not given: a flag's would be off, and override the file
        )
        self.section = section
        self.title = title
        self.field = field


def section_options(sections: Mapping[str, type[Any]]) -> list[click.Parameter]:
    """The options of the sections' fields; a section's docstring is its title in `--help`."""
    return [
        SectionOption(name, cls.__doc__ or name, field)
        for name, cls in sections.items()
        for field in dataclasses.fields(cls)
    ]


def _default_note(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        return "  [required]"
    if field.default is None:
        return ""
    default = {True: "on", False: "off"}.get(field.default) if field.type is bool else None
    return f"  [default: {default or as_text(field.default)}]"


def _config_file_option() -> click.Option:
    return click.Option(
        ["--config", "config_file"],
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="TOML",
        help="read options from this file; the command line overrides it",
    )


@contextmanager
def reported(ctx: click.Context) -> Iterator[None]:
    """Turn what went wrong into click's errors: usage, message, remedy, exit code."""
    try:
        yield
    except ConfigError as error:
        help_of = f"Run `{ctx.command_path} --help` for every option, its unit and its default."
        remedy = help_of if error.remedy is ConfigError.remedy else error.remedy
        raise click.UsageError(f"{error}\n{remedy}", ctx) from error
    except DflashError as error:
        click.echo(f"Error: {error}\n{error.remedy}", err=True)
        ctx.exit(error.exit_code)
    except OSError as error:
        if error.filename is None:
            raise
        click.echo(f"Error: {error}\n{CHECK_THE_FILE}", err=True)
        ctx.exit(Exit.FAILED)
    except KeyboardInterrupt:
        ctx.exit(Exit.INTERRUPTED)
