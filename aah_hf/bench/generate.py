"""`aah bench generate`: prefill and decode of a patched model against the same weights with full attention.

Ours runs per-head windows with an AAHCache; the peer is what `generate()` does without us: full
attention (SDPA in most families) with a DynamicCache.
They take turns in one process, so that a change of the machine's speed meets both alike.
"""

from __future__ import annotations

import inspect
import statistics
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
from ..plan import CONFIG_KEY, AAHConfig, coverage_of, text_config
from .clock import attention_clock, now

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
        attention: seconds per step inside the attention functions and `cache.update` of all layers, by peer.
        attention_share: share of the step's time that this is, by peer.
        kv_coverage: KV coverage of the model's windows at the last token.
        cache_bytes: bytes allocated for keys and values at the end, by peer.
        stored_bytes: what of ours a query still sees.
    """

    batch: int
    context: int
    new_tokens: int
    prefill: dict[str, float]
    decode: dict[str, float]
    attention: dict[str, float]
    attention_share: dict[str, float]
    kv_coverage: float
    cache_bytes: dict[str, int]
    stored_bytes: int

    @property
    def attention_ratio(self) -> float:
        """Our time in attention over full attention's; KV coverage is what the keys that are read would allow."""
        return self.attention["aah"] / self.attention["full"]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "attention_ratio": self.attention_ratio}


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
    plan = AAHConfig.from_model(model)
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
        yield _row(model, plan, ids, context, repeats)
        if progress is not None:
            progress("generation", index + 1, len(todo))


def _row(model: PreTrainedModel, plan: AAHConfig, ids: Tensor, context: int, repeats: int) -> GenerateRow:
    times: dict[str, list[tuple[float, float, float]]] = {peer: [] for peer in PEERS}
    held: dict[str, int] = {}
    stored = 0
    for turn in range(repeats + 1):
        for peer in PEERS:
            name = CONFIG_KEY if peer == "aah" else family_of(model).stock
            with implementation(model, name):
                cache: Cache = AAHCache(model) if peer == "aah" else DynamicCache(config=text_config(model))
                took = _time(model, name, ids, context, cache)
            if turn:
                times[peer].append(took)
            if isinstance(cache, AAHCache):
                held[peer], stored = cache.nbytes("allocated"), cache.nbytes()
            else:
                held[peer] = _bytes(cache)
            del cache
    batch, new_tokens = ids.shape[0], ids.shape[1] - context
    prefill, decode, attention = (
        {peer: statistics.median(run[part] for run in runs) for peer, runs in times.items()} for part in range(3)
    )
    return GenerateRow(
        batch=batch,
        context=context,
        new_tokens=new_tokens,
        prefill={peer: batch * context / seconds for peer, seconds in prefill.items()},
        decode={peer: batch * new_tokens / seconds for peer, seconds in decode.items()},
        attention={peer: seconds / new_tokens for peer, seconds in attention.items()},
        attention_share={peer: statistics.median(a / d for _, d, a in runs) for peer, runs in times.items()},
        kv_coverage=coverage_of(plan, model, ids.shape[1]).kv,
        cache_bytes=held,
        stored_bytes=stored,
    )


@torch.inference_mode()
def _time(model: PreTrainedModel, name: str, ids: Tensor, context: int, cache: Cache) -> tuple[float, float, float]:
    """Seconds of the prefill, of all single steps after it, and of attention in these."""
    parameters = inspect.signature(model.forward).parameters
    argument = "cache" if "cache" in parameters else "past_key_values"
    settings: dict[str, Any] = {"use_cache": True, argument: cache, "logits_to_keep": 1}
    marks = [now(ids.device)]
    model(ids[:, :context], **settings)
    with attention_clock(model, name, cache) as inside:
        marks.append(now(ids.device))
        for position in range(context, ids.shape[1]):
            model(ids[:, position : position + 1], **settings)
        marks.append(now(ids.device))
    return marks[1] - marks[0], marks[2] - marks[1], sum(inside)


def _bytes(cache: Cache) -> int:
    tensors = [t for layer in cache.layers for t in (layer.keys, layer.values)]  # type: ignore[union-attr]
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
