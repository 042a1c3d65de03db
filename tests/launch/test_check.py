"""The command: what it says of the launches of the two incidents, in all its forms."""

import io
import json
import random
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from diagnostics.cli import main
from diagnostics.launch.check import Report, check
from diagnostics.launch.report import render, verdict
from diagnostics.launch.rules import RULES
from diagnostics.launch.shell import Source

INCIDENT_2 = 'tmux new-session -d -s train "bash start.sh > train.log 2>&1"'
INCIDENT_3 = (
    'ssh -o ConnectTimeout=10 root@host "pct exec 200 -- /bin/bash -lc'
    " 'nohup /bin/bash /root/run.sh > /workspace/train.log 2>&1 & echo \\$!'\" 2>&1"
)


def look(text: str) -> Report:
    return check(Source("command line", text))


def codes(report: Report) -> set[str]:
    return {finding.rule.code for finding in report.findings}


def run(*arguments: str, stdin: str = "") -> Result:
    return CliRunner().invoke(main, ["launch-check", *arguments], input=stdin)


def test_incident_2_is_explained_without_blaming_exec(world: Path) -> None:
    (world / "start.sh").write_text("exec python train.py\n")
    report = look(INCIDENT_2)
    assert codes(report) == {"DL004", "DL005", "DL011", "DL021"}
    assert not [f for f in report.findings if "exec" in f.rule.title or "exec" in f.hit.what]


def test_incident_2_points_at_the_characters_inside_the_quotes(world: Path) -> None:
    (finding,) = [f for f in look(INCIDENT_2).findings if f.rule.code == "DL004"]
    assert finding.hit.span.column == INCIDENT_2.index("> train.log") + 1
    assert finding.hit.span.text == "> train.log"
    assert finding.mended == INCIDENT_2.replace("> train.log", ">> train.log")


def test_incident_3_names_a_wrapper_and_is_expanded_on_the_right_side(world: Path) -> None:
    report = look(INCIDENT_3)
    assert codes(report) == {"DL004", "DL016"}
    (wrapper,) = [f for f in report.findings if f.rule.code == "DL016"]
    assert wrapper.hit.span.text == "$!"
    assert "/bin/bash /root/run.sh" in wrapper.hit.what
    assert "pct exec 200" in wrapper.hit.what


def test_its_twin_without_the_backslash_is_expanded_on_the_wrong_side(world: Path) -> None:
    twin = INCIDENT_3.replace("\\$!", "$!")
    report = look(twin)
    assert codes(report) == {"DL004", "DL015"}
    (side,) = [f for f in report.findings if f.rule.code == "DL015"]
    assert side.mended == INCIDENT_3


def test_its_twin_without_the_inner_quotes_loses_its_command(world: Path) -> None:
    assert {"DL027", "DL028"} <= codes(look(INCIDENT_3.replace("'", "")))


def test_what_is_elsewhere_is_unknown_and_never_fine(world: Path) -> None:
    report = look(INCIDENT_3)
    assert {finding.rule.code for finding in report.unknown} == {"DL001", "DL029"}
    result = run("--", "ssh host 'exec python -u train.py >> /srv/train.log 2>&1'")
    assert result.exit_code == 3
    assert "nothing found, but 2 things cannot be checked from here" in result.output


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_what_it_offers_instead_is_a_launch_without_the_finding(rule, world: Path) -> None:
    """And one that bash can read."""
    report = look(rule.wrong)
    for finding in report.findings:
        if finding.mended and len(rule.wrong.splitlines()) == 1:
            assert len(look(finding.mended).findings) < len(report.findings)
            subprocess.run(["bash", "-n"], input=finding.mended, text=True, check=True, timeout=30)
    if report.mended:
        assert codes(look(report.mended)) < codes(report)
        subprocess.run(["bash", "-n"], input=report.mended, text=True, check=True, timeout=30)


def test_a_change_that_would_break_the_quotes_is_not_offered(world: Path) -> None:
    """Nested twice, the escape would need more backslashes than one."""
    text = 'bash -c "ssh host \\"nohup python -u x.py >> /srv/log 2>&1 & echo $!\\""'
    (finding,) = [f for f in look(text).findings if f.rule.code == "DL015"]
    assert finding.mended == ""


@pytest.mark.parametrize(
    ("front", "behind"),
    [
        ("#!/bin/bash\n# Trains.\n", "python -u train.py |& tee -a /tmp/a.log\n"),
        (
            '#!/bin/bash\nusage() {\n  echo "usage"\n}\n',
            "if [ -z $1 ]; then usage; fi\npython -u train.py |& tee -a /tmp/a.log\n",
        ),
        (
            "main() {\n  python -u train.py |& tee -a /tmp/a.log\n}\n",
            "[ -d x ] && echo there\nmain\n",
        ),
    ],
)
def test_pipefail_is_set_in_front_of_the_first_statement(
    front: str, behind: str, world: Path
) -> None:
    (world / "go.sh").write_text(front + behind)
    report = check(Source("go.sh", front + behind, world / "go.sh"))
    (finding,) = [f for f in report.findings if f.rule.code == "DL007"]
    assert finding.mended == "set -o pipefail"
    (edit,) = finding.hit.edits
    assert edit.span.start == len(front)


@pytest.mark.parametrize(
    ("launch", "offered"),
    [
        (
            "nohup python -u train.py 2>&1 | tee -a a.log &",
            "nohup python -u train.py >> a.log 2>&1 &",
        ),
        ("python -u train.py |& tee -a a.log &", "nohup python -u train.py >> a.log 2>&1 &"),
        ("nohup python -u train.py 2>&1 | tee -a a.log b.log &", ""),
        ("nohup python -u train.py 2>&1 | grep loss | tee -a a.log &", ""),
    ],
)
def test_instead_of_a_tee_that_is_hung_up_on(launch: str, offered: str, world: Path) -> None:
    report = look(launch)
    (finding,) = [f for f in report.findings if f.rule.code == "DL018"]
    assert finding.mended == offered
    assert "nohup bash -c" in finding.hit.instead
    if offered:
        assert report.mended in ("", offered) and codes(look(offered)) == set()


@pytest.mark.parametrize(
    "script",
    [
        "python -u train.py > a.log 2>&1  # dflash-diag: ignore=DL004, DL005, DL026\n",
        "# dflash-diag: ignore=DL004,DL005,DL026\npython -u train.py > a.log 2>&1\n",
        "# dflash-diag: ignore=DL004,DL005,DL026\npython -u train.py \\\n  --lr 1 > a.log 2>&1\n",
    ],
)
def test_a_comment_silences_and_is_counted(script: str, world: Path) -> None:
    (world / "quiet.sh").write_text(script)
    result = run("quiet.sh")
    assert "3 findings ignored by a comment" in result.output
    assert result.exit_code == 0, result.output


def test_a_comment_silences_only_its_codes_and_its_line(world: Path) -> None:
    (world / "loud.sh").write_text(
        "# dflash-diag: ignore=DL004\ncd /tmp\npython train.py > a.log 2>&1\n"
    )
    report = check(Source("loud.sh", (world / "loud.sh").read_text(), world / "loud.sh"))
    assert {"DL004", "DL011"} <= codes(report) and report.ignored == 0


def test_words_behind_dashes_and_one_quoted_word_say_the_same(world: Path) -> None:
    words = run("--json", "--", "tmux", "new", "-d", "-s", "x", "python train.py > a.log")
    line = run("--json", "--", "tmux new -d -s x 'python train.py > a.log'")
    assert words.output == line.output
    assert [f["text"] for f in json.loads(line.output)["findings"] if f["code"] == "DL004"] == [
        "> a.log"
    ]


def test_json_has_the_place_of_every_finding(world: Path) -> None:
    result = run("--json", "-", stdin="true\nnohup python train.py > a.log 2>&1 &\n")
    found = json.loads(result.output)
    assert result.exit_code == 1 and found["status"] == "problem"
    first = found["findings"][0]
    assert (first["code"], first["file"], first["line"], first["column"], first["text"]) == (
        "DL004",
        "standard input",
        2,
        23,
        "> a.log",
    )
    assert set(first) == {
        "code", "severity", "file", "line", "column", "text",
        "title", "what", "why", "instead", "ignore_when",
    }  # fmt: skip


def test_junit_has_a_failure_for_a_finding_and_an_error_for_what_is_unknown(world: Path) -> None:
    run("--junit", "report.xml", "--", INCIDENT_3)
    suite = ElementTree.parse(world / "report.xml").getroot()
    assert (suite.get("failures"), suite.get("errors")) == ("3", "2")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["missing.sh"], "missing.sh: there is no such file"),
        (["--canary"], "--canary needs a launch"),
        (["--full", "run.sh"], "are for the table"),
        (["--resume"], "--resume goes with --full"),
        (["--junit", "no/report.xml", "run.sh"], "make its directory first"),
        (["binary"], "binary is not text"),
        (["zeros"], "zeros is not text"),
        (["-"], "standard input is not text"),
    ],
)
def test_usage_errors_end_with_2(arguments: list[str], says: str, world: Path) -> None:
    (world / "binary").write_bytes(b"\x7fELF\xff\xfe")
    (world / "zeros").write_bytes(b"python a\0.py")
    result = run(*arguments, stdin="python a\0.py")
    assert result.exit_code == 2 and says in result.output


def test_nothing_that_trains_is_unknown(world: Path) -> None:
    result = run("--", "echo hello")
    assert result.exit_code == 3
    assert "no program that trains was found" in result.output


@pytest.mark.parametrize(
    ("launch", "starts"),
    [
        ("kubectl apply -f job.yaml", "kubectl"),
        ("systemctl --user start train", "systemctl"),
        ("systemd-run --user --unit t python -u train.py >> train.log 2>&1", "systemd-run"),
        ("make -C x train >> train.log 2>&1", "make"),
        ("flock -n /tmp/l make train >> train.log 2>&1", "make"),
        ("nohup ./trainer --lr 1 >> train.log 2>&1 &", "./trainer"),
    ],
)
def test_what_another_program_starts_is_unknown(launch: str, starts: str, world: Path) -> None:
    (world / "trainer").write_bytes(b"\x7fELF\0")
    (world / "trainer").chmod(0o755)
    for name in ("kubectl", "systemctl", "systemd-run", "make"):
        (world / "bin" / name).write_text("#!/bin/sh\n")
        (world / "bin" / name).chmod(0o755)
    result = run("--", launch)
    assert result.exit_code == 3, result.output
    assert f"what {starts} starts cannot be read" in result.output


def test_what_functions_call_each_other_for_ends(world: Path) -> None:
    text = "a() { b | b & b; }; b() { a | a & a; }; a; b"
    assert verdict(look(text)).status != "ok"


@pytest.mark.parametrize(
    "launch", ["./run.sh >> train.log 2>&1", "flock -n l ./run.sh >> train.log 2>&1"]
)
def test_a_script_that_was_read_is_fine(launch: str, world: Path) -> None:
    (world / "run.sh").write_text("#!/bin/bash\nexec python -u train.py\n")
    assert run("--", launch).exit_code == 0


def test_what_does_not_parse_is_unknown(world: Path) -> None:
    result = run("--", "exec python -u train.py >> train.log 2>&1; echo 'open")
    assert result.exit_code != 0
    assert "DL028" in {finding.rule.code for finding in look("python -u train.py; echo 'x").unknown}


def test_a_launch_that_keeps_everything_is_fine(world: Path) -> None:
    result = run("--", "python -u train.py >> train.log 2>&1")
    assert (result.exit_code, result.output.splitlines()) == (
        0,
        [
            "ok: nothing found that loses the run, its log or its status",
            "  trains   python -u train.py",
            "  hang-up  it lives as long as the terminal that it is typed in",
        ],
    )


def test_it_says_what_it_took_for_the_program(world: Path) -> None:
    said = json.loads(run("--json", "--", INCIDENT_3).output)["evidence"]
    assert said == {
        "trains": "/bin/bash /root/run.sh (a script that cannot be read here)",
        "through": "ssh > pct exec > bash > nohup",
        "on": "ssh root@host > pct exec 200",
    }


def test_the_grammar_is_loaded_only_when_it_is_needed() -> None:
    code = "import sys, diagnostics.cli; sys.exit('tree_sitter' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_nothing_is_started(world: Path) -> None:
    """Reading must leave no trace, whatever the launch does."""
    lines = ["touch started > started.log; python touch.py", "$(touch started) python a.py"]
    for line in (*lines, "`touch started`; python -u b.py", "tmux new -d -s t 'touch started'"):
        run("--", line)
    assert not list(world.glob("started*"))


def test_secrets_are_hidden(world: Path) -> None:
    token = "hf_" + "a1B2" * 6
    result = run("--", f"HF_TOKEN={token} python train.py --token {token} > a.log")
    assert token not in result.output and "***" in result.output
    assert token not in run("--json", "--", f"HF_TOKEN={token} python train.py > a.log").output


def test_a_long_line_is_cut_around_the_finding(world: Path) -> None:
    text = f"python -u train.py --note {'x' * 300} > a.log 2>&1"
    lines = render(look(text)).splitlines()
    shown, under = lines[2], lines[3]
    assert len(shown) < 120
    assert shown[under.index("^") : under.rindex("^") + 1] == "> a.log"


def test_the_caret_stands_under_the_finding_of_a_line_with_wide_and_hidden_text(
    world: Path,
) -> None:
    text = "API_KEY=abcdefghijklmnop python -u train.py --name é > a.log 2>&1"
    lines = render(look(text)).splitlines()
    assert lines[2][lines[3].index("^") : lines[3].rindex("^") + 1] == "> a.log"


def test_standard_input_is_read_as_it_is(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(INCIDENT_3))
    assert "DL016 misleads" in run("-", stdin=INCIDENT_3).output


def test_a_damaged_launch_raises_nothing(world: Path) -> None:
    """Characters put in, taken out and moved about at random, with a fixed seed."""
    chance = random.Random(6)
    texts = [rule.wrong for rule in RULES.values()] + [INCIDENT_2, INCIDENT_3]
    for _ in range(300):
        text = chance.choice(texts)
        for _ in range(3):
            at = chance.randrange(len(text))
            added = chance.choice(["'", '"', "\\", "$", "`", "&", "|", "<", ">", "(", "}", "é", ""])
            text = (text[:at] + added + text[at + chance.randrange(4) :]) or "x"
        report = look(text)
        render(report)
        for finding in (*report.findings, *report.unknown):
            span = finding.hit.span
            assert 0 <= span.start <= span.end <= len(span.source.text)


HARDLY_ANYTHING = """
ssh h ''|ssh h|tmux|tmux ''|bash -c ''|bash -c|docker exec|docker run|env|nohup|sudo|''|#|exec|eval
eval ''|source|screen|script -c ''|su -c ''|sbatch|sbatch --wrap=|tmux send-keys -t x Enter|$X|$X $Y
tmux new -d ''|A=1|> x|python > ''|tee x|python x > $(f)|timeout|timeout 5|pct exec 1 --|(|{|&|&&
"""


@pytest.mark.parametrize("text", ["", "\n", "ssh h <<EOF\nEOF", "python -u x | tee", "\0"])
def test_what_hardly_is_a_launch_is_not_fine(text: str, world: Path) -> None:
    for each in (text, *HARDLY_ANYTHING.strip().replace("\n", "|").split("|")):
        report = look(each)
        render(report)
        assert verdict(report).status != "ok", each
