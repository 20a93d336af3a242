"""What the tests share: the repository on the path, small GPT-2 folders made by transformers, prompts."""

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # engine_cuda's kernels run on the CPU; read when triton is imported
import transformers

import engine

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
torch.set_num_threads(2)
VARIANTS = [engine.GPT2, engine.GPT2Cached, engine.GPT2Paged]


def make_oracle(seed=0, std=0.2, **config):
    """A transformers GPT-2 whose weights are large enough for a wrong activation or epsilon to show."""
    torch.manual_seed(seed)
    defaults = dict(vocab_size=97, n_positions=64, n_embd=48, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    oracle = transformers.GPT2LMHeadModel(transformers.GPT2Config(**(defaults | config))).eval()
    for name, parameter in oracle.named_parameters():
        offset = 1.0 if "ln_" in name and name.endswith("weight") else 0.0
        parameter.data.normal_(offset, std)
    oracle.requires_grad_(False)
    oracle.tie_weights()
    return oracle


@pytest.fixture
def oracle_folder(tmp_path):
    """A function that makes (transformers model, the folder it was saved to)."""
    def make(name="model", **config):
        oracle = make_oracle(**config)
        oracle.save_pretrained(tmp_path / name)
        return oracle, tmp_path / name
    return make


@pytest.fixture(scope="session")
def tiny():
    return engine.load_model("tiny")


@pytest.fixture(scope="session")
def tiny_models(tiny):
    return {variant: engine.share_weights(tiny, variant) for variant in VARIANTS}


def fill_with_nan(model):
    """Memory that nobody wrote turns every result that reads it into NaN."""
    if isinstance(model, engine.GPT2Paged):
        model.cache.k.fill_(float("nan"))
        model.cache.v.fill_(float("nan"))
        model.cache.scratch.fill_(float("nan"))
    return model


def run_to_end(tokens):
    """The tokens of a generator, and the finish reason that it returns."""
    out = []
    while True:
        try:
            out.append(next(tokens))
        except StopIteration as end:
            return out, end.value
