"""`dflash-diag fxrace --log FILE`: which failures of concurrent torch.compile a log shows."""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from diagnostics.probes.fxrace import stacks
from diagnostics.probes.fxrace.signatures import LIMIT, Sighting, sightings
from diagnostics.redact import redact
from diagnostics.reproducers import reproducers
from diagnostics.verdict import Status, Verdict

SILENT = ("DF006", "DF007", "DF008")
# A line is read in pieces of so many characters: a progress bar can write megabytes without an end.
PIECE_CHARS = 65_536
# A trace lasts a fraction of a second: a flag that so many calls find set has been left set.
STICKY_FROM = 5
READ_CHARS, SHOWN_CHARS = 2000, 300


@dataclass
class Seen:
    """Every sighting of one failure in a log."""

    certain: int = 0
    uncertain: int = 0
    lines: list[int] = field(default_factory=lambda: [0, 0])
    exhibit: Sighting | None = None

    def add(self, sighting: Sighting) -> None:
        """Count it; the exhibit is the first certain one, or else the first."""
        if self.exhibit is None or (sighting.certain and not self.certain):
            self.exhibit = sighting
        self.certain += sighting.certain
        self.uncertain += not sighting.certain
        self.lines = [self.lines[0] or sighting.line, sighting.line]

    @property
    def count(self) -> int:
        """How often it was seen, certain or not."""
        return self.certain + self.uncertain

    def __str__(self) -> str:
        assert self.exhibit is not None  # there is one from the first sighting on
        first, last = self.lines
        often = "once" if self.count == 1 else f"{self.count} times, from line {first} to {last}"
        if self.certain and self.uncertain:
            often += f" ({self.certain} certain)"
        quote = redact(self.exhibit.seen[:READ_CHARS])[:SHOWN_CHARS]
        return f"{often}; line {self.exhibit.line}: {quote}"


@dataclass
class Findings:
    """What a log of so many lines and stacks shows: per code, and what only looks like it."""

    seen: dict[str, Seen] = field(default_factory=dict)
    lines: int = 0
    stacks: int = 0

    @property
    def codes(self) -> list[str]:
        """The failures, without the look-alikes."""
        return sorted(filter(None, self.seen))


def classify(numbered: Iterable[tuple[int, str]]) -> Findings:
    """Read a log once, line by line, keeping no more than counts and an exhibit of each failure."""
    findings, limits = Findings(), set[str]()
    for event in stacks.read(numbered):
        findings.lines = max(findings.lines, event.line)
        findings.stacks += not isinstance(event, stacks.Line)
        for sighting in sightings(event):
            findings.seen.setdefault(sighting.code, Seen()).add(sighting)
            limits.update(LIMIT.findall(sighting.seen))
    for inferred in _inferred(findings, limits):
        findings.seen.setdefault(inferred.code, Seen()).add(inferred)
    return findings


def _inferred(findings: Findings, limits: set[str]) -> Iterator[Sighting]:
    """What no single line shows, but all of them together do."""
    flag, overlap = findings.seen.get("DF001"), findings.seen.get("DF004")
    if flag and overlap and flag.lines[1] > overlap.lines[0]:
        seen = "DF001 goes on after two traces overlapped (DF004), which leaves the flag set"
        yield Sighting("DF002", flag.lines[1], seen, certain=False)
    elif flag and flag.count >= STICKY_FROM:
        seen = f"DF001 came {flag.count} times, and a trace lasts a fraction of a second"
        yield Sighting("DF002", flag.lines[1], seen, certain=False)
    named = {limit.partition(" (")[0] for limit in limits}
    if len(limits) > len(named):
        seen = f"one process, two settings: {', '.join(sorted(limits))}"
        yield Sighting("DF011", findings.seen["DF009"].lines[1], seen, certain=False)


def probe(path: Path) -> Verdict:
    """Say which failures of concurrent torch.compile a log, or a pasted traceback, shows."""
    try:
        with path.open(encoding="utf-8", errors="replace", newline="\n") as log:
            findings = classify(_numbered(log))
    except OSError as error:
        summary = f"--log {path}: cannot be read: {error.strerror or error}"
        return Verdict(Status.UNKNOWN, "log-unreadable", summary, remedy="Name a file of text.")
    if not findings.lines:
        summary = f"--log {path}: is empty, so it shows nothing"
        return Verdict(Status.UNKNOWN, "log-empty", summary, remedy="Name the log of a run.")
    return _judge(path, findings)


def _numbered(log: TextIO) -> Iterator[tuple[int, str]]:
    number = 1
    while piece := log.readline(PIECE_CHARS):
        yield number, piece
        number += piece.endswith("\n")


def _judge(path: Path, findings: Findings) -> Verdict:
    evidence = {code or "not the race": str(findings.seen[code]) for code in sorted(findings.seen)}
    evidence["read"] = f"lines: {findings.lines}, stacks: {findings.stacks}"
    if not findings.codes:
        summary = _nothing(path, "" in findings.seen)
        return Verdict(Status.OK, "concurrent-compile-not-in-log", summary, evidence)
    programs = reproducers()
    named = [_named(code, findings.seen[code], programs.get(code)) for code in findings.codes]
    remedy = "\n  ".join(_remedy(code, programs.get(code)) for code in findings.codes)
    summary = f"{path} shows {'; '.join(named)}"
    return Verdict(Status.PROBLEM, "concurrent-compile-in-log", summary, evidence, remedy)


def _nothing(path: Path, look_alike: bool) -> str:
    but = ", only an error that looks like one and needs no second thread" if look_alike else ""
    return (
        f"{path} shows none of these failures{but}. That does not say that the run had none: "
        f"{', '.join(SILENT)} leave nothing in a log, and the others may not have been logged"
    )


def _named(code: str, seen: Seen, program: Path | None) -> str:
    title = f" ({_page(program)['title']})" if program else ""
    return f"{'' if seen.certain else 'probably '}{code}{title}"


def _remedy(code: str, program: Path | None) -> str:
    if program is None:
        return f"{code}: see the failure's page in the documentation."
    check = f"Check the installed torch: dflash-diag fxrace --mode {code}"
    return f"{code}: {_page(program)['cure']} {check}"


def _page(program: Path) -> dict[str, str]:
    """Title and cure from a reproducer's docstring, which is read and not run."""
    page = ast.get_docstring(ast.parse(program.read_text(encoding="utf-8"))) or ""
    title = page.partition("\n")[0].partition(": ")[2].rstrip(".")
    cure = next((p for p in page.split("\n\n") if p.startswith("Cure: ")), "")
    return {"title": title, "cure": " ".join(cure.removeprefix("Cure: ").split())}
