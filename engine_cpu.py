"""CPU kernels: the counterpart of the Triton kernels, in plain Python that numba compiles on the spot.

A decode step reads every weight once for a few rows, so it is a race of bytes: torch hands a single row to one
thread. A prompt is a race of operations, which a processor does fastest in the weights' own dtype. Both are won by
a product in tiles. Up to FEW_ROWS, ROWS rows times OUTS outputs are summed in registers, 8 or 16 numbers of a row of
weights at a time, while those of the next tile are fetched; a sum is always added up in the same order, so a row's
result does not depend on its neighbours. Of more rows, the weights of a few outputs are laid side by side first, and
each activation is multiplied by a register of them. A block of the model runs in one call.
"""

import contextlib
import functools
import hashlib
import math
import os
import threading
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import engine
import instructions
from checkpoint import ACTIVATIONS, aligned_empty
from instructions import Instructions, processor_features
from scheduler import PageTable, RowPlan

BLOCK = 64       # outputs that a task computes
FEW_ROWS = 64    # up to which a tile takes weights as they lie, row by row; beyond them a panel pays
SHARED_ROWS = 4  # from which threads share what is done to each row: to wake them takes longer than a row
MANY_AT_ONCE = 512  # rows of which a task multiplies a panel, beyond FEW_ROWS
QUERY_BLOCK = 128  # queries of a prompt that a task attends,
KEY_BLOCK = 64     # and over how many keys at a time
# Beyond so many rows torch multiplies on processors not known to have AVX2: some have a unit for it that it alone uses.
# On others ours are ahead at any number, since a block is one call and its products run near the arithmetic's limit.
MANY_ROWS = 64


class Choice(NamedTuple):
    """What is fastest on one processor and slower on the next. No result depends on it; see tuning.py."""

    ahead: int = 0           # bytes by which weights are fetched before they are used, where a row is by itself
    shares: bool = True      # whether several rows fetch the weights of the next tile


class Product(NamedTuple):
    """A projection as the kernels take it, see `as_array`."""

    weight: np.ndarray       # (out, in)
    scale: np.ndarray        # (out) float32: of int8 rows, else 1
    bias: np.ndarray         # (out) float32
    activations: np.ndarray  # empty, of the dtype in which activations are multiplied by this weight
    choice: tuple            # the fields of a Choice


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
# Of a tile of weights as they lie: ROWS rows by OUTS outputs; of one that spreads activations: OUTER_ROWS by COLUMNS.
# LANES are a register's. Compiled: as the processor's registers allow, see `Instructions`.
ROWS, OUTS, OUTER_ROWS, COLUMNS, LANES = 4, 4, 6, 64, 16


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
    """Activations x (N, K) as they are multiplied, in the dtype of `like`, and a factor for each row: x itself, or what
    `_narrow` makes of it."""
    if like.dtype == np.float32:
        return x, np.ones(x.shape[0], np.float32)
    return _narrow(x, like)


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


def _outer(rows, x, row, panel, column, steps, out, at, add):
    """out[at + r, column + c] = (or +=, if add) the sum over `steps` s of x[row + r, s] times panel[s, column + c], for
    `rows` r (a constant) and COLUMNS c. Of 16 bits, a step is two numbers: see `_pack`."""
    per = 4 // panel.itemsize
    whole = panel.dtype == np.int16
    for r in range(rows):
        for c in range(column, column + COLUMNS):
            total = 0 if whole else np.float32(0)
            for k in range(steps * per):
                a, w = x[row + r, k], panel[k // per, c * per + k % per]
                total += int(a) * int(w) if whole else _widen(a) * _widen(w)
            out[at + r, c] = np.float32(total) + (out[at + r, c] if add else ZERO)


def _square(weight, o, last, k, panel, step, column):
    """Part of `_pack`: a square of LANES outputs (`last` in place of those beyond it) by LANES steps, zeros beyond the
    end of a row."""
    per = 4 // panel.itemsize
    for n in range(LANES):
        for i in range(LANES * per):
            inside = k + i < weight.shape[1]
            number = weight[min(o + n, last), min(k + i, weight.shape[1] - 1)] if inside else weight.dtype.type(0)
            panel[step + i // per, (column + n) * per + i % per] = (
                _widen(number) if panel.dtype == np.float32 else number)


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


def _round_row(x, y, factors, row):
    """y[row] = x[row] as bfloat16."""
    for k in range(x.shape[1]):
        y[row, k] = _as(x[row, k], y)
    factors[row] = ONE


def _scale_row(x, y, factors, row):
    """y[row] = x[row] as whole numbers of 16 bits, so large that the sum of K products with 8-bit weights stays below
    2 ** 31; factors[row] undoes it."""
    K = x.shape[1]
    limit = np.float32(min(32767, 2 ** 24 // K - 1))
    largest = np.float32(1e-30)
    nothing = ZERO
    for k in range(K):
        largest = max(largest, abs(x[row, k]))
        nothing += x[row, k] * ZERO                                  # NaN, if one of them is
    inverse = limit / largest
    for k in range(K):
        y[row, k] = np.int16(np.rint(x[row, k] * inverse))
    factors[row] = largest / limit + nothing


def _narrow_row(x, y, factors, row):
    """The one of the two that y's dtype asks for."""
    if y.dtype == np.uint16:
        _round_row(x, y, factors, row)
    else:
        _scale_row(x, y, factors, row)


def _narrow(x, like):
    """x (N, K) in the dtype of `like`, an even number of them a row, and the factors (N) that undo it."""
    N, K = x.shape
    y = aligned_empty(N, K + K % 2, like)
    factors = np.empty(N, np.float32)
    if K % 2:                                                        # a pair's second, where there is none
        y[:, K] = 0
    if N < SHARED_ROWS:
        for row in range(N):
            _narrow_row(x, y, factors, row)
    else:
        for row in prange(N):
            _narrow_row(x, y, factors, row)
    return y, factors


def _tiles(x, rows, weight, o, outs, choice, sums):
    """sums[:rows, :outs] = x[:rows] times weight[o:o + outs] transposed."""
    K = weight.shape[1]
    row_bytes = K * weight.itemsize
    ahead_alone, shares = choice
    part = max(1, OUTS // max(1, rows // ROWS))
    i = 0
    # Several rows: OUTS outputs at a time. The weights of the next outputs are fetched in equal shares, `part` rows
    # of them by each tile: all at once, they would stop the sums.
    while rows > 1 and i + OUTS <= outs:
        r = 0
        while r < rows:
            share = r // ROWS * part
            fetch = part if shares and r % ROWS == 0 and share < OUTS else 0
            ahead = (OUTS + share) * row_bytes
            if r + ROWS <= rows:
                _tile(ROWS, OUTS, x, r, weight, o + i, 0, K, sums, r, i, False, ahead, fetch)
                r += ROWS
            else:
                _tile(1, OUTS, x, r, weight, o + i, 0, K, sums, r, i, False, ahead, fetch)
                r += 1
        i += OUTS
    # A row by itself, and what is left of the outputs: one after another, as memory is read fastest.
    while i < outs:
        r = 0
        while r < rows:
            fetch = 1 if ahead_alone and r == 0 else 0
            if r + ROWS <= rows:
                _tile(ROWS, 1, x, r, weight, o + i, 0, K, sums, r, i, False, ahead_alone, fetch)
                r += ROWS
            else:
                _tile(1, 1, x, r, weight, o + i, 0, K, sums, r, i, False, ahead_alone, fetch)
                r += 1
        i += 1


def _finish(sums, factor, scale, bias, out, add, gelu):
    """What follows a product, for some outputs of a row; see `_multiply`."""
    for i in range(out.shape[0]):
        value = sums[i] * (factor * scale[i]) + bias[i]
        sums[i] = value + out[i] if add else value
    for i in range(out.shape[0]):
        out[i] = _gelu(sums[i]) if gelu else sums[i]


def _pack(weight, o, outs, panel):
    """Weights of BLOCK outputs from o, of which there are `outs`, as `_outer` multiplies them: output beside output,
    and of 16 bits two neighbours of a row together. panel (steps, BLOCK, or twice that): so many whole squares."""
    per = 4 // panel.itemsize
    for step in range(0, panel.shape[0], LANES):
        for column in range(0, BLOCK, LANES):
            _square(weight, o + column, o + outs - 1, step * per, panel, step, column)


def _multiply_few(x, factors, weight, scale, bias, choice, out, add, gelu):
    """out (N, out) = x (N, K) times weight (out, K) transposed, times factors (N) and scale (out), plus bias (out);
    its gelu, if so; plus what out was, if add. For N up to FEW_ROWS: memory decides."""
    N = x.shape[0]
    for task in prange((weight.shape[0] + BLOCK - 1) // BLOCK):
        first = task * BLOCK
        outs = min(BLOCK, weight.shape[0] - first)
        sums = np.empty((N, BLOCK), np.float32)
        _tiles(x, N, weight, first, outs, choice, sums)
        for r in range(N):
            _finish(sums[r], factors[r], scale[first:first + outs], bias[first:first + outs],
                    out[r, first:first + outs], add, gelu)


def _multiply_many(x, factors, weight, scale, bias, out, add, gelu):
    """The same for more rows: arithmetic decides. Weights are packed once for all rows (Goto and van de Geijn 2008)."""
    N, K = x.shape[0], weight.shape[1]
    per = 4 // x.itemsize
    steps = (K + per - 1) // per
    parts = (N + MANY_AT_ONCE - 1) // MANY_AT_ONCE
    rows = (N + parts - 1) // parts
    for task in prange((weight.shape[0] + BLOCK - 1) // BLOCK * parts):
        first = task // parts * BLOCK
        outs = min(BLOCK, weight.shape[0] - first)
        panel = aligned_empty((steps + LANES - 1) // LANES * LANES, BLOCK * per, x)
        sums = np.empty((OUTER_ROWS, BLOCK), np.float32)
        _pack(weight, first, outs, panel)
        end = min(N, (task % parts + 1) * rows)
        for row in range(task % parts * rows, end, OUTER_ROWS):
            start = min(row, end - OUTER_ROWS)                       # the last tile repeats some rows
            for column in range(0, outs, COLUMNS):
                _outer(OUTER_ROWS, x, start, panel, column, steps, sums, 0, False)
            for r in range(row, min(row + OUTER_ROWS, end)):
                _finish(sums[r - start], factors[r], scale[first:first + outs], bias[first:first + outs],
                        out[r, first:first + outs], add, gelu)


# numba reads a plain tuple from Python three times as fast as a named one, which a step of a small model feels. So
# Products, Norms and KVViews come as plain tuples of their fields, and get their names where they are used.

def _project(x, product, out, add, gelu):
    """The product of x by a Product; see `_multiply_few`."""
    p = Product(*product)
    y, factors = _narrowed(x, p.activations)
    if x.shape[0] <= FEW_ROWS:
        _multiply_few(y, factors, p.weight, p.scale, p.bias, p.choice, out, add, gelu)
    else:
        _multiply_many(y, factors, p.weight, p.scale, p.bias, out, add, gelu)


def _normalise_row(x, norm, out, row):
    """LayerNorm of a row."""
    n = Norm(*norm)
    C = x.shape[1]
    mean = square = np.float32(0)
    for c in range(C):
        mean += x[row, c]
    mean /= np.float32(C)
    for c in range(C):
        square += (x[row, c] - mean) * (x[row, c] - mean)
    factor = ONE / np.sqrt(square / np.float32(C) + n.eps)
    for c in range(C):
        out[row, c] = (x[row, c] - mean) * factor * n.weight[c] + n.bias[c]


def _normalise(x, norm, out):
    """LayerNorm of the rows of x (N, C) by a Norm."""
    if x.shape[0] < SHARED_ROWS:
        for row in range(x.shape[0]):
            _normalise_row(x, norm, out, row)
    else:
        for row in prange(x.shape[0]):
            _normalise_row(x, norm, out, row)


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
    """out (N, W) = (or +=, if add) x (N, K) times weight (K, W), all float32; W is a multiple of COLUMNS."""
    N, K = x.shape
    for column in range(0, weight.shape[1], COLUMNS):
        row = 0
        while row < N:
            if row + OUTER_ROWS <= N:
                _outer(OUTER_ROWS, x, row, weight, column, K, out, row, add)
                row += OUTER_ROWS
            else:
                _outer(1, x, row, weight, column, K, out, row, add)
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
    most = numba.config.NUMBA_NUM_THREADS
    told = threading.local()                                         # numba's count of threads is each thread's own

    def on_torchs_threads(kernel):
        def launch(*args):
            threads = torch.get_num_threads()
            with lock:
                if getattr(told, "threads", None) != threads:
                    numba.set_num_threads(min(threads, most))
                    told.threads = threads
                kernel(*[x.numpy() if isinstance(x, Tensor) else x for x in args])
        return launch

    return SimpleNamespace(**{kernel.__name__[1:]: on_torchs_threads(compiled[kernel.__name__])
                              for kernel in (_project, _begin, _end, _attend, _block)})


def compile_kernels(numba: types.ModuleType) -> dict[str, Any]:
    """This module's names, with the kernels as numba compiles them at their first call: bound to a copy of the names,
    since numba would keep no kernel that closes over another."""
    scope = globals() | {"prange": numba.prange} | Instructions().bound()
    # Sums may be reordered (for SIMD), but NaN and infinity keep their meaning, unlike under fastmath=True.
    options = dict(error_model="numpy", fastmath={"reassoc", "contract", "nsz"}, nogil=True)

    inner = dict(no_cpython_wrapper=True, no_cfunc_wrapper=True)     # of what kernels alone call: less to compile

    def add(kernel, **more):
        kernel = types.FunctionType(kernel.__code__, scope, kernel.__name__)
        compiled = numba.njit(**options, **more)(kernel)
        with contextlib.suppress(RuntimeError):                      # no folder to keep it in
            compiled._cache = kept_kernels()(kernel)
        scope[kernel.__name__] = compiled

    for kernel in (aligned_empty, _exp, _gelu, _round_row, _scale_row, _tiles, _finish, _pack, _normalise_row,
                   _outer_products, _slot, _load_keys, _soften, _attend_block, _store):
        add(kernel, **inner)
    choose_narrowing(scope)
    for kernel in _narrow, _multiply_few, _multiply_many, _normalise, _attend_one, _attend_many:
        add(kernel, parallel=True, **inner)
    for kernel in _project, _begin, _end, _attend, _block:
        add(kernel)
    return scope


@functools.cache
def kept_kernels() -> type:
    """The place where numba keeps compiled kernels, by what they depend on: numba asks whether engine_cpu.py changed,
    this one whether the instructions did, too."""
    from numba.core.caching import FunctionCache

    version = hashlib.sha256(Path(instructions.__file__).read_bytes()).hexdigest()

    class KeptKernels(FunctionCache):
        def _index_key(self, sig, codegen):
            return (*super()._index_key(sig, codegen), version)

    return KeptKernels


def choose_narrowing(scope: dict[str, Any]) -> None:
    """Tells numba what `_narrow_row` and `_narrowed` do, by the dtype that is asked for."""
    from numba import types
    from numba.extending import overload

    @overload(_narrow_row)
    def row_of(x, y, factors, row):
        return scope["_round_row" if y.dtype == types.uint16 else "_scale_row"].py_func

    @overload(_narrowed)
    def whole(x, like):
        narrow = scope["_narrow"]
        if like.dtype == types.float32:
            return lambda x, like: (x, np.ones(x.shape[0], np.float32))
        return lambda x, like: narrow(x, like)


def activations_like(weight: Tensor) -> np.ndarray:
    """An empty array of the dtype in which activations are multiplied by this weight. float32 is exact; bfloat16 and
    whole numbers of 16 bits are what the processor multiplies by weights of 16 and of 8 bits."""
    native = {torch.bfloat16: ({"avx512bf16"}, np.uint16),
              torch.int8: ({"avx512vnni", "avx512bw", "avxvnni", "avx2"}, np.int16)}
    features, dtype = native.get(weight.dtype, (set(), None))
    has = cpu_kernels() is not None and features & processor_features()
    return np.empty(0, dtype if has else np.float32)


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

    choice: Choice = Choice()
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
                                     activations_like(self.weight), tuple(self.choice)))

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


def _tune(model: engine.GPT2) -> None:
    """Choose what is fastest for this model on this processor; see tuning.py."""
    import tuning

    tuning.tune(model)


TILED = engine.Backend(linear=TiledLinear, block=TiledBlock, paged_cache=TiledCache, pack=pack, tune=_tune)
ONEDNN = engine.Backend(linear=OneDnnLinear)


def cpu_backend() -> engine.Backend:
    """The kernels' backend, and where numba is missing oneDNN's."""
    return ONEDNN if cpu_kernels() is None else TILED
