"""What stands in a report: gathered once, redacted here, shown as HTML or as Markdown."""

import datetime
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diagnostics.everything import Probe, Told
from diagnostics.redact import redact_all
from diagnostics.report.heat_map import HeatMap, heat_map
from diagnostics.report.launches import LaunchTable, launch_table
from diagnostics.report.timelines import Timeline, timelines
from diagnostics.verdict import WORST_FIRST, Verdict

# Measured for the report; what they find is no fault of this machine or of the user's launch.
LAUNCHES = Probe("launches", ("launch-check",))
INTERLEAVINGS = Probe("interleavings", ("fxrace", "--explore", "--cure", "shipped"))


@dataclass(frozen=True)
class Seen:
    """What `stacks` saw of the run, as in its JSON; empty where it gave no answer."""

    verdict: Verdict
    sections: Sequence[Mapping[str, Any]]
    waits: Sequence[Mapping[str, Any]]
    stacks: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Content:
    """The whole report. Everything in it is redacted; what was not asked for is None or empty.

    `told` has the worst first. `findings` are those on the user's own launch script, `mended` is
    the script without them. `gate` and `races` are schedules of the start-up gate, and of two
    threads in torch. `measured` has what was asked for this page alone, by name.
    """

    made: str
    verdict: Verdict
    told: list[Told]
    left_out: list[Probe]
    heat_map: HeatMap | None
    findings: Sequence[Mapping[str, Any]]
    mended: str
    run: Seen | None
    gate: list[Timeline]
    races: list[Timeline]
    launches: LaunchTable | None
    measured: Mapping[str, Verdict]
    environment: Mapping[str, Mapping[str, str]]


def gather(
    told: Sequence[Told],
    left_out: Sequence[Probe],
    verdict: Verdict,
    measured: Sequence[Told],
    environment: Mapping[str, Any],
) -> Content:
    """Redact everything and put it in its place."""
    probes = {one.probe.name: _clean(one) for one in (*told, *measured)}
    clean = [probes[one.probe.name] for one in told]
    more = {name: one.more for name, one in probes.items()}
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    launch = more.get("launch-check", {})
    return Content(
        made=f"{now}, on {platform.system()} {platform.release()}, {platform.machine()}",
        verdict=_clean_verdict(verdict),
        told=sorted(clean, key=lambda one: WORST_FIRST.index(one.verdict.status)),
        left_out=list(left_out),
        heat_map=heat_map(probes["fxrace"].verdict.evidence) if "fxrace" in probes else None,
        findings=launch.get("findings", ()),
        mended=launch.get("mended", ""),
        run=_seen(probes["stacks"]) if "stacks" in probes else None,
        gate=timelines(more.get("gate-check", {})),
        races=timelines(more.get(INTERLEAVINGS.name, {})),
        launches=launch_table(more.get(LAUNCHES.name, {})),
        measured={one.probe.name: probes[one.probe.name].verdict for one in measured},
        environment={
            section: {name: str(value) for name, value in redact_all(values).items()}
            for section, values in environment.items()
        },
    )


def _seen(told: Told) -> Seen:
    more = told.more
    return Seen(
        told.verdict, more.get("sections", ()), more.get("waits", ()), more.get("stacks", ())
    )


def _clean(told: Told) -> Told:
    return Told(told.probe, _clean_verdict(told.verdict), told.seconds, redact_all(told.more))


def _clean_verdict(verdict: Verdict) -> Verdict:
    return Verdict(
        verdict.status,
        verdict.code,
        redact_all(verdict.summary),
        redact_all(verdict.evidence),
        redact_all(verdict.remedy),
    )
