"""From a request to its tokens: one at a time, with a draft that guesses ahead, and many at once in one pass a step."""

import collections
import collections.abc
import copy
import itertools
import queue
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral

import numpy as np
import torch

from errors import OutOfPages, QueueFull, UserError, check_number
from sampling import SamplingParams, sample, token_logprobs
from tokenizer import TextStream

# ---------------------------------------------------------------------------------------------------
# Pages: who owns which (PagePool), which of them are found again (PrefixCache), which are a sequence (PageTable). Their
# memory is the business of engine.PagedKVCache.

def slots_of(tables, rows, positions, page_size: int):
    """Where tokens stand in a pool: tables (B, P) page ids; rows (N) and positions (N) of tokens -> slots (N).

    numpy arrays or tensors; `rows` may be one number.
    """
    return tables[rows, positions // page_size] * page_size + positions % page_size


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
        more = self.missing(count)
        if more:
            with self.cache.lock:
                self.pages += self.cache.allocate(more, after=self.pages[-1] if self.pages else None)

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
            ids, leader, table = request.ids, request.leader, self.cache.new_table()
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
