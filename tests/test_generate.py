"""The generate loop, the context rule, the tokenizer, and the command line."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import VARIANTS, run_to_end

import engine
from engine import Request, SamplingParams, UserError, generate

ENC = engine.load_tokenizer()
ROOT = Path(engine.__file__).parent


def test_tokens_come_as_they_are_made(tiny, monkeypatch):
    steps, forward = [], engine.GPT2.forward
    monkeypatch.setattr(engine.GPT2Paged, "forward", lambda *a, **k: steps.append(1) or forward(*a, **k))
    for made, _ in enumerate(generate(tiny, [1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True)), 1):
        assert len(steps) == made


@pytest.mark.parametrize("variant", VARIANTS)
def test_seeded_text_is_the_same_for_every_variant(tiny_models, variant):
    params = SamplingParams(temperature=0.9, top_p=0.95, repetition_penalty=1.2, seed=7, max_tokens=40, ignore_eos=True)
    prompt = ENC.encode_ordinary("It was raining when")
    text = list(generate(tiny_models[variant], prompt, params))
    assert text == list(generate(tiny_models[engine.GPT2], prompt, params))
    assert text != list(generate(tiny_models[variant], prompt, SamplingParams(**(params.__dict__ | {"seed": 8}))))


def test_the_end_of_text_ends_it(tiny):
    prompt = ENC.encode_ordinary("The meaning of life is")
    long = list(generate(tiny, prompt, SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)))
    assert 50256 in long
    request = Request(prompt, SamplingParams(temperature=0, max_tokens=120))
    tokens, reason = run_to_end(generate(tiny, request))
    assert tokens == long[:long.index(50256)] == request.output_ids
    assert reason == request.finish_reason == "stop"
    more = SamplingParams(temperature=0, max_tokens=120, min_tokens=len(tokens) + 5)
    later, _ = run_to_end(generate(tiny, prompt, more))
    assert later[:len(tokens)] == tokens and len(later) >= len(tokens) + 5 and 50256 not in later


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("prompt, limit, made",
                         [(1, 3, 3), (1, 0, 0), (60, 100, 5), (60, None, 5), (64, 100, 1), (63, 2, 2)])
def test_the_context_rule(oracle_folder, variant, prompt, limit, made):
    """A prompt may fill all positions; prompt + output reach one more, since the last token is never fed."""
    _, folder = oracle_folder()
    model = engine.load_model(str(folder), variant)
    tokens, reason = run_to_end(generate(model, [1] * prompt, SamplingParams(max_tokens=limit, ignore_eos=True)))
    assert (len(tokens), reason) == (made, "length")
    if variant is engine.GPT2Paged:
        assert model.cache.free_pages == model.cache.max_pages


def test_prompts_are_checked_before_anything_runs(tiny, monkeypatch):
    monkeypatch.setattr(engine.GPT2, "forward", None)
    for prompt, line in [([], "the prompt has 0 tokens; it must have 1 to 1024"),
                         ([1] * 1025, "the prompt has 1025 tokens; it must have 1 to 1024"),
                         ([50257], "a prompt token id must be a whole number from 0 to 50256, not 50257"),
                         ([-1], "not -1"), ([1.5], "not 1.5"), (["a"], "not 'a'"), ([True], "not True")]:
        with pytest.raises(UserError, match=re.escape(line)):
            generate(tiny, prompt)
    with pytest.raises(UserError, match="logit_bias token id must be a whole number from 0 to 50256, not 50257"):
        generate(tiny, [1], SamplingParams(logit_bias={50257: 1.0}))


def test_a_request_runs_once_with_its_own_params(tiny):
    request = Request([1, 2], SamplingParams(max_tokens=2, ignore_eos=True))
    with pytest.raises(UserError, match="carries its own params"):
        generate(tiny, request, SamplingParams())
    assert len(list(generate(tiny, request))) == 2
    with pytest.raises(UserError, match="runs once"):
        generate(tiny, request)
    for wrong in ((None,), (5,), ([1], {"temperature": 0})):
        with pytest.raises(UserError, match="a request is a list of token ids and SamplingParams, not"):
            generate(tiny, *wrong)


def test_pages_come_back_when_a_stream_is_dropped(tiny):
    stream = generate(tiny, [1] * 100, SamplingParams(max_tokens=50))
    next(stream)
    assert tiny.cache.free_pages == tiny.cache.max_pages - 7
    stream.close()
    assert tiny.cache.free_pages == tiny.cache.max_pages


def test_logprobs_of_a_request(tiny):
    request = Request([464, 3616], SamplingParams(temperature=0, max_tokens=4, logprobs=2))
    tokens = list(generate(tiny, request))
    logits = tiny(torch.tensor([request.prompt_ids + tokens]))[0, 1:]
    assert [found.token for found in request.logprobs] == tokens
    for row, found in zip(torch.log_softmax(logits, -1), request.logprobs):
        assert found.logprob == pytest.approx(row[found.token].item(), abs=1e-4)
        assert list(found.top) == row.topk(2).indices.tolist()


# --- tokenizer

TEXTS = ["", " ", "Hello world", "  two  spaces\n\n", "naïve café", "日本語", "🙂👩‍👩‍👧", "don't I'll WE'VE", "a\0b",
         "x" * 3000, "1234567 3.14", "\t\r\n", "<|endoftext|>", "\u200d\ufeff", "e\u0301"]


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(text):
    ids = ENC.encode_ordinary(text)
    assert ENC.decode(ids) == text
    assert "".join(engine.stream_text(ids)) == text


def test_known_ids():
    """As OpenAI's encoder gives them; an end-of-text typed by a user is seven ordinary tokens."""
    assert ENC.encode_ordinary("The meaning of life is") == [464, 3616, 286, 1204, 318]
    assert ENC.encode_ordinary("<|endoftext|>") == [27, 91, 437, 1659, 5239, 91, 29]
    assert ENC.n_vocab == 50257 and ENC.eot_token == 50256


def test_ids_are_those_of_the_tokenizers_library():
    """Another implementation, over vocab and merges derived from the ranks."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    alphabet = byte_alphabet()
    ranks = {bytes(token): rank for token, rank in ENC._mergeable_ranks.items()}

    def show(token):
        return "".join(alphabet[b] for b in token)

    by_rank = sorted((rank, token) for token, rank in ranks.items() if len(token) > 1)
    merges = [tuple(map(show, last_merge(token, ranks, rank))) for rank, token in by_rank]
    tokenizer = Tokenizer(models.BPE(vocab={show(t): r for t, r in ranks.items()}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for text in TEXTS:
        assert ENC.encode_ordinary(text) == tokenizer.encode(text).ids


def byte_alphabet():
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


def last_merge(token, ranks, limit):
    parts = [token[i:i + 1] for i in range(len(token))]
    while len(parts) > 2:
        best = min(range(len(parts) - 1), key=lambda i: min(ranks.get(parts[i] + parts[i + 1], limit), limit))
        parts[best:best + 2] = [parts[best] + parts[best + 1]]
    return parts


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\ud83d", "\x00\x01", "\ufffe"])
def test_broken_text_never_raises(text):
    assert ENC.decode(ENC.encode_ordinary(text))


def test_pieces_of_characters_are_held_back():
    ids = ENC.encode_ordinary("🙂")
    assert len(ids) > 1
    pieces = list(engine.stream_text(ids))
    assert pieces[:len(ids)] == [""] * (len(ids) - 1) + ["🙂"]
    assert "".join(engine.stream_text(ids[:-1])) == "\ufffd"


def test_characters_held_back_are_counted_as_decoded():
    """So `decoded` is where the next token's text begins, whatever was given out so far."""
    stream = engine.TextStream(("day off",))
    text = ""
    for token in ENC.encode_ordinary("a day, a day off"):
        before = stream.decoded
        text += ENC.decode([token])
        stream.feed(token)
        assert (before, stream.decoded) == (len(text) - len(ENC.decode([token])), len(text))
    assert stream.stopped


# --- command line

def run(*arguments):
    return subprocess.run([sys.executable, "engine.py", *arguments], capture_output=True, text=True, timeout=120,
                          cwd=ROOT)


def test_prompt_streams_to_the_terminal():
    done = run("--model", "tiny", "--prompt", "The meaning of life is", "--tokens", "8", "--temperature", "0",
               "--repetition-penalty", "1", "--variant", "cached")
    assert done.returncode == 0
    assert done.stdout == "The meaning of life is a mystery that has been debated by philosophers\n"
    assert re.fullmatch(r"\[tiny: 8 tokens, first after \d+ ms, [\d.]+ tokens/s, length\]\n", done.stderr)


@pytest.mark.parametrize("arguments, line", [
    (("--prompt", ""), "engine.py: the prompt has 0 tokens; it must have 1 to 1024, the model's context"),
    (("--prompt", "a", "--top-p", "0"), "engine.py: top_p must be a finite number above 0 to 1, not 0.0"),
    (("--prompt", "a", "--tokens", "0"), "engine.py: --tokens must be a whole number from 1 to 1024, not 0"),
    (("--prompt", "a", "--threads", "0"), "engine.py: --threads must be a whole number from 1 to 1024, not 0"),
    (("--prompt", "a", "--model", "no/such/place"),
     "engine.py: there is no folder 'no/such/place', and it is not a Hugging Face name"),
])
def test_mistakes_get_one_line(arguments, line):
    arguments = arguments if "--model" in arguments else ("--model", "tiny", *arguments)
    done = run(*arguments)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", line + "\n")


@pytest.mark.parametrize("arguments, line", [
    (("--json", "/no/such/x.json"), "--json /no/such/x.json can't be written: it is a folder, or is in none"),
    (("--plot", "x.foo"), "--plot must end in .png, .svg or .pdf, not x.foo"),
    (("--plot", "x.png", "--only", "bandwidth"),
     "--plot draws the benchmarks generation, bytes, batching, not bandwidth"),
])
def test_outputs_are_checked_before_anything_is_measured(arguments, line, monkeypatch, capsys):
    monkeypatch.setattr(engine, "load_model", None)
    with pytest.raises(SystemExit, match=f"engine.py: {re.escape(line)}"):
        engine.main(list(arguments))


def test_a_reader_that_has_enough_is_no_error():
    done = subprocess.run(f"{sys.executable} engine.py --model tiny --tokens 60 --prompt Once | head -c 5",
                          shell=True, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "Once " or done.stdout == "Once"
    assert "Traceback" not in done.stderr


def test_no_folder_for_compiled_kernels_is_no_error(tmp_path):
    """numba finds no place for its cache: the kernels are compiled all the same."""
    for module in ROOT.glob("*.py"):
        (tmp_path / module.name).write_bytes(module.read_bytes())
    (tmp_path / "assets").symlink_to(ROOT / "assets")
    (tmp_path / "__pycache__").write_text("a file where the folder would be")
    program = ("import engine, torch; linear = engine.Linear(4, 4, bias=False); linear.weight.data.fill_(1); "
               "print(linear(torch.ones(1, 4)))")
    done = subprocess.run([sys.executable, "-B", "-c", program], capture_output=True, text=True, cwd=tmp_path,
                          env=os.environ | {"HOME": "/dev/null", "XDG_CACHE_HOME": "/dev/null"})
    assert done.returncode == 0, done.stderr
    assert "4., 4., 4., 4." in done.stdout


def test_benchmarks_run_and_write_what_they_print(tmp_path):
    """All of them on the sample model, small: tables, JSON and picture, and no progress bar in a pipe."""
    done = run("--model", "tiny", "--tokens", "4", "--runs", "1", "--threads", "1", "--full",
               "--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.png"))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("Match: yes") == 5
    results = json.loads((tmp_path / "r.json").read_text())
    assert results["machine"]["model"] == "tiny" and results["machine"]["threads"] == 1
    assert [row["prompt"] for row in results["generation"]] == [5] * 3 + [16] * 3 + [512] * 3 + [900] * 3
    assert all(row["ms a token"] > 0 and row["runs"] == 1 for row in results["generation"])
    moved = {(row["stored"], row["variant"]): row["moved KB a step"] for row in results["bytes"]}
    assert moved[900, "KV-cache (torch.cat)"] > 20 * moved[16, "KV-cache (torch.cat)"]
    assert moved[900, "KV-cache (pages)"] == moved[16, "KV-cache (pages)"]
    step = results["bandwidth"][1]
    assert min(step[part] for part in ("share of memory", "products", "attention", "sampling")) > 0
    weights = {row["weights"]: row for row in results["dtypes"]}
    assert weights["float32"]["weights MB"] == 4 * weights["int8"]["weights MB"] == 2 * weights["float16"]["weights MB"]
    # transformers' own bfloat16 errs by 4.2 % on such a text.
    assert 0 == weights["float32"]["logits error %"] < weights["bfloat16"]["logits error %"] < 4.2
    assert weights["int8"]["perplexity"] < 1.03 * weights["float32"]["perplexity"]
    assert [row["mode"] for row in results["batching"]] == ["sequential", "static", "continuous"]
    assert all(len(row["bars"]) == 16 and row["TTFT p99"] >= row["TTFT median"] > 0 for row in results["batching"])
    assert [row["cached"] for row in results["prefix"]] == [0, 3 * 496]
    speculation = {row["guesses"]: row for row in results["speculation"]}
    assert {row["match"] for row in speculation.values()} == {"yes"}
    assert speculation["tiny"]["acceptance"] == speculation["always right, at no cost"]["acceptance"] == 1
    assert (tmp_path / "r.png").read_bytes()[:4] == b"\x89PNG"


def test_a_mismatch_stops_the_benchmark(tiny_models, monkeypatch, capsys):
    broken = dict(zip(engine.VARIANTS, tiny_models.values()))
    args = engine.parse_args(["--runs", "1", "--only", "generation", "--full"])
    true = engine.GPT2Paged.forward
    for factor in (1.01, float("nan")):
        monkeypatch.setattr(engine.GPT2Paged, "forward", lambda *a, **k: true(*a, **k) * factor)  # noqa: B023
        with pytest.raises((SystemExit, FloatingPointError)):
            engine.bench_generation(broken, args, engine.make_budget(broken, args, engine.Progress()))
    assert "Match: NO" in capsys.readouterr().out


def test_engine_imports_neither_triton_nor_transformers_nor_flask():
    code = ("import sys, engine; engine.load_model('tiny');"
            "heavy = 'triton', 'transformers', 'flask', 'matplotlib', 'torch._dynamo';"
            "print([name for name in heavy if name in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "[]\n", done.stderr
