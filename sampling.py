"""How the next token is chosen. Order and meaning are vLLM's: bias and minimum length, penalties, temperature, min_p,
top_k, top_p."""

import math
from dataclasses import dataclass
from numbers import Integral, Real

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
    max_tokens          most tokens to generate; None is all that the context holds. min_tokens: no end before
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
    logit_bias: dict | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: str | tuple = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self):
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
        for name in ("logprobs", "prompt_logprobs"):
            check_number(name, getattr(self, name), Integral, 0, 20, optional=True)
        if not isinstance(self.ignore_eos, bool):
            raise UserError(f"ignore_eos must be true or false, not {self.ignore_eos!r}")
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, tuple | list) or not all(isinstance(s, str) and s for s in stop):
            raise UserError(f"stop must be a string or strings of at least 1 character, not {self.stop!r}")
        object.__setattr__(self, "stop", tuple(stop))
        if not isinstance(self.logit_bias, dict | None):
            raise UserError(f"logit_bias must map token ids to numbers, not be {self.logit_bias!r}")
        for token, bias in (self.logit_bias or {}).items():
            check_number("logit_bias token id", token, Integral, 0)
            check_number(f"logit_bias of token {token}", bias, Real, -100, 100)

    @property
    def penalises(self):
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)

    @property
    def truncates(self):
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log probabilities of the model itself: before bias, penalties, temperature and truncation."""

    token: int
    logprob: float
    top: dict  # token id -> logprob, the most likely first


def sample(logits, requests, eos_token_id=None):
    """The next token of each row: logits (B, V), a Request a row -> (ids, TokenLogprobs or None), lists of B.

    A row's result depends on its logits and its request alone, not on its neighbours.
    """
    params = [request.params for request in requests]
    logits = logits.float()
    chosen = process_logits(logits, requests, eos_token_id)                            # (B, V)
    largest, tokens = chosen.max(dim=-1)
    if not largest.isfinite().all():
        raise FloatingPointError("the logits hold NaN or infinity")
    if any(p.temperature for p in params):
        temperature = logits.new_tensor([[p.temperature] for p in params])
        # Of the largest logit only the excess over it counts: near temperature 0 all others become -inf, never NaN.
        probs = torch.softmax((chosen - largest[:, None]) / temperature.clamp(1e-30, 1e30), dim=-1)
        rows = [i for i, p in enumerate(params) if p.temperature and p.truncates]
        if rows:
            probs[rows] = truncate(probs[rows], tokens[rows], [params[i] for i in rows])
        tokens = torch.where(temperature[:, 0] == 0, tokens, draw(probs, [r.noise_key() for r in requests]))
    tokens = tokens.tolist()
    return tokens, token_logprobs(logits, tokens, [p.logprobs for p in params])


def process_logits(logits, requests, eos_token_id):
    """The logits after logit_bias, min_tokens and the penalties; a copy where anything changes."""
    V = logits.shape[-1]
    biased = [(i, token, bias) for i, r in enumerate(requests) for token, bias in (r.params.logit_bias or {}).items()]
    can_end = eos_token_id is not None and eos_token_id < V
    early = [i for i, r in enumerate(requests) if can_end and len(r.output_ids) < r.params.min_tokens]
    penalised = [(i, r) for i, r in enumerate(requests) if r.params.penalises]
    if not (biased or early or penalised):
        return logits
    logits = logits.clone(memory_format=torch.contiguous_format)
    if biased:  # at once: a request may bring hundreds
        rows, tokens, values = (torch.tensor(column, device=logits.device) for column in zip(*biased))
        logits[rows, tokens] += values.to(logits.dtype)
    for i in early:
        logits[i, eos_token_id] = -math.inf
    if penalised:
        flat = logits.view(-1)                                       # row i's token t is at i * V + t
        repetition, frequency, presence = logits.new_tensor(
            [[r.params.repetition_penalty, r.params.frequency_penalty, r.params.presence_penalty] for r in requests],
            dtype=torch.float64).T

        def seen(tokens_of):
            ids = [i * V + token for i, r in penalised for token in tokens_of(r)]
            at, count = torch.tensor(ids, dtype=torch.long, device=flat.device).unique(return_counts=True)
            return at, at // V, count

        at, row, _ = seen(lambda r: r.prompt_ids + r.output_ids)
        value, penalty = flat[at].double(), repetition[row]
        value = torch.where(value > 0, value / penalty, value * penalty)
        lowest = torch.finfo(torch.float32).min                      # finite: a row of -inf alone has no softmax
        flat[at] = value.clamp(min=lowest, max=-lowest).float()
        at, row, count = seen(lambda r: r.output_ids)
        flat[at] -= (frequency[row] * count + presence[row]).float()
    return logits


def truncate(probs, best, params, candidates=1024):
    """probs (B, V) with the tokens that min_p, top_k and top_p exclude set to 0. best (B): the most likely ones."""
    V = probs.shape[-1]
    candidates = min(candidates, V)
    top_k = probs.new_tensor([[p.top_k if 0 < p.top_k < V else V] for p in params])
    top_p = probs.new_tensor([[p.top_p if p.top_p < 1 else math.inf] for p in params], dtype=torch.float64)
    least = probs.new_tensor([[p.min_p] for p in params]) * probs.gather(1, best[:, None])
    if candidates < V:  # a sort of the whole vocabulary is slow and rarely needed
        top, ids = probs.topk(candidates)                                              # most likely first
    else:
        top, ids = probs.sort(dim=-1, descending=True, stable=True)
    # Where several are the most likely, topk names any of them first; it must be the one that greedy takes.
    ids = torch.where(ids == best[:, None], ids[:, :1], ids)
    ids[:, 0] = best
    kept = top.double() * ((torch.arange(candidates, device=probs.device) < top_k) & (top >= least))
    everything = torch.where(top_k <= candidates, kept.sum(-1, keepdim=True),
                             (probs * (probs >= least)).sum(-1, keepdim=True, dtype=torch.float64))
    kept *= kept.cumsum(-1) - kept < top_p * everything
    kept[:, 0] = top[:, 0]
    out = torch.zeros_like(probs).scatter_(1, ids, kept.to(probs.dtype))
    # A row that may keep more than the candidates is done again over all; which rows, each decides for itself.
    again = ((top_k > candidates) & ((kept[:, -1:] > 0) | (top_k < V))).nonzero()[:, 0]
    if len(again):
        out[again] = truncate(probs[again], best[again], [params[i] for i in again.tolist()], candidates=V)
    return out


def draw(probs, keys):
    """One token a row from probs (B, V), not normalised: each token's probability over its own exponential noise;
    the largest wins (the exponential race, Gumbel-max in other words). Rounding in the logits changes the winner
    only where two are all but equal, unlike a walk along the cumulative sum, which every token before it shifts.
    """
    return (probs / exponential_noise(keys, probs.shape[-1], probs.device)).argmax(dim=-1)


def exponential_noise(keys, V, device=None):
    """(B, V) float32, exponentially distributed: an integer hash of each token and its row's noise_key.

    The hash mixes as lowbias32 does (Wellons 2018), and takes the second half of the key on the way.
    """
    first, second = torch.tensor(keys, dtype=torch.int32, device=device)[:, :, None].unbind(1)
    x = torch.arange(V, dtype=torch.int32, device=device) * -1640531527 + first
    x ^= (x >> 16) & 0xFFFF
    x *= 0x7FEB352D
    x ^= ((x >> 15) & 0x1FFFF) ^ second
    x *= -2073254261
    x ^= (x >> 16) & 0xFFFF
    uniform = ((x & 0x7FFFFFFF).float() + 0.5) * 2**-31
    return -torch.log1p(-uniform.clamp(max=1 - 2**-24))


def chosen_and_top(logits, chosen, most):
    """Log probabilities of the tokens chosen (B, 1), and ids and log probabilities of the `most` most likely, where the
    vocabulary has as many; logits (B, V)."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    values, ids = logprobs.topk(min(most, logprobs.shape[1]))
    return logprobs.gather(1, chosen), ids, values


def token_logprobs(logits, tokens, counts):
    """A TokenLogprobs for each row of logits (B, V), with the `counts` most likely tokens; None where that is None."""
    found, rows = [None] * len(counts), [i for i, count in enumerate(counts) if count is not None]
    for some in (rows[at:at + 128] for at in range(0, len(rows), 128)):  # so many rows of the vocabulary at once
        chosen = torch.tensor([[tokens[i]] for i in some], device=logits.device)
        parts = chosen_and_top(logits[some], chosen, max(counts[i] for i in some))
        for i, (logprob,), ids, values in zip(some, *(part.tolist() for part in parts)):
            found[i] = TokenLogprobs(tokens[i], logprob, dict(zip(ids[:counts[i]], values)))
    return found
