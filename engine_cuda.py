"""GPT-2 on the GPU: Triton kernels, GPT2Flash, and the GPU benchmarks.

    python engine_cuda.py                            benchmarks (needs a GPU)
    python engine_cuda.py --check                    every kernel against float64, on the GPU
    TRITON_INTERPRET=1 python engine_cuda.py --check the same on the CPU, by Triton's interpreter

Shapes use engine.py's alphabet: B batch, T new tokens, S stored + new, H heads, D head dim, C = H * D, V vocabulary,
P pages, N tokens of all rows end to end. Each kernel is one function below; beside it stands its plain torch twin,
which the tests compare it with and which runs in its place on a machine without a GPU.
"""

import functools
import math
import os

import numpy as np
import torch
import triton
import triton.language as tl

import engine

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
UPCAST = tl.constexpr(INTERPRET)  # the interpreter has no bfloat16 product
LOG2_E = math.log2(math.e)


def uses_kernels(x):
    """Whether Triton runs on this tensor; elsewhere the plain twins do."""
    return x.is_cuda or INTERPRET


def power_of_2(n, least=16):
    return max(least, triton.next_power_of_2(n))


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


@triton.jit
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
        first, T, start = (tl.load(rows + 3 * row + i) for i in tl.static_range(3))
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


def flash_config(head_dim, dtype, tiles_of_128):
    """(BLOCK_M, BLOCK_N, warps, stages) for a head dim, and how many tiles of 128 queries there are to share out."""
    if dtype == torch.float32:
        return (64, 32, 4, 2) if head_dim <= 64 else (32, 32, 4, 2)
    if head_dim > 64:
        return (64, 64, 4, 2) if head_dim <= 128 else (64, 32, 8, 2)
    return (128, 64, 4, 3) if tiles_of_128 >= 132 else (64, 64, 4, 3)


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
    if not 0 <= start <= S - T:
        raise engine.UserError(f"start must be from 0 to S - T = {S - T}, not {start}")
    if not uses_kernels(q):
        return engine.attention(q, k[:, :, :start + T], v[:, :, :start + T], scale)
    out = torch.empty_like(q)
    if not out.numel():
        return out
    BLOCK_M, BLOCK_N, warps, stages = config or flash_config(D, q.dtype, B * H * triton.cdiv(T, 128))
    tiles = B * triton.cdiv(T, BLOCK_M)
    _flash_kernel[(tiles * H,)](
        q, k, v, out, None, None, None, scale * LOG2_E, start, T, S, H, tiles, *q.stride()[:3], *k.stride()[:3],
        *v.stride()[:3], *out.stride()[:3], 0, D, BLOCK_M, BLOCK_N, power_of_2(D), 0, precision,
        num_warps=warps, num_stages=stages)
    return out


def check_attention(q, k, v):
    """Raises UserError for shapes, dtypes or strides that the kernels do not take."""
    (*batch, T, D), (*others, S, Dk) = q.shape, k.shape
    if k.shape != v.shape or batch != others or D != Dk or T > S or D > 256:
        raise engine.UserError(f"q (B, H, T, D), k and v (B, H, S, D), T <= S and D <= 256 are needed, "
                               f"not {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in engine.DTYPES.values():
        raise engine.UserError(f"q, k and v must be all {', '.join(engine.DTYPES)}, not {q.dtype}, {k.dtype}, {v.dtype}")
    if D > 1 and not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        raise engine.UserError("the last dimension of q, k and v must be contiguous")


class Rows:
    """Rows of new tokens, end to end, and where each keeps its keys: what the kernels need to know, on the device.

    stored, counts: tokens in the pages before, and new ones, of each row; pages: the page ids of each.
    spans (B, 3) first new token, new, stored; table (B, most pages); slots (N) where new tokens are stored;
    positions (N); tiles (n, 2) row and first query of each tile of BLOCK_M queries. One copy brings them all.
    """

    def __init__(self, stored, counts, pages, page_size, BLOCK_M, device):
        self.page_size = page_size
        stored, counts = np.array(stored), np.array(counts)
        table = np.zeros((len(pages), max(map(len, pages))), np.int32)
        for row, ids in enumerate(pages):
            table[row, :len(ids)] = ids
        first = np.cumsum(counts) - counts
        owner = np.repeat(np.arange(len(counts)), counts)
        positions = np.arange(counts.sum()) - first[owner] + stored[owner]
        slots = table[owner, positions // page_size] * page_size + positions % page_size
        per_row = -(-counts // BLOCK_M)
        tile_row = np.repeat(np.arange(len(counts)), per_row)
        tiles = np.stack([tile_row, (np.arange(per_row.sum()) - (np.cumsum(per_row) - per_row)[tile_row]) * BLOCK_M], 1)
        tiles = tiles[np.argsort(tiles[:, 1] + stored[tiles[:, 0]], kind="stable")]     # the kernel starts at the end
        self.spans, self.table, self.slots, self.positions, self.tiles = upload(
            [np.stack([first, counts, stored], 1), table, slots, positions, tiles], device)


def upload(arrays, device):
    """Arrays of whole numbers -> int32 tensors on the device, by one copy that nobody waits for."""
    flat = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]).astype(np.int32))
    if torch.device(device).type == "cuda":
        flat = flat.pin_memory().to(device, non_blocking=True)
    parts = flat.split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays)]


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
    k = tl.load(k_ptr + n * stride_kn + head * stride_kh + d, mask=d < D)
    v = tl.load(v_ptr + n * stride_vn + head * stride_vh + d, mask=d < D)
    tl.store(k_pool + head * stride_pool_kh + slot * stride_pool_ks + d, k, mask=d < D)
    tl.store(v_pool + head * stride_pool_vh + slot * stride_pool_vs + d, v, mask=d < D)


def store(k, v, k_pool, v_pool, slots):
    """Writes new keys and values (N, H, D) to the `slots` (N) of the pools (H, slots, D)."""
    if not uses_kernels(k):
        k_pool.index_copy_(1, slots.long(), k.transpose(0, 1))
        v_pool.index_copy_(1, slots.long(), v.transpose(0, 1))
        return
    N, H, D = k.shape
    _store_kernel[(N * H,)](k, v, k_pool, v_pool, slots, *k.stride()[:2], *v.stride()[:2], *k_pool.stride()[:2],
                            *v_pool.stride()[:2], H, D, power_of_2(D), num_warps=1)


# ---------------------------------------------------------------------------------------------------
# Flash decoding: one query a row, its keys shared out among several programs, which a second stage combines.

@triton.jit
def _paged_kernel(q_ptr, k_new, v_new, k_pool, v_pool, table, lengths, out_ptr, parts, peaks, scale, H,
                  stride_qb, stride_qh, stride_nb, stride_nh, stride_kh, stride_ks, stride_vh, stride_vs, stride_table,
                  NEW: tl.constexpr, SPLITS: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr,
                  BLOCK_D: tl.constexpr, PAGE: tl.constexpr):
    """One split of the keys of one row and head -> its weighted sum of values (parts), its sum and maximum (peaks).

    With NEW the first split also takes the row's new key, of position lengths[row], and stores it with its value;
    a length below 0 marks a row that is not there.
    """
    task, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, head, d = task // H, task % H, tl.arange(0, BLOCK_D)
    length, real = tl.load(lengths + row), d < D
    table += row * stride_table
    k_pool += head * stride_kh
    v_pool += head * stride_vh
    q = tl.load(q_ptr + row * stride_qb + head * stride_qh + d, mask=real, other=0.0).to(tl.float32) * scale
    acc = tl.zeros((BLOCK_D,), tl.float32)
    l_i, m_i = 0.0, -float("inf")
    if NEW:
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
def _combine_kernel(parts, peaks, out_ptr, SPLITS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The splits of one row and head -> its output. A split without keys has the sum 0."""
    task, s, d = tl.program_id(0).to(tl.int64), tl.arange(0, SPLITS), tl.arange(0, BLOCK_D)
    l_i, m_i = tl.load(peaks + (task * SPLITS + s) * 2), tl.load(peaks + (task * SPLITS + s) * 2 + 1)
    acc = tl.load(parts + (task * SPLITS + s)[:, None] * D + d[None, :], mask=d[None, :] < D, other=0.0)
    weight = tl.where(l_i > 0, tl.exp2(m_i - tl.max(m_i, 0)), 0.0)
    out = tl.sum(acc * weight[:, None], 0) / tl.maximum(tl.sum(l_i * weight, 0), 1e-30)
    tl.store(out_ptr + task * D + d, out, mask=d < D)


def splits_for(tasks, most_keys, programs=264, least_keys=64):
    """Into how many splits, a power of 2, the keys go: enough programs for two on each of an H200's processors."""
    splits = 1
    while splits * tasks < programs and splits * least_keys < most_keys:
        splits *= 2
    return splits


def paged_attention(q, k_pool, v_pool, page_table, lengths, page_size=16, scale=None, new=None, splits=None):
    """One query a row over the keys in its pages: q (B, H, D), pools (H, slots, D) -> (B, H, D).

    page_table (B, P) int32, the pages of each row in order; lengths (B) int32, how many keys each has stored: no
    slot beyond is read. new: (k, v), (B, H, D) each, of the queries' own tokens: they are stored at position
    lengths[row], and attended to as well; a row of length -1 is skipped. Source: Dao et al. 2023, "Flash-Decoding".
    """
    B, H, D = q.shape
    scale = D ** -0.5 if scale is None else scale
    if not uses_kernels(q):
        return paged_attention_twin(q, k_pool, v_pool, page_table, lengths, page_size, scale, new)
    splits = splits or splits_for(B * H, page_table.shape[1] * page_size)
    out = torch.empty((B, H, D), dtype=q.dtype, device=q.device)
    parts = torch.empty((B * H, splits, D) if splits > 1 else 0, dtype=torch.float32, device=q.device)
    peaks = torch.empty((B * H, splits, 2) if splits > 1 else 0, dtype=torch.float32, device=q.device)
    k, v = new or (q, q)
    assert k.stride() == v.stride()
    _paged_kernel[(B * H, splits)](
        q, k, v, k_pool, v_pool, page_table, lengths, out, parts, peaks, scale * LOG2_E, H, *q.stride()[:2],
        *k.stride()[:2], *k_pool.stride()[:2], *v_pool.stride()[:2], page_table.stride(0), new is not None, splits, D,
        32 if D > 64 else 64, power_of_2(D), page_size, num_warps=4)
    if splits > 1:
        _combine_kernel[(B * H,)](parts, peaks, out, splits, D, power_of_2(D), num_warps=1)
    return out


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
def _linear_kernel(x_ptr, weight, bias, norm_weight, norm_bias, residual, out_ptr, eps, rows, N,
                   K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                   WIDTH: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, ACTIVATION: tl.constexpr,
                   RESIDUAL: tl.constexpr):
    """BLOCK_N outputs of all rows: activation(LayerNorm(x) weight^T + bias) + residual, sums in float32.

    x (rows, K), weight (N, K), out and residual (rows, N), all contiguous; WIDTH is K's power of 2.
    """
    m, n = tl.arange(0, ROWS), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row, wide = (m < rows)[:, None], n.to(tl.int64)
    if NORM:
        all_k = tl.arange(0, WIDTH)
        x = tl.load(x_ptr + m[:, None] * K + all_k[None, :], mask=row & (all_k < K)[None, :], other=0.0).to(tl.float32)
        mean = tl.sum(x, 1) / K
        off = tl.where((all_k < K)[None, :], x - mean[:, None], 0.0)
        rstd = tl.rsqrt(tl.sum(off * off, 1) / K + eps)
    acc = tl.zeros((ROWS, BLOCK_N, BLOCK_K), tl.float32)
    for k_lo in tl.static_range(0, K, BLOCK_K):
        k = k_lo + tl.arange(0, BLOCK_K)
        w = tl.load(weight + wide[:, None] * K + k[None, :], mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
        x = tl.load(x_ptr + m[:, None] * K + k[None, :], mask=row & (k < K)[None, :], other=0.0)
        if NORM:
            gain, shift = tl.load(norm_weight + k, mask=k < K, other=0.0), tl.load(norm_bias + k, mask=k < K, other=0.0)
            normed = (x.to(tl.float32) - mean[:, None]) * rstd[:, None] * gain[None, :].to(tl.float32)
            x = (normed + shift[None, :].to(tl.float32)).to(x.dtype)
        acc += x.to(tl.float32)[:, None, :] * w.to(tl.float32)[None, :, :]
    out = tl.sum(acc, 2)                                                               # (ROWS, BLOCK_N)
    at, inside = m[:, None] * N + wide[None, :], row & (n < N)[None, :]
    if BIAS:
        out += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    out = _activate(out, ACTIVATION)
    if RESIDUAL:
        out += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, out, mask=inside)


FUSED_ROWS = 8  # up to how many rows the fused kernel is faster than cuBLAS with the parts around it


def fused_linear(x, linear, norm=None, activation="", residual=None, dtype=None):
    """activation(LayerNorm(x) weight^T + bias) + residual: x (..., in) -> (..., out), one kernel where rows are few.

    linear: an engine.Linear; norm: a nn.LayerNorm or None; activation: a name of engine.ACTIVATIONS or "";
    residual (..., out) or None; dtype: the result's, x's by default.
    """
    N, K = linear.weight.shape
    rows = x.numel() // K
    if rows > FUSED_ROWS or not uses_kernels(x):
        return linear_twin(x, linear, norm, activation, residual, dtype)
    x = x.contiguous()
    out = torch.empty(*x.shape[:-1], N, dtype=dtype or x.dtype, device=x.device)
    BLOCK_N, BLOCK_K, warps = linear_config(N, K)
    _linear_kernel[(triton.cdiv(N, BLOCK_N),)](
        x, linear.weight, linear.bias, norm and norm.weight, norm and norm.bias,
        None if residual is None else residual.contiguous(), out, norm.eps if norm else 0.0, rows, N, K,
        triton.next_power_of_2(rows), BLOCK_N, min(BLOCK_K, power_of_2(K)), power_of_2(K), linear.bias is not None,
        norm is not None, activation, residual is not None, num_warps=warps)
    return out


def linear_config(N, K):
    """(BLOCK_N, BLOCK_K, warps): some 200 programs, so that each processor has one or two."""
    return (4 if N <= 1024 else 16), 512, 4


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
