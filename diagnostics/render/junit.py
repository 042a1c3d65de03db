"""A verdict for CI: JUnit XML, in which nothing but `ok` and `absent` passes.

The verdict is a testcase, named by its code in the class `dflash-diag PROBE`. A probe that ran many
experiments passes each as a `Case` of its own; what a verdict shows as evidence is no experiment,
and goes into the verdict's `system-out`. A problem, or a failure that was reproduced, is a
`failure`; whatever could not tell, crashed or hung is an `error`; an experiment that had nothing to
show (a cure for what does not happen here), or measured a number, is `skipped`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from diagnostics.render import text, whole
from diagnostics.reproducers import Outcome
from diagnostics.verdict import Status, Verdict

# XML 1.0 has no way to write these, not even escaped.
UNWRITABLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
ELEMENTS = {
    Status.OK: None,
    Status.PROBLEM: "failure",
    Status.UNKNOWN: "error",
    Outcome.ABSENT: None,
    Outcome.REPRODUCED: "failure",
    Outcome.CANNOT_TELL: "error",
    Outcome.CRASHED: "error",
    Outcome.HUNG: "error",
    Outcome.MEASURED: "skipped",
}


@dataclass(frozen=True)
class Case:
    """One experiment. `outcome`: None where there was nothing to show."""

    classname: str
    name: str
    outcome: Outcome | None
    reason: str


def render(verdict: Verdict, probe: str, cases: Sequence[Case] = ()) -> str:
    """The XML of one suite: the cases in their order, then the verdict of the probe so named."""
    suite = ElementTree.Element("testsuite", name=f"dflash-diag {probe}")
    for case in cases:
        element = "skipped" if case.outcome is None else ELEMENTS[case.outcome]
        _add(suite, case.classname, case.name, element, case.outcome or "skipped", case.reason)
    last = _add(
        suite,
        f"dflash-diag {probe}",
        verdict.code,
        ELEMENTS[verdict.status],
        verdict.status,
        verdict.summary,
    )
    ElementTree.SubElement(last, "system-out").text = _writable(text.render(verdict))
    counted = {"failures": "failure", "errors": "error", "skipped": "skipped"}
    for attribute, element in counted.items():
        suite.set(attribute, str(len(suite.findall(f"testcase/{element}"))))
    suite.set("tests", str(len(suite)))
    ElementTree.indent(suite)
    # Not encoding="unicode", which declares the encoding of the locale.
    xml: bytes = ElementTree.tostring(suite, "utf-8", xml_declaration=True)
    return xml.decode() + "\n"


def _add(
    suite: ElementTree.Element,
    classname: str,
    name: str,
    element: str | None,
    kind: str,
    reason: str,
) -> ElementTree.Element:
    case = ElementTree.SubElement(
        suite, "testcase", classname=_writable(classname), name=_writable(name)
    )
    if element:
        ElementTree.SubElement(case, element, type=kind, message=_writable(reason))
    return case


def _writable(value: str) -> str:
    return UNWRITABLE.sub("\N{REPLACEMENT CHARACTER}", value)


def write(path: Path, xml: str) -> None:
    """Put the report there, for CI's collector too, who may be another user. Raises OSError."""
    whole.write(path, xml, 0o644)
