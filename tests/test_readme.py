"""README can't rot: its excerpts stand in the source, its examples run, and what its map names is there."""

import ast
import contextlib
import importlib
import io
import re
import textwrap
from pathlib import Path

import pytest

import benchmarks
import demo
import engine

ROOT = Path(engine.__file__).parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"(?:<!-- (?P<mark>[^\n]*) -->\n)?```python\n(?P<code>.*?)```", re.DOTALL)
BLOCKS = [(match["mark"], match["code"]) for match in BLOCK.finditer(README)]
EXCERPTS = [(mark, code) for mark, code in BLOCKS if mark and mark.partition(" ")[0].endswith(".py")]


def source_of(mark):
    """The lines of the class or function that a mark, `FILE NAME`, names."""
    file, name = mark.split(" ")
    text = (ROOT / file).read_text(encoding="utf-8")
    node = ast.parse(text)
    for part in name.split("."):
        node = next(child for child in ast.walk(node) if getattr(child, "name", None) == part)
    return text.splitlines()[node.lineno - 1:node.end_lineno]


def stands_in(code, source):
    """Whether the lines of an excerpt stand in the source, one after another; `...` stands for lines left out."""
    source = [line.strip() for line in source]
    at = 0
    for part in re.split(r"^ *\.\.\.\n", textwrap.dedent(code), flags=re.MULTILINE):
        lines = [line.strip() for line in part.splitlines()]
        found = [n for n in range(at, len(source)) if source[n:n + len(lines)] == lines]
        if not found:
            return False
        at = found[0] + len(lines)
    return True


def test_every_block_says_what_it_is():
    marks = {mark for mark, _ in BLOCKS} - {mark for mark, _ in EXCERPTS}
    assert marks == {"runs", "needs a server"} and len(EXCERPTS) >= 8


@pytest.mark.parametrize("mark, code", EXCERPTS, ids=[mark for mark, _ in EXCERPTS])
def test_excerpts_stand_in_the_source(mark, code):
    assert stands_in(code, source_of(mark))


def test_an_excerpt_that_rots_is_found():
    source = ["def f(x):", "    y = x", "    z = y", "    return z"]
    assert stands_in("y = x\nz = y\n", source) and stands_in("y = x\n...\nreturn z\n", source)
    for rotten in ("y = 2 * x\nz = y\n", "z = y\ny = x\n", "y = x\nreturn z\n", "return z\n...\ny = x\n"):
        assert not stands_in(rotten, source)


def test_examples_run():
    names = {}
    for mark, code in BLOCKS:
        if mark == "needs a server":
            compile(code, "README.md", "exec")
        if mark == "runs":
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(code, names)
    assert printed.getvalue().strip() in ("stop", "length")


def rows_of_the_map():
    table = README[README.index("| idea | file |"):README.index("Each file imports only")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]


def test_the_map_names_what_is_there():
    pytest.importorskip("triton")
    assert len(rows_of_the_map()) >= 15
    for _, file, names, _, _ in rows_of_the_map():
        module = importlib.import_module(file.strip("`").removesuffix(".py"))
        for name in re.findall(r"`(\w+)`", names):
            assert hasattr(module, name), f"{file} has no {name}"
            assert getattr(getattr(module, name), "__module__", module.__name__) == module.__name__


def test_commands_name_benchmarks_and_flags_that_there_are():
    benchmarks_cuda = pytest.importorskip("benchmarks_cuda")
    known = {"engine.py": (benchmarks.BENCHMARKS, engine.parse_args),
             "engine_cuda.py": (benchmarks_cuda.BENCHMARKS, benchmarks_cuda.parse_args),
             "demo.py": ({}, demo.parse_args)}
    commands = re.findall(r"python (engine\.py|engine_cuda\.py|demo\.py)([^`\n#|]*)", README)
    assert len(commands) > 15
    for script, arguments in commands:
        names, parse = known[script]
        for name in re.findall(r"--only (\S+)", arguments):
            assert name in names
        with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.raises(SystemExit):
            parse(["--help"])
        for flag in re.findall(r"--[a-z][a-z-]*", arguments):
            assert f"{flag} " in printed.getvalue() or f"{flag}," in printed.getvalue() or flag == "--help"


def test_links_and_pictures_are_there():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert len(links) >= 6
    for link in links:
        assert (ROOT / link).is_file(), link
