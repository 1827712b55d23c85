"""Rules of the games: FrozenLake as gymnasium plays it, Sokoban by levels whose solutions are known."""

from __future__ import annotations

from itertools import product

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.toy_text.frozen_lake import generate_random_map, is_valid

from fovea_gym.examples.games.board import ACTIONS, Action, Board, solution
from fovea_gym.examples.games.drawing import CELL_PX, draw
from fovea_gym.examples.games.frozen_lake import FrozenLake, random_lake
from fovea_gym.examples.games.sokoban import Sokoban, random_level

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
    found = solution(level, 33)
    assert found is not None
    assert len(found) == 33
    assert after_all(level, found).is_solved
    assert solution(level, 32) is None


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
    distances = [
        np.abs(one.astype(float) - other).mean() for a, one in tiles.items() for b, other in tiles.items() if a < b
    ]
    assert min(distances) > 4
    picture = draw(("FH", "GP"))
    assert (picture[CELL_PX:, :CELL_PX] == tiles["G"]).all()
    assert (picture[:CELL_PX, CELL_PX:] == tiles["H"]).all()
