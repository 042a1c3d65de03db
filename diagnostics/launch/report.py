"""A report as text and as a verdict: what is wrong, where, why, and what to write instead."""

import textwrap
from collections import Counter
from dataclasses import dataclass, replace
from difflib import ndiff

from diagnostics.launch.check import Finding, Report
from diagnostics.launch.layers import Chain
from diagnostics.launch.rules.rule import Severity
from diagnostics.launch.shell import Span
from diagnostics.redact import redact
from diagnostics.render.junit import Case
from diagnostics.reproducers import Outcome
from diagnostics.verdict import Status, Verdict

WIDTH = 96
SHORT = 8  # lines


@dataclass(frozen=True)
class Shown:
    """A finding for scripts. Lines and columns count from 1; `instead` is empty if none is known.

    `severity` is one of the rules', or `unknown` for what could not be checked.
    """

    code: str
    severity: str
    file: str
    line: int
    column: int
    text: str
    title: str
    what: str
    why: str
    instead: str
    ignore_when: str


@dataclass(frozen=True)
class LaunchVerdict(Verdict):
    """A verdict with its findings, the worst first, and the command as it should be, if known."""

    findings: tuple[Shown, ...] = ()
    ignored: int = 0
    mended: str = ""


def verdict(report: Report) -> LaunchVerdict:
    """Anything found is a problem; nothing found where something could not be seen is unknown."""
    unseen = _plural(len(report.unknown), "thing") + " cannot be checked from here"
    found = LaunchVerdict(
        Status.OK,
        "launch-keeps",
        "nothing found that loses the run, its log or its status",
        evidence=_evidence(report.launch.trainer),
        findings=tuple(map(_shown, (*report.findings, *report.unknown))),
        ignored=report.ignored,
        mended=redact(report.mended),
    )
    if report.findings:
        also = f"; {unseen}" if report.unknown else ""
        counted = Counter(f.rule.severity for f in report.findings)
        parts = ", ".join(f"{counted[s]} {_verb(s, counted[s])}" for s in Severity if counted[s])
        summary = f"{_plural(len(report.findings), 'finding')}: {parts}{also}"
        return replace(found, status=Status.PROBLEM, code="launch-loses", summary=summary)
    if report.launch.trainer is None or report.launch.trainer.bare:
        remedy = "name the whole launch: dflash-diag launch-check -- 'COMMAND > LOG 2>&1'"
        summary = "no program that trains was found in it"
        return replace(
            found, status=Status.UNKNOWN, code="no-trainer", summary=summary, remedy=remedy
        )
    if report.unknown:
        summary = f"nothing found, but {unseen}"
        return replace(found, status=Status.UNKNOWN, code="launch-not-seen", summary=summary)
    if not report.launch.trainer.understood:
        summary = f"what {_starter(report.launch.trainer)} starts cannot be read"
        remedy = "name what it starts: dflash-diag launch-check -- 'COMMAND >> LOG 2>&1'"
        return replace(
            found, status=Status.UNKNOWN, code="launch-not-read", summary=summary, remedy=remedy
        )
    return found


def _starter(chain: Chain) -> str:
    """The program, or the script, at which reading ended."""
    return redact((chain.unread or chain.program.command.words[0]).value)


def _evidence(chain: Chain | None) -> dict[str, str]:
    """What was taken for the program, so that the user sees whether the launch was understood."""
    if chain is None:
        return {}
    layers, program = chain.layers, chain.program
    trains = " ".join(program.command.span.text.split())
    unread = " (a script that cannot be read here)" if chain.unread else ""
    found = {"trains": redact(textwrap.shorten(trains, WIDTH)) + unread}
    if through := " > ".join(layer.name for layer in layers[:-1]):
        found["through"] = through
    if not program.place.here:
        found["on"] = str(program.place)
    guarded = {"nohup", "setsid"} & {*chain.names()}
    detached = any(layer.handed and layer.handed.detached for layer in layers)
    background = any(layer.own and layer.pipeline.background for layer in layers)
    typed = layers[0].shell.kind == "command line"
    if typed and not (guarded or detached or background):
        found["hang-up"] = "it lives as long as the terminal that it is typed in"
    return found


def _verb(severity: Severity, count: int) -> str:
    return severity.value if count == 1 else severity.replace("s ", " ", 1)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def cases(report: Report) -> list[Case]:
    """Every finding as an experiment of JUnit's."""
    return [
        Case(
            f.hit.span.source.name,
            f"{f.rule.code} line {f.hit.span.line}",
            Outcome.CANNOT_TELL if f.hit.unknown else Outcome.REPRODUCED,
            redact(f"{f.rule.title}: {f.hit.what}"),
        )
        for f in (*report.findings, *report.unknown)
    ]


def _shown(finding: Finding) -> Shown:
    rule, hit = finding.rule, finding.hit
    return Shown(
        rule.code,
        "unknown" if hit.unknown else rule.severity,
        hit.span.source.name,
        hit.span.line,
        hit.span.column,
        redact(hit.span.text),
        rule.title,
        redact(hit.what),
        "" if hit.unknown else hit.why or rule.why,
        redact(finding.mended or hit.instead),
        rule.ignore,
    )


def render(report: Report) -> str:
    """All findings, then what cannot be checked, then the whole command as it should be."""
    blocks = [_block(finding) for finding in report.findings]
    blocks += [_unknown(report)] if report.unknown else []
    if report.mended:
        title = f"{report.launch.source.name} with all of these changes:"
        blocks.append("\n  ".join([title, *_changes(report)]))
    if report.ignored:
        blocks.append(f"{_plural(report.ignored, 'finding')} ignored by a comment")
    return "\n\n".join(blocks)


def _changes(report: Report) -> list[str]:
    """The whole text if it is short, otherwise the lines that differ."""
    old, new = redact(report.launch.source.text), redact(report.mended)
    if new.count("\n") < SHORT:
        return new.splitlines()
    return [line for line in ndiff(old.splitlines(), new.splitlines()) if line[0] in "+-"]


def _block(finding: Finding) -> str:
    rule, hit = finding.rule, finding.hit
    if finding.mended or hit.instead:
        label = "write" if finding.mended else "try"
        write = _labelled(label, redact(finding.mended or hit.instead))
    else:
        write = _labelled("like", rule.right)
    return "\n".join(
        [
            f"{rule.code} {rule.severity}: {rule.title}",
            *_caret(hit.span, redact(hit.what)),
            *_fold("why", hit.why or rule.why),
            *write,
            *_fold("ignore", f"if {rule.ignore}"),
        ]
    )


def _caret(span: Span, what: str) -> list[str]:
    """The line with the span underlined; a long one is cut on both sides."""
    line = span.typed_line
    start = span.column - 1
    end = min(len(line), start + max(1, len(span.text.split("\n")[0])))
    left = max(0, min(start - 20, len(line) - WIDTH)) if len(line) > WIDTH else 0
    right = min(len(line), left + WIDTH)
    front, middle, behind = (
        redact(part) for part in (line[left:start], line[start:end], line[end:right])
    )
    head = f"  {span.source.name}:{span.line}:{span.column}"
    cut = "..." if left else ""
    text = f"    {cut}{front}{middle}{behind}{'...' if right < len(line) else ''}"
    under = " " * (4 + len(cut) + len(front)) + "^" * max(1, min(len(middle), WIDTH))
    if len(under) + len(what) <= WIDTH:
        return [head, text.replace("\t", " "), f"{under} {what}"]
    return [head, text.replace("\t", " "), under, *_fold("what", what)]


def _labelled(label: str, text: str) -> list[str]:
    """Lines that are to be copied: never folded."""
    first, *rest = text.splitlines() or [""]
    return [f"  {label:<7}{first}", *(f"         {line}" for line in rest)]


def _fold(label: str, text: str) -> list[str]:
    words, lines = text.split(), [""]
    for word in words:
        if len(lines[-1]) + len(word) > WIDTH - 9:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return [f"  {label:<7}{lines[0]}", *(f"         {line}" for line in lines[1:])]


def _unknown(report: Report) -> str:
    lines = ["cannot be checked from here:"]
    for f in report.unknown:
        lines.append(f"  {f.rule.code} {redact(f.hit.what)}")
        lines.append(f"        {redact(f.hit.instead)}")
    return "\n".join(lines)
