"""GPT-2 inference from scratch: the plain model, the places where keys and values live, and the variants made of both.

    python engine.py                                 benchmarks: no cache, KV-cache, paged; two minutes
    python engine.py --prompt "The meaning of life is" --model tiny

The one idea: every variant runs the same blocks, and they differ only in where keys and values live. That place is an
object handed to `forward`, with the verbs of `KV`. What a faster machine replaces is named in `Backend`; its defaults,
`PLAIN`, are the torch code of this file, which runs everywhere and is what all else is compared with.

Shapes are written in one alphabet:
    B batch   T new tokens   S stored + new tokens   V vocabulary   L layers
    H heads   D head dim     C = H * D model width   P pages        N tokens of all rows, end to end

The other files, each importing only those above it:
    errors.py, tokenizer.py     one-line errors for users; text to ids and back
    checkpoint.py, sampling.py  names and folders to tensors; logits to the next token
    scheduler.py                pages and who owns them, a request, generate, speculation, continuous batching
    engine.py                   this file; offers every public name of all of them
    instructions.py             what the kernels of engine_cpu.py say in a processor's vector instructions
    engine_cpu.py               numba kernels       engine_cuda.py      Triton kernels, CUDA graphs
    quantization.py             weights of 8 bits   tuning.py           kernels fit themselves to the machine
    budget.py                   how much is measured in two minutes
    benchmarks.py               what each is worth  benchmarks_cuda.py  the same on a GPU
    demo.py                     the server and its page
"""

import argparse
import importlib
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from numbers import Integral
from typing import NamedTuple

# OpenMP's threads wait for each other by spinning, for long. Let them sleep after 20,000 turns: as fast on a quiet
# machine, and where another process takes a core 4 times slower instead of standing still. Read when torch is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from checkpoint import ACTIVATIONS, CPU_DTYPES, GPT2Config, find_model, parse_dtype
from errors import OutOfPages, UserError, check_number, ends_with_one_line, first_line
from sampling import SamplingParams
from scheduler import PagePool, PageTable, Request, RowPlan, Runner, generate, plan_rows
from tokenizer import load_tokenizer, stream_text

# ---------------------------------------------------------------------------------------------------
# Attention, with every score written out.

QUERY_BLOCK = 128


def query_blocks(T: int) -> list[tuple[int, int]]:
    """(first, end) of each block of at most QUERY_BLOCK queries.

    Long prompts are attended block by block, each only over the keys that it may see: half the work of a square of
    scores, and small enough for the processor's cache.
    """
    return [(first, min(first + QUERY_BLOCK, T)) for first in range(0, T, QUERY_BLOCK)]


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Explicit attention: q (B, H, T, D), k and v (B, H, S, D) -> (B, H, T, D), in q's dtype.

    The T queries are the last of the S positions: key j is visible to query t when j <= S - T + t. That one rule
    covers causality, stored tokens and chunks of a prompt. (The `is_causal` of torch's own attention counts from the
    first key instead, which is wrong as soon as anything is stored.) Computed in float32 at least.
    """
    (T, _), S = q.shape[-2:], k.shape[-2]
    if T > QUERY_BLOCK:
        return torch.cat([attention(q[:, :, first:end], k[:, :, :S - T + end], v[:, :, :S - T + end], scale)
                          for first, end in query_blocks(T)], dim=2)
    exact = torch.promote_types(q.dtype, torch.float32)              # a score may exceed float16's largest number
    scores = (q.to(exact) * scale) @ k.to(exact).transpose(-2, -1)                     # (B, H, T, S)
    if T > 1:  # a single query is the last position and sees every key
        hidden = torch.ones(T, S, dtype=torch.bool, device=q.device).triu(S - T + 1)
        scores.masked_fill_(hidden, -math.inf)
    return (torch.softmax(scores, dim=-1) @ v.to(exact)).to(q.dtype)


# ---------------------------------------------------------------------------------------------------
# The block, written once for all variants. Attribute names are the checkpoint's.

class Linear(nn.Module):
    """A projection: x (..., in) -> x weight^T + bias (..., out), multiplied in the weight's dtype.

    weight (out, in), as torch has it; GPT-2's checkpoints store it transposed, see checkpoint.CONV1D. bias (out), None.
    """

    def __init__(self, n_in: int, n_out: int, bias: bool = True):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_out, n_in), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(n_out), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in) -> (..., out)."""
        dtype = self.weight.dtype
        bias = None if self.bias is None else self.bias.to(dtype)    # on a CPU it is float32 beside 16-bit weights
        return F.linear(x.to(dtype), self.weight, bias)              # x weight^T + bias


class LayerNorm(nn.LayerNorm):
    """torch's, whatever the dtypes: over activations in float32 beside weights of 16 bits, as they stand on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        """x (..., C) -> (..., C), in x's dtype."""
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Multi-head self-attention. Where keys and values live is the business of `kv`."""

    def __init__(self, config: GPT2Config, layer: int, linear: type[Linear] = Linear):
        super().__init__()
        self.layer = layer
        self.n_head = config.n_head
        self.c_attn = linear(config.n_embd, 3 * config.n_embd)       # queries, keys and values side by side
        self.c_proj = linear(config.n_embd, config.n_embd)
        # Dot products of D numbers grow as the square root of D: scaled, they spread softmax alike at any head size.
        self.scale = config.head_dim ** -0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            self.scale /= layer + 1

    def forward(self, x: Tensor, kv: "KV") -> Tensor:
        """x (B, T, C) -> (B, T, C)."""
        return self.c_proj(self.attend(self.c_attn(x), kv))

    def attend(self, qkv: Tensor, kv: "KV") -> Tensor:
        """What c_attn made (B, T, 3C) -> what c_proj is given (B, T, C)."""
        B, T, C = *qkv.shape[:2], qkv.shape[2] // 3
        q, k, v = qkv.view(B, T, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)   # 3 x (B, H, T, D)
        out = kv.attend(self.layer, q, k, v, self.scale)             # (B, H, T, D)
        return out.transpose(1, 2).reshape(B, T, C)                  # heads side by side again


class MLP(nn.Module):
    """Two projections with the activation function between them."""

    def __init__(self, config: GPT2Config, linear: type[Linear] = Linear):
        super().__init__()
        inner = config.n_inner or 4 * config.n_embd
        self.c_fc = linear(config.n_embd, inner)                     # wider, where the activation function acts
        self.c_proj = linear(inner, config.n_embd)                   # and back
        self.act = ACTIVATIONS[config.activation_function]

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, C) -> (B, T, C)."""
        return self.c_proj(self.act(self.c_fc(x)))


class Block(nn.Module):
    """One layer: attention, then the MLP, each of a normalised copy of x and added to it (the residual stream)."""

    def __init__(self, config: GPT2Config, layer: int, linear: type[Linear] = Linear):
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = Attention(config, layer, linear)
        self.ln_2 = LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = MLP(config, linear)

    def forward(self, x: Tensor, kv: "KV") -> Tensor:
        """x (B, T, C), which may be written over -> what follows it (B, T, C)."""
        x = x + self.attn(self.ln_1(x), kv)                          # tokens look at each other
        return x + self.mlp(self.ln_2(x))                            # each by itself


def head(x: Tensor, norm: nn.LayerNorm, linear: Linear) -> Tensor:
    """The logits (..., V) float32 of what left the last block (..., C)."""
    return linear(norm(x)).float()


# ---------------------------------------------------------------------------------------------------
# The places where keys and values live.

def check_positions(last: int, limit: int) -> None:
    """Raises UserError unless position `last` is one of the `limit` that the model has an embedding for."""
    if last >= limit:
        raise UserError(f"position {last} is beyond the model's context of {limit} positions (0 to {limit - 1})")


class KV:
    """A place for keys and values, and the verbs that every one of them has. A forward pass calls `reserve` once, then
    `attend` in every layer, then `advance` once.

    length: how many tokens are stored (the most of any row).
    """

    length = 0

    def reserve(self, B: int, T: int, limit: int) -> Tensor:
        """Make room for T more tokens in each of B rows -> their positions (B, T).

        Everything that can fail fails here, before anything runs: raises UserError for a position beyond `limit`, or
        for another number of rows than is stored, and OutOfPages.
        """
        raise NotImplementedError

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Store the new k and v of one layer, and attend to all that it stores; all (B, H, T, D)."""
        raise NotImplementedError

    def advance(self) -> None:
        """The new tokens have passed all layers: count them as stored."""

    def truncate(self, length: int) -> None:
        """Forget the tokens after the first `length`."""

    def release(self) -> None:
        """Give back what was stored. The place is as new."""


class Recompute(KV):
    """Nowhere: keys and values are used once and forgotten, so every step is given all tokens again."""

    def __init__(self, attention: Callable[..., Tensor] = attention):
        self.attention = attention

    def reserve(self, B: int, T: int, limit: int) -> Tensor:
        """All T tokens stand at the start, whatever came before."""
        check_positions(T - 1, limit)
        return torch.arange(T).expand(B, T)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """k and v are all that there is."""
        return self.attention(q, k, v, scale=scale)


class GrowingKV(KV):
    """One tensor a layer for keys and one for values, made anew a little longer at each step."""

    def __init__(self, n_layers: int, attention: Callable[..., Tensor] = attention):
        self.attention = attention
        self.layers: list = [None] * n_layers                        # each (k, v), both (B, H, S, D)
        self.length = 0
        self.coming = 0                                              # new tokens of the pass that runs

    def reserve(self, B: int, T: int, limit: int) -> Tensor:
        """The new tokens stand behind the stored ones."""
        check_positions(self.length + T - 1, limit)
        if self.length and self.layers[0][0].shape[0] != B:
            raise UserError(f"{B} rows were given, but {self.layers[0][0].shape[0]} are stored")
        self.coming = T
        return torch.arange(self.length, self.length + T).expand(B, T)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Lengthen both tensors by copying them, then attend to the whole."""
        if self.length:
            stored_k, stored_v = self.layers[layer]
            k = torch.cat([stored_k[:, :, :self.length], k], dim=2)
            v = torch.cat([stored_v[:, :, :self.length], v], dim=2)
        self.layers[layer] = k, v                                    # the old tensors are freed
        return self.attention(q, k, v, scale=scale)

    def advance(self) -> None:
        """They are in all layers now."""
        self.length += self.coming

    def truncate(self, length: int) -> None:
        """The tensors stay as they are: what lies beyond `length` is not read again."""
        self.length = min(self.length, length)

    def release(self) -> None:
        """Drop the tensors."""
        self.layers = [None] * len(self.layers)
        self.length = 0


# ---------------------------------------------------------------------------------------------------
# Paged keys and values: the memory of a pool (PagedKVCache; scheduler.PagePool says who owns which page), and some
# sequences of it as one forward pass sees them (PagedKV).

class PagedKVCache(PagePool):
    """The memory of a pool of pages, for the keys and values of all sequences, taken once:
    2 * n_layers * n_heads * max_pages * page_size * head_dim numbers.

    Source: Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention".
    """

    def __init__(self, n_layers: int, n_heads: int, head_dim: int, page_size: int = 16, max_pages: int = 256,
                 dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"):
        try:
            super().__init__(page_size, max_pages)
            # Head before slot: the slots of neighbouring pages are one (H, S, D) view, each head's keys in one piece.
            shape = (n_layers, n_heads, max_pages * page_size, head_dim)
            self.k = torch.empty(shape, dtype=dtype, device=device)
            self.v = torch.empty(shape, dtype=dtype, device=device)
        except (RuntimeError, MemoryError) as err:
            raise UserError(f"{max_pages} pages of {page_size} tokens find no memory: {first_line(err)}") from None
        self.hidden = torch.ones(QUERY_BLOCK, QUERY_BLOCK, dtype=torch.bool, device=device).triu(1)
        # Scores of one query over the whole pool; more queries grow it once, so a decode step allocates nothing.
        exact = torch.promote_types(dtype, torch.float32) if self.k.is_cpu else dtype
        self.scratch = torch.empty(n_heads * shape[2], dtype=exact, device=device)

    @staticmethod
    def dtype_beside(weight: Tensor) -> torch.dtype:
        """The dtype of keys and values: the weights', and on a CPU, where torch attends in it, float32 at least."""
        attends = weight.is_floating_point() and not weight.is_cpu
        return weight.dtype if attends else torch.promote_types(weight.dtype, torch.float32)

    def new_kv(self, tables: list[PageTable] | None = None, counts: list[int] | None = None) -> "PagedKV":
        """A place for some sequences of this pool; see PagedKV."""
        return PagedKV(self, tables, counts)

    def runs(self, pages: Sequence[int], length: int) -> list[tuple[int, int]]:
        """The slots of a sequence's first `length` tokens, as (first slot, count) of each contiguous piece."""
        pieces = []
        for position in range(0, length, self.page_size):
            slot = pages[position // self.page_size] * self.page_size
            count = min(self.page_size, length - position)
            if pieces and pieces[-1][0] + pieces[-1][1] == slot:     # it goes on where the last piece ends
                pieces[-1] = pieces[-1][0], pieces[-1][1] + count
            else:
                pieces.append((slot, count))
        return pieces

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k and v (H, N, D) of one layer in the slots (N)."""
        self.k[layer].index_copy_(1, slots, k.to(self.k.dtype))
        self.v[layer].index_copy_(1, slots, v.to(self.v.dtype))

    def attend(self, layer: int, q: Tensor, runs: list[tuple[int, int]], scale: float) -> Tensor:
        """q (H, T, D), the last T of the tokens in `runs` -> (H, T, D). Keys are read where they lie, run by run."""
        (H, T, _), S = q.shape, sum(count for _, count in runs)
        if T > QUERY_BLOCK:
            return torch.cat([self.attend(layer, q[:, first:end], clip_runs(runs, S - T + end), scale)
                              for first, end in query_blocks(T)], dim=1)
        k = self.k[layer]                                                              # (H, slots, D)
        v = self.v[layer]
        with self.lock:
            scores = self._scores(H, T, S)
            parts = scores.split([count for _, count in runs], dim=-1)                 # views: a run's columns
            for part, (first, count) in zip(parts, runs):
                keys = k[:, first:first + count].to(q.dtype).transpose(1, 2)
                torch.baddbmm(part, q, keys, beta=0, alpha=scale, out=part)
            if T > 1:  # of the new keys each query sees its own and those before
                scores[..., S - T:].masked_fill_(self.hidden[:T, :T], -math.inf)
            torch.softmax(scores, dim=-1, out=scores)
            out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
            for part, (first, count) in zip(parts, runs):
                out.baddbmm_(part, v[:, first:first + count].to(q.dtype))
            return out

    def _scores(self, H: int, T: int, S: int) -> Tensor:
        if self.scratch.numel() < H * T * S:
            self.scratch = self.scratch.new_empty(H * T * S)
        return self.scratch[:H * T * S].view(H, T, S)


def clip_runs(runs: list[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    """The runs, (first slot, count) each, of the first `length` tokens."""
    ends = itertools.accumulate(count for _, count in runs)
    return [(first, min(count, count + length - end))
            for (first, count), end in zip(runs, ends) if end - count < length]


class PagedKV(KV):
    """Some sequences of a pool, as one forward pass sees them: a row each, of any length.

    tables: a PageTable a row; None makes new ones at the first step.
    counts: how many new tokens each row brings, where they differ; then ids are (1, N), the rows end to end.
    """

    def __init__(self, cache: PagedKVCache, tables: list[PageTable] | None = None, counts: list[int] | None = None):
        self.cache = cache
        self.tables = tables
        self.given_counts = counts
        self.counts = counts                                         # of the pass that runs

    @property
    def length(self) -> int:
        """The most tokens that a row stores."""
        return max((table.length for table in self.tables or ()), default=0)

    def reserve(self, B: int, T: int, limit: int) -> Tensor:
        """All rows get the pages they need, or OutOfPages is raised and none does."""
        counts = self.given_counts or [T] * B
        tables = self.tables
        if tables is None:  # not stored on self before all checks have passed
            tables = [self.cache.new_table() for _ in counts]
        if sum(counts) != B * T or len(counts) != len(tables):
            raise UserError(f"{B * T} tokens in {len(counts)} rows were given, {len(tables)} rows are stored")
        for table, count in zip(tables, counts):
            check_positions(table.length + count - 1, limit)
        with self.cache.lock:  # all or none: nobody else takes pages between the check and the last row
            self.cache.check_free(sum(table.missing(count) for table, count in zip(tables, counts)))
            for table, count in zip(tables, counts):
                table.grow(count)
        self.tables = tables
        self.counts = counts
        plan = plan_rows([table.length for table in tables], counts, [table.pages for table in tables],
                         self.cache.page_size)
        return self.prepare(plan).view(B, T)

    def prepare(self, plan: RowPlan) -> Tensor:
        """Once a pass, for all layers: what `attend` needs of the plan. -> its positions (N) as a tensor."""
        self.slots = torch.from_numpy(plan.slots).to(self.cache.k.device)
        self.reads = [self.cache.runs(table.pages, table.length + count)
                      for table, count in zip(self.tables, self.counts)]
        return torch.from_numpy(plan.positions)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Write to the slots that were planned, then attend row by row, over the pages where they lie."""
        B, H, T, D = q.shape
        q, k, v = (x.permute(1, 0, 2, 3).reshape(H, B * T, D) for x in (q, k, v))      # rows end to end
        self.cache.write(layer, self.slots, k, v)
        exact = q.to(self.cache.scratch.dtype)                       # scores are computed in it
        out = torch.empty_like(exact)
        rows = zip(out.split(self.counts, dim=1), exact.split(self.counts, dim=1), self.reads)
        for row_out, row_q, runs in rows:
            row_out.copy_(self.cache.attend(layer, row_q, runs, scale))
        return out.view(H, B, T, D).transpose(0, 1).to(k.dtype)

    def advance(self) -> None:
        """The one place where a table's length grows, on every device."""
        for table, count in zip(self.tables, self.counts):
            table.length += count

    def truncate(self, length: int) -> None:
        """In every row."""
        for table in self.tables or ():
            table.truncate(length)

    def release(self) -> None:
        """All pages go back to the pool."""
        for table in self.tables or ():
            table.release()
        self.tables = None


# ---------------------------------------------------------------------------------------------------
# The seam for fast paths.

def do_nothing(model: "GPT2") -> None:
    """The plain path reads the weights where they are."""


class Backend(NamedTuple):
    """What a faster machine replaces, and nothing else: the model, the scheduler and the server know no kernels.

    The defaults are plain torch. engine_cpu.py and engine_cuda.py fill in theirs.
    """

    linear: type[Linear] = Linear                                    # a projection: x weight^T + bias
    block: type[Block] = Block                                       # LayerNorm, attention, MLP
    head: Callable[..., Tensor] = head                               # the last LayerNorm, and logits
    attention: Callable[..., Tensor] = attention                     # of keys and values that lie in one piece
    paged_cache: type[PagedKVCache] = PagedKVCache                   # the pool of pages, and attention over them
    runner: type[Runner] = Runner                                    # a scheduler's step
    pack: Callable[["GPT2"], None] = do_nothing                      # called with a model whose weights are others
    tune: Callable[["GPT2"], None] = do_nothing                      # called with a model that was loaded


PLAIN = Backend()  # the oracle


def best_backend(device: torch.device | str) -> Backend:
    """The fastest backend that this machine has for a device."""
    kind = torch.device(device).type
    try:
        if kind == "cpu":
            return importlib.import_module("engine_cpu").cpu_backend()
        if kind == "cuda":
            return importlib.import_module("engine_cuda").BACKEND
    except ImportError:  # no triton
        pass
    return PLAIN


# ---------------------------------------------------------------------------------------------------
# The model, and its variants.

def check_ids(ids: Tensor, vocab_size: int) -> None:
    """Raises UserError unless ids are whole numbers (B, T) of the vocabulary, at least one.

    Their values are looked at on the CPU only: on a GPU that would mean to wait for it.
    """
    if ids.ndim != 2 or ids.numel() == 0 or ids.is_floating_point():
        raise UserError(f"ids must be whole numbers (B, T), at least 1, not {tuple(ids.shape)} of {ids.dtype}")
    low, high = map(int, torch.aminmax(ids)) if ids.is_cpu else (0, 0)
    if not 0 <= low <= high < vocab_size:
        raise UserError(f"token ids must be from 0 to {vocab_size - 1}, not from {low} to {high}")


class GPT2(nn.Module):
    """GPT-2 that stores nothing: each step recomputes every key and value. The oracle of all others.

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
    """

    name = ""                                                        # what was loaded, once it was
    backend = PLAIN                                                  # of a variant that does not say otherwise
    swaps: tuple[Callable[["GPT2"], None], ...] = ()                 # what exchanged modules since it was made

    def __init__(self, config: GPT2Config, backend: Backend | None = None):
        super().__init__()
        self.config = config
        self.backend = backend or type(self).backend
        linear = self.backend.linear
        # from_pretrained, since nn.Embedding would draw random values: no use here, and on `meta` a second's work.
        self.wte = nn.Embedding.from_pretrained(torch.empty(config.vocab_size, config.n_embd))
        self.wpe = nn.Embedding.from_pretrained(torch.empty(config.n_positions, config.n_embd))
        self.h = nn.ModuleList(self.backend.block(config, layer, linear) for layer in range(config.n_layer))
        self.ln_f = LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.lm_head = linear(config.n_embd, config.vocab_size, bias=False)            # the loader ties it to wte

    def new_kv(self) -> KV:
        """An empty place for keys and values, to be handed to `forward` step after step."""
        return Recompute(self.backend.attention)

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """ids and positions (B, T) -> (B, T, C). On a CPU activations are float32, whatever the weights are."""
        token = self.wte(ids)
        place = self.wpe(positions)
        if token.is_cpu:
            exact = torch.promote_types(token.dtype, torch.float32)
            return token.to(exact) + place.to(exact)
        return token + place

    @torch.no_grad()
    def forward(self, ids: Tensor, kv: KV | None = None, keep: slice | Tensor = slice(None)) -> Tensor:
        """ids (B, T) int64 -> logits (B, T, V) float32 of the new tokens.

        kv: what `new_kv` made; the new tokens stand after what it stores, and are stored. None stores nothing.
        keep: a slice or index over T: the positions whose logits are wanted (the head is 31 % of GPT-2's bytes).
        Raises UserError, before anything runs or is stored, for ids outside the vocabulary, for a position
        beyond the context, and (OutOfPages) where the pool is too small.
        """
        check_ids(ids, self.config.vocab_size)
        kv = Recompute(self.backend.attention) if kv is None else kv
        positions = kv.reserve(*ids.shape, self.config.n_positions).to(ids.device)     # (B, T)
        x = self.embed(ids, positions)                                                 # (B, T, C)
        for block in self.h:
            x = block(x, kv)
        kv.advance()
        return self.head(x[:, keep])                                 # (B, kept, V)

    def head(self, x: Tensor) -> Tensor:
        """The logits (B, T, V) float32 of what left the last block (B, T, C)."""
        return self.backend.head(x, self.ln_f, self.lm_head)

    def linears(self) -> list[Linear]:
        """All projections, the head included."""
        return [module for module in self.modules() if isinstance(module, Linear)]

    def quantize(self) -> None:
        """All projections to int8, in place; see quantization.quantize."""
        importlib.import_module("quantization").quantize(self)

    def load_state_dict(self, *args, **kwargs):
        """torch's; then the backend takes the new weights."""
        found = super().load_state_dict(*args, **kwargs)
        self.backend.pack(self)
        return found

    def _apply(self, *args, **kwargs):
        """What .to() and its like go through; then the backend takes the weights where and as they are now."""
        super()._apply(*args, **kwargs)
        self.backend.pack(self)
        return self


class GPT2Cached(GPT2):
    """GPT-2 with a KV-cache: a step computes the new tokens only, and copies the cache to lengthen it."""

    def new_kv(self) -> GrowingKV:
        """An empty place that grows."""
        return GrowingKV(self.config.n_layer, self.backend.attention)


class GPT2Paged(GPT2):
    """GPT-2 whose keys and values live in the fixed pages of one pool; nothing is ever copied to grow."""

    def __init__(self, config: GPT2Config, page_size: int = 16, max_pages: int = 256, backend: Backend | None = None):
        super().__init__(config, backend)
        check_number("page_size", page_size, Integral, 1)
        check_number("max_pages", max_pages, Integral, 1)
        self.page_size = page_size
        self.max_pages = max_pages
        self.pool: PagedKVCache | None = None

    @property
    def cache(self) -> PagedKVCache:
        """The pool of pages, made at first use, where the weights are. Raises UserError where it finds no memory."""
        if self.pool is None:
            config = self.config
            weight = self.wte.weight
            kind = self.backend.paged_cache
            self.pool = kind(config.n_layer, config.n_head, config.head_dim, self.page_size, self.max_pages,
                             kind.dtype_beside(weight), weight.device)
        return self.pool

    def _apply(self, *args, **kwargs):
        self.pool = None                                             # it lies where the weights were
        return super()._apply(*args, **kwargs)

    def new_kv(self, tables: list[PageTable] | None = None, counts: list[int] | None = None) -> PagedKV:
        """A place for new sequences, or for those of `tables`, which bring `counts` new tokens each; see PagedKV."""
        return self.cache.new_kv(tables, counts)

    def new_runner(self, max_batch_size: int) -> Runner:
        """What runs a scheduler's steps on this model."""
        return self.backend.runner(self, max_batch_size)


# ---------------------------------------------------------------------------------------------------
# From a name to a model.

def load_model(name: str = "auto", variant: type[GPT2] = GPT2Paged, dtype: torch.dtype | str = torch.float32,
               device: torch.device | str = "cpu", stand_in: str = "tiny", backend: Backend | None = None,
               **options) -> GPT2:
    """A model of class `variant`, ready to run; its `name` attribute says what was loaded.

    name: a Hugging Face name (gpt2, gpt2-medium, gpt2-large, gpt2-xl, distilgpt2, owner/name), a folder with
    config.json and weights, `tiny` (assets/tiny), `random` or `random:NAME` (random weights in that shape), or
    `auto`: gpt2, and where neither cache nor hub has it within seconds, `stand_in`, said in one line on stderr.
    dtype: a torch dtype or its name; the matrices are converted to it (on a CPU the rest stays float32), to int8 by
    `quantize`. backend: None is the machine's best, PLAIN the plain path. options go to the class. Raises UserError.
    """
    dtype = parse_dtype(dtype, device)
    source = find_model(str(name), stand_in)
    if backend is None:
        backend = variant.backend if variant.backend is not PLAIN else best_backend(device)
    model = empty_model(variant, source.config, source.name, options, backend)         # no memory is taken yet
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    read_as = torch.float32 if dtype == torch.int8 else dtype
    with_weights(model, source.read(shapes=shapes, dtype=read_as, device=device))
    if dtype == torch.int8:
        model.quantize()
    model.backend.tune(model)
    return model


def empty_model(variant: type[GPT2], config: GPT2Config, name: str, options: dict,
                backend: Backend | None = None) -> GPT2:
    """A model without memory or initial values: the tensors that are read become its parameters."""
    with torch.device("meta"):  # parameters have shapes and no memory
        model = variant(config, backend=backend, **options).requires_grad_(False).eval()
    model.name = name
    return model


def with_weights(model: GPT2, state: dict[str, Tensor]) -> GPT2:
    """The model with the tensors of a state dict as its own, not copies of them. One that is there twice is tied."""
    model.load_state_dict(state, assign=True)
    if state["lm_head.weight"] is state["wte.weight"]:
        model.lm_head.weight = model.wte.weight
    return model


def share_weights(model: GPT2, variant: type[GPT2], backend: Backend | None = None, **options) -> GPT2:
    """The same model as another class, on the same tensors in memory; by the same backend, if `variant` has none."""
    if backend is None:
        backend = variant.backend if variant.backend is not PLAIN else model.backend
    other = empty_model(variant, model.config, model.name, options, backend)
    if model.lm_head.weight is model.wte.weight:
        other.lm_head.weight = other.wte.weight
    for swap in model.swaps:  # such as int8's modules in the place of its projections
        swap(other)
    return with_weights(other, model.state_dict(keep_vars=True))


# ---------------------------------------------------------------------------------------------------
# Command line

VARIANTS = {"no-cache": GPT2, "cached": GPT2Cached, "paged": GPT2Paged}


def run_prompt(args: argparse.Namespace) -> None:
    """Streams the continuation of --prompt to the terminal as it comes; a line of figures goes to stderr."""
    model = load_model(args.model, VARIANTS[args.variant], dtype=args.dtype)
    names = ("temperature", "top_k", "top_p", "repetition_penalty", "seed")
    params = SamplingParams(max_tokens=args.tokens, **{name: getattr(args, name) for name in names})
    request = Request(load_tokenizer().encode_ordinary(args.prompt), params)
    tokens = generate(model, request)
    marks = [time.perf_counter()]

    def timed() -> Iterator[int]:
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


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags of `python engine.py`."""
    import benchmarks

    parser = argparse.ArgumentParser(description="GPT-2 from scratch. Without --prompt: the CPU benchmarks.")
    add = parser.add_argument
    add("--model", default="auto", help="gpt2 or another Hugging Face name, a folder, tiny, random, random:gpt2-xl, "
                                        "auto (gpt2, or a stand-in where it can't be had)")
    add("--dtype", default="float32", choices=CPU_DTYPES)
    add("--threads", type=int, help="default: the physical cores")
    add("--tokens", type=int, default=100, help="new tokens (default 100)")
    add("--full", action="store_true", help="measure everything, however long it takes (default: what fits in "
                                            f"{benchmarks.BUDGET} s)")
    add("--runs", type=int, help=f"rounds of each measurement (default {benchmarks.ROUNDS}, fewer where time is short)")
    add("--prefill-chunk", type=int, default=128, help="prompt tokens a step when batching (default 128)")
    add("--only", choices=benchmarks.BENCHMARKS, help="one benchmark")
    add("--tune", action="store_true", help="show what the kernels' choices cost on this machine, and choose anew")
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


def main(argv: Sequence[str] | None = None) -> None:
    """`python engine.py`: the benchmarks, or with --prompt a text. What a user can mend is one line on stderr."""
    import benchmarks

    args = parse_args(argv)
    with ends_with_one_line("engine.py"):
        check_number("--threads", args.threads, Integral, 1, 1024, optional=True)
        check_number("--runs", args.runs, Integral, 1, 1000, optional=True)
        check_number("--prefill-chunk", args.prefill_chunk, Integral, 1, 100_000)
        check_number("--tokens", args.tokens, Integral, 1 if args.prompt is not None else 2, 1024)
        importlib.import_module("engine_cpu").use_threads(args.threads)
        if args.tune:
            model = load_model(args.model, dtype=args.dtype, stand_in="random")
            importlib.import_module("tuning").show_tuning(model)
        elif args.prompt is None:
            benchmarks.run_benchmarks(args)
        else:
            run_prompt(args)


# `import engine` is all that a user imports: every public name of the project's modules is found here. Those of modules
# that import this one, and of lower ones that are not used above, are looked up when they are asked for.
__all__ = [
    "ABOVE_0", "ACTIVATIONS", "ASSETS", "BATCHING_SECONDS", "BENCHMARKS", "BUDGET", "BUFFERS", "CONV1D", "CPU_DTYPES",
    "DTYPES", "DTYPE_SECONDS", "FEW_ROWS", "FORMATS", "GENERATION_SECONDS", "GPT2", "HASH_1", "HASH_2", "HASH_GOLDEN",
    "HUB_SECONDS", "KV", "LABELS", "MANY_ROWS", "MLP", "PARTS", "PLAIN", "QUERY_BLOCK", "ROUNDS", "SCORED_CHUNK",
    "SENTENCE", "SHAPES",
    "SIZE_LIMITS", "SLOTS", "SPECULATION_SECONDS", "VARIANTS", "Attention", "Backend", "Block", "Budget", "ByteCounter",
    "ContinuousBatchingScheduler", "GPT2Cached", "GPT2Config", "GPT2Paged", "GrowingKV", "Int8Linear", "LayerNorm",
    "Linear", "OutOfPages", "OutputToken", "PagePool", "PageTable", "PagedKV", "PagedKVCache", "Part", "PrefixCache",
    "Progress", "QueueFull", "Recompute", "Replay", "Request", "RowPlan", "Runner", "SamplingParams", "Source",
    "Speculator", "StepCosts", "StepResult", "StepRow", "TextStream", "TokenLogprobs", "UserError", "as_array",
    "attention", "bench_bandwidth", "bench_batching", "bench_bytes", "bench_dtypes", "bench_generation", "bench_prefix",
    "bench_serving", "bench_speculation", "best_backend", "check_config_field", "check_ids", "check_number",
    "check_outputs", "check_positions", "check_request", "choose_narrowing", "chosen_and_top", "clip_runs",
    "count_bytes", "cpu_kernels", "drain_steps", "draw", "empty_model", "empty_weight", "exponential_noise",
    "find_model", "finish_if_done", "first_line", "generate", "gpt2_or", "greedy", "hub_failure", "hub_folder",
    "latencies", "load_model", "load_tokenizer", "main", "make_budget", "median_seconds", "model_folder", "noise_keys",
    "onednn_multiplies", "output_limit", "outputs_match", "parse_args", "parse_dtype", "parts_of_bandwidth",
    "parts_of_batching", "parts_of_bytes", "parts_of_dtypes", "parts_of_generation", "parts_of_prefix",
    "parts_of_speculation", "physical_cores", "plan_rows", "plot_curves", "plot_results", "plot_timelines",
    "print_table", "process_logits", "processor_features", "processor_name", "pyplot", "quantize", "query_blocks",
    "random_prompt", "random_weights", "read_bandwidth", "read_config", "read_tensors", "read_weights", "report",
    "require_match", "run_benchmarks", "run_prompt", "run_request", "sample", "sample_records", "save_figure", "say",
    "sentence_prompt", "share", "share_weights", "shown", "slots_of", "snapshot", "step_parts", "stream_text",
    "take_tokens", "time_generation", "token_logprobs", "token_name", "truncate", "use_threads", "weight_bytes",
    "weight_files", "with_weights",
]


def __getattr__(name: str):
    for module in ("errors", "tokenizer", "checkpoint", "sampling", "scheduler", "instructions", "engine_cpu",
                   "quantization", "tuning", "budget", "benchmarks"):
        if not name.startswith("_") and hasattr(importlib.import_module(module), name):
            globals()[name] = getattr(importlib.import_module(module), name)           # found at once from now on
            return globals()[name]
    raise AttributeError(f"module 'engine' has no attribute {name!r}")


if __name__ == "__main__":  # as the module that all others import: two copies of a class are two classes
    import engine

    engine.main()
