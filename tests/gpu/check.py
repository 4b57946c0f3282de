#!/usr/bin/env python
"""Is the CUDA kernel right on this GPU, and how fast is it? One command, under ten minutes, nothing downloaded:

    python tests/gpu/check.py --json report.json

Needs torch, transformers and these sources with a C++ compiler and nvcc; models are small and random. It builds the
operator for this GPU into a temporary folder, holds it against the float64 reference and a patched model against full
recomputation, and then times it beside SDPA, FlexAttention and, where they are installed, flash-attn and
flash-sparse-attn. Every section reports its own failures, and the next one runs all the same.

Exit status: 0 nothing failed, 1 something did, 2 nonsense in the arguments, 3 there is no GPU.
`--cpu-end-to-end` runs the model part alone, on the CPU, small: it tests this script where there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

NO_GPU = 3


@dataclass
class Check:
    """One run: its settings, and what the sections have found so far."""

    device: str
    seed: int
    deadline: float
    small: bool = False
    failures: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        print(f"    {text}", flush=True)

    def fail(self, text: str) -> None:
        self.failures.append(text)
        print(f"    FAILED: {text}", flush=True)

    def expect(self, condition: bool, text: str) -> bool:
        """Note a failure, and go on."""
        if not condition:
            self.fail(text)
        return condition

    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()


Section = Callable[[Check], Any]


def run(check: Check, sections: dict[str, Section], report: dict[str, Any]) -> list[str]:
    """Run sections in order; each that fails or breaks says so and ends alone.

    Returns:
        The sections that could not be run here, because the one before left the GPU unusable for this process.
    """
    names = list(sections)
    for index, name in enumerate(names):
        print(f"{name} ...", flush=True)
        started = time.monotonic()
        check.failures = []
        facts = None
        try:
            facts = sections[name](check)
            if check.device == "cuda":
                torch.cuda.synchronize()  # what went wrong in a kernel is this section's failure
        except Exception as error:
            traceback.print_exc(limit=-4, file=sys.stdout)
            check.fail(f"{type(error).__name__}: {error}"[:2000])
        passed, seconds = not check.failures, round(time.monotonic() - started, 1)
        report[name] = {"passed": passed, "seconds": seconds, "failures": check.failures, "facts": facts}
        print(f"{name}: {'passed' if passed else 'FAILED'} ({seconds} s)", flush=True)
        if not passed and check.device == "cuda" and not usable():
            return names[index + 1 :]
    return []


def usable() -> bool:
    """An illegal access makes every later call of this process fail."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def run_in_new_process(check: Check, names: list[str], report: dict[str, Any], arguments: argparse.Namespace) -> None:
    print(f"the GPU is lost to this process; a new one goes on with {', '.join(names)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "report.json"
        command = [sys.executable, __file__, "--only", *names, "--skip", "machine", "--json", str(found), "--installed"]
        command += ["--seed", str(check.seed), "--minutes", str(check.seconds_left() / 60), "--arch", arguments.arch]
        subprocess.run(command, check=False)
        later = json.loads(found.read_text(encoding="utf-8")) if found.is_file() else {}
    for name in names:
        report[name] = later.get(name, {"passed": False, "failures": ["the process that ran it ended early"]})


def gpu_sections(arguments: argparse.Namespace) -> dict[str, Section]:
    import benchmark
    import correctness
    import end_to_end
    import machine

    return {
        "machine": machine.describe,
        "build": lambda check: machine.build(check, arguments.arch, arguments.installed),
        "correctness": correctness.grid,
        "long": correctness.long_sequences,
        "poison": correctness.unwritten_memory,
        "determinism": correctness.determinism,
        "graphs": correctness.graphs,
        "streams": correctness.streams,
        "devices": correctness.other_devices,
        "fallbacks": correctness.fallbacks,
        "sanitizer": machine.sanitize,
        "end_to_end": end_to_end.run,
        "benchmark": benchmark.run,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write everything found into FILE")
    parser.add_argument("--only", metavar="SECTION", nargs="+", help="sections to run, after `build`")
    parser.add_argument("--skip", metavar="SECTION", nargs="+", default=[], help="sections to leave out")
    parser.add_argument("--minutes", type=float, default=9.5, help="benchmarks stop in time for this (default 9.5)")
    parser.add_argument("--seed", type=int, help="of all random numbers; default: a fresh one, which is printed")
    parser.add_argument("--arch", default="native", help="what to build for, as in `aah build` (default native)")
    parser.add_argument("--installed", action="store_true", help="use the operator that is built already")
    parser.add_argument("--cpu-end-to-end", action="store_true", help="only the model part, on the CPU, small")
    arguments = parser.parse_args(argv)

    if arguments.cpu_end_to_end:
        import end_to_end

        device, sections = "cpu", {"end_to_end": end_to_end.run}
    else:
        if not torch.cuda.is_available() or torch.version.hip:
            print("There is no NVIDIA GPU that torch can use here, so nothing was checked (see --cpu-end-to-end).")
            return NO_GPU
        device, sections = "cuda", gpu_sections(arguments)
        chosen = {"machine", "build", *(arguments.only or sections)} - set(arguments.skip)
        unknown = {*chosen, *arguments.skip} - set(sections)
        if unknown:
            parser.error(f"there are no sections {', '.join(sorted(unknown))}; choose from {', '.join(sections)}")
        sections = {name: section for name, section in sections.items() if name in chosen}

    seed = secrets.randbelow(2**31) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    torch.manual_seed(seed)
    check = Check(device, seed, time.monotonic() + 60 * arguments.minutes, small=device == "cpu")
    report: dict[str, Any] = {"seed": seed, "device": device}
    started = time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as folder:
            if not arguments.installed and device == "cuda":
                os.environ["AAH_HF_CACHE"] = folder  # what is checked are these sources, not an older library
            left = run(check, sections, report)
            if left:
                run_in_new_process(check, left, report, arguments)
    finally:
        report["seconds"] = round(time.monotonic() - started, 1)
        if arguments.json is not None:
            text = json.dumps(report, indent=1, default=str)
            partial = arguments.json.with_name(arguments.json.name + ".part")
            partial.write_text(text + "\n", encoding="utf-8")
            partial.replace(arguments.json)
    failed = [name for name in sections if not report[name]["passed"]]
    print(f"{'FAILED: ' + ', '.join(failed) if failed else 'ALL PASSED'} in {report['seconds']} s (seed {seed})")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
