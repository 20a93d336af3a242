"""Models by name: the hub, a folder, the sample model, or random weights -> a config and tensors."""

import contextlib
import functools
import json
import math
import re
import sys
import threading
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from errors import ABOVE_0, ASSETS, UserError, check_number, first_line, shown

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CPU_DTYPES = DTYPES | {"int8": torch.int8}


@dataclass(frozen=True)
class GPT2Config:
    """The fields of a GPT-2 config.json that change a number. Defaults are GPT-2 small's."""

    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    n_inner: int | None = None
    n_positions: int = 1024
    vocab_size: int = 50257
    layer_norm_epsilon: float = 1e-5
    activation_function: str = "gelu_new"
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    reorder_and_upcast_attn: bool = False  # scores in float32: here they always are
    tie_word_embeddings: bool = True
    eos_token_id: int | None = 50256

    @property
    def head_dim(self):
        return self.n_embd // self.n_head


# GPT-2 was trained with the tanh form of GELU, which its configs call gelu_new.
ACTIVATIONS = {"gelu_new": functools.partial(F.gelu, approximate="tanh"), "gelu": F.gelu, "relu": F.relu}
SHAPES = {
    "distilgpt2": dict(n_layer=6),
    "gpt2": dict(),
    "gpt2-medium": dict(n_layer=24, n_head=16, n_embd=1024),
    "gpt2-large": dict(n_layer=36, n_head=20, n_embd=1280),
    "gpt2-xl": dict(n_layer=48, n_head=25, n_embd=1600),
}
CONV1D = re.compile(r".*\.(c_attn|c_proj|c_fc)\.weight")       # stored (in, out) by GPT-2's Conv1D
BUFFERS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")      # the causal mask, which old checkpoints carry
FORMATS = ["model.safetensors", "model-*-of-*.safetensors", "pytorch_model.bin", "pytorch_model-*-of-*.bin"]
HUB_SECONDS = 4  # how long the hub may take to answer before it counts as out of reach


def gpt2_or(stand_in):
    """`gpt2` where it can be had within seconds, else the stand-in's name, and a line that says so."""
    try:
        hub_folder("gpt2")
    except UserError as err:
        print(f"{err}; {stand_in} stands in", file=sys.stderr)
        return stand_in
    return "gpt2"


def model_folder(name):
    """The folder that holds the model `name`: assets/tiny, the folder of that path, or the hub's cache."""
    if name == "tiny":
        return ASSETS / "tiny"
    with contextlib.suppress(OSError, RuntimeError):  # a name too long for a path; nobody's home
        folder = Path(name).expanduser()
        if name and folder.is_dir():
            return folder
    if not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name):
        raise UserError(f"there is no folder {shown(name)}, and it is not a Hugging Face name")
    return hub_folder(name)


def hub_folder(name):
    """The snapshot of a Hugging Face model in its local cache, downloaded there (with a progress bar) if missing."""
    from huggingface_hub import HfApi, constants

    if folder := snapshot(name, local=True):
        return folder
    if constants.HF_HUB_OFFLINE:
        raise UserError(f"{name} is not in the local cache, and HF_HUB_OFFLINE is set")
    if why := hub_failure(lambda: HfApi().model_info(name, timeout=HUB_SECONDS)):
        raise UserError(f"{name} is not in the local cache, and the hub did not give it ({why})")
    if folder := snapshot(name, local=False):
        return folder
    raise UserError(f"{name} has no weights named {' or '.join(FORMATS)}")


def snapshot(name, local):
    """The folder of a hub model with its config and weights, safetensors before bin; None where it has no weights."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    for weights in (FORMATS[:2], FORMATS[2:]):
        patterns = ["config.json", *weights, *(pattern + ".index.json" for pattern in weights)]
        try:
            folder = Path(snapshot_download(name, allow_patterns=patterns, local_files_only=local))
        except Exception as err:  # the library and its transport have many kinds
            if local and isinstance(err, LocalEntryNotFoundError):
                return None
            raise UserError(f"{shown(name)} could not be had from the hub: {first_line(err)}") from None
        if any(found for pattern in weights for found in folder.glob(pattern)):
            return folder
    return None


def hub_failure(call):
    """Why `call` failed, or did not return within HUB_SECONDS, in a few words; None where it went well.

    In a thread of its own, since a look-up of a host's name knows no time limit.
    """
    why = [f"no answer in {HUB_SECONDS} s"]

    def run():
        try:
            call()
            why[0] = None
        except Exception as err:
            why[0] = type(err).__name__

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(HUB_SECONDS)
    return why[0]


def read_config(folder):
    """config.json -> GPT2Config. Raises UserError for what is not GPT-2 or not implemented, by the field's name."""
    path = Path(folder, "config.json")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as err:
        raise UserError(f"{path} can't be read as JSON: {first_line(err)}") from None
    if not isinstance(raw, dict) or raw.get("model_type") != "gpt2":
        found = raw.get("model_type") if isinstance(raw, dict) else type(raw).__name__
        raise UserError(f"{path} is not a GPT-2 config: model_type must be 'gpt2', not {shown(found)}")
    for name in ("add_cross_attention", "pruned_heads", "quantization_config"):
        if raw.get(name):
            raise UserError(f"{path}: {name}={shown(raw[name])} is not supported")
    fields = {name: raw[name] for name in GPT2Config.__dataclass_fields__ if name in raw}
    for name, value in fields.items():
        check_config_field(f"{path}: {name}", name, value)
    config = GPT2Config(**fields)
    if config.n_embd % config.n_head:
        raise UserError(f"{path}: n_embd={config.n_embd} is not a multiple of n_head={config.n_head}")
    return config


SIZE_LIMITS = dict(n_layer=1000, n_head=1000, n_embd=2**16, n_inner=2**20, n_positions=2**20, vocab_size=2**24)


def check_config_field(label, name, value):
    """Raises UserError unless `value` is one that the engine implements for the config field `name`."""
    if name in SIZE_LIMITS:
        check_number(label, value, Integral, 1, SIZE_LIMITS[name], optional=name == "n_inner")
    elif name == "eos_token_id":
        check_number(label, value, Integral, 0, optional=True)
    elif name == "layer_norm_epsilon":
        check_number(label, value, Real, ABOVE_0, 1)
    elif name == "activation_function" and value not in list(ACTIVATIONS):
        raise UserError(f"{label} must be {', '.join(ACTIVATIONS)}, not {shown(value)}")
    elif name != "activation_function" and not isinstance(value, bool):
        raise UserError(f"{label} must be true or false, not {shown(value)}")


def weight_files(folder):
    """The files that hold a model's weights: safetensors before bin, the shards that an index names in turn."""
    for single in (FORMATS[0], FORMATS[2]):
        index = Path(folder, single + ".index.json")
        if Path(folder, single).is_file():
            return [Path(folder, single)]
        if index.is_file():
            try:
                names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
                return [Path(folder, Path(name).name) for name in sorted(names)]
            except (OSError, ValueError, LookupError, TypeError, AttributeError) as err:
                raise UserError(f"{index} is not an index of shards: {first_line(err)}") from None
    raise UserError(f"{folder} has no weights: no {FORMATS[0]} or {FORMATS[2]}, nor an index of shards")


def read_tensors(path):
    """Yields (name, tensor) of one weight file. The tensors lie in the mapped file: copy what is to stay.

    safetensors files are opened anew for each tensor, the largest first: closing one gives the memory of what
    was read back, so that loading never holds the weights twice.
    """
    try:
        if path.suffix == ".safetensors":
            from safetensors import safe_open

            with safe_open(path, "pt") as file:
                sizes = {name: math.prod(file.get_slice(name).get_shape()) for name in file.keys()}
            for name in sorted(sizes, key=lambda name: (sizes[name], name), reverse=True):
                with safe_open(path, "pt") as file:
                    yield name, file.get_tensor(name)
        else:
            yield from torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)).items()
    except Exception as err:  # each format has its own kinds; what can't be read is the file's fault
        raise UserError(f"{path} can't be read, is it complete? ({first_line(err)})") from None


def aligned_empty(rows, columns, like):
    """Memory (rows, columns) in the dtype of `like` that begins with a cache line: a load across two costs double."""
    line = 64 // like.itemsize
    raw = np.empty(rows * columns + line, like.dtype)
    skip = (64 - raw.ctypes.data % 64) // like.itemsize % line
    return raw[skip:skip + rows * columns].reshape(rows, columns)


def empty_weight(shape, dtype, device):
    """Memory for a weight. On a CPU biases and LayerNorms are float32, whatever dtype the matrices have, and the
    memory is numpy's, which asks Linux for huge pages: they are read 4 % faster."""
    if torch.device(device).type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    dtype = dtype if len(shape) > 1 else torch.float32
    raw = aligned_empty(1, math.prod(shape) * dtype.itemsize, np.empty(0, np.uint8))[0]
    return torch.from_numpy(raw).view(dtype).view(shape)


def read_weights(folder, shapes, tied, dtype, device):
    """The tensors of a checkpoint as a state dict of `shapes`, converted; names with or without `transformer.`.

    Raises UserError, with the tensor's name, for one that is missing, left over, given twice or of another shape.
    """
    state = {}
    for path in weight_files(folder):
        for key, tensor in read_tensors(path):
            name = key.removeprefix("transformer.")
            if BUFFERS.fullmatch(name):
                continue
            if name not in shapes or name in state:
                what = "given twice" if name in state else "not part of this GPT-2"
                raise UserError(f"{path}: {shown(key)} is {what}")
            if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
                kind = getattr(tensor, "dtype", type(tensor).__name__)
                raise UserError(f"{path}: {key} must be a float tensor, not {kind}")
            conv1d = CONV1D.fullmatch(name)
            expected = shapes[name][::-1] if conv1d else shapes[name]
            if tuple(tensor.shape) != expected:
                raise UserError(f"{path}: {key} has shape {tuple(tensor.shape)}, the config asks for {expected}")
            if name == "lm_head.weight" and "wte.weight" in state and torch.equal(tensor.to(device, dtype),
                                                                                  state["wte.weight"]):
                continue  # written out although it is tied
            state[name] = empty_weight(shapes[name], dtype, device)
            state[name].copy_(tensor.t() if conv1d else tensor)
            if not state[name].sum(dtype=torch.float32).isfinite():
                raise UserError(f"{path}: {key} holds NaN or infinity as {dtype}")
    if tied and "wte.weight" in state:
        state.setdefault("lm_head.weight", state["wte.weight"])
    missing = [name for name in shapes if name not in state]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise UserError(f"{folder}: the weights lack {missing[0]}{more}")
    return state


def random_weights(shapes, dtype, device):
    """Weights as GPT-2 starts its training, always the same ones."""
    generator = torch.Generator().manual_seed(0)
    state = {}
    for name, shape in shapes.items():
        if name.endswith("bias"):
            tensor = torch.zeros(shape)
        elif "ln_" in name:
            tensor = torch.ones(shape)
        elif name != "lm_head.weight":
            tensor = torch.empty(shape).normal_(0, 0.02, generator=generator)
        state[name] = state["wte.weight"] if name == "lm_head.weight" else empty_weight(shape, dtype, device).copy_(tensor)
    return state


def parse_dtype(dtype: torch.dtype | str, device: torch.device | str) -> torch.dtype:
    """A torch dtype or its name -> the dtype. Raises UserError for one that the device can't run, or no such device."""
    try:
        known = CPU_DTYPES if torch.empty(0, device=device).is_cpu else DTYPES
    except (RuntimeError, AssertionError) as err:
        raise UserError(f"device {device!r} can't be used: {first_line(err)}") from None
    found = known.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise UserError(f"dtype must be one of {', '.join(known)}")
    return found


class Source(NamedTuple):
    """A model that was found: its name, its config, and the function (shapes, dtype, device) -> state dict that reads
    its weights, see `read_weights`."""

    name: str
    config: GPT2Config
    read: Callable[..., dict[str, torch.Tensor]]


def find_model(name: str, stand_in: str) -> Source:
    """What engine.load_model calls `name` -> where its weights are, before any is read. Raises UserError."""
    if name == "auto":
        name = gpt2_or(stand_in)
    kind, _, shape = name.partition(":")
    if kind == "random":
        if shape and shape not in SHAPES:
            raise UserError(f"random:{shape} is not a shape; there are {', '.join(SHAPES)}")
        return Source(name, GPT2Config(**SHAPES[shape or "gpt2"]), random_weights)
    folder = model_folder(name)
    config = read_config(folder)
    return Source(name, config, functools.partial(read_weights, folder, tied=config.tie_word_embeddings))
