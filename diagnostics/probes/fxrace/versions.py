"""`--torch` and `--bisect`: the same failures on several versions of torch, each measured."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import click
from packaging.version import InvalidVersion, Version

from diagnostics.probes.fxrace import table
from diagnostics.probes.fxrace.bisection import first_without
from diagnostics.probes.fxrace.environments import Offer, Unavailable, Workshop
from diagnostics.reproducers import Outcome
from diagnostics.verdict import Status, Verdict

OLDEST = Version("2.9")  # older ones lack what the reproducers import
# A row is a version or, indented, a cure or a moment on it.
FIRST_COLUMN = 24


def parse(text: str) -> list[str]:
    """`2.11.0,2.13.0` as a list, oldest first. Raises click.BadParameter."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    try:
        return sorted(dict.fromkeys(names), key=Version)
    except InvalidVersion as error:
        raise click.BadParameter(
            f"{error}. Type versions with commas between: --torch 2.11.0,2.13.0"
        ) from error


def ask(yes: bool) -> Callable[[str], bool]:
    """How consent to a download is got: `--yes`, or a question on a terminal, or not at all."""
    return lambda question: yes or (sys.stdin.isatty() and click.confirm(question, err=True))


class Versions:
    """Several versions of torch: what pip offers for each, and what was measured on it."""

    def __init__(
        self, workshop: Workshop, arguments: Sequence[str], show: Callable[[str], None]
    ) -> None:
        """`arguments`: those of repro/cells.py."""
        self._workshop, self._arguments, self._show = workshop, arguments, show
        self._pythons: dict[str, Path] = {}
        self._offers: dict[str, Offer] = {}
        self._reports: dict[str, table.Report] = {}
        self.unavailable: dict[str, str] = {}

    def stable(self) -> list[str]:
        """The releases that pip lists, oldest first: no previews, and one of all builds of each."""
        listed = {Version(text) for text in self._workshop.offered()}
        kept = (one for one in listed if not one.is_prerelease and one >= OLDEST)
        return [str(one) for one in sorted({Version(one.public) for one in kept})]

    def survey(self, versions: Sequence[str]) -> None:
        """Find each among the environments made before, or ask pip for it."""
        for version in versions:
            if made := self._workshop.made(version):
                self._pythons[version] = made
                self._show(f"torch {version}: environment made before: {made.parents[1]}")
                continue
            try:
                self._offers[version] = self._workshop.offer(version)
                self._show(str(self._offers[version]))
            except Unavailable as error:
                self.unavailable[version] = str(error)
                self._show(f"cannot be had: {error}")

    def to_ask_for(self) -> str:
        """What would be downloaded and is too much to do unasked; empty if nothing is."""
        return "\n".join(str(offer) for offer in self._offers.values() if offer.needs_consent)

    def prepare(self, version: str) -> None:
        """Make the environment, if it is not there yet."""
        if version in self._pythons or version in self.unavailable:
            return
        try:
            self._pythons[version] = self._workshop.make(version, self._offers[version])
        except Unavailable as error:
            self.unavailable[version] = str(error)
            self._show(f"could not be made: {error}")

    def report(self, version: str) -> table.Report | None:
        """The cells on one version, measured once and shown; None if they did not run."""
        self.prepare(version)
        if version not in self._reports and version not in self.unavailable:
            try:
                self._reports[version] = self._measured(version)
            except RuntimeError as error:
                self.unavailable[version] = str(error)
                self._show(f"{version:<{FIRST_COLUMN}}could not be measured: {error}")
        return self._reports.get(version)

    def _measured(self, version: str) -> table.Report:
        report = table.measure(self._arguments, _silent, python=str(self._pythons[version]))
        for line in rows(report, head=not self._reports):
            self._show(line)
        return report

    def has(self, code: str, version: str) -> bool | None:
        """Whether a version has a failure; None if that could not be told."""
        report = self.report(version)
        cell = report.cell(code, table.NO_CURE, table.LATER) if report else None
        if cell is None or cell.manner:  # absent, but only because something else hides it
            return None
        return {Outcome.REPRODUCED: True, Outcome.ABSENT: False}.get(cell.outcome)


def _silent(_line: str) -> None:
    """The rows of one version are shown as part of the table of all."""


def rows(report: table.Report, *, head: bool) -> list[str]:
    """One version: its row without a cure, then one for each cure and moment that was tried.

    `head`: with the names of the columns in front.
    """
    codes = sorted({cell.code for cell in report.cells}, key=lambda c: (c == table.COST, c))
    shown = [_row("\ntorch", codes)] if head else []
    for cure, when in dict.fromkeys((cell.cure, cell.when) for cell in report.cells):
        title = report.torch if cure == table.NO_CURE else f"  {cure}"
        words = [report.word(code, cure, when) for code in codes]
        shown.append(_row(table.MOMENTS.get(when, title), words))
    return shown


def _row(title: str, words: Sequence[str]) -> str:
    width = FIRST_COLUMN + title.startswith("\n")
    return f"{title:<{width}}" + "".join(f"{word:<6}" for word in words).rstrip()


def refused(question: str) -> Verdict:
    """Nothing was measured, because nobody agreed to the download."""
    return Verdict(
        Status.UNKNOWN,
        "download-not-agreed",
        f"nothing was downloaded, so nothing was measured:\n{question}",
        remedy="Type --yes to agree, or let pip find CPU builds, which are far smaller: "
        "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu",
    )


def compare(versions: Versions, names: Sequence[str]) -> Verdict:
    """Which version has which failure: a problem if any has one, unknown if any could not tell."""
    for name in names:  # all of them first, so that nothing stands between the rows of the table
        versions.prepare(name)
    reports = {name: report for name in names if (report := versions.report(name))}
    verdicts = {name: table.judge(report) for name, report in reports.items()}
    evidence = {
        f"{n} {key}": value for n, v in verdicts.items() for key, value in v.evidence.items()
    }
    evidence |= _not_measured(versions)
    statuses = {verdict.status for verdict in verdicts.values()}
    if versions.unavailable:
        statuses.add(Status.UNKNOWN)
    status = next(one for one in (Status.PROBLEM, Status.UNKNOWN, Status.OK) if one in statuses)
    summary = "; ".join(_sentence(name, reports.get(name)) for name in names)
    return Verdict(status, f"concurrent-compile-versions-{status}", summary, evidence)


def _not_measured(versions: Versions) -> dict[str, str]:
    return {name: f"not measured: {why}" for name, why in versions.unavailable.items()}


def _sentence(name: str, report: table.Report | None) -> str:
    if report is None:
        return f"{name} was not measured"
    bare = [c for c in report.cells if (c.cure, c.when) == (table.NO_CURE, table.LATER)]
    bad = sorted(cell.code for cell in bare if cell.outcome is Outcome.REPRODUCED)
    told = table.judge(report).status is not Status.UNKNOWN
    return f"{name} has {', '.join(bad) or 'none'}" if told else f"{name} could not tell"


def bisect(versions: Versions, names: Sequence[str], codes: Sequence[str]) -> Verdict:
    """The first version in which each failure is gone, found by measuring and never by number.

    Assumes that what is gone stays gone; the status is ok if every failure has its boundary.
    """
    usable = [name for name in names if name not in versions.unavailable]
    found = {code: first_without(usable, partial(versions.has, code)) for code in codes}
    says = {
        code: f"gone in {b.first_without}, last seen in {b.last_with}" if b.first_without else b.why
        for code, b in found.items()
    }
    evidence = {**says, "versions": ", ".join(usable)}
    evidence |= _not_measured(versions)
    untold = [code for code in codes if not found[code].first_without]
    if untold:
        summary = "; ".join(f"{code}: cannot tell: {found[code].why}" for code in untold)
        return Verdict(Status.UNKNOWN, "concurrent-compile-bisect-unknown", summary, evidence)
    summary = "; ".join(f"{code} is {says[code]}" for code in codes)
    summary += " (if what is gone stays gone: not every version was measured)"
    return Verdict(Status.OK, "concurrent-compile-bisected", summary, evidence)
