"""How the next token is chosen. Order and meaning are vLLM's: bias and minimum length, penalties, temperature, min_p,
top_k, top_p."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from errors import ABOVE_0, UserError, check_number


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
    max_tokens          most tokens to generate; None is all that the context holds
    min_tokens          neither the end-of-text token nor a stop string ends the text before so many tokens
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
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: str | Sequence[str] = ()                                   # a tuple once the object is made
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self):
        self._check_numbers()
        if not isinstance(self.ignore_eos, bool):
            raise UserError(f"ignore_eos must be true or false, not {self.ignore_eos!r}")
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, tuple | list) or not all(isinstance(s, str) and s for s in stop):
            raise UserError(f"stop must be a string or strings of at least 1 character, not {self.stop!r}")
        object.__setattr__(self, "stop", tuple(stop))                # the only way to set a field of a frozen object
        if not isinstance(self.logit_bias, dict | None):
            raise UserError(f"logit_bias must map token ids to numbers, not be {self.logit_bias!r}")
        for token, bias in (self.logit_bias or {}).items():
            check_number("logit_bias token id", token, Integral, 0)
            check_number(f"logit_bias of token {token}", bias, Real, -100, 100)

    def _check_numbers(self):
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
        check_number("logprobs", self.logprobs, Integral, 0, 20, optional=True)
        check_number("prompt_logprobs", self.prompt_logprobs, Integral, 0, 20, optional=True)

    @property
    def penalises(self) -> bool:
        """Whether tokens that have occurred change the logits."""
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)

    @property
    def truncates(self) -> bool:
        """Whether some tokens are never drawn, however the noise falls."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


class Sampleable(Protocol):
    """What `sample` reads of a request."""

    params: SamplingParams
    prompt_ids: list[int]
    output_ids: list[int]

    def noise_key(self) -> list[int]:
        """Two numbers of 32 bits, signed, that determine the noise with which the next token is drawn."""


# ---------------------------------------------------------------------------------------------------
# Log probabilities

@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log probabilities of the model itself: before bias, penalties, temperature and truncation."""

    token: int
    logprob: float
    top: dict[int, float]  # token id -> logprob, the most likely first


def chosen_and_top(logits: torch.Tensor, chosen: torch.Tensor,
                   most: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """logits (B, V), chosen token ids (B, 1) -> (their log probabilities (B, 1), ids of the `most` most likely tokens,
    log probabilities of these). The last two are (B, most), or (B, V) where the vocabulary is smaller."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    values, ids = logprobs.topk(min(most, logprobs.shape[1]))
    return logprobs.gather(1, chosen), ids, values


def token_logprobs(logits: torch.Tensor, tokens: Sequence[int],
                   counts: Sequence[int | None]) -> list[TokenLogprobs | None]:
    """A TokenLogprobs for each row of logits (B, V): of its token, and of as many of the most likely as its count says.

    None for a row whose count is None.
    """
    found = [None] * len(counts)
    scored = [row for row, count in enumerate(counts) if count is not None]
    for first in range(0, len(scored), 128):  # a long prompt has many rows, each as wide as the vocabulary
        rows = scored[first:first + 128]
        chosen = torch.tensor([[tokens[row]] for row in rows], device=logits.device)
        parts = chosen_and_top(logits[rows], chosen, max(counts[row] for row in rows))
        # To lists at once: a number fetched from a tensor one by one costs more than the sums.
        logprobs, ids, values = (part.tolist() for part in parts)
        for n, row in enumerate(rows):
            top = dict(zip(ids[n][:counts[row]], values[n]))
            found[row] = TokenLogprobs(tokens[row], logprobs[n][0], top)
    return found


# ---------------------------------------------------------------------------------------------------
# The draw

# The multipliers of the hash that makes the noise, as unsigned numbers of 32 bits; the kernel on the GPU has the same.
HASH_GOLDEN = 0x9E3779B9  # 2**32 over the golden ratio: tokens one after another land far apart
HASH_1 = 0x7FEB352D       # lowbias32's first and second
HASH_2 = 0x846CA68B


def _int32(bits):
    """The signed number of the same 32 bits: torch multiplies no unsigned ones. HASH_GOLDEN becomes -1640531527."""
    return bits - 2**32 if bits >= 2**31 else bits


def noise_keys(key: int, count: int) -> np.ndarray:
    """Request.noise_key of a random stream for output lengths 0 to count - 1: (count, 2) int32."""
    bits = np.random.Philox(key=key).random_raw(4 * count)[::4]      # the first of each counter's four
    return np.stack([(bits & 0xFFFFFFFF).astype(np.int64) - 2**31, (bits >> 32).astype(np.int64) - 2**31], 1)


def exponential_noise(keys: Sequence[Sequence[int]], V: int, device: torch.device | str | None = None) -> torch.Tensor:
    """(B, V) float32, exponentially distributed: an integer hash of each token and of its row's noise key, two int32.

    The same key gives the same noise on every device and in any batch. The hash mixes as lowbias32 does (Wellons
    2018), and takes in the second half of the key on the way.
    """
    first, second = torch.tensor(keys, dtype=torch.int32, device=device)[:, :, None].unbind(1)     # (B, 1) each
    # Products wrap around at 32 bits, as they should. A shift of a signed number copies its sign; the masks clear that.
    x = torch.arange(V, dtype=torch.int32, device=device) * _int32(HASH_GOLDEN) + first            # (B, V)
    x ^= (x >> 16) & 0xFFFF
    x *= _int32(HASH_1)
    x ^= ((x >> 15) & 0x1FFFF) ^ second
    x *= _int32(HASH_2)
    x ^= (x >> 16) & 0xFFFF
    # Half a step above each number of 31 bits, so that 0 can't come out; float32 may round the largest up to 1, whose
    # noise would be infinite.
    uniform = ((x & 0x7FFFFFFF).float() + 0.5) * 2**-31
    return -torch.log1p(-uniform.clamp(max=1 - 2**-24))


def draw(probs: torch.Tensor, keys: Sequence[Sequence[int]]) -> torch.Tensor:
    """One token id a row (B) from probs (B, V), which need not sum to 1; keys: a noise key a row.

    Each token's probability is divided by exponential noise of its own, and the largest wins: the exponential race,
    in other words the Gumbel-max trick. Rounding in the logits changes the winner only where two are all but equal.
    A walk along the cumulative sum is more sensitive: each token before the winner shifts it.
    """
    return (probs / exponential_noise(keys, probs.shape[-1], probs.device)).argmax(dim=-1)


# ---------------------------------------------------------------------------------------------------
# min_p, top_k and top_p

def _most_likely(probs, best, candidates):
    """probs (B, V) -> (the largest `candidates` of each row, their token ids), the most likely first."""
    if candidates < probs.shape[-1]:  # a sort of the whole vocabulary is slow and rarely needed
        top, ids = probs.topk(candidates)
    else:
        top, ids = probs.sort(dim=-1, descending=True, stable=True)
    # Of several that are the most likely, topk may name any first. It must be the one that greedy takes: swap them.
    ids = torch.where(ids == best[:, None], ids[:, :1], ids)
    ids[:, 0] = best
    return top, ids


def _truncate_among(probs, best, params, candidates):
    """`truncate` that looks for the tokens to keep among the `candidates` most likely ones of a row alone.

    -> (probs (B, V) with the others set to 0, indices of the rows for which these candidates were too few)
    """
    V = probs.shape[-1]
    # A column (B, 1) for each limit, with a value that excludes nothing where it is off.
    top_k = probs.new_tensor([[p.top_k if 0 < p.top_k < V else V] for p in params])
    top_p = probs.new_tensor([[p.top_p if p.top_p < 1 else math.inf] for p in params], dtype=torch.float64)
    least = probs.new_tensor([[p.min_p] for p in params]) * probs.gather(1, best[:, None])
    top, ids = _most_likely(probs, best, candidates)                 # (B, candidates)
    kept = top.double() * ((torch.arange(candidates, device=probs.device) < top_k) & (top >= least))
    # top_p is a share of what min_p and top_k leave. Where top_k ends among the candidates, all of that is in `kept`;
    # where it does not, the whole vocabulary is summed, of which min_p alone excludes tokens.
    left_by_min_p = (probs * (probs >= least)).sum(-1, keepdim=True, dtype=torch.float64)
    mass = torch.where(top_k <= candidates, kept.sum(-1, keepdim=True), left_by_min_p)
    # A token stays while those before it have not reached top_p; so the first one always does, whatever is rounded.
    kept *= kept.cumsum(-1) - kept < top_p * mass
    kept[:, 0] = top[:, 0]
    out = torch.zeros_like(probs).scatter_(1, ids, kept.to(probs.dtype))
    # The candidates were too few where top_k does not end among them, and either the last of them was kept, so that
    # more may be, or top_k ends behind them, so that the sum above was over too many.
    too_few = (top_k > candidates) & ((kept[:, -1:] > 0) | (top_k < V))
    return out, too_few.nonzero()[:, 0]


def truncate(probs: torch.Tensor, best: torch.Tensor, params: Sequence[SamplingParams],
             candidates: int = 1024) -> torch.Tensor:
    """probs (B, V) with the tokens that min_p, top_k and top_p exclude set to 0; what is left is not normalised.

    best (B): the most likely tokens. params: of each, top_k, top_p and min_p are read. In two passes: first over the
    `candidates` most likely tokens of each row, which are nearly always enough, then over the whole vocabulary for
    the rows that need it. Each row decides for itself, so that its result does not depend on its neighbours.
    """
    V = probs.shape[-1]
    out, again = _truncate_among(probs, best, params, min(candidates, V))
    if len(again):
        params_again = [params[row] for row in again.tolist()]
        out[again], _ = _truncate_among(probs[again], best[again], params_again, V)
    return out


# ---------------------------------------------------------------------------------------------------
# Bias, minimum length and penalties

def _add_biases(logits, requests):
    """logit_bias, in place, for all rows together: a request may bring hundreds."""
    biases = [(row, token, bias) for row, request in enumerate(requests)
              for token, bias in (request.params.logit_bias or {}).items()]
    rows, tokens, values = (torch.tensor(column, device=logits.device) for column in zip(*biases))
    logits[rows, tokens] += values.to(logits.dtype)


def _count_tokens(ids_of, V, device):
    """ids_of: {row: token ids} -> (where their distinct tokens stand in flattened logits (B * V), how often each
    occurs in its row). Row i's token t stands at i * V + t."""
    places = [row * V + token for row, ids in ids_of.items() for token in ids]
    return torch.tensor(places, dtype=torch.long, device=device).unique(return_counts=True)


def _penalise(logits, requests, rows):
    """Penalties of these rows of logits (B, V), in place: repetition first, in float64, then frequency and presence."""
    V = logits.shape[-1]
    flat = logits.view(-1)
    repetition, frequency, presence = logits.new_tensor(
        [[r.params.repetition_penalty, r.params.frequency_penalty, r.params.presence_penalty] for r in requests],
        dtype=torch.float64).T

    at, _ = _count_tokens({row: requests[row].prompt_ids + requests[row].output_ids for row in rows}, V, flat.device)
    value = flat[at].double()
    penalty = repetition[at // V]
    value = torch.where(value > 0, value / penalty, value * penalty)
    lowest = torch.finfo(torch.float32).min                          # finite: a row of -inf alone has no softmax
    flat[at] = value.clamp(min=lowest, max=-lowest).float()

    at, count = _count_tokens({row: requests[row].output_ids for row in rows}, V, flat.device)
    flat[at] -= (frequency[at // V] * count + presence[at // V]).float()


def process_logits(logits: torch.Tensor, requests: Sequence[Sampleable], eos_token_id: int | None) -> torch.Tensor:
    """logits (B, V) float32 after logit_bias, min_tokens and the penalties; a copy where anything changes."""
    can_end = eos_token_id is not None and eos_token_id < logits.shape[-1]
    is_biased = any(request.params.logit_bias for request in requests)
    too_short = [row for row, request in enumerate(requests)
                 if can_end and len(request.output_ids) < request.params.min_tokens]
    penalised = [row for row, request in enumerate(requests) if request.params.penalises]
    if not (is_biased or too_short or penalised):
        return logits
    logits = logits.clone(memory_format=torch.contiguous_format)     # `_penalise` flattens them
    if is_biased:
        _add_biases(logits, requests)
    if too_short:
        logits[too_short, eos_token_id] = -math.inf
    if penalised:
        _penalise(logits, requests, penalised)
    return logits


# ---------------------------------------------------------------------------------------------------
# All of it

def sample(logits: torch.Tensor, requests: Sequence[Sampleable],
           eos_token_id: int | None = None) -> tuple[list[int], list[TokenLogprobs | None]]:
    """The next token of each row: logits (B, V), a Request a row -> (ids, TokenLogprobs or None), lists of B.

    A row's result depends on its logits and its request alone, not on its neighbours. Raises FloatingPointError where
    the logits of any row hold NaN or infinity.
    """
    params = [request.params for request in requests]
    logits = logits.float()
    processed = process_logits(logits, requests, eos_token_id)       # (B, V)
    largest, most_likely = processed.max(dim=-1)                     # (B) each
    if not largest.isfinite().all():
        raise FloatingPointError("the logits hold NaN or infinity")
    tokens = most_likely
    if any(p.temperature for p in params):
        temperature = logits.new_tensor([[p.temperature] for p in params])
        # Of the largest logit only the excess over it counts: near temperature 0 all others become -inf, never NaN.
        probs = torch.softmax((processed - largest[:, None]) / temperature.clamp(1e-30, 1e30), dim=-1)
        rows = [row for row, p in enumerate(params) if p.temperature and p.truncates]
        if rows:
            probs[rows] = truncate(probs[rows], most_likely[rows], [params[row] for row in rows])
        drawn = draw(probs, [request.noise_key() for request in requests])
        tokens = torch.where(temperature[:, 0] == 0, most_likely, drawn)
    ids = tokens.tolist()
    return ids, token_logprobs(logits, ids, [p.logprobs for p in params])


# ---------------------------------------------------------------------------------------------------
# A request as a record: what a device needs to sample by itself, while the host does not know the last token yet.

# One row's step: these 32-bit fields, then (in a runner) the row's page ids. Positions count fields, 4 bytes each.
RECORD = np.dtype([(name, kind) for kind, names in (
    (np.int32, "slot length token key key2 top_k flags"),
    (np.float32, "temperature top_p min_p repetition frequency presence")) for name in names.split()])
FIELDS = len(RECORD.names)
SLOT, LENGTH, TOKEN = map(RECORD.names.index, ("slot", "length", "token"))
BIASED, PENALISED, NO_END = 1, 2, 4  # bits of flags: there is a logit_bias; a penalty; min_tokens are not reached
IN_PROMPT = 2**16                    # is added to a token's count in the output if the token stands in the prompt


def record_fields(params: SamplingParams, V: int) -> dict[str, float]:
    """The fields of a request's record that stay as long as it runs. Above 0, float32 rounds none of them to 0."""
    def within_float32(value):
        return min(max(value, 1e-30), 1e30)

    return dict(temperature=params.temperature and within_float32(params.temperature),
                top_p=within_float32(params.top_p), top_k=params.top_k if 0 < params.top_k < V else V,
                min_p=params.min_p, repetition=within_float32(params.repetition_penalty),
                frequency=params.frequency_penalty, presence=params.presence_penalty,
                flags=BIASED * bool(params.logit_bias) + PENALISED * params.penalises)


class Truncation(NamedTuple):
    """What `truncate` reads of SamplingParams."""

    top_k: int
    top_p: float
    min_p: float


def sample_records(logits: torch.Tensor, records: torch.Tensor, state: Any, eos: int) -> torch.Tensor:
    """The next token of each row: logits (B, V), records (B, FIELDS or more) int32 -> (B) int32, -1 for a failed row.

    `sample` in other words, and the plain twin of engine_cuda.sample. state: an engine_cuda.SamplerState, where the
    tokens are noted.
    """
    V = logits.shape[1]
    fields = records[:, :FIELDS].contiguous().cpu().numpy().view(RECORD)[:, 0]
    column = {name: torch.from_numpy(fields[name].copy())[:, None] for name in RECORD.names}       # (B, 1) each
    slots = column["slot"][:, 0].long()
    flags = column["flags"]
    z = logits.float() + torch.where(flags & BIASED > 0, state.bias[slots], 0)
    z[:, eos] = torch.where(flags[:, 0] & NO_END > 0, -math.inf, z[:, eos])
    seen = torch.where(flags & PENALISED > 0, state.counts[slots], 0)
    penalised = torch.where(z > 0, z / column["repetition"], z * column["repetition"])
    z = torch.where(seen > 0, penalised.clamp(torch.finfo().min, torch.finfo().max), z)
    made = seen % IN_PROMPT
    z = torch.where(made > 0, z - (made * column["frequency"] + column["presence"]), z)
    largest, tokens = z.max(-1)
    good = largest.isfinite()
    probs = torch.softmax((z - largest[:, None]) / column["temperature"].clamp(1e-30), -1)
    limits = [Truncation(*(line[name].item() for name in Truncation._fields)) for line in fields]
    rows = [i for i, p in enumerate(limits) if good[i] and (p.top_k < V or p.top_p < 1 or p.min_p > 0)]
    if rows:
        probs[rows] = truncate(probs[rows], tokens[rows], [limits[i] for i in rows])
    drawn = draw(probs, torch.cat([column["key"], column["key2"]], 1).tolist())
    tokens = torch.where(column["temperature"][:, 0] > 0, drawn, tokens).int()
    state.last_token[slots] = tokens
    state.counts[slots, tokens.long()] += (good & (flags[:, 0] & PENALISED > 0)).int()
    return torch.where(good, tokens, -1)
