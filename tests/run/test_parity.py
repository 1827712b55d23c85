"""The gate on real tiny models: sound ones pass, broken ones stop, and a run is the same with and without it."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from typer.testing import CliRunner

from fovea.cli.doctor import Found, check_parity
from fovea.cli.main import app
from fovea.data.prompt_source import PromptedTask, PromptSource
from fovea.errors import ParityError
from fovea.loop import train
from fovea.metrics.log import read_metrics
from fovea.models.families.qwen_vl import QwenVL
from fovea.rollout.embedded.engine import EmbeddedEngine
from fovea.run import parity
from fovea.run.context import Run
from fovea.run.lifecycle import begin
from fovea.run.parity import read_parity
from fovea.run.parity_faults import usable_prompts, without_images
from fovea.run.parity_result import FLOOR_FRAC, parity_failure
from fovea.train.base import SftExample
from fovea.train.torch.policy import TorchPolicy
from fovea.types import Batch, SampleGroup
from fovea.wiring import images
from fovea_gym.errors import DataError
from fovea_gym.types import ImageRef, Message
from fovea_gym.utils.event_loop import wait_for
from tests.fakes import bandit_run
from tests.runs import untimed
from tests.tiny_models import DENSE_FAMILIES, FAMILIES, image
from tests.wiring.small import run_of

ROUNDING = 1e-5
"""float32: two ways to one log-prob."""


def other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    own = EmbeddedEngine.own_weights

    def changed(engine: EmbeddedEngine) -> Iterator[tuple[str, torch.Tensor]]:
        torch.manual_seed(0)
        for name, weight in own(engine):
            yield name, weight if ".visual." in name else weight + 0.3 * torch.randn_like(weight)

    monkeypatch.setattr(EmbeddedEngine, "own_weights", changed)


def plain_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer counts image tokens like words, as a trainer without M-RoPE does."""
    own = TorchPolicy.logprobs

    def like_words(_self: QwenVL, ids: NDArray[np.int64], _images: object, start: int) -> tuple[NDArray[np.int64], int]:
        return np.arange(start, start + len(ids))[None].repeat(3, axis=0), start + len(ids)

    def scored(policy: TorchPolicy, batch: Batch) -> Sequence[NDArray[np.float32]]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(QwenVL, "positions", like_words)
            return own(policy, batch)

    monkeypatch.setattr(TorchPolicy, "logprobs", scored)


def begin_stopped(run: Run, match: str) -> dict[str, Any]:
    """Begin a run that the gate stops with these words; returns what it has written down."""
    with run.metrics, pytest.raises(ParityError, match=match):
        wait_for(begin(run))
    found: dict[str, Any] = json.loads((run.folder / "parity.json").read_text())
    return found


def test_a_log_prob_that_is_no_number_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path)
    own = TorchPolicy.logprobs
    monkeypatch.setattr(TorchPolicy, "logprobs", lambda *call: [np.full_like(array, np.nan) for array in own(*call)])
    begin_stopped(run, "differ by nan on average")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sound_model_passes_with_and_without_images(family: str, tmp_path: Path) -> None:
    run = run_of(tmp_path, model={"tiny": {"family": family}}, rollout={"max_new_tokens": 12, "temperature": 0.8})
    with run.metrics:
        wait_for(begin(run))
    assert run.engine._tape.graphs == [], "what was kept for an update is given back"  # type: ignore[attr-defined]
    found = json.loads((tmp_path / "parity.json").read_text())
    assert (found["step"], found["model"], found["engine"], found["passed"]) == (0, f"tiny {family}", "embedded", True)
    kinds = [(kind["kind"], kind["prompts"]) for kind in found["prompts"]]
    assert kinds == [("with images", 4), ("without images", 4)]
    for kind in found["prompts"]:
        assert 8 < kind["tokens"] <= 4 * 2 * 12
        assert 0 <= kind["mean_abs"] <= kind["max_abs"] < ROUNDING
        assert kind["worst_token"]["row"] in {f"train/{index}" for index in range(4)}


def test_the_gate_is_as_large_as_is_said(tmp_path: Path) -> None:
    run = run_of(tmp_path, parity={"prompts": 2}, rollout={"max_new_tokens": 40})
    wait_for(run.weight_sync.sync(0))
    kinds = wait_for(read_parity(run, 0)).kinds
    assert [(kind.prompts, kind.tokens <= 2 * 2 * 32) for kind in kinds] == [(2, True)] * 2


def test_other_weights_in_the_engine_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other_weights(monkeypatch)
    run = run_of(tmp_path, rollout={"max_new_tokens": 12})
    with run.metrics, pytest.raises(ParityError) as stopped:
        wait_for(begin(run))
    found = json.loads((tmp_path / "parity.json").read_text())
    assert not found["passed"]
    worst = max(found["prompts"], key=lambda kind: kind["mean_abs"])["worst_token"]
    place = f"{worst['text']!r} (id {worst['token_id']}), number {worst['number']} of a completion of {worst['row']}: "
    message = str(stopped.value)
    assert message.startswith("tiny qwen3_vl: on prompts with")
    for part in (
        "log-probs of the embedded engine and of the trainer differ by ",
        f"parity.max_abs_logprob_diff=0.1; the worst token is {place}",
        f"{worst['engine_logprob']:.3f} in the engine, {worst['trainer_logprob']:.3f} in the trainer",
        "Engine and trainer hold different weights, or",
    ):
        assert part in message
    assert not (tmp_path / "checkpoints").exists()
    assert not read_metrics(tmp_path)


def test_wrong_positions_show_on_images_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path, rollout={"max_new_tokens": 12}, parity={"max_abs_logprob_diff": 0.001})
    plain_positions(monkeypatch)
    found = begin_stopped(run, r"on prompts with images.*Without images they agree: look at")
    with_images, without = found["prompts"]
    assert without["max_abs"] < ROUNDING < with_images["mean_abs"]


def train_on_the_gates_rows(run: Run) -> float:
    """For a loss near 0.1: most tokens are certain, as in a model that has solved its task."""
    assert run.warmup is not None
    prompts = usable_prompts(run.sources.train, run.environment, 4, max_seconds=100, say=lambda _: None)
    answers = [run.environment.demonstration(row.task) for _, row in prompts]
    pairs = [
        SftExample(prompt=row.prompt, answer_ids=run.warmup.answer_ids(row.prompt, *answer, "a row"))
        for (_, row), answer in zip(prompts, answers, strict=True)
    ]
    return [run.policy.trained.sft(pairs)["loss"] for _ in range(15)][-1]


@pytest.mark.parametrize("family", DENSE_FAMILIES)
def test_positions_of_words_fail_beyond_the_mean(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warmup = {"max_steps": 1, "learning_rate": 3e-3, "lr_warmup_steps": 0}
    run = run_of(tmp_path, model={"tiny": {"family": family}}, rollout={"max_new_tokens": 12}, warmup=warmup)
    assert train_on_the_gates_rows(run) < 0.3
    wait_for(run.weight_sync.sync(0))
    sound = wait_for(read_parity(run, 0))
    assert (sound.passed, sound.worst.mean_abs < ROUNDING) == (True, True)
    plain_positions(monkeypatch)
    wrong = wait_for(read_parity(run, 0))
    assert FLOOR_FRAC["float32"] * wrong.limit < wrong.worst.mean_abs < wrong.limit, "the mean alone lets it pass"
    assert not wrong.passed
    message = parity_failure(wrong)
    differ = f"on prompts with images the log-probs of the {wrong.engine} engine and of the trainer differ by"
    assert all(part in message for part in (differ, "without images; ", "look at the positions of image tokens"))


def test_faults_of_positions_cannot_be_told_on_the_plain_path(tmp_path: Path) -> None:
    run = run_of(tmp_path, model={"tiny": {}, "fast_path": "off"}, rollout={"max_new_tokens": 12})
    wait_for(run.weight_sync.sync(0))
    result = wait_for(read_parity(run, 0))
    assert result.passed
    assert {fault.name for fault in result.doubtful} == {"two of three M-RoPE rows dropped", "1-D positions"}


def test_int8_decoding_is_measured_as_it_decodes(tmp_path: Path) -> None:
    rollout = {"engine": {"decode_weights": "int8"}, "max_new_tokens": 8}
    corrected = {"importance_sampling_fix": True}
    run = run_of(tmp_path, rollout=rollout, algorithm=corrected, parity={"max_abs_logprob_diff": 1e-4})
    begin_stopped(run, r"embedded \(int8 decoding\) engine.*rollout.engine.decode_weights=exact")


def test_a_resumed_run_passes_the_gate_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"rollout": {"prompts_per_step": 2, "max_new_tokens": 3}, "checkpoint": {"every_steps": 1}}
    train(run_of(tmp_path, **settings, max_steps=2))
    other_weights(monkeypatch)
    resumed = run_of(tmp_path, **settings, max_steps=3, resume="auto")
    assert begin_stopped(resumed, "")["step"] == 2


WIDE = {"hidden_size": 256, "num_heads": 4, "num_kv_heads": 2}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"model": {"tiny": WIDE}},
        {"model": {"tiny": {}, "freeze_vision_tower": True}, "warmup": {"max_steps": 1, "check_every_steps": 1}},
    ],
    ids=["plain", "linear outputs kept", "cached features and a warm-up"],
)
def test_a_run_is_the_same_with_and_without_the_gate(settings: dict[str, dict[str, object]], tmp_path: Path) -> None:
    given = settings | {
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 6},
        "evaluate": {"image_controls": False, "test_size": 2, "dev_size": 2},
        # with a bonus for entropy every group trains, whether right or wrong
        "algorithm": {"entropy_coef": 0.01, "max_groups_without_signal": 4},
        "train": {"plain_update_every_steps": 2},
    }
    rows = []
    for prompts in (0, 4):
        folder = tmp_path / str(prompts)
        train(run_of(folder, max_steps=2, parity={"prompts": prompts}, **given))
        rows.append(untimed(folder))
        assert (folder / "parity.json").exists() is (prompts > 0)
    assert rows[0] == rows[1]
    assert rows[0][1]["reused_images"] > 0 or settings


def test_bad_rows_are_left_for_the_run_to_find(tmp_path: Path) -> None:
    run = run_of(tmp_path, data={"on_bad_row": "skip"})
    render, source = run.sources.train.render, run.sources.train

    def render_but_the_first(task: object, messages: object = None) -> object:
        if task.id == "train/0":  # type: ignore[attr-defined]
            raise DataError("bad")
        return render(task, messages)  # type: ignore[arg-type]

    source.render = render_but_the_first  # type: ignore[method-assign, assignment]
    wait_for(run.weight_sync.sync(0))
    assert {kind.prompts for kind in wait_for(read_parity(run, 0)).kinds} == {4}
    assert not source.bad_rows


def test_rows_without_images_are_read_once(tmp_path: Path) -> None:
    run = bandit_run(tmp_path)
    wait_for(begin(run))
    (kind,) = json.loads((tmp_path / "parity.json").read_text())["prompts"]
    assert (kind["kind"], kind["prompts"], kind["tokens"], kind["max_abs"]) == ("without images", 4, 8, 0.0)


def test_only_the_images_are_taken_away() -> None:
    messages = [Message(role="system", parts=("s",)), Message(role="user", parts=("a ", image(1), " b"))]
    bare = without_images(messages)
    assert [(message.role, message.parts) for message in bare] == [("system", ("s",)), ("user", ("a ", " b"))]
    assert isinstance(messages[1].parts[1], ImageRef)


def doctor(*words: str) -> tuple[int, str, str]:
    sizes = ["environment.train_size=12", "environment.dev_size=4", "environment.test_size=8", "log.progress=false"]
    done = CliRunner().invoke(app, ["doctor", "small.yaml", *sizes, "rollout.max_new_tokens=6", *words])
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fovea.cli.main.probe", lambda: Found({}, []))
    Path("small.yaml").write_text("model: {tiny: {}}\nrun_dir: mine\n", encoding="utf-8")
    return tmp_path


def test_the_doctor_reads_a_recipe_and_leaves_nothing(recipe: Path) -> None:
    code, out, _ = doctor()
    assert code == 0, out
    assert all(part in out for part in ("4 with images", "4 without images"))
    assert out.splitlines()[-1] == "parity: within the limit of parity.max_abs_logprob_diff=0.1"
    assert [path.name for path in recipe.iterdir()] == ["small.yaml"]


def test_the_doctor_says_what_is_broken_and_wants_prompts(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, errors = doctor("parity.prompts=0")
    said = "error: parity.prompts=0 leaves the parity gate without prompts; add parity.prompts=4"
    assert (code, errors.splitlines()[-1]) == (2, said)
    other_weights(monkeypatch)
    code, out, _ = doctor()
    assert code == 1, out
    assert "tiny qwen3_vl: on prompts with" in " ".join(out.split())
    assert "the worst token is" in out


TINY = "model.tiny={hidden_size: 32, num_layers: 1, vocabulary_size: 300}"
PLAIN: dict[str, object] = {"question": "How many are two?", "answer": "2", "image": None}


def look(folder: Path, rows: list[dict[str, object]]) -> bool:
    file, recipe = folder / "rows.jsonl", folder / "recipe.yaml"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe.write_text(f"environment: {{name: vqa, train_files: [{file}], test_files: [{file}], dev_share: 0}}\n")
    words = ["data.on_bad_row=skip", "data.allow_private_addresses=true", "data.url_timeout_seconds=0.1"]
    return check_parity([recipe], [TINY, *words, "parity.prompts=2", "rollout.max_new_tokens=4"])


def test_the_search_ends_before_its_last_row_with_the_rows_found(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host of the images never answers: 300 rows at .1 s each are 30 s."""
    limits = images.url_limits
    monkeypatch.setattr(images, "url_limits", lambda settings: replace(limits(settings), retries=0))
    monkeypatch.setattr(images, "HOST_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(parity, "MAX_SEARCH_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0), backlog=500) as silent:
        host = f"http://127.0.0.1:{silent.getsockname()[1]}"
        rows = [{"question": f"How many in {n}?", "answer": "2", "image": f"{host}/{n}.png"} for n in range(300)]
        assert look(tmp_path, [PLAIN, *rows, PLAIN])
    assert "│ 1 without images │" in capfd.readouterr().out


ROW_SECONDS = 10.0


def search(folder: Path, usable: Callable[[int], bool], *, max_seconds: float) -> tuple[list[str], list[str]]:
    """The rows that are found where each takes its time, and the lines about the others."""
    run = bandit_run(folder)
    source, now, said = run.sources.train, 0.0, list[str]()

    class Slow(PromptSource):
        def __init__(self) -> None:
            pass

        tasks = source.tasks

        def __len__(self) -> int:
            return len(source)

        def render(self, task: object, *messages: object) -> PromptedTask:
            nonlocal now
            now += ROW_SECONDS / 2  # a row is rendered twice, the second time without its images
            if not usable(source.tasks.index(task)):
                raise DataError(f"{task.id} is broken")
            return source.render(task, *messages)

    found = usable_prompts(Slow(), run.environment, 3, max_seconds=max_seconds, say=said.append, clock=lambda: now)
    return [prompted.task.id for _, prompted in found], said


def test_the_search_has_as_many_rows_as_are_asked_for_or_are_found_in_time(tmp_path: Path) -> None:
    found, said = search(tmp_path, lambda number: number in (1, 2, 4, 5), max_seconds=1000.0)
    assert found == ["train/1", "train/2", "train/4"]
    assert said == [
        "parity gate: found 0 of 3 usable rows among 1 tried; train/0 is broken",
        "parity gate: found 2 of 3 usable rows among 4 tried; train/3 is broken",
    ]
    assert search(tmp_path, lambda number: number in (0, 4, 5), max_seconds=2 * ROW_SECONDS)[0] == ["train/0"]
    assert search(tmp_path, lambda _: True, max_seconds=0.0)[0] == ["train/0"], "one row is always tried"


def test_without_any_row_the_limit_is_named_where_it_was_the_reason(tmp_path: Path) -> None:
    in_time = "^none of the first 4 training rows can be used within 20 s; the last error: train/3 is"
    with pytest.raises(DataError, match=in_time):
        search(tmp_path, lambda _: False, max_seconds=2 * ROW_SECONDS)
    with pytest.raises(DataError, match=r"first 16 training rows can be used; the last error: train/15 is"):
        search(tmp_path, lambda _: False, max_seconds=1000.0)


def test_the_gate_keeps_conversations_within_their_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, drawn = parity.sample_group, list[SampleGroup]()
    monkeypatch.setattr(parity, "sample_group", lambda *given: drawn.append(made(*given)) or drawn[-1])
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("environment: {name: frozen_lake}\n")
    words = [TINY, "parity.prompts=1", "rollout.max_new_tokens=4", "rollout.max_episode_tokens=150"]
    assert check_parity([recipe], words)
    samples = [(group.prompt.num_tokens, sample) for group in drawn for sample in group.samples]
    assert max(len(sample.turn_ends) for _, sample in samples) > 1
    assert max(num_tokens + len(sample.token_ids_T) for num_tokens, sample in samples) <= 150
