from dataclasses import replace
from pathlib import Path

import pytest

from fovea.loop import train
from fovea.report.samples import read_step, sample_steps
from fovea_gym.types import Message
from gym_tests.bandit import BanditEnvironment
from tests.fakes import bandit_run

PER_STEP = {"prompts_per_step": 3, "samples_per_prompt": 4, "max_new_tokens": 1}


def test_a_record_has_what_the_update_makes_of_every_token(tmp_path: Path) -> None:
    per_step = {**PER_STEP, "prompts_per_step": 5}
    run = bandit_run(tmp_path / "run", max_steps=2, rollout=per_step, log={"samples_every_steps": 1})
    train(replace(run, token_text=lambda index: f"<{index}>"))
    assert sample_steps(tmp_path / "run") == [1, 2]
    records = read_step(tmp_path / "run", 2)
    assert [len(record.answers) for record in records] == [4, 4, 4, 4], "all answers of the first groups"
    of_update = [sample for group in run.policy.batches[1].groups for sample in group.samples]
    found = 0
    for answer in (answer for record in records for answer in record.answers):
        (turn,) = answer.turns
        assert turn.tokens is not None
        assert turn.text == answer.text
        assert turn.version == 1, "the weight sync after the first update"
        # the bandit's engine draws with the weights of its policy
        assert turn.tokens.trainer_logprobs == pytest.approx(turn.tokens.engine_logprobs, abs=2e-4)
        if turn.tokens.advantages:
            found += 1
            sample = next(
                each
                for each in of_update
                if turn.tokens.pieces == (f"<{each.token_ids_T[0]}>",)
                and turn.tokens.advantages == pytest.approx(each.advantages_T, abs=1e-4)
            )
            assert sample.reward == answer.reward
    assert found


def test_what_its_length_took_from_the_reward_of_an_answer_is_a_part(tmp_path: Path) -> None:
    overlong = {"buffer_frac": 1.0, "penalty_factor": 0.5}
    train(bandit_run(tmp_path / "run", max_steps=1, rollout=PER_STEP, algorithm={"overlong": overlong}))
    train(bandit_run(tmp_path / "none", max_steps=1, rollout=PER_STEP))
    parts = [answer.parts for record in read_step(tmp_path / "run", 1) for answer in record.answers]
    assert {each["algorithm.overlong"] for each in parts} == {-0.5}, "one token of one"
    assert "algorithm.overlong" not in read_step(tmp_path / "none", 1)[0].answers[0].parts


def test_texts_and_names_of_tools_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = Message(role="tool", tool="t" * 200, parts=("x" * 60_000,), failed=True)
    monkeypatch.setattr(
        BanditEnvironment, "prompt", lambda _, task: [Message(role="user", parts=(task.question,)), long]
    )
    train(bandit_run(tmp_path / "run", max_steps=1, rollout=PER_STEP))
    asked, kept = read_step(tmp_path / "run", 1)[0].messages
    assert (asked.role, asked.tool, asked.failed) == ("user", "", False)
    assert (kept.role, kept.tool, kept.failed) == ("tool", "t" * 80, True)
    assert kept.parts == ("x" * 50_000 + "... (10,000 more characters)",)


def test_recording_changes_nothing_of_the_update(tmp_path: Path) -> None:
    tables = []
    for interval, recorded in ((1, [1, 2, 3, 4]), (3, [1, 3])):
        run = bandit_run(tmp_path / str(interval), max_steps=4, log={"samples_every_steps": interval})
        train(run)
        assert sample_steps(run.folder) == recorded
        assert all(sample.old_logprobs_T is None for batch in run.policy.batches for sample in batch.samples)
        tables.append(run.policy.table.tolist())
    assert tables[0] == tables[1]
