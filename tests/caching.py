"""Helpers of the cache tests: feeding a model in parts, and tokens that are decided by a clear margin."""

from __future__ import annotations

import inspect

import torch
from transformers import DynamicCache, LlamaForCausalLM

ARGUMENT = (
    "cache" if "cache" in inspect.signature(inspect.unwrap(LlamaForCausalLM.forward)).parameters else "past_key_values"
)
"""transformers renamed the argument that carries the cache between 5.17 and 5.24."""

CLEAR = 1e-3
"""Top-2 margin of the logits from which on two exact computations must choose the same token."""


def through(model, ids, cache, chunks, mask=None, position_ids=None):
    """Logits of `ids` [batch, length] fed in `chunks`."""
    parts, past = [], 0
    for part in ids.split(chunks, 1):
        end = past + part.shape[1]
        places = None if position_ids is None else position_ids[:, past:end]
        seen = None if mask is None else mask[:, :end]
        out = model(part, attention_mask=seen, position_ids=places, use_cache=True, **{ARGUMENT: cache})
        parts.append(out.logits)
        past = end
    return torch.cat(parts, 1)


def fair_tolerance(model, ids, chunkings):
    """Three times what the unpatched model's own cache changes in its logits."""
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        found = [through(model, ids, DynamicCache(config=model.config), chunks) - want for chunks in chunkings]
    return 3 * max(float(d.abs().max()) for d in found)


def left_padded(rows):
    """(ids, mask, position_ids) [batch, longest] of rows of unequal length."""
    length = max(len(row) for row in rows)
    ids, mask = torch.zeros(len(rows), length, dtype=torch.long), torch.zeros(len(rows), length, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, length - len(row) :], mask[i, length - len(row) :] = row, 1
    return ids, mask, (mask.cumsum(-1) - 1).clamp(min=0)


def assert_same_where_clear(model, prompt, got, want):
    """Two greedy continuations [1, length] of `prompt` agree up to the first token that was a near tie.

    Returns:
        The number of tokens compared.
    """
    with torch.no_grad():
        logits = model(want[:, :-1], use_cache=False).logits[0, prompt.shape[1] - 1 :]
    top = logits.topk(2).values
    unclear = ((top[:, 0] - top[:, 1]) < CLEAR).nonzero()
    clear = int(unclear[0]) if len(unclear) else len(logits)
    end = prompt.shape[1] + clear
    assert torch.equal(got[:, :end], want[:, :end])
    return clear
