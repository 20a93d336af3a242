"""sample() against its definition, its limits, and its independence of everything else in the batch."""

import math

import numpy as np
import pytest
import torch

import engine
from engine import Request, SamplingParams


def request(prompt=(0,), output=(), **params):
    made = Request(prompt, SamplingParams(**params))
    made.output_ids = list(output)
    return made


def tokens(logits, *requests, eos=None):
    return engine.sample(torch.as_tensor(logits, dtype=torch.float32), requests, eos)[0]


def frequencies(logits, draws=4000, **params):
    """How often each token is drawn, over as many seeds, in one vectorised call."""
    logits = torch.tensor([logits], dtype=torch.float32).expand(draws, -1)
    drawn = tokens(logits, *(request(seed=seed, **params) for seed in range(draws)))
    return np.bincount(drawn, minlength=logits.shape[1]) / draws


def chi_square(observed, expected, draws=4000):
    kept = expected > 0
    assert observed[~kept].sum() == 0
    return (draws * (observed[kept] - expected[kept]) ** 2 / expected[kept]).sum()


LOGITS = [2.0, 1.0, 0.5, 0.0, -1.0, -3.0]


def softmax(x):
    e = np.exp(np.asarray(x, dtype=float) - max(x))
    return e / e.sum()


@pytest.mark.parametrize("params, kept", [
    (dict(), 6), (dict(temperature=0.5), 6), (dict(temperature=3.0), 6),
    (dict(top_k=2), 2), (dict(top_k=6), 6), (dict(top_k=7), 6), (dict(top_k=0), 6), (dict(top_k=-1), 6),
    (dict(top_p=0.5), 1), (dict(top_p=0.6), 2), (dict(top_p=0.8), 3), (dict(top_p=1.0), 6),
    (dict(min_p=0.3), 2), (dict(min_p=0.2), 3), (dict(min_p=1.0), 1), (dict(min_p=0.0), 6),
    (dict(top_k=3, top_p=0.9), 3),            # 0.9 of what top_k leaves: without renormalising it were 4 tokens
    (dict(top_k=2, top_p=0.7), 1),            # 0.73 of the two is the first: without renormalising, 2 tokens
    (dict(min_p=0.3, top_p=0.7), 1),          # the same with min_p before top_p
    (dict(temperature=10.0, min_p=0.8), 4),   # min_p after the temperature
])
def test_distribution(params, kept):
    expected = softmax(np.array(LOGITS) / params.get("temperature", 1.0))
    expected[kept:] = 0
    expected /= expected.sum()
    # 20.5 is the 0.1 % point of chi-square with 5 degrees of freedom; the seeds are fixed.
    assert chi_square(frequencies(LOGITS, **params), expected) < 20.5


def test_nucleus_over_more_candidates_than_one_sort_holds():
    """A flat distribution over 3,000 tokens: top_p reaches far beyond the 1,024 that are sorted first."""
    logits = torch.zeros(1, 3000)
    logits[0, :1500] = 1e-3
    drawn = tokens(logits.expand(4000, -1), *(request(seed=s, top_p=0.5) for s in range(4000)))
    assert max(drawn) < 1500 and len(set(drawn)) > 1300


def definition(logits, top_k, top_p, min_p):
    """Which tokens may be drawn, by the definitions, in float64 and without haste."""
    probs = softmax(logits)
    order = sorted(range(len(probs)), key=lambda i: -probs[i])
    kept = [i for i in order if probs[i] >= min_p * probs[order[0]]][:top_k or None]
    total, mass, out = sum(probs[i] for i in kept), 0.0, []
    for i in kept:
        if mass >= top_p * total:
            break
        out.append(i)
        mass += probs[i]
    return set(out)


@pytest.mark.parametrize("top_k, top_p, min_p", [
    (0, 0.95, 0), (0, 0.5, 0), (0, 0.999, 0), (0, 0.97, 1e-3), (2000, 0.97, 0),
    (1500, 1, 0), (3, 0.9, 0), (1024, 0.9, 0), (0, 0.9, 0.5), (0, 1, 1e-4),
])
def test_truncation_of_a_large_vocabulary(top_k, top_p, min_p):
    """Against the definition, where the tail beyond the 1,024 most likely has weight; alone and beside others."""
    spread = torch.tensor([[0.1], [1.0], [2.0], [4.0]])
    logits = torch.randn(4, 5000, generator=torch.Generator().manual_seed(1)) * spread
    probs, row = torch.softmax(logits, -1), SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    got = engine.truncate(probs, probs.argmax(-1), [row] * 4)
    mixed = [row, SamplingParams(top_k=2), SamplingParams(top_p=0.9999), row]
    beside = engine.truncate(probs, probs.argmax(-1), mixed)
    assert torch.equal(beside[[0, 3]], got[[0, 3]])
    for i in range(4):
        expected = definition(logits[i].tolist(), top_k, top_p, min_p)
        difference = set(got[i].nonzero()[:, 0].tolist()) ^ expected
        assert len(difference) <= 1                                            # one at the edge, for float32's sake
        assert torch.equal(engine.truncate(probs[i:i + 1], probs[i:i + 1].argmax(-1), [row])[0], got[i])


def test_ties_do_not_depend_on_neighbours():
    flat = torch.zeros(2, 50000)
    for seed in range(5):
        row = request(seed=seed, top_k=5)
        assert tokens(flat, row, request(top_k=2000, seed=1))[0] == tokens(flat[:1], row)[0]


def test_greedy_and_its_equals():
    draw = torch.Generator().manual_seed(0)
    logits = torch.randint(0, 4, (64, 5000), generator=draw).float()          # many ties
    greedy = tokens(logits, *[request(temperature=0)] * 64)
    assert greedy == logits.argmax(-1).tolist()
    for params in (dict(top_p=1e-9), dict(top_k=1), dict(temperature=5e-324, top_p=1e-9), dict(min_p=1.0, top_k=1)):
        assert tokens(logits, *(request(seed=i, **params) for i in range(64))) == greedy
    distinct = torch.randn(64, 5000, generator=draw)
    for params in (dict(temperature=1e-30), dict(temperature=5e-324), dict(temperature=1e-30, top_k=5),
                   dict(min_p=1.0)):
        assert tokens(distinct, *(request(seed=i, **params) for i in range(64))) == distinct.argmax(-1).tolist()


def test_extreme_settings_stay_finite():
    """Limits of the allowed ranges, on rows that hold 0 and whose every token is penalised."""
    logits = torch.tensor([[0.0, -1.0, 1.0, -3.0]]).expand(200, -1)
    for params in (dict(repetition_penalty=1e300), dict(repetition_penalty=5e-324), dict(temperature=1e300),
                   dict(temperature=1e-300, repetition_penalty=1e300)):
        drawn = tokens(logits, *(request(range(4), seed=i, **params) for i in range(200)))
        assert set(drawn) <= {0, 1, 2, 3}
        assert len(set(drawn)) == 4 or params.get("temperature") != 1e300     # all alike when infinitely hot
    assert tokens(logits[:1], request(temperature=1e39, min_tokens=1, seed=3), eos=2)[0] != 2
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(FloatingPointError):
            tokens([[1.0, value, 2.0] if value > 0 or value != value else [value] * 3], request())


def test_penalties_by_hand():
    """vLLM's order: repetition (sign-aware, prompt and output), then frequency and presence (output only)."""
    logits = [3.0, 2.0, -1.0, 0.5, -4.0]
    row = request(prompt=[0, 2, 2], output=[1, 4, 4], repetition_penalty=2.0, frequency_penalty=0.25,
                  presence_penalty=0.5)
    got = engine.process_logits(torch.tensor([logits]), [row], None)
    assert got.tolist() == [[1.5, 1.0 - 0.25 - 0.5, -2.0, 0.5, -8.0 - 2 * 0.25 - 0.5]]
    plain = request(prompt=[0, 2], output=[1])
    both = engine.process_logits(torch.tensor([logits, logits]), [plain, row], None)
    assert both[0].tolist() == logits and both[1].tolist() == got[0].tolist()
    biased = request(output=[1], logit_bias={1: 5, 3: -100.0}, repetition_penalty=2.0)
    assert engine.process_logits(torch.tensor([logits]), [biased], None)[0].tolist() == [1.5, 3.5, -1.0, -99.5, -4.0]
    prompt_only = request(prompt=[0, 1], output=[], presence_penalty=2.0, frequency_penalty=2.0)
    assert engine.process_logits(torch.tensor([logits]), [prompt_only], None)[0].tolist() == logits


def test_repetition_penalty_is_transformers():
    from transformers import RepetitionPenaltyLogitsProcessor

    logits, ids = torch.randn(1, 200), [3, 17, 17, 180]
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([ids]), logits.clone())
    got = engine.process_logits(logits, [request(prompt=ids[:2], output=ids[2:], repetition_penalty=1.3)], None)
    torch.testing.assert_close(got, expected)


def test_min_tokens_keeps_the_end_away():
    logits = [0.0, 9.0, 1.0]
    assert tokens([logits], request(temperature=0, min_tokens=2), eos=1) == [2]
    assert tokens([logits], request(temperature=0, min_tokens=2, output=[0]), eos=1) == [2]
    assert tokens([logits], request(temperature=0, min_tokens=2, output=[0, 0]), eos=1) == [1]
    assert tokens([logits[::-1]], request(temperature=0, min_tokens=2), eos=0) == [1]
    assert tokens([logits], request(temperature=0, min_tokens=2), eos=50256) == [1]    # no such token, no harm


def test_the_input_is_left_as_it_was():
    logits = torch.randn(3, 40)
    before = logits.clone()
    rows = [request(logit_bias={1: 5}, repetition_penalty=2.0, min_tokens=3), request(top_k=3, seed=1), request()]
    engine.sample(logits, rows, 0)
    assert torch.equal(logits, before)


def test_a_row_does_not_depend_on_its_neighbours():
    draw = torch.Generator().manual_seed(1)
    logits = torch.randn(9, 3000, generator=draw) * 3
    settings = [dict(), dict(temperature=0), dict(top_k=5), dict(top_p=0.9), dict(min_p=0.1),
                dict(top_k=2000, top_p=0.99), dict(repetition_penalty=1.5),
                dict(frequency_penalty=1.0, presence_penalty=-1.0), dict(logit_bias={7: 50.0})]
    rows = [request(prompt=[1, 2, 3], output=[4, 4], seed=i, logprobs=2, **s) for i, s in enumerate(settings)]
    together = engine.sample(logits, rows, 0)
    for i, row in enumerate(rows):
        alone = engine.sample(logits[i:i + 1], [row], 0)
        assert alone == ([together[0][i]], [together[1][i]])


def test_seeds():
    flat = torch.zeros(1, 50000)
    def series(seed):
        return [tokens(flat, request(output=[0] * n, seed=seed))[0] for n in range(20)]
    assert series(5) == series(5)
    assert len({tuple(series(seed)) for seed in (0, 1, 5, -1, 2**63 - 1, -2**63)}) == 6
    assert series(None) != series(None)
    assert len(set(series(5))) > 15


def test_noise_is_exponential_and_independent():
    """Across tokens, across a request's positions, across seeds; and it reaches the smallest probabilities."""
    keys = [request(seed=seed, output=[0] * n).noise_key() for seed in (0, 1, -1) for n in range(100)]
    assert len({tuple(key) for key in keys}) == 300
    noise = engine.exponential_noise(keys, 5000).double()
    assert noise.min() > 0 and noise.max() < 20 and noise.min() < 1e-5
    for moment, expected in ((1, 1.0), (2, 2.0), (3, 6.0)):
        assert (noise ** moment).mean().item() == pytest.approx(expected, rel=0.02)
    uniform = torch.exp(-noise)
    for axis in (0, 1):
        assert abs(uniform.mean(axis) - 0.5).max() < 6 * (1 / 12 / noise.shape[axis]) ** 0.5
    correlation = torch.corrcoef(uniform)
    assert correlation.fill_diagonal_(0).abs().max() < 6 / 5000 ** 0.5
    neighbours = torch.corrcoef(torch.stack([uniform[:, 1:].ravel(), uniform[:, :-1].ravel()]))[0, 1]
    assert abs(neighbours) < 6 / noise.numel() ** 0.5
    counts = torch.histc(uniform.float(), 100, 0, 1)
    assert ((counts - 15000) ** 2 / 15000).sum() < 99 + 5 * (2 * 99) ** 0.5


def test_draws_reach_no_token_of_probability_zero():
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0], [0.0, 0.0, 1e-30, 0.0, 0.0]]).repeat(500, 1)
    drawn = engine.draw(probs, [request(seed=seed).noise_key() for seed in range(1000)]).view(500, 2)
    assert set(drawn[:, 0].tolist()) == {1, 3} and set(drawn[:, 1].tolist()) == {2}


def test_noise_in_the_logits_changes_next_to_no_draw():
    """As kernels for other batch sizes round otherwise: 1e-5 of noise on flat rows of a large vocabulary."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(500, 20000, generator=draw)
    rows = [request(seed=seed) for seed in range(500)]
    noisy = logits + 1e-5 * torch.randn(500, 20000, generator=draw)
    assert sum(a != b for a, b in zip(tokens(logits, *rows), tokens(noisy, *rows))) <= 1


def test_logprobs_are_the_models_own():
    logits = torch.tensor([LOGITS, LOGITS])
    rows = [request(temperature=0.1, top_k=1, logit_bias={4: 100.0}, logprobs=3), request()]
    _, (found, none) = engine.sample(logits, rows)
    expected = np.log(softmax(LOGITS))
    assert none is None and found.token == 4
    assert found.logprob == pytest.approx(expected[4], abs=1e-6)
    assert list(found.top) == [0, 1, 2]
    assert list(found.top.values()) == pytest.approx(expected[:3], abs=1e-6)
    _, (found,) = engine.sample(logits[:1], [request(temperature=0, logprobs=0)])
    assert found.top == {} and found.token == 0
    _, (found,) = engine.sample(logits[:1], [request(temperature=0, logprobs=20)])
    assert len(found.top) == 6                                                # no more than the vocabulary


WRONG = {
    "temperature": ([-0.1, math.nan, math.inf, -math.inf, 10**400, "1", None, True, [1.0], 1j],
                    "a finite number from 0"),
    "top_k": ([-2, 1.5, "3", None, False, math.nan], "a whole number from -1"),
    "top_p": ([0, 0.0, -0.5, 1.0001, math.nan, math.inf, "1", None], "a finite number above 0 to 1"),
    "min_p": ([-0.1, 1.1, math.nan, "0", None], "a finite number from 0 to 1"),
    "repetition_penalty": ([0, 0.0, -1, math.nan, math.inf, None, "1"], "a finite number above 0"),
    "presence_penalty": ([-2.1, 2.1, math.nan, None, "0"], "a finite number from -2 to 2"),
    "frequency_penalty": ([-2.1, 2.1, math.inf, None, "0"], "a finite number from -2 to 2"),
    "seed": ([1.0, "1", 2**63, -2**63 - 1, True, math.nan], f"a whole number from {-2**63} to {2**63 - 1}"),
    "max_tokens": ([-1, 1.0, "5", True, math.inf], "a whole number from 0"),
    "min_tokens": ([-1, 17, 1.0, None], "a whole number from 0 to 16"),
    "logprobs": ([-1, 21, 1.0, True, "5"], "a whole number from 0 to 20"),
    "ignore_eos": ([0, 1, None, "yes"], "true or false"),
    "logit_bias": ([[1], "1", 3, {"1": 2}, {-1: 2}, {1: math.nan}, {1: 101}, {1: "2"}, {1.0: 2}, {True: 1}], ""),
}


@pytest.mark.parametrize("name, value, wanted", [(n, v, w) for n, (values, w) in WRONG.items() for v in values])
def test_wrong_parameters_are_refused_by_name_and_range(name, value, wanted):
    with pytest.raises(engine.UserError) as caught:
        SamplingParams(**{name: value})
    line = str(caught.value)
    assert name in line and wanted in line and "\n" not in line


def test_numbers_of_other_kinds_are_accepted():
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), seed=np.int64(4), top_p=1, max_tokens=None)
    assert tokens([LOGITS], Request([0], params)) == tokens([LOGITS], request(temperature=0.5, top_k=3, seed=4))
