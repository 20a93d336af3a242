"""Every variant against transformers, then against each other; pages that are short, scattered or shared."""

import random

import numpy as np
import pytest
import torch
from conftest import IDS, VARIANTS, fill_with_nan, make_oracle, run_to_end

import engine
import engine_cpu
import quantization

BACKENDS = {"best": engine.best_backend("cpu"), "plain": engine.PLAIN}
backends = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
CONFIGS = [
    dict(n_layer=1, n_head=1, n_embd=7),                                       # odd head dim
    dict(n_layer=2, n_head=3, n_embd=33),
    dict(n_layer=3, n_head=2, n_embd=26, activation_function="gelu"),
    dict(n_layer=4, n_head=4, n_embd=64, activation_function="relu"),
    dict(n_layer=2, n_head=5, n_embd=45, n_inner=51),
    dict(n_layer=2, n_head=4, n_embd=48, n_inner=1),
    dict(n_layer=2, n_head=4, n_embd=48, layer_norm_epsilon=1e-1),
    dict(n_layer=1, n_head=2, n_embd=128, layer_norm_epsilon=1e-12),
    dict(n_layer=2, n_head=4, n_embd=48, tie_word_embeddings=False),
    dict(n_layer=3, n_head=3, n_embd=48, scale_attn_by_inverse_layer_idx=True),
    dict(n_layer=2, n_head=2, n_embd=32, scale_attn_weights=False),
    dict(n_layer=2, n_head=2, n_embd=32, reorder_and_upcast_attn=True, activation_function="gelu"),
    dict(n_layer=2, n_head=1, n_embd=80, vocab_size=1000, n_positions=63),
    dict(n_layer=4, n_head=6, n_embd=66, n_inner=200, activation_function="relu", tie_word_embeddings=False),
]


def logits_in_pieces(model, ids, sizes):
    """Logits of all positions, the ids given in pieces of these sizes (the last size is repeated)."""
    kv, out, at = model.new_kv(), [], 0
    while at < ids.shape[1]:
        size = sizes[min(len(out), len(sizes) - 1)]
        piece = ids[:, at:at + size]
        if isinstance(model, engine.GPT2Paged | engine.GPT2Cached):
            out.append(model(piece, kv))
        else:  # without a cache all ids are given again
            out.append(model(ids[:, :at + size], kv)[:, at:])
        at += size
    kv.release()
    return torch.cat(out, dim=1)


@backends
@pytest.mark.parametrize("config", CONFIGS, ids=range(len(CONFIGS)))
def test_logits_are_transformers(oracle_folder, config, backend):
    oracle, folder = oracle_folder(seed=len(str(config)), **config)
    ids = torch.randint(oracle.config.vocab_size, (2, 61), generator=torch.Generator().manual_seed(1))
    expected = oracle(ids).logits
    for variant in VARIANTS:
        model = fill_with_nan(engine.load_model(str(folder), variant, backend=backend, **pages(variant, 16)))
        for sizes in ([61], [1], [7], [5, 1, 17, 1]):
            torch.testing.assert_close(logits_in_pieces(model, ids, sizes), expected, atol=1e-4, rtol=0)


def pages(variant, page_size, max_pages=64):
    return dict(page_size=page_size, max_pages=max_pages) if variant is engine.GPT2Paged else {}


@backends
def test_long_prompts_in_blocks_are_transformers(oracle_folder, backend):
    """Over QUERY_BLOCK tokens attention goes block by block, also behind what is stored."""
    oracle, folder = oracle_folder(n_positions=400)
    ids = torch.randint(97, (1, 391), generator=torch.Generator().manual_seed(1))
    expected = oracle(ids).logits
    for variant in VARIANTS:
        model = fill_with_nan(engine.load_model(str(folder), variant, backend=backend))
        for sizes in ([391], [128], [129], [100, 257, 34]):
            torch.testing.assert_close(logits_in_pieces(model, ids, sizes), expected, atol=1e-4, rtol=0)


def test_keep_picks_positions(tiny_models):
    ids = torch.randint(50257, (2, 9))
    for model in tiny_models.values():
        whole = model(ids)
        torch.testing.assert_close(model(ids, keep=slice(-1, None)), whole[:, -1:], atol=1e-4, rtol=0)
        torch.testing.assert_close(model(ids, keep=torch.tensor([1, 7])), whole[:, [1, 7]], atol=1e-4, rtol=0)


def tiny_prompts():
    """20 prompts of 1 to 200 tokens, real text."""
    text = ("The old lighthouse keeper counted the ships each evening. Today I went to the market with my "
            "sister and we bought apples. In my opinion the new library is a gift to the town, because ") * 12
    ids = engine.load_tokenizer().encode_ordinary(text)
    lengths = np.linspace(1, 200, 20).astype(int)
    return [ids[i:i + n] for i, n in enumerate(lengths.tolist())]


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_text_of_tiny_is_transformers(tiny_models, tiny_expected, variant):
    model = fill_with_nan(tiny_models[variant])
    params = engine.SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    for prompt, expected in zip(tiny_prompts(), tiny_expected):
        assert run_to_end(engine.generate(model, prompt, params)) == (expected, "length")


@pytest.fixture(scope="module")
def tiny_expected():
    import transformers

    oracle = transformers.GPT2LMHeadModel.from_pretrained(engine.ASSETS / "tiny", dtype=torch.float32).eval()
    settings = dict(do_sample=False, max_new_tokens=60, pad_token_id=0, eos_token_id=None)
    return [oracle.generate(torch.tensor([p]), attention_mask=torch.ones(1, len(p)), **settings)[0, len(p):].tolist()
            for p in tiny_prompts()]


@backends
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_is_as_near_as_transformers(oracle_folder, dtype, backend):
    """Against float32, our error in 16 bit is at most twice that of transformers in 16 bit."""
    oracle, folder = oracle_folder(n_layer=3)
    ids = torch.randint(97, (1, 50), generator=torch.Generator().manual_seed(1))
    exact = oracle(ids).logits
    theirs = (oracle.to(engine.DTYPES[dtype])(ids).logits.float() - exact).abs().max()
    for variant in VARIANTS:
        model = fill_with_nan(engine.load_model(str(folder), variant, dtype=dtype, backend=backend))
        for sizes in ([50], [1]):
            assert (logits_in_pieces(model, ids, sizes) - exact).abs().max() < 2 * theirs


# --- pages

@backends
def test_scattered_pages_give_the_same_logits(backend):
    """Pages in no order, so that no run is longer than one."""
    model = paged(max_pages=40, page_size=4, backend=backend)
    ids = torch.randint(97, (1, 60), generator=torch.Generator().manual_seed(1))
    expected = model(ids)
    order = random.Random(0).sample(range(40), 40)
    model.cache.allocate = lambda count, after=None: [order.pop() for _ in range(count)]
    kv = model.new_kv()
    assert isinstance(kv, engine_cpu.TiledKV) == (backend is not engine.PLAIN)
    got = torch.cat([model(ids[:, :30], kv), model(ids[:, 30:41], kv)]
                    + [model(ids[:, i:i + 1], kv) for i in range(41, 60)], dim=1)
    assert len(model.cache.runs(kv.tables[0].pages, 60)) > 10
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def paged(**options):
    oracle = make_oracle()
    config = engine.GPT2Config(vocab_size=97, n_positions=64, n_embd=48, n_layer=2, n_head=4)
    model = engine.GPT2Paged(config, **options)
    state = {k.removeprefix("transformer."): v for k, v in oracle.state_dict().items()}
    model.load_state_dict({k: v.t() if engine.CONV1D.fullmatch(k) else v for k, v in state.items()})
    return fill_with_nan(model)


@backends
def test_rows_of_unequal_lengths_in_one_pass(backend):
    """Decoding rows and two prompt chunks end to end in one pass equal each sequence alone."""
    model, draw = paged(page_size=4, backend=backend), torch.Generator().manual_seed(2)
    sequences = [torch.randint(97, (1, n), generator=draw) for n in (3, 17, 30, 8, 21)]
    stored = [2, 16, 29, 3, 0]
    tables = [model.cache.new_table() for _ in sequences]
    for ids, n, table in zip(sequences, stored, tables):
        if n:
            model(ids[:, :n], model.new_kv([table], [n]))
    counts = [ids.shape[1] - n for ids, n in zip(sequences, stored)]
    together = torch.cat([ids[:, n:] for ids, n in zip(sequences, stored)], dim=1)
    got = model(together, model.new_kv(tables, counts))[0].split(counts)
    for logits, ids, n in zip(got, sequences, stored):
        torch.testing.assert_close(logits, model(ids)[0, n:], atol=1e-4, rtol=0)


def test_the_plain_path_is_plain_everywhere(tiny):
    """The oracle shares no kernel with what it is to judge, and a model that is made by hand is plain."""
    for model in (engine.load_model("tiny", backend=engine.PLAIN), engine.GPT2Paged(tiny.config),
                  engine.share_weights(engine.load_model("tiny", backend=engine.PLAIN), engine.GPT2Paged)):
        kinds = {type(module).__module__ for module in model.modules()}
        assert kinds == {"engine", "torch.nn.modules.sparse", "torch.nn.modules.container"}
        assert type(model.cache) is engine.PagedKVCache and type(model.new_kv()) is engine.PagedKV
    assert tiny.backend is engine_cpu.TILED and isinstance(tiny.h[0], engine_cpu.TiledBlock)


def test_without_numba_the_plain_block_runs(monkeypatch, oracle_folder):
    oracle, folder = oracle_folder()
    ids = torch.randint(97, (3, 40), generator=torch.Generator().manual_seed(3))
    expected = oracle(ids).logits
    for onednn in (True, False):
        monkeypatch.setattr(engine_cpu, "cpu_kernels", lambda: None)
        monkeypatch.setattr(engine_cpu, "onednn_multiplies", lambda dtype: onednn)  # noqa: B023
        model = engine.load_model(str(folder), page_size=4)
        assert type(model.h[0]) is engine.Block and type(model.new_kv()) is engine.PagedKV
        torch.testing.assert_close(logits_in_pieces(model, ids, [20, 1]), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_that_moves_takes_its_weights_along(tiny, variant):
    """.to() and its like: nothing of what the kernels had been given before is used after it."""
    ids = torch.tensor([IDS])
    exact = engine.share_weights(tiny, variant)(ids)
    model = engine.load_model("tiny", variant)
    model(ids)
    for dtype, limit in ((torch.float64, 1e-5), (torch.bfloat16, 3e-2), (torch.float32, 3e-2)):
        kv = model.to(dtype).new_kv()
        got = torch.cat([model(ids[:, :-1], kv), model(ids if variant is engine.GPT2 else ids[:, -1:], kv)[:, -1:]], 1)
        assert (got - exact).abs().max() < limit * exact.abs().max()      # of what was rounded to it on the way
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
    assert not model(ids).any()
    state = {name: value.clone() for name, value in tiny.state_dict().items()}
    model.load_state_dict(state, assign=True)
    torch.testing.assert_close(model(ids), exact, atol=1e-4, rtol=0)


def another_parameter(model):
    layer = model.h[1].mlp.c_fc
    layer.weight = torch.nn.Parameter(torch.zeros_like(layer.weight), requires_grad=False)


def other_data(model):
    model.h[1].attn.c_proj.bias.data = torch.ones_like(model.h[1].attn.c_proj.bias)


def in_place(model):
    model.h[0].ln_2.weight.mul_(2)


def another_module(model):
    """As libraries for LoRA put a module around a projection."""
    layer = model.h[1].attn.c_attn

    class Around(torch.nn.Module):
        def forward(self, x):
            return 2 * layer(x)

    model.h[1].attn.c_attn = Around()


def another_epsilon(model):
    model.h[0].ln_1.eps = 1.0


def another_activation(model):
    model.h[0].mlp.act = torch.nn.functional.relu


def another_head(model):
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.flip(0), requires_grad=False)


CHANGES = [another_parameter, other_data, in_place, another_module, another_epsilon, another_activation, another_head]


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_put_in_the_place_of_weights_counts(change):
    """In a model that has run, and in one that has not: as in the plain one."""
    ids = torch.tensor([IDS])
    models = [engine.load_model("tiny", backend=backend) for backend in (engine.PLAIN, None, None)]
    before = models[2](ids)
    for model in models:
        change(model)
    expected = models[0](ids)
    assert (expected - before).abs().max() > 0.01
    for model in models[1:]:
        torch.testing.assert_close(model(ids), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("width, heads", [(2, 2), (6, 6), (6, 3), (1, 1)])
def test_heads_of_one_number(width, heads):
    """Such views have strides that reach no kernel: contiguous memory does."""
    config = engine.GPT2Config(n_layer=2, n_head=heads, n_embd=width, vocab_size=50, n_positions=64)
    plain = engine.GPT2(config)
    for name, parameter in plain.named_parameters():
        parameter.data = torch.randn(parameter.shape) + ("ln_" in name)
    for shape in ((1, 20), (2, 7), (3, 1)):
        ids = torch.randint(50, shape)
        for variant in VARIANTS:
            model = engine.share_weights(plain, variant, engine.best_backend("cpu"))
            found = model(ids, model.new_kv())
            torch.testing.assert_close(found, plain(ids), atol=1e-4 * found.abs().max().item(), rtol=0)


# --- the kernels

def make_linear(n_in, n_out, dtype, bias=True, kind=engine_cpu.TiledLinear):
    """A projection by the kernels, and its weight as float64, after rounding to the dtype."""
    linear = kind(n_in, n_out, bias)
    linear.weight.data = torch.randn(n_out, n_in)
    if bias:
        linear.bias.data = torch.randn(n_out)
    if dtype == "int8":
        linear = quantization.Int8Linear.of(linear)
        exact = linear.weight.double() * linear.scale.double()[:, None]
    else:
        linear.weight.data = linear.weight.data.to(engine.DTYPES[dtype])
        exact = linear.weight.double()
    if kind is engine_cpu.TiledLinear:
        linear.pack()
    return linear, exact


def as_multiplied(x, linear):
    """Activations as the processor multiplies them, as float64: rounded to bfloat16, or to whole numbers of 16 bits."""
    kind = engine_cpu.Product(*linear.product).activations.dtype
    if kind == np.uint16:
        return x.bfloat16().double()
    if kind == np.int16:
        factor = x.double().abs().amax(dim=1, keepdim=True) / min(32767, 2 ** 24 // x.shape[1] - 1)
        return (x.double() / factor).round() * factor
    return x.double()


SIZES = [(1, 1, 1), (3, 65, 1), (768, 7, 2), (63, 1023, 6), (129, 17, 5), (96, 130, 40), (1600, 70, 131),
         (3072, 9, 130)]


@pytest.mark.parametrize("dtype", engine.CPU_DTYPES)
@pytest.mark.parametrize("n_in, n_out, rows", SIZES)
def test_product_kernel_against_float64(n_in, n_out, rows, dtype):
    for bias in (True, False):
        linear, weight = make_linear(n_in, n_out, dtype, bias)
        x = torch.randn(rows, n_in)
        expected = as_multiplied(x, linear) @ weight.t() + (linear.bias.double() if bias else 0)
        got = linear(x[None])[0]
        assert got.dtype == torch.float32
        # A whole number next to a half may be rounded to the other side: one unit of one number.
        unit = x.abs().max() / 5000 * weight.abs().max() if dtype == "int8" else 0
        torch.testing.assert_close(got.double(), expected, atol=1e-5 * n_in ** 0.5 + unit, rtol=1e-5)
        alone = torch.cat([linear(row[None]) for row in x[:5]])
        if rows <= engine_cpu.FEW_ROWS:
            assert torch.equal(alone, got[:5])                                # a row's neighbours change no bit of it
        else:
            torch.testing.assert_close(alone, got[:5], atol=1e-5 * n_in ** 0.5, rtol=1e-5)
    columns = torch.randn(n_in, rows).t()                                     # not contiguous
    torch.testing.assert_close(linear(columns), linear(columns.contiguous()), atol=0, rtol=0)


@pytest.mark.parametrize("kind", [engine.Linear, engine_cpu.OneDnnLinear])
@pytest.mark.parametrize("dtype", engine.CPU_DTYPES)
def test_plain_product_against_float64(dtype, kind):
    linear, weight = make_linear(96, 130, dtype, kind=kind)
    x = torch.randn(40, 96)
    expected, got = x.double() @ weight.t() + linear.bias.double(), linear(x)
    limit = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[got.dtype]  # of the product's dtype
    assert (got.double() - expected).abs().max() < limit * expected.abs().max()


@pytest.mark.parametrize("dtype", engine.CPU_DTYPES)
def test_products_of_nan_and_of_huge_numbers(dtype):
    linear, _ = make_linear(40, 8, dtype)
    x = torch.randn(3, 40)
    x[1, 7] = float("nan")
    x[2] *= 1e30
    got = linear(x)
    assert got[1].isnan().all() and got[0].isfinite().all()
    torch.testing.assert_close(got[2], (linear(x[2:] / 1e30)[0] - linear.bias) * 1e30, rtol=0.02, atol=1e28)
    assert not linear(torch.zeros(2, 40)).sub(linear.bias).any()


@pytest.mark.parametrize("n_in", [1600, 3072, 6400])
@pytest.mark.parametrize("rows", [1, 200])
def test_the_largest_sums_of_8_bits_do_not_overflow(n_in, rows):
    linear = engine.Linear(n_in, 5, bias=False)
    linear.weight.data = torch.ones(5, n_in)
    linear = quantization.Int8Linear.of(linear)
    linear.pack()
    torch.testing.assert_close(linear(torch.ones(rows, n_in)), torch.full((rows, 5), float(n_in)), rtol=1e-3, atol=0)


def test_what_is_quantized_later_is_as_what_was_loaded_so(tiny):
    model, ids = engine.load_model("tiny"), torch.tensor([IDS])
    before = model(ids)
    for _ in range(2):  # the second time there is nothing left to do
        model.quantize()
        assert torch.equal(model(ids), engine.load_model("tiny", dtype="int8")(ids))
        assert not torch.equal(model(ids), before)


def test_a_weight_that_is_not_contiguous():
    for kind in (engine.Linear, engine_cpu.TiledLinear):
        linear = kind(6, 4, bias=False)
        linear.weight.data = torch.randn(6, 4).t()
        if kind is engine_cpu.TiledLinear:
            linear.pack()
        torch.testing.assert_close(linear(torch.eye(6)), linear.weight.data.t().contiguous(), atol=1e-6, rtol=0)


def test_attention_in_16_bits_of_what_torch_multiplied():
    """Where torch multiplies on a CPU its results are bfloat16; keys and values may be either."""
    for dtype in (torch.float32, torch.bfloat16):
        kv = engine_cpu.TiledCache(1, 2, 12, page_size=4, max_pages=40, dtype=dtype).new_kv()
        q, k, v = torch.randn(3, 1, 2, 70, 12).bfloat16()
        kv.reserve(1, 70, 100)
        got = kv.attend(0, q, k, v, 0.5)
        assert got.dtype == torch.bfloat16
        assert (got.float() - engine.attention(q.float(), k.float(), v.float(), 0.5)).abs().max() < 0.03


def small_block(dtype):
    """A block of 2 heads of 5, packed; its input of 5 tokens; and a view of 3 rows of it: two that decode, and a prompt
    behind stored tokens, on pages in no order, in pools that hold NaN beside what is stored."""
    config = engine.GPT2Config(n_layer=1, n_head=2, n_embd=10, n_inner=21)
    block = engine_cpu.TiledBlock(config, 0, engine_cpu.TiledLinear)
    for name, parameter in block.named_parameters():
        parameter.data = torch.randn(parameter.shape) * (0.3 if parameter.ndim > 1 else 1.0) + ("ln_" in name)
        if parameter.ndim > 1 and dtype != "int8":
            parameter.data = parameter.data.to(engine.DTYPES[dtype])
    if dtype == "int8":
        for parent in block.attn, block.mlp:
            for name, child in list(parent.named_children()):
                setattr(parent, name, quantization.Int8Linear.of(child))
    pack_block(block)
    cache = engine_cpu.TiledCache(1, 2, 5, page_size=4, max_pages=6, dtype=block.attn.c_attn.weight.dtype
                                  if dtype != "int8" else torch.bfloat16)
    plan = engine.plan_rows([2, 0, 5], [1, 1, 3], [[4], [1], [5, 0]], 4)
    for pool in cache.k, cache.v:
        pool.fill_(float("nan"))
        for page, slots in ((4, 2), (5, 4), (0, 1)):
            pool[:, :, 4 * page:4 * page + slots] = torch.randn(1, 2, slots, 5).to(pool.dtype)
    view = engine_cpu.KVView(*cache.arrays, plan.slots, plan.page_ids, plan.stored, plan.counts, 4)
    return block, torch.randn(5, 10), view


@pytest.mark.parametrize("dtype", engine.CPU_DTYPES)
def test_kernels_run_without_numba_too(dtype):
    """Slowly, in plain Python: a whole block, with the numbers of the compiled one."""
    block, x, view = small_block(dtype)
    found = []
    for run in engine_cpu._block, engine_cpu.cpu_kernels().block:
        own = view._replace(k=view.k.copy(), v=view.v.copy())
        out = x.numpy().copy()
        run(out, block.weights, tuple(own), 0, np.float32(0.4), np.full(5 * (5 * 10 + 21), np.nan, np.float32))
        stored = np.array([engine_cpu._widen(number) for pool in (own.k, own.v) for number in pool.ravel()])
        found.append((out, stored))
    (plain, plain_kv), (compiled, compiled_kv) = found
    assert np.isfinite(plain).all() and np.abs(plain - x.numpy()).max() > 0.5
    # In the others a sum's last bit may round an activation to the other side.
    limit = 1e-5 if dtype in ("float32", "float16") else 2e-2
    np.testing.assert_allclose(plain, compiled, atol=limit * np.abs(plain).max(), rtol=0)
    np.testing.assert_allclose(plain_kv, compiled_kv, atol=max(limit, 1e-2 * (dtype == "float16")), rtol=limit)
    assert np.isfinite(plain_kv).sum() == 2 * 2 * 5 * (7 + 5)        # what was stored, and the new tokens


@pytest.mark.parametrize("activations, weights", [
    (np.float32, torch.float32), (np.float32, torch.float16), (np.float32, torch.bfloat16), (np.float32, torch.int8),
    (np.uint16, torch.bfloat16), (np.int16, torch.int8)])
def test_plain_product_of_each_pair_of_dtypes(activations, weights):
    """What the instructions of any processor mean, on any processor."""
    x = torch.randn(6, 37)
    whole = weights == torch.int8
    weight = (torch.randint(-127, 128, (9, 37)) if whole else torch.randn(9, 37)).to(weights)
    scale, bias = torch.rand(9), torch.randn(9)
    product = engine_cpu.Product(engine_cpu.as_array(weight), scale.numpy(), bias.numpy(), np.empty(0, activations),
                                 tuple(engine_cpu.Choice()))
    out = np.zeros((6, 9), np.float32)
    engine_cpu._project(x.numpy(), product, out, False, False)
    expected = x.double() @ weight.double().t() * scale.double() + bias.double()
    limit = {np.float32: 1e-6, np.uint16: 4e-3, np.int16: 1e-4}[activations]
    assert np.abs(out - expected.numpy()).max() < limit * expected.abs().max().item()


@pytest.mark.parametrize("number", [0.0, -0.0, 1.0, 1.00390625, 1.01171875, -3.14159, 65504.0, 1e-7, float("inf"),
                                    float("nan")])
def test_numbers_as_they_are_stored(number):
    """To 16 bits and back as torch rounds them: to the nearest, a tie to even."""
    for dtype, kind in ((torch.bfloat16, np.uint16), (torch.float16, np.int16), (torch.float32, np.float32)):
        stored = np.empty(1, kind)
        stored[0] = engine_cpu._as(np.float32(number), stored)
        expected = torch.tensor([number]).to(dtype).float().numpy()
        np.testing.assert_equal(engine_cpu._widen(stored[0]), expected[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_decode_step_does_not_depend_on_the_batch(dtype):
    """Not by a bit: every sum is added up in the same order, for 1 row as for 64."""
    model = engine.load_model("tiny", dtype=dtype)
    draw = np.random.default_rng(4)
    sequences = [torch.tensor([draw.integers(50257, size=n).tolist()]) for n in (3, 17, 40, 16, 1, 25, 9)]
    alone = []
    for ids in sequences:
        kv = model.new_kv()
        model(ids[:, :-1], kv) if ids.shape[1] > 1 else None
        alone.append(model(ids[:, -1:], kv)[0, 0])
        kv.release()
    tables = [model.cache.new_table() for _ in sequences]
    for ids, table in zip(sequences, tables):
        if ids.shape[1] > 1:
            model(ids[:, :-1], model.new_kv([table], [ids.shape[1] - 1]))
    together = model(torch.tensor([[ids[0, -1] for ids in sequences]]),
                     model.new_kv(tables, [1] * len(sequences)))[0]
    assert torch.equal(together, torch.stack(alone))


def test_bfloat16_text_differs_from_transformers_only_at_its_ties(tiny):
    """transformers rounds activations and logits to bfloat16, of which two tokens may get the same. Ours keeps them in
    float32, so it is nearer to the model in float32, and its texts part where transformers' logits all but tie."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.GPT2LMHeadModel.from_pretrained(engine.ASSETS / "tiny", dtype=torch.bfloat16).eval()
    ours, divergence = engine.load_model("tiny", dtype="bfloat16"), {"ours": 0.0, "theirs": 0.0}
    for text in ("Once upon a time", "Tom had a red ball", "Mom said", "There was a big tree"):
        prompt = engine.load_tokenizer().encode_ordinary(text)
        made = list(engine.generate(ours, prompt, engine.SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)))
        ids = torch.tensor([prompt + made])
        with torch.no_grad():
            logits = theirs(ids).logits[0].float()
        own = logits[len(prompt) - 1:-1]
        gap = own.amax(dim=-1) - own[torch.arange(len(made)), made]
        unit = 2.0 ** (own.abs().amax(dim=-1).log2().floor() - 7)                     # of a bfloat16 of that size
        assert (gap <= 2 * unit).all()
        exact = tiny(ids)[0].log_softmax(-1)
        for name, found in (("ours", ours(ids)[0]), ("theirs", logits)):
            divergence[name] += (exact.exp() * (exact - found.log_softmax(-1))).sum().item()
    assert divergence["ours"] < 0.7 * divergence["theirs"]


def test_quantized_rows_are_as_near_as_8_bits_allow():
    linear = engine.Linear(200, 50)
    linear.weight.data = torch.randn(50, 200) * torch.logspace(-6, 3, 50)[:, None]
    linear.weight.data[7] = 0
    exact = linear.weight.double()
    linear = quantization.Int8Linear.of(linear)
    error = (linear.weight.double() * linear.scale.double()[:, None] - exact).abs()
    assert (error <= exact.abs().amax(dim=1, keepdim=True) / 253).all() and linear.weight.dtype == torch.int8
    assert not error[7].any() and linear.scale.isfinite().all()


@pytest.mark.parametrize("rows, heads, width", [(1, 1, 4), (1, 4, 48), (2, 3, 33), (4, 8, 96)])
def test_block_kernels_against_the_plain_block(rows, heads, width):
    """In float64, which the plain block stays in."""
    config = engine.GPT2Config(n_head=heads, n_embd=width * heads)
    tiled, plain = engine_cpu.TiledBlock(config, 0, engine_cpu.TiledLinear), engine.Block(config, 0)
    for name, parameter in tiled.named_parameters():
        parameter.data = torch.randn(parameter.shape) * (0.2 if parameter.ndim > 1 else 1.0) + ("ln_" in name)
    plain.load_state_dict(tiled.state_dict())
    pack_block(tiled)
    x = 3 * torch.randn(1, rows, width * heads)
    expected = plain.double()(x.double(), engine.Recompute())
    assert expected.dtype == torch.float64
    torch.testing.assert_close(tiled(x.clone(), engine.Recompute()).double(), expected,
                               atol=2e-5 * expected.abs().max().item(), rtol=0)
    x[0, 0, 0] = float("nan")
    assert tiled(x, engine.Recompute())[0, 0].isnan().all()


def pack_block(block):
    for module in block.modules():
        if isinstance(module, engine_cpu.TiledLinear):
            module.pack()
    block.pack()


def test_gelu_in_the_block_kernel_over_its_whole_range():
    """A block whose projections pass one number through: what comes out is x + gelu(x), to the last digits."""
    values = torch.cat([torch.linspace(-12, 12, 2001), torch.tensor([-1e4, -88.0, 0.0, 1e-30, 88.0, 1e4])])
    config, kernels = engine.GPT2Config(n_head=1, n_embd=1, n_inner=len(values)), engine_cpu.cpu_kernels()
    block = engine_cpu.TiledBlock(config, 0, engine_cpu.TiledLinear)
    for parameter in block.parameters():
        parameter.data.zero_()
    block.mlp.c_fc.bias.data = values
    out = torch.zeros(len(values), 1)
    for n in range(len(values)):
        block.mlp.c_proj.weight.data = torch.nn.functional.one_hot(torch.tensor([n]), len(values)).float()
        pack_block(block)
        _, _, *weights = block.weights
        kernels.end(out[n:n + 1], torch.zeros(1, 1), *weights, torch.empty(1, 1), torch.empty(1, len(values)))
    expected = torch.nn.functional.gelu(values.double(), approximate="tanh")
    error = (out[:, 0].double() - expected).abs() / expected.abs().clamp(min=1e-3)
    assert error.max() < 1e-6


@backends
@pytest.mark.parametrize("variant", VARIANTS)
def test_int8_is_near_float32_and_alike_in_all_variants(tiny, variant, backend):
    quantized = engine.load_model("tiny", variant, dtype="int8", backend=backend)
    assert all(linear.weight.dtype == torch.int8 for linear in quantized.linears())
    assert quantized.wte.weight is quantized.lm_head.weight
    params = engine.SamplingParams(temperature=1, seed=1, max_tokens=50, ignore_eos=True)
    ids = torch.tensor([IDS + list(engine.generate(tiny, IDS, params))])
    exact, near = tiny(ids), quantized(ids)
    assert (near - exact).abs().max() < 0.05 * exact.abs().max()
    assert (near.argmax(-1) == exact.argmax(-1)).float().mean() > 0.9
    kv = quantized.new_kv()
    if variant is not engine.GPT2:
        steps = [quantized(ids[:, :50], kv)] + [quantized(ids[:, n:n + 1], kv) for n in range(50, 60)]
        assert (torch.cat(steps, dim=1) - near).abs().max() < 0.05 * exact.abs().max()
    shared = engine.share_weights(quantized, engine.GPT2Paged)
    assert torch.equal(shared(ids), near) and shared.lm_head.scale is quantized.lm_head.scale


@backends
def test_attention_keeps_nan_and_survives_large_scores(backend):
    model = paged(page_size=4, backend=backend)
    q = torch.full((1, 4, 1, 12), 1e4)
    kv = model.new_kv()
    kv.reserve(1, 1, 64)
    assert torch.isfinite(kv.attend(0, q, q, q, 1.0)).all()                   # exp of the score alone overflows
    assert torch.isnan(kv.attend(0, q * float("nan"), q, q, 1.0)).all()
    kv = model.new_kv()
    kv.reserve(1, 3, 64)
    kv.attend(0, *[q.expand(1, 4, 3, 12)] * 3, 1.0)
    kv.advance()
    kv.reserve(1, 1, 64)                                                      # the largest score is not the last
    torch.testing.assert_close(kv.attend(0, q, -q, -q, 1.0), q)


def test_decode_allocates_nothing_that_grows(tiny_models):
    """torch's own account of a decode step: the same at 50 and at 900 stored tokens for pages, not for torch.cat."""
    def allocated(variant, stored):
        model = tiny_models[variant]
        kv = model.new_kv()
        model(torch.ones(1, stored, dtype=torch.long), kv, keep=slice(-1, None))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            model(torch.ones(1, 1, dtype=torch.long), kv)
        kv.release()
        return sum(max(0, event.self_cpu_memory_usage) for event in profile.events())

    assert allocated(engine.GPT2Paged, 900) <= allocated(engine.GPT2Paged, 50) * 1.01
    assert allocated(engine.GPT2Cached, 900) > 5 * allocated(engine.GPT2Cached, 50)


def test_decode_never_concatenates_or_copies_the_stored(tiny_models):
    """Seen operator by operator: what a step moves and allocates does not depend on the length."""
    short, long = (engine.count_bytes(tiny_models[engine.GPT2Paged], n) for n in (50, 900))
    assert (short.moved, short.allocated) == (long.moved, long.allocated)
    stored = 2 * 6 * 192 * 4                                                   # K and V of one token, 6 layers
    assert 2 * stored <= long.moved <= 4 * stored                              # read and written, and the output once
    short, long = (engine.count_bytes(tiny_models[engine.GPT2Cached], n) for n in (50, 900))
    assert long.moved > 10 * short.moved


def test_threads_may_share_a_model(tiny):
    """Each with a place of its own in the pool: prompts of one and of several blocks, and decoding."""
    from concurrent.futures import ThreadPoolExecutor

    prompts = [[i + 1] * (7 + 53 * i) for i in range(4)]

    def text(prompt):
        return list(engine.generate(tiny, prompt, engine.SamplingParams(temperature=0, max_tokens=12)))

    expected = [text(prompt) for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(4):
            assert list(pool.map(text, prompts)) == expected
    assert tiny.cache.free_pages == tiny.cache.max_pages


def test_a_pool_beyond_memory_is_refused():
    with pytest.raises(engine.UserError, match="1000000000000 pages of 16 tokens find no memory"):
        engine.PagedKVCache(1, 1, 8, max_pages=10**12)


def test_pages_come_back_and_run_on():
    model = paged(page_size=4, max_pages=12)
    kv = model.new_kv()
    model(torch.ones(1, 9, dtype=torch.long), kv)
    assert model.cache.free_pages == 9 and kv.tables[0].pages == [0, 1, 2]
    other = model.new_kv()
    model(torch.ones(1, 5, dtype=torch.long), other)
    assert other.tables[0].pages[0] > 4                                        # leaves the first one room to grow
    for _ in range(8):
        model(torch.ones(1, 1, dtype=torch.long), kv)
    assert kv.tables[0].pages == [0, 1, 2, 3, 4]
    kv.release()
    other.release()
    assert model.cache.free_pages == 12
    kv = model.new_kv()
    model(torch.ones(1, 9, dtype=torch.long), kv)
    del kv                                                                     # dropped without release
    assert model.cache.free_pages == 12


def test_a_full_pool_changes_nothing():
    model = paged(page_size=4, max_pages=5)
    kv = model.new_kv()
    ids = torch.randint(97, (2, 10), generator=torch.Generator().manual_seed(4))
    with pytest.raises(engine.OutOfPages, match="6 pages of 4 tokens are needed, 5 of 5 are free"):
        model(ids, kv)
    assert model.cache.free_pages == 5
    model(ids[:, :8], kv)
    with pytest.raises(engine.OutOfPages, match="2 pages of 4 tokens are needed, 1 of 5 are free"):
        model(ids[:, 8:], kv)
    assert model.cache.free_pages == 1 and kv.length == 8
    kv.release()
    model(ids[:1], kv)                                                         # another number of rows, once released
    assert kv.length == 10


@pytest.mark.parametrize("variant", VARIANTS)
def test_positions_beyond_the_context_are_refused_before_anything_runs(tiny_models, variant):
    model = tiny_models[variant]
    kv = model.new_kv()
    with pytest.raises(engine.UserError, match=r"position 1024 is beyond the model's context of 1024 positions"):
        model(torch.zeros(1, 1025, dtype=torch.long), kv)
    if variant is not engine.GPT2:
        model(torch.zeros(1, 1024, dtype=torch.long), kv, keep=slice(-1, None))
        with pytest.raises(engine.UserError, match="position 1024 is beyond"):
            model(torch.zeros(1, 1, dtype=torch.long), kv)
        assert kv.length == 1024
    kv.release()
    for ids in (torch.zeros(1, 0, dtype=torch.long), torch.zeros(3, dtype=torch.long), torch.zeros(1, 3)):
        with pytest.raises(engine.UserError, match=r"ids must be whole numbers \(B, T\), at least 1, not \("):
            model(ids, kv)
    for ids in ([[1, 50257]], [[-1, 1]]):
        with pytest.raises(engine.UserError, match="token ids must be from 0 to 50256, not from "):
            model(torch.tensor(ids), kv)
    if variant is engine.GPT2Paged:
        assert model.cache.free_pages == model.cache.max_pages


@pytest.mark.parametrize("variant", [engine.GPT2Cached, engine.GPT2Paged])
def test_another_number_of_rows_is_refused(tiny_models, variant):
    kv = tiny_models[variant].new_kv()
    tiny_models[variant](torch.zeros(2, 3, dtype=torch.long), kv)
    with pytest.raises(engine.UserError, match="rows"):
        tiny_models[variant](torch.zeros(3, 1, dtype=torch.long), kv)


@pytest.mark.parametrize("name, value", [("page_size", 0), ("max_pages", -1), ("page_size", 2.5)])
def test_pool_sizes_are_checked(name, value):
    with pytest.raises(engine.UserError, match=f"{name} must be a whole number from 1, not {value}"):
        engine.PagedKVCache(1, 1, 8, **{name: value})
