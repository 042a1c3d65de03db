"""A report with something in every part of it, and with secrets and markup in all of its texts."""

import pytest

from diagnostics.everything import Probe, Told, summed_up
from diagnostics.report.content import INTERLEAVINGS, LAUNCHES, gather
from diagnostics.verdict import Status, Verdict

MARKUP = "<script>alert(1)</script> | `x` __init__"
SECRET = "--password sesame hf_" + "a" * 20
EVIL = f"{MARKUP} {SECRET}"

RACES = {
    "DF001 none later": "reproduced: a warm call failed",
    "DF001 none in-compile": "absent: spared",
    "DF001 shipped later": "absent: all went well",
    "DF002 none later": "cannot tell: no window was opened",
    "torch": "2.13.0",
}
FINDING = {
    **{"code": "DL004", "severity": "loses the log", "file": EVIL, "line": 4, "column": 1},
    **{"text": EVIL, "title": EVIL, "what": EVIL, "why": EVIL, "instead": EVIL},
    "ignore_when": "",
}
STACKS = {
    "sections": [{"title": "loops of the run", "lines": [EVIL, "```"]}],
    "waits": [
        {
            "what": "a barrier",
            "again": False,
            "by": [
                {
                    **{"what": f"drafter-0 {EVIL}", "again": False},
                    "by": [{"what": "a barrier", "again": True, "by": []}],
                }
            ],
        }
    ],
    "stacks": [
        {"thread": f"drafter-0 {EVIL}", "does": "waits", "tid": 7, "frames": [EVIL, "put (q.py:3)"]}
    ],
}
RESULT = {
    **{"started": True, "log": True, "kept": 128, "written": 200, "last_words": None},
    **{"status": 0, "returned": False, "survived": False, "session": None},
    **{"pid_is_trainers": False, "orphans": 1, "hangs": False, "said": "", "unclear": ""},
}


def schedule(title, planted):
    return {
        **{"title": title, "lanes": {"main": "", "drafter-0": "traces"}, "planted": planted},
        "steps": [["main", "starts it"], ["drafter-0", EVIL], ["main", "Module.__call__"]],
        **{"preemptions": 1, "failure": f"P1: {EVIL}"},
    }


def launch(name, results):
    deaths = ("raises", "SIGKILL")
    endings = [
        {"death": death, "result": result, "lost": [], "why": "" if result else "no tmux here"}
        for death, result in zip(deaths, results, strict=True)
    ]
    return {
        **{"name": name, "shape": "exec | tee log", "typed": EVIL, "group": "exec against pipe"},
        "endings": endings,
    }


def told(name, status, evidence=None, **more):
    verdict = Verdict(Status(status), "c", f"{name} says {EVIL}", evidence or {}, f"Type: {EVIL}")
    return Told(Probe(name, (name,)), verdict, 9.0, more)


@pytest.fixture
def make():
    """Makes the content; what is named replaces what a probe's JSON has besides its verdict."""

    def content(**more):
        found = [
            told("env", "ok"),
            told("preflight", "unknown", {"HF_TOKEN": "word", "log": EVIL}),
            told("fxrace", "problem", RACES),
            told("stacks", "problem", **more.get("stacks", STACKS)),
            told("launch-check", "problem", findings=[FINDING], mended=more.get("mended", EVIL)),
            told("gate-check", "ok", schedules=more.get("gate", [schedule("planted one", True)])),
        ]
        rows = [
            launch("all died", [RESULT | {"last_words": True, "status": 1}, RESULT]),
            launch("half", [None, RESULT | {"hangs": True, "kept": 200}]),
        ]
        measured = [
            Told(LAUNCHES, Verdict(Status.PROBLEM, "c", "1 of 2 lose"), 1.0, {"launches": rows}),
            Told(
                INTERLEAVINGS,
                Verdict(Status.PROBLEM, "c", "s"),
                1.0,
                {"schedules": [schedule("trace-call", False)]},
            ),
        ]
        left_out = [Probe("deploy-check", why="not run: add --manifest FILE")]
        environment = {"variables": {"WANDB_API_KEY": "word", "URL": "https://me:sesame@host/"}}
        return gather(found, left_out, summed_up(found, left_out), measured, environment)

    return content
