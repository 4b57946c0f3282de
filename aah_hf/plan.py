"""AAHConfig, "the plan": which window every query head of every layer runs with.

A plan is an immutable value. It travels inside the model's `config.json` under the key `aah`, so
everything that is read back from a file is treated as written by a stranger: types, counts and
sizes are bounded before anything is built from them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from .coverage import Coverage, measure
from .errors import PlanError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

PLAN_VERSION = 1
"""Version of the serialised form. Newer than ours is refused, older is migrated."""

CONFIG_KEY = "aah"
"""Key of the plan in a model's config, and name of the attention implementation."""

MAX_LAYERS = 4096
MAX_HEADS = 4096
MAX_WINDOW = 2**31 - 1
MAX_SINK_TOKENS = 65536
MAX_PROVENANCE_BYTES = 64 * 1024
DEFAULT_SINK_TOKENS = 4


@dataclass(frozen=True)
class AAHConfig:
    """One window per layer and query head, and how the windows came about.

    Args:
        windows: `windows[layer][query_head]`, the keys a query sees, itself included (>= 1), or None
            for full causal attention.
        sink_tokens: the first real tokens of a sequence stay visible to every query (default 4;
            pretrained models need them, see method.md §8; the paper's mechanism is 0).
        groups: optional `groups[layer][query_head]`, the group each head was put in.
        provenance: plain JSON about where the plan comes from (objective, budget, data, versions,
            measured quality). Never interpreted, only shown.

    Raises:
        PlanError: a window that is not None or an integer >= 1, ragged or empty layers, sink tokens
            out of range, provenance that is not JSON or is larger than 64 KiB.
    """

    windows: tuple[tuple[int | None, ...], ...]
    sink_tokens: int = DEFAULT_SINK_TOKENS
    groups: tuple[tuple[int, ...], ...] | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "windows", _check_windows(self.windows))
        _check_int("sink_tokens", self.sink_tokens, 0, MAX_SINK_TOKENS)
        if self.groups is not None:
            object.__setattr__(self, "groups", _check_groups(self.groups, self.windows))
        object.__setattr__(self, "provenance", _check_provenance(self.provenance))

    # MappingProxyType cannot be pickled or deep-copied; models that carry a plan must be.
    def __reduce__(self):
        return (_rebuild, (self.windows, self.sink_tokens, self.groups, dict(self.provenance)))

    def __deepcopy__(self, memo: dict) -> AAHConfig:
        return self

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def num_heads(self) -> int:
        """Query heads per layer (the largest, should layers differ)."""
        return max(len(layer) for layer in self.windows)

    @property
    def calibrated_at(self) -> int | None:
        """Sequence length in tokens that the windows were chosen for, None when unknown."""
        seq_len = self.provenance.get("seq_len")
        return seq_len if isinstance(seq_len, int) and not isinstance(seq_len, bool) and seq_len > 0 else None

    @classmethod
    def uniform(cls, model: PreTrainedModel | PreTrainedConfig, window: int | None, sink_tokens: int = 4) -> AAHConfig:
        """The same window for every head of `model`: the baseline that a calibrated plan must beat."""
        layers, heads, _ = head_counts(model)
        return cls(((window,) * heads,) * layers, sink_tokens, provenance={"objective": "uniform"})

    @classmethod
    def from_model(cls, model: PreTrainedModel | PreTrainedConfig) -> AAHConfig:
        """The plan that a model or its config carries.

        Raises:
            PlanError: there is none.
        """
        plan = plan_of(model)
        if plan is None:
            raise PlanError(
                "this model carries no plan (its config has no `aah` entry). Make one with "
                "`patch_model(model, calib_data)` or pass `AAHConfig(windows=...)`."
            )
        return plan

    def check_fits(self, model: PreTrainedModel | PreTrainedConfig) -> None:
        """Raise PlanError unless the plan has the model's number of layers and query heads."""
        layers, heads, _ = head_counts(model)
        if self.num_layers != layers:
            raise PlanError(
                f"the plan is for {self.num_layers} layers and the model has {layers}: it belongs to another model."
            )
        for index, layer in enumerate(self.windows):
            if len(layer) != heads:
                raise PlanError(
                    f"layer {index} of the plan has {len(layer)} windows and the model has {heads} query heads: "
                    "it belongs to another model."
                )

    def coverage(self, model: PreTrainedModel | PreTrainedConfig, seq_len: int) -> Coverage:
        """ACR, causal and KV coverage, and KV bytes of one sequence of `seq_len` tokens in the model's dtype."""
        return coverage_of(self, model, seq_len)

    def shuffled(self, seed: int) -> AAHConfig:
        """The same windows permuted over all heads of all layers: a control that keeps ACR and causal coverage."""
        import random

        flat = [w for layer in self.windows for w in layer]
        random.Random(seed).shuffle(flat)
        it = iter(flat)
        windows = tuple(tuple(next(it) for _ in layer) for layer in self.windows)
        return AAHConfig(windows, self.sink_tokens, provenance={"objective": "shuffled", "seed": seed})

    def with_provenance(self, **extra: Any) -> AAHConfig:
        """A copy whose provenance has `extra` added."""
        return replace(self, provenance={**self.provenance, **extra})

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, the form stored in `config.json`."""
        data: dict[str, Any] = {
            "version": PLAN_VERSION,
            "windows": [list(layer) for layer in self.windows],
            "sink_tokens": self.sink_tokens,
        }
        if self.groups is not None:
            data["groups"] = [list(layer) for layer in self.groups]
        data["provenance"] = json.loads(json.dumps(dict(self.provenance)))
        return data

    @classmethod
    def from_dict(cls, data: Any) -> AAHConfig:
        """Read the stored form.

        Raises:
            PlanError: not an object of that form, or written by a newer version of aah_hf.
        """
        if isinstance(data, AAHConfig):
            return data
        if not isinstance(data, Mapping):
            raise PlanError(f"the plan must be a JSON object, not {type(data).__name__}.")
        version = data.get("version")
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise PlanError(f"the plan's `version` is {version!r}; expected an integer from 1 to {PLAN_VERSION}.")
        if version > PLAN_VERSION:
            raise PlanError(
                f"the plan has version {version} and this aah_hf reads up to {PLAN_VERSION}: `pip install -U aah-hf`."
            )
        unknown = sorted(set(map(str, data)) - {"version", "windows", "sink_tokens", "groups", "provenance"})
        if unknown:
            raise PlanError(f"the plan has unknown entries {unknown}; was `config.json` edited by hand?")
        for key in ("windows", "sink_tokens"):
            if key not in data:
                raise PlanError(f"the plan lacks `{key}`; was `config.json` truncated or edited by hand?")
        return cls(data["windows"], data["sink_tokens"], data.get("groups"), data.get("provenance") or {})


def _rebuild(windows: Any, sink_tokens: int, groups: Any, provenance: dict) -> AAHConfig:
    return AAHConfig(windows, sink_tokens, groups, provenance)


def plan_of(model: PreTrainedModel | PreTrainedConfig) -> AAHConfig | None:
    """The plan in a model's (text) config, or None.

    Raises:
        PlanError: there is one and it is malformed.
    """
    data = getattr(text_config(model), CONFIG_KEY, None)
    return None if data is None else AAHConfig.from_dict(data)


def text_config(model: PreTrainedModel | PreTrainedConfig) -> PreTrainedConfig:
    """The config that describes the decoder: of a composite model its text part."""
    config: Any = getattr(model, "config", model)
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def head_counts(model: PreTrainedModel | PreTrainedConfig) -> tuple[int, int, int]:
    """(layers, query heads, KV heads) of a model."""
    config = text_config(model)
    try:
        layers, heads = int(config.num_hidden_layers), int(config.num_attention_heads)
    except (AttributeError, TypeError) as error:
        raise PlanError(
            f"{type(config).__name__} does not say how many layers and attention heads it has; "
            "pass a transformers model or its config."
        ) from error
    return layers, heads, int(getattr(config, "num_key_value_heads", None) or heads)


def native_windows(model: PreTrainedModel | PreTrainedConfig) -> tuple[int | None, ...]:
    """The model's own sliding window per layer, None where it has none; plans are applied on top of it."""
    config = text_config(model)
    layers, _, _ = head_counts(model)
    window = getattr(config, "sliding_window", None)
    if window is None or getattr(config, "use_sliding_window", True) is False:
        return (None,) * layers
    kinds = getattr(config, "layer_types", None)
    return tuple(window if kinds is None or kinds[i] == "sliding_attention" else None for i in range(layers))


def coverage_of(plan: AAHConfig | None, model: PreTrainedModel | PreTrainedConfig, seq_len: int) -> Coverage:
    """Coverage of `plan` on `model` at `seq_len` tokens; without a plan, of what the model does by itself.

    A layer's own sliding window counts (the smaller of the two); that it hides sink tokens does not.
    """
    _check_int("seq_len", seq_len, 1, MAX_WINDOW)
    layers, heads, kv_heads = head_counts(model)
    windows = plan.windows if plan is not None else ((None,) * heads,) * layers
    limits = native_windows(model)
    return measure(
        [[w if n is None else n if w is None else min(w, n) for w in layer] for layer, n in zip(windows, limits)],
        seq_len,
        kv_heads=kv_heads,
        sink_tokens=plan.sink_tokens if plan is not None else 0,
        head_dim=head_dim(model),
        element_bytes=element_bytes(model),
    )


def head_dim(model: PreTrainedModel | PreTrainedConfig) -> int:
    """Size of a key or value of one head."""
    config = text_config(model)
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def element_bytes(model: PreTrainedModel | PreTrainedConfig) -> int:
    """Bytes of one number in the model's dtype, 2 where it is unknown."""
    dtype = getattr(model, "dtype", None) or getattr(text_config(model), "dtype", None)
    return getattr(dtype, "itemsize", 2)


def _check_int(name: str, value: Any, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise PlanError(f"{name} is {value!r}; expected an integer from {low} to {high}.")


def _check_windows(windows: Any) -> tuple[tuple[int | None, ...], ...]:
    if not isinstance(windows, Sequence) or isinstance(windows, (str, bytes)) or not 1 <= len(windows) <= MAX_LAYERS:
        raise PlanError(
            f"windows must be one list per layer (1 to {MAX_LAYERS}) with one window per query head, "
            f"not {_short(windows)}."
        )
    result = []
    for index, layer in enumerate(windows):
        if not isinstance(layer, Sequence) or isinstance(layer, (str, bytes)) or not 1 <= len(layer) <= MAX_HEADS:
            raise PlanError(f"windows[{index}] must be a list of 1 to {MAX_HEADS} windows, not {_short(layer)}.")
        for head, window in enumerate(layer):
            if window is not None:
                _check_int(f"windows[{index}][{head}] (None means full attention)", window, 1, MAX_WINDOW)
        result.append(tuple(layer))
    return tuple(result)


def _check_groups(groups: Any, windows: tuple[tuple[int | None, ...], ...]) -> tuple[tuple[int, ...], ...]:
    if not isinstance(groups, Sequence) or [len(g) if isinstance(g, Sequence) else -1 for g in groups] != [
        len(layer) for layer in windows
    ]:
        raise PlanError(
            f"groups must have the shape of windows (one integer per layer and head), not {_short(groups)}."
        )
    for index, layer in enumerate(groups):
        for head, group in enumerate(layer):
            _check_int(f"groups[{index}][{head}]", group, 0, MAX_HEADS)
    return tuple(tuple(layer) for layer in groups)


def _check_provenance(provenance: Any) -> Mapping[str, Any]:
    if not isinstance(provenance, Mapping):
        raise PlanError(f"provenance must be a mapping, not {type(provenance).__name__}.")
    try:
        text = json.dumps(dict(provenance), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise PlanError(f"provenance must be plain finite JSON: {error}.") from error
    if len(text) > MAX_PROVENANCE_BYTES:
        raise PlanError(f"provenance takes {len(text)} bytes; the limit is {MAX_PROVENANCE_BYTES}.")
    return MappingProxyType(json.loads(text))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
