"""Random pipelines with random faults, under a tiny switch interval.

The pipeline: 2-4 stages of 1-3 threads, joined by channels of capacity 1-3, passing numbered items.
"""

import random
import threading
from collections import Counter

import pytest

from dflash.concurrency import ChannelBroken, TaskGroup, channel

CHUNKS = 8
RUNS_PER_CHUNK = 250
DEADLINE_S = 20.0
FAULTS = ("none", "exception", "two exceptions", "cancel", "early return")
STOP = "injected stop"


class Injected(Exception):
    pass


class EarlyReturn(Exception):
    """Unwinds a stage to its own frame, outside of which it returns as if done."""


class Trial:
    """One run: what it was asked to do, what was injected, what came out."""

    def __init__(self, seed):
        rng = random.Random(seed)
        self.prefix = f"trial-{seed}-"
        self.n_items = rng.randint(1, 12)
        self.threads_per_stage = [rng.randint(1, 3) for _ in range(rng.randint(2, 4))]
        self.capacities = [rng.randint(1, 3) for _ in self.threads_per_stage[1:]]
        self.fault = rng.choice(FAULTS)
        tasks = [(s, t) for s, n in enumerate(self.threads_per_stage) for t in range(n)]
        if self.fault == "early return":
            tasks = [(s, t) for s, t in tasks if s > 0]
        n_faulty = {"none": 0, "two exceptions": 2}.get(self.fault, 1)
        faulty = rng.sample(tasks, n_faulty)
        self.fault_at = {task: rng.randint(0, self.n_items // 2) for task in faulty}
        self.injected = []
        self.faulty_stages = []
        self.received = []
        self.clean_ends = 0
        self.error = None

    def run(self):
        try:
            with TaskGroup(self.prefix) as self.group:
                self._start_stages()
        except BaseException as error:
            self.error = error

    def _start_stages(self):
        links = [
            channel(self.group.scope, capacity, f"link-{i}")
            for i, capacity in enumerate(self.capacities)
        ]
        items = iter(range(self.n_items))
        for stage, n_threads in enumerate(self.threads_per_stage):
            sender = links[stage][0] if stage < len(links) else None
            receiver = links[stage - 1][1] if stage else None
            bodies = [self._body(stage, sender, receiver, items, t) for t in range(n_threads)]
            for end in (sender, receiver):
                if end is not None:
                    end.close()
            for t, (body, args) in enumerate(bodies):
                self.group.start(body, *args, name=f"{self.prefix}{stage}-{t}")

    def _body(self, stage, sender, receiver, items, thread):
        task = (stage, thread)
        if receiver is None:
            return self._source, (task, sender.clone(), items)
        if sender is None:
            return self._sink, (task, receiver.clone())
        return self._middle, (task, receiver.clone(), sender.clone())

    def _source(self, task, sender, items):
        with sender:
            for n, item in enumerate(items):  # next() on a range iterator is atomic under the GIL
                self._inject(task, n)
                sender.send(item)

    def _middle(self, task, receiver, sender):
        with receiver, sender:
            self._until_early_return(task, receiver, sender.send)

    def _sink(self, task, receiver):
        with receiver:
            if self._until_early_return(task, receiver, self.received.append):
                self.clean_ends += 1

    def _until_early_return(self, task, receiver, use):
        n = 0
        while True:
            try:
                self._inject(task, n)  # before receiving, so that an early return loses no item
                item = next(receiver)
            except (EarlyReturn, StopIteration) as end:
                return isinstance(end, StopIteration)
            use(item)
            n += 1

    def _inject(self, task, n):
        if self.fault_at.get(task) != n:
            return
        self.faulty_stages.append(task[0])
        if self.fault == "cancel":
            self.group.cancel(STOP)
        elif self.fault == "early return":
            raise EarlyReturn
        else:
            self.injected.append(Injected(f"stage {task[0]}"))
            raise self.injected[-1]

    def check(self):
        assert max(Counter(self.received).values(), default=0) <= 1, "an item came twice"
        if self.injected:
            self._check_failed()
        elif self.faulty_stages and self.fault == "cancel":
            assert self.error is None
            assert self.group.scope.reason == STOP
        elif self.faulty_stages:
            self._check_early_return()
        else:
            assert self.error is None
            assert sorted(self.received) == list(range(self.n_items))

    def _check_failed(self):
        assert isinstance(self.error, ExceptionGroup), "a clean end after an exception"
        assert self.error.exceptions[0] in self.injected
        assert set(self.error.exceptions) == set(self.injected)
        if min(self.faulty_stages) < len(self.threads_per_stage) - 1:
            assert self.clean_ends == 0, "a sink saw a clean end after an exception before it"

    def _check_early_return(self):
        if self.error is not None:
            assert {type(error) for error in self.error.exceptions} == {ChannelBroken}


def threads_of(trial):
    return [t.name for t in threading.enumerate() if t.name.startswith(trial.prefix)]


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_pipelines(chunk, tiny_switch_interval):
    figures = Counter(runs=0, faults=0, hangs=0, threads_left=0)
    for seed in range(chunk * RUNS_PER_CHUNK, (chunk + 1) * RUNS_PER_CHUNK):
        trial = Trial(seed)
        runner = threading.Thread(target=trial.run, name=f"runner-{seed}", daemon=True)
        runner.start()
        runner.join(DEADLINE_S)
        figures["runs"] += 1
        figures["faults"] += bool(trial.faulty_stages)
        figures[f"fault: {trial.fault}"] += bool(trial.faulty_stages)
        figures["hangs"] += runner.is_alive()
        left = threads_of(trial)
        figures["threads_left"] += len(left)
        assert not runner.is_alive(), f"seed {seed} hung: {left}"
        assert not left, f"seed {seed} left {left}"
        trial.check()
    print(dict(figures))
    assert figures["faults"] > RUNS_PER_CHUNK / 2
