"""This engine beside what one would use instead, on a CPU.

    python tests/peers.py                                        whatever of them is installed
    python tests/peers.py --modes single --rounds 9 --peers transformers llama.cpp
    python tests/peers.py --python llama.cpp=ENV/bin/python      a peer that lives in another environment
    python tests/peers.py --json peers.json --plot assets/peers.png

Every peer has a process of its own, and all get the same token ids: GPT-2's shape with random weights (a speed does not
depend on their values), greedy, the same number of threads, the end of text ignored. In each round each of them runs
once, in turn, while the others sleep, and ratios are taken inside a round: the memory of most machines is faster at one
minute than at the next. Modes:

    single    one prompt of 5 tokens, 100 new
    prefill   1,000 tokens, 1 new
    batch     --batch prompts of 5 to 200 tokens at once, 100 new each
"""

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ENGINE = Path(__file__).resolve().parent.parent
LAYERS, HEADS, WIDTH, VOCABULARY, CONTEXT = 12, 12, 768, 50257, 1024


# ---------------------------------------------------------------------------------------------------
# The peers. Each is made in its worker process, with its kind, the folder of models and the number of threads, and
# answers many(prompts, new) -> the new ids of each prompt.

class Ours:
    def __init__(self, kind, folder, threads):
        sys.path.insert(0, str(ENGINE))
        import engine

        engine.torch.set_num_threads(threads)
        self.engine, self.scheduler = engine, None
        self.model = engine.load_model(str(folder / "hf"), engine.GPT2Paged, dtype=kind, max_pages=2048)

    def many(self, prompts, new):
        params = self.engine.SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        if len(prompts) == 1:
            return [list(self.engine.generate(self.model, prompts[0], params))]
        if self.scheduler is None:
            self.scheduler = self.engine.ContinuousBatchingScheduler(self.model, len(prompts), prefix_cache=False)
        requests = [self.engine.Request(prompt, params) for prompt in prompts]
        self.scheduler.submit(*requests)
        while self.scheduler.step():
            pass
        return [request.output_ids for request in requests]


class Transformers:
    def __init__(self, kind, folder, threads):
        import torch
        from transformers import GPT2LMHeadModel

        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self.tensor, self.model = torch.tensor, GPT2LMHeadModel.from_pretrained(folder / "hf", dtype=kind).eval()

    def many(self, prompts, new):
        width = max(map(len, prompts))
        ids = self.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = self.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        out = self.model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0,
                                  eos_token_id=None)
        return out[:, width:].tolist()


class CTranslate2:
    def __init__(self, kind, folder, threads):
        import ctranslate2

        self.generator = ctranslate2.Generator(str(folder / "ct2"), device="cpu", compute_type=kind, inter_threads=1,
                                               intra_threads=threads)

    def many(self, prompts, new):
        words = [[f"t{token}" for token in prompt] for prompt in prompts]
        out = self.generator.generate_batch(words, beam_size=1, sampling_topk=1, max_length=new, min_length=new,
                                            include_prompt_in_result=False)
        return [result.sequences_ids[0] for result in out]


class LlamaCpp:
    """Through the C interface that llama-cpp-python wraps: prompts one by one, then a token of all sequences at a time;
    its own greedy sampler."""

    def __init__(self, kind, folder, threads):
        import ctypes

        import llama_cpp

        self.api, self.threads, self.context = llama_cpp, threads, None
        self.quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self.quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        path = str(folder / f"gpt2-{kind}.gguf").encode()
        self.model = llama_cpp.llama_model_load_from_file(path, llama_cpp.llama_model_default_params())
        self.sampler = llama_cpp.llama_sampler_init_greedy()

    def _make_context(self, slots, length):
        params = self.api.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = slots * length, slots, slots > 1
        params.n_batch = params.n_ubatch = max(512, slots, length)
        params.n_threads = params.n_threads_batch = self.threads
        self.context = self.api.llama_init_from_model(self.model, params)
        self.batch = self.api.llama_batch_init(params.n_batch, 0, 1)

    def _decode(self, rows):
        """rows: (token, position, sequence, whether its next token is wanted) each -> the next tokens."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, at, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, at, 1, wanted
            batch.seq_id[i][0] = sequence
        if self.api.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")
        return [self.api.llama_sampler_sample(self.sampler, self.context, i) for i, row in enumerate(rows) if row[3]]

    def many(self, prompts, new):
        if self.context is None:
            self._make_context(len(prompts), CONTEXT if len(prompts) == 1 else 320)
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)
        last = [self._decode([(token, at, n, at == len(prompt) - 1) for at, token in enumerate(prompt)])[0]
                for n, prompt in enumerate(prompts)]
        out = [[token] for token in last]
        for made in range(new - 1):
            last = self._decode([(token, len(prompt) + made, n, True)
                                 for n, (token, prompt) in enumerate(zip(last, prompts))])
            for tokens, token in zip(out, last):
                tokens.append(token)
        return out


class OnnxRuntime:
    """One exported graph, for one sequence; keys and values go in and come out, as in its GPT-2 examples."""

    def __init__(self, kind, folder, threads):
        import numpy
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, self.np = threads, numpy
        self.session = onnxruntime.InferenceSession(folder / f"onnx-{kind}" / "model.onnx", options,
                                                    providers=["CPUExecutionProvider"])

    def many(self, prompts, new):
        np, (prompt,) = self.np, prompts
        names = [one.name for one in self.session.get_inputs() if one.name.startswith("past")]
        past = [np.zeros((1, HEADS, 0, WIDTH // HEADS), np.float32) for _ in names]
        ids, at, out = np.array([prompt]), 0, []
        for _ in range(new):
            feed = {"ids": ids, "position": np.arange(at, at + ids.shape[1])[None], **dict(zip(names, past))}
            logits, *past = self.session.run(None, feed)
            at += ids.shape[1]
            out.append(int(logits[0, -1].argmax()))
            ids = np.array([out[-1:]])
        return [out]


class VLLM:
    def __init__(self, kind, folder, threads):
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1",
                       "VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
                       "OMP_NUM_THREADS": str(threads)}
        from vllm import LLM, SamplingParams

        self.params = SamplingParams
        self.model = LLM(model=str(folder / "hf"), dtype=kind, skip_tokenizer_init=True, max_model_len=CONTEXT,
                         max_num_seqs=64, enable_prefix_caching=False)

    def many(self, prompts, new):
        params = self.params(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        out = self.model.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in out]


# name: the class, the module that must be there, its package, and the kinds of weights
PEERS = {
    "ours": (Ours, "torch", "torch", ("float32", "bfloat16", "int8")),
    "transformers": (Transformers, "transformers", "transformers", ("float32", "bfloat16")),
    "ctranslate2": (CTranslate2, "ctranslate2", "ctranslate2", ("float32", "int8")),
    "llama.cpp": (LlamaCpp, "llama_cpp", "llama-cpp-python gguf safetensors", ("f32", "f16", "bf16", "q8_0", "q4_0")),
    "onnxruntime": (OnnxRuntime, "onnxruntime", "onnxruntime onnx onnxscript", ("float32", "int8")),
    "vllm": (VLLM, "vllm", "vllm", ("float32", "bfloat16")),
}
ONE_SEQUENCE = ("onnxruntime",)
MODES = ("single", "prefill", "batch")


# ---------------------------------------------------------------------------------------------------
# Their models, made once in --folder: random weights in GPT-2's shape, and what each peer needs of them.

def make_model(folder):
    """A folder as GPT-2's, with words t0, t1, ... in place of its vocabulary."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(n_layer=LAYERS, n_head=HEADS, n_embd=WIDTH)).save_pretrained(folder)
    words, end = {f"t{n}": n for n in range(VOCABULARY)}, f"t{VOCABULARY - 1}"
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token=end)), unk_token=end,
                            bos_token=end, eos_token=end).save_pretrained(folder)


def make_ctranslate2(source, target):
    from ctranslate2.converters import TransformersConverter

    TransformersConverter(str(source)).convert(str(target), force=True)


def make_gguf(source, target, kind):
    import gguf
    from safetensors.numpy import load_file

    state = load_file(source / "model.safetensors")
    state = {name.removeprefix("transformer."): value for name, value in state.items()}
    kind = gguf.GGMLQuantizationType[kind.upper()]
    out = gguf.GGUFWriter(target, "gpt2")
    out.add_block_count(LAYERS)
    out.add_context_length(CONTEXT)
    out.add_embedding_length(WIDTH)
    out.add_feed_forward_length(4 * WIDTH)
    out.add_head_count(HEADS)
    out.add_layer_norm_eps(1e-5)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("gpt-2")
    out.add_token_list([f"t{n}" for n in range(VOCABULARY)])
    out.add_token_merges(["t 0"])
    out.add_eos_token_id(VOCABULARY - 1)

    def add(name, value):
        matrix = value.ndim == 2 and name != "position_embd.weight"
        as_kind = kind if matrix else gguf.GGMLQuantizationType.F32
        out.add_tensor(name, gguf.quants.quantize(value.copy(), as_kind), raw_dtype=as_kind)

    add("token_embd.weight", state["wte.weight"])
    add("position_embd.weight", state["wpe.weight"])
    add("output_norm.weight", state["ln_f.weight"])
    add("output_norm.bias", state["ln_f.bias"])
    parts = {"ln_1": "attn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "ln_2": "ffn_norm",
             "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}
    for layer in range(LAYERS):
        for ours, theirs in parts.items():
            for what in ("weight", "bias"):
                add(f"blk.{layer}.{theirs}.{what}", state[f"h.{layer}.{ours}.{what}"].T)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def make_onnx(source, target, kind):
    """One graph for prompts and for single tokens: ids, positions and past in, logits and present out."""
    target.mkdir(exist_ok=True)
    if kind == "int8":
        from onnxruntime.quantization import QuantType, quantize_dynamic

        exact = make_once(source.parent, "onnxruntime", "float32")
        quantize_dynamic(exact / "model.onnx", target / "model.onnx", weight_type=QuantType.QInt8, per_channel=True,
                         use_external_data_format=True, op_types_to_quantize=["MatMul", "Gemm"])
        return
    import torch
    from transformers import DynamicCache, GPT2LMHeadModel

    class Step(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = GPT2LMHeadModel.from_pretrained(source, attn_implementation="eager").eval()

        def forward(self, ids, position, past):
            cache = DynamicCache()
            for layer in range(LAYERS):
                cache.update(past[2 * layer], past[2 * layer + 1], layer)
            out = self.model(input_ids=ids, position_ids=position, past_key_values=cache, logits_to_keep=1)
            return out.logits, *(part for layer in out.past_key_values.layers for part in (layer.keys, layer.values))

    past = [torch.zeros(1, HEADS, 3, WIDTH // HEADS) for _ in range(2 * LAYERS)]
    names = [f"{what}_{n}" for n in range(LAYERS) for what in ("key", "value")]
    new, old = torch.export.Dim("new", max=CONTEXT), torch.export.Dim("old", max=CONTEXT)
    torch.onnx.export(Step(), (torch.zeros(1, 2, dtype=torch.long), torch.arange(2)[None], past), target / "model.onnx",
                      dynamo=True, external_data=True, verbose=False,
                      input_names=["ids", "position", *("past_" + name for name in names)],
                      output_names=["logits", *("present_" + name for name in names)],
                      dynamic_shapes=({1: new}, {1: new}, [{2: old} for _ in past]))


def make_once(folder, peer, kind):
    """What a peer reads, made where it is not there yet -> its path."""
    source = folder / "hf"
    target, make = {
        "ctranslate2": (folder / "ct2", lambda path: make_ctranslate2(source, path)),
        "llama.cpp": (folder / f"gpt2-{kind}.gguf", lambda path: make_gguf(source, path, kind)),
        "onnxruntime": (folder / f"onnx-{kind}", lambda path: make_onnx(source, path, kind)),
    }.get(peer, (source, make_model))
    if not target.exists():
        unfinished = target.with_name("unfinished-" + target.name)
        make(unfinished)
        unfinished.rename(target)
    return target


# ---------------------------------------------------------------------------------------------------
# A worker process, and who talks to it: a line of JSON each way.

def work(peer, kind, folder, threads):
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)                                                     # what a library prints is no answer
    make_once(folder, peer, kind)
    model = PEERS[peer][0](kind, folder, threads)
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        start = time.perf_counter()
        tokens = model.many(job["prompts"], job["new"])
        print(json.dumps([time.perf_counter() - start, tokens]), file=answers, flush=True)


class Worker:
    def __init__(self, peer, kind, python, folder, threads):
        self.name, self.seconds, self.error = f"{peer} {kind}", [], folder / f"{peer}-{kind}.log"
        command = [python, "-W", "ignore", __file__, "--worker", peer, kind, "--folder", folder,
                   "--threads", str(threads)]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        stderr=self.error.open("w"), env=environment)
        self.alive = bool(self.process.stdout.readline())

    def ask(self, prompts, new):
        """-> (seconds, tokens), or None where the process has ended."""
        try:
            self.process.stdin.write(json.dumps({"prompts": prompts, "new": new}) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        self.alive = bool(line)
        return json.loads(line) if line else None

    def close(self):
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()

    def complaint(self):
        """The last line that it wrote to stderr."""
        return (self.error.read_text().strip().splitlines() or ["no word"])[-1]


def prompts_of(mode, batch):
    draw = random.Random(0)
    spread_out = [round(5 + 195 * n / max(1, batch - 1)) for n in range(batch)]
    lengths = {"single": [5], "prefill": [1000]}.get(mode, spread_out)
    draw.shuffle(lengths)
    return [[draw.randrange(50000) for _ in range(length)] for length in lengths]


def race(mode, batch, entrants, rounds, folder, threads):
    """Rounds of one mode -> a row for each peer that came to the end: its seconds in each round."""
    prompts, new = prompts_of(mode, batch), 1 if mode == "prefill" else 100
    workers, first = [], {}
    for peer, kind, python in entrants:
        worker = Worker(peer, kind, python, folder, threads)
        first[worker.name] = worker.alive and worker.ask(prompts, new)         # not counted: it compiles, fills caches
        workers.append(worker)
        print(f"{mode}: {worker.name} " + ("is ready" if worker.alive else f"failed: {worker.complaint()}"),
              file=sys.stderr)
    for n in range(rounds):
        for worker in workers[::1 if n % 2 else -1]:
            if worker.alive and (reply := worker.ask(prompts, new)):
                worker.seconds.append(reply[0])
    for worker in workers:
        worker.close()
    count = new * len(prompts)
    return [{"mode": mode if mode != "batch" else f"batch of {batch}", "peer": worker.name, "tokens": count,
             "seconds": worker.seconds, "texts": first[worker.name][1]}
            for worker in workers if len(worker.seconds) == rounds]


def ratios(row, base):
    """How many times as fast a row is as the base, round by round."""
    return [theirs / own for own, theirs in zip(row["seconds"], base["seconds"])]


def spread(values, form="{:.2f}"):
    return f"{form} ({form} to {form})".format(statistics.median(values), min(values), max(values))


def print_rows(rows):
    """A table of one mode in Markdown: speed, and how many times as fast each of ours is."""
    if not rows:
        return print("\nnobody came to the end")
    ours = [row for row in rows if row["peer"].startswith("ours")]
    base = next((row for row in rows if row["peer"] == "transformers float32"), rows[0])
    unit = "ms to first token" if rows[0]["mode"] == "prefill" else "tokens/s"
    head = [rows[0]["mode"], unit, f"x {base['peer']}", *(f"{row['peer']} is x" for row in ours), "texts equal"]
    print("\n| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for row in rows:
        speed = [1e3 * s if unit.startswith("ms") else row["tokens"] / s for s in row["seconds"]]
        same = statistics.mean(a == b for a, b in zip(row["texts"], base["texts"]))
        cells = [row["peer"], spread(speed, "{:.0f}"), spread(ratios(row, base)),
                 *(spread(ratios(own, row)) for own in ours), f"{same:.0%}"]
        print("| " + " | ".join(cells) + " |", flush=True)


def plot(rows, path, note):
    """Bars: how many times as fast as transformers in float32 each is, a panel a mode."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    modes = list(dict.fromkeys(row["mode"] for row in rows))
    figure, axes = pyplot.subplots(1, len(modes), figsize=(4.2 * len(modes), 5), layout="constrained", squeeze=False)
    for axis, mode in zip(axes[0], modes):
        own = [row for row in rows if row["mode"] == mode]
        base = next((row for row in own if row["peer"] == "transformers float32"), own[0])
        bars = sorted((statistics.median(times), min(times), max(times), row["peer"])
                      for row in own for times in [ratios(row, base)])
        middle, low, high, names = zip(*bars)
        axis.barh(names, middle, color=["#1a73e8" if name.startswith("ours") else "#bdc1c6" for name in names])
        axis.hlines(names, low, high, color="#3c4043", linewidth=1)
        for name, value, end in zip(names, middle, high):
            axis.text(end + 0.02 * max(high), name, f"{value:.1f}", va="center", fontsize=8)
        axis.set(title={"single": "One stream", "prefill": "1,000-token prompt"}.get(mode, mode.capitalize()),
                 xlabel=f"times the speed of {base['peer']}", xlim=(0, 1.12 * max(high)))
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    figure.supxlabel(note, fontsize=8, color="#5f6368")
    figure.savefig(path, dpi=160)


def entrants_of(args, pythons):
    """(peer, kind, interpreter) of all that are asked for and installed; says which are missing."""
    found, missing = [], []
    for peer in args.peers:
        _, module, package, kinds = PEERS[peer]
        python = pythons.get(peer, sys.executable)
        look = f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"
        if subprocess.run([python, "-c", look]).returncode:
            missing.append(f"{peer} (pip install {package})")
        else:
            found += [(peer, kind, python) for kind in kinds if not args.kinds or kind in args.kinds]
    print("missing: " + (", ".join(missing) or "none"))
    return found


def processor():
    sys.path.insert(0, str(ENGINE))
    import engine

    return engine.processor_name()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--kinds", nargs="+", help="only these weights, as the peers call them (bf16, int8, ...)")
    parser.add_argument("--batch", type=int, nargs="+", default=[8], help="requests at once (default 8)")
    parser.add_argument("--rounds", type=int, default=7, help="half as many of batches over 16 (default 7)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of every peer (default: all processors)")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "gpt2-peers"),
                        help="where their models are made, once, some 3 GB (default %(default)s)")
    parser.add_argument("--python", nargs="+", default=[], metavar="PEER=INTERPRETER")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(*args.worker, args.folder, args.threads)
    args.folder.mkdir(parents=True, exist_ok=True)
    make_once(args.folder, "transformers", "float32")
    entrants, rows = entrants_of(args, dict(pair.split("=", 1) for pair in args.python)), []
    note = f"{processor()}, {args.threads} threads, GPT-2 124M, medians of rounds in turn"
    print(note)
    for mode in args.modes:
        for batch in args.batch if mode == "batch" else [1]:
            able = [entrant for entrant in entrants if batch == 1 or entrant[0] not in ONE_SEQUENCE]
            rounds = args.rounds if batch <= 16 else max(2, args.rounds // 2)  # of minutes each
            rows += (found := race(mode, batch, able, rounds, args.folder, args.threads))
            print_rows(found)
    if args.json:
        args.json.write_text(json.dumps({"note": note, "rows": rows}), encoding="utf-8")
    if args.plot:
        plot(rows, args.plot, note)


if __name__ == "__main__":
    main()
