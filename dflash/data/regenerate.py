"""Every assistant turn of a conversation written anew by the target, batch by batch, resumable."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dflash.data.completions import Completion
from dflash.data.generate import Message, Sampling, chat_prompt, generate
from dflash.data.journal import Journal
from dflash.data.sources import Conversation
from dflash.progress import shown


@dataclass(frozen=True)
class Prompter:
    """Messages to token ids, and whether they leave room for a whole completion.

    With `chat`, messages go through the tokenizer's chat template; without, a text is continued as
    it stands. `max_seq_len` bounds prompt and completion together.
    """

    tokenizer: PreTrainedTokenizerBase
    chat: bool
    max_new_tokens: int
    max_seq_len: int

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids to continue."""
        if self.chat:
            return chat_prompt(self.tokenizer, messages)
        return list(self.tokenizer("\n".join(m["content"] for m in messages))["input_ids"])

    def fits(self, prompt: Sequence[int]) -> bool:
        """Whether there is room for a whole completion."""
        return len(prompt) + self.max_new_tokens <= self.max_seq_len


@dataclass(frozen=True)
class Writer:
    """The target as an author; `source` is noted in each row."""

    model: PreTrainedModel
    prompter: Prompter
    sampling: Sampling
    source: str

    def write(self, batch: Sequence[Conversation], first: int) -> list[Completion]:
        """One row for each user turn, conversation by conversation; a function of its arguments.

        `first`: the number of the first of these conversations, which the draws depend on.
        What was generated before a turn stands in its prompt as text; only ids that were generated
        are supervised, and those are never tokenized again.
        """
        rows: dict[int, list[Completion]] = {i: [] for i in range(len(batch))}
        said: list[list[Message]] = [[] for _ in batch]
        left = [list(conversation.messages) for conversation in batch]
        for turn in count():
            asking = [i for i in rows if _hear_user(said[i], left[i])]
            prompts = {i: self.prompter.prompt(said[i]) for i in asking}
            fitting = {i: prompt for i, prompt in prompts.items() if self.prompter.fits(prompt)}
            for i in prompts.keys() - fitting.keys():
                left[i].clear()
            if not fitting:
                break
            asked = [(_row_id(batch[i], turn), prompt) for i, prompt in fitting.items()]
            for i, done in zip(fitting, self._generate(asked, first, turn), strict=True):
                rows[i].append(done)
                said[i].append({"role": "assistant", "content": self._text(done)})
        return [row for i in rows for row in rows[i]]

    def _generate(
        self, asked: Sequence[tuple[str, list[int]]], first: int, turn: int
    ) -> Iterator[Completion]:
        state = np.random.SeedSequence([self.sampling.seed, first, turn]).generate_state(1)
        return generate(
            self.model,
            self.prompter.tokenizer,
            asked,
            source=self.source,
            max_new_tokens=self.prompter.max_new_tokens,
            batch_size=len(asked),
            sampling=replace(self.sampling, seed=int(state[0])),
        )

    def _text(self, done: Completion) -> str:
        written = list(done.input_ids[done.prompt_length :])
        return str(self.prompter.tokenizer.decode(written, skip_special_tokens=True))


def regenerate(
    writer: Writer,
    asked: Sequence[Conversation],
    journal: Journal,
    *,
    batch_size: int,
    say: Callable[[str], None],
) -> None:
    """Write all conversations into the journal, from the first batch that it does not have.

    Where the GPU's memory does not hold a batch, it is written in smaller ones, and so are the
    next. Raises torch.OutOfMemoryError where it does not hold a single conversation.
    """
    done = min(journal.batches * batch_size, len(asked))
    if done:
        say(f"{done} of {len(asked)} prompts were done before")
    batches, tokens, started_s = range(done, len(asked), batch_size), 0, time.monotonic()
    together = batch_size
    for start in shown(batches, len(batches), f"batches of {batch_size} prompts"):
        rows, together = _written(writer, asked[start : start + batch_size], start, together, say)
        journal.append(rows)
        tokens += sum(sum(row.loss_mask) for row in rows)
    elapsed_s = time.monotonic() - started_s
    if batches:
        say(f"{len(asked)} prompts done, {tokens} tokens written, {tokens / elapsed_s:.0f} tok/s")


def _written(
    writer: Writer,
    batch: Sequence[Conversation],
    first: int,
    together: int,
    say: Callable[[str], None],
) -> tuple[list[Completion], int]:
    """The rows of a batch, and how many conversations there is memory for at once."""
    rows: list[Completion] = []
    done = 0
    while done < len(batch):
        try:
            rows += writer.write(batch[done : done + together], first + done)
            done += together
        except torch.OutOfMemoryError:
            tried = min(together, len(batch) - done)
            if tried == 1:
                raise
            together = math.ceil(tried / 2)
            say(f"the GPU's memory does not hold {tried} prompts at once: {together} from here on")
    return rows, together


def _row_id(conversation: Conversation, turn: int) -> str:
    return conversation.id if conversation.user_turns == 1 else f"{conversation.id}/{turn}"


def _hear_user(said: list[Message], left: list[Message]) -> bool:
    """Move messages from `left` to `said` up to the next user's; False when there is none."""
    while left:
        said.append(left.pop(0))
        if said[-1]["role"] == "user":
            return True
    return False
