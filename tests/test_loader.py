"""Every format loads to the same logits; a wrong one is refused in one line that names the tensor or field."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import engine

IDS = torch.randint(97, (1, 20), generator=torch.Generator().manual_seed(1))


def edit_weights(folder, change):
    state = load_file(folder / "model.safetensors")
    changed = change(state)
    state = changed if isinstance(changed, dict) else state
    save_file({k: v.contiguous() for k, v in state.items()}, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def refused(folder, **options):
    """The one line with which loading is refused."""
    with pytest.raises(engine.UserError) as caught:
        engine.load_model(str(folder), **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def shard_index(folder):
    state = load_file(folder / "model.safetensors")
    names = sorted(state)
    files = {name: f"model-0000{1 + i % 3}-of-00003.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({n: state[n] for n in names if files[n] == file}, folder / file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def to_bin(folder, legacy=False):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin",
               _use_new_zipfile_serialization=not legacy)
    (folder / "model.safetensors").unlink()


def to_sharded_bin(folder):
    state = load_file(folder / "model.safetensors")
    files = {name: f"pytorch_model-0000{1 + i % 2}-of-00002.bin" for i, name in enumerate(state)}
    for file in set(files.values()):
        torch.save({n: t for n, t in state.items() if files[n] == file}, folder / file)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))


def add_buffers(state):
    for layer in range(2):
        state[f"transformer.h.{layer}.attn.bias"] = torch.ones(1, 1, 64, 64, dtype=torch.uint8).tril()
        state[f"transformer.h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)


FORMATS = {
    "as saved": lambda f: None,
    "no prefix": lambda f: edit_weights(f, lambda s: {k.removeprefix("transformer."): v for k, v in s.items()}),
    "tied head written out": lambda f: edit_weights(
        f, lambda s: s.update({"lm_head.weight": s["transformer.wte.weight"].clone()})),
    "mask buffers": lambda f: edit_weights(f, add_buffers),
    "bin": to_bin,
    "legacy bin": lambda f: to_bin(f, legacy=True),
    "sharded": shard_index,
    "sharded bin": to_sharded_bin,
    "config without tie_word_embeddings": lambda f: (f / "config.json").write_text(json.dumps(
        {k: v for k, v in json.loads((f / "config.json").read_text()).items() if k != "tie_word_embeddings"})),
}


@pytest.mark.parametrize("change", FORMATS.values(), ids=FORMATS)
def test_formats_load_to_identical_logits(oracle_folder, change):
    _, folder = oracle_folder()
    expected = engine.load_model(str(folder))(IDS)
    change(folder)
    model = engine.load_model(str(folder))
    assert torch.equal(model(IDS), expected)
    assert model.lm_head.weight is model.wte.weight


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_on_disk_is_the_same_as_rounded_float32(oracle_folder, dtype):
    oracle, folder = oracle_folder()
    oracle.to(dtype).float().save_pretrained(folder)
    expected = engine.load_model(str(folder))(IDS)
    oracle.to(dtype).save_pretrained(folder)
    assert load_file(folder / "model.safetensors")["transformer.wte.weight"].dtype == dtype
    assert torch.equal(engine.load_model(str(folder))(IDS), expected)


def test_an_untied_head_is_used_whatever_the_config_says(oracle_folder):
    """transformers too trusts a head that differs from wte more than tie_word_embeddings."""
    oracle, folder = oracle_folder(tie_word_embeddings=False)
    assert not torch.equal(oracle.lm_head.weight, oracle.transformer.wte.weight)
    for tie in (False, True):
        edit_config(folder, tie_word_embeddings=tie)
        expected = transformers.GPT2LMHeadModel.from_pretrained(folder)(IDS).logits
        torch.testing.assert_close(engine.load_model(str(folder))(IDS), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(expected, oracle(IDS).logits, atol=1e-4, rtol=0)


def test_wrong_tensors_are_named(oracle_folder):
    def broken(change):
        _, folder = oracle_folder()
        edit_weights(folder, change)
        return refused(folder)

    assert "lack h.1.mlp.c_fc.bias" in broken(
        lambda s: {k: v for k, v in s.items() if not k.endswith("h.1.mlp.c_fc.bias")})
    assert "lack h.0.ln_1.weight (and 11 more)" in broken(
        lambda s: {k: v for k, v in s.items() if ".h.0." not in k})
    assert "transformer.h.2.ln_1.weight' is not part" in broken(
        lambda s: s.update({"transformer.h.2.ln_1.weight": torch.ones(48)}))
    assert "'score.weight' is not part" in broken(lambda s: s.update({"score.weight": torch.ones(2, 48)}))
    assert "wte.weight' is given twice" in broken(lambda s: s.update({"wte.weight": torch.ones(97, 48)}))
    line = broken(lambda s: s.update({"transformer.h.0.attn.c_attn.weight": torch.ones(144, 48)}))
    assert "transformer.h.0.attn.c_attn.weight has shape (144, 48), the config asks for (48, 144)" in line
    assert "must be a float tensor, not torch.int64" in broken(
        lambda s: s.update({"transformer.ln_f.bias": torch.ones(48, dtype=torch.long)}))


def test_an_untied_head_must_be_there(oracle_folder):
    _, folder = oracle_folder()
    edit_config(folder, tie_word_embeddings=False)
    assert "lack lm_head.weight" in refused(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, -1, -1000])
@pytest.mark.parametrize("kind", ["safetensors", "bin", "legacy bin"])
def test_truncated_files_are_named(oracle_folder, kind, keep):
    _, folder = oracle_folder()
    if kind != "safetensors":
        to_bin(folder, legacy=kind.startswith("legacy"))
    path = next(folder.glob("*model*.safetensors" if kind == "safetensors" else "*.bin"))
    path.write_bytes(path.read_bytes()[:keep])
    assert f"{path.name} can't be read, is it complete?" in refused(folder)


def test_a_pickle_that_runs_code_is_refused(oracle_folder, tmp_path):
    class Harm:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "harm"),)

    _, folder = oracle_folder()
    (folder / "model.safetensors").unlink()
    torch.save({"wte.weight": Harm()}, folder / "pytorch_model.bin")
    assert "can't be read" in refused(folder)
    assert not (tmp_path / "harm").exists()
    torch.save([1, 2], folder / "pytorch_model.bin")
    assert "can't be read" in refused(folder)
    torch.save({"wte.weight": 3}, folder / "pytorch_model.bin")
    assert "wte.weight must be a float tensor, not" in refused(folder)


def test_missing_files_and_broken_indexes(oracle_folder, tmp_path):
    _, folder = oracle_folder()
    shard_index(folder)
    (folder / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors can't be read" in refused(folder)
    for text in ("{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'):
        (folder / "model.safetensors.index.json").write_text(text)
        assert "is not an index of shards" in refused(folder)
    (folder / "model.safetensors.index.json").unlink()
    assert "has no weights: no model.safetensors or pytorch_model.bin" in refused(folder)
    assert "config.json can't be read" in refused(tmp_path)
    assert "there is no folder" in refused(tmp_path / "nowhere")
    assert "there is no folder" in refused("")


@pytest.mark.parametrize("fields, line", [
    (dict(model_type="llama"), "is not a GPT-2 config: model_type must be 'gpt2', not 'llama'"),
    (dict(activation_function="silu"), "activation_function must be gelu_new, gelu, relu, not 'silu'"),
    (dict(activation_function=["relu"]), "activation_function must be gelu_new, gelu, relu, not ['relu']"),
    (dict(layer_norm_epsilon=0.0), "layer_norm_epsilon must be a finite number above 0 to 1, not 0.0"),
    (dict(layer_norm_epsilon="1e-5"), "layer_norm_epsilon must be a finite number above 0 to 1, not '1e-5'"),
    (dict(n_inner=0), "n_inner must be a whole number from 1 to 1048576, not 0"),
    (dict(n_positions=0), "n_positions must be a whole number from 1 to 1048576, not 0"),
    (dict(n_layer=10**30), "n_layer must be a whole number from 1 to 1000, not 1000000"),
    (dict(vocab_size=2**40), "vocab_size must be a whole number from 1 to 16777216, not 1099511627776"),
    (dict(eos_token_id=-1), "eos_token_id must be a whole number from 0, not -1"),
    (dict(eos_token_id=[1]), "eos_token_id must be a whole number from 0, not [1]"),
    (dict(vocab_size="97"), "vocab_size must be a whole number from 1 to 16777216, not '97'"),
    (dict(n_layer=True), "n_layer must be a whole number from 1 to 1000, not True"),
    (dict(n_head=5), "n_embd=48 is not a multiple of n_head=5"),
    (dict(scale_attn_weights=1), "scale_attn_weights must be true or false, not 1"),
    (dict(scale_attn_by_inverse_layer_idx=None), "scale_attn_by_inverse_layer_idx must be true or false"),
    (dict(tie_word_embeddings="yes"), "tie_word_embeddings must be true or false"),
    (dict(add_cross_attention=True), "add_cross_attention=True is not supported"),
    (dict(pruned_heads={"0": [1]}), "pruned_heads={'0': [1]} is not supported"),
    (dict(quantization_config={"bits": 4}), "quantization_config={'bits': 4} is not supported"),
    (dict(n_positions=63), "wpe.weight has shape (64, 48), the config asks for (63, 48)"),
    (dict(vocab_size=98), "wte.weight has shape (97, 48), the config asks for (98, 48)"),
])
def test_configs_are_honoured_or_refused_by_name(oracle_folder, fields, line):
    _, folder = oracle_folder()
    edit_config(folder, **fields)
    assert line in refused(folder)


def test_configs_that_are_not_configs(oracle_folder):
    _, folder = oracle_folder()
    for text in ("", "{", "[]", "3", "\0", "[" * 100_000):
        (folder / "config.json").write_text(text)
        assert "config.json" in refused(folder)


def test_scores_are_in_float32_in_every_dtype(oracle_folder):
    """So reorder_and_upcast_attn changes nothing; float16 would overflow: scores here reach 1e5."""
    for upcast in (True, False):
        _, folder = oracle_folder(reorder_and_upcast_attn=upcast)
        edit_weights(folder, lambda s: s.update({k: v * 30 for k, v in s.items() if k.endswith("attn.c_attn.weight")}))
        for variant in (engine.GPT2, engine.GPT2Cached, engine.GPT2Paged):
            assert engine.load_model(str(folder), variant, dtype="float16")(IDS).isfinite().all()


@pytest.mark.parametrize("name, value, dtype", [
    ("h.1.ln_2.bias", float("nan"), "float32"), ("h.1.ln_2.bias", float("inf"), "float32"),
    ("h.0.mlp.c_fc.weight", 1e10, "float16"), ("h.0.mlp.c_fc.weight", float("nan"), "int8")])
def test_weights_that_are_no_numbers_are_named(oracle_folder, name, value, dtype):
    _, folder = oracle_folder()
    edit_weights(folder, lambda s: s["transformer." + name].fill_(value))
    kind = "float32" if dtype == "int8" else dtype
    assert f"transformer.{name} holds NaN or infinity as torch.{kind}" in refused(folder, dtype=dtype)


def test_messages_stay_one_short_line(oracle_folder):
    _, folder = oracle_folder()
    edit_weights(folder, lambda s: s.update({"x\ny\r\u2028z" + "w" * 9999: torch.ones(1)}))
    assert len(refused(folder)) < 300 and len(refused(folder).splitlines()) == 1


@pytest.mark.parametrize("options, line", [
    (dict(dtype="float64"), "dtype must be one of float32, bfloat16, float16, int8"),
    (dict(dtype=[1]), "dtype must be one of"),
    (dict(device="nope"), "device 'nope' can't be used"),
    (dict(page_size=True), "page_size must be a whole number from 1, not True"),
    (dict(max_pages=0), "max_pages must be a whole number from 1, not 0"),
])
def test_options_are_checked(options, line):
    assert line in refused("tiny", **options)


@pytest.mark.parametrize("name", ["~nosuchuser/x", "a" * 5000, "a..b/c", "a/b-", "foo/bar.git", "a/b/c", None])
def test_names_that_name_nothing(name):
    with pytest.raises(engine.UserError):
        engine.load_model(name)


def test_random_shapes():
    small = engine.load_model("random:distilgpt2")
    assert sum(p.numel() for p in small.parameters()) == 81_912_576              # as published for distilgpt2
    with torch.device("meta"):
        sizes = {name: sum(p.numel() for p in engine.GPT2(engine.GPT2Config(**shape)).parameters()) - 50257 * width
                 for (name, shape), width in zip(engine.SHAPES.items(), (768, 768, 1024, 1280, 1600))}
    assert sizes == {"distilgpt2": 81_912_576, "gpt2": 124_439_808, "gpt2-medium": 354_823_168,
                     "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200}
    assert "random:gpt5 is not a shape; there are distilgpt2, gpt2," in refused("random:gpt5")


def test_auto_says_what_stands_in(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert engine.load_model("auto").name == "tiny"
    assert capsys.readouterr().err == "gpt2 is not in the local cache, and HF_HUB_OFFLINE is set; tiny stands in\n"
    assert "gpt2-xl is not in the local cache" in refused("gpt2-xl")


def in_fresh_process(code, **environment):
    """stdout of a fresh interpreter that runs `code` in the repository."""
    env = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"} | environment
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120,
                         cwd=Path(engine.__file__).parent)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_auto_takes_gpt2_from_the_local_cache_without_network(oracle_folder, tmp_path):
    """A cache as huggingface_hub lays it out; the endpoint answers nobody."""
    _, folder = oracle_folder()
    snapshot = tmp_path / "hub" / "models--gpt2" / "snapshots" / "abc"
    snapshot.parent.mkdir(parents=True)
    folder.rename(snapshot)
    refs = tmp_path / "hub" / "models--gpt2" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    out = in_fresh_process("import engine; m = engine.load_model(); print(m.name, m.config.n_embd)",
                           HF_HOME=str(tmp_path), HF_ENDPOINT="http://127.0.0.1:9")
    assert out == "gpt2 48\n"


@pytest.mark.parametrize("answer", ["refuses", "is silent"])
def test_auto_decides_within_five_seconds_without_the_hub(tmp_path, answer):
    import socket

    with socket.socket() as silent:  # accepts nothing: a connection hangs as it does behind a firewall
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        port = silent.getsockname()[1] if answer == "is silent" else 9
        out = in_fresh_process("import time, engine; start = time.perf_counter(); m = engine.load_model();"
                               "print(m.name, time.perf_counter() - start)",
                               HF_HOME=str(tmp_path), HF_ENDPOINT=f"http://127.0.0.1:{port}")
    name, seconds = out.split()
    assert name == "tiny" and float(seconds) < 5.5                              # the five, and the load of tiny


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak of memory from /proc")
def test_loading_never_holds_the_weights_twice(oracle_folder):
    """The peak of memory above what the process held before is at most 1.3x the weights (here 130 MB)."""
    _, small = oracle_folder("small")
    _, large = oracle_folder("large", vocab_size=20000, n_embd=512, n_layer=7, n_head=8)
    out = in_fresh_process(f"""if True:
        import engine, torch
        def memory(field):
            return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field))
        model = engine.load_model({str(small)!r})       # imports what loading needs, and compiles what measures
        model(torch.zeros(1, 8, dtype=torch.int64), model.new_kv())
        open("/proc/self/clear_refs", "w").write("5")
        before = memory("VmRSS")
        model = engine.load_model({str(large)!r})
        print(memory("VmHWM") - before)""")
    weights = (large / "model.safetensors").stat().st_size / 1024
    assert 0.9 * weights < int(out) < 1.3 * weights


def test_the_real_gpt2_continues_as_transformers_does():
    try:
        model = engine.load_model("gpt2")
    except engine.UserError as err:
        pytest.skip(str(err))
    prompt = engine.load_tokenizer().encode_ordinary("The capital of France is")
    tokens = list(engine.generate(model, prompt, engine.SamplingParams(temperature=0, max_tokens=8)))
    oracle = transformers.GPT2LMHeadModel.from_pretrained("gpt2")
    expected = oracle.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=8)[0, len(prompt):].tolist()
    assert tokens == expected
