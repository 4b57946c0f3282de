"""The model card of a patched checkpoint."""

from __future__ import annotations

import html
import os
import re
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from transformers import PreTrainedModel

from ..families import family_of
from ..files import write_text
from ..plan import AAHConfig, coverage_of

MARK = "<!-- written by aah_hf;"
_TEMPLATE = "modelcard_template.md"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def write_card(model: PreTrainedModel, directory: str | os.PathLike) -> Path | None:
    """Write `README.md` into a saved checkpoint.

    Returns:
        Its path, or None where a README stands that aah_hf did not write: that one is left alone.
    """
    path = Path(directory) / "README.md"
    if path.is_file() and MARK not in path.read_text(encoding="utf-8", errors="replace"):
        return None
    return write_text(path, str(render_card(model)))


def remove_card(directory: str | os.PathLike) -> None:
    """Delete a card of ours from a directory that now holds an unpatched model."""
    path = Path(directory) / "README.md"
    if path.is_file() and MARK in path.read_text(encoding="utf-8", errors="replace"):
        path.unlink()


def render_card(model: PreTrainedModel) -> ModelCard:
    """The card as an object, from `model_cards/modelcard_template.md`."""
    from .. import __version__

    plan = AAHConfig.from_model(model)
    provenance = dict(plan.provenance)
    quality = provenance.pop("check", None)
    source = str(getattr(model.config, "_name_or_path", "") or "")
    on_hub = _HUB_NAME.fullmatch(source) is not None and not Path(source).exists()
    lengths = sorted({plan.calibrated_at or 4096, 4096, 32768})
    return ModelCard.from_template(
        ModelCardData(
            library_name="transformers",
            tags=["aah", "asymmetric-attention-heads", "long-context"],
            base_model=source if on_hub else None,
            pipeline_tag="text-generation",
        ),
        template_path=str(template_path()),
        title=f"{_quote(source) if on_hub else type(model).__name__} with asymmetric attention heads",
        model_class=type(model).__name__,
        base_name=f"`{_quote(source)}`" if on_hub else "the model it was made from",
        version=__version__,
        stock=family_of(model).stock,
        sink_tokens=plan.sink_tokens,
        layers=[
            {"index": i, "windows": ", ".join("full" if w is None else str(w) for w in windows)}
            for i, windows in enumerate(plan.windows)
        ],
        coverages=[coverage_of(plan, model, n) for n in lengths],
        quality=_rows(quality) if isinstance(quality, dict) else [],
        calibrated_at=plan.calibrated_at,
        provenance=_rows(provenance),
    )


def template_path() -> Path:
    """The template inside an installed package, or in the source tree of an editable install."""
    installed = Path(__file__).parent / _TEMPLATE
    return installed if installed.exists() else Path(__file__).parents[2] / "model_cards" / _TEMPLATE


def _rows(values: dict[str, Any]) -> list[tuple[str, str]]:
    return [(_quote(name), _quote(_plain(value))) for name, value in values.items()]


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_plain, value))
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(item)}" for name, item in value.items())
    return str(value)


def _quote(value: Any) -> str:
    """A plan may come from a stranger's config.json: nothing in it may become markup, a link or a new line."""
    text = re.sub(r"\s+", " ", str(value))
    return re.sub(r"([\\`*_\[\]|!{}])", r"\\\1", html.escape(text[:500], quote=False))
