"""`aah eval`: a patched model against full attention."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import AAHError
from .console import Debug, Json, Model, SeqLen, print_json, progress_bars, quiet, user_errors
from .loading import load
from .tables import print_evaluation


@user_errors
def evaluate_command(
    model: Model,
    text: Annotated[list[Path] | None, typer.Option(help="Held-out text, .txt or .jsonl; may be repeated.")] = None,
    seq_len: SeqLen = 2048,
    sequences: Annotated[int, typer.Option(help="Sequences of the text to score, at most.", min=1)] = 16,
    recall: Annotated[int, typer.Option(help="Sequences of built-in recall text to score.", min=0)] = 16,
    against: Annotated[str | None, typer.Option(help="Base model; default: the same weights, full attention.")] = None,
    windows: Annotated[
        str | None, typer.Option(help="Control: uniform:W or shuffled:SEED instead of the model's windows.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto.")] = "auto",
    json_output: Json = False,
    debug: Debug = False,
) -> None:
    """Perplexity, KL, recall and time against full attention, on the second half of each sequence."""
    from ..calibration import recall_sequences, token_sequences
    from ..evaluation import control_plan, evaluate
    from ..patching import patch_model
    from ..plan import plan_of

    if not text and not recall:
        raise AAHError("there is nothing to score: give --text FILE, or --recall N for built-in recall text.")
    for path in text or []:
        if not path.exists():
            raise AAHError(f"the text file {path} does not exist.")
    quiet()
    loaded, tokenizer = load(model, dtype)
    if windows is not None:
        patch_model(loaded, config=control_plan(loaded, windows))
    if plan_of(loaded) is None and against is None:
        raise AAHError(f"{model} carries no plan, so there is nothing to compare; use --windows, or --against BASE.")
    vocabulary = loaded.get_input_embeddings().num_embeddings
    scored: list = []
    for path in text or []:
        scored += token_sequences(
            str(path), seq_len=seq_len, tokenizer=tokenizer, vocab_size=vocabulary, at_most=sequences - len(scored)
        )
        if len(scored) >= sequences:
            break
    asked = [(r.ids, r.answers) for r in recall_sequences(tokenizer, recall, seq_len=seq_len, split="evaluation")]
    base = load(against, dtype)[0] if against else None
    with progress_bars() as progress:
        result = evaluate(loaded, scored, asked, base=base, progress=progress.update)
    if json_output:
        print_json(result.to_dict())
        return
    print_evaluation(f"{model}, {seq_len} tokens, second half scored", result)
