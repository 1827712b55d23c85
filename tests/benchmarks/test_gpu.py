"""`benchmarks.gpu` on a CPU, the script of a first visit to a GPU, and the figures of the benchmarks by hand."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.cases import CASES, MID, Reused, endless, make_parts
from benchmarks.floors import MachineRates, Part, floor_seconds, parts_of, sizes_of
from benchmarks.gpu import LARGEST, SHARES, TINY, VARIANTS, Findings, _parse, main
from benchmarks.gpu_count import SHAPES, bytes_read
from benchmarks.gpu_faults import FAULTS, Fault, put_back
from benchmarks.gpu_model import QWEN3_VL_2B, SMALL, make_shaped
from benchmarks.gpu_parts import Figures, Setting, bytes_of_step, steps
from benchmarks.ours import Ours, share
from benchmarks.overlap import figures
from benchmarks.scaling import SAMPLES, TOKENS, message
from benchmarks.timing import Budget, Speedup, StepTimes, shown_ratio, with_plain_share
from fovea.config.loading import load_config
from fovea.config.recipes import shipped_recipe
from fovea.models.flops import FORWARD, Passes, training_passes
from fovea.models.modules import language_model
from fovea_tools.probe.rates import Rates
from gym_tests.tables import table
from tests.runs import ROOT, run_program


def test_every_part_runs_in_small(tmp_path: Path) -> None:
    main(["--tiny", "--json", str(tmp_path / "gpu.json")])
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert [row["verdict"] for row in found["parity"]] == ["ok"] * len(VARIANTS)
    assert [row["sequences"] for row in found["decoding"]] == [4, 8]
    assert [row["case"] for row in found["steps"]] == ["2x2, 6 tokens", "4x2, 6 tokens"]
    assert all(0 < row["MFU"] < 1 for row in found["steps"])


@table(("reused", "outputs", "images"), [("all", 1, True), ("images", 0, True), ("nothing", 0, False)])
def test_a_case_reuses_of_a_rollout_what_it_says(reused: Reused, outputs: float, images: bool) -> None:
    """For `benchmarks.vs_trl --reused`: outputs of linear layers and graphs of images, these graphs, or nothing."""
    model = MID.model_copy(update={"num_layers": 1})
    case = replace(CASES["mid"], model=model, vocabulary=None, prompts=1, samples=2, completion_tokens=2, reused=reused)
    ours = Ours(case, 3, share(case, make_parts(case)))
    ours.step()  # the first update of a run reuses nothing
    metrics = ours.shared.policy.update(ours.draw())
    assert (metrics["reused_frac"], metrics["reused_images"] > 0) == (outputs, images)


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
    for part in (
        "parity of torch.float32, eager",
        "decoding 4 sequences (would take about",
        "our step of 4x2, 6 tokens",
    ):
        assert f"skipped: {part}" in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_it_says_so() -> None:
    with pytest.raises(SystemExit, match=r"--tiny\b"):
        main([])


def test_a_part_leaves_the_time_that_it_did_not_use_to_the_next_or_what_is_left_of_its_share() -> None:
    now = 0.0
    budget = Budget(100.0, clock=lambda: now)
    assert budget.part(0.3).seconds_left == 30.0
    now = 10.0
    second = budget.part(0.5)
    assert second.seconds_left == 70.0
    assert [second.allows("x", seconds) for seconds in (70.0, 70.1)] == [True, False]
    assert sum(SHARES.values()) == pytest.approx(1.0)
    now = 0.0
    budget = Budget(100.0, clock=lambda: now)
    budget.part(0.1)
    now = 60.0
    assert budget.part(0.2).seconds_left == 20.0
    assert budget.part(0.7).seconds_left == 40.0, "no part goes beyond the end of the program"


def test_keys_of_a_shared_prompt_are_read_by_each_of_its_rows() -> None:
    shared = share(TINY, make_shaped(SMALL, "cpu", torch.float32))
    prompts = Ours(TINY, 1, shared).prompts(2)
    once, of_rows = (bytes_of_step(shared, prompts, 8, 0, reads=reads) for reads in (1, 8))
    text = SMALL["text"]
    per_token = 2 * 4 * text["num_hidden_layers"] * text["num_key_value_heads"] * text["head_dim"]  # type: ignore[operator]
    assert of_rows - once == 7 * per_token * sum(prompt.num_tokens for prompt in prompts)


def test_a_decode_step_reads_the_full_pages_of_a_prompt_once_for_eight_rows(capsys: pytest.CaptureFixture[str]) -> None:
    """By hand for Qwen3-VL-2B: 114,688 bytes a token; of 612 tokens a row reads 260 by itself, and 8 rows 352."""
    of_token = 2 * 2 * 28 * 8 * 128
    assert bytes_read(SHAPES[0], 8) == (512 * 612 * of_token, (512 * 260 + 64 * 352) * of_token)
    assert bytes_read(SHAPES[0], 1) == (512 * 612 * of_token,) * 2
    assert [bytes_read(SHAPES[1], samples)[1] for samples in (8, 16)] == [bytes_read(SHAPES[1], 8)[1]] * 2
    main(["--count"])
    assert re.search(r"2B +│ +8 │ +35\.9 │ +17\.9 │ +0\.50", capsys.readouterr().out)


def test_rows_are_saved_as_they_come_and_a_part_that_fails_ends_no_other(tmp_path: Path) -> None:
    path = tmp_path / "found.json"

    def fails() -> Iterator[Figures]:
        yield {"x": 1.0}
        assert json.loads(path.read_text())["first"] == [{"x": 1.0}]
        yield {"x": 2.0}
        raise RuntimeError

    findings = Findings({"device": "cpu"}, str(path))
    findings.part("first", "First", fails())
    findings.part("second", "Second", iter([{"y": 2.0}]))
    assert findings.failed == ["first"]
    saved = json.loads(path.read_text())
    assert saved == {"device": "cpu", "first": [{"x": 1.0}, {"x": 2.0}], "second": [{"y": 2.0}]}


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
    twice = r"code\.py contains this 2 times instead of once: 1"
    with pytest.raises(ValueError, match=twice), put_back(tmp_path, fault):
        pass


TEXT = (ROOT / "benchmarks/first_visit.sh").read_text(encoding="utf-8").replace("\\\n", " ")
LIMITS = [int(limit) for limit in re.findall(r"^part \d-\w+ (\d+) ", TEXT, re.MULTILINE)]
PARTS = {x.split()[1]: shlex.split(x)[2:] for x in TEXT.splitlines() if re.match(r'part \d-\w+ \d+ "\$py"', x)}


def test_the_first_visit_is_a_script_of_580_seconds_at_most_whose_run_starts() -> None:
    assert run_program(["bash", "-n", "benchmarks/first_visit.sh"]).returncode == 0
    (grace,) = re.findall(r"timeout -k (\d+)", TEXT)
    assert len(LIMITS) == len(PARTS) + 1 == 5
    assert sum(LIMITS) + len(LIMITS) * int(grace) <= 580
    recipe, *settings = PARTS["3-train"][5:]
    config = load_config([shipped_recipe(recipe)], [word for word in settings if "$" not in word])
    assert (bool(config.profile), config.max_steps) == (True, 8)


def test_each_part_names_what_is_there() -> None:
    assert all(find_spec(words[3]) is not None for words in PARTS.values())
    files = [word for words in PARTS.values() for word in words if word.endswith(".py")]
    assert files
    assert [file for file in files if "pytest.mark.gpu" not in (ROOT / file).read_text(encoding="utf-8")] == []
    options = re.findall(r"bench=\((.*?)\)", TEXT)
    assert [_parse(each.split()).seconds < LIMITS[2] for each in options] == [True, True]


def test_the_gym_and_the_tools_are_found_without_an_installation(tmp_path: Path) -> None:
    (script,) = re.findall(r"<<'END' \|\| exit 1\n(.*?)\nEND", TEXT, re.DOTALL)
    assert run_program([sys.executable, "-c", script, tmp_path]).returncode == 0
    found = distributions(path=[str(tmp_path)])
    installed = {each.name: {(point.group, point.name) for point in each.entry_points} for each in found}
    assert ("fovea.environments", "frozen_lake") in installed["fovea-rl-gym"]
    assert installed["fovea-rl-tools"] >= {("fovea.doctor", "gpu"), ("fovea.commands", "plan")}


def test_a_message_has_thirteen_bytes_a_token_and_four_more_with_advantages() -> None:
    found = message(4, 2)
    assert found["message"] * 2**20 == pytest.approx(4 * SAMPLES * TOKENS * 17, rel=0.05)
    assert found["images"] == 4 * 1.5


def test_each_side_waits_for_the_other_where_they_take_turns() -> None:
    row = {"seconds/step": 1.0, "seconds/rollout": 0.5, "seconds/update": 0.3, "seconds/weight_sync": 0.1}
    idle = ("policy idle", "engine idle", "staleness")
    assert [figures([row])[name] for name in idle] == pytest.approx([0.5, 0.4, 0])
    # where they overlap, the waiting is measured and the median taken
    measured = {"seconds/rollout": 0.9, "seconds/update": 0.7, "staleness/mean": 1}
    waits = [{"seconds/idle_update": x, "seconds/idle_rollout": x / 2} for x in (0.1, 0.2, 9.0)]
    found = figures([row | measured | each for each in waits])
    assert [found[name] for name in idle] == [0.2, 0.1, 1]


@table(
    ("ratio", "spreads", "shown"),
    [(4.74, (0.1, 0.2), "4.7x"), (4.74, (0.1, 0.21), "5x"), (12.93, (0.3, 0), "10x"), (0.957, (0, 0), "0.96x")],
)
def test_a_large_spread_takes_the_second_digit(ratio: float, spreads: tuple[float, float], shown: str) -> None:
    assert shown_ratio(ratio, spreads) == shown


def test_ratios_and_means_by_hand() -> None:
    """The machine halved its speed in the second pair, and disturbed the third of ours only."""
    assert Speedup.of(slow=[10, 20, 12], fast=[2, 4, 6]) == Speedup(of_medians=12 / 4, paired=5, of_best=5)
    # one plain update in fifty counts
    usual = StepTimes(step=7.0, rollout=3.0, train=4.0, tokens=8.0)
    mean = with_plain_share(usual, StepTimes(step=12.0, rollout=3.0, train=9.0, tokens=8.0), every_steps=50)
    assert (mean.step, mean.rollout, mean.train) == pytest.approx((7.1, 3.0, 4.1))


@pytest.mark.parametrize("name", ["tiny", "image_heavy"])
def test_all_ids_of_a_case_can_be_drawn_but_special_ones(name: str) -> None:
    parts = endless(make_parts(CASES[name]))
    vocabulary = parts.network.get_input_embeddings().num_embeddings
    assert vocabulary == len(parts.processor.tokenizer) == (CASES[name].vocabulary or vocabulary)
    assert len(parts.processor.banned_ids) < 20
    assert np.isin(vocabulary - 1, parts.processor.banned_ids) == (name == "tiny")


CASE = replace(CASES["tiny"], prompts=2, samples=3, completion_tokens=5)
MACHINE = MachineRates(large=Rates(gemm=100.0, attention=10.0, read=50.0, copy=20.0), thin_gemm=40.0, weight_read=30.0)


@pytest.mark.parametrize("reuses", [False, True])
@pytest.mark.parametrize("freeze_vision", [False, True])
def test_the_parts_add_up_to_the_work_of_the_model(freeze_vision: bool, reuses: bool) -> None:
    """What the update takes over from the rollout spares it one forward pass of linear layers, head and tower."""
    case = replace(CASE, freeze_vision=freeze_vision)
    sizes = sizes_of(case, Ours(case, 1))
    parts = parts_of(case, sizes, reuses=reuses)
    passes = training_passes(lora=False, trains_vision=not freeze_vision, features_cached=freeze_vision)
    vision = 0 if freeze_vision else 1
    once = Passes(linear=1, attention=0, vision=vision, vision_attention=vision)
    for phase, way in (("rollout", FORWARD), ("update", passes)):
        made = sum(part.linear + part.attention for part in parts if part.phase == phase)
        work, prompts = sizes.work, [(prompt.num_tokens, prompt.images) for prompt in sizes.prompts]
        whole = sum(work.prompt(n, images, way) + 3 * work.completion(5, n, way) for n, images in prompts)
        spared = sum(work.prompt(n, images, once) + 3 * (4 * work.token + 5 * work.action) for n, images in prompts)
        assert made == pytest.approx(whole - spared * (reuses and phase == "update"))


def test_decoding_reads_every_weight_and_the_cached_keys_at_each_step() -> None:
    sizes = sizes_of(CASE, Ours(CASE, 1))
    (decode,) = [part for part in parts_of(CASE, sizes, reuses=False) if part.name == "decode"]
    # two tensors of one key head of 32 float32 numbers in each of three layers
    assert sizes.kv_bytes == 2 * 32 * 4 * 3
    prompt_tokens = sum(prompt.num_tokens for prompt in sizes.prompts)
    assert decode.bytes == 4 * (sizes.text_bytes + (prompt_tokens + 6 * 2.5) * sizes.kv_bytes)
    assert decode.thin
    # a floor is the longer of arithmetic and memory
    part = Part(phase="update", name="x", passes=1, linear=200.0, attention=30.0, bytes=60.0)
    parts = (part, replace(part, bytes=200.0), replace(part, thin=True))
    assert [floor_seconds(each, MACHINE) for each in parts] == [2.0 + 3.0, 10.0, 5.0 + 3.0]
