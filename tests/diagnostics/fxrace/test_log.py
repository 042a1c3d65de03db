"""What a log shows: a file of tests/fixtures/logs each, and what must never be read into one."""

import re
from pathlib import Path

import pytest

from diagnostics.probes.fxrace import log
from diagnostics.verdict import Status

LOGS = Path(__file__).parents[2] / "fixtures" / "logs"
# file -> code -> how often, certain or not, and on which line the exhibit is
EXPECTED = {
    "bare_message": {"DF001": (1, "probably", 1), "DF003": (1, "probably", 3)},
    "df001_thread_excepthook": {"DF001": (1, "certain", 14)},
    "df001_old_torch_pasted": {"DF001": (1, "certain", 7)},
    "df001_df003_two_ranks_interleaved": {
        "DF001": (1, "certain", 12),
        "DF003": (1, "certain", 17),
    },
    "df001_df003_mixed_without_prefix": {
        "DF001": (1, "probably", 13),
        "DF003": (1, "probably", 16),
    },
    "df002_every_later_call": {"DF001": (6, "certain", 6), "DF002": (1, "probably", 41)},
    "df002_df004_overlap_then_flag": {
        "DF001": (1, "certain", 19),
        "DF002": (1, "probably", 19),
        "DF004": (1, "certain", 12),
    },
    "df003_progress_bar": {"DF003": (1, "certain", 10)},
    "df003_exception_group": {"DF003": (1, "certain", 15)},
    "df003_json_lines": {"DF003": (1, "certain", 2)},
    "df005_call_in_foreign_tracer": {"DF005": (1, "probably", 14)},
    "df009_cache_size_limit": {"DF009": (1, "probably", 1)},
    "df009_two_limits_df011": {"DF009": (2, "probably", 1), "DF011": (1, "probably", 3)},
    "df010_two_lazy_backwards_faulthandler": {"DF010": (1, "probably", 2)},
    "df012_faulthandler": {"DF012": (1, "certain", 2)},
    "df012_py_spy": {"DF012": (1, "certain", 4)},
    "df013_worker_get_obj": {"DF013": (1, "certain", 14)},
    "df013_flattened_paste": {"DF013": (1, "certain", 1)},
    "df013_neighbour_draws": {"DF013": (2, "certain", 4)},
    "none_nested_symbolic_trace": {},
    "none_nested_make_fx": {},
    "none_own_trace_of_unregistered_module": {},
    "none_jit_trace": {},
    "none_out_of_memory": {},
    "none_ordinary_errors": {},
    "none_one_lazy_backward_compiles": {},
}
LOOK_ALIKES = {
    "none_nested_symbolic_trace",
    "none_nested_make_fx",
    "none_own_trace_of_unregistered_module",
}


def classified(text: str) -> log.Findings:
    return log.classify(enumerate(text.splitlines(keepends=True), start=1))


def shown(findings: log.Findings) -> dict[str, tuple[int, str, int]]:
    return {
        code: (seen.count, "certain" if seen.certain else "probably", seen.exhibit.line)
        for code, seen in findings.seen.items()
        if code
    }


def test_every_log_has_an_expectation():
    assert {path.stem for path in LOGS.glob("*.txt")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_what_a_log_shows(name):
    with (LOGS / f"{name}.txt").open(newline="\n") as file:
        assert shown(log.classify(log._numbered(file))) == EXPECTED[name]


@pytest.mark.parametrize("name", EXPECTED)
def test_the_verdict_says_so(name):
    verdict = log.probe(LOGS / f"{name}.txt")
    assert verdict.status is (Status.PROBLEM if EXPECTED[name] else Status.OK)
    assert {code for code in verdict.evidence if code.startswith("DF")} == set(EXPECTED[name])
    for code in EXPECTED[name]:
        assert f"{code}: " in verdict.remedy
    assert ("not the race" in verdict.evidence) == (name in LOOK_ALIKES)
    if not EXPECTED[name]:
        assert "does not say that the run had none" in verdict.summary
        assert "DF006, DF007, DF008" in verdict.summary


def test_an_uncertain_sighting_is_said_to_be_one():
    assert "probably DF001" in log.probe(LOGS / "bare_message.txt").summary
    certain = log.probe(LOGS / "df001_thread_excepthook.txt")
    assert "probably" not in certain.summary
    assert "dflash-diag fxrace --mode DF001" in certain.remedy


def test_secrets_in_a_quoted_line_are_hidden():
    assert "hf_" not in str(log.probe(LOGS / "bare_message.txt"))


@pytest.mark.parametrize("content", [None, ""])
def test_a_log_that_says_nothing_is_unknown(tmp_path, content):
    path = tmp_path / "run.log"
    if content is not None:
        path.write_text(content)
    verdict = log.probe(path)
    assert verdict.status is Status.UNKNOWN
    assert f"--log {path}" in verdict.summary


def test_bytes_that_are_no_text_are_read_over(tmp_path):
    path = tmp_path / "run.log"
    path.write_bytes(b"\xff\xfe\x00\n" + (LOGS / "df001_thread_excepthook.txt").read_bytes())
    assert "DF001" in log.probe(path).evidence


def test_a_line_without_an_end_is_read_in_pieces(tmp_path):
    path = tmp_path / "run.log"
    bar = "train  10%|#  | 12/99 [00:01<00:09]\r" * (2 * log.PIECE_CHARS // 30)
    path.write_text(bar + "\n" + (LOGS / "df003_json_lines.txt").read_text())
    with path.open(newline="\n") as file:
        assert shown(log.classify(log._numbered(file))) == {"DF003": (1, "certain", 3)}


def test_every_cut_of_a_log_can_be_read():
    text = (LOGS / "df001_df003_two_ranks_interleaved.txt").read_text()
    for start in range(0, len(text), 7):
        assert set(classified(text[start:]).codes) <= {"DF001", "DF003"}
        assert set(classified(text[:start]).codes) <= {"DF001", "DF003"}


def log_of(name: str) -> str:
    return (LOGS / f"{name}.txt").read_text()


def raised_by(*frames: str, error: str) -> str:
    """A traceback through functions of torch, each `file function`."""
    lines = (
        f'  File "/opt/venv/lib/site-packages/torch/{file}.py", line 9, in {function}\n    x()\n'
        for file, function in (frame.split() for frame in frames)
    )
    return f"Traceback (most recent call last):\n{''.join(lines)}{error}\n"


FLAG = "RuntimeError: Detected that you are using FX to symbolically trace a dynamo-optimized f"


def test_a_stack_that_never_ended_does_not_take_a_later_exception():
    raised = log_of("df001_thread_excepthook")
    frames, error = raised.split("RuntimeError:", 1)
    gap = "step\n" * 300
    assert shown(classified(f"{frames}{gap}RuntimeError:{error}")) == {
        "DF001": (1, "probably", 314)
    }


def test_two_stacks_in_one_stream_are_not_told_apart():
    """The second begins before the first has named its exception."""
    first = raised_by("fx/_symbolic_trace trace", "_dynamo/eval_frame compile_wrapper", error=FLAG)
    head, frames = first.split("\n", 1)
    other = raised_by("nn/functional linear", error="ValueError: shape")
    mixed = f"{head}\n{frames.removesuffix(FLAG + chr(10))}{other}{FLAG}\n"
    found = classified(mixed)
    assert shown(found) == {"DF001": (1, "probably", 10)}
    assert "compile_wrapper" in str(found.seen["DF001"])


def test_the_colours_of_python_3_13_change_nothing():
    text = log_of("df001_thread_excepthook")
    text = re.sub(r'("[^"]+"|(?<=, line )\d+|(?<=, in )\w+)', "\x1b[35m\\1\x1b[0m", text)
    text = text.replace("RuntimeError: D", "\x1b[1;35mRuntimeError\x1b[0m: \x1b[35mD")
    assert shown(classified(text)) == EXPECTED["df001_thread_excepthook"]


def test_frames_of_a_dump_whose_head_is_missing_are_no_traceback():
    dump = log_of("df012_faulthandler").splitlines(keepends=True)
    assert classified("".join(dump[2:5]) + "RuntimeError: x\n").stacks == 0


def test_a_traceback_without_its_head_is_no_part_of_the_dump_before():
    text = log_of("df012_faulthandler") + log_of("df001_old_torch_pasted")
    assert shown(classified(text)) == {"DF001": (1, "certain", 18), "DF012": (1, "certain", 2)}


def test_a_lazy_backward_that_compiles_is_not_waiting():
    dump = log_of("df012_faulthandler").splitlines(keepends=True)
    inner = dump[2].replace("compile_fx_backward", "codegen")
    assert shown(classified("".join([*dump[:2], inner, *dump[2:]]))) == {}


def test_an_own_trace_explains_a_call_in_a_tracer():
    stack = ("fx/_symbolic_trace trace", "fx/_symbolic_trace module_call_wrapper", "fx/proxy f")
    assert classified(raised_by(*stack, error="TypeError: x")).codes == []
    assert classified(raised_by(*stack[1:], error="TypeError: x")).codes == ["DF005"]


def test_words_that_someone_else_raised_anew_are_not_certain():
    anew = raised_by("_dynamo/eval_frame compile_wrapper", "app run", error=FLAG)
    assert shown(classified(anew)) == {"DF001": (1, "probably", 6)}
    nested = raised_by("fx/_symbolic_trace trace", "app run", error=FLAG)
    assert shown(classified(nested)) == {}


def test_a_flag_that_fails_before_the_overlap_was_not_left_by_it():
    lines = log_of("df002_df004_overlap_then_flag").splitlines(keepends=True)
    assert set(classified("".join([*lines[13:], *lines[:13]])).codes) == {"DF001", "DF004"}


def test_the_exception_of_another_stack_between_the_frames_is_not_taken_for_ours():
    text = (LOGS / "df001_df003_mixed_without_prefix.txt").read_text()
    other = text.replace("NameError: module is not installed as a submodule", "KeyError: 'x'")
    assert shown(classified(other)) == {"DF001": (1, "probably", 13)}
