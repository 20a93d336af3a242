"""GPT-2 on the GPU: Triton kernels, GPT2Flash, and the GPU benchmarks.

    python engine_cuda.py                            benchmarks (needs a GPU)
    python engine_cuda.py --check                    every kernel against float64, on the GPU
    TRITON_INTERPRET=1 python engine_cuda.py --check the same on the CPU, by Triton's interpreter

Shapes use engine.py's alphabet: B batch, T new tokens, S stored + new, H heads, D head dim, C = H * D, V vocabulary,
P pages, N tokens of all rows end to end. Each kernel is one function below; beside it stands its plain torch twin,
which the tests compare it with and which runs in its place on a machine without a GPU.
"""

import argparse
import functools
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

import engine
from sampling import TokenLogprobs, chosen_and_top
from scheduler import Request, StepResult, StepRow

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
UPCAST = tl.constexpr(INTERPRET)  # the interpreter has no bfloat16 product
LOG2_E = math.log2(math.e)


def uses_kernels(x):
    """Whether Triton runs on this tensor; elsewhere the plain twins do."""
    return x.is_cuda or INTERPRET


def power_of_2(n, least=16):
    return max(least, triton.next_power_of_2(n))


@functools.cache
def has_dependent_launch(device):
    return not INTERPRET and torch.cuda.get_device_capability(device) >= (9, 0)


def early(x):
    """Launch options of a kernel that may start before the one ahead of it has ended (Hopper and later): it fetches
    weights, then waits for what the other computes. That hides most of a launch."""
    return dict(EARLY=True, launch_pdl=True) if x.is_cuda and has_dependent_launch(x.device) else dict(EARLY=False)


@triton.jit
def _wait(EARLY: tl.constexpr):
    """Lets the next kernel start, and waits for the end of the one before; nothing that it writes is read above."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


# ---------------------------------------------------------------------------------------------------
# Flash attention: the scores of a tile live in registers only, never in memory.

@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _visit(acc, l_i, m_i, q, k_ptr, v_ptr, table, position, lo, hi, stride_k, stride_v, scale,
           MASKED: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
           PRECISION: tl.constexpr):
    """Takes the keys lo to hi into the running softmax; scale turns a score into a power of 2."""
    d = tl.arange(0, BLOCK_D)
    for n in tl.range(lo, hi, BLOCK_N):
        key = n + tl.arange(0, BLOCK_N)
        stored = key < hi if MASKED else key >= 0
        if PAGE:
            at = tl.load(table + key // PAGE, mask=stored, other=0).to(tl.int64) * PAGE + key % PAGE
        else:
            at = key.to(tl.int64)
        k_at, v_at = k_ptr + at[None, :] * stride_k + d[:, None], v_ptr + at[:, None] * stride_v + d[None, :]
        if MASKED or D != BLOCK_D:  # what lies beyond is never read: it may be NaN
            k = tl.load(k_at, mask=stored[None, :] & (d[:, None] < D), other=0.0)
            v = tl.load(v_at, mask=stored[:, None] & (d[None, :] < D), other=0.0)
        else:
            k, v = tl.load(k_at), tl.load(v_at)
        scores = _dot(q, k, PRECISION)                                                 # (BLOCK_M, BLOCK_N)
        if MASKED:
            scores = tl.where(key[None, :] <= position[:, None], scores, -float("inf"))
        m_new = tl.maximum(m_i, tl.max(scores, 1) * scale)
        p = tl.exp2(scores * scale - m_new[:, None])
        shrink = tl.exp2(m_i - m_new)
        l_i = l_i * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None] + _dot(p.to(v.dtype), v, PRECISION)
        m_i = m_new
    return acc, l_i, m_i


# What changes from call to call is not compiled in, or a new length would mean a new kernel.
@triton.jit(do_not_specialize=["start", "T", "S", "n_tiles", "stride_table"])
def _flash_kernel(q_ptr, k_ptr, v_ptr, out_ptr, tiles, table, rows, scale, start, T, S, H, n_tiles,
                  stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
                  stride_ob, stride_oh, stride_ot, stride_table,
                  D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
                  PAGE: tl.constexpr, PRECISION: tl.constexpr):
    """One tile of BLOCK_M queries of one head against all keys that they see.

    Dense (PAGE 0): q, k, v (B, H, T or S, D). Paged: q (N, H, D), rows end to end; k, v (H, slots, D);
    tiles (n_tiles, 2) row and first query; rows (B, 3) first token, new tokens, stored tokens.
    """
    head, tile = (tl.program_id(0) % H).to(tl.int64), n_tiles - 1 - tl.program_id(0) // H   # the longest tiles first
    if PAGE:
        row, m_lo = tl.load(tiles + 2 * tile).to(tl.int64), tl.load(tiles + 2 * tile + 1)
        first, T, start = tl.load(rows + 3 * row), tl.load(rows + 3 * row + 1), tl.load(rows + 3 * row + 2)
        S = start + T
        q_ptr += first * stride_qt
        out_ptr += first * stride_ot
        table += row * stride_table
    else:
        row, m_lo = (tile // tl.cdiv(T, BLOCK_M)).to(tl.int64), tile % tl.cdiv(T, BLOCK_M) * BLOCK_M
        q_ptr += row * stride_qb
        out_ptr += row * stride_ob
        k_ptr += row * stride_kb
        v_ptr += row * stride_vb
    k_ptr += head * stride_kh
    v_ptr += head * stride_vh
    m, d = m_lo + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    inside = (m[:, None] < T) & (d[None, :] < D)
    m_wide = m.to(tl.int64)[:, None]
    q = tl.load(q_ptr + head * stride_qh + m_wide * stride_qt + d[None, :], mask=inside, other=0.0)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    m_i = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    # Keys that the tile's first query sees need no mask; then those up to its last query.
    end = tl.minimum(S, start + tl.minimum(m_lo + BLOCK_M, T))
    open_end = tl.minimum(S, start + m_lo + 1) // BLOCK_N * BLOCK_N
    acc, l_i, m_i = _visit(acc, l_i, m_i, q, k_ptr, v_ptr, table, start + m, 0, open_end, stride_kt, stride_vt, scale,
                           False, D, BLOCK_N, BLOCK_D, PAGE, PRECISION)
    acc, l_i, m_i = _visit(acc, l_i, m_i, q, k_ptr, v_ptr, table, start + m, open_end, end, stride_kt, stride_vt, scale,
                           True, D, BLOCK_N, BLOCK_D, PAGE, PRECISION)
    tl.store(out_ptr + head * stride_oh + m_wide * stride_ot + d[None, :], acc / l_i[:, None], mask=inside)


def flash_config(head_dim, dtype, T):
    """(BLOCK_M, BLOCK_N, warps, stages), measured on an H200 at 12 heads of 64 in bfloat16, us, and 48 in float32:
    B, T                1, 128  1, 256  1, 512  1, 1024  8, 1024  1, 4096  1, 16384
    (64, 64, 4, 3)         3.7     4.9     7.2     13.5     52.0     76.9      1105
    (64, 128, 4, 2)        3.6     4.9     7.3     13.1              79.5
    (16, 128, 4, 2)        3.3     5.1     9.5
    (128, 64, 8, 3)                                16.2     53.5     73.4      1010
    """
    if dtype == torch.float32:
        return (32, 64, 4, 2) if head_dim <= 64 else (32, 32, 4, 2)
    if head_dim > 64:
        return (64, 64, 4, 2) if head_dim <= 128 else (64, 32, 8, 2)
    return (128, 64, 8, 3) if T >= 2048 else (64, 64, 4, 3)


def flash_attention(q, k, v, start=None, scale=None, precision="tf32x3", config=None):
    """Causal attention with an online softmax: q (B, H, T, D), k and v (B, H, S, D) -> (B, H, T, D).

    start: the position of the first query, S - T by default: key j is visible to query t when j <= start + t.
    Any lengths and strides, the last dimension contiguous; D up to 256. precision is float32's: "tf32x3" (three
    products of the tensor cores, error some 1e-6), "ieee" or "tf32" (1e-3). Raises UserError for other shapes.
    Source: Dao 2023, "FlashAttention-2"; online softmax: Milakov & Gimelshein 2018.
    """
    check_attention(q, k, v)
    (B, H, T, D), S = q.shape, k.shape[2]
    start, scale = S - T if start is None else start, D ** -0.5 if scale is None else scale
    if not 0 <= start <= S - T or scale <= 0:
        raise engine.UserError(f"start must be from 0 to S - T = {S - T} and scale above 0, not {start} and {scale}")
    if not uses_kernels(q):
        return engine.attention(q, k[:, :, :start + T], v[:, :, :start + T], scale)
    out = torch.empty_like(q)
    if not out.numel():
        return out
    BLOCK_M, BLOCK_N, warps, stages = config or flash_config(D, q.dtype, T)
    tiles = B * triton.cdiv(T, BLOCK_M)
    _flash_kernel[(tiles * H,)](
        q, k, v, out, None, None, None, scale * LOG2_E, start, T, S, H, tiles, *q.stride()[:3], *k.stride()[:3],
        *v.stride()[:3], *out.stride()[:3], 0, D, BLOCK_M, BLOCK_N, power_of_2(D), 0, precision,
        num_warps=warps, num_stages=stages)
    return out


def check_attention(q, k, v):
    """Raises UserError for shapes, dtypes or strides that the kernels do not take."""
    (*batch, T, D), (*others, S, Dk) = q.shape, k.shape
    if k.shape != v.shape or batch != others or Dk != D or T > S or D > 256:
        raise engine.UserError(f"q (B, H, T, D), k and v (B, H, S, D), T <= S and D <= 256 are needed, "
                               f"not {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}")
    if len({q.dtype, k.dtype, v.dtype}) > 1 or q.dtype not in engine.DTYPES.values():
        raise engine.UserError(f"q, k and v must be one of {', '.join(engine.DTYPES)}, not "
                               f"{q.dtype}, {k.dtype}, {v.dtype}")
    if D > 1 and {q.stride(-1), k.stride(-1), v.stride(-1)} != {1}:
        raise engine.UserError("the last dimension of q, k and v must be contiguous")


class Rows:
    """Rows of new tokens, end to end, and where each keeps its keys: what the kernels need to know, on the device.

    spans (B, 3) first new token, new, stored; table (B, P) page ids; slots (N) where new tokens are stored, -1 for
    nowhere; positions (N); tiles (n, 2) row and first query of each tile of BLOCK_M queries. As `plan_rows` made them.
    """

    def __init__(self, spans, table, slots, positions, tiles, page_size):
        self.spans, self.table, self.slots, self.positions, self.tiles = spans, table, slots, positions, tiles
        self.page_size = page_size


def plan_rows(stored, counts, pages, page_size, BLOCK_M, room=None):
    """The arrays of Rows. stored, counts: tokens in the pages before, and new ones, of each row; pages: its page ids.

    room: (N, B, P) to fill the arrays up to, for a graph: with tokens that are stored nowhere, and an empty row.
    """
    stored, counts = np.array(stored, int), np.array(counts, int)
    N, B, P = room or (counts.sum(), len(counts), max(map(len, pages)))
    table, slots, positions = np.zeros((B, P), np.int32), np.full(N, -1), np.zeros(N, int)
    for row, ids in enumerate(pages):
        table[row, :len(ids)] = ids
    first, owner = np.cumsum(counts) - counts, np.repeat(np.arange(len(counts)), counts)
    position = np.arange(counts.sum()) - first[owner] + stored[owner]
    positions[:len(position)] = position
    slots[:len(position)] = table[owner, position // page_size] * page_size + position % page_size
    spans = np.zeros((B, 3), int)
    spans[:len(counts)] = np.stack([first, counts, stored], 1)
    per_row = -(-counts // BLOCK_M)
    of_row = np.repeat(np.arange(len(counts)), per_row)
    begin = (np.arange(per_row.sum()) - (np.cumsum(per_row) - per_row)[of_row]) * BLOCK_M
    order = np.argsort(begin + stored[of_row], kind="stable")        # the kernel starts at the end, with the longest
    tiles = np.stack([of_row, begin], 1)[order]
    spare = N // BLOCK_M + B - len(tiles) if room else 0
    return spans, table, slots, positions, np.concatenate([np.tile([B - 1, 0], (spare, 1)), tiles])


def upload(arrays, device):
    """Arrays of whole numbers -> int32 tensors on the device, by one copy that nobody waits for."""
    return split_like(pinned(arrays, device).to(device, non_blocking=True), arrays)


def pinned(arrays, device):
    """Arrays end to end as one int32 tensor on the host, which a GPU can fetch by itself."""
    flat = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]).astype(np.int32))
    return flat.pin_memory() if torch.device(device).type == "cuda" else flat


def split_like(flat, arrays):
    return [part.view(array.shape) for part, array in zip(flat.split([array.size for array in arrays]), arrays)]


def paged_flash_attention(q, k_pool, v_pool, rows, scale, precision="tf32x3"):
    """Flash attention of new tokens over the pages that hold their keys already, rows of any length at once.

    q (N, H, D) of `rows`; pools (H, slots, D) -> (N, H, D).
    """
    if not uses_kernels(q):
        return paged_flash_twin(q, k_pool, v_pool, rows, scale)
    H, D = q.shape[1:]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    BLOCK_M, BLOCK_N, warps, stages = flash_config(D, q.dtype, 0)
    _flash_kernel[(len(rows.tiles) * H,)](
        q, k_pool, v_pool, out, rows.tiles, rows.table, rows.spans, scale * LOG2_E, 0, 0, 0, H, len(rows.tiles),
        0, *q.stride()[1::-1], 0, *k_pool.stride()[:2], 0, *v_pool.stride()[:2], 0, *out.stride()[1::-1],
        rows.table.stride(0), D, BLOCK_M, BLOCK_N, power_of_2(D), rows.page_size, precision,
        num_warps=warps, num_stages=stages)
    return out


def slots_of(pages, length, page_size):
    """The slots of a sequence's first `length` tokens: pages, a row of a page table -> (length)."""
    position = torch.arange(length, device=pages.device)
    return pages.long()[position // page_size] * page_size + position % page_size


def paged_flash_twin(q, k_pool, v_pool, rows, scale):
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for (first, count, stored), pages in zip(rows.spans.tolist(), rows.table):
        slots, new = slots_of(pages, stored + count, rows.page_size), slice(first, first + count)
        attended = engine.attention(q[new].transpose(0, 1)[None], k_pool[:, slots][None], v_pool[:, slots][None], scale)
        out[new] = attended[0].transpose(0, 1)
    return out


@triton.jit
def _store_kernel(k_ptr, v_ptr, k_pool, v_pool, slots, stride_kn, stride_kh, stride_vn, stride_vh,
                  stride_pool_kh, stride_pool_ks, stride_pool_vh, stride_pool_vs, H, D: tl.constexpr,
                  BLOCK_D: tl.constexpr):
    n, head = (tl.program_id(0) // H).to(tl.int64), (tl.program_id(0) % H).to(tl.int64)
    d, slot = tl.arange(0, BLOCK_D), tl.load(slots + n).to(tl.int64)
    real = d < tl.where(slot >= 0, D, 0)
    k = tl.load(k_ptr + n * stride_kn + head * stride_kh + d, mask=real)
    v = tl.load(v_ptr + n * stride_vn + head * stride_vh + d, mask=real)
    tl.store(k_pool + head * stride_pool_kh + slot * stride_pool_ks + d, k, mask=real)
    tl.store(v_pool + head * stride_pool_vh + slot * stride_pool_vs + d, v, mask=real)


def store(k, v, k_pool, v_pool, slots):
    """Writes new keys and values (N, H, D) to the `slots` (N) of the pools (H, slots, D); slot -1 is nowhere."""
    if not uses_kernels(k):
        for pool, new in (k_pool, k), (v_pool, v):
            pool.index_copy_(1, slots[slots >= 0].long(), new[slots >= 0].transpose(0, 1))
        return
    N, H, D = k.shape
    _store_kernel[(N * H,)](k, v, k_pool, v_pool, slots, *k.stride()[:2], *v.stride()[:2], *k_pool.stride()[:2],
                            *v_pool.stride()[:2], H, D, power_of_2(D), num_warps=1)


# ---------------------------------------------------------------------------------------------------
# Flash decoding: one query a row, its keys shared out among several programs, which a second stage combines.

@triton.jit(do_not_specialize=["stride_table", "stride_lengths"])
def _paged_kernel(q_ptr, k_new, v_new, k_pool, v_pool, table, lengths, out_ptr, parts, peaks, scale, H,
                  stride_qb, stride_qh, stride_nb, stride_nh, stride_kh, stride_ks, stride_vh, stride_vs, stride_table,
                  stride_lengths, NEW: tl.constexpr, SPLITS: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr,
                  BLOCK_D: tl.constexpr, PAGE: tl.constexpr, EARLY: tl.constexpr):
    """One split of the keys of one row and head -> its weighted sum of values (parts), its sum and maximum (peaks).

    With NEW the first split also takes the row's new key, of position lengths[row], and stores it with its value;
    a length below 0 marks a row that is not there.
    """
    task, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, head, d = task // H, task % H, tl.arange(0, BLOCK_D)
    _wait(EARLY)
    length, real = tl.load(lengths + row * stride_lengths), d < D
    table += row * stride_table
    k_pool += head * stride_kh
    v_pool += head * stride_vh
    q = tl.load(q_ptr + row * stride_qb + head * stride_qh + d, mask=real, other=0.0).to(tl.float32) * scale
    acc = tl.zeros((BLOCK_D,), tl.float32)
    l_i, m_i = 0.0, -float("inf")
    if NEW:  # noqa: SIM102 - known when the kernel is compiled
        if (split == 0) & (length >= 0):
            at = row * stride_nb + head * stride_nh + d
            k, v = tl.load(k_new + at, mask=real, other=0.0), tl.load(v_new + at, mask=real, other=0.0)
            slot = tl.load(table + length // PAGE).to(tl.int64) * PAGE + length % PAGE
            tl.store(k_pool + slot * stride_ks + d, k, mask=real)
            tl.store(v_pool + slot * stride_vs + d, v, mask=real)
            acc, l_i, m_i = v.to(tl.float32), 1.0, tl.sum(q * k.to(tl.float32))
    share = tl.cdiv(tl.cdiv(tl.maximum(length, 0), SPLITS), BLOCK_N) * BLOCK_N
    for n in tl.range(split * share, tl.minimum(split * share + share, length), BLOCK_N):
        key = n + tl.arange(0, BLOCK_N)
        stored = key < length
        slot = tl.load(table + key // PAGE, mask=stored, other=0).to(tl.int64) * PAGE + key % PAGE
        inside = stored[:, None] & real[None, :]
        k = tl.load(k_pool + slot[:, None] * stride_ks + d[None, :], mask=inside, other=0.0).to(tl.float32)
        v = tl.load(v_pool + slot[:, None] * stride_vs + d[None, :], mask=inside, other=0.0).to(tl.float32)
        scores = tl.where(stored, tl.sum(q[None, :] * k, 1), -float("inf"))
        m_new = tl.maximum(m_i, tl.max(scores, 0))
        p, shrink = tl.exp2(scores - m_new), tl.exp2(m_i - m_new)
        acc, l_i, m_i = acc * shrink + tl.sum(p[:, None] * v, 0), l_i * shrink + tl.sum(p, 0), m_new
    if SPLITS == 1:
        tl.store(out_ptr + task * D + d, acc / tl.maximum(l_i, 1e-30), mask=real)
    else:
        tl.store(parts + (task * SPLITS + split) * D + d, acc, mask=real)
        tl.store(peaks + (task * SPLITS + split) * 2, l_i)
        tl.store(peaks + (task * SPLITS + split) * 2 + 1, m_i)


@triton.jit
def _combine_kernel(parts, peaks, out_ptr, SPLITS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
                    EARLY: tl.constexpr):
    """The splits of one row and head -> its output. A split without keys has the sum 0."""
    _wait(EARLY)
    task, s, d = tl.program_id(0).to(tl.int64), tl.arange(0, SPLITS), tl.arange(0, BLOCK_D)
    l_i, m_i = tl.load(peaks + (task * SPLITS + s) * 2), tl.load(peaks + (task * SPLITS + s) * 2 + 1)
    acc = tl.load(parts + (task * SPLITS + s)[:, None] * D + d[None, :], mask=d[None, :] < D, other=0.0)
    weight = tl.where(l_i > 0, tl.exp2(m_i - tl.max(m_i, 0)), 0.0)
    out = tl.sum(acc * weight[:, None], 0) / tl.maximum(tl.sum(l_i * weight, 0), 1e-30)
    tl.store(out_ptr + task * D + d, out, mask=d < D)


def splits_for(tasks, most_keys, programs=528, least_keys=64):
    """Into how many splits, a power of 2, the keys go: enough programs for four on each of an H200's processors."""
    splits = 1
    while splits * tasks < programs and splits * least_keys < most_keys:
        splits *= 2
    return splits


def paged_attention(q, k_pool, v_pool, page_table, lengths, page_size=16, scale=None, new=None, splits=None,
                    config=None):
    """One query a row over the keys in its pages: q (B, H, D), pools (H, slots, D) -> (B, H, D).

    page_table (B, P) int32, the pages of each row in order; lengths (B) int32, how many keys each has stored: no
    slot beyond is read. new: (k, v), (B, H, D) each, of the queries' own tokens: they are stored at position
    lengths[row], and attended to as well; a row of length -1 is skipped. Source: Dao et al. 2023, "Flash-Decoding".
    """
    B, H, D = q.shape
    scale = D ** -0.5 if scale is None else scale
    check_paged_inputs(q, k_pool, v_pool, page_table, lengths, scale, new, splits)
    if not uses_kernels(q):
        return paged_attention_twin(q, k_pool, v_pool, page_table, lengths, page_size, scale, new)
    splits = splits or splits_for(B * H, page_table.shape[1] * page_size)
    out = torch.empty((B, H, D), dtype=q.dtype, device=q.device)
    parts = torch.empty((B * H, splits, D) if splits > 1 else 0, dtype=torch.float32, device=q.device)
    peaks = torch.empty((B * H, splits, 2) if splits > 1 else 0, dtype=torch.float32, device=q.device)
    k, v = new or (q, q)
    BLOCK_N, warps = config or (16, 1)
    _paged_kernel[(B * H, splits)](
        q, k, v, k_pool, v_pool, page_table, lengths, out, parts, peaks, scale * LOG2_E, H, *q.stride()[:2],
        *k.stride()[:2], *k_pool.stride()[:2], *v_pool.stride()[:2], page_table.stride(0), lengths.stride(0),
        new is not None, splits, D, BLOCK_N, power_of_2(D), page_size, num_warps=warps, **early(q))
    if splits > 1:
        _combine_kernel[(B * H,)](parts, peaks, out, splits, D, power_of_2(D), num_warps=1, **early(q))
    return out


def check_paged_inputs(q, k_pool, v_pool, page_table, lengths, scale, new, splits):
    """Raises UserError for what the kernel would read wrongly."""
    tensors = [q, k_pool, v_pool, page_table, *(new or ())]
    if any(x.stride(-1) != 1 and x.shape[-1] > 1 for x in tensors) or (new and new[0].stride() != new[1].stride()):
        raise engine.UserError("the last dimension of every tensor must be contiguous, and new keys and values alike")
    if {page_table.dtype, lengths.dtype} != {torch.int32} or q.shape[2] > 256 or scale <= 0:
        raise engine.UserError(f"page_table and lengths must be int32, D at most 256 and scale above 0, not "
                               f"{page_table.dtype}, {lengths.dtype}, {q.shape[2]} and {scale}")
    if splits and splits & (splits - 1):
        raise engine.UserError(f"splits must be a power of 2, not {splits}")


def paged_attention_twin(q, k_pool, v_pool, page_table, lengths, page_size, scale, new):
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for row, length in enumerate(lengths.tolist()):
        if new and length >= 0:
            slot = slots_of(page_table[row], length + 1, page_size)[-1]
            k_pool[:, slot], v_pool[:, slot] = new[0][row], new[1][row]
        slots = slots_of(page_table[row], length + (new is not None), page_size)
        if len(slots):
            k, v = k_pool[:, slots][None], v_pool[:, slots][None]
            out[row] = engine.attention(q[row][None, :, None], k, v, scale)[0, :, 0]
    return out


# ---------------------------------------------------------------------------------------------------
# Products of few rows: each weight is read once, so what stands around the product is done on the way.

@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "gelu_new":  # 0.5 (1 + tanh u) is the sigmoid of 2 u
        x = x / (1 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "relu":
        x = tl.maximum(x, 0.0)
    return x


@triton.jit
def _normed(x, inside, gain, shift, eps, K: tl.constexpr):
    """LayerNorm over the last dimension; x is 0 where not inside."""
    off = tl.where(inside, x - tl.sum(x, 1, keep_dims=True) / K, 0.0)
    return off * tl.rsqrt(tl.sum(off * off, 1, keep_dims=True) / K + eps) * gain + shift


@triton.jit
def _norm_kernel(x_ptr, weight, bias, out_ptr, eps, K: tl.constexpr, WIDTH: tl.constexpr, EARLY: tl.constexpr):
    k = tl.arange(0, WIDTH)[None, :]
    gain, shift = tl.load(weight + k, mask=k < K, other=0.0), tl.load(bias + k, mask=k < K, other=0.0)
    _wait(EARLY)
    at = tl.program_id(0).to(tl.int64) * K + k
    x = tl.load(x_ptr + at, mask=k < K, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, _normed(x, k < K, gain.to(tl.float32), shift.to(tl.float32), eps, K), mask=k < K)


def layer_norm(x, norm):
    """LayerNorm over the last dimension of x; torch's own takes twice the time for rows of 768."""
    if not uses_kernels(x):
        return norm(x)
    x, K = x.contiguous(), x.shape[-1]
    out = torch.empty_like(x)
    _norm_kernel[(x.numel() // K,)](x, norm.weight, norm.bias, out, norm.eps, K, power_of_2(K), num_warps=2, **early(x))
    return out


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(x_ptr, weight, bias, norm_weight, norm_bias, residual, out_ptr, eps, rows, N,
                   K: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr,
                   ACTIVATION: tl.constexpr, RESIDUAL: tl.constexpr, EARLY: tl.constexpr):
    """BLOCK_N outputs of all rows, one row after another: activation(LayerNorm(x) weight^T + bias) + residual.

    x (rows, K), weight (N, K), out and residual (rows, N), all contiguous; WIDTH is K's power of 2.
    """
    n, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, WIDTH)[None, :]
    inside = k < K
    w = tl.load(weight + n.to(tl.int64)[:, None] * K + k, mask=(n < N)[:, None] & inside, other=0.0)
    b = tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32) if BIAS else 0.0
    if NORM:
        gain, shift = tl.load(norm_weight + k, mask=inside, other=0.0), tl.load(norm_bias + k, mask=inside, other=0.0)
    _wait(EARLY)
    for row in tl.range(0, rows):
        x = tl.load(x_ptr + row * K + k, mask=inside, other=0.0)
        if NORM:
            normed = _normed(x.to(tl.float32), inside, gain.to(tl.float32), shift.to(tl.float32), eps, K)
            x = normed.to(x.dtype)
        out = _activate(tl.sum(w.to(tl.float32) * x.to(tl.float32), 1) + b, ACTIVATION)
        at = row * N + n.to(tl.int64)
        if RESIDUAL:
            out += tl.load(residual + at, mask=n < N, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, out, mask=n < N)


FUSED_ROWS = 4  # up to how many rows the fused kernel is faster than cuBLAS with the parts around it


def fused_linear(x, linear, norm=None, activation="", residual=None, dtype=None, config=None):
    """activation(LayerNorm(x) weight^T + bias) + residual: x (..., in) -> (..., out), one kernel where rows are few.

    linear: an engine.Linear; norm: a nn.LayerNorm or None; activation: a name of engine.ACTIVATIONS or "";
    residual (..., out) or None; dtype: the result's, x's by default.
    """
    N, K = linear.weight.shape
    rows = x.numel() // K
    if rows > FUSED_ROWS or not uses_kernels(x):
        return linear_twin(layer_norm(x, norm) if norm else x, linear, None, activation, residual, dtype)
    x = x.contiguous()
    out = torch.empty(*x.shape[:-1], N, dtype=dtype or x.dtype, device=x.device)
    BLOCK_N, warps = config or linear_config(N, K)
    _linear_kernel[(triton.cdiv(N, BLOCK_N),)](
        x, linear.weight, linear.bias, norm and norm.weight, norm and norm.bias,
        None if residual is None else residual.contiguous(), out, norm.eps if norm else 0.0, rows, N, K,
        power_of_2(K), BLOCK_N, linear.bias is not None, norm is not None, activation, residual is not None,
        num_warps=warps, **early(x))
    return out


def linear_config(N, K):
    """(BLOCK_N, warps), measured on an H200 over the shapes of GPT-2, us in a chain of launches:
    N, K            2304, 768   768, 768   3072, 768   768, 3072   50257, 768
    best                  2.4        1.7         2.6         2.5         24.7
    floor by bytes        0.8        0.3         1.1         1.1         18.4
    """
    return (4, 1) if K <= 1024 else (2, 8)


def linear_twin(x, linear, norm=None, activation="", residual=None, dtype=None):
    x = linear(norm(x) if norm else x)
    x = engine.ACTIVATIONS[activation](x) if activation else x
    return (x if residual is None else x + residual).to(dtype or x.dtype)


# ---------------------------------------------------------------------------------------------------
# Sampling. What a row asks for stands in its record; the meaning and the random numbers are engine.sample's.

@triton.jit
def _noise(token, first, second):
    """engine.exponential_noise: exponentially distributed, a hash of token and key."""
    x = token.to(tl.uint32) * 0x9E3779B9 + first
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= (x >> 15) ^ second
    x *= 0x846CA68B
    x ^= x >> 16
    u = tl.minimum(((x & 0x7FFFFFFF).to(tl.float32) + 0.5) * 4.656612873077393e-10, 1 - 5.960464477539063e-08)
    w = 1 - u                                                        # log1p(-u) without its loss of digits
    return tl.where(w == 1, u, -tl.log(w) * u / (1 - w))


# What one row's step is about, as the GPU gets it: a line of these 32-bit fields, then the row's page ids.
RECORD = np.dtype([(name, kind) for kind, names in (
    (np.int32, "slot length token key key2 top_k flags"),
    (np.float32, "temperature top_p min_p repetition frequency presence")) for name in names.split()])
SLOT, LENGTH, TOKEN = 0, 1, 2
FIELDS = len(RECORD.names)
BIASED, PENALISED, NO_END = 1, 2, 4                                  # flags; no end before min_tokens


@triton.jit
def _processed(logits, bias, counts, token, V, eos, flags, repetition, frequency, presence):
    """The logits of some tokens after bias, minimum length and penalties; -inf beyond the vocabulary."""
    z = tl.load(logits + token, mask=token < V, other=-float("inf")).to(tl.float32)
    if flags > 0:
        z += tl.load(bias + token, mask=token < V * (flags % 2), other=0.0)
        z = tl.where((token == eos) & (flags >= 4), -float("inf"), z)
        seen = tl.load(counts + token, mask=token < V * (flags // 2 % 2), other=0)     # output + 65536 if in the prompt
        penalised = tl.where(z > 0, z / repetition, z * repetition)
        z = tl.where(seen > 0, tl.minimum(tl.maximum(penalised, -3.4028234e38), 3.4028234e38), z)
        made = seen % 65536
        z = tl.where(made > 0, z - (made * frequency + presence), z)
    return z


@triton.jit
def _weight(p, bits, least, MASS: tl.constexpr):
    """What counts towards a target, of the tokens whose probability has at least these bits: mass or number."""
    return tl.where(bits >= least, p if MASS else tl.full(p.shape, 1.0, tl.float32), 0.0)


@triton.jit
def _keep_most(probs, target, V: tl.constexpr, BLOCK: tl.constexpr, MASS: tl.constexpr):
    """Zeroes all but the most likely tokens that together reach the target, a mass or a number of tokens.

    The bits of positive floats order as they do, so the least one kept is found two bits a pass. Of equally likely
    ones the first are kept.
    """
    cut = 0
    for shift in tl.range(28, -1, -2):
        one = tl.zeros((BLOCK,), tl.float32)
        two, three = one, one
        for lo in tl.range(0, V, BLOCK):
            token = lo + tl.arange(0, BLOCK)
            p = tl.load(probs + token, mask=token < V, other=0.0)
            bits = p.to(tl.int32, bitcast=True)
            one += _weight(p, bits, cut + (1 << shift), MASS)
            two += _weight(p, bits, cut + (2 << shift), MASS)
            three += _weight(p, bits, cut + (3 << shift), MASS)
        cut += ((tl.sum(one) >= target).to(tl.int32) + (tl.sum(two) >= target).to(tl.int32)
                + (tl.sum(three) >= target).to(tl.int32)) << shift
    above = tl.zeros((BLOCK,), tl.float32)
    for lo in tl.range(0, V, BLOCK):
        token = lo + tl.arange(0, BLOCK)
        p = tl.load(probs + token, mask=token < V, other=0.0)
        above += _weight(p, p.to(tl.int32, bitcast=True), cut + 1, MASS)
    least = cut.to(tl.float32, bitcast=True)
    equals = tl.ceil((target - tl.sum(above)) / (tl.maximum(least, 1e-38) if MASS else 1.0))
    before = 0
    for lo in tl.range(0, V, BLOCK):
        token = lo + tl.arange(0, BLOCK)
        p = tl.load(probs + token, mask=token < V, other=0.0)
        equal = ((p == least) & (token < V)).to(tl.int32)
        kept = (p > least) | ((equal == 1) & (before + tl.cumsum(equal, 0) <= tl.maximum(equals, 1)))
        tl.store(probs + token, tl.where(kept, p, 0.0), mask=token < V)
        before += tl.sum(equal)
    tl.debug_barrier()


@triton.jit
def _field(record, at: tl.constexpr, kind: tl.constexpr = tl.float32):
    return tl.load(record + at).to(kind, bitcast=True)


@triton.jit
def _sample_kernel(logits, records, last_token, counts, bias, probs, out_ptr, eos, stride_logits, stride_records,
                   V: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """One row's next token; -1 where its largest logit is not finite."""
    _wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    records += row * stride_records
    slot, top_k, flags = tl.load(records).to(tl.int64), tl.load(records + 5), tl.load(records + 6)
    first, second = _field(records, 3, tl.uint32), _field(records, 4, tl.uint32)
    temperature, top_p, min_p = _field(records, 7), _field(records, 8), _field(records, 9)
    repetition, frequency, presence = _field(records, 10), _field(records, 11), _field(records, 12)
    logits += row * stride_logits
    probs += row * V
    counts += slot * V
    bias += slot * V
    best, best_at = tl.full((BLOCK,), -float("inf"), tl.float32), tl.zeros((BLOCK,), tl.int32)
    nans = tl.zeros((BLOCK,), tl.int32)
    for lo in tl.range(0, V, BLOCK):
        token = lo + tl.arange(0, BLOCK)
        z = _processed(logits, bias, counts, token, V, eos, flags, repetition, frequency, presence)
        nans += (z != z).to(tl.int32)
        best_at = tl.where(z > best, token, best_at)
        best = tl.where(z > best, z, best)
    largest = tl.max(best, 0)
    chosen = tl.min(tl.where(best == largest, best_at, V), 0)        # of equal ones the first
    good = (tl.sum(nans) == 0) & (tl.abs(largest) < float("inf"))
    if good & (temperature > 0):
        total = tl.zeros((BLOCK,), tl.float32)
        for lo in tl.range(0, V, BLOCK):
            token = lo + tl.arange(0, BLOCK)
            z = _processed(logits, bias, counts, token, V, eos, flags, repetition, frequency, presence)
            p = tl.exp((z - largest) / temperature)
            p = tl.where(p >= min_p, p, 0.0)
            tl.store(probs + token, p, mask=token < V)
            total += p
        tl.debug_barrier()
        if top_k < V:
            _keep_most(probs, top_k.to(tl.float32), V, BLOCK, False)
            total = tl.zeros((BLOCK,), tl.float32)
            for lo in tl.range(0, V, BLOCK):
                token = lo + tl.arange(0, BLOCK)
                total += tl.load(probs + token, mask=token < V, other=0.0)
        if top_p < 1:
            _keep_most(probs, top_p * tl.sum(total), V, BLOCK, True)
        best, best_at = tl.full((BLOCK,), -1.0, tl.float32), tl.zeros((BLOCK,), tl.int32)
        for lo in tl.range(0, V, BLOCK):
            token = lo + tl.arange(0, BLOCK)
            p = tl.load(probs + token, mask=token < V, other=0.0)
            score = tl.where(token < V, p / _noise(token, first, second), -1.0)
            best_at = tl.where(score > best, token, best_at)
            best = tl.where(score > best, score, best)
        chosen = tl.min(tl.where(best == tl.max(best, 0), best_at, V), 0)
    if good & (flags // 2 % 2 == 1):
        tl.store(counts + chosen, tl.load(counts + chosen) + 1)
    tl.store(last_token + slot, chosen)
    tl.store(out_ptr + row, tl.where(good, chosen, -1))


@dataclass(frozen=True)
class SamplerState:
    """What the sampler keeps on the device between steps, a line for each of a scheduler's slots.

    last_token (slots) int32; counts (slots, V) int32: how often a token stands in the output, + 65536 if it does
    in the prompt; bias (slots, V) float32. Lines of counts and bias are valid where a record's flags say so.
    """

    last_token: torch.Tensor
    counts: torch.Tensor
    bias: torch.Tensor

    @classmethod
    def new(cls, slots, V, device):
        return cls(torch.zeros(slots, dtype=torch.int32, device=device),
                   torch.zeros(slots, V, dtype=torch.int32, device=device), torch.zeros(slots, V, device=device))

    def load(self, slot, request):
        """Take over a request's bias, and the tokens it has so far."""
        device, params = self.counts.device, request.params
        if params.logit_bias:
            values = np.array(list(params.logit_bias.values()), np.float32).view(np.int32)
            ids, values = upload([np.array(list(params.logit_bias)), values], device)
            self.bias[slot].zero_()[ids] = values.view(torch.float32)
        if params.penalises:
            output, prompt = upload([np.array(request.output_ids, int), np.array(request.prompt_ids)], device)
            counts = self.counts[slot].zero_().index_add_(0, output, torch.ones_like(output))
            counts[prompt] += 65536                                  # once, however often it stands there


def sample(logits, records, state, eos):
    """engine.sample on the device: logits (B, V) and a record a row -> token ids (B) int32, -1 for a failed row.

    The tokens are also noted in `state`: the next step may begin before anybody has read them.
    """
    B, V = logits.shape
    if not uses_kernels(logits):
        return sample_twin(logits, records, state, eos)
    out = torch.empty(B, dtype=torch.int32, device=logits.device)
    probs = torch.empty(B, V, dtype=torch.float32, device=logits.device)
    BLOCK, warps = (8192, 16) if V > 4096 else (power_of_2(V), 4)
    _sample_kernel[(B,)](logits, records, state.last_token, state.counts, state.bias, probs, out, eos,
                         logits.stride(0), records.stride(0), V, BLOCK, num_warps=warps,
                         **early(logits))
    return out


def sample_twin(logits, records, state, eos):
    V, fields = logits.shape[1], records[:, :FIELDS].contiguous().cpu().numpy().view(RECORD)[:, 0]
    slots = torch.from_numpy(fields["slot"]).long()

    def column(name):
        return torch.from_numpy(fields[name].copy())[:, None]

    flags, z = column("flags"), logits.float()
    z = z + torch.where(flags & BIASED > 0, state.bias[slots], 0)
    z[:, eos] = torch.where(flags[:, 0] & NO_END > 0, -math.inf, z[:, eos])
    seen = torch.where(flags & PENALISED > 0, state.counts[slots], 0)
    penalised = torch.where(z > 0, z / column("repetition"), z * column("repetition"))
    z = torch.where(seen > 0, penalised.clamp(torch.finfo().min, torch.finfo().max), z)
    z = torch.where(seen % 65536 > 0, z - (seen % 65536 * column("frequency") + column("presence")), z)
    largest, tokens = z.max(-1)
    good = largest.isfinite()
    probs = torch.softmax((z - largest[:, None]) / column("temperature").clamp(1e-30), -1)
    limits = [SimpleNamespace(**{name: line[name].item() for name in ("top_k", "top_p", "min_p")}) for line in fields]
    rows = [i for i, p in enumerate(limits) if good[i] and (p.top_k < V or p.top_p < 1 or p.min_p > 0)]
    if rows:
        probs[rows] = engine.truncate(probs[rows], tokens[rows], [limits[i] for i in rows])
    drawn = engine.draw(probs, torch.stack([column("key"), column("key2")], -1)[:, 0].tolist())
    tokens = torch.where(column("temperature")[:, 0] > 0, drawn, tokens).int()
    state.last_token[slots] = tokens
    state.counts[slots, tokens.long()] += (good & (flags[:, 0] & PENALISED > 0)).int()
    return torch.where(good, tokens, -1)


# ---------------------------------------------------------------------------------------------------
# The model

class FlashBlock(engine.Block):
    """The same block, with what stands around each product done in one kernel with it."""

    def __init__(self, config, layer, linear=engine.Linear):
        super().__init__(config, layer, linear)
        self.activation = config.activation_function

    def forward(self, x, kv):
        attn, mlp = self.attn, self.mlp
        attended = attn.attend(fused_linear(x, attn.c_attn, self.ln_1), kv)            # (B, T, C)
        x = fused_linear(attended, attn.c_proj, residual=x)
        hidden = fused_linear(x, mlp.c_fc, self.ln_2, self.activation)
        return fused_linear(hidden, mlp.c_proj, residual=x)


class FlashLinear(engine.Linear):
    """A projection. padded: a head's weight with rows up to a multiple of 8: cuBLAS is 5 times as fast by it."""

    padded = None


def flash_head(x, norm, linear):
    """The logits (B, T, V) float32 of x (B, T, C): engine.head, with sums in float32, not rounded in between."""
    (B, T, _), V = x.shape, len(linear.weight)
    if linear.padded is None or B * T <= FUSED_ROWS:
        return fused_linear(x, linear, norm, dtype=torch.float32)
    normed = layer_norm(x, norm).flatten(0, 1)
    return torch.mm(normed, linear.padded.t(), out_dtype=torch.float32)[:, :V].view(B, T, V)


def pack(model):
    """Take the weights as they are now: on a GPU in 16 bits, the head's are padded."""
    weight = model.lm_head.weight
    in_16_bits = weight.is_cuda and weight.dtype != torch.float32
    model.lm_head.padded = torch.nn.functional.pad(weight, (0, 0, 0, -len(weight) % 8)) if in_16_bits else None


class RowsKV(engine.KV):
    """Rows whose places in the pool lie in fixed tensors, so that a graph can be captured over it. It only attends."""

    def __init__(self, cache):
        self.cache = cache

    def attend(self, layer, q, k, v, scale):
        (B, H, T, D), dtype, cache = q.shape, q.dtype, self.cache
        q, k, v = (x.transpose(1, 2).reshape(B * T, H, D).to(cache.k.dtype) for x in (q, k, v))  # rows end to end
        out = self.attend_rows(q, k, v, cache.k[layer], cache.v[layer], scale)
        return out.view(B, T, H, D).transpose(1, 2).to(dtype)


class PromptKV(RowsKV):
    """Rows of any number of new tokens, which go through the flash kernel."""

    def __init__(self, cache, rows):
        super().__init__(cache)
        self.rows = rows

    def attend_rows(self, q, k, v, k_pool, v_pool, scale):
        store(k, v, k_pool, v_pool, self.rows.slots)
        return paged_flash_attention(q, k_pool, v_pool, self.rows, scale)


class DecodeKV(RowsKV):
    """Rows of one new token each, whose keys are split. table (B, P), lengths (B) tokens stored; -1: no row."""

    def __init__(self, cache, table, lengths):
        super().__init__(cache)
        self.table, self.lengths = table, lengths

    def attend_rows(self, q, k, v, k_pool, v_pool, scale):
        return paged_attention(q, k_pool, v_pool, self.table, self.lengths, self.cache.page_size, scale, (k, v))


class FlashKV(engine.PagedKV):
    """Some sequences of a pool on the GPU."""

    def plan(self, positions):
        cache, stored, pages = self.cache, [t.length for t in self.tables], [t.pages for t in self.tables]
        arrays = plan_rows(stored, self.counts, pages, cache.page_size, block_m(cache), None)
        rows = Rows(*upload(arrays, cache.k.device), cache.page_size)
        single = max(self.counts) == 1
        self.rows = DecodeKV(cache, rows.table, rows.positions) if single else PromptKV(cache, rows)
        return rows.positions

    def attend(self, layer, q, k, v, scale):
        return self.rows.attend(layer, q, k, v, scale)


class FlashCache(engine.PagedKVCache):
    """A pool whose pages the kernels read, in the weights' dtype on every device."""

    @staticmethod
    def dtype_beside(weight):
        return weight.dtype

    def new_kv(self, tables=None, counts=None):
        return FlashKV(self, tables, counts)


def block_m(cache):
    """How many queries a tile of paged_flash_attention has."""
    return flash_config(cache.k.shape[-1], cache.k.dtype, 0)[0]


@triton.jit
def _embed_kernel(records, last_token, wte, wpe, out_ptr, stride_records, C: tl.constexpr, BLOCK: tl.constexpr,
                  EARLY: tl.constexpr):
    _wait(EARLY)
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    records += row * stride_records
    slot, position, token = tl.load(records), tl.load(records + 1), tl.load(records + 2)
    token = tl.where(token < 0, tl.load(last_token + slot), token).to(tl.int64)
    x = tl.load(wte + token * C + c, mask=c < C, other=0.0).to(tl.float32)
    x += tl.load(wpe + tl.maximum(position, 0) * C + c, mask=c < C, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * C + c, x, mask=c < C)


def embed(records, last_token, wte, wpe):
    """The embeddings (rows, C) of the tokens that records tell, or that were sampled last (-1), at their positions."""
    if not uses_kernels(wte):
        known, last = records[:, TOKEN], last_token[records[:, SLOT]]
        return wte[torch.where(known < 0, last, known)].float() + wpe[records[:, LENGTH].clamp(min=0)].float()
    (rows, C), dtype = (len(records), wte.shape[1]), wte.dtype
    out = torch.empty(rows, C, dtype=dtype, device=wte.device)
    _embed_kernel[(rows,)](records, last_token, wte, wpe, out, records.stride(0), C, power_of_2(C), **early(out))
    return out


class FlashRunner(engine.Runner):
    """Runs a scheduler's steps on the GPU, one ahead of the host.

    Decoding rows go through a CUDA graph of the next larger batch size, prompts through one of the next larger number
    of tokens; the tokens are sampled on the device, which feeds them to the next step itself. Each row's step is told
    by a record.
    """

    ahead, prefill_chunk = 1, 8192

    def __init__(self, model, max_batch_size):
        super().__init__(model, max_batch_size)
        config, cache = model.config, model.cache
        self.device, slots = cache.k.device, max_batch_size + 1
        if self.device.type == "cuda" and self.device.index not in (None, torch.cuda.current_device()):
            raise engine.UserError(f"the model is on {self.device}, not on the current device; "
                                   f"CUDA_VISIBLE_DEVICES={self.device.index} chooses it")
        V, most_pages = config.vocab_size, -(-config.n_positions // cache.page_size)
        self.state = SamplerState.new(slots, V, self.device)
        self.eos = config.eos_token_id if config.eos_token_id is not None and config.eos_token_id < V else -1
        # A record for each slot, kept from step to step; the last is of a row that is not there.
        self.records = np.zeros(slots, [*RECORD.descr, ("pages", np.int32, most_pages)])
        self.records["slot"], self.records["length"] = np.arange(slots), -1
        self.pages, self.min_tokens = [0] * slots, np.zeros(slots, int)
        self.keys = np.zeros((slots, config.n_positions + 1, 2), np.int32)             # of the noise, by output length
        self.loaded = [None] * slots                                 # the page table that each record is about
        self.graphs, self.pool = {}, None                            # by (what is computed, how much)
        self.batches = batch_sizes(max_batch_size)
        longest = min(self.prefill_chunk, max_batch_size * config.n_positions)
        self.prompts = [2**n for n in range(5, max(6, (longest - 1).bit_length() + 1))]
        if self.device.type == "cuda":
            for tokens in reversed(self.prompts):  # the largest first: the others find room in its memory
                self._capture(self._prompt_step, tokens, self._prompt_arrays([], [], tokens))
            for rows in reversed(self.batches):
                self._capture(self._decode_step, rows, [self._lines([], rows)])

    def launch(self, rows: list[StepRow]) -> Callable[[], Iterable[StepResult]]:
        """Start a step; see Runner. One in which tokens are guessed or a prompt is scored runs as it does on a CPU."""
        if any(row.guesses or row.request.unscored for row in rows):
            self.loaded = [None] * len(self.loaded)                  # tokens are made that the device does not note
            return super().launch(rows)
        decoding = [row.request for row in rows if row.decodes]
        prefilling = [row for row in rows if not row.decodes]
        parts = []
        if decoding:
            parts.append(self._fetch(decoding, *self._decode(self._records(decoding))))
        if prefilling:
            ready = [row.request for row in prefilling if row.samples]
            parts.append(self._fetch(ready, *self._prefill(prefilling, ready)))
        self.model.new_kv([row.request.table for row in rows], [row.count for row in rows]).advance()
        return self._results(parts)

    # --- records

    def _records(self, requests):
        """A record a request: what its step is about."""
        slots, made, lengths, tokens = [], [], [], []
        for request in requests:
            slot, table, output = request.slot, request.table, request.output_ids
            if self.loaded[slot] is not table:
                self._load(request, slot)
            if len(table.pages) > self.pages[slot]:
                self.records["pages"][slot, self.pages[slot]:len(table.pages)] = table.pages[self.pages[slot]:]
                self.pages[slot] = len(table.pages)
            slots.append(slot)
            made.append(len(output) + request.pending)
            lengths.append(table.length)
            tokens.append(-1 if request.pending else (output or request.prompt_ids)[-1])
        records = self.records[slots]
        records["length"], records["token"] = lengths, tokens
        records["key"], records["key2"] = self.keys[slots, made].T
        records["flags"] += NO_END * (np.array(made) < self.min_tokens[slots])
        return records

    def _load(self, request, slot):
        """A request new in this slot: its part of the record that stays."""
        p, V = request.params, self.model.config.vocab_size
        fields = dict(temperature=p.temperature and within_float32(p.temperature), top_p=within_float32(p.top_p),
                      top_k=p.top_k if 0 < p.top_k < V else V, min_p=p.min_p,
                      repetition=within_float32(p.repetition_penalty), frequency=p.frequency_penalty,
                      presence=p.presence_penalty,
                      flags=BIASED * bool(p.logit_bias) + PENALISED * p.penalises)
        for name, value in fields.items():
            self.records[name][slot] = value
        self.min_tokens[slot] = p.min_tokens if self.eos >= 0 else 0
        if p.temperature:
            self.keys[slot] = noise_keys(request.key, self.keys.shape[1])
        self.state.load(slot, request)
        self.pages[slot], self.loaded[slot] = 0, request.table

    def _lines(self, records, rows):
        """Records as whole numbers, a line each, filled up to so many rows with some that are not there."""
        if len(records) < rows:
            blank = self.records[-1:].repeat(rows - len(records))
            records = np.concatenate([records, blank]) if len(records) else blank
        return records.view(np.int32).reshape(rows, -1)

    # --- what is computed: kernels on the device alone, so that all of a step can be launched as one graph

    def _decode(self, records):
        """One token of each record's row -> (tokens, logits)."""
        rows = next(size for size in self.batches if size >= len(records))
        tokens, logits = self._run(self._decode_step, rows, [self._lines(records, rows)])
        return tokens[:len(records)], logits[:len(records)]

    def _decode_step(self, records):
        model, kv = self.model, DecodeKV(self.model.cache, records[:, FIELDS:], records[:, LENGTH])
        x = embed(records, self.state.last_token, model.wte.weight, model.wpe.weight)[:, None]
        for block in model.h:
            x = block(x, kv)
        logits = model.head(x)[:, 0]
        return sample(logits, records, self.state, self.eos), logits

    def _prefill(self, rows, ready):
        """Prompts or chunks of them -> (the next tokens of the requests that are ready, logits)."""
        total = sum(row.count for row in rows)
        size = next((size for size in self.prompts if size >= total), total)
        records = self._records(ready) if ready else []
        tokens, logits = self._run(self._prompt_step, size, self._prompt_arrays(rows, records, size))
        return tokens[:len(ready)], logits[:len(ready)]

    def _prompt_arrays(self, rows, records, tokens):
        """What `_prompt_step` is given: ids, which positions are sampled, their records, and where the rows lie."""
        cache, most = self.model.cache, min(len(self.records) - 1, tokens)
        ids, keep = [], []
        for row in rows:
            stored = row.request.table.length
            ids += row.request.ids[stored:stored + row.count]
            if row.samples:
                keep.append(len(ids) - 1)
        tables = [row.request.table for row in rows]
        plan = plan_rows([t.length for t in tables], [row.count for row in rows], [t.pages for t in tables],
                         cache.page_size, block_m(cache), (tokens, most + 1, self.records["pages"].shape[1]))
        ids, keep = (np.pad(np.array(x, int), (0, size - len(x))) for x, size in ((ids, tokens), (keep, most)))
        return [ids, keep, self._lines(records, most), *plan]

    def _prompt_step(self, ids, keep, records, *plan):
        model, rows = self.model, Rows(*plan, self.model.cache.page_size)
        x, kv = model.embed(ids[None], rows.positions[None]), PromptKV(model.cache, rows)
        for block in model.h:
            x = block(x, kv)
        logits = model.head(x[:, keep])[0]
        return sample(logits, records, self.state, self.eos), logits

    def _run(self, step, size, arrays):
        """`step` on these arrays, by its graph where there is one -> (tokens, logits), lost when a graph runs again."""
        if (step.__name__, size) not in self.graphs:
            return step(*upload(arrays, self.device))
        graph, static, results = self.graphs[step.__name__, size]
        static.copy_(pinned(arrays, self.device), non_blocking=True)
        graph.replay()
        return results

    def _capture(self, step, size, arrays):
        """Record the kernels of a step of this size, to be launched as one from now on."""
        static = pinned(arrays, self.device).to(self.device)
        step(*split_like(static, arrays))                            # compiles what is to be compiled
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            results = step(*split_like(static, arrays))
        self.pool = self.pool or graph.pool()
        self.graphs[step.__name__, size] = graph, static, results

    # --- results

    def _fetch(self, requests, tokens, logits):
        """Starts to copy results to the host, at once: the next graph works in the same memory."""
        rows = [i for i, request in enumerate(requests) if request.params.logprobs is not None]
        if not rows:
            return Fetched(requests, to_host(tokens), [], ())
        at, = upload([np.array(rows)], self.device)
        chosen = tokens[at].long().clamp(min=0)[:, None]
        logprobs = (chosen, *chosen_and_top(logits[at], chosen, 20))
        return Fetched(requests, to_host(tokens), rows, [to_host(x) for x in logprobs])

    def _results(self, parts):
        """What is on its way to the host -> the function that waits for it."""
        done = torch.cuda.Event() if self.device.type == "cuda" else None
        if done:
            done.record()

        def wait():
            if done:
                done.synchronize()
            return [result for part in parts for result in part.results()]
        return wait


class Fetched(NamedTuple):
    """Results of some requests on their way to the host."""

    requests: list[Request]
    tokens: torch.Tensor                 # (requests)
    rows: list[int]                      # which requests ask for log probabilities: n of them
    logprobs: Sequence[torch.Tensor]     # token (n, 1), its log probability (n, 1), most likely ids and theirs (n, 20)

    def results(self):
        """Once they are there: a StepResult for each request."""
        logprobs = [None] * len(self.requests)
        for n, (token,), (logprob,), ids, values in zip(self.rows, *(part.tolist() for part in self.logprobs)):
            most = self.requests[n].params.logprobs
            logprobs[n] = TokenLogprobs(token, logprob, dict(zip(ids[:most], values)))
        for request, token, found in zip(self.requests, self.tokens.tolist(), logprobs):
            if token >= 0:
                yield StepResult(request, (), (token,), (found,))
            else:
                yield StepResult(request, (), (), (), FloatingPointError("the logits hold NaN or infinity"))


def within_float32(x):
    """A number above 0 as one that float32 neither rounds to 0 nor to infinity."""
    return min(max(x, 1e-30), 1e30)


def batch_sizes(most):
    """The batch sizes that get a graph: powers of 2, from 32 on multiples of 32, and the largest."""
    sizes = [size for size in (1, 2, 4, 8, 16) if size < most] + list(range(32, most, 32))
    return [*sizes, most]


def noise_keys(key, count):
    """Request.noise_key for output lengths 0 to count - 1, (count, 2) int32."""
    bits = np.random.Philox(key=key).random_raw(4 * count)[::4]      # the first of each counter's four
    return np.stack([(bits & 0xFFFFFFFF).astype(np.int64) - 2**31, (bits >> 32).astype(np.int64) - 2**31], 1)


def to_host(x):
    """A copy of x on the host, which is there once the device has come so far."""
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
    return host.copy_(x, non_blocking=True)


BACKEND = engine.Backend(linear=FlashLinear, block=FlashBlock, head=flash_head, attention=flash_attention,
                         paged_cache=FlashCache, runner=FlashRunner, pack=pack)


class GPT2Flash(engine.GPT2Paged):
    """GPT-2 on the GPU over the same pages: flash attention for prompts, split keys and CUDA graphs for decoding."""

    backend = BACKEND


# ---------------------------------------------------------------------------------------------------
# Command line

def parse_args(argv=None):
    import benchmarks_cuda

    parser = argparse.ArgumentParser(description="GPT-2 on the GPU. Without --check: the GPU benchmarks.")
    add = parser.add_argument
    add("--check", action="store_true", help="every kernel against float64 (on a CPU with TRITON_INTERPRET=1)")
    add("--model", default="auto", help="as engine.py's (default auto: gpt2, or random weights in its shape)")
    add("--dtype", default="bfloat16", choices=engine.DTYPES)
    add("--tokens", type=int, default=100, help="new tokens (default 100)")
    add("--runs", type=int, default=3, help="rounds of generation and batching (default 3)")
    add("--batches", type=int, nargs="+", default=[1, 8, 64, 256], help="of generation (default 1 8 64 256)")
    add("--only", choices=benchmarks_cuda.BENCHMARKS, help="one benchmark")
    add("--quick", action="store_true", help="leave out what torch.compile takes minutes for")
    add("--json", metavar="FILE", help="write the results as JSON")
    add("--plot", metavar="FILE", help="draw the results")
    return parser.parse_args(argv)


def main(argv=None):
    import benchmarks_cuda

    args = parse_args(argv)
    try:
        engine.check_number("--tokens", args.tokens, engine.Integral, 2, 1000)
        engine.check_number("--runs", args.runs, engine.Integral, 1, 1000)
        for batch in args.batches:
            engine.check_number("--batches", batch, engine.Integral, 1, 1024)
        if not torch.cuda.is_available() and not (args.check and INTERPRET):
            raise engine.UserError("there is no GPU here. TRITON_INTERPRET=1 python engine_cuda.py --check proves the "
                                   "kernels on the CPU, python engine.py measures the engine on it")
        if args.check:
            benchmarks_cuda.run_checks("cpu" if INTERPRET else "cuda")
        else:
            benchmarks_cuda.run_benchmarks(args)
    except engine.UserError as err:
        raise SystemExit(f"engine_cuda.py: {err}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":  # as the module that benchmarks_cuda.py imports, not as a second copy of it
    import engine_cuda

    engine_cuda.main()
