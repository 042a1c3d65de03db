"""`dflash prepare`: prompts or conversations to completions by the target, or token rows imported.

The output directory appears whole or not at all. What was generated so far lies beside it, in a
hidden directory: the same command goes on with it.
"""

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from dflash.config import hash_of
from dflash.data.completions import Completion, Completions, refuse_existing, write_completions
from dflash.data.generate import Sampling, meta
from dflash.data.journal import Journal
from dflash.data.regenerate import Prompter, Writer, regenerate
from dflash.data.sources import Conversation, TokenRow, conversations, is_tokenized, token_rows
from dflash.data.tables import some
from dflash.errors import DataError, DflashError, Exit, ModelError
from dflash.manifest import collect
from dflash.resolve import check_device, choose_dtype, warn_of_missing_kernels
from dflash.target_files import load_causal_lm, load_text_config, load_tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """What `dflash prepare` was told; validated by click."""

    source: Path
    target_model: Path
    output_dir: Path
    max_seq_len: int
    max_new_tokens: int
    batch_size: int
    temperature: float
    top_p: float
    seed: int
    chat_template: bool
    device: str
    dtype: str
    trust_remote_code: bool

    def generation(self) -> dict[str, Any]:
        """What determines the text, for meta.json."""
        kept = ("max_new_tokens", "max_seq_len", "batch_size", "temperature", "top_p", "seed")
        return {name: getattr(self, name) for name in (*kept, "chat_template", "dtype")}


@dataclass
class Tally:
    """Rows that were taken, left out or cut, each with where it stood."""

    taken: int = 0
    set_aside: dict[str, list[str]] = field(default_factory=dict)

    def note(self, what: str, where: str) -> None:
        """Count one row under `what`."""
        self.set_aside.setdefault(what, []).append(where)

    def report(self) -> None:
        """Log every count with the first few rows."""
        log.info("%d rows", self.taken)
        for what, places in self.set_aside.items():
            log.warning("%d %s: %s", len(places), what, some(places))

    def counts(self) -> dict[str, Any]:
        """The same for meta.json."""
        kinds = {what: len(places) for what, places in self.set_aside.items()}
        return {"counts": {"rows": self.taken, **kinds}}


def prepare(options: PrepareOptions) -> int:
    """Do what the options say; returns the exit code. Raises DflashError."""
    refuse_existing(options.output_dir)
    check_device("--device", options.device)
    text_config = load_text_config(
        str(options.target_model), trust_remote_code=options.trust_remote_code
    )
    tokenizer = load_tokenizer(options.target_model, trust_remote_code=options.trust_remote_code)
    if is_tokenized(options.source):
        return _import_rows(options, tokenizer, text_config.vocab_size)
    warn_of_missing_kernels(text_config, [options.device])
    try:
        return _regenerate(options, tokenizer, text_config.vocab_size)
    except KeyboardInterrupt:
        log.warning("interrupted; the same command goes on after the last whole batch")
        return Exit.STOPPED
    except torch.OutOfMemoryError as error:
        raise DflashError(
            f"--device {options.device}: its memory is full: {str(error).partition('.')[0]}",
            remedy="Lower --max-new-tokens or --max-seq-len, and see who else is on that GPU: "
            "dflash-diag preflight",
        ) from error


def _regenerate(
    options: PrepareOptions, tokenizer: PreTrainedTokenizerBase, vocab_size: int
) -> int:
    chat = _uses_template(options, tokenizer)
    prompter = Prompter(tokenizer, chat, options.max_new_tokens, options.max_seq_len)
    tally = Tally()
    asked = _askable(prompter, options.source, vocab_size, tally)
    generation = {**options.generation(), "chat_template": chat}
    about = meta(options.target_model, **generation) | {"source": _source_of(options)}
    directory = options.output_dir.with_name(f".preparing-{options.output_dir.name}")
    with Journal(directory, about) as journal:
        model: Any = load_causal_lm(
            str(options.target_model),
            choose_dtype(options.dtype, [options.device]),
            trust_remote_code=options.trust_remote_code,
        )
        model.to(options.device)
        sampling = Sampling(options.temperature, options.top_p, options.seed)
        writer = Writer(model, prompter, sampling, options.source.name)
        regenerate(writer, asked, journal, batch_size=options.batch_size, say=log.info)
        asked_for = sum(one.user_turns for one in asked)
        rows = _countable(journal.rows(), asked_for, tally)
        _write(options, rows, about | {"software": _software(generation)}, tally)
        journal.discard()
    return Exit.OK


def _askable(prompter: Prompter, source: Path, vocab_size: int, tally: Tally) -> list[Conversation]:
    """The conversations whose first prompt can be answered; the others are counted."""
    asked = []
    for one in conversations(source):
        if not one.user_turns:
            tally.note("lines left out, without a user's text", f"line {one.line}")
            continue
        first = next(i for i, said in enumerate(one.messages) if said["role"] == "user")
        prompt = prompter.prompt(one.messages[: first + 1])
        if max(prompt, default=0) >= vocab_size:
            raise ModelError(
                f"{source}: line {one.line}: the tokenizer gives token id {max(prompt)}, the"
                f" target's vocabulary ends at {vocab_size - 1}",
                remedy="Check --target-model: model and tokenizer are not of one kind.",
            )
        if not prompt:
            tally.note("lines left out, no token in them", f"line {one.line}")
        elif not prompter.fits(prompt):
            tally.note(
                "lines left out, prompt + --max-new-tokens is past --max-seq-len",
                f"line {one.line} ({len(prompt)} tokens)",
            )
        else:
            asked.append(one)
    if not asked and not tally.set_aside:
        raise DataError(f"{source}: no line in it", remedy="Write a prompt on each line.")
    if not asked:
        tally.report()
        raise DataError(
            f"{source}: not one of its lines is a prompt that can be answered",
            remedy="Look at the counts above; raise --max-seq-len or lower --max-new-tokens.",
        )
    return asked


def _countable(rows: Iterator[Completion], asked_for: int, tally: Tally) -> Iterator[Completion]:
    """The rows with something to draft; the others are counted."""
    got = 0
    for row in rows:
        got += 1
        if sum(row.loss_mask) < 2:
            tally.note("completions left out, fewer than two tokens long", row.id)
        else:
            tally.taken += 1
            yield row
    if asked_for > got:
        tally.note("later turns left out, past --max-seq-len", f"{asked_for - got} turns")


def _import_rows(
    options: PrepareOptions, tokenizer: PreTrainedTokenizerBase, vocab_size: int
) -> int:
    about = meta(options.target_model)
    if options.source.suffix != ".jsonl":
        data = Completions(options.source)
        data.check_tokenizer(options.target_model)
        about["generation"] = data.meta().get("generation", {})
    tally = Tally()
    rows = _importable(options, tokenizer, vocab_size, tally)
    software = _software({"max_seq_len": options.max_seq_len})
    _write(options, rows, about | {"source": _source_of(options), "software": software}, tally)
    return Exit.OK


def _importable(
    options: PrepareOptions, tokenizer: PreTrainedTokenizerBase, vocab_size: int, tally: Tally
) -> Iterator[Completion]:
    """The rows that can be trained on, cut to --max-seq-len; raises DataError for a foreign one."""
    unchecked = True
    for row in token_rows(options.source):
        ids, mask = row.completion.input_ids, row.completion.loss_mask
        for token in ids:
            if not 0 <= token < vocab_size:
                raise DataError(
                    f"{options.source}: {row.where} has token id {token}, the target's vocabulary"
                    f" ends at {vocab_size - 1}",
                    remedy="It was made with another tokenizer: give its --target-model.",
                )
        if row.text is not None and unchecked:
            _check_text(options, row, tokenizer)
            unchecked = False
        if len(ids) > options.max_seq_len:
            tally.note("rows cut to --max-seq-len", f"{row.where} ({len(ids)} tokens)")
            ids, mask = ids[: options.max_seq_len], mask[: options.max_seq_len]
        if not any(mask):
            tally.note("rows left out, loss_mask is 0 throughout", row.where)
        elif not any(a and b for a, b in pairwise(mask)):
            tally.note("rows left out, no two supervised tokens in a row", row.where)
        else:
            tally.taken += 1
            yield Completion(row.completion.id, row.completion.source, ids, mask)
    if unchecked and not (options.source / "meta.json").is_file():
        log.warning("nothing in %s says which tokenizer made its ids", options.source)


def _check_text(options: PrepareOptions, row: TokenRow, tokenizer: PreTrainedTokenizerBase) -> None:
    """speculators keeps the text of the ids beside them: this tokenizer must read the same."""
    ours = tokenizer.decode(list(row.completion.input_ids), skip_special_tokens=False)
    if ours != row.text:
        raise DataError(
            f"{options.source}: {row.where}: its ids are {ours[:40]!r} to the tokenizer of"
            f" {options.target_model}, but its text is {str(row.text)[:40]!r}",
            remedy="It was made with another tokenizer: give its --target-model.",
        )


def _write(
    options: PrepareOptions, rows: Iterator[Completion], about: dict[str, Any], tally: Tally
) -> None:
    """Write what `rows` yields, counting on the way; raises DataError when there is nothing."""
    write_completions(options.output_dir, _some(rows, options.source, tally), about, tally.counts)
    tally.report()
    log.info("written: %s", options.output_dir)


def _some(rows: Iterator[Completion], source: Path, tally: Tally) -> Iterator[Completion]:
    yield from rows
    if not tally.taken:
        tally.report()
        raise DataError(
            f"{source}: not one of its rows can be trained on",
            remedy="Look at the counts above: every row needs two supervised tokens in a row.",
        )


def _uses_template(options: PrepareOptions, tokenizer: PreTrainedTokenizerBase) -> bool:
    if not options.chat_template:
        log.info("prompts are continued as they stand: --no-chat-template")
        return False
    if tokenizer.chat_template is None:
        log.warning("prompts are continued as they stand: the tokenizer has no chat template")
        return False
    log.info("prompts go through the tokenizer's chat template")
    return True


def _software(settings: dict[str, Any]) -> dict[str, str]:
    return asdict(collect(hash_of(settings)))


def _source_of(options: PrepareOptions) -> dict[str, Any]:
    """The source by name and, if it is one file, by content."""
    path = options.source
    digest = None
    if path.is_file():
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"name": path.name, "sha256": digest}
