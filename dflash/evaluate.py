"""`dflash evaluate`: acceptance length, speed-up and losslessness on prompt sets."""

import json
import logging
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from dflash.data.completions import Completion
from dflash.decode import Decoded, acceptance_length, decoded_from, replays
from dflash.decoding_options import DecodingOptions, EvaluateOptions
from dflash.engine import Engine, load_engine
from dflash.errors import DataError, Exit
from dflash.parity import DecodedText, slot_parity
from dflash.progress import shown
from dflash.promptsets import PromptSet, read_prompts
from dflash.report import Difference, DraftResult, SetResult, as_text
from dflash.verify import Divergence, divergence, require_tree_mask

log = logging.getLogger(__name__)
T = TypeVar("T")
WARM_UP_TOKENS = 4
# Logits this near may change places between a pass of one token and a pass of a block: a step of
# bfloat16 between 32 and 64, the most that was measured; in float32 sums in another order.
TIE = {torch.bfloat16: 0.25, torch.float32: 1e-3}


@dataclass(frozen=True)
class Run:
    """One prompt, drafted for in one way."""

    decoded: Decoded
    seconds: float = 0.0
    differs: Divergence | None = None


@dataclass(frozen=True)
class Sample:
    """One prompt: the target's own text, and a Run for each way of drafting (0: chain).

    `plain_s`: what plain decoding took; it and the Runs' times are 0 in a replay, which has none.
    """

    id: str
    plain_tokens: int
    plain_s: float
    runs: dict[int, Run]
    text: DecodedText | None = None


def evaluate(
    checkpoint: Path, data: Sequence[Path], decoding: DecodingOptions, options: EvaluateOptions
) -> int:
    """Measure and print; returns the exit code: 1 where something is wrong, 130 after Ctrl-C."""
    engine = load_engine(checkpoint, decoding)
    if options.tree_nodes:
        require_tree_mask(engine.target)
    sets = [
        read_prompts(
            path,
            engine.tokenizer,
            Path(engine.target_model),
            engine.head.vocab_size,
            limit=options.limit,
            raw=decoding.raw,
        )
        for path in data
    ]
    measure = _replayed if options.replay else _decoded
    if options.replay:
        _require_texts(sets)
        for note in filter(None, (one.note for one in sets)):
            log.warning("%s", note)
    else:
        _warm_up(engine, sets[0].documents[0], options)
    results: list[SetResult] = []
    for one in sets:
        samples, interrupted = _until_interrupt(_samples(engine, one, options, measure))
        if samples:
            results.append(_summary(engine, one, samples, options))
        if interrupted:
            break
    complete = len(results) == len(sets) and all(r.prompts == r.asked for r in results)
    tolerance = _tolerance(engine, options)
    if options.json:
        print(json.dumps(_as_json(engine, results, tolerance, complete), indent=2))
    else:
        print(as_text(results, engine.drafter.config.block_size, tolerance), end="")
    if not complete:
        return Exit.INTERRUPTED
    return Exit.FAILED if any(result.is_wrong for result in results) else Exit.OK


Measure = Callable[[Engine, Completion, EvaluateOptions], Sample]


def _samples(
    engine: Engine, prompts: PromptSet, options: EvaluateOptions, measure: Measure
) -> Iterable[Sample]:
    documents = shown(prompts.documents, len(prompts.documents), f"{prompts.name}, prompts")
    return (measure(engine, one, options) for one in documents)


def _decoded(engine: Engine, one: Completion, options: EvaluateOptions) -> Sample:
    """Decode plainly, then in every way, each timed from the prompt to the last token."""
    prompt = list(one.input_ids[: one.prompt_length])
    own, plain_s = _timed(engine.plain, prompt)
    runs, text = {}, None
    for nodes in _ways(options):
        steps, seconds = _timed(engine.steps, prompt, nodes)
        decoded = decoded_from(steps)
        differs = divergence(engine.target, prompt, decoded.tokens, own)
        runs[nodes] = Run(decoded, seconds, differs)
        text = text or DecodedText(prompt, steps)
    return Sample(one.id, len(own), plain_s, runs, text)


def _replayed(engine: Engine, one: Completion, options: EvaluateOptions) -> Sample:
    models = (engine.target, engine.drafter, engine.head)
    runs = {nodes: Run(decoded) for nodes, decoded in replays(*models, one, _ways(options)).items()}
    return Sample(one.id, len(one.input_ids) - one.prompt_length, 0.0, runs)


def _tolerance(engine: Engine, options: EvaluateOptions) -> float:
    asked = options.tie_tolerance
    return TIE[engine.target.model.dtype] if asked is None else asked


def _ways(options: EvaluateOptions) -> tuple[int, ...]:
    return (0, *(options.tree_nodes or ()))


def _timed(work: Callable[..., Iterable[T]], *args: Any) -> tuple[list[T], float]:
    """Everything that the work yields, and its seconds."""
    started_s = time.perf_counter()
    return list(work(*args)), time.perf_counter() - started_s


def _warm_up(engine: Engine, one: Completion, options: EvaluateOptions) -> None:
    """The first passes pay for what the others find done; no way of decoding should be charged."""
    _decoded(replace(engine, max_new_tokens=WARM_UP_TOKENS), one, options)


def _require_texts(sets: list[PromptSet]) -> None:
    for one in sets:
        for document in one.documents:
            if document.prompt_length == len(document.input_ids):
                raise DataError(
                    f"--replay: prompt {document.id!r} of {one.name} has no text of the target",
                    remedy="give a directory of the target's greedy completions, or leave out "
                    "--replay",
                )


def _until_interrupt(items: Iterable[T]) -> tuple[list[T], bool]:
    """Everything up to the end or the first Ctrl-C, and whether that came."""
    done: list[T] = []
    try:
        for item in items:
            done.append(item)
    except KeyboardInterrupt:
        return done, True
    return done, False


def _summary(
    engine: Engine, prompts: PromptSet, samples: list[Sample], options: EvaluateOptions
) -> SetResult:
    plain_s = sum(sample.plain_s for sample in samples)
    tokens = sum(sample.plain_tokens for sample in samples)
    tolerance = _tolerance(engine, options)
    texts = [sample.text for sample in samples if sample.text] if options.parity else []
    return SetResult(
        prompts.name,
        len(prompts.documents),
        len(samples),
        tokens,
        tokens / plain_s if plain_s else None,
        [_draft_result(nodes, samples, tolerance) for nodes in samples[0].runs],
        slot_parity(engine.target, engine.drafter, engine.head, texts),
    )


def _draft_result(nodes: int, samples: list[Sample], tolerance: float) -> DraftResult:
    runs = [sample.runs[nodes] for sample in samples]
    passes = Counter(step for run in runs for step in run.decoded.steps)
    tau, histogram = acceptance_length([run.decoded for run in runs]), dict(sorted(passes.items()))
    if not samples[0].plain_s:
        return DraftResult(nodes, tau, histogram)
    seconds = sum(run.seconds for run in runs)
    differ = [(s.id, s.runs[nodes].differs) for s in samples]
    found = [(name, differs) for name, differs in differ if differs is not None]
    speed = sum(len(run.decoded.tokens) for run in runs) / seconds
    plain = sum(s.plain_tokens for s in samples) / sum(s.plain_s for s in samples)
    return DraftResult(
        nodes,
        tau,
        histogram,
        tokens_per_s=speed,
        speed_up=speed / plain,
        equal=len(runs) - len(found),
        ties=[_difference(name, d) for name, d in found if d.gap <= tolerance],
        wrong=[_difference(name, d) for name, d in found if d.gap > tolerance],
    )


def _difference(name: str, found: Divergence) -> Difference:
    return Difference(name, found.index, found.gap if math.isfinite(found.gap) else None)


def _as_json(
    engine: Engine, results: list[SetResult], tolerance: float, complete: bool
) -> dict[str, Any]:
    return {
        "checkpoint": str(engine.checkpoint),
        "target_model": engine.target_model,
        "block_size": engine.drafter.config.block_size,
        "dtype": str(engine.target.model.dtype).removeprefix("torch."),
        "device": str(engine.target.device),
        "tie_tolerance": tolerance,
        "complete": complete,
        "tau": statistics.fmean(result.drafts[0].tau for result in results) if results else None,
        "sets": [asdict(result) for result in results],
    }
