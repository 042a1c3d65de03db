"""`dflash evaluate` and `dflash generate` on a real checkpoint, as their users run them."""

import json
import math
import shutil
from itertools import islice

import pytest
import torch
from click.testing import CliRunner

from dflash import evaluate, generate
from dflash.checkpoint import save_model
from dflash.cli import main
from dflash.data.completions import Completion, write_completions
from dflash.decode import decode_plainly
from dflash.drafter import build_drafter
from dflash.drafter_config import drafter_config
from dflash.errors import Exit
from dflash.generate import pieces
from dflash.parity import SlotParity
from dflash.report import DraftResult, SetResult, as_text
from dflash.target import Target
from dflash.verify import Divergence

LONG = 12
PROMPTS = ("import os", "def f(x):", "class A:")


@pytest.fixture(scope="module")
def work(tmp_path_factory, tiny_model, tiny_tokenizer):
    """A directory with a checkpoint, prompts as text, and their completions."""
    work = tmp_path_factory.mktemp("work")
    shape = drafter_config(
        tiny_model.config,
        num_draft_layers=2,
        block_size=4,
        mask_token_id=3,
        target_layer_ids=(1, 3),
        sliding_window=0,
    )
    (work / "checkpoint").mkdir()
    save_model(build_drafter(shape, seed=0, device=torch.device("cpu")), work / "checkpoint")
    (work / "code.txt").write_text("\n".join(PROMPTS))
    target, done = Target(tiny_model, (1, 3)), []
    for text in PROMPTS:
        ids = tiny_tokenizer(text)["input_ids"]
        new = decode_plainly(target, ids, max_new_tokens=LONG, eos_token_ids=[2])
        done.append(Completion(text, "", [*ids, *new], [0] * len(ids) + [1] * len(new)))
    write_completions(work / "stored", done, {})
    return work


@pytest.fixture
def run(work, tiny_target_dir):
    """A function that runs a command on the checkpoint."""

    def run(command, *options, stdin=None):
        common = ["--target-model", str(tiny_target_dir), "--max-new-tokens", str(LONG)]
        arguments = [command, str(work / "checkpoint"), *common, *map(str, options)]
        if "--device" not in options:
            arguments += ["--device", "cpu"]
        return CliRunner().invoke(main, arguments, input=stdin)

    return run


def test_a_set_is_decoded_without_loss(run, work):
    result = run("evaluate", "--data", work / "code.txt", "--raw", "--tree-nodes", "4,8", "--json")
    assert result.exit_code == Exit.OK, result.output
    found = json.loads(result.stdout)
    assert (found["block_size"], found["dtype"], found["complete"]) == (4, "float32", True)
    (one,) = found["sets"]
    assert (one["name"], one["prompts"], one["asked"], one["tokens"]) == ("code", 3, 3, 3 * LONG)
    assert [draft["tree_nodes"] for draft in one["drafts"]] == [0, 4, 8]
    for draft in one["drafts"]:
        assert (draft["equal"], draft["ties"], draft["wrong"]) == (3, [], [])
        yielded = sum(int(n) * count for n, count in draft["tokens_per_pass"].items())
        assert yielded == 3 * (LONG - 1)
        assert draft["speed_up"] == pytest.approx(draft["tokens_per_s"] / one["plain_tokens_per_s"])
    taus = [draft["tau"] for draft in one["drafts"]]
    assert taus == sorted(taus)


KEYS = {
    "": "checkpoint target_model block_size dtype device tie_tolerance complete tau sets",
    "set": "name asked prompts tokens plain_tokens_per_s drafts parity",
    "draft": "tree_nodes tau tokens_per_pass tokens_per_s speed_up equal ties wrong",
    "slot": "slot asked training decoding accepted",
}


def test_the_json_keys_are_frozen(run, work):
    result = run("evaluate", "--data", work / "stored", "--parity", "--json", "--limit", 1)
    found = json.loads(result.stdout)
    (one,) = found["sets"]
    values = {"": found, "set": one, "draft": one["drafts"][0], "slot": one["parity"][0]}
    assert {name: " ".join(value) for name, value in values.items()} == KEYS


def test_replay_foretells_decoding(run, work):
    options = ("--data", work / "stored", "--json", "--tree-nodes", "8")
    decoded, replayed = (
        json.loads(run("evaluate", *options, *more).stdout)["sets"][0]["drafts"]
        for more in ((), ("--replay",))
    )
    for name in ("tree_nodes", "tau", "tokens_per_pass"):
        assert [draft[name] for draft in replayed] == [draft[name] for draft in decoded]
    assert replayed[0]["equal"] is None


def test_several_sets_as_text(run, work):
    result = run("evaluate", "--data", work / "stored", "--data", work / "code.txt", "--parity")
    assert result.exit_code == Exit.OK, result.output
    assert "stored: 3 prompts, 36 tokens, plain decoding" in result.stdout
    assert "\ncode: 3 prompts" in result.stdout
    assert result.stdout.count("training and serving agree") == 2
    assert "stored, prompts: 3 of 3, 0:00:00 left" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--replay", "--parity"), "--parity needs real decoding"),
        (("--tree-nodes", "8,4"), "--tree-nodes must be in increasing order"),
        (("--tree-nodes", "0,4"), "--tree-nodes must be at least 1, got 0"),
        (("--limit", "0"), "--limit must be at least 1, got 0"),
        (("--target-model", "/nowhere"), "--target-model must be an existing directory"),
    ],
)
def test_usage_errors(run, work, options, message):
    result = run("evaluate", "--data", work / "stored", *options)
    assert result.exit_code == Exit.USAGE
    assert message in result.stderr
    assert "dflash train" not in result.stderr


def test_replay_needs_texts(run, work):
    result = run("evaluate", "--data", work / "code.txt", "--replay")
    assert result.exit_code == Exit.FAILED
    assert "--replay: prompt '1' of code has no text of the target" in result.stderr


def test_a_directory_without_a_checkpoint(work):
    arguments = ["evaluate", str(work / "stored"), "--data", str(work / "code.txt")]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == Exit.FAILED
    assert "stored is no checkpoint, and holds none\ngive a directory with" in result.stderr


def test_a_checkpoint_that_does_not_name_its_target(work):
    arguments = ["evaluate", str(work / "checkpoint"), "--data", str(work / "code.txt")]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == Exit.USAGE
    assert "--target-model is needed" in result.stderr


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("training.safetensors", b"", "training.safetensors cannot be read"),
        ("state.json", b"{", "state.json cannot be read"),
        ("state.json", b"{}", "names no target"),
        ("config.json", b'{"model', "config.json cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_told(work, tmp_path, tiny_target_dir, name, content, message):
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(work / "checkpoint", checkpoint)
    (checkpoint / name).write_bytes(content)
    target = [] if name == "state.json" else ["--target-model", str(tiny_target_dir)]
    arguments = ["evaluate", str(checkpoint), "--data", str(work / "code.txt"), *target]
    result = CliRunner().invoke(main, [*arguments, "--device", "cpu"])
    assert result.exit_code == Exit.FAILED
    assert message in result.stderr
    assert "--resume" not in result.stderr


@pytest.mark.parametrize("device", ["gpu", "0", "cuda:-1", "cuda:00", "mps", "cuda:999999999999"])
def test_a_device_that_is_none_is_told(run, work, device):
    result = run("evaluate", "--data", work / "code.txt", "--device", device)
    assert result.exit_code == Exit.USAGE
    assert f"--device must be cpu, cuda or cuda:N, got {device}" in result.stderr


@pytest.mark.parametrize(
    ("gap", "options", "kind", "code"),
    [
        (0.0005, (), "ties", Exit.OK),
        (0.5, (), "wrong", Exit.FAILED),
        (0.5, ("--tie-tolerance", "0.5"), "ties", Exit.OK),
        (math.inf, ("--tie-tolerance", "9"), "wrong", Exit.FAILED),
    ],
)
def test_a_text_that_is_not_the_targets_own_is_a_tie_or_wrong(
    run, work, monkeypatch, gap, options, kind, code
):
    monkeypatch.setattr(evaluate, "_warm_up", lambda *arguments: None)
    found = iter([None, Divergence(5, gap), None])
    monkeypatch.setattr(evaluate, "divergence", lambda *texts: next(found))
    result = run("evaluate", "--data", work / "stored", "--json", *options)
    assert result.exit_code == code
    (draft,) = json.loads(result.stdout)["sets"][0]["drafts"]
    assert draft["equal"] == 2
    expected = {"id": "def f(x):", "index": 5, "gap": gap if math.isfinite(gap) else None}
    assert draft[kind] == [expected]


def test_ctrl_c_prints_what_is_done(run, work, monkeypatch):
    right, calls = evaluate._decoded, []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return right(*arguments)

    monkeypatch.setattr(evaluate, "_warm_up", lambda *arguments: None)
    monkeypatch.setattr(evaluate, "_decoded", interrupted)
    options = ("--data", work / "stored", "--data", work / "code.txt")
    result = run("evaluate", *options)
    assert result.exit_code == Exit.INTERRUPTED
    assert "stored: 2 of 3 prompts" in result.stdout
    assert "code:" not in result.stdout


def test_a_report_by_hand():
    draft = DraftResult(
        0,
        2.5,
        {1: 2, 3: 6},
        tokens_per_s=20.0,
        speed_up=2.0,
        equal=2,
        ties=[evaluate.Difference("p", 7, 0.0625)],
        wrong=[evaluate.Difference("q", 3, None)],
    )
    slots = [SlotParity(1, 8, 0.99, 0.12, 0.12), SlotParity(2, 8, 0.5, 0.5, 0.1)]
    result = SetResult("set", 4, 4, 40, 10.0, [draft], slots)
    assert result.is_wrong
    assert as_text([result], 4, 0.125).splitlines() == [
        "set: 4 prompts, 40 tokens, plain decoding 10.0 tokens/s",
        "  draft          tau  tokens/s  speed-up  equal  ties  wrong",
        "  block 4       2.50      20.0     2.00x      2     1      1",
        "  tie: block 4, prompt 'p', token 7: logits 0.062 apart, within 0.125",
        "  WRONG: block 4, prompt 'q', token 3: one text had ended, not within 0.125",
        "  tokens per pass, block 4",
        "     1  ###########                       25%",
        "     3  ################################  75%",
        "  slot  drafts  training mask  decoding  accepted",
        "     1       8          99.0%     12.0%     12.0%  GAP +87%",
        "     2       8          50.0%     50.0%     10.0%",
        "  The same drafter predicts otherwise under the training mask than when it serves: look "
        "for a mask that leaks or a position that is off by one.",
    ]


def test_generate_writes_the_targets_own_text(run, work, tiny_model, tiny_tokenizer):
    expected = ""
    for text in PROMPTS:
        ids = tiny_tokenizer(text)["input_ids"]
        new = decode_plainly(
            Target(tiny_model, (1, 3)), ids, max_new_tokens=LONG, eos_token_ids=[2]
        )
        expected += tiny_tokenizer.decode(new, skip_special_tokens=True) + "\n"
    result = run("generate", "--raw", *PROMPTS)
    assert (result.exit_code, result.stdout) == (Exit.OK, expected)
    assert result.stderr.count(f"{LONG} tokens in ") == 3
    assert "tau 1." in result.stderr
    piped = run("generate", "--raw", "--tree-nodes", "6", stdin="\n".join(PROMPTS))
    assert piped.stdout == expected


def test_ctrl_c_leaves_generate_with_what_is_written(run, monkeypatch):
    right = generate.decode_parts

    def interrupted(steps, done):
        yield from islice(right(steps, done), 2)
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "decode_parts", interrupted)
    result = run("generate", "--raw", "def f(x):")
    assert result.exit_code == Exit.INTERRUPTED
    assert len(result.stdout) > 1
    assert "tokens in 2 passes of the target" in result.stderr


def test_pieces_are_whole_characters_and_make_up_the_text(tiny_tokenizer):
    text = "x = 'é€😀'  # done"
    tokens = tiny_tokenizer(text)["input_ids"]
    parts = [[token] for token in tokens]
    written = list(pieces(tiny_tokenizer, parts))
    assert "".join(written) == tiny_tokenizer.decode(tokens)
    assert not any("\ufffd" in piece for piece in written)
    assert sum(map(bool, written)) > 5
    # A text cut in the middle of a character is still written to its end.
    half = next(n for n in range(len(tokens)) if "\ufffd" in tiny_tokenizer.decode(tokens[:n]))
    cut = "".join(pieces(tiny_tokenizer, parts[:half]))
    assert cut == tiny_tokenizer.decode(tokens[:half])
