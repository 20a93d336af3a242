"""Kernels of processors other than the one at hand: run where it can, and read where it can't."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import engine
import engine_cpu
from instructions import processor_features

pytestmark = pytest.mark.skipif(engine_cpu.cpu_kernels() is None, reason="needs numba")
AVX2 = "+avx,+avx2,+fma,+f16c"
AVX512 = AVX2 + ",+avx512f,+avx512bw,+avx512dq,+avx512vl"
NARROWED = {"as good as AVX2, nothing known": ("haswell", ""),
            "AVX2": ("haswell", AVX2),
            "AVX-512": ("skylake-avx512", AVX512),
            "AVX-512 VNNI": ("cascadelake", AVX512 + ",+avx512vnni")}

RUN = """
import torch
import engine
import engine_cpu
import quantization

torch.manual_seed(0)
for dtype in (torch.float32, torch.int8, torch.bfloat16):
    linear = engine_cpu.TiledLinear(151, 70)
    linear.weight.data, linear.bias.data = torch.randn(70, 151).bfloat16().float(), torch.randn(70)
    if dtype == torch.int8:
        linear = quantization.Int8Linear.of(linear)
    elif dtype == torch.bfloat16:
        linear.weight.data = linear.weight.bfloat16()
    linear.pack()
    weight = linear.float_weight().double()
    for rows in (1, 3, 11, 65, 131):
        x = torch.randn(rows, 151)
        if not engine_cpu.kernels_apply(x, rows):
            continue
        torch.testing.assert_close(linear(x).double(), x.double() @ weight.t() + linear.bias.double(),
                                   atol=2e-3 if dtype == torch.int8 else 1e-4, rtol=0)
kv = engine_cpu.TiledCache(1, 2, 80, page_size=7, max_pages=40).new_kv()
q, k, v = torch.randn(3, 1, 2, 201, 80)
kv.reserve(1, 200, 1000)
out = [kv.attend(0, q[:, :, :200], k[:, :, :200], v[:, :, :200], 0.1)]
kv.advance()
kv.reserve(1, 1, 1000)
out.append(kv.attend(0, q[:, :, 200:], k[:, :, 200:], v[:, :, 200:], 0.1))
expected = engine.attention(q.double(), k.double(), v.double(), 0.1).float()
torch.testing.assert_close(torch.cat(out, dim=2), expected, atol=1e-5, rtol=0)
print(*engine.generate(engine.load_model("tiny", dtype="int8"), [464, 1468, 2254], engine.SamplingParams(max_tokens=9)))
"""

READ = """
import numpy as np
from numba import types as t
import engine_cpu

engine_cpu.cpu_kernels()
import numba

scope = engine_cpu.compile_kernels(numba)


def matrix(kind, layout="C"):
    return t.Array(kind, 2, layout)


KINDS = {"float32": (t.float32, t.float32), "bfloat16": (BFLOAT16, t.uint16), "int8": (INT8, t.int8)}
for name, (x, weight) in KINDS.items():
    line, finish = t.Array(t.float32, 1, "C"), (matrix(t.float32), t.boolean, t.boolean)
    for kernel, more in ("_multiply_few", (t.UniTuple(t.int64, 2),)), ("_multiply_many", ()):
        kernel = scope[kernel]
        kernel._cache = numba.core.caching.NullCache()
        kernel.compile((matrix(x), line, matrix(weight), line, line, *more, *finish))
        print("---", name, kernel.py_func.__name__)
        print("\\n".join(kernel.inspect_asm().values()))
"""


def run(code, name, features):
    """What a Python process prints whose numba compiles for a processor of that name and with these features."""
    told = {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | told,
                          cwd=Path(engine.__file__).parent)
    assert done.returncode == 0, done.stderr
    return done.stdout


def runs_here(features):
    return {name[1:] for name in features.split(",") if name} <= processor_features()


@pytest.mark.parametrize("processor", [name if name == "AVX2" else pytest.param(name, marks=pytest.mark.long)
                                       for name in NARROWED])
def test_kernels_of_a_lesser_processor(processor):
    name, features = NARROWED[processor]
    if not runs_here(features or AVX2):
        pytest.skip(f"this processor has no {processor}")
    assert len(run(RUN, name, features).split()) == 9


@pytest.mark.long
@pytest.mark.parametrize("name, features, kinds, expected", [
    ("haswell", AVX2, "t.float32 t.int16", {"float32": r"vfmadd\w+ps.*ymm", "int8": r"vpmaddwd.*ymm"}),
    ("alderlake", AVX2 + ",+avxvnni", "t.float32 t.int16", {"float32": r"vfmadd\w+ps.*ymm",
                                                            "int8": r"\{vex\}\s+vpdpwssd.*ymm"}),
    ("znver4", AVX512 + ",+avx512vnni,+avx512bf16", "t.uint16 t.int16", {
        "float32": r"vfmadd\w+ps.*zmm", "int8": r"vpdpwssd.*zmm", "bfloat16": r"vdpbf16ps.*zmm"})])
def test_a_tile_is_made_of_the_processors_own_instructions(name, features, kinds, expected):
    """One for each register of sums, in the innermost loop, and none of them goes to memory and back."""
    bfloat16, int8 = kinds.split()
    asm = run(READ.replace("BFLOAT16", bfloat16).replace("INT8", int8), name, features)
    parts = re.split(r"^--- (\w+) (\w+)$", asm, flags=re.M)[1:]
    wide = "avx512f" in features
    tiles = {"_multiply_few": 16 if wide else 8, "_multiply_many": 24 if wide else 12}
    for kind, kernel, code in zip(parts[::3], parts[1::3], parts[2::3]):
        if kind in expected:
            loops = re.split(r"^\.LBB\w+:", code, flags=re.M)
            found = [len(re.findall(expected[kind], loop)) for loop in loops]
            assert tiles[kernel] in found or 2 * tiles[kernel] in found or 4 * tiles[kernel] in found, (kind, found)
