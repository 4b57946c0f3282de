"""The library with a CUDA part, as far as a machine without a GPU can tell: budgets, machine code, symbols, loading.

Building it for six GPUs takes minutes, so all of this is slow; the build is kept in a folder of the cache of its own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from aah_hf.ops import library, recipes, toolchain

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(toolchain.find_compiler() is None, reason="needs a C++ compiler"),
    pytest.mark.skipif(toolchain.find_nvcc() is None, reason=f"needs nvcc: {toolchain.GET_NVCC}"),
]

SHARED_LIMIT = {"80": 163, "86": 99, "89": 99, "90": 227, "100": 227, "120": 99}
"""KiB of shared memory that a block can have (CUDA C++ Programming Guide, compute capabilities)."""

HALF, FLOAT = ("F16", "BF16"), ("f",)
DIMS = (64, 80, 96, 128, 192, 256)

# Every warning of every pass is an error here. Users' builds do not: another compiler may know other warnings.
BUILD = """
import dataclasses, json
from aah_hf.ops import build, library, recipes
recipe = recipes.with_cuda(recipes.default_recipe())
strict = (*recipe.cuda.flags, "-Werror=all-warnings", "-Xcompiler=-Wall,-Wextra,-Werror")
recipe = dataclasses.replace(recipe, cuda=dataclasses.replace(recipe.cuda, flags=strict))
print(build.build(recipe=recipe))
"""


@pytest.fixture(scope="session")
def built() -> Path:
    """A library for all GPUs; compiled in a process of its own, so that its memory can be told."""
    environment = os.environ | {"AAH_HF_CACHE": str(library.cache_folder() / "tests-cuda")}
    done = subprocess.run([sys.executable, "-c", BUILD], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.split()[-1])


@pytest.fixture(scope="session")
def manifest(built) -> dict:
    return library.verify(built)


@pytest.fixture(scope="session")
def targets(manifest) -> list[str]:
    return manifest["cuda"]["targets"]


def kernels(log: str) -> dict[tuple[str, str, int], dict[str, int]]:
    """(target, element type, head size) -> what ptxas says of the forward kernel."""
    found = {}
    pattern = (
        r"Compiling entry function '_ZN3aah14forward_kernelI(?:NS_\d+)?(\w+?)E?Li(\d+)E\w*' for 'sm_(\d+)'\n"
        r".*\n +(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\n"
        r".*Used (\d+) registers(?:.*?(\d+) bytes smem)?"
    )
    for dtype, dim, target, stack, stores, loads, registers, static in re.findall(pattern, log):
        found[target, dtype, int(dim)] = {
            "stack": int(stack),
            "spills": int(stores) + int(loads),
            "registers": int(registers),
            "static": int(static or 0),
        }
    return found


def test_every_kernel_keeps_to_its_registers(built, targets):
    found = kernels(built.with_name(library.LOG).read_text())
    assert set(found) == {(t, dtype, dim) for t in targets for dtype in (*HALF, *FLOAT) for dim in DIMS}
    for (target, dtype, dim), use in found.items():
        if dim <= 128:
            assert use["spills"] == use["stack"] == 0, (target, dtype, dim, use)
        assert use["spills"] <= 256, (target, dtype, dim, use)
        # two blocks of 128 threads on a multiprocessor's 65 536 registers
        assert use["registers"] <= 255, (target, dtype, dim, use)


def test_tiles_fit_the_shared_memory_of_every_gpu(built, targets, tmp_path):
    source = tmp_path / "shapes.cpp"
    source.write_text(
        f'#include "{recipes.CSRC}/device/arguments.h"\n#include <cstdio>\nint main() {{\n'
        + "".join(f'  std::printf("%d\\n", aah::shared_bytes({b}, {d}));\n' for b in (2, 4) for d in DIMS)
        + "}\n"
    )
    program = tmp_path / "shapes"
    subprocess.run([*toolchain.find_compiler().command, "-std=c++17", source, "-o", program], check=True)
    sizes = [int(n) for n in subprocess.run([program], capture_output=True, text=True, check=True).stdout.split()]
    static = max(use["static"] for use in kernels(built.with_name(library.LOG).read_text()).values())
    for target in targets:
        assert max(sizes) + static <= SHARED_LIMIT[target] * 1024, (target, sizes)
    assert min(sizes) > 0


def test_no_warning_and_no_more_than_a_gigabyte(built, manifest):
    log = built.with_name(library.LOG).read_text()
    assert "warning" not in log.lower().replace("-werror=all-warnings", "")
    assert manifest["compiler_mib"] < 1024


def cuobjdump() -> list[str]:
    """The program; skips the test where it is not installed. It calls nvdisasm."""
    nvcc = toolchain.find_nvcc()
    folders = [Path(nvcc.lib).parent / "bin"] if nvcc is not None and nvcc.lib else []
    path = os.pathsep.join([*map(str, folders), os.environ["PATH"]])
    spec = toolchain.importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path += os.pathsep + str(Path(folder) / "cu13" / "bin")
    tools = [shutil.which(name, path=path) for name in ("cuobjdump", "nvdisasm")]
    if None in tools:
        pytest.skip("needs cuobjdump and nvdisasm: `pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm`")
    return ["env", f"PATH={path}", str(tools[0])]


def test_every_target_has_the_instructions_it_should(built, targets):
    """Tensor cores, matrix loads and asynchronous copies, and no local memory."""
    program = cuobjdump()
    for target in targets:
        text = subprocess.run(
            [*program, "-sass", "-arch", f"sm_{target}", built], capture_output=True, text=True, check=True
        ).stdout
        counts: dict[tuple[str, int], Counter[str]] = defaultdict(Counter)
        kernel = None
        for line in text.splitlines():
            name = re.search(r"Function : _ZN3aah14forward_kernelI(?:NS_\d+)?(\w+?)E?Li(\d+)E", line)
            if "Function :" in line:
                kernel = (name[1], int(name[2])) if name else None
            operation = re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+ )?([A-Z][\w.]+)", line)
            if kernel is not None and operation:
                counts[kernel][operation[1].split(".")[0]] += 1
                counts[kernel][operation[1]] += 1
        assert set(counts) == {(dtype, dim) for dtype in (*HALF, *FLOAT) for dim in DIMS}, target
        for (dtype, dim), found in counts.items():
            where = (target, dtype, dim)
            product = {"F16": "HMMA.16816.F32", "BF16": "HMMA.16816.F32.BF16", "f": "HMMA.1688.F32.TF32"}[dtype]
            assert found[product] >= dim // 2, where
            assert found["LDSM"] >= dim // 8, where
            assert found["LDGSTS"] >= 8, where
            assert found["BAR"] >= 1, where
            if dim <= 128:
                assert found["LDL"] == found["STL"] == 0, where


def test_ptx_serves_gpus_without_machine_code(built, targets):
    said = subprocess.run([*cuobjdump(), "-lelf", "-lptx", built], capture_output=True, text=True, check=True).stdout
    assert {n for n in re.findall(r"\.sm_(\d+)\.cubin", said)} == set(targets)
    assert {n for n in re.findall(r"\.sm_(\d+)\.ptx", said)} == {targets[0]}


@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf")
def test_the_library_needs_no_cuda_and_offers_none(built):
    dynamic = subprocess.run(["readelf", "-dW", built], capture_output=True, text=True, check=True).stdout
    needed = {line.split("[")[1].rstrip("]") for line in dynamic.splitlines() if "(NEEDED)" in line}
    assert {"libtorch.so", "libtorch_cpu.so"} <= needed
    assert not any("cuda" in name or "python" in name for name in needed)
    table = subprocess.run(["readelf", "--dyn-syms", "-W", built], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in table.splitlines() if line.strip()[:1].isdigit()]
    symbols = {(row[7].split("@")[0], row[4], row[6] == "UND") for row in rows if len(row) > 7}
    cuda = {(name, bind) for name, bind, undefined in symbols if undefined and "cu" in name.lower()}
    # the number of a device type is in every torch; the stream is in those with CUDA, and weak
    assert {n for n, bind in cuda if bind == "GLOBAL" and "cuda" in n.lower()} <= {"aoti_torch_device_type_cuda"}
    assert ("aoti_torch_get_current_cuda_stream", "WEAK") in cuda
    # its own CUDA runtime must not stand before torch's
    assert not [n for n, _, undefined in symbols if not undefined and re.match(r"_*cu[dA-Z]", n)]
    offered = {n for n, _, undefined in symbols if not undefined and n.startswith("aah_cuda")}
    assert offered == {"aah_cuda_fwd", "aah_cuda_fwd_workspace", "aah_cuda_error", "aah_cuda_devices"}


LOAD = """
import json, sys, torch
from pathlib import Path
from aah_hf.ops import gpu, native, reference
info = native._open(Path(sys.argv[1]))
q, k, v = (torch.randn(1, n, 70, 16, requires_grad=True) for n in (4, 2, 2))
out, lse = native.forward(q, k, v, [1, 30, 64, None], 3)
want, _ = reference.attention(q, k, v, [1, 30, 64, 70], 3)
got = torch.autograd.grad(out.sum(), (q, k, v))
exact = torch.autograd.grad(want.sum(), (q, k, v))
info["error"] = max(float((a.double() - b.double()).abs().max()) for a, b in zip((out, *got), (want, *exact)))
info["why"] = gpu.refusal(info["cuda"], (9, 0))
info["torch"] = torch.version.cuda
window = torch.tensor([1, 2, 3, 4], dtype=torch.int32)
args = [x.detach().transpose(1, 2) for x in (q, k, v)] + [window] + [None] * 6 + [70, 70, 2, native.UNLIMITED, 0.25, 0.0]
torch.library.opcheck(torch.ops.aah.fwd.default, args)
print(json.dumps(info))
"""


def test_it_loads_without_a_driver_and_computes_on_the_cpu(built, targets):
    done = subprocess.run([sys.executable, "-c", LOAD, str(built)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["error"] < 1e-5
    assert found["cuda"]["targets"] == ",".join(targets) and found["cuda"]["runtime"] >= 12000
    if found["torch"] is None and found["cuda"]["driver"] == 0:
        assert found["cuda"]["devices"] == 0 and "no NVIDIA driver" in found["why"]
