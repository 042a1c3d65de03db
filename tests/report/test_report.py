"""The report: everything in it escaped and redacted, nothing fetched, both looks, both formats."""

import re
import shutil
import stat
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from click.testing import CliRunner

from diagnostics.cli import main
from diagnostics.everything import Probe, Told, summed_up
from diagnostics.report import command
from diagnostics.report.command import TEMPLATES, rendered
from diagnostics.report.content import gather
from diagnostics.verdict import Status, Verdict

EVIL = "<script>alert(1)</script> | `x` sesame"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def content():
    races = {
        "DF001 none later": "reproduced: a warm call failed",
        "DF001 none in-compile": "absent: spared",
        "DF001 shipped later": "absent: all went well",
        "DF002 none later": "cannot tell: no window was opened",
        "torch": "2.13.0",
    }
    told = [
        Told(Probe("env", ("env",)), Verdict(Status.OK, "c", "fine"), 0.5),
        Told(Probe("fxrace", ("fxrace",)), Verdict(Status.PROBLEM, "r", EVIL, races, "mend"), 9.0),
        Told(
            Probe("preflight", ("preflight",)),
            Verdict(Status.UNKNOWN, "u", "--api-key sesame", {"HF": "token=hf_" + "a" * 20}),
            1.0,
        ),
    ]
    left_out = [Probe("stacks", why="not run: add --run DIR")]
    environment = {"variables": {"WANDB_API_KEY": "x", "URL": "https://me:sesame@host/"}}
    stacks = "drafter-1 waits --password sesame"
    return gather(told, left_out, summed_up(told, left_out), stacks, environment)


class Page(HTMLParser):
    """Checks that tags are closed, and gathers what would be fetched and what runs."""

    VOID = ("meta", "link", "img", "br")

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.links = [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [v for k, v in attributes if k in ("src", "href", "srcset", "action")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def page():
    parsed = Page()
    parsed.feed(rendered(content(), TEMPLATES[".html"]))
    return parsed


def test_the_page_is_whole_and_fetches_and_runs_nothing():
    parsed = page()
    assert parsed.open == []
    assert parsed.links == []
    assert not {"script", "iframe", "img", "link"} & set(parsed.tags)


def test_what_was_found_is_escaped():
    text = rendered(content(), TEMPLATES[".html"])
    assert "&lt;script&gt;alert(1)" in text
    assert "<script>" not in text


@pytest.mark.parametrize("suffix", TEMPLATES)
def test_secrets_are_hidden_wherever_they_stood(suffix):
    text = rendered(content(), TEMPLATES[suffix]).replace(EVIL, "").replace("sesame</p>", "")
    assert "hf_aaaa" not in text
    assert "me:sesame@" not in text
    assert "--password sesame" not in text
    assert "--api-key sesame" not in text


def test_of_a_cell_the_worst_moment_is_shown_and_unknown_is_not_clean():
    heat_map = content().heat_map
    assert heat_map.cures == ["none", "shipped"]
    assert heat_map.cells["DF001", "none"][0] == "reproduced"
    assert heat_map.cells["DF001", "shipped"][0] == "absent"
    assert heat_map.cells["DF002", "none"][0] == "cannot tell"


def test_each_verdict_is_in_words_not_in_colour_alone():
    text = rendered(content(), TEMPLATES[".html"])
    for word in ("problem", "unknown", "ok", "not run", "reproduced", "cannot tell"):
        assert re.search(rf">\s*{word}\s*<", text), word


def test_the_markdown_table_keeps_its_columns():
    text = rendered(content(), TEMPLATES[".md"])
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert "\\|" in next(row for row in rows if row.startswith("| fxrace"))
    assert "| DF001 | reproduced | absent |" in text


@pytest.mark.parametrize(("name", "says"), [("report.pdf", "must end in"), ("no/r.md", "no dir")])
def test_a_wrong_name_is_refused_before_anything_runs(name, says, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "run_all", pytest.fail)
    answer = CliRunner().invoke(main, ["report", "-o", str(tmp_path / name)])
    assert answer.exit_code == 2
    assert says in answer.output


def test_the_file_is_the_users_own_and_whole(tmp_path, monkeypatch):
    told = [Told(Probe("env", ("env",)), Verdict(Status.OK, "c", "fine"), 0.5)]
    monkeypatch.setattr(command, "run_all", lambda _probes, _show: told)
    monkeypatch.setattr("diagnostics.environment.collect.ASK_TORCH", "print('{}')")
    path = tmp_path / "report.html"
    answer = CliRunner().invoke(main, ["report", "-o", str(path)])
    assert answer.exit_code == 0, answer.output
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text().rstrip().endswith("</html>")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_real_browser_draws_it_and_nothing_overflows(tmp_path):
    """At a phone's width: the page itself must not scroll sideways."""
    path = tmp_path / "report.html"
    text = rendered(content(), TEMPLATES[".html"])
    probe = "<script>document.title = document.documentElement.scrollWidth</script></body>"
    path.write_text(text.replace("</body>", probe))
    drawn = subprocess.run(
        [
            *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
            *("--no-first-run", "--disable-background-networking", "--disable-sync"),
            *(f"--user-data-dir={tmp_path / 'browser'}", "--window-size=500,900", "--dump-dom"),
            path.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert int(re.search(r"<title>(\d+)</title>", drawn.stdout)[1]) <= 500, sys.stderr
