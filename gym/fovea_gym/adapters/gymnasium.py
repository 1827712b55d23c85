"""Gymnasium environments: the model sees the picture of `render()` and answers with the name of a discrete action.

A row is a seed: all episodes of a group begin in the state after `reset(seed)`. Later randomness, such as slippery ice,
comes from the episode's own seed. Every call runs in a thread, since `step` may block.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import numpy as np

from fovea_gym.adapters.own_score import FIRST_SEED, ScoredBySession
from fovea_gym.environments.base import Environment, Session, Split
from fovea_gym.environments.custom.loading import load_named
from fovea_gym.errors import ConfigError, DataError, MissingExtraError, describe_error, first_line, named
from fovea_gym.graders.grading import MAX_LATE_CALLS, CallThreads
from fovea_gym.rows.tasks import LazyTasks
from fovea_gym.settings.environments import GymnasiumEnvironment
from fovea_gym.types import ImageRef, Message, Score, Task, Turn
from fovea_gym.utils.installing import pip_install

try:
    import gymnasium
    from gymnasium.spaces import Discrete
except ImportError as error:
    raise MissingExtraError(
        f"the environment gymnasium needs the package gymnasium; {pip_install('gymnasium')}"
    ) from error

# an unclosed tag matches up to the end of the text, so that the search takes linear time
_TAG = re.compile(r"<action>(.*?)(</action>|\Z)", re.DOTALL | re.IGNORECASE)


class Gymnasium(Environment):
    """The environment `gymnasium`, whose settings are `GymnasiumEnvironment`."""

    graders = (ScoredBySession("gymnasium"),)
    has_demonstrations = False

    def __init__(self, config: GymnasiumEnvironment, section: str = "") -> None:
        """Make the environment once, to check it; ConfigError if that fails or its actions or pictures do not fit.

        `section` is the prefix of setting names in errors.
        """
        self._config = config
        self._named = f"{section}id={config.id}"
        self._make = _maker(config, section)
        self.max_turns = config.max_turns
        at_once = config.session.max_concurrent
        setting = f"{section}session.deadline_seconds"
        self._threads = CallThreads(self._named, setting=setting, max_late_calls=max(MAX_LATE_CALLS, at_once))
        with named(
            lambda error: ConfigError(f"{self._named} cannot be made: {first_line(error)}; correct id and kwargs")
        ):
            env = self._begun(0)
        with closing(env):
            self.actions = _actions(env, config, section)
            picture_of(env, self._named)

    def tasks(self, split: Split) -> Sequence[Task]:
        sizes = {"train": self._config.train_size, "dev": self._config.dev_size, "test": self._config.test_size}
        return LazyTasks(lambda row: self._task(split, row), range(sizes[split]), kind_of=lambda _: "all")

    def prompt(self, task: Task) -> Sequence[Message]:
        return (Message(role="user", parts=(*task.images, task.question)),)

    def target(self, task: Task) -> str:
        """Some action in the answer format; nobody knows which actions succeed."""
        return f"<action>{self.actions[0]}</action>"

    async def open(self, task: Task, seed: int) -> GymnasiumSession:
        """Begin an episode in the state of the row's seed; NoScoreError if the environment raises."""
        row = task.row["seed"]
        assert isinstance(row, int), task.id
        env = await self._threads.run(lambda: self._begun(row))
        assert isinstance(env, gymnasium.Env)
        env.unwrapped.np_random = np.random.default_rng(seed)
        return GymnasiumSession(env, self._named, self._config, self.actions, self._threads)

    def _task(self, split: Split, row: int) -> Task:
        seed, config = FIRST_SEED[split] + row, self._config
        fails = f"{split}/{row}: {self._named}"
        with (
            named(lambda error: DataError(f"{fails} {describe_error(error)}; fix it")),
            closing(self._begun(seed)) as env,
        ):
            picture = picture_of(env, self._named)
        question = f"{config.prompt}\n{_how(self.actions)}"
        return Task(id=f"{split}/{row}", question=question, answer="", images=(picture,), row={"seed": seed})

    def _begun(self, seed: int) -> gymnasium.Env[Any, Any]:
        env = self._make()
        env.reset(seed=seed)
        return env


class GymnasiumSession(Session):
    """One episode in a gymnasium environment, scored by the rewards of its steps."""

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        name: str,
        config: GymnasiumEnvironment,
        actions: Sequence[str],
        threads: CallThreads,
    ) -> None:
        self._env = env
        self._name = name
        self._config = config
        self._actions = actions
        self._threads = threads
        self._rewards: list[float] = []
        self._num_invalid = 0
        self._is_over = self._has_succeeded = False

    async def reply(self, turns: Sequence[Turn]) -> Sequence[Message] | None:
        """The picture after the action of the last turn; None once the episode is terminated or truncated."""
        replied: list[Message] = []
        await self._threads.run(lambda: replied.extend(self._played(turns[-1].text)))
        return replied or None

    async def score(self, turns: Sequence[Turn]) -> Score:
        """The sum of the rewards of all turns; the accuracy is 1 for success."""
        if not self._is_over and len(turns) > len(self._rewards):  # the last turn before the limit gets no reply
            await self._threads.run(lambda: self._played(turns[-1].text))
        return Score(
            reward=sum(self._rewards),
            accuracy=float(self._has_succeeded),
            parts={"invalid_actions": float(self._num_invalid)},
            turns=tuple(self._rewards),
        )

    async def close(self) -> None:
        """Close the environment."""
        await self._threads.run(self._env.close)

    def _played(self, text: str) -> tuple[Message, ...]:
        """Play the action in a text and return the messages that follow; none if the episode is over."""
        action = action_in(text, self._actions)
        if action is None:
            self._num_invalid += 1
            self._rewards.append(0.0)
            return (Message(role="user", parts=(f"No action was read. {_how(self._actions)}",), failed=True),)
        space = self._env.action_space
        assert isinstance(space, Discrete)
        _, reward, terminated, truncated, info = self._env.step(space.start + self._actions.index(action))
        self._rewards.append(float(reward))
        self._is_over = terminated or truncated
        key = self._config.success_key
        self._has_succeeded = bool(info.get(key)) if key else terminated and float(reward) > 0
        return () if self._is_over else (Message(role="user", parts=(picture_of(self._env, self._name),)),)


def action_in(text: str, actions: Sequence[str]) -> str | None:
    """The action in a text's last `<action>` tag or, without tags, the only action that it names; otherwise None."""
    by_name = {action.casefold(): action for action in actions}
    tags = [content for content, closing in _TAG.findall(text) if closing]
    if tags:
        return by_name.get(tags[-1].strip().casefold())
    found = {name for name in by_name if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text.casefold())}
    return by_name[found.pop()] if len(found) == 1 else None


def picture_of(env: gymnasium.Env[Any, Any], name: str) -> ImageRef:
    """The picture that `render()` returns; DataError if it is not an array of RGB values."""
    pixels_YXC = env.render()
    if not (isinstance(pixels_YXC, np.ndarray) and pixels_YXC.dtype == np.uint8 and pixels_YXC.shape[2:] == (3,)):
        shape = getattr(pixels_YXC, "shape", "")
        raise DataError(
            f"{name}: render() returned {type(pixels_YXC).__name__} {shape}, which is not a picture; "
            "return a numpy array of uint8 with the shape [height, width, 3] (render_mode rgb_array)"
        )
    # copied, since some environments draw the next state into the same array
    return ImageRef(source=pixels_YXC.copy(), where=f"render() of {name}")


def _how(actions: Sequence[str]) -> str:
    return f"Answer with one action, as <action>{actions[0]}</action>: {', '.join(actions)}."


def _maker(config: GymnasiumEnvironment, section: str) -> Callable[[], gymnasium.Env[Any, Any]]:
    """A function that makes the environment, from a class in the user's file or from gymnasium's registry."""
    kwargs: dict[str, Any] = dict(config.kwargs)
    if ".py:" not in config.id:
        # the checker warns about the environment's spaces, which a run cannot change
        return lambda: gymnasium.make(config.id, render_mode="rgb_array", disable_env_checker=True, **kwargs)
    made = load_named(config.id, f"{section}id")
    if not (isinstance(made, type) and issubclass(made, gymnasium.Env)):
        raise ConfigError(f"{section}id={config.id} is not a subclass of gymnasium.Env; derive it from gymnasium.Env")
    return lambda: made(**kwargs)


def _actions(env: gymnasium.Env[Any, Any], config: GymnasiumEnvironment, section: str) -> tuple[str, ...]:
    """The names of the actions, in the order of their numbers; ConfigError if they do not fit the action space."""
    space = env.action_space
    if not isinstance(space, Discrete):
        raise ConfigError(
            f"{section}id={config.id} has the action space {space}, but actions can be named only in a Discrete "
            "space; wrap it in an environment with discrete actions"
        )
    names = config.actions or tuple(map(str, range(int(space.start), int(space.start + space.n))))
    if len(names) != space.n:
        raise ConfigError(
            f"{section}actions has {len(names)} names, but {section}id={config.id} has {space.n} actions; name "
            "each, in the order of their numbers"
        )
    return names
