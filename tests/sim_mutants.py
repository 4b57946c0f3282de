"""Wrong kernels: each plants one hazard that the emulator and the reference must notice between them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """Replace `old`, which occurs exactly once in `file` of csrc, by `new`."""

    name: str
    file: str
    old: str
    new: str


FORWARD, SOFTMAX, TILE = "device/forward.cuh", "device/softmax.cuh", "device/tile.cuh"

_LOAD = "    if (i + 1 < last) load_tile(i + 1);  // after the barrier: every warp is done with that stage\n"
_WAIT = "    copy_async_wait<0>();\n    sync_block();\n"
_EARLY = """    if (i + 1 < last) {
      load_tile(i + 1);
      copy_async_wait<1>();
    } else {
      copy_async_wait<0>();
    }
    sync_block();
"""

MUTANTS = (
    Mutant("no barrier", FORWARD, _WAIT, "    copy_async_wait<0>();\n"),
    Mutant(
        "barrier for half of the warps", FORWARD, "    sync_block();\n", "    if (warp_index() < 2) sync_block();\n"
    ),
    Mutant(
        "barrier at two places",
        FORWARD,
        "    sync_block();\n",
        "    if (warp_index() < 2)\n      sync_block();\n    else\n      sync_block();\n",
    ),
    Mutant("waiting for one group too few", FORWARD, "copy_async_wait<0>", "copy_async_wait<1>"),
    Mutant("loading into a stage that is still read", FORWARD, _WAIT + _LOAD, _EARLY),
    Mutant("one stage", FORWARD, "(i & 1)", "(i & 0)"),
    Mutant("copies never committed", FORWARD, "    copy_async_commit();\n", ""),
    Mutant(
        "shuffle by half of the lanes",
        SOFTMAX,
        "  x += shuffle_xor(x, 1);\n",
        "  if (thread_index() % 32 < 16) x += shuffle_xor(x, 1);\n",
    ),
    Mutant("vote by some lanes", SOFTMAX, "if (!any(grown)) return;", "if (!grown || !any(grown)) return;"),
    Mutant(
        "output staged without a warp barrier", FORWARD, "  sync_warp();\n  for (int i = lane;", "  for (int i = lane;"
    ),
    Mutant("window one too large", FORWARD, "a.window[head], a.sinks", "a.window[head] + 1, a.sinks"),
    Mutant("window one too small", "include/aah_rule.h", "pos - window + 1", "pos - window + 2"),
    Mutant("one sink fewer", FORWARD, "a.window[head], a.sinks", "a.window[head], a.sinks - 1"),
    Mutant(
        "masked values not zeroed",
        FORWARD,
        "values + key * a.v.length * kBytes, a.dim, real);",
        "values + key * a.v.length * kBytes, a.dim, [&](int row) { return key + row < s.kv_len; });",
    ),
    Mutant(
        "columns beyond the head size not zeroed",
        TILE,
        "const bool read = read_row && (c + chunk) *",
        "const bool read = read_row && 0 *",
    ),
    Mutant("edges below the band not masked", FORWARD, "key < warp_hull.all_begin || ", ""),
    Mutant("edges above the band not masked", FORWARD, " || key + kKeys > warp_hull.all_end", ""),
    Mutant(
        "last tile missing",
        "device/sequence.cuh",
        "t.bands = (h.end - 1) / keys + 1 - t.band",
        "t.bands = (h.end - 1) / keys - t.band",
    ),
    Mutant("sink tiles missing", "device/sequence.cuh", "- t.sink, 0);", "- t.sink, 0) * 0;"),
    Mutant("output not rescaled", SOFTMAX, "if (!any(grown)) return;", "any(grown);\n  return;"),
    Mutant("maximum of nothing subtracted", SOFTMAX, "now == minus_infinity() ? 0 : now", "now"),
    Mutant(
        "keys and values of another head",
        FORWARD,
        "const char* const values = row_of(a.v, s.k_batch, s.k_offset, head / a.group",
        "const char* const values = row_of(a.v, s.k_batch, s.k_offset, 0 * a.group",
    ),
    Mutant("splits weighted alike", "device/merge.cuh", "* kLog2e) * scale;", "* 0) * scale;"),
    Mutant("learned sink counted in every split", FORWARD, "a.sink_logits && e.split == 0", "a.sink_logits"),
    Mutant(
        "one split overlaps the next",
        FORWARD,
        "count * place.entry.split / place.entry.splits",
        "count * place.entry.split / (place.entry.splits + 1)",
    ),
    Mutant("a slot too few for packed documents", "cuda/plan.h", "p.documents - 1; slot", "p.documents - 2; slot"),
    Mutant("float as a single tf32", TILE, "    mma_tf32(c, a.small, b.big[0], b.big[1]);\n", ""),
    Mutant("transposition forgotten", TILE, "load_matrices_transposed(r, lane_row", "load_matrices(r, lane_row"),
)
