"""The report: everything in it escaped and redacted, nothing fetched, both formats."""

import re
import stat
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

from diagnostics.cli import main
from diagnostics.everything import Told
from diagnostics.report import command
from diagnostics.report.command import MARKDOWN_LIMIT, RENDERERS, html, markdown
from diagnostics.report.content import LAUNCHES
from diagnostics.verdict import Status, Verdict

NOTHING_SEEN = {"sections": [], "waits": [], "stacks": []}
STYLE = (Path(command.__file__).parent / "page.css").read_text(encoding="utf-8")


class Page(HTMLParser):
    """Checks that tags are closed; gathers what would be fetched, what runs, and the tables."""

    VOID = ("meta", "link", "img", "br")

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.links, self.ids, self.tables = [], [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [v for k, v in attributes if k in ("src", "href", "srcset", "action")]
        self.ids += [v for k, v in attributes if k == "id"]
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data


def test_the_page_is_whole_and_fetches_and_runs_nothing(make):
    page = Page(html(make()))
    assert page.open == []
    assert not {"script", "iframe", "img", "link", "object", "form"} & set(page.tags)
    assert all(link.startswith("#") for link in page.links)
    assert not re.search(r"url\(|@import|@font-face", STYLE)


def test_what_a_probe_found_is_a_link_away(make):
    page = Page(html(make()))
    assert {link[1:] for link in page.links} == {"findings", "waits", "races", "gate"}
    assert {link[1:] for link in page.links} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))


def test_what_was_found_is_escaped(make):
    text = html(make())
    assert "&lt;script&gt;alert(1)" in text
    assert "<script>" not in text


def test_in_markdown_nothing_is_markup_outside_of_code(make):
    """Neither a tag nor `__init__`, which would be bold; blocks of code cannot be ended early."""
    blocks = re.compile(r"^(`{3,})\n.*?^\1$", re.MULTILINE | re.DOTALL)
    text = markdown(make())
    assert "\n````\n" in text
    prose = re.sub(r"`[^`\n]*`", "", blocks.sub("", text))
    assert not re.search(r"(?<!\\)<script|(?<!\\)__", prose)
    assert prose.count("<details>") == prose.count("</details>") == 6


@pytest.mark.parametrize("suffix", RENDERERS)
def test_secrets_are_hidden_wherever_they_stood(make, suffix):
    """Every part has one; the control: what stands beside it is there."""
    text = RENDERERS[suffix](make())
    assert text.count("alert(1)") > 15
    assert "hf_aaaa" not in text
    assert "sesame" not in text
    assert "word</" not in text and "| word" not in text


def test_of_a_cell_the_worst_moment_is_shown_and_unknown_is_not_clean(make):
    heat_map = make().heat_map
    assert heat_map.cures == ["none", "shipped"]
    assert heat_map.modes["DF001"] == "fx flag"
    assert heat_map.cells["DF001", "none"][0] == "reproduced"
    assert heat_map.cells["DF001", "shipped"][0] == "absent"
    assert heat_map.cells["DF002", "none"][0] == "cannot tell"


def test_each_verdict_is_in_words_not_in_colour_alone(make):
    text = html(make())
    for word in ("problem", "unknown", "ok", "not run", "reproduced", "cannot tell"):
        assert re.search(rf">\s*{word}\s*<", text), word


def test_the_worst_comes_first(make):
    assert [one.verdict.status for one in make().told] == [*["problem"] * 3, "unknown", *["ok"] * 2]


def test_the_markdown_table_keeps_its_columns(make):
    rows = [line for line in markdown(make()).splitlines() if line.startswith("| ")]
    assert "\\|" in next(row for row in rows if row.startswith("| fxrace"))
    assert "| DF001 fx flag | reproduced | absent |" in rows


def test_a_timeline_is_a_table_with_a_lane_for_each_thread(make):
    (table,) = [table for table in Page(html(make(gate=[]))).tables if table[0][0] == "step"]
    assert table[0] == ["step", "main", "drafter-0 traces"]
    assert table[1] == ["1", "starts it", ""]
    assert table[2][:2] == ["2", ""] and table[2][2].startswith("<script>")
    assert table[-1][1].startswith("fails: P1: ")
    text = markdown(make(gate=[]))
    assert "| | main | drafter-0 traces |\n|--:|---|---|\n| 1 | starts it | |\n| 2 | |" in text


def test_what_the_gate_really_does_wrong_is_open_and_before_the_planted_bugs(make):
    planted = make().gate[0]
    real = {
        **{"title": "hangs 2+1+0", "lanes": {"main": ""}, "steps": [["main", "waits"]]},
        **{"preemptions": 0, "failure": "P2: x", "planted": False},
    }
    bug = {
        **{"title": planted.title, "lanes": dict(planted.lanes), "steps": []},
        **{"preemptions": 1, "failure": "", "planted": True},
    }
    content = make(gate=[bug, real])
    assert [one.planted for one in content.gate] == [False, True]
    assert re.search(r"<details[^>]* open><summary>hangs 2\+1\+0: 1 steps", html(content))
    assert "No order that was searched fails" not in html(content)
    assert "No order that was searched fails" in html(make())


def test_who_waits_for_whom_is_a_nested_list_and_a_circle_ends(make):
    text = html(make())
    assert re.search(
        r"<li>a barrier <span[^>]*>is waited for by</span>\s*<ul>\s*<li>drafter-0 .*?"
        r"<ul>\s*<li>a barrier, and so on, in a circle</li>\s*</ul></li>\s*</ul></li>",
        text,
        re.DOTALL,
    )
    assert re.search(
        r"^- a barrier is waited for by\n  - drafter-0 .*by\n    - a barrier, and so on",
        markdown(make()),
        re.MULTILINE,
    )


def test_a_run_that_could_not_be_looked_at_is_on_the_page(make):
    for rendered in (html(make(stacks={})), markdown(make(stacks={}))):
        assert "stacks says" in rendered


def test_the_table_of_launches_says_what_was_lost_in_words(make):
    tables = Page(html(make())).tables
    rows = next(table for table in tables if table[0][0] == "launch")
    assert rows[0] == ["launch", "raises", "SIGKILL", "left"]
    assert rows[2] == ["exec against pipe"]
    assert rows[3] == ["all died", "128/200 tb!", "1", "128/200!", "0 not KILL!", "", "wrong!", "1"]
    assert rows[4][1:5] == ["not tried", "", "200", "hangs!"]
    assert "Not tried: no tmux here." in html(make())
    assert "| all died | 128/200 tb! | 1 | 128/200! | 0 not KILL! |" in markdown(make())


def test_launches_that_were_not_measured_are_said(make):
    (shown,) = [one for name, one in make().measured.items() if name == LAUNCHES.name]
    assert shown.summary == "1 of 2 lose"
    content = make()
    bare = type(content)(**{**vars(content), "launches": None})
    assert re.search(r"unknown</span> 1 of 2 lose", html(bare))


def test_markdown_fits_a_comment_and_says_what_it_left_out(make):
    """Of the parts the longest goes first: what is short stays."""
    frames = [f"step (/srv/train.py:{n})" for n in range(5000)]
    stack = {"thread": "a", "does": "runs", "tid": 1, "frames": frames}
    stacks = {**NOTHING_SEEN, "stacks": [stack]}
    assert len(html(make(stacks=stacks))) > MARKDOWN_LIMIT
    text = markdown(make(stacks=stacks))
    assert len(text) <= MARKDOWN_LIMIT
    assert "Left out, too long for a comment: stacks." in text
    assert "<summary>environment</summary>" in text
    assert "Left out" not in markdown(make())


def test_markdown_fits_whatever_there_is(make):
    endless = [{"what": f"thread {n}", "again": False, "by": []} for n in range(9000)]
    text = markdown(make(stacks={**NOTHING_SEEN, "waits": endless}))
    assert len(text) == MARKDOWN_LIMIT
    assert text.endswith("(cut here: too long for a comment)\n")


@pytest.mark.parametrize(("name", "says"), [("report.pdf", "must end in"), ("no/r.md", "no dir")])
def test_a_wrong_name_is_refused_before_anything_runs(name, says, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "run_all", pytest.fail)
    answer = CliRunner().invoke(main, ["report", "-o", str(tmp_path / name)])
    assert answer.exit_code == 2
    assert says in answer.output


def test_the_file_is_the_users_own_and_what_was_only_measured_is_no_verdict(tmp_path, monkeypatch):
    """Launches always lose something: that is not wrong here."""

    def run_all(probes, _show):
        statuses = {LAUNCHES: Status.PROBLEM}
        return [Told(p, Verdict(statuses.get(p, Status.OK), "c", "s"), 0.5) for p in probes]

    monkeypatch.setattr(command, "run_all", run_all)
    monkeypatch.setattr("diagnostics.environment.collect.ASK_TORCH", "print('{}')")
    path = tmp_path / "report.html"
    answer = CliRunner().invoke(main, ["report", "-o", str(path)])
    assert answer.exit_code == 0, answer.output
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text().rstrip().endswith("</html>")
    assert list(tmp_path.iterdir()) == [path]


def test_quick_leaves_the_interleavings_out(tmp_path, monkeypatch):
    asked = []

    def run_all(probes, _show):
        asked.append([probe.name for probe in probes])
        return [Told(p, Verdict(Status.OK, "c", "s"), 0.5) for p in probes]

    monkeypatch.setattr(command, "run_all", run_all)
    monkeypatch.setattr("diagnostics.environment.collect.ASK_TORCH", "print('{}')")
    for words in (["--quick"], []):
        CliRunner().invoke(main, ["report", "-o", str(tmp_path / "report.md"), *words])
    quick, launches, full, launches_again = asked
    assert launches == launches_again == ["launches"]
    assert [*quick, "interleavings"] == full
