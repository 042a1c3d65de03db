"""A verdict's exit code and renderings; the frozen surface of `dflash-diag`."""

import dataclasses
import json

import pytest

from diagnostics.cli import main
from diagnostics.launch.launch_command import launch
from diagnostics.launch.measured import ShapesVerdict
from diagnostics.launch.report import LaunchVerdict
from diagnostics.probes.schedule import SearchVerdict
from diagnostics.render import json as as_json
from diagnostics.render import text as as_text
from diagnostics.stacks.seen import StacksVerdict
from diagnostics.verdict import ProbeExit, Status, Verdict, worst

EXIT_CODES = {"OK": 0, "PROBLEM": 1, "USAGE": 2, "UNKNOWN": 3}
JSON_KEYS = ["status", "code", "summary", "evidence", "remedy"]
MORE_KEYS = {
    LaunchVerdict: ["findings", "ignored", "mended"],
    ShapesVerdict: ["launches"],
    SearchVerdict: ["schedules"],
    StacksVerdict: ["sections", "waits", "stacks"],
}
COMMANDS = {
    "report": {"-o", "--quick", "--config", "--launch", "--run", "--manifest"},
    "all": {"--quick", "--config", "--launch", "--run", "--manifest", "--json", "--junit"},
    "env": {"--save", "--diff", "--exec-in", "--json"},
    "deploy-check": set(),  # a group: write, verify, process, log
    "preflight": {"--config", "--port", "--session", "--fix", "--json", "--junit"},
    "stacks": {"pid", "--name", "--run", "--watch", "--native", "--json"},
    "explain": {"code"},
    "gate-check": {"--scenario", "--bug", "--quick", "--full", "--json", "--junit"},
    "fxrace": {
        *("--mode", "--cure", "--quick", "--full", "--device", "--explore", "--save", "--replay"),
        "--stress",
        *("--target", "--seconds", "--drafters", "--targets", "--windows", "--torch", "--bisect"),
        *("--python", "--yes", "--log", "--json", "--junit"),
    },
    "launch": set(),  # its own commands are below
    "launch-check": {
        *("command", "--canary", "--full", "--resume", "--json", "--junit"),
        *("--post-mortem", "--log", "--session", "--since", "--recover"),
    },
}
LAUNCH_COMMANDS = {
    "start": {
        *("--name", "--log", "--tmux", "--exec-in", "--first-line-s", "--json", "--junit"),
        "command",
    },
    "status": {"name", "--lines", "--json", "--junit"},
}

VERDICT = Verdict(
    Status.PROBLEM, "pipe-torn", "the pipe is torn", {"end": "left", "length": "3 m"}, "Type: mend"
)


def test_the_surface_is_frozen():
    assert {code.name: code.value for code in ProbeExit} == EXIT_CODES
    assert list(json.loads(as_json.render(VERDICT))) == JSON_KEYS
    for kind, more in MORE_KEYS.items():
        assert [field.name for field in dataclasses.fields(kind)] == JSON_KEYS + more
    assert {
        name: {param.opts[0] for param in command.params} for name, command in main.commands.items()
    } == COMMANDS
    assert {
        name: {param.opts[0] for param in command.params}
        for name, command in launch.commands.items()
    } == LAUNCH_COMMANDS


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("problem", 1), ("unknown", 3)])
def test_every_status_has_its_exit_code(status, code):
    assert Verdict(Status(status), "c", "s").exit_code == code


def test_the_worst_of_several_is_a_problem_then_what_could_not_be_checked():
    assert worst([]) is worst([Status.OK]) is Status.OK
    assert worst([Status.OK, Status.UNKNOWN]) is Status.UNKNOWN
    assert worst([Status.UNKNOWN, Status.PROBLEM, Status.OK]) is Status.PROBLEM


def test_text_says_finding_remedy_and_evidence_in_this_order():
    assert as_text.render(VERDICT) == (
        "problem: the pipe is torn\n  Type: mend\n  end     left\n  length  3 m"
    )
    assert as_text.render(Verdict(Status.OK, "fine", "all is well")) == "ok: all is well"


def test_json_holds_the_same_value():
    assert json.loads(as_json.render(VERDICT)) == {
        "status": "problem",
        "code": "pipe-torn",
        "summary": "the pipe is torn",
        "evidence": {"end": "left", "length": "3 m"},
        "remedy": "Type: mend",
    }
