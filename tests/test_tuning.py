"""What is chosen by measuring: kept, found again, measured anew where the record is broken; no text depends on it."""

import json

import pytest
import torch

import engine
import engine_cpu
import tuning
from engine_cpu import Choice

pytestmark = pytest.mark.skipif(engine_cpu.cpu_kernels() is None, reason="needs numba")


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A record of its own, and models of any size measured."""
    monkeypatch.setattr(tuning, "KEPT", tmp_path / "folder" / "tuning.json")
    monkeypatch.setattr(tuning, "SMALLEST", 0)
    return tuning.KEPT


def costs_of(monkeypatch, **best):
    """A measurement that finds these values the cheapest. -> the list of its calls."""
    calls = []

    def measure(linears, seconds):
        calls.append(seconds)
        for name, (_, values) in tuning.PARAMETERS.items():
            yield name, {value: 1.0 + (value != best[name]) for value in values}

    monkeypatch.setattr(tuning, "measure", measure)
    return calls


def test_what_was_measured_is_kept_and_used(kept, monkeypatch):
    calls = costs_of(monkeypatch, ahead=2048, shares=False)
    model = engine.load_model("tiny")
    assert len(calls) == 1
    for linear in tuning.linears_of(model):
        assert linear.choice == Choice(2048, False)
        assert linear.product[-1] == (2048, False)
    costs_of(monkeypatch, ahead=0, shares=True)
    assert engine.load_model("tiny").h[0].attn.c_attn.choice == Choice(2048, False)       # found, not measured again
    assert engine.load_model("tiny", dtype="bfloat16").h[0].attn.c_attn.choice == Choice(0, True)    # another dtype
    assert len(json.loads(kept.read_text())) == 2


@pytest.mark.parametrize("record", ["", "{", "[]", "nonsense", '{"KEY": 3}', '{"KEY": {}}',
                                    '{"KEY": {"ahead": 7, "shares": true}}', '{"KEY": {"ahead": 0, "shares": 1}}',
                                    '{"KEY": {"ahead": "0", "shares": true}}',
                                    '{"KEY": {"ahead": true, "shares": true}}',
                                    '{"another machine": {"ahead": 512, "shares": true}}'])
def test_a_broken_or_foreign_record_is_measured_again(record, kept, tiny, monkeypatch):
    key = tuning.key_of(tiny, tuning.linears_of(tiny))
    kept.parent.mkdir()
    kept.write_text(record.replace("KEY", key))
    calls = costs_of(monkeypatch, ahead=512, shares=True)
    assert engine.load_model("tiny").h[0].attn.c_attn.choice == Choice(512, True)
    assert len(calls) == 1
    assert json.loads(kept.read_text())[key] == {"ahead": 512, "shares": True}


def test_a_folder_that_cannot_be_written_is_no_error(kept, monkeypatch):
    kept.parent.write_text("a file where the folder should be")
    costs_of(monkeypatch, ahead=512, shares=True)
    assert engine.load_model("tiny").h[0].attn.c_attn.choice == Choice(512, True)


def test_small_models_are_not_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "KEPT", tmp_path / "tuning.json")
    calls = costs_of(monkeypatch, ahead=512, shares=True)
    engine.load_model("tiny")
    assert not calls and not tuning.KEPT.exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_no_result_depends_on_the_choice(dtype):
    model = engine.load_model("tiny", dtype=dtype)
    for rows in (1, 3, 8, 21):
        ids = torch.arange(100, 100 + rows)[None]
        found = []
        for ahead in tuning.PARAMETERS["ahead"][1]:
            for shares in tuning.PARAMETERS["shares"][1]:
                for linear in tuning.linears_of(model):
                    linear.choice = Choice(ahead, shares)
                engine_cpu.pack(model)
                found.append(model(ids, model.new_kv()))
        assert all(torch.equal(logits, found[0]) for logits in found)


def test_each_value_is_measured_within_the_time(tiny):
    linears = tuning.linears_of(tiny)
    costs = dict(tuning.measure(linears, 0.2))
    assert {name: tuple(found) for name, found in costs.items()} == {n: v for n, (_, v) in tuning.PARAMETERS.items()}
    assert all(cost > 0 for found in costs.values() for cost in found.values())


def test_tune_says_what_each_choice_costs(kept, tiny, monkeypatch, capsys):
    costs_of(monkeypatch, ahead=2048, shares=True)
    engine.main(["--tune", "--model", "tiny"])
    said = capsys.readouterr().out
    assert [line.split()[2] for line in said.splitlines() if "chosen" in line] == ["2048", "True"]
    assert "100%" in said
    key = tuning.key_of(tiny, tuning.linears_of(tiny))
    assert key in said and json.loads(kept.read_text())[key] == {"ahead": 2048, "shares": True}


def test_tune_without_kernels_is_one_line(monkeypatch):
    monkeypatch.setattr(engine_cpu, "cpu_kernels", lambda: None)
    with pytest.raises(SystemExit, match=r"^engine.py: --tune needs the CPU kernels, .*$"):
        engine.main(["--tune", "--model", "tiny"])
