"""Results as tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from .console import out


def print_description(summary: dict[str, Any]) -> None:
    from ..attention import LayerWindows

    layers = Table("layer", "windows × query heads", title=f"{summary['model']} ({summary['model_type']})")
    for index, windows in enumerate(summary["windows"]):
        layers.add_row(str(index), str(LayerWindows(tuple(windows), summary["sink_tokens"])))
    out.print(layers)
    table = Table("tokens", "ACR", "causal", "KV", "KV cache", title=f"Coverage, {summary['sink_tokens']} sink tokens")
    for c in summary["coverage"]:
        table.add_row(str(c["seq_len"]), *(f"{c[k]:.3f}" for k in ("acr", "causal", "kv")), mebibytes(c["kv_bytes"]))
    out.print(table)
    check = summary["provenance"].get("check")
    if isinstance(check, dict):
        facts = ", ".join(f"{k} {v:.4g}" for k, v in check.items() if isinstance(v, (int, float)))
        out.print("Measured on held-out text:", facts, highlight=False, markup=False)


def print_evaluation(title: str, result: Any) -> None:
    data = result.to_dict()
    table = Table("", "patched", "full attention", title=title)
    if result.text:
        table.add_row("perplexity of the text", f"{result.text.ppl:.3f}", f"{result.text.base_ppl:.3f}")
        table.add_row("  increase, mean per sequence", increase(result.text), "")
        table.add_row("  KL to full attention", f"{result.text.kl:.4f} nats/token", "")
    if result.recall:
        table.add_row("perplexity of recall text", f"{result.recall.ppl:.3f}", f"{result.recall.base_ppl:.3f}")
        table.add_row("  increase, mean per sequence", increase(result.recall), "")
        if result.recall.recall_nll is not None:
            table.add_row(
                "  loss of recalled answers",
                f"{result.recall.recall_nll:.3f} nats/token",
                f"{result.recall.base_recall_nll:.3f} nats/token",
            )
    table.add_row("ACR / causal / KV coverage", coverages(data["coverage"]), "1 / 1 / 1")
    table.add_row("seconds per sequence", f"{data['seconds']:.2f}", f"{data['base_seconds']:.2f}")
    out.print(table)


def print_bench(rows: list[Any], peers: Sequence[str], overhead: dict[str, float]) -> None:
    names = [name for name in peers if any(name in row.milliseconds for row in rows)]
    table = Table("shape", "tokens", "windows", "dtype", "direction", "coverage", *names, title="median ms")
    for row in rows:
        times = (f"{row.milliseconds[n]:.2f}" if n in row.milliseconds else "–" for n in names)
        table.add_row(row.shape, str(row.seq_len), row.windows, row.dtype, row.direction, f"{row.coverage:.3f}", *times)
    out.print(table)
    if overhead:
        out.print("One-query call, µs: " + ", ".join(f"{k} {v:.1f}" for k, v in overhead.items()), highlight=False)


def print_prefill(model: str, rows: list[Any]) -> None:
    table = Table(
        *("tokens", "coverage", "full s", "windows s", "attention share", "attention ratio"),
        *("speed-up", "bound", "of bound"),
        title=f"{model}: prefill of one sequence, medians of interleaved passes",
    )
    for r in rows:
        seconds = (f"{r.base_seconds:.2f}", f"{r.seconds:.2f}")
        shares = (f"{r.attention_share:.1%}", f"{r.attention_ratio:.3f}")
        table.add_row(
            *(str(r.seq_len), f"{r.coverage:.3f}", *seconds, *shares),
            *(f"{r.speedup:.3f}", f"{r.bound:.3f}", f"{r.of_bound:.1%}"),
        )
    out.print(table)


def print_generation(model: str, rows: list[Any]) -> None:
    names = ("rows", "context", "prefill full", "aah", "decode full", "aah", "cache full", "aah", "stored")
    table = Table(*names, title=f"{model}: tokens/s and cache size, full attention with a DynamicCache against ours")
    for row in rows:
        speeds = (f"{by[peer]:.1f}" for by in (row.prefill, row.decode) for peer in ("full", "aah"))
        sizes = (mebibytes(n) for n in (row.cache_bytes["full"], row.cache_bytes["aah"], row.stored_bytes))
        table.add_row(str(row.batch), str(row.context), *speeds, *sizes)
    out.print(table)


def print_demo(result: Any) -> None:
    names = list(result.rows)
    table = Table("", "full attention", *names, title="Held-out text, second half of each sequence scored")
    first = result.rows[names[0]]
    rows = result.rows.values()
    table.add_row("perplexity, documentation", f"{first.text.base_ppl:.3f}", *(f"{r.text.ppl:.3f}" for r in rows))
    table.add_row("  increase (95 % interval)", "", *(increase(r.text) for r in rows))
    table.add_row("  KL, nats/token", "", *(f"{r.text.kl:.4f}" for r in rows))
    table.add_row("perplexity, recall text", f"{first.recall.base_ppl:.3f}", *(f"{r.recall.ppl:.3f}" for r in rows))
    table.add_row("  increase (95 % interval)", "", *(increase(r.recall) for r in rows))
    table.add_row(
        "  recalled answers, nats/token",
        f"{first.recall.base_recall_nll:.3f}",
        *(f"{r.recall.recall_nll:.3f}" for r in rows),
    )
    table.add_row("ACR / causal / KV coverage", "1 / 1 / 1", *(coverages(r.coverage.to_dict()) for r in rows))
    table.add_row(
        "KV bytes needed at 4096 tokens",
        mebibytes(result.full_4k.kv_bytes),
        mebibytes(result.coverage_4k.kv_bytes),
        *[""] * (len(names) - 1),
    )
    ratio = first.text.seconds / first.text.base_seconds
    table.add_row("prefill time, patched / full", "1", f"{ratio:.2f}", *[""] * (len(names) - 1))
    out.print(table)
    out.print(f"Reloaded in a new process: logits {'equal bit for bit' if result.reloaded_equal else 'DIFFER'}.")
    out.print("Generated:", style="bold")
    out.print(result.text, markup=False, highlight=False)
    out.print(f"Checkpoint, model card and windows.png: [bold]{result.out}[/]")
    out.print("Seconds: " + ", ".join(f"{k} {v:g}" for k, v in result.seconds.items()), style="dim")


def increase(quality: Any) -> str:
    low, high = quality.interval
    return f"{quality.increase:+.2%} ({low:+.2%} … {high:+.2%})"


def coverages(c: dict[str, Any]) -> str:
    return " / ".join(f"{c[key]:.3f}" for key in ("acr", "causal", "kv"))


def mebibytes(count: int | None) -> str:
    return "–" if count is None else f"{count / 2**20:.1f} MiB"
