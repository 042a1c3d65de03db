"""The rules as pages: `dflash-diag explain DL004`, and docs/launch-findings.md.

python -m diagnostics.launch.pages > docs/launch-findings.md
"""

from diagnostics.launch.rules import RULES
from diagnostics.launch.rules.rule import Rule, Severity

INTRODUCTION = """# What `dflash-diag launch-check` finds

<!-- Written by `python -m diagnostics.launch.pages` from its rules/: change those. -->

Each page says why, shows a launch that is wrong and one that is right, and when the finding may be
ignored. The tests try both launches. In a script, a comment silences a finding, at the end of the
line or alone above the command:

    # dflash-diag: ignore=DL004"""


def explain(rule: Rule) -> str:
    """One page as text."""
    given = f"\n\nGiven: {rule.given}." if rule.given else ""
    return (
        f"{rule.code}: {rule.title} ({rule.severity})\n\n{_folded(rule.why)}{given}\n\n"
        f"Wrong:\n\n{_code(rule.wrong)}\n\nRight:\n\n{_code(rule.right)}\n\n"
        f"{_folded('Ignore it if ' + rule.ignore)}"
    )


def page() -> str:
    """All of them as Markdown, behind a table of contents."""
    rows = [f"| [{r.code}](#{r.code.lower()}) | {r.title} | {r.severity} |" for r in RULES.values()]
    table = "\n".join(["| code | finding | severity |", "|---|---|---|", *rows])
    return "\n\n".join([INTRODUCTION, _severities(), table, *map(_section, RULES.values())]) + "\n"


def _severities() -> str:
    worst_first = "; ".join(severity.value for severity in Severity)
    return f"Severities, the worst first: {worst_first}."


def _section(rule: Rule) -> str:
    title, _, body = explain(rule).partition("\n\n")
    return f"## {rule.code}\n\n**{title.removeprefix(f'{rule.code}: ')}**\n\n{body}"


def _code(launch: str) -> str:
    return "\n".join(f"    {line}" for line in launch.splitlines())


def _folded(text: str, width: int = 100) -> str:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


if __name__ == "__main__":
    print(page(), end="")
