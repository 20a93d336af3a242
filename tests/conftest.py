"""What the tests share: the repository on the path, small GPT-2 folders made by transformers, a running server."""

import contextlib
import http.client
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # as engine.py would, were it loaded before torch
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # engine_cuda's kernels run on the CPU; read when triton is imported
import transformers

import demo
import engine

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
torch.set_num_threads(2)
ENC = engine.load_tokenizer()
PROMPT = "The old lighthouse keeper counted the ships each evening."
IDS = ENC.encode_ordinary(PROMPT)
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


@pytest.fixture(autouse=True)
def seeded():
    """The same random numbers whichever tests run before."""
    torch.manual_seed(0)


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


def with_pages(model, **options):
    """The same weights over a page pool of its own."""
    return engine.share_weights(model, engine.GPT2Paged, **options)


class Running:
    """A server on a free port, over a scheduler of its own."""

    def __init__(self, model, max_batch_size=4, max_waiting=1024, **options):
        self.scheduler = engine.ContinuousBatchingScheduler(model, max_batch_size, max_waiting)
        self.app = demo.create_app(self.scheduler, ENC, **options)
        self.server = demo.Server(demo.listen("127.0.0.1", 0), self.app)
        self.port = self.server.port
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def __enter__(self):
        self.scheduler.start()
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.thread.join()
        self.scheduler.stop()

    def connect(self):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)

    def call(self, path, body=None, method=None, headers=None, raw=None):
        """-> (status, headers, body as JSON where it is)."""
        connection = self.connect()
        headers = ({} if body is None and raw is None else {"Content-Type": "application/json"}) | (headers or {})
        data = raw if raw is not None else None if body is None else json.dumps(body)
        connection.request(method or ("GET" if data is None else "POST"), path, data, headers)
        with contextlib.closing(connection):
            response = connection.getresponse()
            data = response.read()
            is_json = response.headers["Content-Type"] == "application/json"
            return response.status, response.headers, json.loads(data) if is_json else data

    def complete(self, **body):
        status, _, answer = self.call("/v1/completions", {"prompt": IDS, "temperature": 0} | body)
        assert status == 200, answer
        return answer

    def events(self, path="/v1/completions", **body):
        """The data of each event of a stream, as JSON; every byte of it must be UTF-8 in the form of SSE."""
        status, headers, data = self.call(path, body)
        assert (status, headers["Content-Type"]) == (200, "text/event-stream; charset=utf-8"), data
        out = []
        for event in data.decode().removesuffix("\n\n").split("\n\n"):
            fields = dict(line.split(": ", 1) for line in event.split("\n"))
            assert set(fields) <= {"", "event", "data"}
            if "data" in fields:
                out.append(fields["data"] if fields["data"] == "[DONE]" else
                           {"event": fields.get("event")} | json.loads(fields["data"]))
        return out

    def open_socket(self, body, path="/v1/completions"):
        """A raw connection that has sent its request, and holds little that it does not read."""
        connection, data = socket.socket(), json.dumps(body).encode()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", self.port))
        connection.sendall(b"POST %s HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
                           % (path.encode(), len(data), data))
        return connection

    def idle(self, seconds=2.0):
        """Whether nothing runs, waits or holds a page before the time is over."""
        busy = "running", "waiting", "pages_used"
        return wait_until(lambda: not any(map(self.scheduler.stats().get, busy)), seconds)


def wait_until(condition, seconds=2.0):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True
