"""Shell text becomes words, redirects and pipelines, each of which knows where it was typed."""

import shlex
import subprocess

import pytest

from diagnostics.launch.parse import parse, parse_source
from diagnostics.launch.shell import Pipeline, Script, Source


def script(text: str) -> Script:
    return parse_source(Source("command line", text))


def only(text: str) -> Pipeline:
    (pipeline,) = script(text).pipelines
    return pipeline


@pytest.mark.parametrize(
    "text",
    [
        "echo one two",
        "echo 'a b' \"c d\" e\\ f",
        """echo "a \\"b\\" \\\\ \\x" '$HOME' 'it'"'"'s'""",
        "echo a\\\nb 'c\nd'",
        'echo "" \'\' x""y',
        "echo --name='a b' --other=\"c\"",
        "echo é 'ü ö' 日本",
        "echo {a,b} '*.log' \\$HOME '`x`' \\`",
    ],
)
def test_words_are_what_bash_makes_of_them(text: str) -> None:
    printed = text.replace("echo", "printf '%s\\0'", 1).replace("{a,b}", "'{a,b}'")
    done = subprocess.run(["bash", "-c", printed], capture_output=True, timeout=30, check=True)
    assert only(text).commands[0].argv[1:] == done.stdout.decode().split("\0")[:-1]


@pytest.mark.parametrize(
    ("text", "redirects"),
    [
        ("a > b", [(1, ">", "b")]),
        ("a 2>&1 >> b", [(2, ">&", "1"), (1, ">>", "b")]),
        ("a &> b", [(1, "&>", "b")]),
        ("a >& b", [(1, ">&", "b")]),
        ("a < in 2> 'the errors'", [(0, "<", "in"), (2, ">", "the errors")]),
        ("a >| b 2>&-", [(1, ">|", "b"), (2, ">&-", None)]),
    ],
)
def test_redirects_are_in_their_order(text: str, redirects: list[tuple[int, str, str]]) -> None:
    found = only(text).commands[0].redirects
    assert [(r.fd, r.operator, r.target.value if r.target else None) for r in found] == redirects


def test_a_block_passes_its_redirects_and_pipes_to_what_is_in_it() -> None:
    first, second = script("{ a; b 2> err; } 2>&1 |& tee log > out &").pipelines
    assert [c.argv for c in first.commands] == [["a"], ["tee", "log"]]
    assert first.pipes == ("|&",)
    assert [r.operator for r in first.commands[0].redirects] == [">&"]
    assert [r.operator for r in second.commands[0].redirects] == [">&", ">"]
    assert [r.operator for r in second.commands[1].redirects] == [">"]
    assert first.background and second.background
    assert first.block == second.block != ()


def test_separators_and_background() -> None:
    pipelines = script("a && b || c; d & e\nf").pipelines
    assert [p.ends_with for p in pipelines] == ["&&", "||", ";", "&", "", ""]
    assert [p.background for p in pipelines] == [False, False, False, True, False, False]


def test_a_process_substitution_is_no_file() -> None:
    (redirect,) = only("a > >(tee -a log)").commands[0].redirects
    assert [command.argv for command in redirect.into] == [["tee", "-a", "log"]]
    assert not redirect.writes


def test_a_here_document_has_a_body_with_places() -> None:
    text = "ssh host <<EOF\nnohup a $X &\nEOF\n"
    (redirect,) = only(text).commands[0].redirects
    assert redirect.body is not None and redirect.target is not None
    assert redirect.body.value == "nohup a $X &\n"
    assert redirect.body.span().text == "nohup a $X &\n"
    assert [e.name for e in redirect.target.expansions] == ["X"]
    escaped = only("ssh host <<EOF\necho \\$! \\x $?\nEOF").commands[0].redirects[0]
    assert escaped.body is not None and escaped.body.value == "echo $! \\x $?\n"
    assert escaped.target is not None and [e.name for e in escaped.target.expansions] == ["?"]
    quoted = only(text.replace("<<EOF", "<<'EOF'")).commands[0].redirects[0]
    assert quoted.target is not None and quoted.target.expansions == ()


def test_expansions_are_found_where_the_shell_makes_them() -> None:
    word = only("""echo "a $! \\$! ${B:-c}"'$D'$(e $f)""").commands[0].words[1]
    assert [e.span.text for e in word.expansions] == ["$!", "${B:-c}", "$(e $f)"]


DEEP = """ssh h "pct exec 1 -- bash -lc 'nohup \\"my trainer\\" > log 2>&1 & echo \\$!'" """


def test_a_span_is_right_through_three_layers_of_quotes() -> None:
    source = Source("command line", DEEP)
    outer = parse_source(source).pipelines[0].commands[0].words[2]
    middle = parse(outer.text).pipelines[0].commands[0].words[-1]
    first, second = parse(middle.text).pipelines
    assert [word.value for word in first.commands[0].words] == ["nohup", "my trainer"]
    assert first.commands[0].redirects[0].span.text == "> log"
    assert second.commands[0].words[1].span.text == "$!"
    assert DEEP[first.commands[0].words[0].span.start :].startswith("nohup")


@pytest.mark.parametrize("depth", range(1, 5))
def test_any_number_of_quotings_gives_the_text_and_its_places_back(depth: int) -> None:
    inner = """run 'a b' "c $d" > "log file" """.strip()
    text = inner
    for _ in range(depth):
        text = f"bash -c {shlex.quote(text)}"
    script_ = script(text)
    for _ in range(depth):
        script_ = parse(script_.pipelines[0].commands[0].words[2].text)
    command = script_.pipelines[0].commands[0]
    assert command.argv == ["run", "a b", "c $d"]
    (redirect,) = command.redirects
    assert redirect.target is not None and redirect.target.value == "log file"
    assert [text[i] for i in script_.text.origins] == [*inner]


def test_lines_and_columns_count_from_one() -> None:
    span = script("true\n  python x\n").pipelines[1].commands[0].words[0].span
    assert (span.line, span.column, span.text) == (2, 3, "python")


def test_what_does_not_parse_is_named_and_the_rest_is_read() -> None:
    found = script("python a.py > log\necho 'open")
    assert found.broken is not None
    assert found.pipelines[0].commands[0].argv == ["python", "a.py"]
    assert script("python a.py").broken is None


@pytest.mark.parametrize(
    "body", ["a \\$! \\x", "\\\\\\$ \\\\ 'q' \"q\"", "one\\\ntwo", "\\`x\\` é \\$HOME"]
)
def test_a_here_document_is_what_bash_makes_of_it(body: str) -> None:
    text = f"cat <<EOF\n{body}\nEOF\n"
    done = subprocess.run(["bash", "-c", text], capture_output=True, timeout=30, check=True)
    (redirect,) = only(text).commands[0].redirects
    assert redirect.body is not None and redirect.body.value == done.stdout.decode()
