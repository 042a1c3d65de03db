"""The rules of `dflash-diag launch-check`, one module a subject."""

from diagnostics.launch.rules import (
    buffering,
    directories,
    hangup,
    paths,
    pids,
    pipes,
    places,
    programs,
    sessions,
    trainer,
    wrappers,
)
from diagnostics.launch.rules.rule import Rule

MODULES = (
    directories,
    paths,
    pipes,
    buffering,
    pids,
    hangup,
    sessions,
    wrappers,
    places,
    programs,
    trainer,
)
RULES: dict[str, Rule] = {
    rule.code: rule
    for rule in sorted((r for module in MODULES for r in module.RULES), key=lambda r: r.code)
}
