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
import functools
import importlib
import itertools
import math
import os
import sys
import threading
import time
from numbers import Integral

# OpenMP's threads wait for each other by spinning, for long. Let them sleep after 20,000 turns: as fast on a quiet
# machine, and where another process takes a core 4 times slower instead of standing still. Read when torch is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from checkpoint import (
    ACTIVATIONS,
    CPU_DTYPES,
    DTYPES,
    SHAPES,
    GPT2Config,
    aligned_empty,
    empty_weight,
    gpt2_or,
    model_folder,
    random_weights,
    read_config,
    read_weights,
)
from engine_cpu import MANY_ROWS, activations_like, as_array, cpu_kernels, processor_features, use_threads
from errors import OutOfPages, UserError, check_number, first_line
from sampling import SamplingParams, draw, truncate
from scheduler import Request, Runner, generate
from tokenizer import load_tokenizer, stream_text


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
        rounded = empty_weight(self.weight.shape, torch.int8, "cpu").copy_((self.weight / self.scale[:, None]).round())
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
    wide = torch.promote_types(dtype, torch.float32)                 # in float16 a score may exceed the largest number
    q, k, v = q.to(wide), k.to(wide), v.to(wide)
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

    def new_table(self):
        """The page table of a new sequence."""
        return PageTable(self)

    def workspace(self, size):
        """Memory for `size` numbers between a block's operators, kept: taken anew, it would be zeroed page by page."""
        room = self.room  # another thread may replace it
        if room.size < size:
            self.room = room = aligned_empty(1, size, np.empty(0, np.float32))[0]
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
# Models

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


# ---------------------------------------------------------------------------------------------------
# Command line

VARIANTS = {"no-cache": GPT2, "cached": GPT2Cached, "paged": GPT2Paged}


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
    import benchmarks

    parser = argparse.ArgumentParser(description="GPT-2 from scratch. Without --prompt: the CPU benchmarks.")
    add = parser.add_argument
    add("--model", default="auto", help="gpt2 or another Hugging Face name, a folder, tiny, random, random:gpt2-xl, "
                                        "auto (gpt2, or a stand-in where it can't be had)")
    add("--dtype", default="float32", choices=CPU_DTYPES)
    add("--threads", type=int, help="default: the physical cores")
    add("--tokens", type=int, default=100, help="new tokens (default 100)")
    add("--runs", type=int, default=3, help="rounds of each measurement (default 3)")
    add("--prefill-chunk", type=int, default=128, help="prompt tokens a step when batching (default 128)")
    add("--only", choices=benchmarks.BENCHMARKS, help="one benchmark")
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
    import benchmarks

    args = parse_args(argv)
    try:
        check_number("--threads", args.threads, Integral, 1, 1024, optional=True)
        check_number("--runs", args.runs, Integral, 1, 1000)
        check_number("--prefill-chunk", args.prefill_chunk, Integral, 1, 100_000)
        check_number("--tokens", args.tokens, Integral, 1 if args.prompt is not None else 2, 1024)
        use_threads(args.threads)
        benchmarks.run_benchmarks(args) if args.prompt is None else run_prompt(args)
    except UserError as err:
        raise SystemExit(f"engine.py: {err}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:  # whoever read the output has enough; without this the exit would complain once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None


# `import engine` is all that a user imports: every public name of the project's modules is found here. Those of modules
# that import this one are looked up when they are asked for.
__all__ = [
    "ABOVE_0",
    "ACTIVATIONS",
    "ASSETS",
    "BENCHMARKS",
    "BUFFERS",
    "CONV1D",
    "CPU_DTYPES",
    "DTYPES",
    "FEW_ROWS",
    "FORMATS",
    "GPT2",
    "HUB_SECONDS",
    "LABELS",
    "MANY_ROWS",
    "MLP",
    "QUERY_BLOCK",
    "SCORED_CHUNK",
    "SENTENCE",
    "SHAPES",
    "SIZE_LIMITS",
    "SLOTS",
    "VARIANTS",
    "Attention",
    "Block",
    "ByteCounter",
    "ContinuousBatchingScheduler",
    "GPT2Cached",
    "GPT2Config",
    "GPT2Paged",
    "GrowingKV",
    "Linear",
    "OutOfPages",
    "PageTable",
    "PagedKV",
    "PagedKVCache",
    "QueueFull",
    "Recompute",
    "Replay",
    "Request",
    "Runner",
    "SamplingParams",
    "Speculator",
    "TextStream",
    "TokenLogprobs",
    "UserError",
    "activations_like",
    "as_array",
    "attention",
    "bench_bandwidth",
    "bench_batching",
    "bench_bytes",
    "bench_dtypes",
    "bench_generation",
    "bench_prefix",
    "bench_speculation",
    "check_config_field",
    "check_ids",
    "check_number",
    "check_outputs",
    "check_positions",
    "check_request",
    "choose_narrowing",
    "chosen_and_top",
    "clip_runs",
    "count_bytes",
    "cpu_kernels",
    "drain_steps",
    "draw",
    "empty_model",
    "empty_weight",
    "ended",
    "exponential_noise",
    "first_line",
    "forget_arrays",
    "generate",
    "gpt2_or",
    "greedy",
    "hub_failure",
    "hub_folder",
    "intrinsics",
    "latencies",
    "load_model",
    "load_tokenizer",
    "main",
    "median_seconds",
    "model_folder",
    "onednn_multiplies",
    "outcome",
    "output_limit",
    "outputs_match",
    "parse_args",
    "physical_cores",
    "plot_curves",
    "plot_results",
    "plot_timelines",
    "print_table",
    "process_logits",
    "processor_features",
    "processor_name",
    "query_blocks",
    "random_prompt",
    "random_weights",
    "read_bandwidth",
    "read_config",
    "read_tensors",
    "read_weights",
    "report",
    "run_benchmarks",
    "run_prompt",
    "run_request",
    "sample",
    "serve",
    "share_weights",
    "shown",
    "snapshot",
    "step_parts",
    "stream_text",
    "take_tokens",
    "takes",
    "time_generation",
    "token_logprobs",
    "truncate",
    "use_threads",
    "weight_bytes",
    "weight_files",
    "with_weights",
]


def __getattr__(name):
    for module in ("errors", "tokenizer", "checkpoint", "sampling", "scheduler", "engine_cpu", "benchmarks"):
        if name in __all__ and hasattr(importlib.import_module(module), name):
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'engine' has no attribute {name!r}")


if __name__ == "__main__":  # as the module that all others import: two copies of a class are two classes
    import engine

    engine.main()
