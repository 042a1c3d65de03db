"""Two fingerprints side by side: what is the same, differs, is missing, is too much."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diagnostics.deploy import fingerprint
from diagnostics.verdict import Status, Verdict

SHOWN = 20


@dataclass(frozen=True)
class Comparison:
    """Relative paths, sorted. `expected` and `found` are the files of the fingerprints."""

    expected: Mapping[str, Any]
    found: Mapping[str, Any]

    @property
    def differing(self) -> list[str]:
        """In both, with other contents."""
        both = self.expected.keys() & self.found.keys()
        return sorted(p for p in both if self.expected[p]["sha256"] != self.found[p]["sha256"])

    @property
    def missing(self) -> list[str]:
        """Expected, and not there."""
        return sorted(self.expected.keys() - self.found.keys())

    @property
    def extra(self) -> list[str]:
        """There, and not expected."""
        return sorted(self.found.keys() - self.expected.keys())

    def lines(self) -> dict[str, str]:
        """What is wrong with each file, by its path."""
        told = {path: self._differs(path) for path in self.differing}
        told |= {path: "missing there" for path in self.missing}
        told |= {path: "there, and not in the manifest" for path in self.extra}
        rest = len(told) - SHOWN
        shown = dict(list(told.items())[:SHOWN])
        return {**shown, **({"...": f"{rest} more"} if rest > 0 else {})}

    def _differs(self, path: str) -> str:
        mine, theirs = self.expected[path], self.found[path]
        newer = "the one there is older" if theirs["mtime"] < mine["mtime"] else "is newer there"
        return (
            f"differs: {mine['sha256'][:12]} of {when(mine['mtime'])}, there "
            f"{theirs['sha256'][:12]} of {when(theirs['mtime'])}: {newer}"
        )


def judge(
    manifest: Mapping[str, Any],
    place: Mapping[str, Any],
    where: str,
    *,
    expect: Sequence[str] = (),
    forbid: Sequence[str] = (),
) -> Verdict:
    """Whether the place holds what the manifest says, and the names that were asked about."""
    compared = Comparison(manifest["files"], place["files"])
    lines = compared.lines()
    unchecked = {p: s for p, s in place["bytecode"].items() if s == fingerprint.UNCHECKED}
    lines |= unchecked
    defines = {name: place["defines"].get(name) for name in (*expect, *forbid)}
    lines |= {name: "not defined there" for name in expect if defines[name] is False}
    lines |= {name: "still defined there" for name in forbid if defines[name] is True}
    untold = {name: str(said) for name, said in defines.items() if not isinstance(said, bool)}
    evidence = {"manifest": _said(manifest), "there": f"{_said(place)}, {where}", **lines, **untold}
    if lines:
        counts = {
            "differ": len(compared.differing),
            "missing": len(compared.missing),
            "too many": len(compared.extra),
            "unchecked": len(unchecked),
            "names wrong": sum(name in lines for name in (*expect, *forbid)),
        }
        told = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        return Verdict(
            Status.PROBLEM,
            "other-code",
            f"{where} holds other code than the manifest: {told}",
            evidence,
            "Copy the files to where the program runs, then verify again.",
        )
    if untold:
        name, why = next(iter(untold.items()))
        return Verdict(
            Status.UNKNOWN,
            "name-not-told",
            f"{name} cannot be looked up, {where}: {why}",
            evidence,
            "Spell MODULE as it is imported, package first; its source must be one that parses.",
        )
    return Verdict(
        Status.OK, "same-code", f"{len(place['files'])} files are the same, {where}", evidence
    )


def when(mtime: float) -> str:
    """A file's time, to the second."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(mtime))
    except (ValueError, OverflowError, OSError):  # no calendar has it
        return f"second {mtime}"


def _said(found: Mapping[str, Any]) -> str:
    return f"{len(found['files'])} files of {found['directory']} on {found['host']}"
