"""Settings of environments of several turns whose pictures Fovea draws: games on boards, and pages to click on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import Field

from fovea_gym.settings.base import CoefficientOrZero, PositiveInt
from fovea_gym.settings.splits import DrawnRows

if TYPE_CHECKING:  # settings are read without what they make
    from fovea_gym.environments.access import Access
    from fovea_gym.environments.base import Environment

Moves: TypeAlias = tuple[PositiveInt, PositiveInt]


class GameEnvironment(DrawnRows):
    """Settings that all games have. The rewards are VAGEN's: one for success, a small one for every valid turn."""

    moves: Moves = (1, 5)
    """Fewest and most moves of a shortest solution."""
    max_turns: Annotated[int, Field(ge=1, le=1 << 16)] = 10
    """Most turns of an episode; the board is then left unsolved."""
    max_actions_per_turn: PositiveInt = 1
    """Most moves of a turn, separated by commas; what follows them is not played."""
    think: bool = False
    """Ask for `<think>...</think><answer>...</answer>` around the moves; false: the answer is the moves only."""
    success_reward: CoefficientOrZero = 1.0
    """Reward of the turn that solves the board."""
    format_reward: CoefficientOrZero = 0.02
    """Reward of every turn whose answer is in the format and plays a move."""
    state_reward: CoefficientOrZero = 0.0
    """Reward of every such turn for a right `<observation>` and a right `<prediction>` in its thought: where things are
    from the player before its moves and after them. 0: neither is asked for."""

    def contradictions(self) -> Iterator[str]:
        low, high = self.moves
        if low > high:
            yield (f"environment.moves={list(self.moves)} has no number of moves in it; write the smaller first")
        if high > self.max_turns * self.max_actions_per_turn:
            yield (
                f"environment.moves={list(self.moves)} has boards of {high} moves, but max_turns={self.max_turns} and "
                f"max_actions_per_turn={self.max_actions_per_turn} allow fewer; lower the second number of moves"
            )
        if self.state_reward and not self.think:
            yield (
                "environment.state_reward is for descriptions in a thought, and environment.think=false asks for none; "
                "set environment.think=true"
            )


class FrozenLakeEnvironment(GameEnvironment):
    """FrozenLake in pictures: walk over the ice to the goal, around the holes; start and goal are anywhere."""

    name: Literal["frozen_lake"] = "frozen_lake"
    moves: Moves = (1, 10)
    """Fewest and most moves of a shortest solution."""
    side: Annotated[int, Field(ge=2, le=12)] = 4
    """Cells on a side of the lake."""
    frozen_share: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Probability of a cell to be ice, not a hole."""

    def make(self, access: Access, seed: int) -> Environment:
        from fovea_gym.examples.games.environment import BoardGame

        return BoardGame(self, seed)


class SokobanEnvironment(GameEnvironment):
    """Sokoban in pictures: push every box onto a target, in a room with walls."""

    name: Literal["sokoban"] = "sokoban"
    side: Annotated[int, Field(ge=5, le=12)] = 6
    """Cells on a side of the room, its outer walls included."""
    num_boxes: Annotated[int, Field(ge=1, le=3)] = 1
    """Boxes, and targets."""

    def make(self, access: Access, seed: int) -> Environment:
        from fovea_gym.examples.games.environment import BoardGame

        return BoardGame(self, seed)


class PagesEnvironment(DrawnRows):
    """A small web page in pictures: click the named control by coordinates, in half the tasks behind a menu."""

    name: Literal["pages"] = "pages"
    scale: Annotated[int, Field(ge=10, le=10_000)] = 1000
    """Coordinates of the right and the lower edge of the page; Qwen3-VL gives places from 0 to 1000."""

    def make(self, access: Access, seed: int) -> Environment:
        from fovea_gym.examples.pages.environment import Pages

        return Pages(self, seed)
