"""How the project is cut: flat modules that import downwards only, one copy of each, and one name that offers all."""

import ast
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import engine

ROOT = Path(engine.__file__).parent
# From the lowest to the highest: each imports only what stands before it.
ORDER = ["errors", "tokenizer", "checkpoint", "sampling", "scheduler", "instructions", "engine", "engine_cpu",
         "quantization", "tuning", "engine_cuda", "budget", "benchmarks", "benchmarks_cuda", "demo"]


def imported_at_the_top(module):
    """The project's modules that a module imports when it is imported itself, not when something is called."""
    names = set()
    for node in ast.parse((ROOT / f"{module}.py").read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
    return names & set(ORDER)


def test_modules_import_downwards():
    assert set(ORDER) == {path.stem for path in ROOT.glob("*.py")}
    for n, module in enumerate(ORDER):
        assert imported_at_the_top(module) <= set(ORDER[:n]), module


def test_the_model_the_scheduler_and_the_server_hold_no_word_of_kernels():
    for module in ("scheduler", "engine", "demo"):
        nodes = list(ast.walk(ast.parse((ROOT / f"{module}.py").read_text())))
        names = {getattr(node, "id", getattr(node, "attr", getattr(node, "name", None))) or "" for node in nodes}
        assert len(names) > 100
        assert not {name for name in names if any(word in name.lower() for word in ("kernel", "numba", "triton"))}


def test_every_public_name_is_found_in_engine():
    for module in (*ORDER[:10], "budget", "benchmarks"):
        for node in ast.parse((ROOT / f"{module}.py").read_text()).body:
            name = getattr(node, "name", "_")
            if not name.startswith("_"):
                assert getattr(engine, name).__module__ == module
    assert all(hasattr(engine, name) for name in engine.__all__)
    with pytest.raises(AttributeError, match="module 'engine' has no attribute 'nonsense'"):
        engine.nonsense  # noqa: B018


@pytest.mark.parametrize("script", ["engine", "engine_cuda"])
def test_a_script_runs_the_module_that_others_import(script, monkeypatch):
    """Not a second copy under the name __main__: two copies of a class are two classes."""
    if script == "engine_cuda":
        pytest.importorskip("triton")
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / f"{script}.py"), run_name="__main__")
    mains = [entry.frame.f_globals["__name__"] for entry in ended.traceback if entry.name == "main"]
    assert mains[0] == script and "__main__" not in mains


WATCH = """
import os, sys

class Watch:
    def find_spec(self, name, *rest):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"))

sys.meta_path.insert(0, Watch())
import {module}
"""


@pytest.mark.parametrize("module", ["engine", "demo"])
def test_how_long_threads_spin_is_said_before_torch_is_loaded(module):
    env = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    done = subprocess.run([sys.executable, "-c", WATCH.format(module=module)], capture_output=True, text=True, cwd=ROOT,
                          env=env)
    assert done.stdout.split() == ["20000"], done.stderr
