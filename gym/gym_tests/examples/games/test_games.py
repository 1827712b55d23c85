"""Games on pictures: their rules as gymnasium plays them, rewards as VAGEN's, and no board in two splits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, permutations, product
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.toy_text.frozen_lake import generate_random_map, is_valid
from pydantic import ValidationError

from fovea_gym.environments.base import Split
from fovea_gym.environments.hash_splits import split_of
from fovea_gym.errors import ConfigError
from fovea_gym.examples.games.board import ACTIONS, Action, Board, solution
from fovea_gym.examples.games.drawing import CELL_PX, draw
from fovea_gym.examples.games.environment import (
    BoardGame,
    FrozenLakeEnvironment,
    SokobanEnvironment,
    actions_in,
    start_of,
)
from fovea_gym.examples.games.frozen_lake import FrozenLake, random_lake
from fovea_gym.examples.games.sokoban import Sokoban, random_level
from fovea_gym.types import Message, Task
from gym_tests.grading import played
from gym_tests.tables import table

MICROBAN_1 = ("####--", "#-.#--", "#--###", "#*@--#", "#--$-#", "#--###", "####--")
"""The first level of David W. Skinner's Microban, with floor outside its walls; a shortest solution has 33 moves."""


def after_all(board: Board, actions: tuple[Action, ...]) -> Board:
    for action in actions:
        board = board.after(action)
    return board


@pytest.mark.parametrize("size", [3, 4, 8])
def test_a_lake_moves_as_gymnasium_s(size: int) -> None:
    rng = np.random.default_rng(size)
    for seed in range(20):
        lines = tuple(generate_random_map(size=size, seed=seed))
        theirs = gymnasium.make("FrozenLake-v1", desc=list(lines), is_slippery=False)
        theirs.reset(seed=0)
        ours, terminated = FrozenLake.read(lines), False
        for _ in range(30):
            action = int(rng.integers(4))
            state, reward, terminated, _, _ = theirs.step(action)
            ours = ours.after(ACTIONS[action])
            row, column = ours.player
            assert (row * size + column, ours.is_solved) == (state, reward == 1)
            assert (ours.is_solved or ours.is_lost) == terminated
            if terminated:
                break


def test_a_lake_has_a_solution_exactly_where_gymnasium_finds_a_way() -> None:
    rng, found = np.random.default_rng(0), []
    for _ in range(200):
        cells = np.where(rng.random((4, 4)) < 0.6, "F", "H")
        cells[0, 0], cells[-1, -1] = "S", "G"
        lines = tuple("".join(row) for row in cells)
        found.append(solution(FrozenLake.read(lines), 16) is not None)
        assert found[-1] == is_valid(cells.tolist(), 4)
    assert 0 < sum(found) < len(found)


def test_random_lakes_have_one_start_one_goal_and_the_share_of_ice() -> None:
    rng = np.random.default_rng(0)
    lakes = ["".join(random_lake(8, 0.7, rng)) for _ in range(200)]
    assert {(lake.count("S"), lake.count("G"), len(lake)) for lake in lakes} == {(1, 1, 64)}
    holes = sum(lake.count("H") for lake in lakes) / (62 * len(lakes))
    # four standard deviations of 12,400 draws
    assert abs(holes - 0.3) < 0.017


def test_a_box_is_pushed_and_never_pulled_nor_pushed_into_a_wall_or_a_box() -> None:
    room = Sokoban.read(("######", "#-@$.#", "######"))
    assert room.after("Right").lines == ("######", "#--@*#", "######")
    assert room.after("Right").is_solved
    assert room.after("Right").after("Right") == room.after("Right")
    assert room.after("Left").lines == ("######", "#@-$.#", "######")
    assert room.after("Up") == room
    two = Sokoban.read(("#######", "#@$$..#", "#######"))
    assert two.after("Right") == two
    assert Sokoban.read(("#####", "#+$-#", "#####")).after("Right").lines == ("#####", "#.@$#", "#####")


def test_the_shortest_solution_of_a_published_level() -> None:
    level = Sokoban.read(MICROBAN_1)
    assert level.lines == MICROBAN_1
    found = solution(level, 33) or ()
    assert (len(found), after_all(level, found).is_solved, solution(level, 32)) == (33, True, None)


def test_no_sequence_of_moves_is_shorter_than_the_solution() -> None:
    rng, checked = np.random.default_rng(1), 0
    while checked < 30:
        board = Sokoban.read(random_level(5, 1, rng))
        found = solution(board, 5)
        if found is None:
            continue
        checked += 1
        assert after_all(board, found).is_solved
        shorter = (moves for length in range(len(found)) for moves in product(ACTIONS, repeat=length))
        assert not any(after_all(board, moves).is_solved for moves in shorter)


def test_every_character_has_its_tile() -> None:
    tiles = {character: draw((character,)) for character in "FHGPXV#-.$*@+"}
    assert {tile.shape for tile in tiles.values()} == {(CELL_PX, CELL_PX, 3)}
    assert min(np.abs(one.astype(float) - other).mean() for one, other in combinations(tiles.values(), 2)) > 4
    picture = draw(("FH", "GP"))
    assert (picture[CELL_PX:, :CELL_PX] == tiles["G"]).all()
    assert (picture[:CELL_PX, CELL_PX:] == tiles["H"]).all()


SPLITS: tuple[Split, ...] = ("train", "dev", "test")


def lake(**settings: Any) -> BoardGame:
    return BoardGame(FrozenLakeEnvironment(**settings), seed=0)


def sokoban(**settings: Any) -> BoardGame:
    return BoardGame(SokobanEnvironment(**settings), seed=0)


def pixels(message: Message) -> np.ndarray:
    return np.asarray(message.parts[0].source)  # type: ignore[union-attr]


def task_of(lines: Sequence[str]) -> Task:
    return Task(id="test/0", question="", answer="", row={"map": "\n".join(lines)})


@pytest.mark.parametrize(
    "environment",
    [
        lake(),
        lake(side=3, moves=(2, 4), max_turns=6, test_size=20),
        sokoban(test_size=20),
        sokoban(max_actions_per_turn=3, think=True, test_size=20),
    ],
    ids=["lake", "small lake", "sokoban", "sokoban as VAGEN's"],
)
def test_demonstrations_solve_every_board_in_as_few_moves_as_the_settings_say(environment: BoardGame) -> None:
    fewest, most = environment.settings.moves
    for split in SPLITS:
        for task in environment.tasks(split)[:20]:
            texts = environment.demonstration(task)
            replies, score = played(environment, task, texts)
            assert fewest <= len(task.answer.split(",")) <= most
            assert (len(replies), score.accuracy) == (len(texts) - 1, 1.0)
            assert score.turns == pytest.approx([0.02] * (len(texts) - 1) + [1.02])
            assert score.reward == pytest.approx(sum(score.turns))
            assert score.parts == {"format": 1.0, "solved": 1.0, "turns": len(texts)}


def test_no_board_is_in_two_splits_and_held_out_boards_do_not_depend_on_the_seed() -> None:
    settings = FrozenLakeEnvironment(side=3, moves=(2, 4), test_size=200)
    one, other = (BoardGame(settings, seed) for seed in (0, 1))
    boards = {split: {str(task.row["map"]) for task in one.tasks(split)[:150]} for split in SPLITS}
    assert boards["train"].isdisjoint(boards["dev"] | boards["test"])
    assert boards["dev"].isdisjoint(boards["test"])
    for split, is_equal in (("train", False), ("dev", True), ("test", True)):
        rows = [[task.row["map"] for task in each.tasks(split)[:20]] for each in (one, other)]  # type: ignore[index]
        assert (rows[0] == rows[1]) == is_equal


def test_held_out_boards_differ_and_each_is_the_first_new_one_of_its_row() -> None:
    few, many = (lake(side=3, moves=(2, 4), dev_size=size, test_size=size) for size in (20, 150))
    for split in SPLITS[1:]:
        boards = [task.row["map"] for task in many.tasks(split)]
        assert len(set(boards)) == len(boards) == 150
        assert [task.row["map"] for task in few.tasks(split)] == boards[:20]
        assert [task.id for task in many.tasks(split)] == [f"{split}/{index}" for index in range(150)]


def test_more_held_out_boards_than_there_are_is_an_error_with_their_number() -> None:
    maps = {("".join(each[:2]), "".join(each[2:])) for rest in ("FF", "FH", "HH") for each in permutations("SG" + rest)}
    in_test = [each for each in maps if split_of("\n".join(each).encode()) == "test"]
    num_boards = sum(bool(solution(FrozenLake.read(each), 2)) for each in in_test)
    assert len(lake(side=2, moves=(1, 2), test_size=num_boards).tasks("test")) == num_boards
    with pytest.raises(ConfigError, match=rf"{num_boards} different .* or test_size={num_boards}$"):
        lake(side=2, moves=(1, 2), test_size=num_boards + 1).tasks("test")


def test_the_picture_after_a_move_is_that_of_the_new_board() -> None:
    environment, task = lake(), task_of(("SFH", "FFF", "HFG"))
    replies, score = played(environment, task, ["Right", "down", "Left", "Up", "Up", "Nonsense", "Right", "Right"])
    boards = [("FPH", "FFF", "HFG"), ("FFH", "FPF", "HFG"), ("FFH", "PFF", "HFG"), *[("PFH", "FFF", "HFG")] * 3]
    boards.append(("FPH", "FFF", "HFG"))
    assert [pixels(reply).tolist() for reply in replies] == [draw(board).tolist() for board in boards]
    # the last move falls into a hole, which ends the episode
    assert score.turns == pytest.approx([0.02] * 5 + [0.0] + [0.02] * 2)
    assert (score.accuracy, score.parts["format"]) == (0.0, 7 / 8)


def test_an_answer_without_a_move_earns_nothing_and_an_episode_ends_unsolved_at_the_limit_of_turns() -> None:
    replies, score = played(lake(), task_of(("SFG",)), ["Jump", "Right", "Right", "Right"])
    assert [reply.failed for reply in replies] == [True, False]
    assert replies[0].parts[1] == "Nothing moved. Left, Down, Right or Up?"
    assert score.turns == pytest.approx([0, 0.02, 1.02])
    replies, score = played(lake(max_turns=4, moves=(1, 4)), task_of(("SFG",)), ["Left"] * 9)
    assert (len(replies), score.accuracy, len(score.turns)) == (3, 0.0, 4)


@table(
    ("text", "think", "expected"),
    [
        (" left ", False, ("Left",)),
        ("Up,Down,Left,Right", False, ("Up", "Down", "Left")),
        ("Up, jump, Left", False, ("Up",)),
        ("", False, ()),
        ("Left", True, ()),
        ("<think>a wall\n</think>\n<answer>Up, Right</answer>", True, ("Up", "Right")),
        ("<think></think><answer>Up</answer> or so", True, ()),
        ("<answer>Up</answer>", True, ()),
    ],
)
def test_moves_of_an_answer(text: str, think: bool, expected: tuple[str, ...]) -> None:
    assert actions_in(text, SokobanEnvironment(max_actions_per_turn=3, think=think)) == expected


def test_several_moves_of_a_turn_stop_mattering_once_the_board_is_solved() -> None:
    environment = sokoban(max_actions_per_turn=3)
    task = task_of(("######", "#@$.-#", "######"))
    replies, score = played(environment, task, ["Right,Left,Left"])
    assert (replies, score.accuracy, score.turns) == ([], 1.0, pytest.approx((1.02,)))
    assert start_of(SokobanEnvironment().game, task).lines == ("######", "#@$.-#", "######")


@pytest.mark.parametrize("make", [lake, sokoban])
def test_demonstrations_describe_the_board_before_and_after_each_turn(make: Callable[..., BoardGame]) -> None:
    environment = make(think=True, state_reward=0.5, max_actions_per_turn=2, test_size=20)
    for task in environment.tasks("test"):
        texts = environment.demonstration(task)
        _, score = played(environment, task, texts)
        assert score.turns == pytest.approx([0.52] * (len(texts) - 1) + [1.52])
        assert (score.accuracy, score.parts["state"]) == (1.0, 1.0)


LEFT, RIGHT = "box is same row and left", "target is same row and right"
AFTER = "box will be same row and left, target will be same row and same column"
PUSHING = task_of(("######", "#$@.-#", "######"))


@table(
    ("thought", "expected"),
    [
        *((f"<observation>{LEFT}, {RIGHT}</observation>", 0.5), (f"<observation>{LEFT}</observation>", 0.25)),
        (f"<observation>The {LEFT}; THE {RIGHT.upper()} of me.</observation>", 0.5),
        # two statements of which one is true: precision 1/2, recall 1
        (f"<observation>{LEFT}, box is above and left, {RIGHT}</observation>", (2 / 3 + 1) / 2 / 2),
        (f"<observation>{LEFT}, {RIGHT}, hole is above and left</observation>", 1 / 3),
        *((text, 0.0) for text in ("<observation>box is above and left</observation>", f"{LEFT}, {RIGHT}")),
        (f"<observation>{LEFT}, {RIGHT}", 0.0),
        (f"<observation></observation><observation>{LEFT}, {RIGHT}</observation>", 0.0),
        (f"<observation>{LEFT}, {RIGHT}</observation> so <prediction>{AFTER}</prediction>", 1.0),
    ],
)
def test_a_description_is_worth_its_f1_by_kinds_of_things(thought: str, expected: float) -> None:
    environment = sokoban(think=True, state_reward=0.5)
    _, score = played(environment, PUSHING, [f"<think>{thought}</think><answer>Right</answer>"])
    assert score.parts["state"] == pytest.approx(expected)
    assert score.turns == pytest.approx((0.02 + 0.5 * expected,))


def test_a_description_without_a_move_earns_nothing() -> None:
    environment = sokoban(think=True, state_reward=0.5)
    thought = f"<think><observation>{LEFT}, {RIGHT}</observation></think>"
    replies, score = played(environment, PUSHING, [f"{thought}<answer>Jump</answer>", thought])
    assert (score.turns, score.parts["state"]) == ((0.0, 0.0), 0.0)
    assert "<observation>box is" in str(replies[0].parts[1])


@table(
    ("settings", "words"),
    [
        ({"moves": (5, 2)}, "moves=[5, 2] is an empty range"),
        ({"moves": (1, 7), "max_turns": 3, "max_actions_per_turn": 2}, "boards of 7 moves"),
        ({"side": 40}, "less than or equal to 12"),
        ({"state_reward": 0.5}, "think=false asks for none"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as error:
        FrozenLakeEnvironment(**settings)
    assert words in str(error.value)
