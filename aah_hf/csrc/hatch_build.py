"""Build hook of hatchling: puts the compiled operator into a wheel.

`python -m build --wheel --no-isolation`, in an environment in which aah_hf's dependencies are installed, makes a
`py3-none-<platform>` wheel with the library in `aah_hf/_lib`: it holds no Python.h and uses torch's stable ABI, so
one wheel serves every Python and every torch from 2.10 on. In pip's isolated environment there is no torch to build
against, and bringing one in would cost gigabytes: the wheel is then pure Python and compiles on first use. The
same holds without a compiler. `AAH_HF_NATIVE=0` asks for a pure wheel, `AAH_HF_NATIVE=require` makes one an error. Where
nvcc is found the library has code for GPUs too, unless `AAH_HF_CUDA=0`.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CustomBuildHook(BuildHookInterface):
    """Runs for every wheel; an editable install compiles on first use instead."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        asked = os.environ.get("AAH_HF_NATIVE", "1") or "1"
        if asked not in ("0", "1", "require"):
            raise ValueError(f"AAH_HF_NATIVE is {asked!r}; expected 0, 1 or require.")
        if version == "editable" or asked == "0":
            return
        self.folder = Path(tempfile.mkdtemp(prefix="aah-hf-wheel-"))
        why = self.compile()
        if why is not None:
            if asked == "require":
                raise RuntimeError(f"AAH_HF_NATIVE=require, but the wheel would hold no native operator: {why}")
            self.app.display_warning(f"a pure Python wheel, without the native operator: {why}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        for file in self.folder.iterdir():
            build_data["force_include"][str(file)] = f"aah_hf/_lib/{file.name}"

    def compile(self) -> str | None:
        """Compile into `self.folder`; why that is not possible here, or None."""
        sys.path.insert(0, self.root)
        try:
            from aah_hf.ops import build, recipes, toolchain
        except ImportError as error:
            return f"aah_hf does not import in this build environment ({error})"
        finally:
            sys.path.remove(self.root)
        if toolchain.find_compiler() is None:
            return "there is no C++ compiler"
        recipe = recipes.default_recipe()
        if os.environ.get("AAH_HF_CUDA", "1") != "0" and toolchain.find_nvcc() is not None:
            recipe = recipes.with_cuda(recipe)
        build.build(recipe=recipe, out=self.folder, progress=lambda done, total, label: self.app.display_info(label))
        return None

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder, ignore_errors=True)
