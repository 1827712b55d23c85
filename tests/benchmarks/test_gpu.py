"""`benchmarks.gpu` runs on a CPU, leaves out what there is no time for, and its model has the real one's size."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import LARGEST, SHARES, TINY, VARIANTS, Findings, main
from benchmarks.gpu_faults import FAULTS, Fault, put_back
from benchmarks.gpu_model import QWEN3_VL_2B, SMALL, make_shaped
from benchmarks.gpu_parts import Figures, Setting, bytes_of_step, steps
from benchmarks.mutations import ROOT
from benchmarks.ours import Ours, share
from benchmarks.timing import Budget, StepTimes
from fovea.models.modules import language_model
from fovea_tools.probe.rates import Rates


def test_every_part_runs_in_small(tmp_path: Path) -> None:
    main(["--tiny", "--json", str(tmp_path / "gpu.json")])
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert [row["verdict"] for row in found["parity"]] == ["ok"] * len(VARIANTS)
    assert [row["sequences"] for row in found["decoding"]] == [4, 8]
    assert [row["case"] for row in found["steps"]] == ["2x2, 6 tokens", "4x2, 6 tokens"]
    assert all(0 < row["MFU"] < 1 for row in found["steps"])


def test_a_micro_batch_holds_whole_groups() -> None:
    """Else a group is split, and every part of it computes the prompt again."""
    prompt_tokens = (LARGEST.image_side_px // 32) ** 2 + 128
    assert 2 * (prompt_tokens + LARGEST.samples * LARGEST.completion_tokens) < LARGEST.microbatch_tokens
    assert LARGEST.gradient_checkpointing == "none", "an MFU is that of no recomputation"


def test_an_update_for_which_memory_is_too_small_recomputes(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = Ours.step
    failures = [torch.OutOfMemoryError("CUDA out of memory")]

    def step(ours: Ours) -> StepTimes:
        if failures:
            raise failures.pop()
        return taken(ours)

    monkeypatch.setattr(Ours, "step", step)
    parts = make_shaped(SMALL, "cpu", torch.float32)
    rates = Rates(gemm=1e12, attention=1e12, read=1e11, copy=1e11)
    setting = Setting(device="cpu", dtype=torch.float32, shape=SMALL, case=TINY, rates=rates, peak=1e12)
    cases = [replace(TINY, prompts=2), replace(TINY, prompts=2, samples=3)]
    rows = list(steps(setting, share(TINY, parts), cases, 1, Budget(600).part(1.0)))
    assert [row["recomputed"] for row in rows] == ["selective", "selective"]
    assert all(hasattr(layer, "recompute") for layer in language_model(parts.network).layers)


def test_without_time_nothing_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    main(["--tiny", "--seconds", "0", "--json", str(tmp_path / "gpu.json")])
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["parity"] == found["decoding"] == found["steps"] == []
    printed = capsys.readouterr().out
    assert "skipped: parity of torch.float32, eager" in printed
    assert "skipped: decoding 4 sequences (would take about" in printed
    assert "skipped: our step of 4x2, 6 tokens" in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_it_says_so() -> None:
    with pytest.raises(SystemExit, match=r"--tiny\b"):
        main([])


def test_a_part_leaves_the_time_that_it_did_not_use_to_the_next() -> None:
    now = 0.0
    budget = Budget(100.0, clock=lambda: now)
    assert budget.part(0.3).seconds_left == 30.0
    now = 10.0
    second = budget.part(0.5)
    assert second.seconds_left == 70.0
    assert second.allows("x", 70.0)
    assert not second.allows("x", 70.1)
    assert sum(SHARES.values()) == pytest.approx(1.0)


def test_a_part_that_took_too_long_leaves_the_next_its_share() -> None:
    now = 0.0
    budget = Budget(100.0, clock=lambda: now)
    budget.part(0.1)
    now = 60.0
    assert budget.part(0.2).seconds_left == 20.0
    assert budget.part(0.7).seconds_left == 40.0, "no part goes beyond the end of the program"


def test_rows_are_saved_as_they_come(tmp_path: Path) -> None:
    path = tmp_path / "found.json"

    def rows() -> Iterator[Figures]:
        yield {"x": 1.0}
        assert json.loads(path.read_text())["first"] == [{"x": 1.0}]
        yield {"x": 2.0}

    findings = Findings({"device": "cpu"}, str(path))
    findings.part("first", "First", rows())
    assert findings.failed == []


def test_keys_of_a_shared_prompt_are_read_by_each_of_its_rows() -> None:
    shared = share(TINY, make_shaped(SMALL, "cpu", torch.float32))
    prompts = Ours(TINY, 1, shared).prompts(2)
    once, of_rows = (bytes_of_step(shared, prompts, 8, 0, reads=reads) for reads in (1, 8))
    text = SMALL["text"]
    per_token = 2 * 4 * text["num_hidden_layers"] * text["num_key_value_heads"] * text["head_dim"]  # type: ignore[operator]
    assert of_rows - once == 7 * per_token * sum(prompt.num_tokens for prompt in prompts)


def test_a_part_that_fails_keeps_its_rows_and_those_after_it_run(tmp_path: Path) -> None:
    def fails() -> Iterator[Figures]:
        yield {"x": 1.0}
        raise RuntimeError

    findings = Findings({"device": "cpu"}, str(tmp_path / "found.json"))
    findings.part("first", "First", fails())
    findings.part("second", "Second", iter([{"y": 2.0}]))
    assert findings.failed == ["first"]
    saved = json.loads((tmp_path / "found.json").read_text())
    assert saved == {"device": "cpu", "first": [{"x": 1.0}], "second": [{"y": 2.0}]}


def test_the_large_model_has_the_size_of_the_real_one() -> None:
    parts = make_shaped(QWEN3_VL_2B, "meta", torch.bfloat16)
    assert sum(parameter.numel() for parameter in parts.network.parameters()) == 2_127_532_032
    assert {parameter.dtype for parameter in parts.network.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in parts.network.buffers()} == {torch.float32}, "rotary frequencies stay exact"
    assert len(parts.processor.tokenizer) == 151_936
    assert len(parts.processor.banned_ids) == 7, "the special tokens but the end of a turn"


def test_every_fault_has_its_place_and_its_test() -> None:
    for fault in FAULTS:
        assert (ROOT / fault.file).read_text(encoding="utf-8").count(fault.before) == 1, fault.name
        file, _, test = fault.tests.partition("::")
        assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8") or not test, fault.tests


def test_a_fault_is_in_the_copy_within_the_block_only(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("a = 1\n")
    fault = Fault(name="", file="code.py", before="1", after="2", tests="")
    with put_back(tmp_path, fault):
        assert (tmp_path / "code.py").read_text() == "a = 2\n"
    assert (tmp_path / "code.py").read_text() == "a = 1\n"
    (tmp_path / "code.py").write_text("a = b = 1, 1\n")
    with (
        pytest.raises(ValueError, match=r"code\.py contains this 2 times instead of once: 1"),
        put_back(tmp_path, fault),
    ):
        pass
