"""StudyConfig: everything that decides a study's numbers, as one immutable value."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields
from typing import Any

from ..calibration.regimes import REGIMES, RegimeConfig, regime
from ..errors import AAHError, CalibrationError

FAMILIES = ("llama", "qwen3")
WIKITEXT = "wikitext-2"
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class StudyConfig:
    """What is trained, on what and how. The defaults finish in 20 minutes on two idle CPU cores.

    Args:
        regimes: regimes and controls to compare; `name` or `name:setting=value,…` with settings of `RegimeConfig`
            or `GroupingConfig`, as in `shallow_freeze:control_interval=10`.
        seeds: runs per regime, with seeds 0, 1, …; a seed decides initial weights, data order and controllers, and
            is the same for all regimes.
        family: architecture, "llama" or "qwen3".
        layers, heads, kv_heads, width, intermediate: shape of the decoder; kv_heads 0 means as many as heads.
        tied: whether the output shares the embedding's weights.
        seq_len: tokens per sequence; candidate windows are an eighth, a quarter, half and all of it.
        batch_size: sequences per optimizer step, over all devices together.
        accumulate: micro-batches that a step is split into on each device.
        steps, learning_rate, weight_decay, warmup: AdamW with a linear warm-up of so many steps, then cosine decay.
        eval_every: steps between points of the validation curve.
        eval_sequences: validation sequences, at most.
        control_interval, control_warmup: steps between decisions, and steps of full attention before the first.
        data: "" for Python's help topics, "wikitext-2" (downloaded by `datasets`), or a .txt or .jsonl file.
        tokenizer: "" trains a byte-level BPE of `vocab_size` on the training text; otherwise a tokenizer's folder
            or Hub name.
        vocab_size: of the trained tokenizer; 257 is plain bytes and an end-of-text token.
        dtype: "float32" or "bfloat16" (autocast).

    Raises:
        AAHError: a setting out of range or unknown; the message lists the choices.
    """

    regimes: tuple[str, ...] = REGIMES
    seeds: int = 2
    family: str = "llama"
    layers: int = 4
    heads: int = 8
    kv_heads: int = 0
    width: int = 128
    intermediate: int = 384
    tied: bool = True
    seq_len: int = 512
    batch_size: int = 4
    accumulate: int = 1
    steps: int = 120
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    warmup: int = 10
    eval_every: int = 20
    eval_sequences: int = 16
    control_interval: int = 5
    control_warmup: int = 0
    data: str = ""
    tokenizer: str = ""
    vocab_size: int = 1024
    dtype: str = "float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "regimes", tuple(self.regimes))
        for name, low in _LEAST.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise AAHError(f"{name} is {value!r}; expected an integer of at least {low}.")
        for name, choices in (("family", FAMILIES), ("dtype", DTYPES)):
            if getattr(self, name) not in choices:
                raise AAHError(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(choices)}.")
        if self.width % (2 * self.heads) or self.heads % (self.kv_heads or self.heads):
            raise AAHError(
                f"width {self.width}, heads {self.heads} and kv_heads {self.kv_heads} do not fit: the width must be an "
                "even multiple of the heads, the heads a multiple of the KV heads."
            )
        if not self.regimes or len(set(self.regimes)) != len(self.regimes):
            raise AAHError(f"regimes are {self.regimes}; name at least one, and each once.")
        for name in ("learning_rate", "weight_decay"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise AAHError(f"{name} is {getattr(self, name)!r}; expected a number of at least 0.")
        for spec in self.regimes:
            self.regime(spec, 0)

    def regime(self, spec: str, seed: int) -> RegimeConfig:
        """The configuration that one of `regimes` names, at this sequence length."""
        name, _, rest = spec.partition(":")
        changes: dict[str, Any] = {"control_interval": self.control_interval, "warmup_steps": self.control_warmup}
        for part in filter(None, rest.split(",")):
            key, given, value = part.partition("=")
            if not given:
                raise CalibrationError(f"{part!r} in regime {spec!r} is no setting; write setting=value.")
            changes[key.strip()] = _value(value.strip())
        return regime(name, seq_len=self.seq_len, seed=seed, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {**asdict(self), "regimes": list(self.regimes)}

    def identity(self) -> dict[str, Any]:
        """What two runs must share to stand in one table: everything but which regimes and how many seeds."""
        return {key: value for key, value in self.to_dict().items() if key not in ("regimes", "seeds")}


_LEAST = {
    "seeds": 1, "layers": 1, "heads": 1, "kv_heads": 0, "width": 2, "intermediate": 1, "seq_len": 8, "batch_size": 1,
    "accumulate": 1, "steps": 1, "warmup": 0, "eval_every": 1, "eval_sequences": 1, "control_interval": 1,
    "control_warmup": 0, "vocab_size": 257,
}  # fmt: skip

PAPER = StudyConfig(
    regimes=("full_attention", "grouping_off", "full_adaptive", "shallow_freeze", "deep_practical_reuse"),
    seeds=1,
    layers=16,
    heads=12,
    width=1536,
    intermediate=9216,
    tied=False,
    seq_len=4096,
    batch_size=8,
    accumulate=8,
    steps=10_000,
    learning_rate=3e-4,
    warmup=500,
    eval_every=500,
    eval_sequences=64,
    data=WIKITEXT,
    tokenizer="gpt2",
    dtype="bfloat16",
)
"""The paper's main table (method.md §7): 16 layers, 12 heads, width 1536, 4096 tokens, WikiText-2 raw, GPT-2 tokenizer,
10 000 steps, seed 0. What our sources of the paper do not state is ours: the MLP's width (chosen for a total of one
billion parameters), batch size, learning rate and its schedule."""

PRESETS = {"small": StudyConfig(), "paper": PAPER}


def preset(name: str, **changes: Any) -> StudyConfig:
    """The preset `name` with fields changed; None leaves a field as it is."""
    if name not in PRESETS:
        raise AAHError(f"preset is {name!r}; choose one of {', '.join(PRESETS)}.")
    base = {f.name: getattr(PRESETS[name], f.name) for f in fields(StudyConfig)}
    return StudyConfig(**base | {key: value for key, value in changes.items() if value is not None})


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    if re.fullmatch(r"\d+(-\d+)+", text):  # candidate_windows=128-256-512: a comma separates settings
        return tuple(map(int, text.split("-")))
    try:
        return float(text)
    except ValueError:
        return text
