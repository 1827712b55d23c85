"""The gate on real tiny models: sound ones pass, broken ones stop, and a run is the same with and without it."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

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


def test_a_log_prob_that_is_no_number_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path)
    own = TorchPolicy.logprobs
    monkeypatch.setattr(TorchPolicy, "logprobs", lambda *call: [np.full_like(array, np.nan) for array in own(*call)])
    with run.metrics, pytest.raises(ParityError, match="differ by nan on average"):
        wait_for(begin(run))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sound_model_passes_with_and_without_images(family: str, tmp_path: Path) -> None:
    run = run_of(tmp_path, model={"tiny": {"family": family}}, rollout={"max_new_tokens": 12, "temperature": 0.8})
    with run.metrics:
        wait_for(begin(run))
    assert run.engine._tape.graphs == [], "what was kept for an update is given back"  # type: ignore[attr-defined]
    found = json.loads((tmp_path / "parity.json").read_text())
    assert (found["step"], found["model"], found["engine"], found["passed"]) == (0, f"tiny {family}", "embedded", True)
    assert [kind["kind"] for kind in found["prompts"]] == ["with images", "without images"]
    for kind in found["prompts"]:
        assert kind["prompts"] == 4
        assert 8 < kind["tokens"] <= 4 * 2 * 12
        assert 0 <= kind["mean_abs"] <= kind["max_abs"] < ROUNDING
        assert kind["worst_token"]["row"] in {f"train/{index}" for index in range(4)}


def test_the_gate_is_as_large_as_is_said(tmp_path: Path) -> None:
    run = run_of(tmp_path, parity={"prompts": 2}, rollout={"max_new_tokens": 40})
    wait_for(run.weight_sync.sync(0))
    for kind in wait_for(read_parity(run, 0)).kinds:
        assert kind.prompts == 2
        assert kind.tokens <= 2 * 2 * 32


def test_other_weights_in_the_engine_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other_weights(monkeypatch)
    run = run_of(tmp_path, rollout={"max_new_tokens": 12})
    with run.metrics, pytest.raises(ParityError) as stopped:
        wait_for(begin(run))
    message = str(stopped.value)
    assert message.startswith("tiny qwen3_vl: on prompts with")
    assert "log-probs of the embedded engine and of the trainer differ by " in message
    assert "parity.max_abs_logprob_diff=0.1; the worst token is '" in message
    assert "Engine and trainer hold different weights, or" in message
    found = json.loads((tmp_path / "parity.json").read_text())
    assert not found["passed"]
    worst = max(found["prompts"], key=lambda kind: kind["mean_abs"])["worst_token"]
    text, row, number = worst["text"], worst["row"], worst["number"]
    assert (
        f"the worst token is {text!r} (id {worst['token_id']}), number {number} of a completion of {row}: " in message
    )
    assert f"{worst['engine_logprob']:.3f} in the engine, {worst['trainer_logprob']:.3f} in the trainer" in message
    assert not (tmp_path / "checkpoints").exists()
    assert not read_metrics(tmp_path)


def test_wrong_positions_show_on_images_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path, rollout={"max_new_tokens": 12}, parity={"max_abs_logprob_diff": 0.001})
    plain_positions(monkeypatch)
    with run.metrics, pytest.raises(ParityError, match=r"on prompts with images.*Without images they agree: look at"):
        wait_for(begin(run))
    with_images, without = json.loads((tmp_path / "parity.json").read_text())["prompts"]
    assert without["max_abs"] < ROUNDING < with_images["mean_abs"]


STEPS = 15
"""Enough for a loss near 0.1: most tokens are certain, as in a model that has solved its task."""


def train_on_the_gates_rows(run: Run) -> float:
    assert run.warmup is not None
    prompts = usable_prompts(run.sources.train, run.environment, 4, max_seconds=100, say=lambda _: None)
    pairs = [
        SftExample(
            prompt=row.prompt,
            answer_ids=run.warmup.answer_ids(row.prompt, *run.environment.demonstration(row.task), "a row"),
        )
        for _, row in prompts
    ]
    return [run.policy.trained.sft(pairs)["loss"] for _ in range(STEPS)][-1]


@pytest.mark.parametrize("family", DENSE_FAMILIES)
def test_positions_of_words_fail_where_the_mean_would_let_them_pass(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warmup = {"max_steps": 1, "learning_rate": 3e-3, "lr_warmup_steps": 0}
    run = run_of(tmp_path, model={"tiny": {"family": family}}, rollout={"max_new_tokens": 12}, warmup=warmup)
    assert train_on_the_gates_rows(run) < 0.3
    wait_for(run.weight_sync.sync(0))
    sound = wait_for(read_parity(run, 0))
    assert sound.passed
    assert sound.worst.mean_abs < ROUNDING
    plain_positions(monkeypatch)
    wrong = wait_for(read_parity(run, 0))
    assert FLOOR_FRAC["float32"] * wrong.limit < wrong.worst.mean_abs < wrong.limit, "the mean alone lets it pass"
    assert not wrong.passed
    message = parity_failure(wrong)
    assert f"on prompts with images the log-probs of the {wrong.engine} engine and of the trainer differ by" in message
    assert "without images; " in message
    assert "look at the positions of image tokens" in message


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
    fix = r"embedded \(int8 decoding\) engine.*rollout.engine.decode_weights=exact"
    with run.metrics, pytest.raises(ParityError, match=fix):
        wait_for(begin(run))


def test_a_resumed_run_passes_the_gate_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"rollout": {"prompts_per_step": 2, "max_new_tokens": 3}, "checkpoint": {"every_steps": 1}}
    train(run_of(tmp_path, **settings, max_steps=2))
    other_weights(monkeypatch)
    resumed = run_of(tmp_path, **settings, max_steps=3, resume="auto")
    with resumed.metrics, pytest.raises(ParityError):
        wait_for(begin(resumed))
    assert json.loads((tmp_path / "parity.json").read_text())["step"] == 2


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
    rollout = {"prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 6}
    rows = []
    for prompts in (0, 4):
        given = settings | {"rollout": rollout, "parity": {"prompts": prompts}}
        folder = tmp_path / str(prompts)
        given["evaluate"] = {"image_controls": False, "test_size": 2, "dev_size": 2}
        # with a bonus for entropy every group trains, whether right or wrong
        given["algorithm"] = {"entropy_coef": 0.01, "max_groups_without_signal": 4}
        train(run_of(folder, max_steps=2, train={"plain_update_every_steps": 2}, **given))
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
    assert [message.role for message in bare] == ["system", "user"]
    assert [message.parts for message in bare] == [("s",), ("a ", " b")]
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
    assert "4 with images" in out
    assert "4 without images" in out
    assert out.splitlines()[-1] == "parity: within the limit of parity.max_abs_logprob_diff=0.1"
    assert [path.name for path in recipe.iterdir()] == ["small.yaml"]


def test_the_doctor_says_what_is_broken(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other_weights(monkeypatch)
    code, out, _ = doctor()
    assert code == 1, out
    assert "tiny qwen3_vl: on prompts with" in " ".join(out.split())
    assert "the worst token is" in out


def test_the_doctor_wants_something_to_look_at(recipe: Path) -> None:
    code, _, errors = doctor("parity.prompts=0")
    assert code == 2
    assert errors.splitlines()[-1] == (
        "error: parity.prompts=0 leaves the parity gate without prompts; add parity.prompts=4"
    )


TINY = "model.tiny={hidden_size: 32, num_layers: 1, vocabulary_size: 300}"
SLOW = ["data.allow_private_addresses=true", "data.url_timeout_seconds=0.1"]
PLAIN: dict[str, object] = {"question": "How many are two?", "answer": "2", "image": None}


def look(folder: Path, rows: list[dict[str, object]], *words: str) -> bool:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = folder / "recipe.yaml"
    recipe.write_text(f"environment: {{name: vqa, train_files: [{file}], test_files: [{file}], dev_share: 0}}\n")
    small = [TINY, "data.on_bad_row=skip", "parity.prompts=2", "rollout.max_new_tokens=4", *SLOW]
    return check_parity([recipe], [*small, *words])


@pytest.fixture(autouse=True)
def no_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = images.url_limits
    monkeypatch.setattr(images, "url_limits", lambda settings: replace(limits(settings), retries=0))


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=500) as server:
        yield server


def row(server: socket.socket, number: int) -> dict[str, object]:
    url = f"http://127.0.0.1:{server.getsockname()[1]}/{number}.png"
    return {"question": f"How many in {number}?", "answer": "2", "image": url}


def test_the_search_ends_before_its_last_row_with_the_rows_found(
    tmp_path: Path, silent: socket.socket, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parity, "MAX_SEARCH_SECONDS", 0.3)
    rows = [PLAIN, *(row(silent, number) for number in range(300)), PLAIN]
    # 300 rows at .1 s each are 30 s
    monkeypatch.setattr(images, "HOST_PAUSE_SECONDS", 0.0)
    assert look(tmp_path, rows)
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


def test_the_search_has_as_many_rows_as_are_asked_for(tmp_path: Path) -> None:
    found, said = search(tmp_path, lambda number: number in (1, 2, 4, 5), max_seconds=1000.0)
    assert found == ["train/1", "train/2", "train/4"]
    assert said == [
        "parity gate: found 0 of 3 usable rows among 1 tried; train/0 is broken",
        "parity gate: found 2 of 3 usable rows among 4 tried; train/3 is broken",
    ]


def test_rows_found_in_time_are_all(tmp_path: Path) -> None:
    found, _ = search(tmp_path, lambda number: number in (0, 4, 5), max_seconds=2 * ROW_SECONDS)
    assert found == ["train/0"]
    assert search(tmp_path, lambda _: True, max_seconds=0.0)[0] == ["train/0"], "one row is always tried"


def test_without_any_row_the_limit_is_named_where_it_was_the_reason(tmp_path: Path) -> None:
    in_time = "^none of the first 4 training rows can be used within 20 s; the last error: train/3 is"
    with pytest.raises(DataError, match=in_time):
        search(tmp_path, lambda _: False, max_seconds=2 * ROW_SECONDS)
    with pytest.raises(DataError, match=r"first 16 training rows can be used; the last error: train/15 is"):
        search(tmp_path, lambda _: False, max_seconds=1000.0)


def test_the_gate_draws_conversations_within_the_tokens_of_an_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, drawn = parity.sample_group, list[SampleGroup]()
    monkeypatch.setattr(parity, "sample_group", lambda *given: drawn.append(made(*given)) or drawn[-1])
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("environment: {name: frozen_lake}\n")
    words = [TINY, "parity.prompts=1", "rollout.max_new_tokens=4", "rollout.max_episode_tokens=150"]
    assert check_parity([recipe], words)
    samples = [sample for group in drawn for sample in group.samples]
    lengths = [group.prompt.num_tokens + len(sample.token_ids_T) for group in drawn for sample in group.samples]
    assert max(len(sample.turn_ends) for sample in samples) > 1
    assert max(lengths) <= 150
