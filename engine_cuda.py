"""GPT-2 on the GPU: Triton kernels, GPT2Flash, and the GPU benchmarks.

    python engine_cuda.py                            benchmarks (needs a GPU)
    python engine_cuda.py --check                    every kernel against float64, on the GPU
    TRITON_INTERPRET=1 python engine_cuda.py --check the same on the CPU, by Triton's interpreter

Shapes use engine.py's alphabet: B batch, T new tokens, S stored + new, H heads, D head dim, C = H * D, V vocabulary,
P pages, N tokens of all rows end to end. Beside each kernel stands its plain torch twin, which the tests compare it
with and which runs in its place without a GPU. stride_kh is the stride of k over its heads; the last one is always 1.
"""

import functools
import importlib
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor, nn

import engine
import sampling
from sampling import FIELDS, RECORD, TokenLogprobs, noise_keys
from scheduler import Request, RowPlan, StepResult, StepRow, plan_rows, slots_of

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
UPCAST = tl.constexpr(INTERPRET)     # the interpreter has no bfloat16 product (kernels read only such globals)
LOG2_E = math.log2(math.e)           # the softmaxes below count in powers of 2: e^x = 2^(x LOG2_E)


def uses_kernels(x: Tensor) -> bool:
    """Whether Triton runs on this tensor; elsewhere the plain twins do."""
    return x.is_cuda or INTERPRET


def power_of_2(n: int, least: int = 16) -> int:
    """The next power of 2, which a block's size must be; tl.dot takes no blocks below 16."""
    return max(least, triton.next_power_of_2(n))


@functools.cache
def launch_options(device: torch.device) -> dict:
    """Options that hide most of a kernel's launch, on Hopper and later: the kernel starts while the one ahead of it
    still runs, and reads its weights; `_wait` then holds it back until the other's results are there."""
    early = device.type == "cuda" and not INTERPRET and torch.cuda.get_device_capability(device) >= (9, 0)
    return dict(EARLY=True, launch_pdl=True) if early else dict(EARLY=False)


@triton.jit
def _wait(EARLY: tl.constexpr):
    """Lets the next kernel start, then waits until the one before has ended: read nothing that it writes above this."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


# ---------------------------------------------------------------------------------------------------
# Flash attention: the scores of a tile live in registers only, never in memory.

@triton.jit
def _slot_of(table, position, PAGE: tl.constexpr, mask=None):
    """Where the pools hold the tokens at these positions of a row; table points to the ids of its pages, in order."""
    page = tl.load(table + position // PAGE, mask=mask, other=None if mask is None else 0)
    return page.to(tl.int64) * PAGE + position % PAGE


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _visit(acc, l_i, m_i, q, k_ptr, v_ptr, table, position, lo, hi, stride_k, stride_v, scale,
           MASKED: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
           PRECISION: tl.constexpr):
    """Takes the keys lo to hi into the running softmax of BLOCK_M queries at these positions.
    m_i: the largest score of each query so far; l_i: the sum of 2^(score - m_i); acc: the values, weighted alike.
    scale turns a score into a power of 2.
    """
    d = tl.arange(0, BLOCK_D)
    for n in tl.range(lo, hi, BLOCK_N):
        key = n + tl.arange(0, BLOCK_N)
        stored = key < hi if MASKED else key >= 0
        at = _slot_of(table, key, PAGE, stored) if PAGE else key.to(tl.int64)
        k_at = k_ptr + at[None, :] * stride_k + d[:, None]                             # (BLOCK_D, BLOCK_N): transposed
        v_at = v_ptr + at[:, None] * stride_v + d[None, :]
        if MASKED or D != BLOCK_D:  # what lies beyond is never read: it may be NaN
            k = tl.load(k_at, mask=stored[None, :] & (d[:, None] < D), other=0.0)
            v = tl.load(v_at, mask=stored[:, None] & (d[None, :] < D), other=0.0)
        else:
            k = tl.load(k_at)
            v = tl.load(v_at)
        scores = _dot(q, k, PRECISION)                                                 # (BLOCK_M, BLOCK_N)
        if MASKED:
            scores = tl.where(key[None, :] <= position[:, None], scores, -float("inf"))
        m_new = tl.maximum(m_i, tl.max(scores, 1) * scale)
        p = tl.exp2(scores * scale - m_new[:, None])
        shrink = tl.exp2(m_i - m_new)                                # what was summed under a smaller maximum
        l_i = l_i * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None] + _dot(p.to(v.dtype), v, PRECISION)
        m_i = m_new
    return acc, l_i, m_i


# What changes from call to call is not compiled in, or a new length would mean a new kernel.
@triton.jit(do_not_specialize=["start", "T", "S", "n_tiles", "stride_table"])
def _flash_kernel(q_ptr, k_ptr, v_ptr, out_ptr, tiles, table, spans, scale, start, T, S, H, n_tiles,
                  stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
                  stride_ob, stride_oh, stride_ot, stride_table,
                  D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
                  PAGE: tl.constexpr, PRECISION: tl.constexpr):
    """One tile of BLOCK_M queries of one head against all keys that they see.
    Dense (PAGE 0): q, k, v (B, H, T or S, D). Paged: q (N, H, D), rows end to end; k, v (H, slots, D);
    tiles, table and spans as in Batch, whose tiles and spans stand for what T, S and start say of dense rows.
    """
    head = (tl.program_id(0) % H).to(tl.int64)
    # A tile late in its row sees the most keys. It starts first: a long one begun last would run alone at the end.
    tile = n_tiles - 1 - tl.program_id(0) // H
    if PAGE:
        row = tl.load(tiles + 2 * tile).to(tl.int64)
        m_lo = tl.load(tiles + 2 * tile + 1)                         # the tile's first query, counted from its row's
        first = tl.load(spans + 3 * row)
        T = tl.load(spans + 3 * row + 1)
        start = tl.load(spans + 3 * row + 2)
        S = start + T
        q_ptr += first * stride_qt
        out_ptr += first * stride_ot
        table += row * stride_table
    else:
        row = (tile // tl.cdiv(T, BLOCK_M)).to(tl.int64)
        m_lo = tile % tl.cdiv(T, BLOCK_M) * BLOCK_M
        q_ptr += row * stride_qb
        out_ptr += row * stride_ob
        k_ptr += row * stride_kb
        v_ptr += row * stride_vb
    k_ptr += head * stride_kh
    v_ptr += head * stride_vh
    m = m_lo + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    inside = (m[:, None] < T) & (d[None, :] < D)
    m_wide = m.to(tl.int64)[:, None]
    q = tl.load(q_ptr + head * stride_qh + m_wide * stride_qt + d[None, :], mask=inside, other=0.0)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    m_i = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    # Blocks of keys that the tile's first query sees in full need no mask; those after them, up to its last query, do.
    end = tl.minimum(S, start + tl.minimum(m_lo + BLOCK_M, T))
    open_end = tl.minimum(S, start + m_lo + 1) // BLOCK_N * BLOCK_N
    acc, l_i, m_i = _visit(acc, l_i, m_i, q, k_ptr, v_ptr, table, start + m, 0, open_end, stride_kt, stride_vt, scale,
                           False, D, BLOCK_N, BLOCK_D, PAGE, PRECISION)
    acc, l_i, m_i = _visit(acc, l_i, m_i, q, k_ptr, v_ptr, table, start + m, open_end, end, stride_kt, stride_vt, scale,
                           True, D, BLOCK_N, BLOCK_D, PAGE, PRECISION)
    tl.store(out_ptr + head * stride_oh + m_wide * stride_ot + d[None, :], acc / l_i[:, None], mask=inside)


def flash_config(head_dim: int, dtype: torch.dtype, T: int) -> tuple[int, int, int, int]:
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


def flash_attention(q: Tensor, k: Tensor, v: Tensor, start: int | None = None, scale: float | None = None,
                    precision: str = "tf32x3") -> Tensor:
    """Causal attention with an online softmax: q (B, H, T, D), k and v (B, H, S, D) -> (B, H, T, D).

    start: the position of the first query, S - T by default: key j is visible to query t when j <= start + t.
    Any lengths and strides, the last dimension contiguous; D up to 256. precision is float32's: "tf32x3" (three
    products of the tensor cores, error some 1e-6), "ieee" or "tf32" (1e-3). Raises UserError for other shapes.
    Source: Dao 2023, "FlashAttention-2"; online softmax: Milakov & Gimelshein 2018.
    """
    check_attention(q, k, v)
    (B, H, T, D), S = q.shape, k.shape[2]
    start = S - T if start is None else start
    scale = D ** -0.5 if scale is None else scale
    if not 0 <= start <= S - T or scale <= 0:
        raise engine.UserError(f"start must be from 0 to S - T = {S - T} and scale above 0, not {start} and {scale}")
    if not uses_kernels(q):
        return engine.attention(q, k[:, :, :start + T], v[:, :, :start + T], scale)
    out = torch.empty_like(q)
    if not out.numel():
        return out
    BLOCK_M, BLOCK_N, warps, stages = flash_config(D, q.dtype, T)
    n_tiles = B * triton.cdiv(T, BLOCK_M)
    _flash_kernel[(n_tiles * H,)](
        q, k, v, out, tiles=None, table=None, spans=None,
        scale=scale * LOG2_E, start=start, T=T, S=S, H=H, n_tiles=n_tiles,
        **strides("q", "bht", q), **strides("k", "bht", k), **strides("v", "bht", v), **strides("o", "bht", out),
        stride_table=0, D=D, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_D=power_of_2(D), PAGE=0, PRECISION=precision,
        num_warps=warps, num_stages=stages)
    return out


def strides(name: str, dims: str, x: Tensor) -> dict[str, int]:
    """A kernel's arguments for the strides of x: ("q", "bht", q) gives stride_qb, stride_qh and stride_qt."""
    return {f"stride_{name}{dim}": stride for dim, stride in zip(dims, x.stride())}


def check_attention(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises UserError for shapes, dtypes or strides that the kernels do not take."""
    (*q_lead, T, D), (*k_lead, S, k_D) = q.shape, k.shape
    if k.shape != v.shape or q_lead != k_lead or k_D != D or T > S or D > 256:
        raise engine.UserError(f"q (B, H, T, D), k and v (B, H, S, D), T <= S and D <= 256 are needed, "
                               f"not {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}")
    if len({q.dtype, k.dtype, v.dtype}) > 1 or q.dtype not in engine.DTYPES.values():
        raise engine.UserError(f"q, k and v must be one of {', '.join(engine.DTYPES)}, not "
                               f"{q.dtype}, {k.dtype}, {v.dtype}")
    if D > 1 and {q.stride(-1), k.stride(-1), v.stride(-1)} != {1}:
        raise engine.UserError("the last dimension of q, k and v must be contiguous")


class Batch(NamedTuple):
    """A scheduler.RowPlan as the paged kernels take it, int32 on the device."""

    spans: Tensor       # (B, 3): a row's first new token among all, its new tokens, its stored tokens
    table: Tensor       # (B, P): the ids of a row's pages, in order
    slots: Tensor       # (N): where in the pools a new token is stored; -1 for nowhere
    positions: Tensor   # (N): a new token's place in its own text
    tiles: Tensor       # (n_tiles, 2): row and first query of a tile of BLOCK_M queries, most keys last


def batch_arrays(plan: RowPlan, BLOCK_M: int, n_tiles: int = 0) -> list[np.ndarray]:
    """What a Batch is made of, on the host, with at least so many tiles: spare ones are of the last row, left empty."""
    tiles = plan.tiles(BLOCK_M)
    spare = np.tile([len(plan.counts) - 1, 0], (max(0, n_tiles - len(tiles)), 1))
    return [plan.spans(), plan.page_ids, plan.slots, plan.positions, np.concatenate([spare, tiles])]


def upload(arrays: Sequence[np.ndarray], device: torch.device | str) -> list[Tensor]:
    """Arrays of whole numbers -> int32 tensors on the device, by one copy that nobody waits for."""
    return split_like(pinned(arrays, device).to(device, non_blocking=True), arrays)


def pinned(arrays: Sequence[np.ndarray], device: torch.device | str) -> Tensor:
    """Arrays end to end as one int32 tensor on the host, which a GPU can fetch by itself."""
    flat = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]).astype(np.int32))
    return flat.pin_memory() if torch.device(device).type == "cuda" else flat


def split_like(flat: Tensor, arrays: Sequence[np.ndarray]) -> list[Tensor]:
    """Views of a flat tensor in the shapes of the arrays that it holds end to end."""
    return [part.view(array.shape) for part, array in zip(flat.split([array.size for array in arrays]), arrays)]


def paged_flash_attention(q: Tensor, k_pool: Tensor, v_pool: Tensor, batch: Batch, scale: float,
                          page_size: int) -> Tensor:
    """Flash attention of new tokens over the pages that hold their keys already, rows of any length at once.

    q (N, H, D) of the batch's rows, end to end; pools (H, slots, D) -> (N, H, D).
    """
    if not uses_kernels(q):
        return paged_flash_twin(q, k_pool, v_pool, batch, scale, page_size)
    H, D = q.shape[1:]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    BLOCK_M, BLOCK_N, warps, stages = flash_config(D, q.dtype, 0)
    _flash_kernel[(len(batch.tiles) * H,)](
        q, k_pool, v_pool, out, tiles=batch.tiles, table=batch.table, spans=batch.spans,
        scale=scale * LOG2_E, start=0, T=0, S=0, H=H, n_tiles=len(batch.tiles),      # the spans say start, T and S
        stride_qb=0, **strides("q", "th", q), stride_kb=0, **strides("k", "ht", k_pool),
        stride_vb=0, **strides("v", "ht", v_pool), stride_ob=0, **strides("o", "th", out),
        stride_table=batch.table.stride(0), D=D, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_D=power_of_2(D),
        PAGE=page_size, PRECISION="tf32x3", num_warps=warps, num_stages=stages)
    return out


def paged_flash_twin(q: Tensor, k_pool: Tensor, v_pool: Tensor, batch: Batch, scale: float, page_size: int) -> Tensor:
    """paged_flash_attention in plain torch, row by row."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for (first, count, stored), page_ids in zip(batch.spans.tolist(), batch.table):
        slots = row_slots(page_ids, stored + count, page_size)
        queries = q[first:first + count].transpose(0, 1)                               # (H, count, D)
        attended = engine.attention(queries[None], k_pool[:, slots][None], v_pool[:, slots][None], scale)
        out[first:first + count] = attended[0].transpose(0, 1)
    return out


def row_slots(table: Tensor, length: int, page_size: int) -> Tensor:
    """The slots (length) of a row's first tokens; table (P) its page ids."""
    return slots_of(table[None].long(), 0, torch.arange(length, device=table.device), page_size)


@triton.jit
def _store_kernel(k_ptr, v_ptr, k_pool, v_pool, slots, stride_kn, stride_kh, stride_vn, stride_vh,
                  stride_pool_kh, stride_pool_ks, stride_pool_vh, stride_pool_vs, H, D: tl.constexpr,
                  BLOCK_D: tl.constexpr):
    """One token's key and value of one head -> its slot of the pools; slot -1 is nowhere."""
    n = (tl.program_id(0) // H).to(tl.int64)
    head = (tl.program_id(0) % H).to(tl.int64)
    slot = tl.load(slots + n).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    real = d < tl.where(slot >= 0, D, 0)
    k = tl.load(k_ptr + n * stride_kn + head * stride_kh + d, mask=real)
    v = tl.load(v_ptr + n * stride_vn + head * stride_vh + d, mask=real)
    tl.store(k_pool + head * stride_pool_kh + slot * stride_pool_ks + d, k, mask=real)
    tl.store(v_pool + head * stride_pool_vh + slot * stride_pool_vs + d, v, mask=real)


def store(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor) -> None:
    """Writes new keys and values (N, H, D) to the `slots` (N) of the pools (H, slots, D); slot -1 is nowhere."""
    if not uses_kernels(k):
        for pool, values in (k_pool, k), (v_pool, v):
            pool.index_copy_(1, slots[slots >= 0].long(), values[slots >= 0].transpose(0, 1))
        return
    N, H, D = k.shape
    _store_kernel[(N * H,)](k, v, k_pool, v_pool, slots, **strides("k", "nh", k), **strides("v", "nh", v),
                            **strides("pool_k", "hs", k_pool), **strides("pool_v", "hs", v_pool), H=H, D=D,
                            BLOCK_D=power_of_2(D), num_warps=1)


# ---------------------------------------------------------------------------------------------------
# Flash decoding: one query a row, its keys shared out among several programs, which a second stage combines.

@triton.jit(do_not_specialize=["stride_table", "stride_lengths"])
def _paged_kernel(q_ptr, k_new, v_new, k_pool, v_pool, table, lengths, out_ptr, parts, peaks, scale, H,
                  stride_qb, stride_qh, stride_nb, stride_nh, stride_kh, stride_ks, stride_vh, stride_vs, stride_table,
                  stride_lengths, HAS_NEW: tl.constexpr, SPLITS: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr,
                  BLOCK_D: tl.constexpr, PAGE: tl.constexpr, EARLY: tl.constexpr):
    """One split of the keys of one row and head -> its weighted sum of values (parts), its sum and maximum (peaks).
    table: the ids of each row's pages; acc, l_i, m_i as in `_visit`. With HAS_NEW the first split also takes the row's
    new key, of position lengths[row], and stores it with its value; a length below 0 marks a row that is not there.
    """
    task = tl.program_id(0).to(tl.int64)                             # a row and a head
    split = tl.program_id(1)
    row = task // H
    head = task % H
    d = tl.arange(0, BLOCK_D)
    real = d < D
    _wait(EARLY)
    length = tl.load(lengths + row * stride_lengths)
    table += row * stride_table
    k_pool += head * stride_kh
    v_pool += head * stride_vh
    q = tl.load(q_ptr + row * stride_qb + head * stride_qh + d, mask=real, other=0.0).to(tl.float32) * scale
    acc = tl.zeros((BLOCK_D,), tl.float32)
    l_i = 0.0
    m_i = -float("inf")
    if HAS_NEW:  # noqa: SIM102 - known when the kernel is compiled
        if (split == 0) & (length >= 0):
            at = row * stride_nb + head * stride_nh + d
            k = tl.load(k_new + at, mask=real, other=0.0)
            v = tl.load(v_new + at, mask=real, other=0.0)
            slot = _slot_of(table, length, PAGE)
            tl.store(k_pool + slot * stride_ks + d, k, mask=real)
            tl.store(v_pool + slot * stride_vs + d, v, mask=real)
            acc = v.to(tl.float32)                                   # the softmax of one key: weight 2^0
            l_i = 1.0
            m_i = tl.sum(q * k.to(tl.float32))
    share = tl.cdiv(tl.cdiv(tl.maximum(length, 0), SPLITS), BLOCK_N) * BLOCK_N         # keys of a split, whole blocks
    for n in tl.range(split * share, tl.minimum(split * share + share, length), BLOCK_N):
        key = n + tl.arange(0, BLOCK_N)
        stored = key < length
        slot = _slot_of(table, key, PAGE, stored)
        inside = stored[:, None] & real[None, :]
        k = tl.load(k_pool + slot[:, None] * stride_ks + d[None, :], mask=inside, other=0.0).to(tl.float32)
        v = tl.load(v_pool + slot[:, None] * stride_vs + d[None, :], mask=inside, other=0.0).to(tl.float32)
        scores = tl.where(stored, tl.sum(q[None, :] * k, 1), -float("inf"))
        m_new = tl.maximum(m_i, tl.max(scores, 0))
        p = tl.exp2(scores - m_new)
        shrink = tl.exp2(m_i - m_new)
        acc = acc * shrink + tl.sum(p[:, None] * v, 0)
        l_i = l_i * shrink + tl.sum(p, 0)
        m_i = m_new
    if SPLITS == 1:
        tl.store(out_ptr + task * D + d, acc / tl.maximum(l_i, 1e-30), mask=real)      # 0 for a row without keys
    else:
        tl.store(parts + (task * SPLITS + split) * D + d, acc, mask=real)
        tl.store(peaks + (task * SPLITS + split) * 2, l_i)
        tl.store(peaks + (task * SPLITS + split) * 2 + 1, m_i)


@triton.jit
def _combine_kernel(parts, peaks, out_ptr, SPLITS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
                    EARLY: tl.constexpr):
    """The splits of one row and head -> its output. A split without keys has the sum 0."""
    _wait(EARLY)
    task = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    part = task * SPLITS + tl.arange(0, SPLITS)
    l_i = tl.load(peaks + part * 2)
    m_i = tl.load(peaks + part * 2 + 1)
    acc = tl.load(parts + part[:, None] * D + d[None, :], mask=d[None, :] < D, other=0.0)
    weight = tl.where(l_i > 0, tl.exp2(m_i - tl.max(m_i, 0)), 0.0)
    out = tl.sum(acc * weight[:, None], 0) / tl.maximum(tl.sum(l_i * weight, 0), 1e-30)
    tl.store(out_ptr + task * D + d, out, mask=d < D)


def splits_for(tasks: int, most_keys: int, programs: int = 528, least_keys: int = 64) -> int:
    """Into how many splits, a power of 2, the keys go: enough programs for four on each of an H200's processors."""
    splits = 1
    while splits * tasks < programs and splits * least_keys < most_keys:
        splits *= 2
    return splits


def paged_attention(q: Tensor, k_pool: Tensor, v_pool: Tensor, page_table: Tensor, lengths: Tensor, page_size: int = 16,
                    scale: float | None = None, new: tuple[Tensor, Tensor] | None = None,
                    splits: int | None = None) -> Tensor:
    """One query a row over the keys in its pages: q (B, H, D), pools (H, slots, D) -> (B, H, D).

    page_table (B, P) int32, the pages of each row in order; lengths (B) int32, how many keys each has stored: no
    slot beyond is read. new: (k, v), (B, H, D) each, of the queries' own tokens: they are stored at position
    lengths[row], and attended to as well; a row of length -1 is skipped. splits: among how many programs the keys of
    a row and head are shared out. Raises UserError. Source: Dao et al. 2023, "Flash-Decoding".
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
    k, v = new or (q, q)                                             # not read where there is nothing new
    _paged_kernel[(B * H, splits)](
        q, k, v, k_pool, v_pool, page_table, lengths, out, parts, peaks, scale=scale * LOG2_E, H=H,
        **strides("q", "bh", q), **strides("n", "bh", k), **strides("k", "hs", k_pool), **strides("v", "hs", v_pool),
        stride_table=page_table.stride(0), stride_lengths=lengths.stride(0), HAS_NEW=new is not None, SPLITS=splits,
        D=D, BLOCK_N=16, BLOCK_D=power_of_2(D), PAGE=page_size, num_warps=1, **launch_options(q.device))
    if splits > 1:
        _combine_kernel[(B * H,)](parts, peaks, out, SPLITS=splits, D=D, BLOCK_D=power_of_2(D), num_warps=1,
                                  **launch_options(q.device))
    return out


def check_paged_inputs(q: Tensor, k_pool: Tensor, v_pool: Tensor, page_table: Tensor, lengths: Tensor, scale: float,
                       new: tuple[Tensor, Tensor] | None, splits: int | None) -> None:
    """Raises UserError for what the kernel would read wrongly."""
    tensors = [q, k_pool, v_pool, page_table, *(new or ())]
    if any(x.stride(-1) != 1 and x.shape[-1] > 1 for x in tensors) or (new and new[0].stride() != new[1].stride()):
        raise engine.UserError("the last dimension of every tensor must be contiguous, and new keys and values alike")
    if {page_table.dtype, lengths.dtype} != {torch.int32} or q.shape[2] > 256 or scale <= 0:
        raise engine.UserError(f"page_table and lengths must be int32, D at most 256 and scale above 0, not "
                               f"{page_table.dtype}, {lengths.dtype}, {q.shape[2]} and {scale}")
    if splits and splits & (splits - 1):
        raise engine.UserError(f"splits must be a power of 2, not {splits}")


def paged_attention_twin(q: Tensor, k_pool: Tensor, v_pool: Tensor, page_table: Tensor, lengths: Tensor, page_size: int,
                         scale: float, new: tuple[Tensor, Tensor] | None) -> Tensor:
    """paged_attention in plain torch, row by row."""
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for row, length in enumerate(lengths.tolist()):
        slots = row_slots(page_table[row], length + (new is not None), page_size)
        if len(slots):
            if new:
                k_pool[:, slots[-1]] = new[0][row]
                v_pool[:, slots[-1]] = new[1][row]
            k, v = k_pool[:, slots][None], v_pool[:, slots][None]
            out[row] = engine.attention(q[row][None, :, None], k, v, scale)[0, :, 0]
    return out


# ---------------------------------------------------------------------------------------------------
# Products of few rows: reading the weight is what takes the time, so the same kernel also does what stands around the
# product (LayerNorm, activation, residual).

TWO_SQRT_2_OVER_PI = tl.constexpr(2 * math.sqrt(2 / math.pi))
SQRT_HALF = tl.constexpr(math.sqrt(0.5))


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "gelu_new":  # 0.5 (1 + tanh u) is the sigmoid of 2 u; u = sqrt(2 / pi) (x + 0.044715 x^3)
        x = x / (1 + tl.exp((x + 0.044715 * x * x * x) * -TWO_SQRT_2_OVER_PI))
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1 + tl.erf(x * SQRT_HALF))
    elif ACTIVATION == "relu":
        x = tl.maximum(x, 0.0)
    return x


@triton.jit
def _normed(x, inside, gain, shift, eps, K: tl.constexpr):
    """LayerNorm over the last dimension; x is 0 where not inside."""
    centred = tl.where(inside, x - tl.sum(x, 1, keep_dims=True) / K, 0.0)
    return centred * tl.rsqrt(tl.sum(centred * centred, 1, keep_dims=True) / K + eps) * gain + shift


@triton.jit
def _norm_kernel(x_ptr, weight, bias, out_ptr, eps, K: tl.constexpr, WIDTH: tl.constexpr, EARLY: tl.constexpr):
    """LayerNorm of one row of K; WIDTH is K's power of 2."""
    k = tl.arange(0, WIDTH)[None, :]
    gain = tl.load(weight + k, mask=k < K, other=0.0)
    shift = tl.load(bias + k, mask=k < K, other=0.0)
    _wait(EARLY)
    at = tl.program_id(0).to(tl.int64) * K + k
    x = tl.load(x_ptr + at, mask=k < K, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, _normed(x, k < K, gain.to(tl.float32), shift.to(tl.float32), eps, K), mask=k < K)


def layer_norm(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    """LayerNorm over the last dimension of x; torch's own takes twice the time for rows of 768."""
    if not uses_kernels(x):
        return norm(x)
    x = x.contiguous()
    K = x.shape[-1]
    out = torch.empty_like(x)
    _norm_kernel[(x.numel() // K,)](x, norm.weight, norm.bias, out, norm.eps, K=K, WIDTH=power_of_2(K), num_warps=2,
                                    **launch_options(x.device))
    return out


@triton.jit(do_not_specialize=["n_rows"])
def _linear_kernel(x_ptr, weight, bias, norm_weight, norm_bias, residual, out_ptr, eps, n_rows, N,
                   K: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr,
                   ACTIVATION: tl.constexpr, RESIDUAL: tl.constexpr, EARLY: tl.constexpr):
    """BLOCK_N outputs of all rows, one row after another: activation(LayerNorm(x) weight^T + bias) + residual.
    x (n_rows, K), weight (N, K), out and residual (n_rows, N), all contiguous; WIDTH is K's power of 2.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, WIDTH)[None, :]
    inside = k < K
    w = tl.load(weight + n.to(tl.int64)[:, None] * K + k, mask=(n < N)[:, None] & inside, other=0.0)
    b = tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32) if BIAS else 0.0
    if NORM:
        gain = tl.load(norm_weight + k, mask=inside, other=0.0)
        shift = tl.load(norm_bias + k, mask=inside, other=0.0)
    _wait(EARLY)                                                     # the weights lie in registers by now
    for row in tl.range(0, n_rows):
        x = tl.load(x_ptr + row * K + k, mask=inside, other=0.0)
        if NORM:
            normed = _normed(x.to(tl.float32), inside, gain.to(tl.float32), shift.to(tl.float32), eps, K)
            x = normed.to(x.dtype)                                   # rounded as the plain model rounds it
        out = _activate(tl.sum(w.to(tl.float32) * x.to(tl.float32), 1) + b, ACTIVATION)
        at = row * N + n.to(tl.int64)
        if RESIDUAL:
            out += tl.load(residual + at, mask=n < N, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, out, mask=n < N)


FUSED_ROWS = 4  # up to how many rows the fused kernel is faster than cuBLAS with the parts around it


def fused_linear(x: Tensor, linear: nn.Module, norm: nn.LayerNorm | None = None, activation: str = "",
                 residual: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """activation(LayerNorm(x) weight^T + bias) + residual: x (..., in) -> (..., out), one kernel where rows are few.

    linear: an engine.Linear; norm: a nn.LayerNorm or None; activation: a name of engine.ACTIVATIONS or "";
    residual (..., out) or None; dtype: the result's, x's by default.
    """
    N, K = linear.weight.shape
    n_rows = x.numel() // K
    if n_rows > FUSED_ROWS or not uses_kernels(x):
        return linear_twin(layer_norm(x, norm) if norm else x, linear, None, activation, residual, dtype)
    x = x.contiguous()
    out = torch.empty(*x.shape[:-1], N, dtype=dtype or x.dtype, device=x.device)
    BLOCK_N, warps = linear_config(N, K)
    _linear_kernel[(triton.cdiv(N, BLOCK_N),)](
        x, linear.weight, linear.bias, norm and norm.weight, norm and norm.bias,
        None if residual is None else residual.contiguous(), out, eps=norm.eps if norm else 0.0, n_rows=n_rows, N=N,
        K=K, WIDTH=power_of_2(K), BLOCK_N=BLOCK_N, BIAS=linear.bias is not None, NORM=norm is not None,
        ACTIVATION=activation, RESIDUAL=residual is not None, num_warps=warps, **launch_options(x.device))
    return out


def linear_config(N: int, K: int) -> tuple[int, int]:
    """(BLOCK_N, warps), measured on an H200 over the shapes of GPT-2, us in a chain of launches:
    N, K            2304, 768   768, 768   3072, 768   768, 3072   50257, 768
    best                  2.4        1.7         2.6         2.5         24.7
    floor by bytes        0.8        0.3         1.1         1.1         18.4
    """
    return (4, 1) if K <= 1024 else (2, 8)


def linear_twin(x: Tensor, linear: nn.Module, norm: nn.LayerNorm | None = None, activation: str = "",
                residual: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """fused_linear in plain torch."""
    x = linear(norm(x) if norm else x)
    x = engine.ACTIVATIONS[activation](x) if activation else x
    return (x if residual is None else x + residual).to(dtype or x.dtype)


# ---------------------------------------------------------------------------------------------------
# Both ends of a step: embeddings of the tokens, and sampling. What a row asks for stands in its record; what the
# parameters mean and the random numbers are sampling.py's.

# The same for kernels, which read no global that is not a constexpr.
(SLOT_FIELD, LENGTH_FIELD, TOKEN_FIELD, KEY_FIELD, KEY2_FIELD, TOP_K_FIELD, FLAGS_FIELD, TEMPERATURE_FIELD, TOP_P_FIELD,
 MIN_P_FIELD, REPETITION_FIELD, FREQUENCY_FIELD, PRESENCE_FIELD) = map(tl.constexpr, range(FIELDS))
BIASED_FLAG, PENALISED_FLAG, NO_END_FLAG, IN_PROMPT_COUNT = map(tl.constexpr, (
    sampling.BIASED, sampling.PENALISED, sampling.NO_END, sampling.IN_PROMPT))

HASH_GOLDEN, HASH_1, HASH_2 = map(tl.constexpr, (sampling.HASH_GOLDEN, sampling.HASH_1, sampling.HASH_2))
FLOAT32_MAX = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit
def _float_field(record, at: tl.constexpr):
    return tl.load(record + at).to(tl.float32, bitcast=True)


@triton.jit
def _embed_kernel(records, last_token, wte, wpe, out_ptr, stride_records, C: tl.constexpr, BLOCK: tl.constexpr,
                  EARLY: tl.constexpr):
    """The embedding of one row's token at its position."""
    _wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    record = records + row * stride_records
    slot = tl.load(record + SLOT_FIELD)
    position = tl.load(record + LENGTH_FIELD)
    token = tl.load(record + TOKEN_FIELD)
    token = tl.where(token < 0, tl.load(last_token + slot), token).to(tl.int64)
    x = tl.load(wte + token * C + c, mask=c < C, other=0.0).to(tl.float32)
    x += tl.load(wpe + tl.maximum(position, 0) * C + c, mask=c < C, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * C + c, x, mask=c < C)


def embed(records: Tensor, last_token: Tensor, wte: Tensor, wpe: Tensor) -> Tensor:
    """The embeddings (B, C) of the tokens that records (B, fields) name, at their positions; a token of -1 is the one
    that was sampled last in the record's slot."""
    if not uses_kernels(wte):
        known = records[:, sampling.TOKEN]
        token = torch.where(known < 0, last_token[records[:, sampling.SLOT]], known)
        return wte[token].float() + wpe[records[:, sampling.LENGTH].clamp(min=0)].float()
    B, C = len(records), wte.shape[1]
    out = torch.empty(B, C, dtype=wte.dtype, device=wte.device)
    _embed_kernel[(B,)](records, last_token, wte, wpe, out, records.stride(0), C=C, BLOCK=power_of_2(C),
                        **launch_options(out.device))
    return out


@triton.jit
def _noise(token, first, second):
    """Exponentially distributed: an integer hash of the token and of the two halves of its row's noise key."""
    x = token.to(tl.uint32) * HASH_GOLDEN + first
    x ^= x >> 16
    x *= HASH_1
    x ^= (x >> 15) ^ second
    x *= HASH_2
    x ^= x >> 16
    u = tl.minimum(((x & 0x7FFFFFFF).to(tl.float32) + 0.5) * 2**-31, 1 - 2**-24)       # uniform, between 0 and 1
    w = 1 - u                                                        # log1p(-u) without its loss of digits
    return tl.where(w == 1, u, -tl.log(w) * u / (1 - w))


@triton.jit
def _processed(logits, bias, counts, token, V, eos, flags, repetition, frequency, presence):
    """The logits of some tokens after bias, minimum length and penalties; -inf beyond the vocabulary."""
    z = tl.load(logits + token, mask=token < V, other=-float("inf")).to(tl.float32)
    if flags > 0:
        bias_end = tl.where((flags & BIASED_FLAG) != 0, V, 0)        # without the flag no token is below the end
        counts_end = tl.where((flags & PENALISED_FLAG) != 0, V, 0)
        z += tl.load(bias + token, mask=token < bias_end, other=0.0)
        z = tl.where((token == eos) & ((flags & NO_END_FLAG) != 0), -float("inf"), z)
        seen = tl.load(counts + token, mask=token < counts_end, other=0)
        penalised = tl.where(z > 0, z / repetition, z * repetition)
        z = tl.where(seen > 0, tl.minimum(tl.maximum(penalised, -FLOAT32_MAX), FLOAT32_MAX), z)
        made = seen % IN_PROMPT_COUNT                                # how often in the output
        z = tl.where(made > 0, z - (made * frequency + presence), z)
    return z


@triton.jit
def _weight(p, bits, least, MASS: tl.constexpr):
    """What counts towards a target, of the tokens whose probability has at least these bits: mass or number."""
    return tl.where(bits >= least, p if MASS else tl.full(p.shape, 1.0, tl.float32), 0.0)


@triton.jit
def _least_kept(probs, target, V: tl.constexpr, BLOCK: tl.constexpr, MASS: tl.constexpr):
    """The bits of the largest probability p such that the tokens of at least p together reach the target.
    The bits of positive floats order as they do, so p is found from the top, two bits a pass over the vocabulary.
    """
    cut = 0
    for shift in tl.range(28, -1, -2):
        one = tl.zeros((BLOCK,), tl.float32)                         # what counts if the two bits are 1, 2 or 3
        two = one
        three = one
        for lo in tl.range(0, V, BLOCK):
            token = lo + tl.arange(0, BLOCK)
            p = tl.load(probs + token, mask=token < V, other=0.0)
            bits = p.to(tl.int32, bitcast=True)
            one += _weight(p, bits, cut + (1 << shift), MASS)
            two += _weight(p, bits, cut + (2 << shift), MASS)
            three += _weight(p, bits, cut + (3 << shift), MASS)
        cut += ((tl.sum(one) >= target).to(tl.int32) + (tl.sum(two) >= target).to(tl.int32)
                + (tl.sum(three) >= target).to(tl.int32)) << shift
    return cut


@triton.jit
def _keep_most(probs, target, V: tl.constexpr, BLOCK: tl.constexpr, MASS: tl.constexpr):
    """Zeroes all but the most likely tokens that together reach the target, a mass or a number of tokens.
    Of those as likely as the least likely one that is kept, only as many stay as are needed, the first ones.
    """
    cut = _least_kept(probs, target, V, BLOCK, MASS)
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
def _draw(probs, record, total, V: tl.constexpr, BLOCK: tl.constexpr):
    """A token by its probability, after top_k and top_p: sampling.draw. total: the sums of a block's lanes of probs."""
    top_k = tl.load(record + TOP_K_FIELD)
    top_p = _float_field(record, TOP_P_FIELD)
    first = tl.load(record + KEY_FIELD).to(tl.uint32, bitcast=True)
    second = tl.load(record + KEY2_FIELD).to(tl.uint32, bitcast=True)
    if top_k < V:
        _keep_most(probs, top_k.to(tl.float32), V, BLOCK, False)
        total = tl.zeros((BLOCK,), tl.float32)
        for lo in tl.range(0, V, BLOCK):
            token = lo + tl.arange(0, BLOCK)
            total += tl.load(probs + token, mask=token < V, other=0.0)
    if top_p < 1:
        _keep_most(probs, top_p * tl.sum(total), V, BLOCK, True)
    best = tl.full((BLOCK,), -1.0, tl.float32)
    best_at = tl.zeros((BLOCK,), tl.int32)
    for lo in tl.range(0, V, BLOCK):
        token = lo + tl.arange(0, BLOCK)
        p = tl.load(probs + token, mask=token < V, other=0.0)
        score = tl.where(token < V, p / _noise(token, first, second), -1.0)
        best_at = tl.where(score > best, token, best_at)
        best = tl.where(score > best, score, best)
    return tl.min(tl.where(best == tl.max(best, 0), best_at, V), 0)


@triton.jit
def _sample_kernel(logits, records, last_token, counts, bias, probs, out_ptr, eos, stride_logits, stride_records,
                   V: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """One row's next token; -1 where its largest logit is not finite. probs (B, V) is the kernel's own memory."""
    _wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    record = records + row * stride_records
    slot = tl.load(record + SLOT_FIELD).to(tl.int64)
    flags = tl.load(record + FLAGS_FIELD)
    temperature = _float_field(record, TEMPERATURE_FIELD)
    min_p = _float_field(record, MIN_P_FIELD)
    repetition = _float_field(record, REPETITION_FIELD)
    frequency = _float_field(record, FREQUENCY_FIELD)
    presence = _float_field(record, PRESENCE_FIELD)
    logits += row * stride_logits
    probs += row * V
    counts += slot * V
    bias += slot * V
    best = tl.full((BLOCK,), -float("inf"), tl.float32)              # each lane's best, of a token in every block
    best_at = tl.zeros((BLOCK,), tl.int32)
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
            p = tl.exp((z - largest) / temperature)                  # over the largest: 1 is the most likely token's
            p = tl.where(p >= min_p, p, 0.0)
            tl.store(probs + token, p, mask=token < V)
            total += p
        tl.debug_barrier()                                           # probs are read by other threads than wrote them
        chosen = _draw(probs, record, total, V, BLOCK)
    if good & ((flags & PENALISED_FLAG) != 0):
        tl.store(counts + chosen, tl.load(counts + chosen) + 1)
    tl.store(last_token + slot, chosen)
    tl.store(out_ptr + row, tl.where(good, chosen, -1))


@dataclass(frozen=True)
class SamplerState:
    """What the sampler keeps on the device between steps, a line for each of a scheduler's slots.

    last_token (slots) int32; counts (slots, V) int32: how often a token stands in the output, and IN_PROMPT more if it
    does in the prompt; bias (slots, V) float32. Lines of counts and bias are valid where a record's flags say so.
    """

    last_token: Tensor
    counts: Tensor
    bias: Tensor

    @classmethod
    def new(cls, slots: int, V: int, device: torch.device | str) -> "SamplerState":
        """All zeros."""
        return cls(torch.zeros(slots, dtype=torch.int32, device=device),
                   torch.zeros(slots, V, dtype=torch.int32, device=device), torch.zeros(slots, V, device=device))

    def load(self, slot: int, request: "engine.Request") -> None:
        """Take over a request's bias, and the tokens it has so far."""
        device = self.counts.device
        params = request.params
        if params.logit_bias:
            values = np.array(list(params.logit_bias.values()), np.float32).view(np.int32)
            ids, values = upload([np.array(list(params.logit_bias)), values], device)
            self.bias[slot].zero_()[ids] = values.view(torch.float32)
        if params.penalises:
            output, prompt = upload([np.array(request.output_ids, int), np.array(request.prompt_ids)], device)
            counts = self.counts[slot].zero_().index_add_(0, output, torch.ones_like(output))
            counts[prompt] += sampling.IN_PROMPT                              # once, however often it stands there


def sample(logits: Tensor, records: Tensor, state: SamplerState, eos: int) -> Tensor:
    """sampling.sample on the device: logits (B, V) and a record a row -> token ids (B) int32, -1 for a failed row.

    The tokens are also noted in `state`: the next step may begin before anybody has read them.
    """
    B, V = logits.shape
    if not uses_kernels(logits):
        return sampling.sample_records(logits, records, state, eos)
    out = torch.empty(B, dtype=torch.int32, device=logits.device)
    probs = torch.empty(B, V, dtype=torch.float32, device=logits.device)
    BLOCK, warps = (8192, 16) if V > 4096 else (power_of_2(V), 4)
    _sample_kernel[(B,)](logits, records, state.last_token, state.counts, state.bias, probs, out, eos,
                         stride_logits=logits.stride(0), stride_records=records.stride(0), V=V, BLOCK=BLOCK,
                         num_warps=warps, **launch_options(logits.device))
    return out


# ---------------------------------------------------------------------------------------------------
# The model

class FlashBlock(engine.Block):
    """The same block, with what stands around each product done in one kernel with it."""

    def __init__(self, config: engine.GPT2Config, layer: int, linear: type[engine.Linear] = engine.Linear):
        super().__init__(config, layer, linear)
        self.activation = config.activation_function

    def forward(self, x: Tensor, kv: engine.KV) -> Tensor:
        """x (B, T, C) -> what follows it (B, T, C)."""
        attn, mlp = self.attn, self.mlp
        attended = attn.attend(fused_linear(x, attn.c_attn, self.ln_1), kv)            # (B, T, C)
        x = fused_linear(attended, attn.c_proj, residual=x)
        hidden = fused_linear(x, mlp.c_fc, self.ln_2, self.activation)
        return fused_linear(hidden, mlp.c_proj, residual=x)


class FlashLinear(engine.Linear):
    """A projection. padded: a head's weight with rows up to a multiple of 8: cuBLAS is 5 times as fast by it."""

    padded: Tensor | None = None


def flash_head(x: Tensor, norm: nn.LayerNorm, linear: FlashLinear) -> Tensor:
    """The logits (B, T, V) float32 of x (B, T, C): engine.head, with sums in float32, not rounded in between."""
    (B, T, _), V = x.shape, len(linear.weight)
    if linear.padded is None or B * T <= FUSED_ROWS:
        return fused_linear(x, linear, norm, dtype=torch.float32)
    normed = layer_norm(x, norm).flatten(0, 1)
    return torch.mm(normed, linear.padded.t(), out_dtype=torch.float32)[:, :V].view(B, T, V)


def pack(model: engine.GPT2) -> None:
    """Take the weights as they are now: on a GPU in 16 bits, the head's are padded."""
    weight = model.lm_head.weight
    in_16_bits = weight.is_cuda and weight.dtype != torch.float32
    model.lm_head.padded = nn.functional.pad(weight, (0, 0, 0, -len(weight) % 8)) if in_16_bits else None


class RowsKV(engine.KV):
    """Rows whose places in the pool lie in fixed tensors, so that a graph can be captured over it. It only attends."""

    def __init__(self, cache: "FlashCache"):
        self.cache = cache

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Rows end to end, as `_attend_rows` takes them."""
        B, H, T, D = q.shape
        rows = [x.transpose(1, 2).reshape(B * T, H, D).to(self.cache.k.dtype) for x in (q, k, v)]
        out = self._attend_rows(*rows, self.cache.k[layer], self.cache.v[layer], scale)
        return out.view(B, T, H, D).transpose(1, 2).to(q.dtype)

    def _attend_rows(self, q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, scale: float) -> Tensor:
        """Store k and v (N, H, D) in the pools (H, slots, D), and attend: q (N, H, D) -> (N, H, D)."""
        raise NotImplementedError


class PromptKV(RowsKV):
    """Rows of any number of new tokens, which go through the flash kernel."""

    def __init__(self, cache: "FlashCache", batch: Batch):
        super().__init__(cache)
        self.batch = batch

    def _attend_rows(self, q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, scale: float) -> Tensor:
        store(k, v, k_pool, v_pool, self.batch.slots)
        return paged_flash_attention(q, k_pool, v_pool, self.batch, scale, self.cache.page_size)


class DecodeKV(RowsKV):
    """Rows of one new token each, whose keys are split. table (B, P), lengths (B) tokens stored; -1: no row."""

    def __init__(self, cache: "FlashCache", table: Tensor, lengths: Tensor):
        super().__init__(cache)
        self.table = table
        self.lengths = lengths

    def _attend_rows(self, q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, scale: float) -> Tensor:
        return paged_attention(q, k_pool, v_pool, self.table, self.lengths, self.cache.page_size, scale, (k, v))


class FlashKV(engine.PagedKV):
    """Some sequences of a pool on the GPU."""

    def prepare(self, plan: RowPlan) -> Tensor:
        """The plan on the device. -> its positions (N)."""
        batch = Batch(*upload(batch_arrays(plan, self.cache.BLOCK_M), self.cache.k.device))
        single = max(self.counts) == 1
        rows = DecodeKV(self.cache, batch.table, batch.positions) if single else PromptKV(self.cache, batch)
        self.attend = rows.attend
        return batch.positions


class FlashCache(engine.PagedKVCache):
    """A pool whose pages the kernels read, in the weights' dtype on every device."""

    @property
    def BLOCK_M(self) -> int:
        """How many queries a tile of paged_flash_attention has."""
        return flash_config(self.k.shape[-1], self.k.dtype, 0)[0]

    @staticmethod
    def dtype_beside(weight: Tensor) -> torch.dtype:
        """The weights'."""
        return weight.dtype

    def new_kv(self, tables: list | None = None, counts: list[int] | None = None) -> FlashKV:
        """A place for some sequences of this pool; see engine.PagedKV."""
        return FlashKV(self, tables, counts)


class FlashRunner(engine.Runner):
    """Runs a scheduler's steps on the GPU, one ahead of the host.
    Decoding rows go through a CUDA graph of the next larger batch size, prompts through one of the next larger number
    of tokens; tokens are sampled on the device, which feeds them to the next step itself. A record tells a row's step.
    """

    ahead = 1
    prefill_chunk = 8192

    def __init__(self, model: engine.GPT2Paged, max_batch_size: int):
        super().__init__(model, max_batch_size)
        config = model.config
        slots = max_batch_size + 1
        self.device = model.cache.k.device
        if self.device.type == "cuda" and self.device.index not in (None, torch.cuda.current_device()):
            raise engine.UserError(f"the model is on {self.device}, not on the current device; "
                                   f"CUDA_VISIBLE_DEVICES={self.device.index} chooses it")
        self.state = SamplerState.new(slots, config.vocab_size, self.device)
        can_end = config.eos_token_id is not None and config.eos_token_id < config.vocab_size
        self.eos = config.eos_token_id if can_end else -1
        # A record for each slot, kept from step to step; the last is of a row that is not there.
        self.most_pages = -(-config.n_positions // model.cache.page_size)
        self.records = np.zeros(slots, [*RECORD.descr, ("pages", np.int32, self.most_pages)])
        self.records["slot"] = np.arange(slots)
        self.records["length"] = -1
        self.loaded = [None] * slots                                 # the page table that each record is about,
        self.copied = [0] * slots                                    # and how many of its pages it holds
        self.min_tokens = np.zeros(slots, int)
        self.noise_keys = np.zeros((slots, config.n_positions + 1, 2), np.int32)       # by output length
        self.graphs = {}                                             # by (what is computed, how much)
        self.pool = None                                             # their memory, shared
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
        if any(row.guesses or (row.request.asks_scores and row.request.unscored) for row in rows):
            self.loaded = [None] * len(self.loaded)                  # tokens are made that the device does not note
            return super().launch(rows)
        decoding = [row.request for row in rows if row.decodes]
        prefilling = rows[len(decoding):]                            # those that decode come first
        parts = []
        if decoding:
            parts.append(self._fetch(decoding, *self._decode(self._records(decoding))))
        if prefilling:
            ready = [row.request for row in prefilling if row.samples]
            parts.append(self._fetch(ready, *self._prefill(prefilling, ready)))
        self.model.new_kv([row.request.table for row in rows], [row.count for row in rows]).advance()
        return self._results(parts)

    # --- records

    def _records(self, requests: list[Request]) -> np.ndarray:
        """A record a request: what its step is about."""
        slots, made, lengths, tokens = [], [], [], []
        for request in requests:
            slot, table, output = request.slot, request.table, request.output_ids
            if self.loaded[slot] is not table:
                self._load(request, slot)
            copied = self.copied[slot]
            if len(table.pages) > copied:
                self.records["pages"][slot, copied:len(table.pages)] = table.pages[copied:]
                self.copied[slot] = len(table.pages)
            slots.append(slot)
            made.append(len(output) + request.pending)
            lengths.append(table.length)
            tokens.append(-1 if request.pending else (output or request.prompt_ids)[-1])
        records = self.records[slots]
        records["length"] = lengths
        records["token"] = tokens
        records["key"], records["key2"] = self.noise_keys[slots, made].T
        records["flags"] += sampling.NO_END * (np.array(made) < self.min_tokens[slots])
        return records

    def _load(self, request: Request, slot: int) -> None:
        """A request new in this slot: its part of the record that stays."""
        p = request.params
        for name, value in sampling.record_fields(p, self.model.config.vocab_size).items():
            self.records[name][slot] = value
        self.min_tokens[slot] = p.min_tokens if self.eos >= 0 else 0
        if p.temperature:
            self.noise_keys[slot] = noise_keys(request.key, self.noise_keys.shape[1])
        self.state.load(slot, request)
        self.copied[slot] = 0
        self.loaded[slot] = request.table

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
        return self._run(self._decode_step, rows, [self._lines(records, rows)])

    def _decode_step(self, records):
        model = self.model
        x = embed(records, self.state.last_token, model.wte.weight, model.wpe.weight)[:, None]
        kv = DecodeKV(model.cache, records[:, FIELDS:], records[:, sampling.LENGTH])
        return self._pass(x, kv, slice(None), records)

    def _pass(self, x, kv, keep, records):
        """All layers, and sampling after the positions `keep` -> (tokens, logits)."""
        for block in self.model.h:
            x = block(x, kv)
        logits = self.model.head(x[:, keep]).flatten(0, 1)
        return sample(logits, records, self.state, self.eos), logits

    def _prefill(self, rows, ready):
        """Prompts or chunks of them -> (the next tokens of the requests that are ready, logits)."""
        total = sum(row.count for row in rows)
        size = next((size for size in self.prompts if size >= total), total)
        records = self._records(ready) if ready else []
        return self._run(self._prompt_step, size, self._prompt_arrays(rows, records, size))

    def _prompt_arrays(self, rows, records, size):
        """What `_prompt_step` is given: ids, which positions are sampled, their records, and where the rows lie."""
        cache = self.model.cache
        most = min(len(self.records) - 1, size)                      # rows
        ids, keep = np.zeros((2, size), int)
        fed = sampled = 0
        for row in rows:
            stored = row.request.table.length
            ids[fed:fed + row.count] = row.request.ids[stored:stored + row.count]
            fed += row.count
            if row.samples:
                keep[sampled] = fed - 1
                sampled += 1
        tables = [row.request.table for row in rows]
        plan = plan_rows([table.length for table in tables], [row.count for row in rows],
                         [table.pages for table in tables], cache.page_size).padded(size, most + 1, self.most_pages)
        n_tiles = size // cache.BLOCK_M + most + 1
        return [ids, keep[:most], self._lines(records, most), *batch_arrays(plan, cache.BLOCK_M, n_tiles)]

    def _prompt_step(self, ids, keep, records, *arrays):
        batch = Batch(*arrays)
        x = self.model.embed(ids[None], batch.positions[None])
        return self._pass(x, PromptKV(self.model.cache, batch), keep, records)

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
        """Starts to copy results to the host, at once: the next graph works in the same memory. What follows the
        requests' own rows is padding."""
        tokens = tokens[:len(requests)]
        rows = [i for i, request in enumerate(requests) if request.params.logprobs is not None]
        if not rows:
            return Fetched(requests, to_host(tokens), [], ())
        at, = upload([np.array(rows)], self.device)
        chosen = tokens[at].long().clamp(min=0)[:, None]
        logprobs = (chosen, *sampling.chosen_and_top(logits[at], chosen, 20))
        return Fetched(requests, to_host(tokens), rows, [to_host(x) for x in logprobs])

    def _results(self, parts):
        """What is on its way to the host -> the function that waits for it."""
        done = torch.cuda.Event() if self.device.type == "cuda" else None
        if done:
            done.record()

        def wait() -> list[StepResult]:
            if done:
                done.synchronize()
            return [result for part in parts for result in part.results()]
        return wait


class Fetched(NamedTuple):
    """Results of some requests on their way to the host."""

    requests: list[Request]
    tokens: Tensor                       # (requests)
    rows: list[int]                      # which requests ask for log probabilities: n of them
    logprobs: Sequence[Tensor]           # token (n, 1), its log probability (n, 1), most likely ids and theirs (n, 20)

    def results(self) -> Iterable[StepResult]:
        """Once they are there: a StepResult for each request."""
        logprobs = [None] * len(self.requests)
        for n, (token,), (logprob,), ids, values in zip(self.rows, *(part.tolist() for part in self.logprobs)):
            most = self.requests[n].params.logprobs
            logprobs[n] = TokenLogprobs(token, logprob, dict(zip(ids[:most], values)))
        for request, token, found in zip(self.requests, self.tokens.tolist(), logprobs):
            error = None if token >= 0 else FloatingPointError("the logits hold NaN or infinity")
            yield StepResult(request, (), (token,), (found,), error)


def batch_sizes(most: int) -> list[int]:
    """The batch sizes that get a graph: powers of 2, from 32 on multiples of 32, and the largest."""
    return [*(size for size in (1, 2, 4, 8, 16) if size < most), *range(32, most, 32), most]


def to_host(x: Tensor) -> Tensor:
    """A copy of x on the host, which is there once the device has come so far."""
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
    return host.copy_(x, non_blocking=True)


BACKEND = engine.Backend(linear=FlashLinear, block=FlashBlock, head=flash_head, attention=flash_attention,
                         paged_cache=FlashCache, runner=FlashRunner, pack=pack)


class GPT2Flash(engine.GPT2Paged):
    """GPT-2 on the GPU over the same pages: flash attention for prompts, split keys and CUDA graphs for decoding."""

    backend = BACKEND


def main(argv: Sequence[str] | None = None) -> None:
    """The command line: `--check`, or the benchmarks. Raises SystemExit with one line for what the user can mend."""
    importlib.import_module("benchmarks_cuda").main(argv)


if __name__ == "__main__":  # as the module that benchmarks_cuda.py imports, not as a second copy of it
    importlib.import_module("engine_cuda").main()
