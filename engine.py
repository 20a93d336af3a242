"""GPT-2 inference from scratch: the model, its KV-caches, sampling, and the CPU benchmarks.

    python engine.py                                 benchmarks: no cache, KV-cache, paged
    python engine.py --prompt "The meaning of life is" --model tiny

Every variant runs the same blocks; they differ only in where keys and values live. That place is an
object handed to `forward`, with a few verbs: `length` (how much is stored), `reserve` (make room for
the new tokens, before anything runs), `attend` (store and attend, for one layer), `advance`, `truncate`
(forget the last tokens), `release`.

Shapes are written in one alphabet:
    B batch   T new tokens   S stored + new tokens   V vocabulary   L layers
    H heads   D head dim     C = H * D model width   P pages        N tokens of all rows, end to end
"""

import argparse
import base64
import codecs
import collections.abc
import contextlib
import copy
import functools
import itertools
import json
import math
import os
import platform
import queue
import re
import secrets
import statistics
import sys
import threading
import time
import types
import zipfile
from dataclasses import dataclass, replace
from numbers import Integral, Real
from pathlib import Path
from types import SimpleNamespace

# OpenMP's threads wait for each other by spinning, for long. Let them sleep after 20,000 turns: as fast on a quiet
# machine, and where another process takes a core 4 times slower instead of standing still. Read when torch is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

ASSETS = Path(__file__).resolve().parent / "assets"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CPU_DTYPES = DTYPES | {"int8": torch.int8}


class UserError(ValueError):
    """Something the user can mend. The message is one line that names the value and the limit."""


class OutOfPages(UserError):
    """The page pool has fewer free pages than a step needs. Nothing was changed."""


# ---------------------------------------------------------------------------------------------------
# CPU kernels: the counterpart of the Triton kernels, in plain Python that numba compiles on the spot.
#
# A decode step reads every weight once for a few rows, so it is a race of bytes: torch hands a single row to one
# thread. A prompt is a race of operations, which a processor does fastest in the weights' own dtype. Both are won by
# one product, in tiles: ROWS rows times OUTS outputs are summed in registers, 8 or 16 numbers at a time, while the
# weights of the next tile are fetched. Up to FEW_ROWS a sum is always added up in the same order, so a row's result
# does not depend on its neighbours. A block of the model runs in one call.

BLOCK = 64       # outputs that a task computes
PANEL = 128      # rows that it multiplies while their weights are in the first cache
SPAN = 3072      # bytes of a row that a tile sums up at a time, beyond FEW_ROWS: those of OUTS fit the first cache
FEW_ROWS = 64    # up to which a tile sums up whole rows
AHEAD = 4096     # bytes by which the weights of a row by itself are fetched before they are used
QUERIES, KEYS = 128, 64  # of a prompt, that a task attends at a time
# Beyond so many rows torch multiplies on processors not known to have AVX2: some have a unit for it that it alone uses.
# On others our kernels are ahead at any number, since a block is one call: a prompt of GPT-2, ms on 2 cores of a Zen 5,
# ours / oneDNN's products with our attention:
#     tokens              100       136       1,000
#     float32         54 / 68   72 / 73   525 / 588
#     bfloat16        31 / 36   41 / 46   323 / 327
#     int8            30 / 68   41 / 79   338 / 357
MANY_ROWS = 64

# What `intrinsics` binds to the machine's instructions; here is what they mean.
prange = range
ROWS, OUTS, COLUMNS = 4, 4, 64


def _tile(rows, outs, x, row, weight, o, start, length, sums, at, column, add, ahead, fetch):
    """sums[at + r, column + i] = (or +=, if add) the sum over `length` numbers from `start` of x[row + r] times
    weight[o + i], for `rows` r and `outs` i (constants). Fetches `fetch` times a row's weights
    from `ahead` bytes behind them."""


def _outer(rows, x, row, weight, column, out, add):
    """out[row + r, column + c] = (or +=, if add) the sum over k of x[row + r, k] times weight[k, column + c], all
    float32, for `rows` r (a constant) and COLUMNS c."""


def _fetch(array, head, slot, d):
    """Ask for the memory behind array[head, slot, d], which will be read soon."""


def _widen(number):
    """What is stored, as float32. uint16 holds the bits of a bfloat16, int16 those of a float16."""


def _as(number, array):
    """A float32 as the array stores it: the reverse of `_widen`, rounded to the nearest."""


def _as_float(bits):
    """The float32 of these 32 bits."""


def _narrowed(x, like):
    """Activations x (N, K) as they are multiplied, in the dtype of `like`, and a factor for each row: `_rounded`,
    `_scaled`, or x itself."""


def _aligned(rows, columns, like):
    """Memory (rows, columns) in the dtype of `like` that begins with a cache line: a load across two costs double."""
    line = 64 // like.itemsize
    raw = np.empty(rows * columns + line, like.dtype)
    skip = (64 - raw.ctypes.data % 64) // like.itemsize % line
    return raw[skip:skip + rows * columns].reshape(rows, columns)


LOG2_E, LOWEST, ZERO, ONE = map(np.float32, (math.log2(math.e), -87.3, 0, 1))
C1, C2, C3, C4, C5, C6 = (np.float32(math.log(2) ** n / math.factorial(n)) for n in range(1, 7))   # of 2 ** f


def _exp(x):
    """e to the x within 3e-7 of it, for x up to 0; 0 below -87. Unlike np.exp it runs in SIMD."""
    power = max(x, LOWEST) * LOG2_E
    whole = np.floor(power + np.float32(0.5))
    f = power - whole
    series = ONE + f * (C1 + f * (C2 + f * (C3 + f * (C4 + f * (C5 + f * C6)))))
    scaled = series * _as_float(np.int32((np.int32(whole) + 127) << 23))
    return ZERO if x <= LOWEST else scaled + x * ZERO            # the last keeps NaN


def _gelu(x):
    """gelu_new: x * (1 + tanh(u)) / 2, which is x / (1 + exp(-2u)); the exponent is kept below 0."""
    u = np.float32(2 * math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)
    e = _exp(-abs(u))
    return (x if u > 0 else x * e) / (ONE + e)


def _rounded(x, like):
    y = _aligned(x.shape[0], x.shape[1], like)
    for row in prange(x.shape[0]):
        for k in range(x.shape[1]):
            y[row, k] = _as(x[row, k], y)
    return y, np.ones(x.shape[0], np.float32)


def _scaled(x, like):
    """Whole numbers of 16 bits, so large that the sum of K products with 8-bit weights stays below 2 ** 31."""
    y, factors = _aligned(x.shape[0], x.shape[1], like), np.empty(x.shape[0], np.float32)
    limit = np.float32(min(32767, 2 ** 24 // x.shape[1] - 1))
    for row in prange(x.shape[0]):
        largest, nothing = np.float32(1e-30), ZERO
        for k in range(x.shape[1]):
            largest = max(largest, abs(x[row, k]))
            nothing += x[row, k] * ZERO                              # NaN, if one of them is
        inverse = limit / largest
        for k in range(x.shape[1]):
            y[row, k] = np.int16(np.rint(x[row, k] * inverse))
        factors[row] = largest / limit + nothing
    return y, factors


def _tiles(x, row, rows, weight, o, outs, length, span, sums):
    """sums[:rows, :outs] = x[row:row + rows] times weight[o:o + outs] transposed, over the first `length` numbers of
    each, of which a tile takes `span` at a time."""
    # The weights of the next tiles are fetched in equal shares: all at once, they would stop the sums. A row by itself
    # takes one output after another, as memory is read fastest.
    part = max(1, OUTS // max(1, rows // ROWS))
    for start in range(0, length, span):
        count, i = min(span, length - start), 0
        while i < outs:
            wide, r = rows > 1 and i + OUTS <= outs, 0
            while r < rows:
                tall, share = r + ROWS <= rows, r // ROWS * part
                fetch, ahead = 0 if r else 1, AHEAD
                if wide:
                    fetch = part if r % ROWS == 0 and share < OUTS else 0
                    ahead = (OUTS + share) * weight.shape[1] * weight.itemsize
                if wide and tall:
                    _tile(ROWS, OUTS, x, row + r, weight, o + i, start, count, sums, r, i, start > 0, ahead, fetch)
                elif wide:
                    _tile(1, OUTS, x, row + r, weight, o + i, start, count, sums, r, i, start > 0, ahead, fetch)
                elif tall:
                    _tile(ROWS, 1, x, row + r, weight, o + i, start, count, sums, r, i, start > 0, ahead, fetch)
                else:
                    _tile(1, 1, x, row + r, weight, o + i, start, count, sums, r, i, start > 0, ahead, fetch)
                r += ROWS if tall else 1
            i += OUTS if wide else 1


def _finish(sums, factor, scale, bias, out, add, gelu):
    """What follows a product, for some outputs of a row; see `_multiply`."""
    for i in range(out.shape[0]):
        value = sums[i] * (factor * scale[i]) + bias[i]
        sums[i] = value + out[i] if add else value
    for i in range(out.shape[0]):
        out[i] = _gelu(sums[i]) if gelu else sums[i]


def _multiply(x, factors, weight, scale, bias, out, add, gelu):
    """out (N, out) = x (N, K) times weight (out, K) transposed, times factors (N) and scale (out), plus bias (out);
    its gelu, if so; plus what out was, if add."""
    N, K = x.shape
    span = K if N <= FEW_ROWS else SPAN // x.itemsize
    for task in prange((weight.shape[0] + BLOCK - 1) // BLOCK):
        first, outs = task * BLOCK, min(BLOCK, weight.shape[0] - task * BLOCK)
        sums = np.empty((min(N, PANEL), BLOCK), np.float32)
        for panel in range(0, N, PANEL):
            rows = min(PANEL, N - panel)
            _tiles(x, panel, rows, weight, first, outs, K, span, sums)
            for r in range(rows):
                _finish(sums[r], factors[panel + r], scale[first:first + outs], bias[first:first + outs],
                        out[panel + r, first:first + outs], add, gelu)


def _project(x, linear, out, add, gelu):
    """`_multiply` by a projection: weight, scale, bias, and an array of the dtype of its activations."""
    y, factors = _narrowed(x, linear[3])
    _multiply(y, factors, linear[0], linear[1], linear[2], out, add, gelu)


def _normalise(x, norm, out):
    """LayerNorm of the rows of x (N, C). norm: weight, bias, epsilon."""
    weight, bias, eps = norm
    C = x.shape[1]
    for row in prange(x.shape[0]):
        mean = square = np.float32(0)
        for c in range(C):
            mean += x[row, c]
        mean /= np.float32(C)
        for c in range(C):
            square += (x[row, c] - mean) * (x[row, c] - mean)
        factor = ONE / np.sqrt(square / np.float32(C) + eps)
        for c in range(C):
            out[row, c] = (x[row, c] - mean) * factor * weight[c] + bias[c]


def _begin(x, norm, attn, y, qkv):
    """The first part of a block: qkv (N, 3C) = c_attn(y), y (N, C) = ln_1(x)."""
    _normalise(x, norm, y)
    _project(y, attn, qkv, False, False)


def _end(x, attended, proj, norm, fc, proj_2, y, h):
    """The rest of it, in place: x += c_proj(attended), y = ln_2(x), h = gelu(mlp.c_fc(y)), x += mlp.c_proj(h)."""
    _project(attended, proj, x, True, False)
    _normalise(x, norm, y)
    _project(y, fc, h, False, True)
    _project(h, proj_2, x, True, False)


def _attend_one(qkv, pool_k, pool_v, tables, lengths, page_size, scale, out):
    """Attention of one new token a row, page by page with an online softmax (Milakov & Gimelshein 2018).

    qkv (N, 3, H, D); out (N, H, D); pools (H, slots, D); tables (N, P) page ids; lengths (N) tokens before the new one.
    """
    N, _, H, D = qkv.shape
    for task in prange(N * H):
        row, head = task // H, task % H
        S = lengths[row] + 1
        query, acc, scores = np.empty(D, np.float32), np.zeros(D, np.float32), np.empty(page_size, np.float32)
        for d in range(D):
            query[d] = qkv[row, 0, head, d] * scale
        m_i, l_i = np.float32(-np.inf), np.float32(0)             # running maximum and sum of exp(score - m_i)
        pages = (S + page_size - 1) // page_size
        for page in range(pages):
            first, count = tables[row, page] * page_size, min(page_size, S - page * page_size)
            coming = tables[row, min(page + 1, pages - 1)] * page_size
            m_new = m_i
            for j in range(count):
                for d in range(0, D, 16):
                    _fetch(pool_k, head, coming + j, d)
                    _fetch(pool_v, head, coming + j, d)
                total = np.float32(0)
                for d in range(D):
                    total += query[d] * _widen(pool_k[head, first + j, d])
                scores[j] = total
                m_new = max(m_new, total)
            shrink = _exp(m_i - m_new)
            l_i *= shrink
            for d in range(D):
                acc[d] *= shrink
            for j in range(count):
                scores[j] = _exp(scores[j] - m_new)
            for j in range(count):
                p = scores[j]
                l_i += p
                for d in range(D):
                    acc[d] += p * _widen(pool_v[head, first + j, d])
            m_i = m_new
        for d in range(D):
            out[row, head, d] = acc[d] / l_i


def _outer_products(x, weight, out, add):
    """out (N, W) = (or +=, if add) x (N, K) times weight (K, W); W is a multiple of COLUMNS."""
    for column in range(0, weight.shape[1], COLUMNS):
        row = 0
        while row < x.shape[0]:
            if row + ROWS <= x.shape[0]:
                _outer(ROWS, x, row, weight, column, out, add)
                row += ROWS
            else:
                _outer(1, x, row, weight, column, out, add)
                row += 1


def _attend_block(qkv, first, n, head, keys_of, values_of, table, before, page_size, scale, out):
    """Attention of n queries of a head, `first` and on, that stand behind `before` tokens (Dao et al. 2022).

    keys_of, values_of (slots, D). Scores stand as (key, query), so what is done to one is done to all queries at once.
    """
    D = qkv.shape[3]
    width, lanes = (D + COLUMNS - 1) // COLUMNS * COLUMNS, (n + COLUMNS - 1) // COLUMNS * COLUMNS
    queries, keys, scores = _aligned(D, lanes, qkv), _aligned(KEYS, D, qkv), _aligned(KEYS, lanes, qkv)
    values, acc, state = _aligned(KEYS, width, qkv), _aligned(lanes, width, qkv), _aligned(3, lanes, qkv)
    m_i, l_i, m_new = state[0], state[1], state[2]                   # running maximum, sum of exp(score - m_i)
    for t in range(lanes):
        m_i[t], l_i[t] = -np.inf, ZERO
        for d in range(width):
            acc[t, d] = ZERO
        for d in range(D):
            queries[d, t] = qkv[first + t, 0, head, d] * scale if t < n else ZERO
    for j in range(KEYS):
        for d in range(D, width):
            values[j, d] = ZERO
    for at in range(0, before + n, KEYS):
        count = min(KEYS, before + n - at)
        for j in range(count):
            slot = table[(at + j) // page_size] * page_size + (at + j) % page_size
            for d in range(D):
                keys[j, d] = _widen(keys_of[slot, d])
            for d in range(D):
                values[j, d] = _widen(values_of[slot, d])
        _outer_products(keys[:count], queries, scores, False)
        for j in range(max(0, before + 1 - at), count):              # hidden from the queries before it
            for t in range(min(lanes, at + j - before)):
                scores[j, t] = -np.inf
        for t in range(lanes):
            m_new[t] = m_i[t]
        for j in range(count):
            for t in range(lanes):
                m_new[t] = max(m_new[t], scores[j, t])
        for t in range(lanes):
            shrink = _exp(m_i[t] - m_new[t])
            m_i[t] = m_new[t]
            l_i[t] *= shrink
            for d in range(width):
                acc[t, d] *= shrink
        for j in range(count):
            for t in range(lanes):
                scores[j, t] = _exp(scores[j, t] - m_i[t])
            for t in range(lanes):
                l_i[t] += scores[j, t]
        _outer_products(scores[:count].T, values[:count], acc, True)
    for t in range(n):
        for d in range(D):
            out[first + t, head, d] = acc[t, d] / l_i[t]


def _attend_many(qkv, pool_k, pool_v, table, stored, page_size, scale, out):
    """Attention of T new tokens of one row, QUERIES of a head at a time. qkv (T, 3, H, D); out (T, H, D); table (P)."""
    T, H = qkv.shape[0], qkv.shape[2]
    blocks = (T + QUERIES - 1) // QUERIES
    for task in prange(H * blocks):
        head, first = task // blocks, task % blocks * QUERIES
        _attend_block(qkv, first, min(QUERIES, T - first), head, pool_k[head], pool_v[head], table, stored + first,
                      page_size, scale, out)


def _store(qkv, pool_k, pool_v, slots):
    """Keys and values of N new tokens to their slots (N)."""
    N, _, H, D = qkv.shape
    for n in range(N):
        for head in range(H):
            for d in range(D):
                pool_k[head, slots[n], d] = _as(qkv[n, 1, head, d], pool_k)
            for d in range(D):
                pool_v[head, slots[n], d] = _as(qkv[n, 2, head, d], pool_v)


def _attend(qkv, pages, layer, scale, out):
    """Store and attend the new tokens of all rows, end to end. qkv (N, 3, H, D), out (N, H, D).

    pages: the pools (L, H, slots, D), slots of the new tokens (N), tables (B, P), how many tokens each row stores (B)
    and brings (B), page size.
    """
    pool_k, pool_v, slots, tables, lengths, counts, page_size = pages
    pool_k, pool_v = pool_k[layer], pool_v[layer]
    _store(qkv, pool_k, pool_v, slots)
    single = 0                                                       # rows of one token, which come first
    while single < len(counts) and counts[single] == 1:
        single += 1
    if single:
        _attend_one(qkv[:single], pool_k, pool_v, tables, lengths, page_size, scale, out[:single])
    at = single
    for row in range(single, len(counts)):
        end = at + counts[row]
        _attend_many(qkv[at:end], pool_k, pool_v, tables[row], lengths[row], page_size, scale, out[at:end])
        at = end


def _block(x, norm, attn, pages, layer, scale, proj, norm_2, fc, proj_2, room):
    """A whole block, in place, over a pool of pages. room: memory for what lies between: N * (5C + inner) numbers."""
    (N, C), H = x.shape, pages[0].shape[1]
    y, attended, qkv = room[:N * C], room[N * C:2 * N * C], room[2 * N * C:5 * N * C]
    h = room[5 * N * C:N * (5 * C + fc[0].shape[0])]
    _begin(x, norm, attn, y.reshape(N, C), qkv.reshape(N, 3 * C))
    _attend(qkv.reshape(N, 3, H, C // H), pages, layer, scale, attended.reshape(N, H, C // H))
    _end(x, attended.reshape(N, C), proj, norm_2, fc, proj_2, y.reshape(N, C), h.reshape(N, fc[0].shape[0]))


@functools.cache
def cpu_kernels():
    """The kernels, compiled; None where numba is missing.

    They need no compiler on the machine and are kept in __pycache__. Their plain twins, which run without
    numba and which the tests compare them with, are `Block.forward`, `Linear.forward` and `PagedKVCache.attend`.
    Activations, biases and LayerNorms are float32; weights as `as_array` gives them.
    """
    try:
        import numba
    except ImportError:
        return None
    # Bound to a copy of this module's names: numba would keep no kernel that closes over another.
    scope = globals() | {"prange": numba.prange} | intrinsics()
    # Sums may be reordered (for SIMD), but NaN and infinity keep their meaning, unlike under fastmath=True.
    options = dict(error_model="numpy", fastmath={"reassoc", "contract", "nsz"}, nogil=True)
    lock = threading.Lock()  # not every threading layer of numba lets two threads launch at once

    def compiled(kernel, **more):
        kernel = types.FunctionType(kernel.__code__, scope, kernel.__name__)
        try:
            scope[kernel.__name__] = numba.njit(cache=True, **options, **more)(kernel)
        except RuntimeError:  # no folder to keep it in
            scope[kernel.__name__] = numba.njit(**options, **more)(kernel)
        return scope[kernel.__name__]

    def on_torchs_threads(kernel):
        def launch(*args):
            with lock:
                numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))  # of this thread
                kernel(*(x.numpy() if isinstance(x, torch.Tensor) else x for x in args))
        return launch

    for helper in _aligned, _exp, _gelu, _tiles, _finish, _outer_products, _attend_block, _store:
        compiled(helper)
    for helper in _rounded, _scaled, _multiply, _normalise, _attend_one, _attend_many:
        compiled(helper, parallel=True)
    choose_narrowing(scope["_rounded"], scope["_scaled"])
    kernels = [compiled(kernel) for kernel in (_project, _begin, _end, _attend, _block)]
    return SimpleNamespace(**{kernel.__name__[1:]: on_torchs_threads(kernel) for kernel in kernels})


def choose_narrowing(rounded, scaled):
    """`_narrowed` for the kernels: which of the two, by the dtype that is asked for."""
    from numba import types
    from numba.extending import overload

    @overload(_narrowed)
    def choice(x, like):
        if like.dtype == types.float32:
            return lambda x, like: (x, np.ones(x.shape[0], np.float32))
        if like.dtype == types.uint16:
            return lambda x, like: rounded(x, like)
        return lambda x, like: scaled(x, like)


@functools.cache
def processor_features():
    """Names of what the processor can do, as LLVM calls them; none where numba is told to compile for another."""
    import llvmlite.binding
    import numba

    if numba.config.CPU_NAME:
        return frozenset()
    return frozenset(name for name, has in llvmlite.binding.get_host_cpu_features().items() if has)


def activations_like(weight):
    """An empty array of the dtype in which activations are multiplied by this weight. float32 is exact; bfloat16 and
    whole numbers of 16 bits are what the processor multiplies by weights of 16 and of 8 bits."""
    native = {torch.bfloat16: ("avx512bf16", np.uint16), torch.int8: ("avx512vnni", np.int16)}
    feature, dtype = native.get(weight.dtype, (None, None))
    has = cpu_kernels() is not None and feature in processor_features()
    return np.empty(0, dtype if has else np.float32)


def intrinsics():
    """What the kernels do that Python has no word for, in the compiler's terms. See their names for what they mean."""
    import llvmlite.binding
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils
    from numba.extending import intrinsic

    llvmlite.binding.initialize_native_asmparser()
    wide = "avx512f" in processor_features()  # 32 registers of 16 numbers; else 16 of 8, or as good as that
    lanes, rows, outs = (16, 4, 4) if wide else (8, 4, 2)
    i8, i16, i32, i64, f32 = *map(ir.IntType, (8, 16, 32, 64)), ir.FloatType()

    def vector(kind, count=lanes):
        return ir.VectorType(kind, count)

    def shaped(kind, like):  # kind, or a vector of it where `like` is one
        return vector(kind, like.count) if isinstance(like, ir.VectorType) else kind

    def constant(kind, value):
        return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)

    def widened(builder, bits, kind):
        wide, as_float = shaped(i32, bits.type), shaped(f32, bits.type)
        if kind == types.float32:
            return bits
        if kind == types.int8:
            return builder.sitofp(bits, as_float)
        if kind == types.int16:
            return builder.fpext(builder.bitcast(bits, shaped(ir.HalfType(), bits.type)), as_float)
        return builder.bitcast(builder.shl(builder.zext(bits, wide), constant(wide, 16)), as_float)

    @intrinsic
    def widen(typing_context, number):
        return types.float32(number), lambda context, builder, signature, args: widened(
            builder, args[0], signature.args[0])

    @intrinsic
    def as_stored(typing_context, number, array):
        def code(context, builder, signature, args):
            number, kind = args[0], signature.args[1].dtype
            if kind == types.float32:
                return number
            if kind == types.int16:
                return builder.bitcast(builder.fptrunc(number, ir.HalfType()), i16)
            bits = builder.bitcast(number, i32)                      # half of the last bit kept; a tie becomes even
            odd = builder.and_(builder.lshr(bits, constant(i32, 16)), constant(i32, 1))
            nearest = builder.lshr(builder.add(builder.add(bits, constant(i32, 0x7fff)), odd), constant(i32, 16))
            is_nan = builder.fcmp_unordered("uno", number, number)
            return builder.trunc(builder.select(is_nan, constant(i32, 0x7fc0), nearest), i16)
        return array.dtype(number, array), code

    @intrinsic
    def as_float(typing_context, bits):
        return types.float32(bits), lambda context, builder, signature, args: builder.bitcast(args[0], f32)

    def element(context, builder, kind, array, index):
        """The address of an element of a numba array."""
        array = context.make_array(kind)(context, builder, array)
        return cgutils.get_item_pointer(context, builder, kind, array, index)

    def fetched(builder, address):
        fetch = builder.module.declare_intrinsic("llvm.prefetch", [address.type],
                                                 ir.FunctionType(ir.VoidType(), [address.type, i32, i32, i32]))
        builder.call(fetch, [address, i32(0), i32(3), i32(1)])       # to be read, into all caches, data

    @intrinsic
    def fetch(typing_context, array, head, slot, d):
        def code(context, builder, signature, args):
            index = [context.cast(builder, at, kind, types.intp) for at, kind in zip(args[1:], signature.args[1:])]
            address = element(context, builder, signature.args[0], args[0], index)
            fetched(builder, builder.bitcast(address, i8.as_pointer()))
            return context.get_dummy_value()
        return types.void(array, head, slot, d), code

    def assembly(instruction):
        def dot(builder, total, x, w):
            kind = ir.FunctionType(total.type, [total.type, vector(i32), vector(i32)])
            as_pairs = [builder.bitcast(value, vector(i32)) for value in (x, w)]
            return builder.call(ir.InlineAsm(kind, instruction + " $3, $2, $0", "=v,0,v,v"), [total, *as_pairs])
        return dot

    def fused(builder, total, x, w):
        return builder.fadd(total, builder.fmul(x, w, flags=("contract",)), flags=("contract",))

    def flavour(x, weight):
        """How two dtypes are multiplied: numbers a step, dtype of a sum, what a weight is made, and the product."""
        if (x, weight) == (types.uint16, types.uint16):
            return 2 * lanes, f32, lambda builder, w: w, assembly("vdpbf16ps")
        if (x, weight) == (types.int16, types.int8):
            return 2 * lanes, i32, lambda builder, w: builder.sext(w, vector(i16, 2 * lanes)), assembly("vpdpwssd")
        return lanes, f32, lambda builder, w: widened(builder, w, weight), fused

    def loaded(builder, address, count, part=None):
        """`count` numbers of what address points to; the first `part` of them and zeros, where that is given."""
        kind = vector(address.type.pointee, count)
        if part is None:
            value = builder.load(builder.bitcast(address, kind.as_pointer()))
            value.align = 1
            return value
        lane = ir.Constant(vector(i16, count), list(range(count)))
        last = builder.insert_element(lane, builder.trunc(part, i16), i32(0))
        mask = builder.icmp_unsigned("<", lane, builder.shuffle_vector(last, last, constant(vector(i32, count), 0)))
        element = {f32: "f32", i16: "i16", i8: "i8"}[address.type.pointee]
        load = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(kind, [kind.as_pointer(), i32, mask.type, kind]),
            f"llvm.masked.load.v{count}{element}.p0")
        return builder.call(load, [builder.bitcast(address, kind.as_pointer()), i32(1), mask, ir.Constant(kind, None)])

    # Which of two vectors' lanes are added to which others, step by step: neighbours, first in groups of four, which
    # processors shuffle fastest, then whole groups.
    in_fours = [[at + 4 * group + n for group in range(lanes // 4) for at in (0, lanes) for n in (odd, odd + 2)]
                for odd in (0, 1)]
    of_fours = [[4 * group + n for group in range(odd, lanes // 2, 2) for n in range(4)] for odd in (0, 1)]
    steps = [in_fours] * 2 + [of_fours] * (lanes // 4).bit_length()
    steps = [[ir.Constant(vector(i32), half) for half in step] for step in steps[:lanes.bit_length() - 1]]

    def summed(builder, totals):
        """The sums of the lanes of each vector, in the lanes of one."""
        add = builder.add if totals[0].type.element == i32 else builder.fadd
        for step in steps:
            pairs = list(zip(totals[::2], totals[1::2])) or [(totals[0], totals[0])]
            totals = [add(*(builder.shuffle_vector(*pair, half) for half in step)) for pair in pairs]
        return totals[0] if totals[0].type.element == f32 else builder.sitofp(totals[0], vector(f32))

    @intrinsic(prefer_literal=True)
    def tile(typing_context, rows, outs, x, row, weight, o, start, length, sums, at, column, add, ahead, fetch):
        def code(context, builder, signature, args):
            kinds, (rows, outs) = signature.args, (kind.literal_value for kind in signature.args[:2])
            row, o, start, length, at, column, ahead, fetch = (
                context.cast(builder, args[n], kinds[n], types.intp) for n in (3, 5, 6, 7, 9, 10, 12, 13))
            step, total, ready, dot = flavour(kinds[2].dtype, kinds[4].dtype)
            xs, weights, places = ([element(context, builder, kinds[n], args[n], [builder.add(i, i64(r)), k])
                                    for r in range(count)] for n, i, k, count in
                                   ((2, row, start, rows), (4, o, start, outs), (8, at, column, rows)))
            size = context.get_abi_sizeof(context.get_data_type(kinds[4].dtype))
            first = builder.bitcast(weights[0], i8.as_pointer())
            zero = ir.Constant(vector(total), None)
            totals = [cgutils.alloca_once_value(builder, zero) for _ in range(rows * outs)]

            def add_up(index, part=None):
                ws = [ready(builder, loaded(builder, builder.gep(w, [index]), step, part)) for w in weights]
                for r in range(rows):
                    values = loaded(builder, builder.gep(xs[r], [index]), step, part)
                    for w, place in zip(ws, totals[r * outs:]):
                        builder.store(dot(builder, builder.load(place), values, w), place)

            whole = builder.udiv(length, i64(step))
            with cgutils.for_range(builder, whole) as loop:
                index = builder.mul(loop.index, i64(step))
                line = builder.add(ahead, builder.mul(builder.mul(index, fetch), i64(size)))
                with cgutils.for_range(builder, fetch) as nth:       # one after another, as memory likes it
                    further = builder.mul(nth.index, i64(step * size))
                    fetched(builder, builder.gep(first, [builder.add(line, further)]))
                add_up(index)
            index = builder.mul(whole, i64(step))
            rest = builder.sub(length, index)
            with builder.if_then(builder.icmp_signed(">", rest, i64(0)), likely=False):
                add_up(index, rest)
            found = summed(builder, [builder.load(place) for place in totals])
            for r, place in enumerate(places):
                mask = ir.Constant(vector(i32, outs), list(range(r * outs, (r + 1) * outs)))
                own = builder.shuffle_vector(found, found, mask)
                before = loaded(builder, place, outs)
                own = builder.fadd(own, builder.select(args[11], before, ir.Constant(before.type, None)))
                builder.store(own, builder.bitcast(place, own.type.as_pointer())).align = 4
            return context.get_dummy_value()
        return types.void(rows, outs, x, row, weight, o, start, length, sums, at, column, add, ahead, fetch), code

    @intrinsic(prefer_literal=True)
    def outer(typing_context, rows, x, row, weight, column, out, add):
        def code(context, builder, signature, args):
            kinds, rows = signature.args, signature.args[0].literal_value
            row, column = (context.cast(builder, args[n], kinds[n], types.intp) for n in (2, 4))
            K = cgutils.unpack_tuple(builder, context.make_array(kinds[3])(context, builder, args[3]).shape)[0]
            places = [[element(context, builder, kinds[5], args[5],
                               [builder.add(row, i64(r)), builder.add(column, i64(n * lanes))]) for n in range(outs)]
                      for r in range(rows)]
            zero = ir.Constant(vector(f32), None)
            totals = [[cgutils.alloca_once_value(builder, builder.select(args[6], loaded(builder, place, lanes), zero))
                       for place in own] for own in places]
            with cgutils.for_range(builder, K) as loop:
                ws = [loaded(builder, element(context, builder, kinds[3], args[3], [
                    loop.index, builder.add(column, i64(n * lanes))]), lanes) for n in range(outs)]
                for r, own in enumerate(totals):
                    number = builder.load(element(context, builder, kinds[1], args[1],
                                                  [builder.add(row, i64(r)), loop.index]))
                    lane = builder.insert_element(ir.Constant(vector(f32), ir.Undefined), number, i32(0))
                    spread = builder.shuffle_vector(lane, lane, constant(vector(i32), 0))
                    for w, total in zip(ws, own):
                        builder.store(fused(builder, builder.load(total), spread, w), total)
            for own, total in zip(itertools.chain(*places), itertools.chain(*totals)):
                value = builder.load(total)
                builder.store(value, builder.bitcast(own, value.type.as_pointer())).align = 4
            return context.get_dummy_value()
        return types.void(rows, x, row, weight, column, out, add), code

    return {"_widen": widen, "_as": as_stored, "_as_float": as_float, "_fetch": fetch, "_tile": tile,
            "ROWS": rows, "OUTS": outs, "COLUMNS": outs * lanes, "_outer": outer}


def physical_cores():
    """How many cores this process may use, or None where the system does not tell. Two threads of one core share its
    arithmetic and its caches: products gain nothing from the second, and wait for it."""
    with contextlib.suppress(OSError, AttributeError):
        topology = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
        return len({Path(topology.format(cpu)).read_text() for cpu in os.sched_getaffinity(0)})


def use_threads(count=None):
    """Products run on `count` threads; by default on as many as there are physical cores."""
    if count := count or physical_cores():
        torch.set_num_threads(count)


def as_array(tensor):
    """A tensor on the CPU as the kernels take it: 16-bit floats as the integers of their bits, None as nothing."""
    if tensor is None:
        return np.empty(0, np.float32)
    kind = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}.get(tensor.dtype, tensor.dtype)
    return tensor.detach().contiguous().view(kind).numpy()


# ---------------------------------------------------------------------------------------------------
# Model. Attribute names are the checkpoint's.

@dataclass(frozen=True)
class GPT2Config:
    """The fields of a GPT-2 config.json that change a number. Defaults are GPT-2 small's."""

    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    n_inner: int | None = None
    n_positions: int = 1024
    vocab_size: int = 50257
    layer_norm_epsilon: float = 1e-5
    activation_function: str = "gelu_new"
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    reorder_and_upcast_attn: bool = False  # scores in float32: here they always are
    tie_word_embeddings: bool = True
    eos_token_id: int | None = 50256

    @property
    def head_dim(self):
        return self.n_embd // self.n_head


# GPT-2 was trained with the tanh form of GELU, which its configs call gelu_new.
ACTIVATIONS = {"gelu_new": functools.partial(F.gelu, approximate="tanh"), "gelu": F.gelu, "relu": F.relu}


@functools.cache
def onednn_multiplies(dtype):
    """Whether this build and processor have oneDNN's linear for `dtype`; tried once, on a small product."""
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        torch.ops.mkldnn._linear_pointwise(torch.ones(1, 8, dtype=dtype), torch.ones(8, 8, dtype=dtype), None,
                                           "none", [], "")
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return True


def takes(x, rows):
    """Whether our kernels are the ones for so many rows of activations x."""
    return (x.is_cpu and x.dtype == torch.float32 and cpu_kernels() is not None
            and (rows <= MANY_ROWS or "avx2" in processor_features()))


class Linear(nn.Module):
    """A projection: x (..., in) times weight (out, in) transposed, plus bias (out) or nothing: (..., out).

    weight is float32, 16 bits or int8; int8 rows are multiplied by scale (out), see `quantize`. On a CPU our kernel
    multiplies, and gives float32; where it can't, oneDNN does, which is faster than the BLAS behind F.linear, and
    gives the dtype that it multiplies in.
    """

    def __init__(self, n_in, n_out, bias=True):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_out, n_in), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(n_out), requires_grad=False) if bias else None
        self.scale = None

    @functools.cached_property
    def arrays(self):
        """weight, scale, bias and an array of the dtype of activations, as the kernels take them."""
        n_out = self.weight.shape[0]
        scale = np.ones(n_out, np.float32) if self.scale is None else as_array(self.scale)
        bias = np.zeros(n_out, np.float32) if self.bias is None else as_array(self.bias.float())
        return as_array(self.weight), scale, bias, activations_like(self.weight)

    def forward(self, x):
        (n_out, n_in), lead = self.weight.shape, x.shape[:-1]
        rows = x.numel() // n_in
        if takes(x, rows):
            out = torch.empty(rows, n_out)
            cpu_kernels().project(x.reshape(rows, n_in).contiguous(), self.arrays, out, False, False)
            return out.view(*lead, n_out)
        weight = self.wide()
        x, bias = x.to(weight.dtype), self.bias if self.bias is None else self.bias.to(weight.dtype)
        if x.is_cpu and onednn_multiplies(weight.dtype):
            return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return F.linear(x, weight, bias)

    def wide(self):
        """The weight in a dtype that torch multiplies. int8 becomes 16 bits where the processor multiplies them
        fast: they hold 8 exactly, and the products of a batch take half the time."""
        if self.scale is None:
            return self.weight
        fast = torch.ops.mkldnn._is_mkldnn_bf16_supported() and onednn_multiplies(torch.bfloat16)
        return (self.weight * self.scale[:, None]).to(torch.bfloat16 if fast else torch.float32)

    def quantize(self):
        """float32 to int8, symmetric, a scale for each output channel: an error of at most 1/254 of its largest."""
        self.scale = self.weight.abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny) / 127
        rounded = room(self.weight.shape, torch.int8, "cpu").copy_((self.weight / self.scale[:, None]).round())
        self.weight = nn.Parameter(rounded, requires_grad=False)


class Attention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.layer, self.n_head = layer, config.n_head
        self.c_attn = Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = Linear(config.n_embd, config.n_embd)
        self.scale = config.head_dim ** -0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            self.scale /= layer + 1

    def forward(self, x, kv):
        return self.c_proj(self.attend(self.c_attn(x), kv))

    def attend(self, qkv, kv):
        """What c_attn made (B, T, 3C) -> what c_proj is given (B, T, C)."""
        B, T, C = *qkv.shape[:2], qkv.shape[2] // 3
        q, k, v = qkv.view(B, T, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)   # 3 x (B, H, T, D)
        out = kv.attend(self.layer, q, k, v, self.scale)             # (B, H, T, D)
        return out.transpose(1, 2).reshape(B, T, C)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        inner = config.n_inner or 4 * config.n_embd
        self.c_fc = Linear(config.n_embd, inner)
        self.c_proj = Linear(inner, config.n_embd)
        self.act = ACTIVATIONS[config.activation_function]

    def forward(self, x):
        return self.c_proj(self.act(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = Attention(config, layer)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = MLP(config)

    def forward(self, x, kv):
        """x (B, T, C), which may be written over -> what follows it (B, T, C)."""
        if takes(x, x.shape[0] * x.shape[1]) and self.arrays:
            return self.forward_fused(x.contiguous(), kv)
        x = x + self.attn(self.ln_1(x), kv)
        return x + self.mlp(self.ln_2(x))

    def forward_fused(self, x, kv):
        """The same through our kernels: one call where they reach keys and values, else one before and one behind."""
        (B, T, C), (begin, layer, scale, end, inner) = x.shape, self.arrays
        rows = x.view(B * T, C)
        if kv.pages:
            room = kv.cache.workspace(B * T * (5 * C + inner))
            cpu_kernels().block(rows, *begin, kv.pages, layer, scale, *end, room)
        else:
            y, qkv, h = torch.empty(B * T, C), torch.empty(B, T, 3 * C), torch.empty(B * T, inner)
            cpu_kernels().begin(rows, *begin, y, qkv.view(B * T, 3 * C))
            cpu_kernels().end(rows, self.attn.attend(qkv, kv).view(B * T, C), *end, y, h)
        return x

    @functools.cached_property
    def arrays(self):
        """What the kernels take of this block: (ln_1, c_attn), layer, scale, (c_proj, ln_2, c_fc, c_proj), and the
        width of the hidden layer. None where they don't know its activation function. Kept, since to look a
        module's parts up takes as long as a product with a few rows."""
        attn, mlp = self.attn, self.mlp
        if mlp.act is not ACTIVATIONS["gelu_new"]:
            return None
        norms = [(as_array(norm.weight.float()), as_array(norm.bias.float()), np.float32(norm.eps))
                 for norm in (self.ln_1, self.ln_2)]
        return ((norms[0], attn.c_attn.arrays), attn.layer, np.float32(attn.scale),
                (attn.c_proj.arrays, norms[1], mlp.c_fc.arrays, mlp.c_proj.arrays), len(mlp.c_fc.weight))


class GPT2(nn.Module):
    """GPT-2 that stores nothing: each step recomputes every key and value. The oracle of all others.

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
    """

    name = ""  # what was loaded, once it was
    block = Block

    def __init__(self, config):
        super().__init__()
        self.config = config
        # from_pretrained, since nn.Embedding would draw random values: no use here, and on `meta` a second's work.
        self.wte = nn.Embedding.from_pretrained(torch.empty(config.vocab_size, config.n_embd))
        self.wpe = nn.Embedding.from_pretrained(torch.empty(config.n_positions, config.n_embd))
        self.h = nn.ModuleList(self.block(config, layer) for layer in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.lm_head = Linear(config.n_embd, config.vocab_size, bias=False)  # the loader ties it to wte

    def new_kv(self):
        """An empty place for keys and values, to be handed to `forward` step after step."""
        return Recompute()

    def quantize(self):
        """All matrices to int8 (weights only), the head with its tied embedding included."""
        tied = self.lm_head.weight is self.wte.weight
        for linear in self.linears():
            linear.quantize()
        if tied:
            self.wte.weight = self.lm_head.weight
        forget_arrays(self)

    def _apply(self, *args, **kwargs):
        """What .to() and its like go through."""
        super()._apply(*args, **kwargs)
        forget_arrays(self)
        return self

    def linears(self):
        return [module for module in self.modules() if isinstance(module, Linear)]

    def embed(self, ids, position):
        """(B, T, C) of both (B, T). The stream of activations is float32 on a CPU, whatever the weights are."""
        weight = self.wte.weight
        token, place = F.embedding(ids, weight), F.embedding(position, self.wpe.weight)
        if token.is_cpu:
            token, place = token.float(), place.float()
        if weight.dtype == torch.int8:
            token *= self.lm_head.scale[ids][..., None]
        return token + place

    @torch.no_grad()
    def forward(self, ids, kv=None, keep=slice(None)):
        """ids (B, T) int64 -> logits (B, T, V) float32 of the new tokens.

        kv: what `new_kv` made; the new tokens stand after what it stores, and are stored. None stores nothing.
        keep: a slice or index over T: the positions whose logits are wanted (the head is 31 % of GPT-2's bytes).
        Raises UserError, before anything runs or is stored, for ids outside the vocabulary, for a position
        beyond the context, and (OutOfPages) where the pool is too small.
        """
        check_ids(ids, self.config.vocab_size)
        kv = Recompute() if kv is None else kv
        position = kv.reserve(*ids.shape, self.config.n_positions).to(ids.device)      # (B, T)
        x = self.embed(ids, position)                                                  # (B, T, C)
        for block in self.h:
            x = block(x, kv)
        kv.advance()
        return self.head(x[:, keep])

    def head(self, x):
        """The logits (B, T, V) float32 of what left the last block (B, T, C)."""
        return self.lm_head(self.ln_f(x)).float()


def forget_arrays(model):
    """The kernels' views of the weights are kept. Whoever puts other weights in their place calls this."""
    for module in model.modules():
        vars(module).pop("arrays", None)


def check_ids(ids, vocab_size):
    """ids must be whole numbers (B, T) of the vocabulary, at least one. Their values are looked at on the CPU only."""
    if ids.ndim != 2 or ids.numel() == 0 or ids.is_floating_point():
        raise UserError(f"ids must be whole numbers (B, T), at least 1, not {tuple(ids.shape)} of {ids.dtype}")
    low, high = map(int, torch.aminmax(ids)) if ids.is_cpu else (0, 0)
    if not 0 <= low <= high < vocab_size:
        raise UserError(f"token ids must be from 0 to {vocab_size - 1}, not from {low} to {high}")


QUERY_BLOCK = 128


def query_blocks(T):
    """Long prompts are attended block by block, each only over the keys that it may see: half the work of
    a square of scores, and small enough for the processor's cache."""
    return [(at, min(at + QUERY_BLOCK, T)) for at in range(0, T, QUERY_BLOCK)]


def attention(q, k, v, scale):
    """Attention with every score written out: q (B, H, T, D), k and v (B, H, S, D) -> (B, H, T, D).

    The T queries are the last of the S positions: key j is visible to query t when j <= S - T + t.
    """
    T, S = q.shape[-2], k.shape[-2]
    if T > QUERY_BLOCK:
        return torch.cat([attention(q[:, :, at:end], k[:, :, :S - T + end], v[:, :, :S - T + end], scale)
                          for at, end in query_blocks(T)], dim=2)
    dtype = q.dtype
    q, k, v = q.float(), k.float(), v.float()                        # in float16 a score may exceed the largest number
    scores = (q * scale) @ k.transpose(-2, -1)                                         # (B, H, T, S)
    if T > 1:  # a single query is the last position and sees every key
        hidden = torch.ones(T, S, dtype=torch.bool, device=q.device).triu(S - T + 1)
        scores.masked_fill_(hidden, -math.inf)
    return (torch.softmax(scores, dim=-1) @ v).to(dtype)


def check_positions(last, limit):
    """Position `last` must be one of the `limit` that the model has an embedding for."""
    if last >= limit:
        raise UserError(f"position {last} is beyond the model's context of {limit} positions (0 to {limit - 1})")


class Recompute:
    """Nowhere: keys and values are used once and forgotten, so every step is given all tokens again."""

    length, pages = 0, None  # pages: keys and values as the kernels reach them; see `_attend`

    def reserve(self, B, T, limit):
        """Make room for T more tokens a row; raises UserError beyond `limit`. -> positions (B, T)."""
        check_positions(T - 1, limit)
        return torch.arange(T).expand(B, T)

    def attend(self, layer, q, k, v, scale):
        """Store k and v and attend to all that is stored, for one layer; all (B, H, T, D)."""
        return attention(q, k, v, scale)

    def advance(self):
        """The new tokens have passed all layers: count them as stored."""

    def truncate(self, length):
        """Forget the tokens after the first `length`."""

    def release(self):
        """Give back what was stored."""


class GrowingKV:
    """One tensor a layer for keys and one for values, made anew a little longer at each step."""

    pages = None

    def __init__(self, n_layers):
        self.layers = [None] * n_layers                              # each (k, v), both (B, H, S, D)
        self.length = self.new = 0

    def reserve(self, B, T, limit):
        check_positions(self.length + T - 1, limit)
        if self.length and self.layers[0][0].shape[0] != B:
            raise UserError(f"{B} rows were given, but {self.layers[0][0].shape[0]} are stored")
        self.new = T
        return torch.arange(self.length, self.length + T).expand(B, T)

    def attend(self, layer, q, k, v, scale):
        if self.length:
            stored_k, stored_v = self.layers[layer]
            k = torch.cat([stored_k[:, :, :self.length], k], dim=2)
            v = torch.cat([stored_v[:, :, :self.length], v], dim=2)
        self.layers[layer] = k, v
        return attention(q, k, v, scale)

    def advance(self):
        self.length += self.new

    def truncate(self, length):
        self.length = min(self.length, length)

    def release(self):
        self.layers, self.length = [None] * len(self.layers), 0


class GPT2Cached(GPT2):
    """GPT-2 with a KV-cache: a step computes the new tokens only, and copies the cache to lengthen it."""

    def new_kv(self):
        return GrowingKV(self.config.n_layer)


class PagedKVCache:
    """One pool of fixed-size pages for the keys and values of all sequences.

    A page id stands for page_size consecutive tokens of one sequence, in every layer. Memory is taken once:
    2 * n_layers * n_heads * max_pages * page_size * head_dim numbers. Source: Kwon et al. 2023,
    "Efficient Memory Management for Large Language Model Serving with PagedAttention".
    """

    def __init__(self, n_layers, n_heads, head_dim, page_size=16, max_pages=256, dtype=torch.float32, device="cpu"):
        check_number("page_size", page_size, Integral, 1)
        check_number("max_pages", max_pages, Integral, 1)
        self.page_size, self.max_pages = page_size, max_pages
        self.lock = threading.RLock()                                # around page counts, and around `scratch`
        # Head before slot: the slots of neighbouring pages are one (H, S, D) view, each head's keys in one piece.
        shape = (n_layers, n_heads, max_pages * page_size, head_dim)
        try:
            self.k, self.v = (torch.empty(shape, dtype=dtype, device=device) for _ in "kv")
        except RuntimeError as err:
            raise UserError(f"{max_pages} pages of {page_size} tokens find no memory: {first_line(err)}") from None
        self.is_free = np.ones(max_pages, dtype=bool)
        self.references = np.zeros(max_pages, dtype=np.int64)        # how many page tables hold the page
        # The prefix cache: full pages by what they hold. A key is (number of the page before it, its tokens),
        # so a page is found only behind the very tokens it was computed after, compared one by one.
        self.known = {}                                              # key -> (page, number)
        self.key_of = {}                                             # page -> key
        self.unused = {}                                             # known pages that no table holds, oldest first
        self.numbers = itertools.count(1)                            # never used twice: an evicted page's is no parent
        self.has_kernel = self.k.is_cpu and cpu_kernels() is not None
        self.room = np.empty(0, np.float32)
        self.hidden = torch.ones(QUERY_BLOCK, QUERY_BLOCK, dtype=torch.bool, device=device).triu(1)
        # Scores of one query over the whole pool; more queries grow it once, so a decode step allocates nothing.
        self.scratch = torch.empty(n_heads * shape[2], dtype=torch.float32 if self.k.is_cpu else dtype, device=device)

    @functools.cached_property
    def arrays(self):
        """Keys and values as the kernels take them."""
        return as_array(self.k), as_array(self.v)

    def workspace(self, size):
        """Memory for `size` numbers between a block's operators, kept: taken anew, it would be zeroed page by page."""
        room = self.room  # another thread may replace it
        if room.size < size:
            self.room = room = _aligned(1, size, np.empty(0, np.float32))[0]
        return room

    @property
    def free_pages(self):
        """Pages that hold nothing."""
        return int(np.count_nonzero(self.is_free))

    @property
    def cached_pages(self):
        """Pages that no sequence holds, kept since a prompt may begin with them; taken when they are needed."""
        return len(self.unused)

    @property
    def used_pages(self):
        return self.max_pages - self.free_pages - self.cached_pages

    def check_free(self, count):
        """Raises OutOfPages where fewer than `count` pages can be had."""
        if count > self.free_pages + self.cached_pages:
            raise OutOfPages(f"{count} pages of {self.page_size} tokens are needed, "
                             f"{self.free_pages + self.cached_pages} of {self.max_pages} are free")

    def allocate(self, count, after=None):
        """Take `count` pages -> their ids, continuing behind page `after` where that is free.

        Long runs of neighbouring pages are read as one view, so a new run starts in the middle of the
        longest free stretch: whoever writes just before it keeps room to grow. Raises OutOfPages.
        """
        self.check_free(count)
        for page in list(itertools.islice(self.unused, max(0, count - self.free_pages))):  # least recently used
            self._forget(page)
        pages = []
        for _ in range(count):
            page = self.max_pages if after is None else after + 1
            if page >= self.max_pages or not self.is_free[page]:
                page = self._start_of_run(count - len(pages))
            self.is_free[page], self.references[page] = False, 1
            pages.append(page)
            after = page
        return pages

    def _forget(self, page):
        del self.known[self.key_of.pop(page)], self.unused[page]
        self.is_free[page] = True

    def _start_of_run(self, count):
        free = np.concatenate(([False], self.is_free, [False]))
        edges = np.flatnonzero(free[1:] != free[:-1])                # starts and ends in turn
        starts, ends = edges[::2], edges[1::2]
        widest = int((ends - starts).argmax())
        start, end = int(starts[widest]), int(ends[widest])
        return start if start == 0 else max(start, min((start + end) // 2, end - count))

    def hold(self, page):
        """One more table holds a page that is stored already."""
        self.references[page] += 1
        self.unused.pop(page, None)

    def free(self, pages):
        """One table gives its pages back. The last of them are forgotten first: a prefix outlives what follows it."""
        for page in reversed(pages):
            self.references[page] -= 1
            if self.references[page] == 0:
                if page in self.key_of:
                    self.unused[page] = None
                else:
                    self.is_free[page] = True

    def runs(self, pages, length):
        """The slots of the first `length` tokens, as (first slot, count) of each contiguous piece."""
        runs = []
        for at in range(0, length, self.page_size):
            slot, count = pages[at // self.page_size] * self.page_size, min(self.page_size, length - at)
            if runs and sum(runs[-1]) == slot:
                runs[-1] = runs[-1][0], runs[-1][1] + count
            else:
                runs.append((slot, count))
        return runs

    def write(self, layer, slots, k, v):
        """Store k and v (H, N, D) of one layer in N slots: a (first, count) run, or an index (N)."""
        for pool, new in (self.k[layer], k), (self.v[layer], v):
            if isinstance(slots, tuple):
                pool[:, slots[0]:sum(slots)] = new
            else:
                pool.index_copy_(1, slots, new)

    def attend(self, layer, q, runs, scale):
        """q (H, T, D), the last T of the tokens in `runs` -> (H, T, D). Keys are read where they lie."""
        k, v = self.k[layer], self.v[layer]                                            # (H, slots, D)
        (H, T, _), S = q.shape, sum(count for _, count in runs)
        if T > QUERY_BLOCK:
            return torch.cat([self.attend(layer, q[:, at:end], clip_runs(runs, S - T + end), scale)
                              for at, end in query_blocks(T)], dim=1)
        with self.lock:
            scores = self._scores(H, T, S)
            parts = scores.split([count for _, count in runs], dim=-1)
            for part, (first, count) in zip(parts, runs):
                keys = k[:, first:first + count].to(q.dtype).transpose(1, 2)
                torch.baddbmm(part, q, keys, beta=0, alpha=scale, out=part)
            if T > 1:
                scores[..., S - T:].masked_fill_(self.hidden[:T, :T], -math.inf)
            torch.softmax(scores, dim=-1, out=scores)
            out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
            for part, (first, count) in zip(parts, runs):
                out.baddbmm_(part, v[:, first:first + count].to(q.dtype))
            return out

    def _scores(self, H, T, S):
        if self.scratch.numel() < H * T * S:
            self.scratch = self.scratch.new_empty(H * T * S)
        return self.scratch[:H * T * S].view(H, T, S)


def clip_runs(runs, length):
    """The runs of the first `length` tokens."""
    ends = itertools.accumulate(count for _, count in runs)
    return [(first, min(count, count + length - end))
            for (first, count), end in zip(runs, ends) if end - count < length]


class PageTable:
    """The pages of one sequence, in order, and how many of its tokens are stored in them.

    The table owns its pages: a table that is dropped gives them back, as any object does with its memory.
    """

    def __init__(self, cache):
        self.cache, self.pages, self.length = cache, [], 0
        self.parent = self.known_pages = 0                           # how far the prefix cache knows this sequence

    def missing(self, count):
        """How many more pages `count` more tokens need."""
        return max(0, -(-(self.length + count) // self.cache.page_size) - len(self.pages))

    def grow(self, count):
        """Take the pages that `count` more tokens need. Raises OutOfPages and takes none."""
        if more := self.missing(count):
            with self.cache.lock:
                self.pages += self.cache.allocate(more, after=self.pages[-1] if self.pages else None)

    def share(self, pages):
        """Begin with full pages that another table holds or held."""
        with self.cache.lock:
            for page in pages:
                self.cache.hold(page)
        self.pages, self.length = list(pages), len(pages) * self.cache.page_size

    def match(self, ids):
        """Begin with the longest run of known full pages that hold the first of `ids`."""
        found, self.parent, size = [], 0, self.cache.page_size
        with self.cache.lock:
            for at in range(0, len(ids) - size + 1, size):
                page, number = self.cache.known.get((self.parent, tuple(ids[at:at + size])), (None, None))
                if page is None:
                    break
                found.append(page)
                self.parent = number
            self.known_pages = len(found)
            self.share(found)

    def remember(self, ids):
        """Make full pages known, so that others who begin with the same ids find them. ids: those of this sequence
        that are known; the last token stored may not be."""
        cache, size = self.cache, self.cache.page_size
        with cache.lock:
            for n in range(self.known_pages, min(self.length, len(ids)) // size):
                key = self.parent, tuple(ids[n * size:(n + 1) * size])
                if key not in cache.known and self.pages[n] not in cache.key_of:
                    cache.known[key] = self.pages[n], next(cache.numbers)
                    cache.key_of[self.pages[n]] = key
                if key not in cache.known:  # the page is known behind a page since forgotten; so is what follows it
                    break
                self.parent, self.known_pages = cache.known[key][1], n + 1

    def truncate(self, length):
        """Forget the tokens after the first `length`; their pages stay, for what comes instead."""
        self.length = min(self.length, length)

    def release(self):
        with self.cache.lock:
            self.cache.free(self.pages)
        self.pages, self.length, self.parent, self.known_pages = [], 0, 0, 0

    __del__ = release


class PagedKV:
    """Some sequences of a pool, as one forward pass sees them: a row each, of any length.

    tables: a PageTable a row; None makes new ones at the first step.
    counts: how many new tokens each row brings, where they differ; then ids are (1, N), the rows end to end.
    """

    def __init__(self, cache, tables=None, counts=None):
        self.cache, self.tables, self.counts, self.use_kernel = cache, tables, counts, cache.has_kernel
        self.pages = None                                            # as the kernels reach them; see `_attend`

    @property
    def length(self):
        return max((table.length for table in self.tables or ()), default=0)

    def reserve(self, B, T, limit):
        """All rows get the pages they need, or OutOfPages is raised and none does."""
        tables, counts = self.tables, self.counts or [T] * B
        if tables is None:
            tables = [PageTable(self.cache) for _ in counts]
        if sum(counts) != B * T or len(counts) != len(tables):
            raise UserError(f"{B * T} tokens in {len(counts)} rows were given, {len(tables)} rows are stored")
        for table, count in zip(tables, counts):
            check_positions(table.length + count - 1, limit)
        with self.cache.lock:
            self.cache.check_free(sum(table.missing(count) for table, count in zip(tables, counts)))
            for table, count in zip(tables, counts):
                table.grow(count)
        self.tables, self.new = tables, counts
        return self._plan().view(B, T)

    def _plan(self):
        """Once a step, for all layers: where the new tokens go and what each row reads. -> positions (N)."""
        size, device = self.cache.page_size, self.cache.k.device
        lengths = [table.length for table in self.tables]
        positions = torch.from_numpy(np.concatenate([np.arange(length, length + count)
                                                     for length, count in zip(lengths, self.new)]))
        if self.use_kernel:
            tables = np.zeros((len(self.tables), max(len(table.pages) for table in self.tables)), np.int64)
            for row, table in enumerate(self.tables):
                tables[row, :len(table.pages)] = table.pages
            rows, at = np.repeat(np.arange(len(self.new)), self.new), positions.numpy()
            slots = tables[rows, at // size] * size + at % size
            self.pages = *self.cache.arrays, slots, tables, np.array(lengths), np.array(self.new), size
            return positions
        self.reads = [self.cache.runs(table.pages, table.length + count) for table, count in zip(self.tables, self.new)]
        first, count = self.reads[0][-1]
        if len(self.tables) == 1 and self.new[0] <= count:  # one piece: written as a slice
            self.writes = first + count - self.new[0], self.new[0]
        else:
            self.writes = torch.cat([torch.tensor(table.pages)[at // size] * size + at % size
                                     for table, at in zip(self.tables, positions.split(self.new))]).to(device)
        return positions

    def attend(self, layer, q, k, v, scale):
        B, H, T, D = q.shape
        cache, dtype = self.cache, q.dtype
        q, k, v = (x.transpose(1, 2).reshape(B * T, H, D) for x in (q, k, v))              # rows end to end
        out = torch.empty(q.shape, dtype=cache.scratch.dtype, device=q.device)
        if self.pages:
            cpu_kernels().attend(torch.stack([q, k, v], 1).float(), self.pages, layer, np.float32(scale), out)
        else:
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))                               # (H, N, D)
            cache.write(layer, self.writes, k.to(cache.k.dtype), v.to(cache.v.dtype))
            q = q.to(cache.scratch.dtype)
            for rows, row_q, runs in zip(out.split(self.new), q.split(self.new, dim=1), self.reads):
                rows.copy_(cache.attend(layer, row_q, runs, scale).transpose(0, 1))
        return out.view(B, T, H, D).transpose(1, 2).to(dtype)

    def advance(self):
        for table, count in zip(self.tables, self.new):
            table.length += count

    def truncate(self, length):
        for table in self.tables or ():
            table.truncate(length)

    def release(self):
        for table in self.tables or ():
            table.release()
        self.tables = None


class GPT2Paged(GPT2):
    """GPT-2 whose keys and values live in the fixed pages of one pool; nothing is ever copied to grow."""

    def __init__(self, config, page_size=16, max_pages=256):
        super().__init__(config)
        check_number("page_size", page_size, Integral, 1)
        check_number("max_pages", max_pages, Integral, 1)
        self.page_size, self.max_pages = page_size, max_pages

    @functools.cached_property
    def cache(self):
        """The pool, made at first use, where the weights are, and in their dtype: bfloat16 for int8, and float32 where
        torch is to attend on a CPU."""
        c, weight = self.config, self.wte.weight
        dtype = torch.bfloat16 if weight.dtype == torch.int8 else weight.dtype
        if weight.is_cpu and cpu_kernels() is None:
            dtype = torch.float32
        return PagedKVCache(c.n_layer, c.n_head, c.head_dim, self.page_size, self.max_pages, dtype, weight.device)

    def new_kv(self, tables=None, counts=None):
        """A place for new sequences, or for those of `tables`, which bring `counts` new tokens each; see PagedKV."""
        return PagedKV(self.cache, tables, counts)

    def new_runner(self, max_batch_size):
        """What runs a scheduler's steps on this model."""
        return Runner(self, max_batch_size)


# ---------------------------------------------------------------------------------------------------
# Models by name: the hub, a folder, the sample model, or random weights.

SHAPES = {
    "distilgpt2": dict(n_layer=6),
    "gpt2": dict(),
    "gpt2-medium": dict(n_layer=24, n_head=16, n_embd=1024),
    "gpt2-large": dict(n_layer=36, n_head=20, n_embd=1280),
    "gpt2-xl": dict(n_layer=48, n_head=25, n_embd=1600),
}
CONV1D = re.compile(r".*\.(c_attn|c_proj|c_fc)\.weight")       # stored (in, out) by GPT-2's Conv1D
BUFFERS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")      # the causal mask, which old checkpoints carry
FORMATS = ["model.safetensors", "model-*-of-*.safetensors", "pytorch_model.bin", "pytorch_model-*-of-*.bin"]
HUB_SECONDS = 4  # how long the hub may take to answer before it counts as out of reach


def load_model(name="auto", variant=GPT2Paged, dtype=torch.float32, device="cpu", stand_in="tiny", **options):
    """A model of class `variant`, ready to run; its `name` attribute says what was loaded.

    name: a Hugging Face name (gpt2, gpt2-medium, gpt2-large, gpt2-xl, distilgpt2, owner/name), a folder with
    config.json and weights, `tiny` (assets/tiny), `random` or `random:NAME` (random weights in that shape), or
    `auto`: gpt2, and where neither cache nor hub has it within seconds, `stand_in`, said in one line on stderr.
    dtype: a torch dtype or its name; the matrices are converted to it (on a CPU the rest stays float32), to int8 by
    `quantize`. options go to the class. Raises UserError.
    """
    try:
        kinds = CPU_DTYPES if torch.empty(0, device=device).is_cpu else DTYPES
    except (RuntimeError, AssertionError) as err:
        raise UserError(f"device {device!r} can't be used: {first_line(err)}") from None
    name, dtype = str(name), kinds.get(str(dtype).removeprefix("torch."))
    if dtype is None:
        raise UserError(f"dtype must be one of {', '.join(kinds)}")
    quantized, dtype = dtype == torch.int8, torch.float32 if dtype == torch.int8 else dtype
    if name == "auto":
        name = gpt2_or(stand_in)
    kind, _, shape = name.partition(":")
    if kind == "random":
        if shape not in SHAPES and shape:
            raise UserError(f"random:{shape} is not a shape; there are {', '.join(SHAPES)}")
        config = GPT2Config(**SHAPES[shape or "gpt2"])
    else:
        folder = model_folder(name)
        config = read_config(folder)
    model = empty_model(variant, config, name, options)
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    if kind == "random":
        with_weights(model, random_weights(shapes, dtype, device))
    else:
        with_weights(model, read_weights(folder, shapes, config.tie_word_embeddings, dtype, device))
    if quantized:
        model.quantize()
    return model


def room(shape, dtype, device):
    """Memory for a weight. On a CPU biases and LayerNorms are float32, whatever dtype the matrices have, and the
    memory is numpy's, which asks Linux for huge pages: they are read 4 % faster."""
    if torch.device(device).type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    dtype = dtype if len(shape) > 1 else torch.float32
    raw = _aligned(1, math.prod(shape) * dtype.itemsize, np.empty(0, np.uint8))[0]
    return torch.from_numpy(raw).view(dtype).view(shape)


def empty_model(variant, config, name, options):
    """A model without memory or initial values: the tensors that are read become its parameters."""
    with torch.device("meta"):
        model = variant(config, **options).requires_grad_(False).eval()
    model.name = name
    return model


def with_weights(model, state):
    model.load_state_dict(state, assign=True)
    if state["lm_head.weight"] is state["wte.weight"]:
        model.lm_head.weight = model.wte.weight
    return model


def share_weights(model, variant, **options):
    """The same model as another class, on the same tensors in memory."""
    other = with_weights(empty_model(variant, model.config, model.name, options), model.state_dict(keep_vars=True))
    for ours, theirs in zip(other.linears(), model.linears()):
        ours.scale = theirs.scale
    return other


def gpt2_or(stand_in):
    """`gpt2` where it can be had within seconds, else the stand-in's name, and a line that says so."""
    try:
        hub_folder("gpt2")
    except UserError as err:
        print(f"{err}; {stand_in} stands in", file=sys.stderr)
        return stand_in
    return "gpt2"


def model_folder(name):
    """The folder that holds the model `name`: assets/tiny, the folder of that path, or the hub's cache."""
    if name == "tiny":
        return ASSETS / "tiny"
    with contextlib.suppress(OSError, RuntimeError):  # a name too long for a path; nobody's home
        folder = Path(name).expanduser()
        if name and folder.is_dir():
            return folder
    if not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name):
        raise UserError(f"there is no folder {shown(name)}, and it is not a Hugging Face name")
    return hub_folder(name)


def hub_folder(name):
    """The snapshot of a Hugging Face model in its local cache, downloaded there (with a progress bar) if missing."""
    from huggingface_hub import HfApi, constants

    if folder := snapshot(name, local=True):
        return folder
    if constants.HF_HUB_OFFLINE:
        raise UserError(f"{name} is not in the local cache, and HF_HUB_OFFLINE is set")
    if why := no_answer(lambda: HfApi().model_info(name, timeout=HUB_SECONDS)):
        raise UserError(f"{name} is not in the local cache, and the hub did not give it ({why})")
    if folder := snapshot(name, local=False):
        return folder
    raise UserError(f"{name} has no weights named {' or '.join(FORMATS)}")


def snapshot(name, local):
    """The folder of a hub model with its config and weights, safetensors before bin; None where it has no weights."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    for weights in (FORMATS[:2], FORMATS[2:]):
        patterns = ["config.json", *weights, *(pattern + ".index.json" for pattern in weights)]
        try:
            folder = Path(snapshot_download(name, allow_patterns=patterns, local_files_only=local))
        except Exception as err:  # the library and its transport have many kinds
            if local and isinstance(err, LocalEntryNotFoundError):
                return None
            raise UserError(f"{shown(name)} could not be had from the hub: {first_line(err)}") from None
        if any(found for pattern in weights for found in folder.glob(pattern)):
            return folder
    return None


def no_answer(call):
    """Why `call` failed, or did not return within HUB_SECONDS, in a few words; None where it went well.

    In a thread of its own, since a look-up of a host's name knows no time limit.
    """
    why = [f"no answer in {HUB_SECONDS} s"]

    def run():
        try:
            call()
            why[0] = None
        except Exception as err:
            why[0] = type(err).__name__

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(HUB_SECONDS)
    return why[0]


def read_config(folder):
    """config.json -> GPT2Config. Raises UserError for what is not GPT-2 or not implemented, by the field's name."""
    path = Path(folder, "config.json")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as err:
        raise UserError(f"{path} can't be read as JSON: {first_line(err)}") from None
    if not isinstance(raw, dict) or raw.get("model_type") != "gpt2":
        found = raw.get("model_type") if isinstance(raw, dict) else type(raw).__name__
        raise UserError(f"{path} is not a GPT-2 config: model_type must be 'gpt2', not {shown(found)}")
    for name in ("add_cross_attention", "pruned_heads", "quantization_config"):
        if raw.get(name):
            raise UserError(f"{path}: {name}={shown(raw[name])} is not supported")
    fields = {name: raw[name] for name in GPT2Config.__dataclass_fields__ if name in raw}
    for name, value in fields.items():
        check_config_field(f"{path}: {name}", name, value)
    config = GPT2Config(**fields)
    if config.n_embd % config.n_head:
        raise UserError(f"{path}: n_embd={config.n_embd} is not a multiple of n_head={config.n_head}")
    return config


SIZE_LIMITS = dict(n_layer=1000, n_head=1000, n_embd=2**16, n_inner=2**20, n_positions=2**20, vocab_size=2**24)


def check_config_field(label, name, value):
    """Raises UserError unless `value` is one that the engine implements for the config field `name`."""
    if name in SIZE_LIMITS:
        check_number(label, value, Integral, 1, SIZE_LIMITS[name], optional=name == "n_inner")
    elif name == "eos_token_id":
        check_number(label, value, Integral, 0, optional=True)
    elif name == "layer_norm_epsilon":
        check_number(label, value, Real, ABOVE_0, 1)
    elif name == "activation_function" and value not in list(ACTIVATIONS):
        raise UserError(f"{label} must be {', '.join(ACTIVATIONS)}, not {shown(value)}")
    elif name != "activation_function" and not isinstance(value, bool):
        raise UserError(f"{label} must be true or false, not {shown(value)}")


def weight_files(folder):
    """The files that hold a model's weights: safetensors before bin, the shards that an index names in turn."""
    for single in (FORMATS[0], FORMATS[2]):
        index = Path(folder, single + ".index.json")
        if Path(folder, single).is_file():
            return [Path(folder, single)]
        if index.is_file():
            try:
                names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
                return [Path(folder, Path(name).name) for name in sorted(names)]
            except (OSError, ValueError, LookupError, TypeError, AttributeError) as err:
                raise UserError(f"{index} is not an index of shards: {first_line(err)}") from None
    raise UserError(f"{folder} has no weights: no {FORMATS[0]} or {FORMATS[2]}, nor an index of shards")


def read_tensors(path):
    """Yields (name, tensor) of one weight file. The tensors lie in the mapped file: copy what is to stay.

    safetensors files are opened anew for each tensor, the largest first: closing one gives the memory of what
    was read back, so that loading never holds the weights twice.
    """
    try:
        if path.suffix == ".safetensors":
            from safetensors import safe_open

            with safe_open(path, "pt") as file:
                sizes = {name: math.prod(file.get_slice(name).get_shape()) for name in file.keys()}
            for name in sorted(sizes, key=lambda name: (sizes[name], name), reverse=True):
                with safe_open(path, "pt") as file:
                    yield name, file.get_tensor(name)
        else:
            yield from torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)).items()
    except Exception as err:  # each format has its own kinds; what can't be read is the file's fault
        raise UserError(f"{path} can't be read, is it complete? ({first_line(err)})") from None


def first_line(err):
    return (str(err).strip() or type(err).__name__).splitlines()[0][:200]


def shown(value):
    """A value as an error message shows it: one line, not too long."""
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."


def read_weights(folder, shapes, tied, dtype, device):
    """The tensors of a checkpoint as a state dict of `shapes`, converted; names with or without `transformer.`.

    Raises UserError, with the tensor's name, for one that is missing, left over, given twice or of another shape.
    """
    state = {}
    for path in weight_files(folder):
        for key, tensor in read_tensors(path):
            name = key.removeprefix("transformer.")
            if BUFFERS.fullmatch(name):
                continue
            if name not in shapes or name in state:
                what = "given twice" if name in state else "not part of this GPT-2"
                raise UserError(f"{path}: {shown(key)} is {what}")
            if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
                kind = getattr(tensor, "dtype", type(tensor).__name__)
                raise UserError(f"{path}: {key} must be a float tensor, not {kind}")
            conv1d = CONV1D.fullmatch(name)
            expected = shapes[name][::-1] if conv1d else shapes[name]
            if tuple(tensor.shape) != expected:
                raise UserError(f"{path}: {key} has shape {tuple(tensor.shape)}, the config asks for {expected}")
            if name == "lm_head.weight" and "wte.weight" in state and torch.equal(tensor.to(device, dtype),
                                                                                  state["wte.weight"]):
                continue  # written out although it is tied
            state[name] = room(shapes[name], dtype, device)
            state[name].copy_(tensor.t() if conv1d else tensor)
            if not state[name].sum(dtype=torch.float32).isfinite():
                raise UserError(f"{path}: {key} holds NaN or infinity as {dtype}")
    if tied and "wte.weight" in state:
        state.setdefault("lm_head.weight", state["wte.weight"])
    missing = [name for name in shapes if name not in state]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise UserError(f"{folder}: the weights lack {missing[0]}{more}")
    return state


def random_weights(shapes, dtype, device):
    """Weights as GPT-2 starts its training, always the same ones."""
    generator = torch.Generator().manual_seed(0)
    state = {}
    for name, shape in shapes.items():
        if name.endswith("bias"):
            tensor = torch.zeros(shape)
        elif "ln_" in name:
            tensor = torch.ones(shape)
        elif name != "lm_head.weight":
            tensor = torch.empty(shape).normal_(0, 0.02, generator=generator)
        state[name] = state["wte.weight"] if name == "lm_head.weight" else room(shape, dtype, device).copy_(tensor)
    return state


# ---------------------------------------------------------------------------------------------------
# Tokenizer

@functools.cache
def load_tokenizer():
    """GPT-2's byte-pair encoding as a tiktoken.Encoding; nothing is downloaded.

    Use `encode_ordinary`: text from a user is plain text, `<|endoftext|>` in it is seven ordinary tokens.
    """
    import tiktoken

    lines = (ASSETS / "gpt2.tiktoken").read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}
    pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    return tiktoken.Encoding("gpt2", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 50256})


class TextStream:
    """Turns token ids into text as they come, and ends it before a stop string.

    Bytes are held until they make whole characters, and text while it might still become a stop string. The
    pieces put together depend on the ids alone. The match that is complete first ends the text; `stopped` says so.
    """

    def __init__(self, stop=(), min_tokens=0):
        self.stop, self.to_ignore, self.held, self.stopped = stop, min_tokens, "", False
        self.encoding, self.decoder = load_tokenizer(), codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token):
        """The text that one more token makes certain."""
        if token == self.encoding.eot_token:
            data = b""  # a mark, not text
        elif token < self.encoding.n_vocab:
            data = self.encoding.decode_single_token_bytes(token)
        else:
            data = "\ufffd".encode()  # a larger vocabulary than the tokenizer's
        self.to_ignore -= 1
        return self._certain(self.decoder.decode(data), self.stop if self.to_ignore <= 0 else ())

    def finish(self):
        """What was held back, when no more tokens come."""
        return "" if self.stopped else self._certain(self.decoder.decode(b"", final=True), self.stop, last=True)

    def _certain(self, text, stop, last=False):
        text = self.held + text
        matches = [(at + len(s), at) for s in stop if (at := text.find(s)) >= 0]
        if matches:
            self.stopped, self.held = True, ""
            return text[:min(matches)[1]]
        hold = 0
        if not last and stop:
            longest = min(len(text), max(map(len, stop)) - 1)
            hold = next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in stop)), 0)
        self.held = text[len(text) - hold:]
        return text[:len(text) - hold]


def stream_text(tokens, stop=(), min_tokens=0):
    """Yields the text of token ids as they come; see TextStream."""
    stream = TextStream(stop, min_tokens)
    for token in tokens:
        yield stream.feed(token)
        if stream.stopped:
            return
    yield stream.finish()


# ---------------------------------------------------------------------------------------------------
# Sampling. Order and meaning are vLLM's: bias and minimum length, penalties, temperature, min_p, top_k, top_p.

@dataclass(frozen=True)
class SamplingParams:
    """How one request chooses its tokens, and when it ends. Raises UserError with the name and range.

    temperature         0 is greedy; above, the logits are divided by it
    top_k               only the k most likely tokens; 0, -1 or more than the vocabulary is off
    top_p               only the most likely tokens that together reach this probability, in (0, 1]
    min_p               only tokens at least this fraction as likely as the most likely one, in [0, 1]
    repetition_penalty  above 0; for tokens of prompt and output, positive logits are divided, others multiplied
    presence_penalty    -2 to 2, taken once from the logit of each token in the output
    frequency_penalty   -2 to 2, taken as often as the token stands in the output
    logit_bias          {token id: -100 to 100}, added to those logits
    seed                the request's own random stream: the same seed gives the same text whatever else runs
    max_tokens          most tokens to generate; None is all that the context holds. min_tokens: no end before
    ignore_eos          the end-of-text token does not end the text
    stop                a string or several: the text ends before the first of them
    logprobs            0 to 20: log probabilities of the chosen token and of that many most likely ones
    prompt_logprobs     the same for each prompt token after the first; the prompt is then computed in full
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: str | tuple = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self):
        check_number("temperature", self.temperature, Real, 0)
        check_number("top_k", self.top_k, Integral, -1)
        check_number("top_p", self.top_p, Real, ABOVE_0, 1)
        check_number("min_p", self.min_p, Real, 0, 1)
        check_number("repetition_penalty", self.repetition_penalty, Real, ABOVE_0)
        check_number("presence_penalty", self.presence_penalty, Real, -2, 2)
        check_number("frequency_penalty", self.frequency_penalty, Real, -2, 2)
        check_number("seed", self.seed, Integral, -2**63, 2**63 - 1, optional=True)
        check_number("max_tokens", self.max_tokens, Integral, 0, optional=True)
        longest = math.inf if self.max_tokens is None else self.max_tokens
        check_number("min_tokens", self.min_tokens, Integral, 0, longest)
        for name in ("logprobs", "prompt_logprobs"):
            check_number(name, getattr(self, name), Integral, 0, 20, optional=True)
        if not isinstance(self.ignore_eos, bool):
            raise UserError(f"ignore_eos must be true or false, not {self.ignore_eos!r}")
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, tuple | list) or not all(isinstance(s, str) and s for s in stop):
            raise UserError(f"stop must be a string or strings of at least 1 character, not {self.stop!r}")
        object.__setattr__(self, "stop", tuple(stop))
        if not isinstance(self.logit_bias, dict | None):
            raise UserError(f"logit_bias must map token ids to numbers, not be {self.logit_bias!r}")
        for token, bias in (self.logit_bias or {}).items():
            check_number("logit_bias token id", token, Integral, 0)
            check_number(f"logit_bias of token {token}", bias, Real, -100, 100)

    @property
    def penalises(self):
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)

    @property
    def truncates(self):
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


ABOVE_0 = math.ulp(0.0)


def check_number(name, value, kind, low, high=math.inf, optional=False):
    """Raises UserError unless value is a finite number of that kind from low to high (or None where optional)."""
    if value is None and optional:
        return
    try:
        good = isinstance(value, kind) and not isinstance(value, bool) and low <= value <= high and math.isfinite(value)
    except OverflowError:  # a whole number beyond every float
        good = False
    if not good:
        what = "a whole number" if kind is Integral else "a finite number"
        bounds = ("above 0" if low == ABOVE_0 else f"from {low}") + ("" if high == math.inf else f" to {high}")
        raise UserError(f"{name} must be {what} {bounds}, not {shown(value)}")


class Request:
    """One prompt on its way to a text.

    output_queue        token ids as they come, then None (when a scheduler runs it)
    output_ids          all of them
    logprobs            a TokenLogprobs each, where asked for, and one of the end-of-text token that ended them
    prompt_logprobs     a TokenLogprobs for each prompt token after the first, where asked for, before any output
    finish_reason       "stop" (end of text, stop string), "length" (max_tokens, context), "abort", "error"; see `error`
    arrival_time, scheduled_time, token_times, finish_time     seconds of time.monotonic(); None until then
    cached_tokens       prompt tokens whose keys and values were found in the prefix cache
    id                  a name of the caller's choice
    leader              another request with the same prompt, whose prompt pages this one shares
    """

    def __init__(self, prompt_ids, params=None, leader=None):
        if not isinstance(params, SamplingParams | None) or not isinstance(prompt_ids, collections.abc.Iterable):
            raise UserError("a request is a list of token ids and SamplingParams, not "
                            f"{type(prompt_ids).__name__} and {type(params).__name__}")
        self.prompt_ids, self.params, self.leader = list(prompt_ids), params or SamplingParams(), leader
        self.output_ids, self.logprobs, self.finish_reason, self.error = [], [], None, None
        self.prompt_logprobs, self.id = [], None
        seed = secrets.randbits(63) if self.params.seed is None else int(self.params.seed)
        self.key = seed % 2**64
        self.text = TextStream(self.params.stop, self.params.min_tokens) if self.params.stop else None
        self.output_queue = queue.SimpleQueue()
        self.arrival_time = self.scheduled_time = self.finish_time = None
        self.token_times, self.cached_tokens, self.preemptions = [], 0, 0
        self.table = self.slot = None                                # its pages while it runs; where it ran last
        self.pending = 0                                             # tokens that are being computed, not known yet
        self.cancelled = False

    @classmethod
    def samples(cls, prompt_ids, params, n):
        """n requests for one prompt. Each has its own random stream: seed, seed + 1, ... The first scores the prompt
        (before the others begin; where they have nothing to do but that, each does)."""
        seeds = [None if params.seed is None else (params.seed + i + 2**63) % 2**64 - 2**63 for i in range(n)]
        first, others = cls(prompt_ids, replace(params, seed=seeds[0])), params
        if params.max_tokens != 0:
            others = replace(params, prompt_logprobs=None)
        return [first] + [cls(prompt_ids, replace(others, seed=seed), leader=first) for seed in seeds[1:]]

    @property
    def ids(self):
        return self.prompt_ids + self.output_ids

    @property
    def todo(self):
        """How many of its tokens are not stored yet, the pending ones counted in."""
        return len(self.prompt_ids) + len(self.output_ids) + self.pending - self.table.length

    def noise_key(self):
        """Two numbers of 32 bits that determine the next token's noise: a function of seed and output length alone."""
        bits = int(np.random.Philox(key=self.key, counter=len(self.output_ids)).random_raw())
        return [(bits & 0xFFFFFFFF) - 2**31, (bits >> 32) - 2**31]

    @property
    def unscored(self):
        """How many prompt tokens are still to be scored."""
        return 0 if self.params.prompt_logprobs is None else len(self.prompt_ids) - 1 - len(self.prompt_logprobs)

    def score(self, logits, stored):
        """Take log probabilities of prompt tokens from logits (n, V) at positions stored, stored + 1, ..."""
        known = len(self.prompt_logprobs)                            # more than are stored, after a preemption
        logits = logits[known - stored:]
        tokens = self.prompt_ids[known + 1:][:len(logits)]
        if not logits[:len(tokens)].isfinite().all():
            raise FloatingPointError("the logits hold NaN or infinity")
        self.prompt_logprobs += token_logprobs(logits, tokens, [self.params.prompt_logprobs] * len(tokens))

    def checks(self, guesses):
        """This request as it is, and as it will be after each guess: a row for `sample` each."""
        rows = [self]
        for n in range(1, len(guesses) + 1):
            rows.append(copy.copy(self))
            rows[-1].output_ids = self.output_ids + guesses[:n]
        return rows

    def accept(self, token, logprobs, config):
        """Take the next token. -> whether it is part of the output; sets finish_reason where it is the last."""
        self.logprobs += [logprobs] * (logprobs is not None)
        if token == config.eos_token_id and not self.params.ignore_eos:
            self.finish_reason = "stop"
            return False
        self.output_ids.append(token)
        if self.text:
            self.text.feed(token)
        if self.text and self.text.stopped:
            self.finish_reason = "stop"
        elif len(self.output_ids) >= output_limit(self, config):
            self.finish_reason = "length"
        return True


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log probabilities of the model itself: before bias, penalties, temperature and truncation."""

    token: int
    logprob: float
    top: dict  # token id -> logprob, the most likely first


def sample(logits, requests, eos_token_id=None):
    """The next token of each row: logits (B, V), a Request a row -> (ids, TokenLogprobs or None), lists of B.

    A row's result depends on its logits and its request alone, not on its neighbours.
    """
    params = [request.params for request in requests]
    logits = logits.float()
    chosen = process_logits(logits, requests, eos_token_id)                            # (B, V)
    largest, tokens = chosen.max(dim=-1)
    if not largest.isfinite().all():
        raise FloatingPointError("the logits hold NaN or infinity")
    if any(p.temperature for p in params):
        temperature = logits.new_tensor([[p.temperature] for p in params])
        # Of the largest logit only the excess over it counts: near temperature 0 all others become -inf, never NaN.
        probs = torch.softmax((chosen - largest[:, None]) / temperature.clamp(1e-30, 1e30), dim=-1)
        rows = [i for i, p in enumerate(params) if p.temperature and p.truncates]
        if rows:
            probs[rows] = truncate(probs[rows], tokens[rows], [params[i] for i in rows])
        tokens = torch.where(temperature[:, 0] == 0, tokens, draw(probs, [r.noise_key() for r in requests]))
    tokens = tokens.tolist()
    return tokens, token_logprobs(logits, tokens, [p.logprobs for p in params])


def process_logits(logits, requests, eos_token_id):
    """The logits after logit_bias, min_tokens and the penalties; a copy where anything changes."""
    V = logits.shape[-1]
    biased = [(i, token, bias) for i, r in enumerate(requests) for token, bias in (r.params.logit_bias or {}).items()]
    can_end = eos_token_id is not None and eos_token_id < V
    early = [i for i, r in enumerate(requests) if can_end and len(r.output_ids) < r.params.min_tokens]
    penalised = [(i, r) for i, r in enumerate(requests) if r.params.penalises]
    if not (biased or early or penalised):
        return logits
    logits = logits.clone(memory_format=torch.contiguous_format)
    if biased:  # at once: a request may bring hundreds
        rows, tokens, values = (torch.tensor(column, device=logits.device) for column in zip(*biased))
        logits[rows, tokens] += values.to(logits.dtype)
    for i in early:
        logits[i, eos_token_id] = -math.inf
    if penalised:
        flat = logits.view(-1)                                       # row i's token t is at i * V + t
        repetition, frequency, presence = logits.new_tensor(
            [[r.params.repetition_penalty, r.params.frequency_penalty, r.params.presence_penalty] for r in requests],
            dtype=torch.float64).T

        def seen(tokens_of):
            ids = [i * V + token for i, r in penalised for token in tokens_of(r)]
            at, count = torch.tensor(ids, dtype=torch.long, device=flat.device).unique(return_counts=True)
            return at, at // V, count

        at, row, _ = seen(lambda r: r.prompt_ids + r.output_ids)
        value, penalty = flat[at].double(), repetition[row]
        value = torch.where(value > 0, value / penalty, value * penalty)
        lowest = torch.finfo(torch.float32).min                      # finite: a row of -inf alone has no softmax
        flat[at] = value.clamp(min=lowest, max=-lowest).float()
        at, row, count = seen(lambda r: r.output_ids)
        flat[at] -= (frequency[row] * count + presence[row]).float()
    return logits


def truncate(probs, best, params, candidates=1024):
    """probs (B, V) with the tokens that min_p, top_k and top_p exclude set to 0. best (B): the most likely ones."""
    V = probs.shape[-1]
    candidates = min(candidates, V)
    top_k = probs.new_tensor([[p.top_k if 0 < p.top_k < V else V] for p in params])
    top_p = probs.new_tensor([[p.top_p if p.top_p < 1 else math.inf] for p in params], dtype=torch.float64)
    least = probs.new_tensor([[p.min_p] for p in params]) * probs.gather(1, best[:, None])
    if candidates < V:  # a sort of the whole vocabulary is slow and rarely needed
        top, ids = probs.topk(candidates)                                              # most likely first
    else:
        top, ids = probs.sort(dim=-1, descending=True, stable=True)
    # Where several are the most likely, topk names any of them first; it must be the one that greedy takes.
    ids = torch.where(ids == best[:, None], ids[:, :1], ids)
    ids[:, 0] = best
    kept = top.double() * ((torch.arange(candidates, device=probs.device) < top_k) & (top >= least))
    everything = torch.where(top_k <= candidates, kept.sum(-1, keepdim=True),
                             (probs * (probs >= least)).sum(-1, keepdim=True, dtype=torch.float64))
    kept *= kept.cumsum(-1) - kept < top_p * everything
    kept[:, 0] = top[:, 0]
    out = torch.zeros_like(probs).scatter_(1, ids, kept.to(probs.dtype))
    # A row that may keep more than the candidates is done again over all; which rows, each decides for itself.
    again = ((top_k > candidates) & ((kept[:, -1:] > 0) | (top_k < V))).nonzero()[:, 0]
    if len(again):
        out[again] = truncate(probs[again], best[again], [params[i] for i in again.tolist()], candidates=V)
    return out


def draw(probs, keys):
    """One token a row from probs (B, V), not normalised: each token's probability over its own exponential noise;
    the largest wins (the exponential race, Gumbel-max in other words). Rounding in the logits changes the winner
    only where two are all but equal, unlike a walk along the cumulative sum, which every token before it shifts.
    """
    return (probs / exponential_noise(keys, probs.shape[-1], probs.device)).argmax(dim=-1)


def exponential_noise(keys, V, device=None):
    """(B, V) float32, exponentially distributed: an integer hash of each token and its row's noise_key.

    The hash mixes as lowbias32 does (Wellons 2018), and takes the second half of the key on the way.
    """
    first, second = torch.tensor(keys, dtype=torch.int32, device=device)[:, :, None].unbind(1)
    x = torch.arange(V, dtype=torch.int32, device=device) * -1640531527 + first
    x ^= (x >> 16) & 0xFFFF
    x *= 0x7FEB352D
    x ^= ((x >> 15) & 0x1FFFF) ^ second
    x *= -2073254261
    x ^= (x >> 16) & 0xFFFF
    uniform = ((x & 0x7FFFFFFF).float() + 0.5) * 2**-31
    return -torch.log1p(-uniform.clamp(max=1 - 2**-24))


def chosen_and_top(logits, chosen, most):
    """Log probabilities of the tokens chosen (B, 1), and ids and log probabilities of the `most` most likely, where the
    vocabulary has as many; logits (B, V)."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    values, ids = logprobs.topk(min(most, logprobs.shape[1]))
    return logprobs.gather(1, chosen), ids, values


def token_logprobs(logits, tokens, counts):
    """A TokenLogprobs for each row of logits (B, V), with the `counts` most likely tokens; None where that is None."""
    found, rows = [None] * len(counts), [i for i, count in enumerate(counts) if count is not None]
    for some in (rows[at:at + 128] for at in range(0, len(rows), 128)):  # so many rows of the vocabulary at once
        chosen = torch.tensor([[tokens[i]] for i in some], device=logits.device)
        parts = chosen_and_top(logits[some], chosen, max(counts[i] for i in some))
        for i, (logprob,), ids, values in zip(some, *(part.tolist() for part in parts)):
            found[i] = TokenLogprobs(tokens[i], logprob, dict(zip(ids[:counts[i]], values)))
    return found


# ---------------------------------------------------------------------------------------------------
# Generation: one loop for every variant.

def generate(model, prompt, params=None, draft=None):
    """Yields token ids as they come; the generator's return value is the finish reason.

    prompt: token ids, or a Request, which is then filled in as it runs. draft: a Speculator, or a small model that
    guesses ahead (see Speculator). The end-of-text token ends the text with reason "stop" and is not yielded; a
    stop string ends it too, and the tokens that spell it are yielded.

    The context rule: a token needs a position when it is fed to the model, and the last one generated is never
    fed. So a prompt may have 1 to n_positions tokens, and prompt + output reach n_positions + 1 at most. A
    larger max_tokens is no error: the text ends there with reason "length", as it does at max_tokens.
    Raises UserError at once, before anything runs.
    """
    if isinstance(prompt, Request) and (params or prompt.output_ids or prompt.finish_reason):
        raise UserError("a Request carries its own params and runs once; make a new one")
    request = prompt if isinstance(prompt, Request) else Request(prompt, params)
    check_request(request, model.config)
    if draft is not None and not isinstance(draft, Speculator):
        draft = Speculator(draft)
    if draft:
        draft.check(model)
    return run_request(model, request, draft)


def check_request(request, config):
    """Raises UserError where the prompt or a parameter does not suit the model."""
    if not 1 <= len(request.prompt_ids) <= config.n_positions:
        raise UserError(f"the prompt has {len(request.prompt_ids)} tokens; "
                        f"it must have 1 to {config.n_positions}, the model's context")
    for token in request.prompt_ids:
        if type(token) is not int or not 0 <= token < config.vocab_size:  # what is plainly good is passed quickly
            check_number("a prompt token id", token, Integral, 0, config.vocab_size - 1)
    for token in request.params.logit_bias or {}:
        check_number("a logit_bias token id", token, Integral, 0, config.vocab_size - 1)


def output_limit(request, config):
    """How many tokens the request may generate: max_tokens, or what the context leaves."""
    room, most = config.n_positions + 1 - len(request.prompt_ids), request.params.max_tokens
    return room if most is None or most > room else most


def ended(request, config):
    """Whether nothing is left to do for the request: it has a finish reason, or gets one here since it asks nothing."""
    if not request.finish_reason and not request.unscored and output_limit(request, config) == 0:
        request.finish_reason = "length"
    return bool(request.finish_reason)


def run_request(model, request, draft=None):
    kv, device = model.new_kv(), model.wte.weight.device
    try:
        while not ended(request, model.config):
            guesses = draft.guess(request, model.config) if draft else []
            # Feed what is not stored yet: without a cache that is everything, with one the last token.
            ids = torch.tensor([request.ids[kv.length:] + guesses]).to(device)
            wanted = ids.shape[1] if request.unscored else 1 + len(guesses)
            logits = model(ids, kv, keep=slice(-wanted, None))[0]
            if request.unscored:
                request.score(logits, 0)
            if output_limit(request, model.config):
                sampled = sample(logits[-1 - len(guesses):], request.checks(guesses), model.config.eos_token_id)
                yield from take_tokens(request, *sampled, guesses, model.config, draft)
            kv.truncate(len(request.ids) - 1)
        return request.finish_reason
    finally:
        kv.release()
        if draft:
            draft.release()


def take_tokens(request, tokens, logprobs, guesses, config, draft=None):
    """Takes what was sampled after the last token and after each guess -> the ids that are output.

    Guesses are right as long as they are what is sampled; the first that is not is replaced, the rest forgotten.
    """
    made = []
    for n, token in enumerate(tokens):
        if request.accept(token, logprobs[n], config):
            made.append(token)
        if request.finish_reason or n == len(guesses) or token != guesses[n]:
            break
    if draft:
        draft.checked(request, guesses, n)
    return made


class Speculator:
    """Speculative decoding: a small model guesses the next tokens, the target checks them all in one pass.

    The target reads its weights once for all of them, so each right guess saves it a pass. Guess and check draw
    with the same random number, so the text is exactly the text without speculation, at any temperature, and
    its distribution the target's. `acceptance` is the share of guesses that were right. Serves one request at a
    time. Source: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding"; there the
    guess is accepted with probability min(1, p/q), which is right more often but makes another text.
    """

    def __init__(self, model, tokens=4):
        check_number("draft tokens", tokens, Integral, 1, 64)
        self.model, self.tokens, self.request, self.kv = model, tokens, None, model.new_kv()
        self.proposed = self.accepted = 0

    @property
    def acceptance(self):
        return self.accepted / max(1, self.proposed)

    def check(self, target):
        """Raises UserError unless the draft model has the target's vocabulary, and pages of its own."""
        if self.model is target:
            raise UserError("the draft model can't be the target itself; share_weights makes another of it")
        ours, theirs = self.model.config.vocab_size, target.config.vocab_size
        if ours != theirs:
            raise UserError(f"the draft model has a vocabulary of {ours} tokens, the target of {theirs}")

    def guess(self, request, config):
        """Up to `tokens` next tokens of the request, fewer where it would end before."""
        if request is not self.request:
            self.release()
            self.request, self.kv = request, self.model.new_kv()
        room = min(output_limit(request, config) - len(request.output_ids) - 1,
                   self.model.config.n_positions - len(request.ids))
        guesses, device = [], self.model.wte.weight.device
        for _ in range(min(self.tokens, room)):
            ids = torch.tensor([(request.ids + guesses)[self.kv.length:]]).to(device)
            try:
                logits = self.model(ids, self.kv, keep=slice(-1, None))[:, -1]
            except OutOfPages:  # of the draft's own: the target goes on without more guesses
                break
            guesses += sample(logits, request.checks(guesses)[-1:], config.eos_token_id)[0]
        return guesses

    def checked(self, request, guesses, right):
        """The target found the first `right` guesses right: forget what was stored after them."""
        self.proposed, self.accepted = self.proposed + len(guesses), self.accepted + right
        self.kv.truncate(len(request.ids) - 1)

    def release(self):
        """Give back what is stored for the request served last."""
        self.kv.release()
        self.request = None


# ---------------------------------------------------------------------------------------------------
# Continuous batching: many requests, one forward pass a step.

SCORED_CHUNK = 512  # prompt tokens a step that are scored: each needs the logits of the whole vocabulary


class QueueFull(UserError):
    """Too many requests are waiting; this one was not taken, and may be sent again later."""


class Runner:
    """Runs the steps of a scheduler on a model: one forward pass for all rows, then sampling.

    ahead: how many steps may be launched before the results of the one before are asked for. Here none is; a runner on
    a GPU plans one step while another is computed. Pages of a request that has ended may then go to another while a
    step that writes them is on its way: a runner must compute its steps in the order in which they are launched.
    prefill_chunk: prompt tokens a step. 128 is measured: on 2 cores, 8 requests together reach 98 % of the speed
    of unlimited chunks at 128 tokens and 94 % at 64, and a step with a chunk of 128 lasts some 0.13 s.
    """

    ahead, prefill_chunk = 0, 128

    def __init__(self, model, max_batch_size):
        self.model = model

    def launch(self, rows, plain=True):
        """Start a step. rows: (request, number of its tokens that are fed, guesses after them, whether it is sampled).

        A prompt of which more is to come is not. plain: no row has guesses or a prompt to be scored. Returns a
        function that waits for the step and gives (request, guesses, sampled) for each row that is: sampled is
        (tokens, logprobs), None where no token was asked for, or the row's exception.
        """
        wanted = [self._wanted(*row) for row in rows]
        logits = self._forward(rows, wanted)
        results, ready = self._score(rows, logits, wanted)
        results += self._sample(ready)
        return lambda: results

    def _wanted(self, request, count, guesses, sampled):
        """How many of a row's last logits are needed: all of a prompt that is to be scored."""
        return count if request.unscored else (1 + len(guesses)) * sampled

    def _forward(self, rows, wanted):
        """One pass over the new tokens of all rows, end to end -> logits (sum of wanted, V)."""
        ids, keep = [], []
        for (request, count, guesses, _), last in zip(rows, wanted):
            stored = request.table.length
            ids += request.ids[stored:stored + count] + guesses
            keep += range(len(ids) - last, len(ids))
        kv = self.model.new_kv([r.table for r, *_ in rows], [count + len(guesses) for _, count, guesses, _ in rows])
        device = self.model.wte.weight.device
        return self.model(torch.tensor([ids]).to(device), kv, keep=torch.tensor(keep, dtype=torch.long).to(device))[0]

    def _score(self, rows, logits, wanted):
        """Log probabilities of prompts -> results without a token, and (request, guesses, logits) of rows to sample."""
        results, ready = [], []
        for (request, count, guesses, sampled), end, last in zip(rows, itertools.accumulate(wanted), wanted):
            if request.unscored:
                try:
                    request.score(logits[end - last:end], request.table.length - count)
                except Exception as err:
                    results.append((request, guesses, err))
                    continue
            if sampled and output_limit(request, self.model.config) == 0:
                results.append((request, guesses, None))
            elif sampled:
                ready.append((request, guesses, slice(end - 1 - len(guesses), end)))
        return results, [(request, guesses, logits[part]) for request, guesses, part in ready]

    def _sample(self, ready):
        """Samples all rows together -> their results."""
        if not ready:
            return []
        checks = [request.checks(guesses) for request, guesses, _ in ready]
        ends, eos = list(itertools.accumulate(map(len, checks))), self.model.config.eos_token_id
        try:
            tokens, logprobs = sample(torch.cat([part for _, _, part in ready]), list(itertools.chain(*checks)), eos)
            sampled = [(tokens[end - len(own):end], logprobs[end - len(own):end]) for own, end in zip(checks, ends)]
        except Exception:  # one of them is at fault: each alone, so that it fails alone
            sampled = [outcome(sample, logits, own, eos) for own, (_, _, logits) in zip(checks, ready)]
        return [(request, guesses, found) for (request, guesses, _), found in zip(ready, sampled)]


def outcome(function, *args):
    """What the function returns, or the exception that it raises."""
    try:
        return function(*args)
    except Exception as err:
        return err


class ContinuousBatchingScheduler:
    """Runs many requests at once over the pages of one model. `step` is the engine; the thread only calls it.

    Each step admits waiting requests to free slots (first come, first served, as pages allow), then runs ONE
    forward pass for all: one token of every decoding request, and a chunk of at most `prefill_chunk` prompt tokens,
    so that a long prompt never stalls the others. When pages run out the youngest request gives its up and is
    computed again later; nothing is emitted twice. A result does not depend on what else runs.
    Sources: Yu et al. 2022 (Orca), Kwon et al. 2023 (vLLM), Agrawal et al. 2024 (Sarathi, chunked prefill).

    model: a GPT2Paged or any model with its `cache`, `new_kv(tables, counts)` and `new_runner(max_batch_size)`.
    prefill_chunk: its runner's by default.
    prefix_cache: keep full pages and find them again for prompts that begin alike.
    draft: a Speculator, used while a single request is running.
    on_finish: called with each request that has ended, in the thread that ended it; it must be quick.
    """

    def __init__(self, model, max_batch_size=8, max_waiting=1024, prefill_chunk=None, prefix_cache=True, draft=None,
                 on_finish=None):
        check_number("max_batch_size", max_batch_size, Integral, 1)
        check_number("max_waiting", max_waiting, Integral, 1)
        check_number("prefill_chunk", prefill_chunk, Integral, 1, optional=True)
        if draft:
            draft.check(model)
        self.model, self.cache, self.draft, self.prefix_cache = model, model.cache, draft, prefix_cache
        self.runner, self.in_flight = model.new_runner(max_batch_size), collections.deque()
        self.max_waiting, self.prefill_chunk = max_waiting, prefill_chunk or self.runner.prefill_chunk
        self.on_finish = on_finish
        self.waiting, self.slots = collections.deque(), [None] * max_batch_size
        self.changed, self.thread, self.stopping = threading.Condition(), None, False
        self.lifecycle, self.stepping = threading.Lock(), threading.Lock()    # one start or stop, one step at a time
        self.counts = collections.Counter()                          # since the start; see `stats`

    # --- what clients call, from any thread

    def submit(self, *requests):
        """Queue requests, all or none. Raises QueueFull, or UserError for one that can never run."""
        for request in requests:
            check_request(request, self.model.config)
            self._check_fit(request)
        with self.changed:
            if len(set(requests)) < len(requests) or any(r.arrival_time is not None or r.finish_reason or r.output_ids
                                                         for r in requests):
                raise UserError("the request was submitted or run before; make a new one")
            if self.stopping:
                raise UserError("the scheduler was stopped and takes no more requests")
            if len(self.waiting) + len(requests) > self.max_waiting:
                raise QueueFull(f"{len(self.waiting)} requests are waiting; the queue holds {self.max_waiting}")
            for request in requests:
                request.arrival_time, request.number = time.monotonic(), self.counts["requests"]
                self.counts["requests"] += 1
                if request.cancelled or ended(request, self.model.config):
                    self._finish(request, "abort" if request.cancelled else request.finish_reason)
                else:
                    self.waiting.append(request)
            self.changed.notify_all()

    def _check_fit(self, request):
        tokens = len(request.prompt_ids) + max(0, output_limit(request, self.model.config) - 1)
        room = self.cache.max_pages * self.cache.page_size
        if tokens > room:
            raise UserError(f"prompt and output need room for {tokens} tokens; the pool has room for {room} "
                            f"({self.cache.max_pages} pages of {self.cache.page_size})")

    def cancel(self, request):
        """End a request with reason "abort" wherever it is; its pages are free after the step that is running."""
        with self.changed:
            request.cancelled = True
            if request in self.waiting:
                self.waiting.remove(request)
                self._finish(request, "abort")
            self.changed.notify_all()

    def start(self):
        """Run steps in a thread whenever there is work."""
        with self.lifecycle:
            if self.thread is None:
                self.stopping = False
                self.thread = threading.Thread(target=self._loop, name="scheduler", daemon=True)
                self.thread.start()

    def stop(self):
        """End the thread after the step that is running, and every open request with reason "abort"."""
        with self.lifecycle:
            with self.changed:
                self.stopping = True
                self.changed.notify_all()
            if self.thread:
                self.thread.join()
            self.thread = None
            with self.stepping, self.changed:
                for request in [*self.running, *self.waiting]:
                    self._finish(request, "abort")
                self.waiting.clear()
                self.in_flight.clear()

    @property
    def alive(self):
        """Whether the thread runs."""
        return self.thread is not None and self.thread.is_alive()

    @property
    def running(self):
        """The requests that hold a slot, in order of arrival."""
        return sorted(filter(None, self.slots), key=lambda request: request.number)

    def stats(self):
        """Numbers of requests and pages now, and counts since the start."""
        with self.changed:
            return {"running": len(self.running), "waiting": len(self.waiting), "pages_free": self.cache.free_pages,
                    "pages_used": self.cache.used_pages, "pages_cached": self.cache.cached_pages} | {
                    name: self.counts[name] for name in ("requests", "finished", "steps", "preemptions",
                                                         "prompt_tokens", "cached_tokens", "output_tokens")}

    # --- the engine

    def step(self):
        """Admit, one forward pass for all, sample, emit. -> whether there was anything to do."""
        with self.stepping:
            return self._step()

    def _step(self):
        with self.changed:
            for request in [r for r in (*self.slots, *self.waiting) if r and r.cancelled]:
                if request in self.waiting:
                    self.waiting.remove(request)
                self._finish(request, "abort")
            self._admit()
        scoring = any(request and request.unscored for request in self.slots)
        # A step can be planned while tokens are pending, but not to guess, to score a prompt, or to preempt.
        flying = len(self.in_flight)
        if scoring or self.draft is not None:
            self._settle(0)
        guesses = self._guess()
        with self.changed:
            rows = self._rows(guesses)
        settled, plain = len(self.in_flight) < flying, not (guesses or scoring)
        if rows:
            self._launch(rows, plain)
        # Then the results of earlier steps, of this one too unless the runner may run ahead.
        return self._settle(self.runner.ahead if rows and plain else 0) or settled or bool(rows)

    def _launch(self, rows, plain):
        self.counts["steps"] += 1
        sampled = [request for request, _, _, sampled in rows if sampled]
        try:
            self.in_flight.append((rows, sampled, self.runner.launch(rows, plain)))
        except Exception as err:
            for request, *_ in rows:
                self._finish(request, "error", err)
        else:
            for request in sampled:
                request.pending += 1

    def _settle(self, most):
        """Take the results of the oldest steps, until `most` are in flight -> whether there were any."""
        settled = False
        while len(self.in_flight) > most:
            rows, sampled, results = self.in_flight.popleft()
            settled = True
            try:
                results = results()
            except Exception as err:
                results = [(request, [], err) for request, *_ in rows]
            for request in sampled:
                request.pending -= 1
            for result in results:
                self._emit(*result)
        return settled

    def _admit(self):
        """Give free slots to the first in the queue, as long as the pool has the pages for their tokens."""
        while self.waiting and None in self.slots:
            request, size = self.waiting[0], self.cache.page_size
            ids, leader, table = request.ids, request.leader, PageTable(self.cache)
            leads = leader and leader.table and leader.table.cache is self.cache and not request.unscored
            if leads and leader.table.length < len(leader.prompt_ids):
                return  # its prompt is being computed, and is shared once it is
            if leads:
                table.share(leader.table.pages[:(len(request.prompt_ids) - 1) // size])
            elif self.prefix_cache:  # at least one token is computed, and all that are to be scored
                table.match(ids[:len(request.prompt_logprobs) if request.unscored else -1])
            # A page to spare for each that is running, or the newcomer would be preempted in the next steps.
            spare = size * (len(self.slots) - self.slots.count(None))
            try:
                self.cache.check_free(table.missing(len(ids) - table.length + spare))
                table.grow(len(ids) - table.length)
            except OutOfPages:
                table.release()
                return
            if request.scheduled_time is None:
                request.scheduled_time, request.cached_tokens = time.monotonic(), table.length
                self.counts["cached_tokens"] += table.length
                self.counts["prompt_tokens"] += len(ids)
            self.waiting.popleft()
            request.table, request.slot = table, self.slots.index(None)
            self.slots[request.slot] = request

    def _guess(self):
        """Speculation, while one request runs alone and decodes -> its guesses, else none."""
        running = self.running
        if not self.draft or len(running) != 1 or running[0].todo > 1:
            return []
        try:
            return self.draft.guess(running[0], self.model.config)
        except Exception as err:
            self._finish(running[0], "error", err)
            return []

    def _rows(self, guesses):
        """This step's rows, as a runner's `launch` takes them, the decoding ones first."""
        decoding, prefilling, budget, config = [], [], self.prefill_chunk, self.model.config
        running = [(request, request.todo) for request in self.running]
        for request, todo in running:  # the oldest first: whoever gives up its pages for it was not planned yet
            ending = request.pending and len(request.output_ids) + request.pending >= output_limit(request, config)
            if todo == 1 and not ending and request.table and self._make_room(request, 1 + len(guesses)):
                decoding.append((request, 1, guesses, True))
        for request, todo in running:
            if todo > 1 and budget and request.table:
                count = min(todo, budget, SCORED_CHUNK if request.unscored else todo)
                prefilling.append((request, count, [], count == todo))
                budget -= count
        return [row for row in decoding + prefilling if row[0].table]        # to make room some may have been ended

    def _make_room(self, request, count):
        """Pages for `count` more tokens, taken from the youngest where none are free. -> False: it was itself, or has
        ended. Nobody is preempted while a token of his is on its way."""
        while request.table:
            try:
                request.table.grow(count)
                return True
            except OutOfPages:
                if self._settle(0):
                    continue
                youngest = self.running[-1]
                self._leave(youngest)
                youngest.preemptions += 1
                self.counts["preemptions"] += 1
                self.waiting.appendleft(youngest)
        return False

    def _emit(self, request, guesses, sampled):
        """Hand out a row's next token or tokens, unless the request ended while they were computed."""
        if request.finish_time is not None:
            return
        if isinstance(sampled, Exception):
            self._finish(request, "error", sampled)
        elif sampled is None:
            self._finish(request, "length")
        else:
            try:
                made = take_tokens(request, *sampled, guesses, self.model.config, self.draft)
                if guesses:  # forget the wrong ones
                    request.table.truncate(len(request.ids) - 1)
            except Exception as err:
                self._finish(request, "error", err)
            else:
                self._hand_out(request, made)

    def _hand_out(self, request, tokens):
        request.token_times += [time.monotonic()] * len(tokens)
        for token in tokens:
            request.output_queue.put(token)
        self.counts["output_tokens"] += len(tokens)
        table = request.table
        if self.prefix_cache and table.length // self.cache.page_size > table.known_pages:
            table.remember(request.ids)
        if request.finish_reason:
            self._finish(request, request.finish_reason)

    def _leave(self, request):
        """Out of its slot, and its pages back to the pool."""
        if request.table:
            request.table.release()
            request.table = self.slots[request.slot] = None

    def _finish(self, request, reason, error=None):
        with self.changed:
            self._leave(request)
            if self.draft and self.draft.request is request:
                self.draft.release()
            request.finish_reason, request.error, request.finish_time = reason, error, time.monotonic()
            self.counts["finished"] += 1
        if self.on_finish:
            self.on_finish(request)
        request.output_queue.put(None)

    def _loop(self):
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.stopping or self.waiting or any(self.slots))
                if self.stopping:
                    return
            try:
                if not self.step():
                    time.sleep(0.001)  # the queue waits for pages that somebody outside this scheduler holds
            except Exception as err:  # a fault of ours, not of a request: whoever runs is told, the others go on
                with self.changed:
                    for request in self.running or ([self.waiting.popleft()] if self.waiting else []):
                        self._finish(request, "error", err)


# ---------------------------------------------------------------------------------------------------
# Benchmarks

VARIANTS = {"no-cache": GPT2, "cached": GPT2Cached, "paged": GPT2Paged}
LABELS = {"no-cache": "no cache", "cached": "KV-cache (torch.cat)", "paged": "KV-cache (pages)"}
SENTENCE = "The meaning of life is"


def greedy(tokens):
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def random_prompt(length, vocab_size):
    return np.random.default_rng(length).integers(min(vocab_size, 50000), size=length).tolist()


def outputs_match(models, prompt, tokens=4):
    """Every variant against GPT2: the largest difference of the logits after the prompt, relative to their size,
    and in float32 the greedy text. -> (whether they match, the difference)"""
    ids, texts, logits = torch.tensor([prompt]), {}, {}
    for name, model in models.items():
        texts[name] = list(generate(model, prompt, greedy(tokens)))
        kv = model.new_kv()
        model(ids[:, :-1], kv, keep=slice(-1, None))
        logits[name] = model(ids if name == "no-cache" else ids[:, -1:], kv, keep=slice(-1, None))
        kv.release()
    oracle, exact = logits["no-cache"], model.wte.weight.dtype == torch.float32
    difference = torch.stack([(other - oracle).abs().max() / oracle.abs().max() for other in logits.values()]).max()
    same = all(text == texts["no-cache"] for text in texts.values()) or not exact   # 16 bit may round a tie otherwise
    return same and bool(difference < (1e-4 if exact else 3e-2)), difference.item()  # NaN is below nothing


def time_generation(model, prompt, tokens):
    """Seconds to the first token, and of each token after it."""
    marks = [time.perf_counter()]
    for _ in generate(model, prompt, greedy(tokens)):
        marks.append(time.perf_counter())
    gaps = np.diff(marks)
    return gaps[0], gaps[1:]


def bench_generation(models, args):
    """First token and decode of each variant after prompts of several lengths, in interleaved rounds."""
    sentence = load_tokenizer().encode_ordinary(SENTENCE)
    prompts = [sentence] + [random_prompt(n, models["paged"].config.vocab_size) for n in (16, 512, 900)]
    rows = []
    for prompt in prompts:
        same, difference = outputs_match(models, prompt)
        print(f"Match: {'yes' if same else 'NO'}  after {len(prompt)} tokens, "
              f"logits of all variants within {difference:.1e} of the largest")
        if not same:
            raise SystemExit(1)
        tokens = dict.fromkeys(models, args.tokens)
        if prompt is not sentence:  # a slow variant makes fewer tokens than asked for; the table says how many
            for name, model in models.items():
                tokens[name] = min(args.tokens, 1 + max(3, int(1.5 / time_generation(model, prompt, 2)[1][0])))
        runs = {name: [] for name in models}
        for _ in range(args.runs):
            for name, model in models.items():
                runs[name].append(time_generation(model, prompt, tokens[name]))
        alike = tokens["no-cache"] - 1                                # speed-up compares the same positions
        base = [statistics.mean(rest) for _, rest in runs["no-cache"]]
        for name in models:
            step = [statistics.mean(rest) for _, rest in runs[name]]
            rows.append({
                "prompt": len(prompt), "variant": LABELS[name], "new": tokens[name],
                "first token ms": 1e3 * statistics.median(first for first, _ in runs[name]),
                "ms a token": 1e3 * statistics.median(step),
                "min": 1e3 * min(step), "max": 1e3 * max(step),
                "tokens/s": 1 / statistics.median(step),
                "speed-up": statistics.median(
                    b / statistics.mean(rest[:alike]) for b, (_, rest) in zip(base, runs[name])),
            })
    return rows


class ByteCounter(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the bytes that operators allocate, and that those which store K and V read and write."""

    MOVES = ("cat", "copy_", "index_copy_")

    def __init__(self):
        super().__init__()
        self.allocated = self.moved = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        flat = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        known = {t.untyped_storage().data_ptr() for t in flat}
        for t in torch.utils._pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in known:
                self.allocated += t.nbytes
        name = func.overloadpacket.__name__
        if name in self.MOVES:
            self.moved += 2 * (out.nbytes if name == "cat" else flat[-1].nbytes)
        return out


def count_bytes(model, stored):
    """Bytes that one decode step moves and allocates to store and attend, with `stored` tokens before it.

    Counted on the kernel's plain twin, which stores the same bytes by operators that can be seen.
    """
    kv = model.new_kv()
    if isinstance(kv, PagedKV):
        kv.use_kernel = False
    model(torch.tensor([random_prompt(stored, model.config.vocab_size)]), kv, keep=slice(-1, None))
    counter, attend = ByteCounter(), kv.attend

    def counted(*args):
        with counter:
            return attend(*args)

    kv.attend = counted
    model(torch.tensor([[0]]), kv)
    kv.release()
    return counter


def bench_bytes(models, args):
    """What a decode step costs in memory: torch.cat against pages, counted operator by operator as it runs."""
    rows = []
    for stored in (16, 128, 512, 900):
        for name in ("cached", "paged"):
            counter = count_bytes(models[name], stored)
            rows.append({"stored": stored, "variant": LABELS[name], "moved KB a step": counter.moved / 1e3,
                         "allocated KB a step": counter.allocated / 1e3})
    return rows


def read_bandwidth():
    """Bytes a second at which this machine reads memory with torch's threads: the best of 10 sums of 512 MB."""
    data = torch.ones(2**27)
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        data.sum()
        seconds.append(time.perf_counter() - start)
    return data.nbytes / min(seconds)


def median_seconds(function, runs=15):
    """The median of some calls, after one that is not counted."""
    function()
    marks = [time.perf_counter()]
    for _ in range(runs):
        function()
        marks.append(time.perf_counter())
    return statistics.median(np.diff(marks))


def step_parts(model, prompt):
    """ms of what a decode step does after a prompt, each part by itself."""
    inputs = [(linear, torch.randn(1, linear.weight.shape[1])) for linear in model.linears()]
    c, kv, request = model.config, model.new_kv(), Request(prompt, greedy(1))
    q, logits = torch.randn(1, c.n_head, 1, c.head_dim), model(torch.tensor([prompt]), kv)[0, -1:]
    kv.reserve(1, 1, c.n_positions)
    parts = {"products": lambda: [linear(x) for linear, x in inputs],
             "attention": lambda: [kv.attend(layer, q, q, q, 1.0) for layer in range(c.n_layer)],
             "sampling": lambda: sample(logits, [request])}
    parts = {name: 1e3 * median_seconds(part) for name, part in parts.items()}
    kv.release()
    return parts


def bench_bandwidth(models, args):
    """What a decode step costs and what on, against its floor: every weight is read once."""
    weights, ceiling, rows = weight_bytes(models["paged"]), read_bandwidth(), []
    prompt = load_tokenizer().encode_ordinary(SENTENCE)
    for name in ("cached", "paged"):
        step = statistics.median(time_generation(models[name], prompt, 30)[1])
        parts = step_parts(models[name], prompt)
        rows.append({"variant": LABELS[name], "weights MB": weights / 1e6, "memory GB/s": ceiling / 1e9,
                     "floor ms": 1e3 * weights / ceiling, "ms a token": 1e3 * step,
                     "share of memory": weights / step / ceiling, **parts,
                     "rest": max(0.0, 1e3 * step - sum(parts.values()))})
    return rows


def weight_bytes(model):
    """What a step reads: all but the embeddings, of which it needs a row each; a tied head counts."""
    return sum(linear.weight.nbytes for linear in model.linears())


def bench_dtypes(models, args):
    """Each dtype of the weights: its speed, and on a text of `tiny` what it costs in accuracy."""
    prompt, rows = load_tokenizer().encode_ordinary(SENTENCE), []
    params = SamplingParams(seed=0, max_tokens=120, ignore_eos=True)
    text = prompt + list(generate(load_model("tiny"), prompt, params))
    for dtype in CPU_DTYPES:
        tiny = load_model("tiny", dtype=dtype)
        kv, ids = tiny.new_kv(), torch.tensor([text])
        logits = torch.cat([tiny(ids[:, n:n + 1], kv)[0] for n in range(len(text))])   # token by token, as it decodes
        kv.release()
        if not rows:
            reference = logits
        model = load_model(models["paged"].name, GPT2Paged, dtype=dtype)
        time_generation(model, prompt, 3)
        step = statistics.median(time_generation(model, prompt, min(args.tokens, 60))[1])
        rows.append({"weights": dtype, "weights MB": weight_bytes(model) / 1e6, "ms a token": 1e3 * step,
                     "tokens/s": 1 / step,
                     "logits error %": 100 * ((logits - reference).abs().max() / reference.abs().max()).item(),
                     "perplexity": F.cross_entropy(logits[:-1], ids[0, 1:]).exp().item()})
    for row in rows:
        row["speed-up"] = rows[0]["ms a token"] / row["ms a token"]
    return rows


SLOTS = 8


def drain_steps(scheduler, *requests):
    scheduler.submit(*requests)
    while scheduler.step():
        pass


def serve(model, jobs, mode, args):
    """Runs jobs, (prompt, new tokens) each, that all arrive at once -> (requests, seconds).

    sequential: one after another. static: batches of SLOTS, each waits for its slowest. continuous: a free slot is
    given to the next at once.
    """
    size = {"sequential": 1, "static": SLOTS, "continuous": len(jobs)}[mode]
    scheduler = ContinuousBatchingScheduler(model, SLOTS, prefill_chunk=args.prefill_chunk, prefix_cache=False)
    requests, start = [Request(prompt, greedy(new)) for prompt, new in jobs], time.monotonic()
    for at in range(0, len(requests), size):
        drain_steps(scheduler, *requests[at:at + size])
    for request in requests:
        request.arrival_time = start
    return requests, time.monotonic() - start


def latencies(requests):
    """ms, mean / median / 99th percentile, as serving benchmarks give them: time to first token, time per output
    token (after the first, a mean for each request), inter-token latency (each gap)."""
    gaps = [np.diff(r.token_times) for r in requests]
    times = {"TTFT": [r.token_times[0] - r.arrival_time for r in requests],
             "TPOT": [gap.mean() for gap in gaps if len(gap)], "ITL": np.concatenate(gaps)}
    measures = {"mean": np.mean, "median": np.median, "p99": lambda values: np.percentile(values, 99)}
    return {f"{name} {what}": 1e3 * float(measure(values))
            for name, values in times.items() for what, measure in measures.items()}


def bench_batching(models, args):
    """The same requests one after another, in static batches, and continuously batched."""
    model, rows = share_weights(models["paged"], GPT2Paged, max_pages=1024), []
    full, draw = args.only == "batching", np.random.default_rng(0)
    most = args.tokens if full else max(4, args.tokens // 2)
    jobs = [(random_prompt(int(length), model.config.vocab_size), int(new)) for length, new in
            zip(draw.integers(5, 201, size=32), draw.geometric(2.5 / most, size=32).clip(2, most))]
    serve(model, [(prompt, 2) for prompt, _ in jobs[:SLOTS]], "continuous", args)     # warm-up
    for count in (1, 2, 4, 8, 16, 32) if full else (16,):
        runs = {mode: [] for mode in ("sequential", "static", "continuous")}
        for _ in range(args.runs if full else 1):
            for mode, found in runs.items():
                found.append(serve(model, jobs[:count], mode, args))
        texts = [[r.output_ids for r in found[0][0]] for found in runs.values()]
        print(f"Match: {'yes' if texts[0] == texts[1] == texts[2] else 'NO'}  {count} requests, texts of all modes")
        if not texts[0] == texts[1] == texts[2]:
            raise SystemExit(1)
        for mode, found in runs.items():
            requests, seconds = min(found, key=lambda run: abs(run[1] - statistics.median(s for _, s in found)))
            rows.append({"requests": count, "mode": mode,
                         "tokens/s": sum(len(r.output_ids) for r in requests) / seconds} | latencies(requests) |
                        {"bars": [[r.slot, r.scheduled_time - requests[0].arrival_time,
                                   r.finish_time - requests[0].arrival_time] for r in requests]})
    return rows


def bench_prefix(models, args):
    """Requests that share their first 500 tokens, without and with the prefix cache."""
    model, shared, rows = models["paged"], random_prompt(500, models["paged"].config.vocab_size), []
    for prefix_cache in (False, True):
        scheduler = ContinuousBatchingScheduler(model, SLOTS, prefill_chunk=args.prefill_chunk,
                                                prefix_cache=prefix_cache)
        requests = [Request([*shared, n, n, n], greedy(8)) for n in range(4)]
        start = time.monotonic()
        for request in requests:
            drain_steps(scheduler, request)
        rows.append({"prefix cache": "on" if prefix_cache else "off", "requests": len(requests),
                     "prompt tokens": 503 * len(requests), "cached": sum(r.cached_tokens for r in requests),
                     "first token ms": 1e3 * statistics.median(r.token_times[0] - r.arrival_time for r in requests),
                     "seconds": time.monotonic() - start})
    return rows


class Replay(Speculator):
    """Knows the text: guesses that cost nothing and are always right, the most that speculation can give."""

    def __init__(self, text, tokens):
        self.text, self.tokens, self.kv, self.proposed, self.accepted = text, tokens, Recompute(), 0, 0

    def check(self, target):
        pass

    def guess(self, request, config):
        made, left = len(request.output_ids), output_limit(request, config) - len(request.output_ids)
        return self.text[made:made + min(self.tokens, left - 1)]


def bench_speculation(models, args):
    """One stream alone, with `tiny` guessing, and with guesses that are always right."""
    model, prompt, new = models["paged"], load_tokenizer().encode_ordinary(SENTENCE), min(args.tokens, 60)
    text = list(generate(model, prompt, greedy(new)))
    drafts, rows = {"off": None, "always right, at no cost": Replay(text, 4)}, []
    if model.config.vocab_size == GPT2Config.vocab_size:
        drafts["tiny"] = Speculator(load_model("tiny", GPT2Cached), 4)
    for name, draft in drafts.items():
        start = time.perf_counter()
        same = list(generate(model, prompt, greedy(new), draft=draft)) == text
        rows.append({"guesses": name, "match": "yes" if same else "NO",
                     "acceptance": draft.acceptance if draft else 0.0, "tokens/s": new / (time.perf_counter() - start)})
        rows[-1]["speed-up"] = rows[-1]["tokens/s"] / rows[0]["tokens/s"]
    return rows


BENCHMARKS = {
    "generation": ("Generation, batch 1, greedy; ms a token without the first, median of the runs", bench_generation),
    "bytes": ("K/V of one decode step, all layers: bytes read and written to store it, bytes allocated", bench_bytes),
    "bandwidth": ("A decode step against the memory's speed, and its parts in ms", bench_bandwidth),
    "dtypes": ("Weights by dtype; largest logits error (of the largest logit) and perplexity on a text of tiny",
               bench_dtypes),
    "batching": (f"Batching, {SLOTS} slots; all requests arrive at once; latencies in ms", bench_batching),
    "prefix": ("Prefix cache: prompts that share 500 tokens, one after another", bench_prefix),
    "speculation": ("Speculative decoding, 4 guesses a step", bench_speculation),
}


def print_table(title, rows):
    """One fixed-width table of equal dicts."""
    def text(value):
        return value if isinstance(value, str) else f"{value:d}" if isinstance(value, int) else f"{value:.2f}"

    rows = [{name: value for name, value in row.items() if not isinstance(value, list)} for row in rows]
    table = [list(rows[0])] + [[text(value) for value in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*table)]
    print(f"\n{title}")
    for line in table:
        cells = zip(line, widths, rows[0].values())
        print("  ".join(cell.ljust(width) if isinstance(v, str) else cell.rjust(width) for cell, width, v in cells))


def check_outputs(args, drawn=("generation", "bytes", "batching")):
    """Raises UserError, before anything is measured, where --json or --plot can't be written, or nothing is drawn."""
    for flag, path in (("--json", args.json), ("--plot", args.plot)):
        if path and (Path(path).is_dir() or not Path(path).parent.is_dir()):
            raise UserError(f"{flag} {path} can't be written: it is a folder, or is in none")
    if args.plot and Path(args.plot).suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"--plot must end in .png, .svg or .pdf, not {args.plot}")
    if args.plot and args.only not in (None, *drawn):
        raise UserError(f"--plot draws the benchmarks {', '.join(drawn)}, not {args.only}")


def run_benchmarks(args):
    """The benchmarks of --only (all without it): a table each, and the files of --json and --plot."""
    check_outputs(args)
    model = load_model(args.model, GPT2, dtype=args.dtype, stand_in="random")
    models = {name: share_weights(model, variant) for name, variant in VARIANTS.items()}
    machine = {"model": model.name, "dtype": args.dtype, "threads": torch.get_num_threads(), "runs": args.runs,
               "processor": processor_name(), "system": platform.platform(terse=True), "torch": torch.__version__}
    report(machine, BENCHMARKS, args, plot_results, models, args)


def report(machine, benchmarks, args, plot, *inputs):
    """Runs benchmarks, {name: (title, function of the inputs -> rows)}, on a machine that a dict describes."""
    from tqdm import tqdm

    print("  ".join(f"{key}: {value}" for key, value in machine.items()), flush=True)
    results = {"machine": machine}
    progress = tqdm([args.only] if args.only else list(benchmarks), disable=None, leave=False)
    for name in progress:
        progress.set_description(name)
        title, bench = benchmarks[name]
        results[name] = bench(*inputs)
        progress.clear()
        print_table(title, results[name])
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1), encoding="utf-8")
    if args.plot:
        plot(results, args.plot)


def processor_name():
    """The processor as its maker names it; what `platform` knows where /proc is missing."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":")[1].strip()
    return platform.processor() or platform.machine()


def plot_results(results, path):
    """Time of a token and bytes moved a step by context; below, who held which slot when, static and continuous."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    curves, timeline = [name for name in ("generation", "bytes") if name in results], "batching" in results
    rows = [[name for name in curves for _ in range(2 // len(curves))]] * bool(curves)
    rows += [["static"] * 2, ["continuous"] * 2] * timeline
    figure, axes = pyplot.subplot_mosaic(rows, figsize=(10, 3.6 * bool(curves) + 3.6 * timeline), layout="constrained",
                                         height_ratios=[2] * bool(curves) + [1, 1] * timeline)
    for name in curves:
        plot_curves(axes[name], name, results[name])
    if timeline:
        plot_timelines(axes, results["batching"])
    machine = results["machine"]
    figure.supxlabel(f"GPT-2 ({machine['model']}), {machine['dtype']}, {machine['threads']} threads, "
                     f"{machine['processor']}", fontsize=8, color="#5f6368")
    figure.savefig(path, dpi=160)
    pyplot.close(figure)


def plot_curves(axis, name, rows):
    x, y, title, unit = {
        "generation": (lambda row: row["prompt"] + row["new"] / 2, "ms a token", "Time of one new token", "ms"),
        "bytes": (lambda row: row["stored"], "moved KB a step", "K/V bytes moved to store it", "KB")}[name]
    for label, colour in zip(LABELS.values(), ("#9aa0a6", "#e8710a", "#1a73e8")):
        points = sorted((x(row), row[y]) for row in rows if row["variant"] == label)
        if points:
            axis.plot(*zip(*points), marker="o", color=colour, label=label)
    axis.set(title=title, xlabel="tokens before it", ylabel=unit, yscale="log")
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, fontsize=9)


def plot_timelines(axes, rows):
    """A bar for each request of the largest run, in its slot, from admission to its end."""
    most = max(row["requests"] for row in rows)
    shown_rows = {row["mode"]: row for row in rows if row["requests"] == most and row["mode"] in axes}
    longest = max(end for row in shown_rows.values() for _, _, end in row["bars"])
    for mode, row in shown_rows.items():
        axis = axes[mode]
        for n, (slot, start, end) in enumerate(row["bars"]):
            axis.barh(slot, end - start, left=start, height=0.8, color=("#1a73e8", "#8ab4f8")[n // SLOTS % 2],
                      edgecolor="white")
        axis.set(title=f"{mode}: {most} requests in {SLOTS} slots, {row['tokens/s']:.0f} tokens/s", ylabel="slot",
                 xlim=(0, longest), yticks=range(0, SLOTS, 2), xlabel="seconds" if mode == "continuous" else None)
        axis.invert_yaxis()
        axis.spines[["top", "right"]].set_visible(False)


# ---------------------------------------------------------------------------------------------------
# Command line

def run_prompt(args):
    """Streams the continuation of --prompt to the terminal as it comes; a line of figures goes to stderr."""
    model = load_model(args.model, VARIANTS[args.variant], dtype=args.dtype)
    names = ("temperature", "top_k", "top_p", "repetition_penalty", "seed")
    params = SamplingParams(max_tokens=args.tokens, **{name: getattr(args, name) for name in names})
    request = Request(load_tokenizer().encode_ordinary(args.prompt), params)
    tokens, marks = generate(model, request), [time.perf_counter()]

    def timed():
        for token in tokens:
            marks.append(time.perf_counter())
            yield token

    sys.stdout.reconfigure(errors="replace")
    print(args.prompt, end="", flush=True)
    for text in stream_text(timed()):
        print(text, end="", flush=True)
    print()
    if len(marks) > 2:
        print(f"[{model.name}: {len(marks) - 1} tokens, first after {1e3 * (marks[1] - marks[0]):.0f} ms, "
              f"{(len(marks) - 2) / (marks[-1] - marks[1]):.1f} tokens/s, {request.finish_reason}]", file=sys.stderr)


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description="GPT-2 from scratch. Without --prompt: the CPU benchmarks.")
    add = parser.add_argument
    add("--model", default="auto", help="gpt2 or another Hugging Face name, a folder, tiny, random, random:gpt2-xl, "
                                        "auto (gpt2, or a stand-in where it can't be had)")
    add("--dtype", default="float32", choices=CPU_DTYPES)
    add("--threads", type=int, help="default: the physical cores")
    add("--tokens", type=int, default=100, help="new tokens (default 100)")
    add("--runs", type=int, default=3, help="rounds of each measurement (default 3)")
    add("--prefill-chunk", type=int, default=128, help="prompt tokens a step when batching (default 128)")
    add("--only", choices=BENCHMARKS, help="one benchmark")
    add("--json", metavar="FILE", help="write the results as JSON")
    add("--plot", metavar="FILE", help="draw the results")
    add("--prompt", help="generate text after this instead of measuring")
    add("--variant", default="paged", choices=VARIANTS)
    add("--temperature", type=float, default=0.8)
    add("--top-k", type=int, default=0)
    add("--top-p", type=float, default=0.95)
    add("--repetition-penalty", type=float, default=1.15)
    add("--seed", type=int)
    return parser.parse_args(argv)


def main(argv=None):
    args = parse_args(argv)
    try:
        check_number("--threads", args.threads, Integral, 1, 1024, optional=True)
        check_number("--runs", args.runs, Integral, 1, 1000)
        check_number("--prefill-chunk", args.prefill_chunk, Integral, 1, 100_000)
        check_number("--tokens", args.tokens, Integral, 1 if args.prompt is not None else 2, 1024)
        use_threads(args.threads)
        run_benchmarks(args) if args.prompt is None else run_prompt(args)
    except UserError as err:
        raise SystemExit(f"engine.py: {err}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:  # whoever read the output has enough; without this the exit would complain once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None


if __name__ == "__main__":
    main()
