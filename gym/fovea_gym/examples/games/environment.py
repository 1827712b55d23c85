"""Games on pictures of a board: the model moves, sees the new picture, and is rewarded for every turn.

The rules are deterministic, so the board after some turns follows from the task and the answers: an episode keeps no
state, and `reply` and the grader replay it. The rewards are those of VAGEN's FrozenLake and Sokoban
(github.com/mll-lab-nu/VAGEN): `success_reward` for the turn that solves the board, `format_reward` for every turn that
is in the format and plays a move, and `state_reward` for the descriptions of the board in such a turn (`description`).
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Annotated, Literal, TypeAlias

import numpy as np
from pydantic import Field

from fovea_gym.environments.access import Access
from fovea_gym.environments.base import Environment, Split
from fovea_gym.environments.hash_splits import row_generator, split_of
from fovea_gym.errors import ConfigError
from fovea_gym.examples.games import frozen_lake, sokoban
from fovea_gym.examples.games.board import ACTIONS, Action, Board, solution
from fovea_gym.examples.games.description import HOW, described, description_f1
from fovea_gym.examples.games.drawing import draw
from fovea_gym.examples.games.frozen_lake import FrozenLake
from fovea_gym.examples.games.sokoban import Sokoban
from fovea_gym.rows.tasks import LazyTasks
from fovea_gym.settings.base import CoefficientOrZero, PositiveInt
from fovea_gym.settings.splits import DrawnRows
from fovea_gym.types import AnswerEnd, ImageRef, Message, Score, Task, Turn

_THOUGHT = re.compile(r"<think>.*?</think>\s*<answer>(.*?)</answer>", re.DOTALL)
_ACTION_OF = {action.lower(): action for action in ACTIONS}
_MAP = "map"
"""Key of the task's row that holds the board at the start, its lines joined by line feeds."""
_MOST_DRAWS = 20_000
"""Most random boards that are tried for one row, which takes about a second."""

Moves: TypeAlias = tuple[PositiveInt, PositiveInt]


class GameEnvironment(DrawnRows):
    """Settings of all games. The rewards are VAGEN's: one for success, and a small one for every valid turn."""

    moves: Moves = (1, 5)
    """Smallest and largest number of moves in a shortest solution."""
    max_turns: Annotated[int, Field(ge=1, le=1 << 16)] = 10
    """Most turns of an episode, after which the board counts as unsolved."""
    max_actions_per_turn: PositiveInt = 1
    """Most moves in a turn, separated by commas; further moves are not played."""
    think: bool = False
    """Ask for `<think>...</think><answer>...</answer>` around the moves; false: the answer is the moves only."""
    success_reward: CoefficientOrZero = 1.0
    """Reward of the turn that solves the board."""
    format_reward: CoefficientOrZero = 0.02
    """Reward of every turn whose answer is in the format and plays a move."""
    state_reward: CoefficientOrZero = 0.0
    """Reward of every such turn for a right `<observation>` and a right `<prediction>` in its thought, which say where
    things are, seen from the player, before and after its moves. 0: neither is asked for."""

    def contradictions(self) -> Iterator[str]:
        low, high = self.moves
        if low > high:
            yield (f".moves={list(self.moves)} is an empty range; write the smaller number first")
        if high > self.max_turns * self.max_actions_per_turn:
            yield (
                f".moves={list(self.moves)} has boards of {high} moves, but max_turns={self.max_turns} and "
                f"max_actions_per_turn={self.max_actions_per_turn} allow fewer; lower the second number of moves"
            )
        if self.state_reward and not self.think:
            yield (".state_reward is for descriptions in a thought, but .think=false asks for none; set .think=true")

    @property
    @abstractmethod
    def game(self) -> Game:
        """The game of these settings."""

    def make(self, access: Access, seed: int) -> BoardGame:
        return BoardGame(self, seed, access.section)


class FrozenLakeEnvironment(GameEnvironment):
    """FrozenLake in pictures: walk over the ice to the goal, around the holes; start and goal are anywhere."""

    name: Literal["frozen_lake"] = "frozen_lake"
    moves: Moves = (1, 10)
    """Smallest and largest number of moves in a shortest solution."""
    side: Annotated[int, Field(ge=2, le=12)] = 4
    """Cells on a side of the lake."""
    frozen_share: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Probability that a cell is ice, not a hole."""

    @property
    def game(self) -> Game:
        return Game(
            task=frozen_lake.TASK,
            random_lines=lambda rng: frozen_lake.random_lake(self.side, self.frozen_share, rng),
            read=FrozenLake.read,
        )


class SokobanEnvironment(GameEnvironment):
    """Sokoban in pictures: push every box onto a target, in a room with walls."""

    name: Literal["sokoban"] = "sokoban"
    side: Annotated[int, Field(ge=5, le=12)] = 6
    """Cells on a side of the room, including its outer walls."""
    num_boxes: Annotated[int, Field(ge=1, le=3)] = 1
    """Number of boxes, and of targets."""

    @property
    def game(self) -> Game:
        return Game(
            task=sokoban.TASK,
            random_lines=lambda rng: sokoban.random_level(self.side, self.num_boxes, rng),
            read=Sokoban.read,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Game:
    """A game: its task in words, a function that makes a random board, and one that reads a board from text."""

    task: str
    random_lines: Callable[[np.random.Generator], tuple[str, ...]]
    read: Callable[[Sequence[str]], Board]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedTurn:
    """The boards before and after a turn, and the moves that were played in it."""

    before: Board
    board: Board
    actions: tuple[Action, ...]
    """Empty if the answer was not in the format or named no move."""


class BoardGame(Environment):
    """The environments `frozen_lake` and `sokoban`."""

    def __init__(self, settings: GameEnvironment, seed: int, section: str = "") -> None:
        """`section` is the prefix of setting names in errors."""
        self.settings = settings
        self._game = settings.game
        self._seed = seed
        self._section = section
        self._held_out: dict[Split, list[Task]] = {}
        self.max_turns = settings.max_turns
        self.answer_end = AnswerEnd(closing="</answer>") if settings.think else None
        self.graders = (GameGrader(settings, self._game),)

    def tasks(self, split: Split) -> Sequence[Task]:
        """Training boards are made when they are used; held-out boards all at once, so that all of them differ."""
        if split == "train":
            indices = range(self.settings.train_size)
            return LazyTasks(lambda index: self._task(split, index, ()), indices, kind_of=lambda _: "all")
        if split not in self._held_out:
            tasks: dict[str, Task] = {}
            for index in range(self.settings.dev_size if split == "dev" else self.settings.test_size):
                task = self._task(split, index, tasks)
                tasks[str(task.row[_MAP])] = task
            self._held_out[split] = list(tasks.values())
        return self._held_out[split]

    def prompt(self, task: Task) -> Sequence[Message]:
        return (Message(role="user", parts=(*task.images, task.question)),)

    def reply(self, task: Task, turns: Sequence[Turn]) -> Sequence[Message] | None:
        """The picture of the new board, and what was wrong with an answer that played nothing."""
        last = _played(self.settings, start_of(self._game, task), [turn.text for turn in turns])[-1]
        if last.board.is_solved or last.board.is_lost:
            return None
        picture = ImageRef(source=draw(last.board.lines), where=f"{task.id} after {len(turns)} turns")
        if last.actions:
            return (Message(role="user", parts=(picture,)),)
        return (Message(role="user", parts=(picture, f"Nothing moved. {_how(self.settings)}"), failed=True),)

    def target(self, task: Task) -> str:
        return self.demonstration(task)[0]

    def demonstration(self, task: Task) -> Sequence[str]:
        """A shortest solution with as many moves per turn as allowed, and true descriptions if these are rewarded."""
        moves, size = task.answer.split(","), self.settings.max_actions_per_turn
        answers = [",".join(moves[start : start + size]) for start in range(0, len(moves), size)]
        if not self.settings.think:
            return answers
        thoughts = [f"<think></think><answer>{answer}</answer>" for answer in answers]
        if not self.settings.state_reward:
            return thoughts
        played = _played(self.settings, start_of(self._game, task), thoughts)
        return [
            text.replace("<think>", f"<think>{described(turn.before.lines, turn.board.lines)}")
            for text, turn in zip(thoughts, played, strict=True)
        ]

    def _task(self, split: Split, index: int, known: Collection[str]) -> Task:
        """The first random board of a row that fits the settings and the split and is not among the known ones."""
        rng, (fewest, most) = row_generator(self._seed, split, index), self.settings.moves
        for _ in range(_MOST_DRAWS):
            lines = self._game.random_lines(rng)
            text = "\n".join(lines)
            if text in known or split_of(text.encode()) != split:
                continue
            board = self._game.read(lines)
            moves = solution(board, most)
            if moves is not None and len(moves) >= fewest:
                return self._task_of(f"{split}/{index}", lines, board, moves)
        own = self._section
        raise ConfigError(
            f"{own}{split}_size asks for more boards than there are: {len(known)} different ones of {fewest} to "
            f"{most} moves, and no other among {_MOST_DRAWS:,} random ones; set a larger {own}side, other "
            f"{own}moves, or {own}{split}_size={max(len(known), 1)}"
        )

    def _task_of(self, task_id: str, lines: Sequence[str], board: Board, moves: Sequence[Action]) -> Task:
        picture = ImageRef(source=draw(board.lines), where=task_id)
        return Task(
            id=task_id,
            question=f"{self._game.task} {_how(self.settings)}",
            answer=",".join(moves),
            images=(picture,),
            row={_MAP: "\n".join(lines)},
        )


class GameGrader:
    """The grader of games: accuracy 1 for a solved board, and the rewards of all turns."""

    def __init__(self, settings: GameEnvironment, game: Game) -> None:
        self._settings = settings
        self._game = game

    async def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        settings, texts = self._settings, [turn.text for turn in turns]
        played = _played(settings, start_of(self._game, task), texts)
        valid = [bool(turn.actions) for turn in played]
        rewards = [settings.format_reward * is_valid for is_valid in valid]
        is_solved = played[-1].board.is_solved
        rewards[-1] += settings.success_reward * is_solved
        parts = {"format": sum(valid) / len(valid), "solved": float(is_solved), "turns": float(len(turns))}
        if settings.state_reward:
            said = [
                bool(turn.actions) * description_f1(text, turn.before.lines, turn.board.lines)
                for text, turn in zip(texts, played, strict=True)
            ]
            rewards = [reward + settings.state_reward * f1 for reward, f1 in zip(rewards, said, strict=True)]
            parts["state"] = sum(said) / len(said)
        return Score(reward=sum(rewards), accuracy=float(is_solved), parts=parts, turns=tuple(rewards))


def start_of(game: Game, task: Task) -> Board:
    """The board that a task begins with."""
    return game.read(str(task.row[_MAP]).split("\n"))


def actions_in(text: str, settings: GameEnvironment) -> tuple[Action, ...]:
    """The moves that an answer plays: those before the first word that is not a move, at most those of one turn."""
    answer = _THOUGHT.fullmatch(text.strip()) if settings.think else None
    if settings.think and answer is None:
        return ()
    words = (text if answer is None else answer[1]).split(",")[: settings.max_actions_per_turn]
    known = takewhile(lambda action: action is not None, (_ACTION_OF.get(word.strip().lower()) for word in words))
    return tuple(action for action in known if action is not None)


def _played(settings: GameEnvironment, board: Board, texts: Sequence[str]) -> list[PlayedTurn]:
    """The turns of an episode, played from its first board."""
    played = []
    for text in texts:
        before, actions = board, actions_in(text, settings)
        for action in actions:
            # moves after the one that solves the board are not played
            board = board if board.is_solved else board.after(action)
        played.append(PlayedTurn(before=before, board=board, actions=actions))
    return played


def _how(settings: GameEnvironment) -> str:
    moves = f"{', '.join(ACTIONS[:-1])} or {ACTIONS[-1]}"
    if settings.max_actions_per_turn > 1:
        moves += f", up to {settings.max_actions_per_turn} with commas between them"
    if settings.think:
        how = HOW if settings.state_reward else ""
        return f"Think in <think>...</think>{how}, then move in <answer>...</answer>: {moves}."
    return f"{moves}?"
