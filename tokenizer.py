"""Text to token ids and back: GPT-2's byte-pair encoding, and text that ends before a stop string."""

from __future__ import annotations

import base64
import codecs
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from errors import ASSETS

if TYPE_CHECKING:
    import tiktoken


@functools.cache
def load_tokenizer() -> tiktoken.Encoding:
    """GPT-2's byte-pair encoding as a tiktoken.Encoding; nothing is downloaded.

    Use `encode_ordinary`: text from a user is plain text, `<|endoftext|>` in it is seven ordinary tokens.
    """
    import tiktoken

    # A line of the file is a token's bytes in base64, and its rank: the order in which pairs are merged, and the id.
    lines = (ASSETS / "gpt2.tiktoken").read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}
    # How text is cut into words before any pair is merged; OpenAI's pattern.
    pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    return tiktoken.Encoding("gpt2", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 50256})


def token_name(token: int) -> str:
    """A token as text for people to read. Bytes that are no whole characters are written as OpenAI's API does,
    `bytes:\\xe2\\x80`; an id beyond the tokenizer's, which a larger vocabulary has, as `<|50300|>`."""
    encoding = load_tokenizer()
    if token >= encoding.n_vocab:
        return f"<|{token}|>"
    data = encoding.decode_single_token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _longest_start(text: str, strings: Sequence[str]) -> int:
    """How many characters at the end of `text` are the beginning of one of the strings, which is not complete yet."""
    # A whole stop string would have been found: at least its last character is still to come.
    longest = min(len(text), max(map(len, strings), default=1) - 1)
    for n in range(longest, 0, -1):
        if any(string.startswith(text[-n:]) for string in strings):
            return n
    return 0


class TextStream:
    """Turns token ids into text as they come, and ends the text before a stop string.

    What `feed` returns is certain: it is never taken back. So two things are held back. Bytes are, until they make
    whole characters: an emoji may be spelled by three tokens. And the end of the text is, while it is the beginning
    of a stop string: with stop "day off", the text " a day" is given out as " a " until the next token decides about
    "day". The pieces put together depend on the ids alone, not on how they were fed.

    stop: strings that end the text; where several occur, the one that is complete first does. min_tokens: no stop
    string is looked for before so many tokens. `stopped` says whether one was found. `decoded` is the number of
    characters decoded so far, those held back counted in: where the next token's text begins.
    """

    def __init__(self, stop: Sequence[str] = (), min_tokens: int = 0):
        self.stop = stop
        self.stopped = False
        self.decoded = 0
        self.held = ""                                               # decoded, but perhaps the start of a stop string
        self.encoding = load_tokenizer()
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")  # keeps the bytes of a character to come
        self.tokens_before_stop = min_tokens

    def feed(self, token: int) -> str:
        """The text that one more token makes certain."""
        if token == self.encoding.eot_token:
            data = b""  # a mark, not text
        elif token < self.encoding.n_vocab:
            data = self.encoding.decode_single_token_bytes(token)
        else:
            data = "\ufffd".encode()  # a larger vocabulary than the tokenizer's
        # Until min_tokens nothing is held back for a stop string, so one that begins before is never found.
        self.tokens_before_stop -= 1
        return self._certain(self.decoder.decode(data), self.stop if self.tokens_before_stop <= 0 else ())

    def finish(self) -> str:
        """What was held back, when no more tokens come."""
        if self.stopped:
            return ""
        return self._certain(self.decoder.decode(b"", final=True), self.stop, is_last=True)

    def _certain(self, text, stop, is_last=False):
        """What may be given out of the text held back and this one after it; the rest is held back from now on."""
        self.decoded += len(text)
        text = self.held + text
        # (where it ends, where it starts) of each stop string's first occurrence
        matches = [(at + len(string), at) for string in stop if (at := text.find(string)) >= 0]
        if matches:
            _, start = min(matches)                                  # the match that ends first
            self.stopped = True
            self.held = ""
            return text[:start]
        certain = len(text) if is_last else len(text) - _longest_start(text, stop)
        self.held = text[certain:]
        return text[:certain]


def stream_text(tokens: Iterable[int], stop: Sequence[str] = (), min_tokens: int = 0) -> Iterator[str]:
    """Yields the text of token ids as they come; see TextStream."""
    stream = TextStream(stop, min_tokens)
    for token in tokens:
        yield stream.feed(token)
        if stream.stopped:
            return
    yield stream.finish()
