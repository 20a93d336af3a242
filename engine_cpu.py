"""CPU kernels: the counterpart of the Triton kernels, in plain Python that numba compiles on the spot.

A decode step reads every weight once for a few rows, so it is a race of bytes: torch hands a single row to one
thread. A prompt is a race of operations, which a processor does fastest in the weights' own dtype. Both are won by
one product, in tiles: ROWS rows times OUTS outputs are summed in registers, 8 or 16 numbers at a time, while the
weights of the next tile are fetched. Up to FEW_ROWS a sum is always added up in the same order, so a row's result
does not depend on its neighbours. A block of the model runs in one call.
"""

import contextlib
import functools
import itertools
import math
import os
import threading
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import engine
from checkpoint import ACTIVATIONS, aligned_empty, empty_weight
from scheduler import PageTable, RowPlan

BLOCK = 64       # outputs that a task computes
PANEL = 128      # rows that it multiplies while their weights are in the first cache
SPAN = 3072      # bytes of a row that a tile sums up at a time, beyond FEW_ROWS: those of OUTS fit the first cache
FEW_ROWS = 64    # up to which a tile sums up whole rows
AHEAD = 4096     # bytes by which the weights of a row by itself are fetched before they are used
QUERY_BLOCK = 128  # queries of a prompt that a task attends,
KEY_BLOCK = 64     # and over how many keys at a time
# Beyond so many rows torch multiplies on processors not known to have AVX2: some have a unit for it that it alone uses.
# On others our kernels are ahead at any number, since a block is one call: a prompt of GPT-2, ms on 2 cores of a Zen 5,
# ours / oneDNN's products with our attention:
#     tokens              100       136       1,000
#     float32         54 / 68   72 / 73   525 / 588
#     bfloat16        31 / 36   41 / 46   323 / 327
#     int8            30 / 68   41 / 79   338 / 357
MANY_ROWS = 64


class Product(NamedTuple):
    """A projection as the kernels take it, see `as_array`."""

    weight: np.ndarray       # (out, in)
    scale: np.ndarray        # (out) float32: of int8 rows, else 1
    bias: np.ndarray         # (out) float32
    activations: np.ndarray  # empty, of the dtype in which activations are multiplied by this weight


class Norm(NamedTuple):
    """A LayerNorm as the kernels take it."""

    weight: np.ndarray       # (C) float32
    bias: np.ndarray         # (C) float32
    eps: np.float32


class KVView(NamedTuple):
    """Some rows of new tokens, and the pages of the sequences that they continue. Rows of one token come first."""

    k: np.ndarray            # (L, H, slots, D)
    v: np.ndarray            # (L, H, slots, D)
    slots: np.ndarray        # (N) of the new tokens of all rows, end to end
    page_ids: np.ndarray     # (B, P)
    stored: np.ndarray       # (B) tokens that each row stores already
    counts: np.ndarray       # (B) new tokens that each row brings
    page_size: int


# ---------------------------------------------------------------------------------------------------
# What the kernels do that Python has no word for. These bodies say what is meant, and run, slowly, where one steps
# through a kernel without numba; compiled kernels get the processor's instructions instead, from `Instructions`.

prange = range                   # compiled: shared out among the threads
ROWS, OUTS, COLUMNS = 4, 4, 64   # a tile's; compiled: as the processor's registers allow, see `Instructions`


def _widen(number):
    """What is stored, as float32. uint16 holds the bits of a bfloat16, int16 those of a float16."""
    if isinstance(number, np.uint16):
        return (np.uint32(number) << np.uint32(16)).view(np.float32)
    return np.float32(number.view(np.float16) if isinstance(number, np.int16) else number)


def _as(number, array):
    """A float32 as the array stores it: the reverse of `_widen`, rounded to the nearest."""
    if array.dtype == np.float32:
        return number
    if array.dtype == np.int16:
        return np.float16(number).view(np.int16)
    bits = int(np.float32(number).view(np.uint32))
    odd = bits >> 16 & 1                                             # a tie becomes even
    return np.uint16(0x7fc0 if number != number else bits + 0x7fff + odd >> 16)


def _as_float(bits):
    """The float32 of these 32 bits."""
    return np.int32(bits).view(np.float32)


def _narrowed(x, like):
    """Activations x (N, K) as they are multiplied, in the dtype of `like`, and a factor for each row: `_rounded`,
    `_scaled`, or x itself."""
    if like.dtype == np.float32:
        return x, np.ones(x.shape[0], np.float32)
    return _rounded(x, like) if like.dtype == np.uint16 else _scaled(x, like)


def _fetch(array, head, slot, d):
    """Ask for the memory behind array[head, slot, d], which will be read soon. Changes nothing."""


def _tile(rows, outs, x, row, weight, o, start, length, sums, at, column, add, ahead, fetch):
    """sums[at + r, column + i] = (or +=, if add) the sum over `length` numbers from `start` of x[row + r] times
    weight[o + i], for `rows` r and `outs` i (constants).

    Compiled, the rows * outs sums stay in registers, and `fetch` times a row's weights are asked for from `ahead` bytes
    behind them. int16 activations are whole numbers, and stand beside weights of int8.
    """
    whole = x.dtype == np.int16
    for r in range(rows):
        for i in range(outs):
            total = 0 if whole else np.float32(0)
            for k in range(start, start + length):
                a, w = x[row + r, k], weight[o + i, k]
                total += int(a) * int(w) if whole else _widen(a) * _widen(w)
            sums[at + r, column + i] = np.float32(total) + (sums[at + r, column + i] if add else ZERO)


def _outer(rows, x, row, weight, column, out, add):
    """out[row + r, column + c] = (or +=, if add) the sum over k of x[row + r, k] times weight[k, column + c], all
    float32, for `rows` r (a constant) and COLUMNS c."""
    for r in range(row, row + rows):
        for c in range(column, column + COLUMNS):
            total = out[r, c] if add else ZERO
            for k in range(weight.shape[0]):
                total += x[r, k] * weight[k, c]
            out[r, c] = total


# ---------------------------------------------------------------------------------------------------
# The kernels

LOG2_E, LOWEST, ZERO, ONE = map(np.float32, (math.log2(math.e), -87.3, 0, 1))
C1, C2, C3, C4, C5, C6 = (np.float32(math.log(2) ** n / math.factorial(n)) for n in range(1, 7))   # of 2 ** f


def _exp(x):
    """e to the x within 3e-7 of it, for x up to 0; 0 below -87. Unlike np.exp it runs in SIMD.

    e^x = 2^(x log2 e) = 2^whole 2^f: the first by putting `whole` into a float's exponent, the second by a series.
    """
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
    """x (N, K) as bfloat16, and factors of 1."""
    y = aligned_empty(x.shape[0], x.shape[1], like)
    for row in prange(x.shape[0]):
        for k in range(x.shape[1]):
            y[row, k] = _as(x[row, k], y)
    return y, np.ones(x.shape[0], np.float32)


def _scaled(x, like):
    """x (N, K) as whole numbers of 16 bits, so large that the sum of K products with 8-bit weights stays below 2 ** 31;
    and the factors (N) that undo it."""
    y = aligned_empty(x.shape[0], x.shape[1], like)
    factors = np.empty(x.shape[0], np.float32)
    limit = np.float32(min(32767, 2 ** 24 // x.shape[1] - 1))
    for row in prange(x.shape[0]):
        largest = np.float32(1e-30)
        nothing = ZERO
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
    row_bytes = weight.shape[1] * weight.itemsize
    part = max(1, OUTS // max(1, rows // ROWS))
    for start in range(0, length, span):
        count = min(span, length - start)
        add = start > 0
        i = 0
        # Several rows: OUTS outputs at a time. The weights of the next outputs are fetched in equal shares, `part` rows
        # of them by each tile: all at once, they would stop the sums.
        while rows > 1 and i + OUTS <= outs:
            r = 0
            while r < rows:
                share = r // ROWS * part
                fetch = part if r % ROWS == 0 and share < OUTS else 0
                ahead = (OUTS + share) * row_bytes
                if r + ROWS <= rows:
                    _tile(ROWS, OUTS, x, row + r, weight, o + i, start, count, sums, r, i, add, ahead, fetch)
                    r += ROWS
                else:
                    _tile(1, OUTS, x, row + r, weight, o + i, start, count, sums, r, i, add, ahead, fetch)
                    r += 1
            i += OUTS
        # A row by itself, and what is left of the outputs: one after another, as memory is read fastest.
        while i < outs:
            r = 0
            while r < rows:
                fetch = 0 if r else 1
                if r + ROWS <= rows:
                    _tile(ROWS, 1, x, row + r, weight, o + i, start, count, sums, r, i, add, AHEAD, fetch)
                    r += ROWS
                else:
                    _tile(1, 1, x, row + r, weight, o + i, start, count, sums, r, i, add, AHEAD, fetch)
                    r += 1
            i += 1


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
        first = task * BLOCK
        outs = min(BLOCK, weight.shape[0] - first)
        sums = np.empty((min(N, PANEL), BLOCK), np.float32)
        for panel in range(0, N, PANEL):
            rows = min(PANEL, N - panel)
            _tiles(x, panel, rows, weight, first, outs, K, span, sums)
            for r in range(rows):
                _finish(sums[r], factors[panel + r], scale[first:first + outs], bias[first:first + outs],
                        out[panel + r, first:first + outs], add, gelu)


# numba reads a plain tuple from Python three times as fast as a named one, which a step of a small model feels. So
# Products, Norms and KVViews come as plain tuples of their fields, and get their names where they are used.

def _project(x, product, out, add, gelu):
    """`_multiply` by a Product."""
    p = Product(*product)
    y, factors = _narrowed(x, p.activations)
    _multiply(y, factors, p.weight, p.scale, p.bias, out, add, gelu)


def _normalise(x, norm, out):
    """LayerNorm of the rows of x (N, C) by a Norm."""
    n = Norm(*norm)
    C = x.shape[1]
    for row in prange(x.shape[0]):
        mean = square = np.float32(0)
        for c in range(C):
            mean += x[row, c]
        mean /= np.float32(C)
        for c in range(C):
            square += (x[row, c] - mean) * (x[row, c] - mean)
        factor = ONE / np.sqrt(square / np.float32(C) + n.eps)
        for c in range(C):
            out[row, c] = (x[row, c] - mean) * factor * n.weight[c] + n.bias[c]


def _begin(x, ln_1, c_attn, y, qkv):
    """The first part of a block: y (N, C) = ln_1(x), qkv (N, 3C) = c_attn(y)."""
    _normalise(x, ln_1, y)
    _project(y, c_attn, qkv, False, False)


def _end(x, attended, attn_c_proj, ln_2, c_fc, mlp_c_proj, y, h):
    """The rest of it, in place: x += attn.c_proj(attended), y = ln_2(x), h = gelu(c_fc(y)), x += mlp.c_proj(h)."""
    _project(attended, attn_c_proj, x, True, False)
    _normalise(x, ln_2, y)
    _project(y, c_fc, h, False, True)
    _project(h, mlp_c_proj, x, True, False)


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


def _slot(table, position, page_size):
    """Where the pool holds the token at this position of a row; table: its page ids."""
    return table[position // page_size] * page_size + position % page_size


def _load_keys(keys_of, values_of, table, at, page_size, keys, values):
    """The keys and values at positions `at` and on, as float32: one for each row of `keys` (n, D)."""
    for j in range(keys.shape[0]):
        slot = _slot(table, at + j, page_size)
        for d in range(keys.shape[1]):
            keys[j, d] = _widen(keys_of[slot, d])
        for d in range(keys.shape[1]):
            values[j, d] = _widen(values_of[slot, d])


def _soften(scores, m_i, l_i, m_new, acc):
    """Scores (keys, queries) to exp(score - m_i), after m_i was raised to the largest of each query; what was summed
    under a smaller maximum, l_i (queries) and acc (queries, D), shrinks."""
    count, lanes = scores.shape
    for t in range(lanes):
        m_new[t] = m_i[t]
    for j in range(count):
        for t in range(lanes):
            m_new[t] = max(m_new[t], scores[j, t])
    for t in range(lanes):
        shrink = _exp(m_i[t] - m_new[t])
        m_i[t] = m_new[t]
        l_i[t] *= shrink
        for d in range(acc.shape[1]):
            acc[t, d] *= shrink
    for j in range(count):
        for t in range(lanes):
            scores[j, t] = _exp(scores[j, t] - m_i[t])
        for t in range(lanes):
            l_i[t] += scores[j, t]


def _attend_block(qkv, first, n, head, keys_of, values_of, table, before, page_size, scale, out):
    """Attention of n queries of a head, `first` and on, that stand behind `before` tokens (Dao et al. 2022).

    keys_of, values_of (slots, D). Scores stand as (key, query), so what is done to one is done to all queries at once.
    Queries and values are padded to whole tiles of COLUMNS.
    """
    D = qkv.shape[3]
    width, lanes = (D + COLUMNS - 1) // COLUMNS * COLUMNS, (n + COLUMNS - 1) // COLUMNS * COLUMNS
    queries, keys = aligned_empty(D, lanes, qkv), aligned_empty(KEY_BLOCK, D, qkv)
    values, scores = aligned_empty(KEY_BLOCK, width, qkv), aligned_empty(KEY_BLOCK, lanes, qkv)
    acc, state = aligned_empty(lanes, width, qkv), aligned_empty(3, lanes, qkv)
    m_i, l_i, m_new = state[0], state[1], state[2]                   # running maximum, sum of exp(score - m_i)
    acc[:] = ZERO
    values[:, D:] = ZERO
    l_i[:] = ZERO
    m_i[:] = -np.inf
    for t in range(lanes):
        for d in range(D):
            queries[d, t] = qkv[first + t, 0, head, d] * scale if t < n else ZERO
    for at in range(0, before + n, KEY_BLOCK):
        count = min(KEY_BLOCK, before + n - at)
        _load_keys(keys_of, values_of, table, at, page_size, keys[:count], values[:count])
        _outer_products(keys[:count], queries, scores, False)
        for j in range(max(0, before + 1 - at), count):              # hidden from the queries before it
            for t in range(min(lanes, at + j - before)):
                scores[j, t] = -np.inf
        _soften(scores[:count], m_i, l_i, m_new, acc)
        _outer_products(scores[:count].T, values[:count], acc, True)
    for t in range(n):
        for d in range(D):
            out[first + t, head, d] = acc[t, d] / l_i[t]


def _attend_many(qkv, pool_k, pool_v, table, stored, page_size, scale, out):
    """Attention of T new tokens of one row, QUERY_BLOCK of a head at a time. qkv (T, 3, H, D); out (T, H, D);
    table (P)."""
    T, H = qkv.shape[0], qkv.shape[2]
    blocks = (T + QUERY_BLOCK - 1) // QUERY_BLOCK
    for task in prange(H * blocks):
        head, first = task // blocks, task % blocks * QUERY_BLOCK
        _attend_block(qkv, first, min(QUERY_BLOCK, T - first), head, pool_k[head], pool_v[head], table,
                      stored + first, page_size, scale, out)


def _store(qkv, pool_k, pool_v, slots):
    """Keys and values of N new tokens to their slots (N)."""
    N, _, H, D = qkv.shape
    for n in range(N):
        for head in range(H):
            for d in range(D):
                pool_k[head, slots[n], d] = _as(qkv[n, 1, head, d], pool_k)
            for d in range(D):
                pool_v[head, slots[n], d] = _as(qkv[n, 2, head, d], pool_v)


def _attend(qkv, view, layer, scale, out):
    """Store and attend the new tokens of all rows of a KVView, end to end. qkv (N, 3, H, D), out (N, H, D)."""
    kv = KVView(*view)
    pool_k, pool_v = kv.k[layer], kv.v[layer]
    _store(qkv, pool_k, pool_v, kv.slots)
    single = 0                                                       # rows of one token
    while single < len(kv.counts) and kv.counts[single] == 1:
        single += 1
    if single:
        _attend_one(qkv[:single], pool_k, pool_v, kv.page_ids, kv.stored, kv.page_size, scale, out[:single])
    first = single
    for row in range(single, len(kv.counts)):
        end = first + kv.counts[row]
        _attend_many(qkv[first:end], pool_k, pool_v, kv.page_ids[row], kv.stored[row], kv.page_size, scale,
                     out[first:end])
        first = end


def _block(x, weights, view, layer, scale, workspace):
    """A whole block, in place, over the pages of a KVView. x (N, C); weights: the fields of BlockWeights.

    workspace: memory for what lies between the operators, N * (5C + inner) numbers.
    """
    ln_1, c_attn, attn_c_proj, ln_2, c_fc, mlp_c_proj = weights
    (N, C), H, inner = x.shape, KVView(*view).k.shape[1], Product(*c_fc).weight.shape[0]
    y = workspace[:N * C].reshape(N, C)
    attended = workspace[N * C:2 * N * C]
    qkv = workspace[2 * N * C:5 * N * C]
    h = workspace[5 * N * C:N * (5 * C + inner)].reshape(N, inner)
    _begin(x, ln_1, c_attn, y, qkv.reshape(N, 3 * C))
    _attend(qkv.reshape(N, 3, H, C // H), view, layer, scale, attended.reshape(N, H, C // H))
    _end(x, attended.reshape(N, C), attn_c_proj, ln_2, c_fc, mlp_c_proj, y, h)


# ---------------------------------------------------------------------------------------------------
# Compiling them

@functools.cache
def cpu_kernels() -> SimpleNamespace | None:
    """The kernels that Python calls, compiled: project, begin, end, attend, block. None where numba is missing, or told
    not to compile.

    They need no compiler on the machine and are kept in __pycache__. Activations, biases and LayerNorms are float32;
    weights as `as_array` gives them.
    """
    try:
        import numba
    except ImportError:
        return None
    if numba.config.DISABLE_JIT:
        return None
    compiled = compile_kernels(numba)
    lock = threading.Lock()  # not every threading layer of numba lets two threads launch at once

    def on_torchs_threads(kernel):
        def launch(*args):
            with lock:
                numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))  # of this thread
                kernel(*(x.numpy() if isinstance(x, Tensor) else x for x in args))
        return launch

    return SimpleNamespace(**{kernel.__name__[1:]: on_torchs_threads(compiled[kernel.__name__])
                              for kernel in (_project, _begin, _end, _attend, _block)})


def compile_kernels(numba: types.ModuleType) -> dict[str, Any]:
    """This module's names, with the kernels as numba compiles them at their first call: bound to a copy of the names,
    since numba would keep no kernel that closes over another."""
    scope = globals() | {"prange": numba.prange} | Instructions().bound()
    # Sums may be reordered (for SIMD), but NaN and infinity keep their meaning, unlike under fastmath=True.
    options = dict(error_model="numpy", fastmath={"reassoc", "contract", "nsz"}, nogil=True)

    def add(kernel, **more):
        kernel = types.FunctionType(kernel.__code__, scope, kernel.__name__)
        try:
            scope[kernel.__name__] = numba.njit(cache=True, **options, **more)(kernel)
        except RuntimeError:  # no folder to keep it in
            scope[kernel.__name__] = numba.njit(**options, **more)(kernel)

    for kernel in (aligned_empty, _exp, _gelu, _tiles, _finish, _outer_products, _slot, _load_keys, _soften,
                   _attend_block, _store):
        add(kernel)
    for kernel in _rounded, _scaled, _multiply, _normalise, _attend_one, _attend_many:
        add(kernel, parallel=True)
    choose_narrowing(scope["_rounded"], scope["_scaled"])
    for kernel in _project, _begin, _end, _attend, _block:
        add(kernel)
    return scope


def choose_narrowing(rounded: Callable, scaled: Callable) -> None:
    """Tells numba which of the two `_narrowed` is, by the dtype that is asked for."""
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
def processor_features() -> frozenset[str]:
    """Names of what the processor can do, as LLVM calls them; none where numba is told to compile for another."""
    import llvmlite.binding
    import numba

    if numba.config.CPU_NAME:
        return frozenset()
    return frozenset(name for name, has in llvmlite.binding.get_host_cpu_features().items() if has)


def activations_like(weight: Tensor) -> np.ndarray:
    """An empty array of the dtype in which activations are multiplied by this weight. float32 is exact; bfloat16 and
    whole numbers of 16 bits are what the processor multiplies by weights of 16 and of 8 bits."""
    native = {torch.bfloat16: ("avx512bf16", np.uint16), torch.int8: ("avx512vnni", np.int16)}
    feature, dtype = native.get(weight.dtype, (None, None))
    has = cpu_kernels() is not None and feature in processor_features()
    return np.empty(0, dtype if has else np.float32)


class Flavour(NamedTuple):
    """How two dtypes are multiplied."""

    step: int            # numbers at a time
    total: Any           # LLVM's type of a sum
    ready: Callable      # (builder, weights) -> as they are multiplied
    dot: Callable        # (builder, totals, activations, weights) -> totals


class Instructions:
    """What the stubs' bodies above say, in LLVM's terms for the processor at hand.

    A tile holds its sums in vector registers: ROWS rows times OUTS outputs, `lanes` float32 each. 32 registers of 16
    lanes (AVX-512) hold 4 times 4 and what is multiplied; 16 of 8 (AVX2, or as good as that) hold 4 times 2.
    """

    def __init__(self):
        import llvmlite.binding
        from llvmlite import ir
        from numba import types

        llvmlite.binding.initialize_native_asmparser()
        self.ir = ir
        self.types = types
        wide = "avx512f" in processor_features()
        self.lanes, self.rows, self.outs = (16, 4, 4) if wide else (8, 4, 2)
        self.i8, self.i16, self.i32, self.i64 = map(ir.IntType, (8, 16, 32, 64))
        self.f32 = ir.FloatType()
        self.lane_halves = self._lane_halves()

    def bound(self) -> dict[str, Any]:
        """The stubs' names -> numba intrinsics, and the shape of a tile."""
        from numba.extending import intrinsic

        types = self.types

        @intrinsic
        def widen(typing_context, number):
            return types.float32(number), self._widen

        @intrinsic
        def as_stored(typing_context, number, array):
            return array.dtype(number, array), self._as_stored

        @intrinsic
        def as_float(typing_context, bits):
            return types.float32(bits), lambda context, builder, signature, args: builder.bitcast(args[0], self.f32)

        @intrinsic
        def fetch(typing_context, array, head, slot, d):
            return types.void(array, head, slot, d), self._fetch

        @intrinsic(prefer_literal=True)
        def tile(typing_context, rows, outs, x, row, weight, o, start, length, sums, at, column, add, ahead, fetch):
            return types.void(rows, outs, x, row, weight, o, start, length, sums, at, column, add, ahead,
                              fetch), self._tile

        @intrinsic(prefer_literal=True)
        def outer(typing_context, rows, x, row, weight, column, out, add):
            return types.void(rows, x, row, weight, column, out, add), self._outer

        return {"_widen": widen, "_as": as_stored, "_as_float": as_float, "_fetch": fetch, "_tile": tile,
                "_outer": outer, "ROWS": self.rows, "OUTS": self.outs, "COLUMNS": self.outs * self.lanes}

    # --- vectors

    def _vector(self, kind, count=None):
        return self.ir.VectorType(kind, count or self.lanes)

    def _shaped(self, kind, like):
        """kind, or a vector of it where `like` is one."""
        return self._vector(kind, like.count) if isinstance(like, self.ir.VectorType) else kind

    def _constant(self, kind, value):
        return self.ir.Constant(kind, [value] * kind.count if isinstance(kind, self.ir.VectorType) else value)

    # --- numbers: see _widen and _as

    def _widened(self, builder, bits, kind):
        types, as_float = self.types, self._shaped(self.f32, bits.type)
        if kind == types.float32:
            return bits
        if kind == types.int8:
            return builder.sitofp(bits, as_float)
        if kind == types.int16:
            return builder.fpext(builder.bitcast(bits, self._shaped(self.ir.HalfType(), bits.type)), as_float)
        as_int = self._shaped(self.i32, bits.type)
        return builder.bitcast(builder.shl(builder.zext(bits, as_int), self._constant(as_int, 16)), as_float)

    def _widen(self, context, builder, signature, args):
        return self._widened(builder, args[0], signature.args[0])

    def _as_stored(self, context, builder, signature, args):
        number, kind = args[0], signature.args[1].dtype
        if kind == self.types.float32:
            return number
        if kind == self.types.int16:
            return builder.bitcast(builder.fptrunc(number, self.ir.HalfType()), self.i16)
        bits = builder.bitcast(number, self.i32)
        sixteen, one, half = self.i32(16), self.i32(1), self.i32(0x7fff)
        odd = builder.and_(builder.lshr(bits, sixteen), one)         # half of the last bit kept; a tie becomes even
        nearest = builder.lshr(builder.add(builder.add(bits, half), odd), sixteen)
        is_nan = builder.fcmp_unordered("uno", number, number)
        return builder.trunc(builder.select(is_nan, self.i32(0x7fc0), nearest), self.i16)

    # --- memory

    def _address(self, context, builder, kind, array, index):
        """The address of an element of a numba array."""
        from numba.core import cgutils

        array = context.make_array(kind)(context, builder, array)
        return cgutils.get_item_pointer(context, builder, kind, array, index)

    def _row_addresses(self, context, builder, kind, array, row, column, count):
        return [self._address(context, builder, kind, array, [builder.add(row, self.i64(n)), column])
                for n in range(count)]

    def _integers(self, context, builder, signature, args, places):
        """The arguments at these places as 64-bit integers."""
        return [context.cast(builder, args[n], signature.args[n], self.types.intp) for n in places]

    def _prefetch(self, builder, address):
        kind = self.ir.FunctionType(self.ir.VoidType(), [address.type, self.i32, self.i32, self.i32])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [address.type], kind)
        builder.call(prefetch, [address, self.i32(0), self.i32(3), self.i32(1)])       # to read, into all caches, data

    def _fetch(self, context, builder, signature, args):
        index = self._integers(context, builder, signature, args, range(1, 4))
        address = self._address(context, builder, signature.args[0], args[0], index)
        self._prefetch(builder, builder.bitcast(address, self.i8.as_pointer()))
        return context.get_dummy_value()

    def _load(self, builder, address, count):
        """`count` numbers of what address points to."""
        value = builder.load(builder.bitcast(address, self._vector(address.type.pointee, count).as_pointer()))
        value.align = 1
        return value

    def _load_part(self, builder, address, count, part):
        """The first `part` of them, and zeros: what lies behind may belong to somebody else."""
        from numba.core import cgutils

        kind = self._vector(address.type.pointee, count)
        lane = self.ir.Constant(self._vector(self.i16, count), list(range(count)))
        last = builder.insert_element(lane, builder.trunc(part, self.i16), self.i32(0))
        first = self._constant(self._vector(self.i32, count), 0)
        mask = builder.icmp_unsigned("<", lane, builder.shuffle_vector(last, last, first))
        element = {self.f32: "f32", self.i16: "i16", self.i8: "i8"}[address.type.pointee]
        load = cgutils.get_or_insert_function(
            builder.module, self.ir.FunctionType(kind, [kind.as_pointer(), self.i32, mask.type, kind]),
            f"llvm.masked.load.v{count}{element}.p0")
        return builder.call(load, [builder.bitcast(address, kind.as_pointer()), self.i32(1), mask,
                                   self.ir.Constant(kind, None)])

    # --- products and sums

    def _flavour(self, x, weight) -> Flavour:
        """By numba's types of activations and weights."""
        types, lanes = self.types, self.lanes
        if (x, weight) == (types.uint16, types.uint16):
            return Flavour(2 * lanes, self.f32, lambda builder, w: w, self._assembly("vdpbf16ps"))
        if (x, weight) == (types.int16, types.int8):
            pairs = self._vector(self.i16, 2 * lanes)
            return Flavour(2 * lanes, self.i32, lambda builder, w: builder.sext(w, pairs), self._assembly("vpdpwssd"))
        return Flavour(lanes, self.f32, lambda builder, w: self._widened(builder, w, weight), self._fused)

    def _assembly(self, instruction):
        """An instruction that adds the products of pairs of 16 bits to a total of 32."""
        pairs = self._vector(self.i32)

        def dot(builder, total, x, w):
            kind = self.ir.FunctionType(total.type, [total.type, pairs, pairs])
            code = self.ir.InlineAsm(kind, instruction + " $3, $2, $0", "=v,0,v,v")
            return builder.call(code, [total, builder.bitcast(x, pairs), builder.bitcast(w, pairs)])
        return dot

    def _fused(self, builder, total, x, w):
        """total + x * w, rounded once."""
        return builder.fadd(total, builder.fmul(x, w, flags=("contract",)), flags=("contract",))

    def _lane_halves(self):
        """Which of two vectors' lanes are added to which others, step by step: neighbours, first in groups of four,
        which processors shuffle fastest, then whole groups."""
        lanes = self.lanes
        in_fours = [[at + 4 * group + n for group in range(lanes // 4) for at in (0, lanes) for n in (odd, odd + 2)]
                    for odd in (0, 1)]
        of_fours = [[4 * group + n for group in range(odd, lanes // 2, 2) for n in range(4)] for odd in (0, 1)]
        steps = [in_fours] * 2 + [of_fours] * (lanes // 4).bit_length()
        return [[self.ir.Constant(self._vector(self.i32), half) for half in step]
                for step in steps[:lanes.bit_length() - 1]]

    def _summed(self, builder, totals):
        """The sums of the lanes of each vector, in the lanes of one."""
        add = builder.add if totals[0].type.element == self.i32 else builder.fadd
        for first, second in self.lane_halves:
            pairs = list(zip(totals[::2], totals[1::2])) or [(totals[0], totals[0])]
            totals = [add(builder.shuffle_vector(*pair, first), builder.shuffle_vector(*pair, second))
                      for pair in pairs]
        whole = totals[0].type.element == self.i32
        return builder.sitofp(totals[0], self._vector(self.f32)) if whole else totals[0]

    # --- the two loops

    def _tile(self, context, builder, signature, args):
        """See the function `_tile`: a loop over whole vectors, what is left of the row, and the sums."""
        from numba.core import cgutils

        kinds = signature.args
        n_rows, n_outs = (kind.literal_value for kind in kinds[:2])
        row, o, start, length, at, column, ahead, fetch = self._integers(
            context, builder, signature, args, (3, 5, 6, 7, 9, 10, 12, 13))
        flavour = self._flavour(kinds[2].dtype, kinds[4].dtype)
        xs = self._row_addresses(context, builder, kinds[2], args[2], row, start, n_rows)
        weights = self._row_addresses(context, builder, kinds[4], args[4], o, start, n_outs)
        places = self._row_addresses(context, builder, kinds[8], args[8], at, column, n_rows)
        size = context.get_abi_sizeof(context.get_data_type(kinds[4].dtype))
        zero = self.ir.Constant(self._vector(flavour.total), None)
        totals = [cgutils.alloca_once_value(builder, zero) for _ in range(n_rows * n_outs)]

        whole = builder.udiv(length, self.i64(flavour.step))
        with cgutils.for_range(builder, whole) as loop:
            index = builder.mul(loop.index, self.i64(flavour.step))
            self._fetch_ahead(builder, weights[0], ahead, index, fetch, flavour.step, size)
            self._add_up(builder, flavour, xs, weights, totals, index)
        index = builder.mul(whole, self.i64(flavour.step))
        rest = builder.sub(length, index)
        with builder.if_then(builder.icmp_signed(">", rest, self.i64(0)), likely=False):
            self._add_up(builder, flavour, xs, weights, totals, index, rest)
        found = self._summed(builder, [builder.load(place) for place in totals])
        for r, place in enumerate(places):
            self._keep(builder, found, range(r * n_outs, (r + 1) * n_outs), place, args[11])
        return context.get_dummy_value()

    def _fetch_ahead(self, builder, address, ahead, index, fetch, step, size):
        """Ask for `fetch` vectors of weights, `ahead` bytes behind these; one after another, as memory likes it."""
        from numba.core import cgutils

        first = builder.bitcast(address, self.i8.as_pointer())
        line = builder.add(ahead, builder.mul(builder.mul(index, fetch), self.i64(size)))
        with cgutils.for_range(builder, fetch) as nth:
            further = builder.mul(nth.index, self.i64(step * size))
            self._prefetch(builder, builder.gep(first, [builder.add(line, further)]))

    def _add_up(self, builder, flavour, xs, weights, totals, index, part=None):
        """Add the products at `index` and on, a vector of them or the first `part`, to all totals."""
        def load(address):
            address = builder.gep(address, [index])
            if part is None:
                return self._load(builder, address, flavour.step)
            return self._load_part(builder, address, flavour.step, part)

        ws = [flavour.ready(builder, load(address)) for address in weights]
        for r, address in enumerate(xs):
            values = load(address)
            for w, place in zip(ws, totals[r * len(ws):]):
                builder.store(flavour.dot(builder, builder.load(place), values, w), place)

    def _keep(self, builder, found, lanes, place, add):
        """Store some lanes at `place`, or add them to what is there."""
        mask = self.ir.Constant(self._vector(self.i32, len(lanes)), list(lanes))
        own = builder.shuffle_vector(found, found, mask)
        before = self._load(builder, place, len(lanes))
        own = builder.fadd(own, builder.select(add, before, self.ir.Constant(before.type, None)))
        builder.store(own, builder.bitcast(place, own.type.as_pointer())).align = 4

    def _outer(self, context, builder, signature, args):
        """See the function `_outer`: each number of x is spread over a vector and multiplied by COLUMNS of weight."""
        from numba.core import cgutils

        kinds = signature.args
        row, column = self._integers(context, builder, signature, args, (2, 4))
        columns = [builder.add(column, self.i64(n * self.lanes)) for n in range(self.outs)]
        rows = [builder.add(row, self.i64(r)) for r in range(kinds[0].literal_value)]
        K = cgutils.unpack_tuple(builder, context.make_array(kinds[3])(context, builder, args[3]).shape)[0]
        zero = self.ir.Constant(self._vector(self.f32), None)
        places = [[self._address(context, builder, kinds[5], args[5], [r, c]) for c in columns] for r in rows]
        totals = [[cgutils.alloca_once_value(
            builder, builder.select(args[6], self._load(builder, place, self.lanes), zero)) for place in own]
            for own in places]
        with cgutils.for_range(builder, K) as loop:
            ws = [self._load(builder, self._address(context, builder, kinds[3], args[3], [loop.index, c]), self.lanes)
                  for c in columns]
            for r, own in zip(rows, totals):
                number = builder.load(self._address(context, builder, kinds[1], args[1], [r, loop.index]))
                spread = self._spread(builder, number)
                for w, total in zip(ws, own):
                    builder.store(self._fused(builder, builder.load(total), spread, w), total)
        for place, total in zip(itertools.chain(*places), itertools.chain(*totals)):
            value = builder.load(total)
            builder.store(value, builder.bitcast(place, value.type.as_pointer())).align = 4
        return context.get_dummy_value()

    def _spread(self, builder, number):
        """A number in all lanes."""
        lane = builder.insert_element(self.ir.Constant(self._vector(self.f32), self.ir.Undefined), number, self.i32(0))
        return builder.shuffle_vector(lane, lane, self._constant(self._vector(self.i32), 0))


def physical_cores() -> int | None:
    """How many cores this process may use, or None where the system does not tell. Two threads of one core share its
    arithmetic and its caches: products gain nothing from the second, and wait for it."""
    with contextlib.suppress(OSError, AttributeError):
        topology = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
        return len({Path(topology.format(cpu)).read_text() for cpu in os.sched_getaffinity(0)})


def use_threads(count: int | None = None) -> None:
    """Products run on `count` threads; by default on as many as there are physical cores."""
    count = count or physical_cores()
    if count:
        torch.set_num_threads(count)


def as_array(tensor: Tensor) -> np.ndarray:
    """A tensor on the CPU as the kernels take it: 16-bit floats as the integers of their bits. The same memory, but for
    one that is not contiguous."""
    kind = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}.get(tensor.dtype, tensor.dtype)
    return tensor.detach().contiguous().view(kind).numpy()


# ---------------------------------------------------------------------------------------------------
# What the kernels replace in the model; see engine.Backend. Weights are packed when they have come or moved, and again
# where somebody has put others in their place: each pass looks whether they are where they were. A module whose weights
# no kernel takes (another device, float64) runs as its plain class does.

KERNEL_DTYPES = {torch.float32, torch.bfloat16, torch.float16, torch.int8}


def kernels_apply(x: Tensor, rows: int) -> bool:
    """Whether the kernels are the fastest for so many rows of activations x, and take them."""
    return x.is_cpu and x.dtype == torch.float32 and (rows <= MANY_ROWS or "avx2" in processor_features())


@functools.cache
def onednn_multiplies(dtype: torch.dtype) -> bool:
    """Whether this build and processor have oneDNN's linear for `dtype`; tried once, on a small product."""
    if not torch.backends.mkldnn.is_available():
        return False
    one = torch.ones(8, 8, dtype=dtype)
    try:
        torch.ops.mkldnn._linear_pointwise(one, one, None, "none", [], "")
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return True


class OneDnnLinear(engine.Linear):
    """A projection by oneDNN where torch has it, which is faster than the BLAS behind F.linear."""

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in) -> (..., out)."""
        weight = self.float_weight()
        x = x.to(weight.dtype)
        bias = None if self.bias is None else self.bias.to(weight.dtype)
        if x.is_cpu and onednn_multiplies(weight.dtype):
            return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return F.linear(x, weight, bias)

    def float_weight(self) -> Tensor:
        """The weight (out, in) in a dtype that torch multiplies."""
        return self.weight


def origin_of(*modules: nn.Module) -> list:
    """Modules, and where their parameters lie: others than these are other numbers."""
    found = [tensor.data_ptr() for module in modules
             for tensor in module._parameters.values() if tensor is not None]          # faster than by attribute
    found += modules
    return found


class TiledLinear(OneDnnLinear):
    """A projection by our kernel, whose result is float32."""

    product: tuple | None = None                                     # the fields of a Product
    origin: list | None = None                                       # of the product

    def scales(self) -> Tensor:
        """By what each row of the weight is multiplied: (out) float32."""
        return torch.ones(self.weight.shape[0])

    def pack(self) -> None:
        """Take the weights as they are now."""
        self.origin = origin_of(self)
        if not self.weight.is_cpu or self.weight.dtype not in KERNEL_DTYPES:
            self.product = None
            return
        bias = torch.zeros(self.weight.shape[0]) if self.bias is None else self.bias.float()
        self.product = tuple(Product(as_array(self.weight), as_array(self.scales()), as_array(bias),
                                     activations_like(self.weight)))

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in) -> (..., out)."""
        if self.product is not None and self.origin != origin_of(self):
            self.pack()
        n_out, n_in = self.weight.shape
        rows = x.numel() // n_in
        if self.product is None or not kernels_apply(x, rows):
            return super().forward(x)
        out = torch.empty(rows, n_out)
        cpu_kernels().project(x.reshape(rows, n_in).contiguous(), self.product, out, False, False)
        return out.view(*x.shape[:-1], n_out)


class BlockWeights(NamedTuple):
    """The weights of a block, each the fields of a Norm or a Product."""

    ln_1: tuple
    c_attn: tuple
    attn_c_proj: tuple
    ln_2: tuple
    c_fc: tuple
    mlp_c_proj: tuple


class TiledBlock(engine.Block):
    """A block in one call of our kernels where they reach keys and values, else in one before and one behind."""

    weights: tuple | None = None                                     # the fields of BlockWeights
    origin: list | None = None                                       # of the weights

    def origin_now(self) -> list:
        """Where all weights of the block lie, and what else decides its numbers."""
        modules = self._modules
        ln_1, ln_2, attn, mlp = modules["ln_1"], modules["ln_2"], modules["attn"], modules["mlp"]
        of_attn, of_mlp = attn._modules, mlp._modules
        found = origin_of(ln_1, of_attn["c_attn"], of_attn["c_proj"], ln_2, of_mlp["c_fc"], of_mlp["c_proj"])
        found += ln_1.eps, ln_2.eps, attn.scale, mlp.act
        return found

    def pack(self) -> None:
        """Take the weights as they are now; none where the kernels don't know the activation function, or a module."""
        attn, mlp = self.attn, self.mlp
        linears = attn.c_attn, attn.c_proj, mlp.c_fc, mlp.c_proj
        self.weights = None
        if mlp.act is not ACTIVATIONS["gelu_new"] or not all(isinstance(linear, TiledLinear) for linear in linears):
            return
        for linear in linears:
            linear.pack()
        self.origin = self.origin_now()
        if any(linear.product is None for linear in linears):
            return
        c_attn, attn_c_proj, c_fc, mlp_c_proj = (linear.product for linear in linears)
        ln_1, ln_2 = (tuple(Norm(as_array(norm.weight.float()), as_array(norm.bias.float()), np.float32(norm.eps)))
                      for norm in (self.ln_1, self.ln_2))
        self.weights = tuple(BlockWeights(ln_1, c_attn, attn_c_proj, ln_2, c_fc, mlp_c_proj))
        self.inner = mlp.c_fc.weight.shape[0]
        self.layer = attn.layer
        self.scale = np.float32(attn.scale)

    def forward(self, x: Tensor, kv: engine.KV) -> Tensor:
        """x (B, T, C), which is written over -> what follows it (B, T, C)."""
        B, T, C = x.shape
        if self.weights is None or not kernels_apply(x, B * T):
            return super().forward(x, kv)
        if self.origin != self.origin_now():
            self.pack()
            return self.forward(x, kv)
        x = x.contiguous()
        rows = x.view(B * T, C)
        if isinstance(kv, TiledKV):
            workspace = kv.cache.workspace(B * T * (5 * C + self.inner))
            cpu_kernels().block(rows, self.weights, kv.view, self.layer, self.scale, workspace)
        else:
            ln_1, c_attn, *rest = self.weights
            y = torch.empty(B * T, C)
            qkv = torch.empty(B, T, 3 * C)
            h = torch.empty(B * T, self.inner)
            cpu_kernels().begin(rows, ln_1, c_attn, y, qkv.view(B * T, 3 * C))
            attended = self.attn.attend(qkv, kv).reshape(B * T, C).contiguous()
            cpu_kernels().end(rows, attended, *rest, y, h)
        return x


class TiledCache(engine.PagedKVCache):
    """A pool whose pages the kernels read, in the weights' own 16 bits: bfloat16 beside int8."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.arrays = None                                           # keys and values as the kernels take them
        if self.k.is_cpu and self.k.dtype in KERNEL_DTYPES:
            self.arrays = as_array(self.k), as_array(self.v)
        self.memory = np.empty(0, np.float32)

    @staticmethod
    def dtype_beside(weight: Tensor) -> torch.dtype:
        """The weights' where the kernels read it, bfloat16 beside int8."""
        if not weight.is_cpu or weight.dtype not in KERNEL_DTYPES:
            return engine.PagedKVCache.dtype_beside(weight)
        return torch.bfloat16 if weight.dtype == torch.int8 else weight.dtype

    def new_kv(self, tables: list[PageTable] | None = None, counts: list[int] | None = None) -> engine.PagedKV:
        """A place for some sequences of this pool; see engine.PagedKV."""
        return TiledKV(self, tables, counts) if self.arrays else super().new_kv(tables, counts)

    def workspace(self, size: int) -> np.ndarray:
        """Memory for `size` numbers between a block's operators, kept: taken anew, it would be zeroed page by page."""
        memory = self.memory                                         # another thread may replace it
        if memory.size < size:
            memory = aligned_empty(1, size, np.empty(0, np.float32))[0]
            self.memory = memory
        return memory


class TiledKV(engine.PagedKV):
    """Some sequences of a pool, stored and attended by our kernels over the page table."""

    def prepare(self, plan: RowPlan) -> Tensor:
        """The plan as the kernels take it. -> its positions (N) as a tensor."""
        k, v = self.cache.arrays
        self.view = tuple(KVView(k, v, plan.slots, plan.page_ids, plan.stored, plan.counts, self.cache.page_size))
        return torch.from_numpy(plan.positions)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """One call for all rows."""
        B, H, T, D = q.shape
        qkv = torch.stack([x.transpose(1, 2).reshape(B * T, H, D) for x in (q, k, v)], 1).float()  # rows end to end
        out = torch.empty(B * T, H, D)
        cpu_kernels().attend(qkv, self.view, layer, np.float32(scale), out)
        return out.view(B, T, H, D).transpose(1, 2).to(q.dtype)


def pack(model: engine.GPT2) -> None:
    """Take all weights as they are now."""
    for module in model.modules():
        if isinstance(module, TiledLinear | TiledBlock):
            module.pack()


TILED = engine.Backend(linear=TiledLinear, block=TiledBlock, paged_cache=TiledCache, pack=pack)
ONEDNN = engine.Backend(linear=OneDnnLinear)


def cpu_backend() -> engine.Backend:
    """The kernels' backend, and where numba is missing oneDNN's."""
    return ONEDNN if cpu_kernels() is None else TILED


# ---------------------------------------------------------------------------------------------------
# int8 weights: modules that take the place of the model's own, which knows nothing of them.

class Int8Linear(TiledLinear):
    """A projection whose weight (out, in) is int8, times scale (out), one for each output channel."""

    def __init__(self, n_in: int, n_out: int, bias: bool = True):
        super().__init__(n_in, n_out, bias)
        self.weight = nn.Parameter(torch.empty(n_out, n_in, dtype=torch.int8), requires_grad=False)
        self.register_buffer("scale", torch.empty(n_out))

    @classmethod
    def of(cls, linear: engine.Linear) -> "Int8Linear":
        """A projection, rounded: symmetric, an error of at most 1/254 of a channel's largest weight."""
        n_out, n_in = linear.weight.shape
        with torch.device("meta"):
            made = cls(n_in, n_out, bias=linear.bias is not None)
        exact = linear.weight.detach().float()
        made.scale = exact.abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny) / 127
        rounded = empty_weight(exact.shape, torch.int8, exact.device).copy_((exact / made.scale[:, None]).round())
        made.weight = nn.Parameter(rounded, requires_grad=False)
        made.bias = linear.bias
        return made

    def scales(self) -> Tensor:
        """One for each output channel: (out) float32."""
        return self.scale.float()

    def float_weight(self) -> Tensor:
        """The weight that the rounded one stands for (out, in), float32."""
        return self.weight * self.scale[:, None]


class Int8Embedding(nn.Module):
    """The embedding that is tied to a head of int8: ids (...) -> (..., C) float32."""

    def __init__(self, head: Int8Linear):
        super().__init__()
        self.weight = head.weight
        self.register_buffer("scale", head.scale)

    def forward(self, ids: Tensor) -> Tensor:
        """ids (...) -> (..., C)."""
        return F.embedding(ids, self.weight) * self.scale[ids][..., None]


def quantize(model: engine.GPT2) -> None:
    """All projections of a model to int8, in place, the head and the embedding tied to it included. A model that is
    int8 already stays as it is."""
    if isinstance(model.lm_head, Int8Linear):
        return
    tied = model.lm_head.weight is model.wte.weight
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, engine.Linear):
                setattr(parent, name, Int8Linear.of(child))
    if tied:
        model.wte = Int8Embedding(model.lm_head)
    model.swaps = (*model.swaps, quantize)
    model.backend.pack(model)
