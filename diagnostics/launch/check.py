"""Read a launch, try every rule on it, and mend what can be mended safely."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from diagnostics.launch.layers import Launch, read
from diagnostics.launch.rules import RULES
from diagnostics.launch.rules.rule import Edit, Hit, Rule, Severity, applied
from diagnostics.launch.shell import Source

IGNORE = re.compile(r"#\s*dflash-diag:\s*ignore=([A-Z0-9, ]+)")
ROUNDS = 30


@dataclass(frozen=True)
class Finding:
    """A hit and its rule; `mended` are the lines as they should be, empty if none are safe."""

    rule: Rule
    hit: Hit
    mended: str = ""


@dataclass(frozen=True)
class Report:
    """What was found, what could not be checked, and how many findings a comment silenced.

    `mended` is the launch with all safe changes made; empty if there are none.
    """

    launch: Launch
    findings: tuple[Finding, ...]
    unknown: tuple[Finding, ...]
    ignored: int
    mended: str = ""


def check(source: Source) -> Report:
    """All findings, the worst first. A mended text is one that was read again and is better."""
    launch = read(source)
    found = _findings(launch)
    shown = [f for f in found if not _is_ignored(f)]
    findings = [_with_mending(f, launch) for f in shown if not f.hit.unknown]
    unknown = tuple(f for f in shown if f.hit.unknown)
    ignored = len(found) - len(shown)
    return Report(launch, tuple(findings), unknown, ignored, _all_mended(launch, findings))


def _findings(launch: Launch) -> list[Finding]:
    found = {
        (rule.code, hit.span): Finding(rule, hit)
        for rule in RULES.values()
        for hit in rule.find(launch)
    }
    order = [*Severity]
    files = [shell.script.text.source for shell in launch.shells]

    def rank(finding: Finding) -> tuple[int, int, int]:
        span = finding.hit.span
        return order.index(finding.rule.severity), files.index(span.source), span.start

    return sorted(found.values(), key=rank)


def _is_ignored(finding: Finding) -> bool:
    """A comment at the end of the line, or alone above the command, names the code."""
    span = finding.hit.span
    lines = span.source.text.split("\n")
    at = span.line - 1
    if finding.rule.code in _codes(lines[at]):
        return True
    while at > 0 and lines[at - 1].endswith("\\"):
        at -= 1
    above = lines[at - 1].strip() if at else ""
    return above.startswith("#") and finding.rule.code in _codes(above)


def _codes(line: str) -> list[str]:
    return [code.strip() for found in IGNORE.findall(line) for code in found.split(",")]


def _with_mending(finding: Finding, launch: Launch) -> Finding:
    """With the lines as they should be, if reading them again shows that they are better."""
    source = finding.hit.span.source
    new = _mended(source, finding.hit.edits)
    if new == source or not _better(launch, _again(launch, new), finding):
        return finding
    old_lines = source.text.splitlines()
    changed = [line for line in new.text.splitlines() if line not in old_lines]
    return Finding(finding.rule, finding.hit, "\n".join(changed))


def _again(launch: Launch, source: Source) -> Launch:
    """The launch, read with another text in place of one of its sources."""
    if source.path == launch.source.path and source.name == launch.source.name:
        return read(source)
    assert source.path is not None
    return read(launch.source, {source.path: source.text})


def _mended(source: Source, edits: Iterable[Edit]) -> Source:
    return replace(source, text=applied(source.text, edits))


def _better(old: Launch, new: Launch, mended: Finding) -> bool:
    """The finding is gone, no other has come, and the text still parses."""
    before, after = _counts(old), _counts(new)
    parses = all(shell.script.broken is None for shell in new.shells)
    code, reveals = mended.rule.code, mended.hit.reveals
    worse = any(after[other] > before[other] for other in after if other != reveals)
    return parses and after[code] < before[code] and not worse


def _counts(launch: Launch) -> Counter[str]:
    return Counter(f.rule.code for f in _findings(launch) if not f.hit.unknown)


def _all_mended(launch: Launch, findings: list[Finding]) -> str:
    """One change after the other, each on the text that the one before left."""
    if sum(1 for f in findings if f.mended and f.hit.span.source == launch.source) < 2:
        return ""
    now = launch
    for _ in range(ROUNDS):
        better = next(_improvements(now), None)
        if better is None:
            break
        now = better
    return now.source.text


def _improvements(launch: Launch) -> Iterator[Launch]:
    for finding in _findings(launch):
        if finding.hit.edits and finding.hit.span.source == launch.source:
            new = read(_mended(launch.source, finding.hit.edits))
            if not _is_ignored(finding) and _better(launch, new, finding):
                yield new
