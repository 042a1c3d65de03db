"""What `dflash evaluate` found: the values that are printed as JSON, and the same as text."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from dflash.parity import SlotParity

MEASURED = f"{'tokens/s':>10}{'speed-up':>10}{'equal':>7}{'ties':>6}{'wrong':>7}"
BAR = 32  # columns of a histogram's longest bar


@dataclass(frozen=True)
class Difference:
    """A text that is not the target's own: from token `index` on, where the two tokens' logits are
    `gap` apart (None: one text had ended)."""

    id: str
    index: int
    gap: float | None


@dataclass(frozen=True)
class DraftResult:
    """One way of drafting on one set; a replay has tau and tokens_per_pass only.

    Attributes:
        tree_nodes: 0 for the block itself, else the budget of the draft tree.
        tokens_per_pass: verification passes by the tokens that they yielded.
        equal: texts that are the target's own, token for token.
        ties, wrong: texts that are not, where the choice was, or was not, within the tolerance.
    """

    tree_nodes: int
    tau: float
    tokens_per_pass: dict[int, int]
    tokens_per_s: float | None = None
    speed_up: float | None = None
    equal: int | None = None
    ties: list[Difference] = field(default_factory=list)
    wrong: list[Difference] = field(default_factory=list)


@dataclass(frozen=True)
class SetResult:
    """One prompt set; `asked` is more than `prompts` where Ctrl-C ended it."""

    name: str
    asked: int
    prompts: int
    tokens: int
    plain_tokens_per_s: float | None
    drafts: list[DraftResult]
    parity: list[SlotParity]

    @property
    def is_wrong(self) -> bool:
        """Whether a text is not the target's own, or training and serving disagree."""
        return any(d.wrong for d in self.drafts) or any(slot.is_wrong for slot in self.parity)


def as_text(results: list[SetResult], block_size: int, tolerance: float) -> str:
    """Every set: tau, speed, losslessness, how many tokens a pass yields, and parity if asked."""
    return "\n".join(
        "".join(f"{line}\n" for line in _set(one, block_size, tolerance)) for one in results
    )


def _set(one: SetResult, block_size: int, tolerance: float) -> Iterator[str]:
    done = f"{one.prompts}" if one.prompts == one.asked else f"{one.prompts} of {one.asked}"
    speed = one.plain_tokens_per_s
    plain = "by replay" if speed is None else f"plain decoding {speed:.1f} tokens/s"
    yield f"{one.name}: {done} prompts, {one.tokens} tokens, {plain}"
    yield f"  {'draft':<12}{'tau':>6}" + (MEASURED if speed is not None else "")
    for draft in one.drafts:
        yield _row(draft, block_size)
    for draft in one.drafts:
        yield from _differences(draft, block_size, tolerance)
    yield f"  tokens per pass, {_name(one.drafts[0], block_size)}"
    yield from _histogram(one.drafts[0].tokens_per_pass)
    yield from _parity(one.parity)


def _name(draft: DraftResult, block_size: int) -> str:
    return f"{draft.tree_nodes} nodes" if draft.tree_nodes else f"block {block_size}"


def _row(draft: DraftResult, block_size: int) -> str:
    row = f"  {_name(draft, block_size):<12}{draft.tau:>6.2f}"
    if draft.speed_up is None:
        return row
    return row + (
        f"{draft.tokens_per_s:>10.1f}{draft.speed_up:>9.2f}x{draft.equal:>7}{len(draft.ties):>6}"
        f"{len(draft.wrong):>7}"
    )


def _differences(draft: DraftResult, block_size: int, tolerance: float) -> Iterator[str]:
    for kind, rule, found in (("tie", "within", draft.ties), ("WRONG", "not within", draft.wrong)):
        for one in found:
            yield (
                f"  {kind}: {_name(draft, block_size)}, prompt {one.id!r}, token {one.index}: "
                f"{_gap(one)}, {rule} {tolerance:g}"
            )


def _gap(one: Difference) -> str:
    return "one text had ended" if one.gap is None else f"logits {one.gap:.2g} apart"


def _histogram(tokens_per_pass: dict[int, int]) -> Iterator[str]:
    passes = sum(tokens_per_pass.values())
    longest = max(tokens_per_pass.values(), default=0)
    for tokens, count in tokens_per_pass.items():
        bar = "#" * max(1, round(BAR * count / longest))
        yield f"  {tokens:>4}  {bar:<{BAR}} {count / passes:>4.0%}"


def _parity(slots: list[SlotParity]) -> Iterator[str]:
    if not slots:
        return
    yield f"  {'slot':>4}{'drafts':>8}{'training mask':>15}{'decoding':>10}{'accepted':>10}"
    for one in slots:
        mark = f"  GAP {one.gap:+.0%}" if one.is_wrong else ""
        yield (
            f"  {one.slot:>4}{one.asked:>8}{one.training:>15.1%}{one.decoding:>10.1%}"
            f"{one.accepted:>10.1%}{mark}"
        )
    if any(one.is_wrong for one in slots):
        yield (
            "  The same drafter predicts otherwise under the training mask than when it serves: "
            "look for a mask that leaks or a position that is off by one."
        )
    else:
        yield "  training and serving agree"
