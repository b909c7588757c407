"""Stand-ins that drive the loop in milliseconds: an engine that makes tokens up, rewards that count them."""

from __future__ import annotations

import random

import numpy as np

from rloo_cli.data.order import prompt_row
from rloo_cli.types import Completion, FinishReason, GroupRewards, Prompt


class FakeEngine:
    """Completions that depend on (seed, stream, step, row) alone."""

    def __init__(self, vocab=250, on_generate=lambda step: None):
        self.weights_version = 0
        self.vocab = vocab
        self.on_generate = on_generate

    def generate(self, requests, params, key, *, on_group=None, check_stop=None):
        self.on_generate(key.step)
        if check_stop:
            check_stop()
        groups = []
        for index, request in enumerate(requests):
            rows = [self._completion(key, request.first_row + g) for g in range(request.num_generations)]
            groups.append(tuple(rows))
            if on_group:
                on_group(index, groups[-1])
        return groups

    def _completion(self, key, row):
        draw = random.Random(f"{key.seed} {key.stream} {key.step} {row}")
        tokens = tuple(draw.randrange(self.vocab) for _ in range(draw.randint(1, 9)))
        return Completion(
            token_ids=tokens, logprobs=(-5.0,) * len(tokens), finish_reason=FinishReason.STOPPED, weights_version=self.weights_version
        )

    def load_weights(self, named_tensors, version):
        self.weights_version = version

    def close(self):
        pass


class FakeMaker:
    def __init__(self, engine):
        self.engine = engine

    def make(self, model):
        return self.engine

    def close(self):
        self.engine.close()


class FakeRewards:
    """One reward, `even`: the share of even token ids."""

    names = ("even",)

    def __init__(self):
        self.waiting = {}

    def load_models(self):
        pass

    def submit(self, key, group, state):
        values = tuple(sum(t % 2 == 0 for t in c.token_ids) / len(c.token_ids) for c in group.completions)
        self.waiting[key] = GroupRewards(values=(values,))

    def poll(self):
        pass

    def collect(self, check_stop=None):
        done, self.waiting = self.waiting, {}
        return done

    def discard(self):
        self.waiting = {}


def make_prompts(count=5, seed=0):
    draw = random.Random(seed)
    return FakePrompts(
        Prompt(
            row=i, content=f"p{i}", text=f"p{i}", token_ids=tuple(draw.randrange(250) for _ in range(draw.randint(2, 7))), columns={"i": i}
        )
        for i in range(count)
    )


class FakePrompts(list):
    """Prompts with the lengths and the fingerprint that a PromptSet has."""

    fingerprint = "f" * 64
    first_with_images = None
    has_images = False

    has_images = False

    @property
    def lengths(self):
        return np.array([len(prompt.token_ids) for prompt in self])

    @property
    def longest(self):
        return int(self.lengths.max())

    @property
    def size(self):
        return len(self)

    @property
    def head(self):
        return self

    def parts(self):
        return [self]

    def draw(self, first, count, *, seed, shuffle, check_stop):
        check_stop()
        rows = [prompt_row(position, num_prompts=len(self), seed=seed, shuffle=shuffle) for position in range(first, first + count)]
        return [self[row] for row in rows]

    def passes(self, position):
        return position / len(self)


class ByteTexts:
    """Decodes token ids to their numbers."""

    def batch_decode(self, sequences, skip_special_tokens):
        return [" ".join(str(token) for token in ids) for ids in sequences]
