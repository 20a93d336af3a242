"""From a request to its tokens: one at a time, with a draft that guesses ahead, and many at once in one pass a step.

Nothing here knows how a model computes: it has a `config`, is called with ids and a place for keys and values, and
makes such places (`new_kv`); for many requests at once it also has a pool of pages (`cache`) and a `new_runner`.
"""

import collections
import copy
import itertools
import queue
import secrets
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from checkpoint import GPT2Config
from errors import OutOfPages, QueueFull, UserError, check_number
from sampling import SamplingParams, TokenLogprobs, sample, token_logprobs
from tokenizer import TextStream

# ---------------------------------------------------------------------------------------------------
# Pages: who owns which (PagePool), which of them are found again (PrefixCache), which are a sequence (PageTable). Their
# memory is the business of engine.PagedKVCache.

def slots_of(tables: Any, rows: Any, positions: Any, page_size: int) -> Any:
    """Where tokens stand in a pool: tables (B, P) page ids; rows (N) and positions (N) of tokens -> slots (N).

    numpy arrays or tensors; `rows` may be one number.
    """
    return tables[rows, positions // page_size] * page_size + positions % page_size


class RowPlan(NamedTuple):
    """Rows of new tokens, end to end, and where each row keeps its keys: what a pass over pages needs to know."""

    stored: np.ndarray       # (B) tokens that a row stores already
    counts: np.ndarray       # (B) new tokens that it brings
    page_ids: np.ndarray     # (B, P) its pages in order, filled up with 0
    slots: np.ndarray        # (N) where a new token is stored; -1 for nowhere
    positions: np.ndarray    # (N) a new token's place in its own sequence

    def spans(self) -> np.ndarray:
        """(B, 3): a row's first new token among all, its new tokens, its stored tokens."""
        return np.stack([np.cumsum(self.counts) - self.counts, self.counts, self.stored], 1)

    def tiles(self, most: int) -> np.ndarray:
        """The rows cut into tiles of at most so many new tokens: row and first token of each (n, 2), those that see
        most keys last."""
        per_row = -(-self.counts // most)
        row_of = np.repeat(np.arange(len(self.counts)), per_row)     # of each tile
        first_tile = np.cumsum(per_row) - per_row
        first_token = (np.arange(per_row.sum()) - first_tile[row_of]) * most
        order = np.argsort(first_token + self.stored[row_of], kind="stable")
        return np.stack([row_of, first_token], 1)[order]

    def padded(self, N: int, B: int, P: int) -> "RowPlan":
        """The same with more tokens, that are stored nowhere, and more rows, that are empty: a step of a fixed size."""
        def pad(array, *shape, value=0):
            larger = np.full(shape, value)
            larger[tuple(map(slice, array.shape))] = array
            return larger
        return RowPlan(pad(self.stored, B), pad(self.counts, B), pad(self.page_ids, B, P), pad(self.slots, N, value=-1),
                       pad(self.positions, N))


def plan_rows(stored: Sequence[int], counts: Sequence[int], pages: Sequence[Sequence[int]], page_size: int) -> RowPlan:
    """The plan of rows with so many tokens in their pages, so many new ones, and these page ids."""
    stored = np.array(stored, np.int64)
    counts = np.array(counts, np.int64)
    page_ids = np.zeros((len(pages), max(map(len, pages), default=0)), np.int64)
    for row, ids in enumerate(pages):
        page_ids[row, :len(ids)] = ids
    first = np.cumsum(counts) - counts                               # of a row's new tokens among all
    positions = np.arange(counts.sum()) - np.repeat(first - stored, counts)
    rows = np.repeat(np.arange(len(counts)), counts)
    return RowPlan(stored, counts, page_ids, slots_of(page_ids, rows, positions, page_size), positions)


class PrefixCache:
    """Which full page holds which tokens, so that a prompt that begins alike finds it again.

    A page is known by a key: (number of the page before it, its own tokens). So it is found only behind the very tokens
    after which it was computed, compared one by one. Numbers are never used twice, unlike page ids: whatever stood
    behind a page that was evicted is not found behind the next that lies there.
    """

    def __init__(self):
        self.known = {}                                              # key -> (page, number)
        self.key_of = {}                                             # page -> key
        self.numbers = itertools.count(1)                            # 0 is the parent of a sequence's first page

    def find(self, parent: int, tokens: Sequence[int]) -> tuple[int, int] | None:
        """(page, its number) of the page that holds `tokens` behind page number `parent`, or None."""
        return self.known.get((parent, tuple(tokens)))

    def add(self, parent: int, tokens: Sequence[int], page: int) -> int | None:
        """Make a page known -> the number of the page that is known for these tokens behind `parent`, maybe another.

        None where the page is known already as following a page since forgotten; so is all that follows it.
        """
        key = parent, tuple(tokens)
        if key not in self.known and page not in self.key_of:
            self.known[key] = page, next(self.numbers)
            self.key_of[page] = key
        return self.known[key][1] if key in self.known else None

    def forget(self, page: int) -> None:
        """The page will hold something else."""
        del self.known[self.key_of.pop(page)]


class PagePool:
    """Who owns which of a fixed number of pages. A page id stands for page_size consecutive tokens of one sequence, in
    every layer.

    Each page is free, used (by one page table or several, counted in `references`) or cached: known to the prefix cache
    and held by nobody, to be taken when it is needed. `lock` is around every change, and may be held around several.
    """

    def __init__(self, page_size: int = 16, max_pages: int = 256):
        check_number("page_size", page_size, Integral, 1)
        check_number("max_pages", max_pages, Integral, 1)
        self.page_size = page_size
        self.max_pages = max_pages
        self.lock = threading.RLock()
        self.is_free = np.ones(max_pages, dtype=bool)
        self.references = np.zeros(max_pages, dtype=np.int64)        # how many page tables hold the page
        self.prefixes = PrefixCache()
        self.unused = {}                                             # cached pages, the least recently used first

    @property
    def free_pages(self) -> int:
        """Pages that hold nothing."""
        return int(np.count_nonzero(self.is_free))

    @property
    def cached_pages(self) -> int:
        """Pages that no sequence holds, kept since a prompt may begin with them."""
        return len(self.unused)

    @property
    def used_pages(self) -> int:
        """Pages that sequences hold."""
        return self.max_pages - self.free_pages - self.cached_pages

    def new_table(self) -> "PageTable":
        """The page table of a new sequence."""
        return PageTable(self)

    def check_free(self, count: int) -> None:
        """Raises OutOfPages where fewer than `count` pages can be had."""
        available = self.free_pages + self.cached_pages
        if count > available:
            raise OutOfPages(f"{count} pages of {self.page_size} tokens are needed, "
                             f"{available} of {self.max_pages} are free")

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Take `count` pages -> their ids, continuing behind page `after` where that is free. Raises OutOfPages.

        Long runs of neighbouring pages are read as one view, so a new run starts in the middle of the longest free
        stretch: whoever writes just before it keeps room to grow.
        """
        self.check_free(count)
        self._evict(count - self.free_pages)
        taken = []
        for _ in range(count):
            page = self.max_pages if after is None else after + 1
            if page >= self.max_pages or not self.is_free[page]:
                page = self._start_of_run(count - len(taken))
            self.is_free[page] = False
            self.references[page] = 1
            taken.append(page)
            after = page
        return taken

    def _evict(self, count: int) -> None:
        for page in list(itertools.islice(self.unused, max(0, count))):
            self.prefixes.forget(page)
            del self.unused[page]
            self.is_free[page] = True

    def _start_of_run(self, count: int) -> int:
        """The page at which a run of `count` pages had best begin."""
        free = np.concatenate(([False], self.is_free, [False]))
        edges = np.flatnonzero(free[1:] != free[:-1])                # where free stretches start and end, in turn
        starts, ends = edges[::2], edges[1::2]
        widest = int((ends - starts).argmax())
        start, end = int(starts[widest]), int(ends[widest])
        return start if start == 0 else max(start, min((start + end) // 2, end - count))

    def hold(self, pages: Sequence[int]) -> None:
        """One more table holds pages that are stored already."""
        for page in pages:
            self.references[page] += 1
            self.unused.pop(page, None)

    def free(self, pages: Sequence[int]) -> None:
        """One table gives its pages back. The last of them are evicted first: a prefix outlives what follows it."""
        for page in reversed(pages):
            self.references[page] -= 1
            if self.references[page] == 0:
                if page in self.prefixes.key_of:
                    self.unused[page] = None
                else:
                    self.is_free[page] = True


class PageTable:
    """The pages of one sequence, in order, and how many of its tokens are stored in them.

    A table belongs to a sequence, not to a layer: one page id holds that page's slots for all layers. It owns its
    pages: a table that is dropped gives them back, as any object does with its memory.
    """

    def __init__(self, pool: PagePool):
        self.cache = pool
        self.pages: list[int] = []
        self.length = 0
        self.known_pages = 0                                         # how many of its pages the prefix cache knows,
        self.parent = 0                                              # and the number of the last of these

    def missing(self, count: int) -> int:
        """How many more pages `count` more tokens need."""
        return max(0, -(-(self.length + count) // self.cache.page_size) - len(self.pages))

    def grow(self, count: int) -> None:
        """Take the pages that `count` more tokens need. Raises OutOfPages and takes none."""
        if self.length + count > len(self.pages) * self.cache.page_size:
            with self.cache.lock:
                last = self.pages[-1] if self.pages else None
                self.pages += self.cache.allocate(self.missing(count), after=last)

    def share(self, pages: Sequence[int]) -> None:
        """Begin with full pages that another table holds or held."""
        with self.cache.lock:
            self.cache.hold(pages)
        self.pages = list(pages)
        self.length = len(pages) * self.cache.page_size

    def match(self, ids: Sequence[int]) -> None:
        """Begin with the longest run of known full pages that hold the first of `ids`."""
        size = self.cache.page_size
        self.parent = 0
        known = []
        with self.cache.lock:
            for first in range(0, len(ids) - size + 1, size):
                found = self.cache.prefixes.find(self.parent, ids[first:first + size])
                if found is None:
                    break
                page, self.parent = found
                known.append(page)
            self.known_pages = len(known)
            self.share(known)

    def remember(self, ids: Sequence[int]) -> None:
        """Make full pages known, so that others who begin with the same ids find them. ids: those of this sequence that
        are known; the last token stored may not be."""
        size = self.cache.page_size
        with self.cache.lock:
            for n in range(self.known_pages, min(self.length, len(ids)) // size):
                number = self.cache.prefixes.add(self.parent, ids[n * size:(n + 1) * size], self.pages[n])
                if number is None:
                    break
                self.parent = number
                self.known_pages = n + 1

    def truncate(self, length: int) -> None:
        """Forget the tokens after the first `length`; their pages stay, for what comes instead."""
        self.length = min(self.length, length)

    def release(self) -> None:
        """Give all pages back."""
        with self.cache.lock:
            self.cache.free(self.pages)
        self.pages = []
        self.length = 0
        self.known_pages = 0
        self.parent = 0

    __del__ = release


# ---------------------------------------------------------------------------------------------------
# A request

class OutputToken(int):
    """A token id as a request's queue hands it over, with what belongs to it, where the request asks for it.

    logprobs   its TokenLogprobs, else None
    text       the text that it makes certain, and
    offset     how many characters of the output's text stand before its own; else None
    time       seconds of time.monotonic(), when a scheduler handed it out
    """

    logprobs: TokenLogprobs | None = None
    text: str | None = None
    offset: int | None = None
    time: float | None = None


class Request:
    """One prompt on its way to a text.

    output_queue        token ids as they come, then None (when a scheduler runs it); OutputTokens where log
                        probabilities or text were asked for. Before it is submitted, anything with a `put` may
                        take its place
    output_ids          all of them
    logprobs            a TokenLogprobs each, where asked for, and one of the end-of-text token that ended them
    prompt_logprobs     a TokenLogprobs for each prompt token after the first, where asked for, before any output
    text                the TextStream of the output, where it has stop strings or `with_text` asks for it; once the
                        request has ended, its `finish` gives what it still holds back
    finish_reason       "stop" (end of text, stop string), "length" (max_tokens, context), "abort", "error"; see `error`
    arrival_time, scheduled_time, token_times, finish_time     seconds of time.monotonic(); None until then
    cached_tokens       prompt tokens whose keys and values were found in the prefix cache
    id                  a name of the caller's choice
    leader              another request with the same prompt, whose prompt pages this one shares
    """

    def __init__(self, prompt_ids: Iterable[int], params: SamplingParams | None = None,
                 leader: "Request | None" = None, with_text: bool = False):
        if not isinstance(params, SamplingParams | None) or not isinstance(prompt_ids, Iterable):
            raise UserError("a request is a list of token ids and SamplingParams, not "
                            f"{type(prompt_ids).__name__} and {type(params).__name__}")
        self.prompt_ids = list(prompt_ids)
        self.params = params or SamplingParams()
        self.leader = leader
        self.id = None
        self.asks_scores = self.params.prompt_logprobs is not None   # for who asks 256 requests a step
        # What it makes.
        self.output_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.text = None
        if self.params.stop or with_text:
            self.text = TextStream(self.params.stop, self.params.min_tokens)
        self.output_queue = queue.SimpleQueue()
        self.finish_reason: str | None = None
        self.error: Exception | None = None
        # Its own random stream.
        seed = secrets.randbits(63) if self.params.seed is None else int(self.params.seed)
        self.key = seed % 2**64
        # What a scheduler notes.
        self.number = None                                           # in order of arrival
        self.limit: int | None = None                                # output_limit, once it was admitted
        self.table: PageTable | None = None                          # its pages, while it runs
        self.slot = None                                             # where it runs, or ran last
        self.pending = 0                                             # tokens that are being computed, not known yet
        self.cancelled = False
        self.cached_tokens = 0
        self.preemptions = 0
        self.arrival_time: float | None = None
        self.scheduled_time: float | None = None
        self.finish_time: float | None = None
        self.token_times: list[float] = []

    @classmethod
    def samples(cls, prompt_ids: Iterable[int], params: SamplingParams, n: int,
                with_text: bool = False) -> "list[Request]":
        """n requests for one prompt. Each has its own random stream: seed, seed + 1, ... The first scores the prompt
        (before the others begin; where they have nothing to do but that, each does)."""
        seeds = [None if params.seed is None else (params.seed + i + 2**63) % 2**64 - 2**63 for i in range(n)]
        first = cls(prompt_ids, replace(params, seed=seeds[0]), with_text=with_text)
        others = params if params.max_tokens == 0 else replace(params, prompt_logprobs=None)
        return [first] + [cls(prompt_ids, replace(others, seed=seed), first, with_text) for seed in seeds[1:]]

    @property
    def ids(self) -> list[int]:
        """Prompt and output."""
        return self.prompt_ids + self.output_ids

    @property
    def todo(self) -> int:
        """How many of its tokens are not stored yet, the pending ones counted in."""
        return len(self.prompt_ids) + len(self.output_ids) + self.pending - self.table.length

    @property
    def unscored(self) -> int:
        """How many prompt tokens are still to be scored."""
        return len(self.prompt_ids) - 1 - len(self.prompt_logprobs) if self.asks_scores else 0

    def noise_key(self) -> list[int]:
        """Two numbers of 32 bits that determine the next token's noise: a function of seed and output length alone."""
        bits = int(np.random.Philox(key=self.key, counter=len(self.output_ids)).random_raw())
        return [(bits & 0xFFFFFFFF) - 2**31, (bits >> 32) - 2**31]

    def score(self, logits: torch.Tensor, stored: int) -> None:
        """Take log probabilities of prompt tokens from logits (n, V) at positions stored, stored + 1, ..."""
        known = len(self.prompt_logprobs)                            # more than are stored, after a preemption
        logits = logits[known - stored:]
        tokens = self.prompt_ids[known + 1:][:len(logits)]
        if not logits[:len(tokens)].isfinite().all():
            raise FloatingPointError("the logits hold NaN or infinity")
        self.prompt_logprobs += token_logprobs(logits, tokens, [self.params.prompt_logprobs] * len(tokens))

    def rows_to_verify(self, guesses: Sequence[int]) -> "list[Request]":
        """This request as it is, and as it will be after each guess: a row for `sample` each."""
        rows = [self]
        for n in range(1, len(guesses) + 1):
            after = copy.copy(self)
            after.output_ids = self.output_ids + list(guesses[:n])
            rows.append(after)
        return rows

    def accept(self, token: int, logprobs: TokenLogprobs | None, config: GPT2Config) -> int | None:
        """Take the next token -> as it is handed out; None where it ends the text and is no part of it.

        Sets finish_reason where it is the last.
        """
        if logprobs is not None:
            self.logprobs.append(logprobs)
        if token == config.eos_token_id and not self.params.ignore_eos:
            self.finish_reason = "stop"
            return None
        self.output_ids.append(token)
        if self.text or logprobs:
            token = OutputToken(token)
            token.logprobs = logprobs
        if self.text:
            token.offset = self.text.decoded
            token.text = self.text.feed(token)
        if self.text and self.text.stopped:
            self.finish_reason = "stop"
        elif len(self.output_ids) >= output_limit(self, config):
            self.finish_reason = "length"
        return token


def check_request(request: Request, config: GPT2Config) -> None:
    """Raises UserError where the prompt or a parameter does not suit the model."""
    if not 1 <= len(request.prompt_ids) <= config.n_positions:
        raise UserError(f"the prompt has {len(request.prompt_ids)} tokens; "
                        f"it must have 1 to {config.n_positions}, the model's context")
    for token in request.prompt_ids:
        if type(token) is not int or not 0 <= token < config.vocab_size:  # what is plainly good is passed quickly
            check_number("a prompt token id", token, Integral, 0, config.vocab_size - 1)
    for token in request.params.logit_bias or {}:
        check_number("a logit_bias token id", token, Integral, 0, config.vocab_size - 1)


def output_limit(request: Request, config: GPT2Config) -> int:
    """How many tokens the request may generate: max_tokens, or what the context leaves."""
    left = config.n_positions + 1 - len(request.prompt_ids)
    most = request.params.max_tokens
    return left if most is None or most > left else most


def finish_if_done(request: Request, config: GPT2Config) -> bool:
    """Gives a request that asks for nothing more the reason "length" -> whether it has a finish reason."""
    if not request.finish_reason and not request.unscored and output_limit(request, config) == 0:
        request.finish_reason = "length"
    return bool(request.finish_reason)


# ---------------------------------------------------------------------------------------------------
# Generation: one loop for every variant.

def generate(model: nn.Module, prompt: Iterable[int] | Request, params: SamplingParams | None = None,
             draft: "Speculator | nn.Module | None" = None) -> Generator[int, None, str]:
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
        draft.validate(model)
    return run_request(model, request, draft)


def run_request(model: nn.Module, request: Request,
                draft: "Speculator | None" = None) -> Generator[int, None, str]:
    """What `generate` returns: one pass a token, or a token and its guesses, until the request ends."""
    kv = model.new_kv()
    device = model.wte.weight.device
    try:
        while not finish_if_done(request, model.config):
            guesses = draft.guess(request, model.config) if draft else []
            # Feed what is not stored yet: without a cache that is everything, with one the last token.
            ids = torch.tensor([request.ids[kv.length:] + guesses]).to(device)
            wanted = ids.shape[1] if request.unscored else 1 + len(guesses)
            logits = model(ids, kv, keep=slice(-wanted, None))[0]
            if request.unscored:
                request.score(logits, 0)
            if output_limit(request, model.config):
                rows = request.rows_to_verify(guesses)
                tokens, logprobs = sample(logits[-len(rows):], rows, model.config.eos_token_id)
                yield from take_tokens(request, tokens, logprobs, guesses, model.config, draft)
            kv.truncate(len(request.ids) - 1)                        # the last token, and wrong guesses, are not stored
        return request.finish_reason
    finally:
        kv.release()
        if draft:
            draft.release()


def take_tokens(request: Request, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None],
                guesses: Sequence[int], config: GPT2Config, draft: "Speculator | None" = None) -> list[int]:
    """Takes what was sampled after the last token and after each guess -> the ids that are output.

    Guesses are right as long as they are what is sampled; the first that is not is replaced, the rest forgotten.
    """
    made = []
    for n, token in enumerate(tokens):
        accepted = request.accept(token, logprobs[n], config)
        if accepted is not None:
            made.append(accepted)
        if request.finish_reason or n == len(guesses) or token != guesses[n]:
            break
    if draft:
        draft.on_verified(request, guesses, n)
    return made


class Speculator:
    """Speculative decoding: a small model guesses the next tokens, the target checks them all in one pass.

    The target reads its weights once for all of them, so each right guess saves it a pass. Guess and check draw
    with the same random number, so the text is exactly the text without speculation, at any temperature, and
    its distribution the target's. `acceptance` is the share of guesses that were right. Serves one request at a
    time. Source: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding"; there the
    guess is accepted with probability min(1, p/q), which is right more often but makes another text.
    """

    def __init__(self, model: nn.Module, tokens: int = 4):
        check_number("draft tokens", tokens, Integral, 1, 64)
        self.model = model
        self.tokens = tokens
        self.request: Request | None = None                          # the one served last, and
        self.kv = model.new_kv()                                     # what the draft stores of it
        self.proposed = 0
        self.accepted = 0

    @property
    def acceptance(self) -> float:
        """The share of guesses that were right."""
        return self.accepted / max(1, self.proposed)

    def validate(self, target: nn.Module) -> None:
        """Raises UserError unless the draft model has the target's vocabulary, and pages of its own."""
        if self.model is target:
            raise UserError("the draft model can't be the target itself; share_weights makes another of it")
        ours, theirs = self.model.config.vocab_size, target.config.vocab_size
        if ours != theirs:
            raise UserError(f"the draft model has a vocabulary of {ours} tokens, the target of {theirs}")

    def guess(self, request: Request, config: GPT2Config) -> list[int]:
        """Up to `tokens` next tokens of the request, fewer where it would end before."""
        if request is not self.request:
            self.release()
            self.request = request
            self.kv = self.model.new_kv()
        tokens_left = min(output_limit(request, config) - len(request.output_ids) - 1,
                          self.model.config.n_positions - len(request.ids))
        guesses: list[int] = []
        for _ in range(min(self.tokens, tokens_left)):
            ids = torch.tensor([(request.ids + guesses)[self.kv.length:]]).to(self.model.wte.weight.device)
            try:
                logits = self.model(ids, self.kv, keep=slice(-1, None))[:, -1]
            except OutOfPages:  # of the draft's own: the target goes on without more guesses
                break
            guesses += sample(logits, request.rows_to_verify(guesses)[-1:], config.eos_token_id)[0]
        return guesses

    def on_verified(self, request: Request, guesses: Sequence[int], right: int) -> None:
        """The target found the first `right` guesses right: forget what was stored after them."""
        self.proposed += len(guesses)
        self.accepted += right
        self.kv.truncate(len(request.ids) - 1)

    def release(self) -> None:
        """Give back what is stored for the request served last."""
        self.kv.release()
        self.request = None


# ---------------------------------------------------------------------------------------------------
# Continuous batching: many requests, one forward pass a step.

SCORED_CHUNK = 512  # prompt tokens a step that are scored: each needs the logits of the whole vocabulary


class StepRow(NamedTuple):
    """What one step does for one request."""

    request: Request
    count: int                # how many of its tokens are fed: the last one, or a chunk of its prompt
    guesses: list[int]        # fed after them, to be verified
    samples: bool             # whether a token is sampled then: not while more of the prompt is to come

    @property
    def decodes(self) -> bool:
        """Whether its prompt is stored: one token goes in, the next comes out."""
        return self.count == 1 and self.samples

    @property
    def wanted(self) -> int:
        """Of how many of its last positions the logits are needed: of all where the prompt is to be scored."""
        if self.request.unscored:
            return self.count
        return 1 + len(self.guesses) if self.samples else 0


class StepResult(NamedTuple):
    """What a step found for one request."""

    request: Request
    guesses: Sequence[int]
    tokens: Sequence[int]                     # sampled after its last token and after each guess, if any was asked for
    logprobs: Sequence[TokenLogprobs | None]  # of each token
    error: Exception | None = None            # what went wrong instead


class Runner:
    """Runs the steps of a scheduler on a model: one forward pass for all rows, then sampling.

    ahead: how many steps may be launched before the results of the one before are asked for. Here none is; a runner on
    a GPU plans one step while another is computed. Pages of a request that has ended may then go to another while a
    step that writes them is on its way: a runner must compute its steps in the order in which they are launched.
    prefill_chunk: prompt tokens a step. 128 is measured: on 2 cores, 8 requests together reach 98 % of the speed
    of unlimited chunks at 128 tokens and 94 % at 64, and a step with a chunk of 128 lasts some 0.13 s.
    """

    ahead = 0
    prefill_chunk = 128

    class Ready(NamedTuple):
        """A row whose logits are there to be sampled: (1 + guesses, V)."""

        request: Request
        guesses: list[int]
        logits: torch.Tensor

    def __init__(self, model: nn.Module, max_batch_size: int):
        self.model = model

    def launch(self, rows: list[StepRow]) -> Callable[[], Iterable[StepResult]]:
        """Start a step -> a function that waits for it and gives a result for each row that samples or fails."""
        wanted = [row.wanted for row in rows]
        logits = self._forward(rows, wanted)
        results, ready = self._score(rows, logits, wanted)
        results += self._sample(ready)
        return lambda: results

    def _forward(self, rows: list[StepRow], wanted: list[int]) -> torch.Tensor:
        """One pass over the new tokens of all rows, end to end -> logits (sum of wanted, V)."""
        ids, keep, counts = [], [], []
        for row, last in zip(rows, wanted):
            stored = row.request.table.length
            ids += row.request.ids[stored:stored + row.count] + row.guesses
            keep += range(len(ids) - last, len(ids))
            counts.append(row.count + len(row.guesses))
        kv = self.model.new_kv([row.request.table for row in rows], counts)
        device = self.model.wte.weight.device
        return self.model(torch.tensor([ids]).to(device), kv, keep=torch.tensor(keep, dtype=torch.long).to(device))[0]

    def _score(self, rows: list[StepRow], logits: torch.Tensor,
               wanted: list[int]) -> "tuple[list[StepResult], list[Runner.Ready]]":
        """Log probabilities of prompts -> results without a token, and the rows that are ready to sample."""
        results, ready = [], []
        for row, last, end in zip(rows, wanted, itertools.accumulate(wanted)):
            request, guesses = row.request, row.guesses
            if request.unscored:
                try:
                    request.score(logits[end - last:end], request.table.length - row.count)
                except Exception as err:
                    results.append(StepResult(request, guesses, [], [], err))
                    continue
            if row.samples and output_limit(request, self.model.config) == 0:
                results.append(StepResult(request, guesses, [], []))
            elif row.samples:
                ready.append(self.Ready(request, guesses, logits[end - 1 - len(guesses):end]))
        return results, ready

    def _sample(self, ready: "list[Runner.Ready]") -> list[StepResult]:
        """Samples all rows together -> their results."""
        if not ready:
            return []
        rows = [one.request.rows_to_verify(one.guesses) for one in ready]
        try:
            tokens, logprobs = sample(torch.cat([one.logits for one in ready]), list(itertools.chain(*rows)),
                                      self.model.config.eos_token_id)
        except Exception:  # one of them is at fault: each alone, so that it fails alone
            return [self._sample_alone(one) for one in ready]
        ends = itertools.accumulate(map(len, rows))
        return [StepResult(one.request, one.guesses, tokens[end - len(own):end], logprobs[end - len(own):end])
                for one, own, end in zip(ready, rows, ends)]

    def _sample_alone(self, one: "Runner.Ready") -> StepResult:
        try:
            rows = one.request.rows_to_verify(one.guesses)
            return StepResult(one.request, one.guesses, *sample(one.logits, rows, self.model.config.eos_token_id))
        except Exception as err:
            return StepResult(one.request, one.guesses, [], [], err)


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

    def __init__(self, model: nn.Module, max_batch_size: int = 8, max_waiting: int = 1024,
                 prefill_chunk: int | None = None, prefix_cache: bool = True, draft: Speculator | None = None,
                 on_finish: Callable[[Request], None] | None = None):
        check_number("max_batch_size", max_batch_size, Integral, 1)
        check_number("max_waiting", max_waiting, Integral, 1)
        check_number("prefill_chunk", prefill_chunk, Integral, 1, optional=True)
        if draft:
            draft.validate(model)
        self.model = model
        self.cache = model.cache
        self.runner = model.new_runner(max_batch_size)
        self.draft = draft
        self.prefix_cache = prefix_cache
        self.max_waiting = max_waiting
        self.prefill_chunk = prefill_chunk or self.runner.prefill_chunk
        self.on_finish = on_finish
        self.waiting = collections.deque()
        self.slots: list[Request | None] = [None] * max_batch_size
        self.in_flight = collections.deque()                         # steps launched: (rows, function that waits)
        self.counts = collections.Counter()                          # since the start; see `stats`
        self.thread: threading.Thread | None = None
        self.stopping = False
        # Whoever holds one of these locks takes only those that stand after it:
        self.lifecycle = threading.Lock()                            # one start or stop at a time
        self.stepping = threading.Lock()                             # one step at a time
        self.changed = threading.Condition()                         # slots, queue, counts; notified of new work
        # then the pool's `lock` (who owns which page), and last the kernels' own (one launch at a time).

    # --- what clients call, from any thread

    def submit(self, *requests: Request) -> None:
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
                request.arrival_time = time.monotonic()
                request.number = self.counts["requests"]
                self.counts["requests"] += 1
                if request.cancelled:
                    self._finish(request, "abort")
                elif finish_if_done(request, self.model.config):
                    self._finish(request, request.finish_reason)
                else:
                    self.waiting.append(request)
            self.changed.notify_all()

    def _check_fit(self, request: Request) -> None:
        tokens = len(request.prompt_ids) + max(0, output_limit(request, self.model.config) - 1)
        capacity = self.cache.max_pages * self.cache.page_size
        if tokens > capacity:
            raise UserError(f"prompt and output need room for {tokens} tokens; the pool has room for {capacity} "
                            f"({self.cache.max_pages} pages of {self.cache.page_size})")

    def cancel(self, request: Request) -> None:
        """End a request with reason "abort" wherever it is; its pages are free after the step that is running."""
        with self.changed:
            request.cancelled = True
            if request in self.waiting:
                self.waiting.remove(request)
                self._finish(request, "abort")
            self.changed.notify_all()

    def start(self) -> None:
        """Run steps in a thread whenever there is work."""
        with self.lifecycle:
            if self.thread is None:
                self.stopping = False
                self.thread = threading.Thread(target=self._loop, name="scheduler", daemon=True)
                self.thread.start()

    def stop(self) -> None:
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
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self.thread is not None and self.thread.is_alive()

    @property
    def running(self) -> list[Request]:
        """The requests that hold a slot, in order of arrival."""
        return sorted(filter(None, self.slots), key=lambda request: request.number)

    def stats(self) -> dict[str, int]:
        """Numbers of requests and pages now, and counts since the start."""
        with self.changed:
            return {"running": len(self.running), "waiting": len(self.waiting), "pages_free": self.cache.free_pages,
                    "pages_used": self.cache.used_pages, "pages_cached": self.cache.cached_pages} | {
                    name: self.counts[name] for name in ("requests", "finished", "steps", "preemptions",
                                                         "prompt_tokens", "cached_tokens", "output_tokens")}

    def snapshot(self) -> dict:
        """Slots, queue and pages at one moment, as plain values: what a page draws.

        slots, waiting   a dict for each request: counts of tokens, state, seconds since it arrived; None: a free slot
        pages            their size, the owner of each (a slot; -1 nobody, -2 the prefix cache), those shared, counts
        """
        now = time.monotonic()
        cache = self.cache
        with self.changed, cache.lock:
            owner = np.where(cache.is_free, -1, -2)
            slots = []
            for slot, request in enumerate(self.slots):
                if request is None:
                    slots.append(None)
                    continue
                owner[request.table.pages] = slot
                slots.append(self._view(request, "decoding" if request.todo <= 1 else "prefilling", now))
            waiting = [self._view(r, "preempted" if r.preemptions else "queued", now) for r in self.waiting]
            shared = np.flatnonzero(cache.references > 1)
            return {"slots": slots, "waiting": waiting, "max_waiting": self.max_waiting,
                    "pages": {"size": cache.page_size, "owner": owner.tolist(), "shared": shared.tolist(),
                              "free": cache.free_pages, "used": cache.used_pages, "cached": cache.cached_pages}}

    def _view(self, request: Request, state: str, now: float) -> dict:
        return {"id": request.id, "state": state, "prompt_tokens": len(request.prompt_ids),
                "cached_tokens": request.cached_tokens, "stored_tokens": request.table.length if request.table else 0,
                "output_tokens": len(request.output_ids), "max_tokens": output_limit(request, self.model.config),
                "preemptions": request.preemptions, "seconds": now - request.arrival_time}

    # --- the engine

    def step(self) -> bool:
        """Admit, one forward pass for all, sample, emit. -> whether there was anything to do."""
        with self.stepping:
            return self._step()

    def _step(self) -> bool:
        """Plan, launch, settle, emit. A step may be planned while the tokens of the last are on their way (pending),
        but not where it guesses, scores a prompt, or has to preempt: then the last is settled first."""
        with self.changed:
            self._drop_cancelled()
            self._admit()
        scores = any(request and request.asks_scores and request.unscored for request in self.slots)
        settled = self._settle(0) if scores or self.draft else False
        guesses = self._guess()
        with self.changed:
            rows = self._plan(guesses)
            while not self._take_pages(rows):
                settled |= self._give_way()
                rows = self._plan(guesses)
        if rows:
            self._launch(rows)
        runs_ahead = rows and not guesses and not scores
        settled |= self._settle(self.runner.ahead if runs_ahead else 0)
        return settled or bool(rows)

    def _drop_cancelled(self) -> None:
        for request in [r for r in (*self.slots, *self.waiting) if r and r.cancelled]:
            if request in self.waiting:
                self.waiting.remove(request)
            self._finish(request, "abort")

    def _admit(self) -> None:
        """Give free slots to the first in the queue, as long as the pool has the pages for their tokens."""
        while self.waiting and None in self.slots:
            request = self.waiting[0]
            table = self.cache.new_table()
            if not self._find_stored(request, table):
                return
            tokens = len(request.ids) - table.length
            # A page to spare for each that is running, or the newcomer would be preempted in the next steps.
            spare = self.cache.page_size * (len(self.slots) - self.slots.count(None))
            try:
                self.cache.check_free(table.missing(tokens + spare))
                table.grow(tokens)
            except OutOfPages:
                table.release()
                return
            if request.scheduled_time is None:  # else it was preempted: these were counted
                request.scheduled_time = time.monotonic()
                request.cached_tokens = table.length
                self.counts["cached_tokens"] += table.length
                self.counts["prompt_tokens"] += len(request.ids)
            self.waiting.popleft()
            request.limit = output_limit(request, self.model.config)
            request.table = table
            request.slot = self.slots.index(None)
            self.slots[request.slot] = request

    def _find_stored(self, request: Request, table: PageTable) -> bool:
        """Begin a table with pages that are stored already -> False while those of its leader are being computed."""
        ids, leader = request.ids, request.leader
        leads = leader and leader.table and leader.table.cache is self.cache and not request.unscored
        if leads:
            if leader.table.length < len(leader.prompt_ids):
                return False
            table.share(leader.table.pages[:(len(request.prompt_ids) - 1) // self.cache.page_size])
        elif self.prefix_cache:  # at least one token is computed, and all that are to be scored
            table.match(ids[:len(request.prompt_logprobs) if request.unscored else -1])
        return True

    def _guess(self) -> list[int]:
        """Speculation, while one request runs alone and decodes -> its guesses, else none."""
        if not self.draft:
            return []
        running = self.running
        if len(running) != 1 or running[0].todo > 1:
            return []
        try:
            return self.draft.guess(running[0], self.model.config)
        except Exception as err:
            self._finish(running[0], "error", err)
            return []

    def _plan(self, guesses: list[int]) -> list[StepRow]:
        """The rows of the next step, the decoding ones first, the oldest of each first. Changes nothing."""
        decoding, prefilling = [], []
        budget = self.prefill_chunk
        for request in self.running:
            todo = request.todo
            if todo == 1:
                # One whose last token is pending has nothing left to do.
                if not request.pending or len(request.output_ids) + request.pending < request.limit:
                    decoding.append(StepRow(request, 1, guesses, True))
            elif todo > 1 and budget:
                count = min(todo, budget, SCORED_CHUNK if request.unscored else todo)
                prefilling.append(StepRow(request, count, [], count == todo))
                budget -= count
        return decoding + prefilling

    def _take_pages(self, rows: list[StepRow]) -> bool:
        """Pages for what the decoding rows will store (a prompt's were taken when it was admitted) -> False where they
        ran out: then somebody has to give way, and the plan does not hold any more."""
        try:
            for row in rows:
                if row.decodes:
                    row.request.table.grow(1 + len(row.guesses))
        except OutOfPages:
            return False
        return True

    def _give_way(self) -> bool:
        """The youngest request gives its pages up and waits at the front; but nobody while tokens are on their way, so
        these are settled first, by which pages may come free. -> whether that was it."""
        if self._settle(0):
            return True
        youngest = self.running[-1]
        self._leave(youngest)
        youngest.preemptions += 1
        self.counts["preemptions"] += 1
        self.waiting.appendleft(youngest)
        return False

    def _launch(self, rows: list[StepRow]) -> None:
        self.counts["steps"] += 1
        try:
            self.in_flight.append((rows, self.runner.launch(rows)))
        except Exception as err:
            for row in rows:
                self._finish(row.request, "error", err)
        else:
            for row in rows:
                row.request.pending += row.samples

    def _settle(self, most: int) -> bool:
        """Wait for the oldest steps, until `most` are in flight, and emit what they found -> whether there were any."""
        settled = False
        while len(self.in_flight) > most:
            rows, wait = self.in_flight.popleft()
            settled = True
            try:
                results = wait()
            except Exception as err:
                results = [StepResult(row.request, [], [], [], err) for row in rows]
            for row in rows:
                row.request.pending -= row.samples
            for result in results:
                self._emit(result)
        return settled

    def _emit(self, result: StepResult) -> None:
        """Hand out a row's next token or tokens, unless the request ended while they were computed."""
        request = result.request
        if request.finish_time is not None:
            return
        if result.error:
            self._finish(request, "error", result.error)
        elif not result.tokens:
            self._finish(request, "length")
        else:
            try:
                made = take_tokens(request, result.tokens, result.logprobs, result.guesses, self.model.config,
                                   self.draft)
                if result.guesses:  # forget the wrong ones
                    request.table.truncate(len(request.ids) - 1)
            except Exception as err:
                self._finish(request, "error", err)
            else:
                self._hand_out(request, made)

    def _hand_out(self, request: Request, tokens: list[int]) -> None:
        now = time.monotonic()
        for token in tokens:
            if type(token) is OutputToken:
                token.time = now
            request.token_times.append(now)
            request.output_queue.put(token)
        self.counts["output_tokens"] += len(tokens)
        table = request.table
        if self.prefix_cache and table.length // self.cache.page_size > table.known_pages:
            table.remember(request.ids)
        if request.finish_reason:
            self._finish(request, request.finish_reason)

    def _leave(self, request: Request) -> None:
        """Out of its slot, and its pages back to the pool."""
        if request.table:
            request.table.release()
            request.table = None
            self.slots[request.slot] = None

    def _finish(self, request: Request, reason: str, error: Exception | None = None) -> None:
        with self.changed:
            self._leave(request)
            if self.draft and self.draft.request is request:
                self.draft.release()
            request.finish_reason = reason
            request.error = error
            request.finish_time = time.monotonic()
            self.counts["finished"] += 1
        if self.on_finish:
            self.on_finish(request)
        request.output_queue.put(None)

    def _loop(self) -> None:
        """The thread: steps while there is work."""
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
