"""Text to token ids and back: GPT-2's byte-pair encoding, and text that ends before a stop string."""

import base64
import codecs
import functools

from errors import ASSETS


@functools.cache
def load_tokenizer():
    """GPT-2's byte-pair encoding as a tiktoken.Encoding; nothing is downloaded.

    Use `encode_ordinary`: text from a user is plain text, `<|endoftext|>` in it is seven ordinary tokens.
    """
    import tiktoken

    lines = (ASSETS / "gpt2.tiktoken").read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}
    pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    return tiktoken.Encoding("gpt2", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 50256})


class TextStream:
    """Turns token ids into text as they come, and ends it before a stop string.

    Bytes are held until they make whole characters, and text while it might still become a stop string. The
    pieces put together depend on the ids alone. The match that is complete first ends the text; `stopped` says so.
    """

    def __init__(self, stop=(), min_tokens=0):
        self.stop, self.to_ignore, self.held, self.stopped = stop, min_tokens, "", False
        self.encoding, self.decoder = load_tokenizer(), codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token):
        """The text that one more token makes certain."""
        if token == self.encoding.eot_token:
            data = b""  # a mark, not text
        elif token < self.encoding.n_vocab:
            data = self.encoding.decode_single_token_bytes(token)
        else:
            data = "\ufffd".encode()  # a larger vocabulary than the tokenizer's
        self.to_ignore -= 1
        return self._certain(self.decoder.decode(data), self.stop if self.to_ignore <= 0 else ())

    def finish(self):
        """What was held back, when no more tokens come."""
        return "" if self.stopped else self._certain(self.decoder.decode(b"", final=True), self.stop, last=True)

    def _certain(self, text, stop, last=False):
        text = self.held + text
        matches = [(at + len(s), at) for s in stop if (at := text.find(s)) >= 0]
        if matches:
            self.stopped, self.held = True, ""
            return text[:min(matches)[1]]
        hold = 0
        if not last and stop:
            longest = min(len(text), max(map(len, stop)) - 1)
            hold = next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in stop)), 0)
        self.held = text[len(text) - hold:]
        return text[:len(text) - hold]


def stream_text(tokens, stop=(), min_tokens=0):
    """Yields the text of token ids as they come; see TextStream."""
    stream = TextStream(stop, min_tokens)
    for token in tokens:
        yield stream.feed(token)
        if stream.stopped:
            return
    yield stream.finish()
