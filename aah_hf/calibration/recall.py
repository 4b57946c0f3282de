"""Recall text: facts scattered through a haystack and asked at its end (method.md §8).

On ordinary prose most heads look short-sighted; windows chosen on prose alone lose what only a few
heads carry. Text that must be looked up from far back shows which ones. Sequences are built from
token ids, so they have an exact length and the distance of every answer from its fact is known, whatever
the tokenizer. Calibration and evaluation share no sentence, no key and no value.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import CalibrationError
from .recall_words import ACTIONS, ADJECTIVES, ENDINGS, KEYS, SUBJECTS, TEMPLATES, WORDS

SPLITS = ("calibration", "evaluation")
TOKENS_PER_FACT = {"calibration": 64, "evaluation": 128}
"""One fact for so many tokens of the sequence. Calibration is dense: only at the questions do the heads
that look far back show what they are for."""
MAX_FACTS = 32


@dataclass(frozen=True)
class RecallSequence:
    """One sequence of recall text.

    Attributes:
        ids: [seq_len] token ids.
        answers: [seq_len] bool, True at the tokens of the answers.
        distances: per question, tokens between the value in its fact and the same value in the answer.
    """

    ids: Tensor
    answers: Tensor
    distances: tuple[int, ...]


def recall_sequences(
    tokenizer: Any,
    count: int,
    *,
    seq_len: int,
    seed: int = 0,
    split: str = "calibration",
    haystack: Sequence[int] = (),
) -> list[RecallSequence]:
    """Build `count` sequences of exactly `seq_len` tokens.

    Args:
        tokenizer: anything called like a transformers tokenizer.
        split: "calibration" or "evaluation"; they share no template, key or value.
        haystack: token ids to hide the facts in, used up in order; where they run out, built-in sentences.

    Raises:
        CalibrationError: unknown split, or `seq_len` has no room for one fact and its question.
    """
    if split not in SPLITS:
        raise CalibrationError(f"split is {split!r}; choose one of {', '.join(SPLITS)}.")
    rng = random.Random(f"{seed}:{split}")
    hay, sequences = list(haystack), []
    prefix, newline = prefix_ids(tokenizer), encode(tokenizer, "\n")
    for _ in range(count):
        facts = _facts(tokenizer, rng, split, max(1, min(MAX_FACTS, seq_len // TOKENS_PER_FACT[split])), newline)
        while len(facts) > 1 and len(prefix) + sum(f.size for f in facts) > 0.8 * seq_len:
            facts.pop()
        room = seq_len - len(prefix) - sum(f.size for f in facts)
        if room < 0:
            raise CalibrationError(
                f"seq_len={seq_len} is too short for recall text: one fact and its question take "
                f"{seq_len - room} tokens. Use a longer seq_len or recall_fraction=0."
            )
        if len(hay) >= room:
            text, hay = hay[:room], hay[room:]
        else:
            text = _filler(tokenizer, rng, room)
        sequences.append(_assemble(tokenizer, prefix, facts, text, rng))
    return sequences


@dataclass(frozen=True)
class _Fact:
    """Token ids around one value: `fact value stop`, later `question value stop`."""

    fact: list[int]
    question: list[int]
    value: list[int]
    stop: list[int]

    @property
    def size(self) -> int:
        return len(self.fact) + len(self.question) + 2 * (len(self.value) + len(self.stop))


def _facts(tokenizer: Any, rng: random.Random, split: str, count: int, newline: list[int]) -> list[_Fact]:
    keys = [f"{adjective} {noun}" for adjective in ADJECTIVES for noun in KEYS[split]]
    stop = encode(tokenizer, ".") + newline
    facts = []
    for key in rng.sample(keys, count):  # a key once, or the answer would be ambiguous
        fact, question, kind = rng.choice(TEMPLATES[split])
        if kind == "number":
            # even numbers in one split, odd ones in the other
            value = str(2 * rng.randrange(5_000, 50_000) + SPLITS.index(split))
        else:
            value = " ".join(rng.sample(WORDS[split], 2))
        facts.append(
            _Fact(
                newline + encode(tokenizer, fact.format(key=key)),
                encode(tokenizer, question.format(key=key)),
                encode(tokenizer, " " + value),  # the same ids in fact and answer, whatever the tokenizer merges
                stop,
            )
        )
    return facts


def _filler(tokenizer: Any, rng: random.Random, length: int) -> list[int]:
    ids: list[int] = []
    while len(ids) < length:
        subject = rng.choice(SUBJECTS)
        sentence = f" {subject[0].upper()}{subject[1:]} {rng.choice(ACTIONS)}{rng.choice(ENDINGS)}."
        ids += encode(tokenizer, sentence)
    return ids[:length]


def _assemble(
    tokenizer: Any, prefix: list[int], facts: list[_Fact], hay: list[int], rng: random.Random
) -> RecallSequence:
    ids, answers, planted, distances = list(prefix), [False] * len(prefix), [], []

    def add(piece: Sequence[int], answer: bool = False) -> None:
        ids.extend(piece)
        answers.extend([answer] * len(piece))

    # one fact in every stretch of the haystack, somewhere inside it: all distances occur
    stretch, at = len(hay) / len(facts), 0
    for index, fact in enumerate(facts):
        cut = rng.randint(max(at, int(index * stretch)), max(at, int((index + 1) * stretch)))
        cut = _sentence_end(tokenizer, hay, cut)
        add(hay[at:cut])
        at = cut
        add(fact.fact)
        planted.append(len(ids))
        add(fact.value + fact.stop)
    add(hay[at:])
    for index in rng.sample(range(len(facts)), len(facts)):
        fact = facts[index]
        add(fact.question)
        distances.append(len(ids) - planted[index])
        add(fact.value, answer=True)
        add(fact.stop)
    return RecallSequence(torch.tensor(ids), torch.tensor(answers), tuple(distances))


def _sentence_end(tokenizer: Any, hay: list[int], cut: int, reach: int = 48) -> int:
    """The first end of a line or sentence at or after `cut`, or `cut` where none is near."""
    for end in range(max(cut, 1), min(len(hay), cut + reach) + 1):
        if tokenizer.decode([hay[end - 1]]).endswith(("\n", ".", "!", "?")):
            return end
    return cut


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a piece of text, without special tokens."""
    # verbose=False: a piece longer than the model's context is cut later, a warning would only worry
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def prefix_ids(tokenizer: Any) -> list[int]:
    """Special tokens that the tokenizer puts before a text (Llama's BOS); they are sink tokens, so they matter."""
    plain, full = encode(tokenizer, "a"), list(tokenizer("a", verbose=False)["input_ids"])
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return full[:start]
    return []
