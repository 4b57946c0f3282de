"""`aah bench generate`: prefill and decode of a patched model against the same weights with full attention.

Ours runs per-head windows with an AAHCache; the peer is what `generate()` does without us: full
attention (SDPA in most families) with a DynamicCache.
They take turns in one process, so that a change of the machine's speed meets both alike.
"""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from ..cache import AAHCache
from ..errors import AAHError
from ..evaluation.models import implementation
from ..families import family_of
from ..plan import CONFIG_KEY, AAHConfig, text_config

PEERS = ("full", "aah")


@dataclass(frozen=True)
class GenerateRow:
    """One combination of batch size and context; medians over the repeats.

    Attributes:
        batch: rows.
        context: tokens of the prompt.
        new_tokens: tokens decoded after it, one at a time.
        prefill: prompt tokens per second, all rows together, by peer.
        decode: new tokens per second, all rows together, by peer.
        cache_bytes: bytes allocated for keys and values at the end, by peer.
        stored_bytes: what of ours a query still sees.
    """

    batch: int
    context: int
    new_tokens: int
    prefill: dict[str, float]
    decode: dict[str, float]
    cache_bytes: dict[str, int]
    stored_bytes: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def bench_generate(
    model: PreTrainedModel,
    *,
    batches: Sequence[int] = (1, 4),
    contexts: Sequence[int] = (1024, 2048, 4096, 8192),
    new_tokens: int = 32,
    repeats: int = 3,
    seed: int = 0,
    progress: Callable[[str, int, int], None] | None = None,
) -> Iterator[GenerateRow]:
    """Time every combination on random tokens; the first repeat of each warms up and does not count.

    Raises:
        PlanError: the model is not patched.
        AAHError: a number is below 1, or a context and the new tokens exceed the model's positions.
    """
    AAHConfig.from_model(model)
    if min((*batches, *contexts, new_tokens, repeats), default=0) < 1:
        raise AAHError(
            f"batches {list(batches)}, contexts {list(contexts)}, new_tokens {new_tokens} and repeats {repeats} must all "
            "be at least 1."
        )
    longest = getattr(text_config(model), "max_position_embeddings", None)
    if longest is not None and max(contexts) + new_tokens > longest:
        raise AAHError(
            f"{max(contexts)} + {new_tokens} tokens are more than the model's {longest} positions; give shorter contexts."
        )
    todo = [(batch, context) for batch in batches for context in contexts]
    generator = torch.Generator().manual_seed(seed)
    for index, (batch, context) in enumerate(todo):
        vocabulary = int(text_config(model).vocab_size)
        ids = torch.randint(0, vocabulary, (batch, context + new_tokens), generator=generator).to(model.device)
        yield _row(model, ids, context, repeats)
        if progress is not None:
            progress("generation", index + 1, len(todo))


def _row(model: PreTrainedModel, ids: Tensor, context: int, repeats: int) -> GenerateRow:
    times: dict[str, list[tuple[float, float]]] = {peer: [] for peer in PEERS}
    held: dict[str, int] = {}
    stored = 0
    for turn in range(repeats + 1):
        for peer in PEERS:
            with implementation(model, CONFIG_KEY if peer == "aah" else family_of(model).stock):
                cache: Cache = AAHCache(model) if peer == "aah" else DynamicCache(config=text_config(model))
                took = _time(model, ids, context, cache)
            if turn:
                times[peer].append(took)
            if isinstance(cache, AAHCache):
                held[peer], stored = cache.nbytes("allocated"), cache.nbytes()
            else:
                held[peer] = _bytes(cache)
            del cache
    batch, new_tokens = ids.shape[0], ids.shape[1] - context
    prefill, decode = ({p: statistics.median(t[i] for t in ts) for p, ts in times.items()} for i in (0, 1))
    return GenerateRow(
        batch=batch,
        context=context,
        new_tokens=new_tokens,
        prefill={peer: batch * context / seconds for peer, seconds in prefill.items()},
        decode={peer: batch * new_tokens / seconds for peer, seconds in decode.items()},
        cache_bytes=held,
        stored_bytes=stored,
    )


@torch.inference_mode()
def _time(model: PreTrainedModel, ids: Tensor, context: int, cache: Cache) -> tuple[float, float]:
    """Seconds of the prefill and of all single steps after it."""
    parameters = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in parameters else "past_key_values"
    settings: dict[str, Any] = {"use_cache": True, name: cache, "logits_to_keep": 1}
    marks = [_now(ids)]
    model(ids[:, :context], **settings)
    marks.append(_now(ids))
    for position in range(context, ids.shape[1]):
        model(ids[:, position : position + 1], **settings)
    marks.append(_now(ids))
    return marks[1] - marks[0], marks[2] - marks[1]


def _now(ids: Tensor) -> float:
    if ids.device.type == "cuda":
        torch.cuda.synchronize(ids.device)
    return time.perf_counter()


def _bytes(cache: Cache) -> int:
    tensors = [t for layer in cache.layers for t in (layer.keys, layer.values)]  # type: ignore[union-attr]
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
