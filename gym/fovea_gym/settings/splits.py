"""Settings of rows in files, with their splits and columns, shared by all environments that read files."""

from __future__ import annotations

import inspect
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from fovea_gym.errors import ConfigError
from fovea_gym.settings.base import CoefficientOrZero, MayChange, Member, RowCount, Seconds, Section
from fovea_gym.settings.mcp import McpServers

if TYPE_CHECKING:  # reading settings does not import the environments
    from fovea_gym.environments.access import Access

ROWS_FOLDER = "rows"
"""Subfolder of a run folder with the rows that were passed from Python code."""
ANSWER_KEYS = ("answer", "reward_model")
RUN_DIR = "{run_dir}"
"""Placeholder of the run folder in file names, for rows stored in the run folder itself."""
_GIVEN = re.compile(rf".+/({ROWS_FOLDER}/(?:test_|dev_)?rows-[0-9a-f]+\.parquet)")


class SessionLimits(Section):
    """Limits of an environment that replies within an episode, by your own code or from another process."""

    max_concurrent: MayChange[Annotated[int, Field(ge=1, le=1 << 16)]] = 512
    """Maximum number of episodes with an open session at once; the others wait after their first answer."""
    deadline_seconds: MayChange[Seconds] = 60.0
    """Time limit of each open, reply, score or close of a session."""
    retries: MayChange[Annotated[int, Field(ge=0, le=1000)]] = 0
    """Retries of a failed open, or of a failed reply that has no state; a session never gets an action twice."""
    on_failure: MayChange[Literal["drop", "reward", "stop"]] = "drop"
    """Action when the session of an episode fails. drop: leave the episode out of its group; reward: end it with
    failure_reward; stop: stop the run."""
    failure_reward: MayChange[float] = 0.0
    """Reward of an episode whose session fails (on_failure=reward)."""


class EnvironmentSettings(Member):
    """Settings of an environment, with a method that makes it."""

    session: SessionLimits = Field(default_factory=SessionLimits)
    tools: tuple[str, ...] = ()
    """Tools that the model may call (docs/agents.md): zoom, zoom_at, crop, rotate, draw, measure, calculator, python,
    or your own functions as path/to/file.py:function or module:function."""
    mcp: McpServers = Field(default_factory=McpServers)
    """MCP servers, whose tools the model may call as well."""
    max_tool_turns: Annotated[int, Field(ge=1, le=1 << 16)] = 4
    """Maximum number of additional turns of an episode for tool calls."""
    tool_bonus: CoefficientOrZero = 0.0
    """Reward added for a right answer (accuracy above 0.5) in an episode with a successful tool call."""
    allow_python: bool = False
    """Allow the tool python, which runs programs written by the model, each confined to an empty folder."""
    allow_unconfined_python: bool = False
    """Allow the tool python even if nothing on this machine can confine its programs: they may then read, change and
    delete everything that you may, and use the network; only their time and memory are limited."""

    @abstractmethod
    def make(self, access: Access, seed: int) -> object:
        """Make an `Environment`, or an object with its methods and `score`; `access` holds what the run provides."""

    def made(self, access: Access, seed: int) -> object:
        """The environment that `make` returns; ConfigError if a package's `make` has another signature or result."""
        where = f"{type(self).__module__}.{type(self).__qualname__}.make"
        signature = inspect.signature(self.make)
        try:
            signature.bind(access, seed)
        except TypeError:
            raise ConfigError(
                f"{where} takes {signature}, but is called as make(access, seed); write def make(self, access, seed)"
            ) from None
        made = self.make(access, seed)
        if isinstance(made, type) or not hasattr(made, "tasks"):
            what = "None" if made is None else getattr(made, "__name__", f"an object of type {type(made).__name__}")
            fix = "return an object of it" if isinstance(made, type) else "return an environment"
            raise ConfigError(f"{where} returned {what}, which is not an environment; {fix}")
        return made


class DrawnRows(EnvironmentSettings):
    """Settings of an environment that generates its rows."""

    train_size: RowCount = 24_000
    """Number of training rows, which are generated when first used."""
    dev_size: RowCount = 200
    """Number of dev rows, for early stopping of the warm-up and for evaluation during training."""
    test_size: RowCount = 500
    """Number of held-out rows for the final table."""


class SplitFiles(EnvironmentSettings):
    """Files of the three splits, or the shares of the training rows to hold out for dev and test."""

    train_files: tuple[str, ...]
    """Rows to train on: files (Parquet, JSONL, JSON, CSV; also at s3://, gs://, https://), folders, name@split. A name
    that begins with {run_dir}/ is in the run folder, where rows passed from Python code are stored."""
    test_files: tuple[str, ...] | None = None
    """Rows for the test evaluations, on which no decision is based."""
    test_share: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Share of the training rows to hold out for test, split by image; one of test_share and test_files must be set."""
    dev_files: tuple[str, ...] | None = None
    """Rows for the dev evaluations, on which decisions may be based; default: dev_share of the training rows, which are
    then not trained on."""
    dev_share: Annotated[float, Field(ge=0, le=0.5)] = 0.05
    """Share of the training rows to hold out for dev, split by image, if dev_files is not set; 0: no dev rows."""

    def contradictions(self) -> Iterator[str]:
        if self.test_files is None and self.test_share == 0:
            yield (".test_files: must be set, or .test_share=0.1 to hold out a share of the training rows")
        if self.test_files is not None and self.test_share > 0:
            yield (
                f".test_share={self.test_share:g} holds out training rows for test, but "
                ".test_files names other rows; set only one of them"
            )

    @property
    def image_names(self) -> tuple[str, ...]:
        """Names of the columns that may hold images."""
        return ()

    @property
    def named_columns(self) -> list[tuple[str, str]]:
        """The settings that name columns, each with the name of its column."""
        return []

    @property
    def names_images(self) -> bool:
        """True if a setting says which columns hold images."""
        return False

    @property
    def has_dev(self) -> bool:
        return self.dev_files is not None or self.dev_share > 0

    def inside(self, run_folder: str) -> SplitFiles:
        """A copy in which file names contain the path of the run folder in place of its placeholder."""
        own = f"{RUN_DIR}/"
        return self._renamed(lambda file: f"{run_folder}/{file.removeprefix(own)}" if file.startswith(own) else file)

    def of_any_run(self) -> SplitFiles:
        """A copy without the paths of run folders, so that settings of two runs compare equal.

        It changes the names of files with rows passed from Python code, which contain a checksum of their rows.
        """
        return self._renamed(lambda file: f"{RUN_DIR}/{found[1]}" if (found := _GIVEN.fullmatch(file)) else file)

    def _renamed(self, rename: Callable[[str], str]) -> SplitFiles:
        names = ("train_files", "dev_files", "test_files")
        given = {name: files for name in names if (files := getattr(self, name)) is not None}
        return self.model_copy(update={name: tuple(map(rename, files)) for name, files in given.items()})


class FileEnvironment(SplitFiles):
    """Rows in your own files (docs/data.md)."""

    prompt_key: str | None = None
    """Column of the question, a text or messages; default: problem, prompt, question, conversations or messages."""
    answer_key: str | None = None
    """Column of the true answer; default: answer, reward_model, or the reply that ends the conversation."""
    image_keys: tuple[str, ...] | None = None
    """Columns of the images, in order; [] for no images; default: images or image, if there is such a column."""
    image_key: str | None = None
    """Column of the image, for rows with one image column."""
    kind_key: str | None = None
    """Column of the question type, for accuracies by type; default: all rows have the same type."""
    level_key: str | None = None
    """Column of the level of difficulty, a text; curriculum.level_weights samples rows by it."""
    system_prompt: str | None = None
    """System prompt."""
    prompt_template: str | None = None
    """Template of the user message, with the question at {prompt}."""

    @property
    def image_names(self) -> tuple[str, ...]:
        named = self.image_keys if self.image_key is None else (self.image_key,)
        return ("images", "image") if named is None else named

    @property
    def answer_names(self) -> tuple[str, ...]:
        """Usual names of the answer column, for use if no setting names it."""
        return ANSWER_KEYS

    @property
    def named_columns(self) -> list[tuple[str, str]]:
        keys = ("prompt_key", "answer_key", "kind_key", "level_key", "image_key")
        named = [(key, getattr(self, key)) for key in keys]
        named += [("image_keys", key) for key in self.image_keys or ()]
        return [(key, column) for key, column in named if column is not None]

    @property
    def names_images(self) -> bool:
        return self.image_key is not None or self.image_keys is not None

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.image_key is not None and self.image_keys is not None:
            yield (
                f".image_key={self.image_key} and .image_keys={list(self.image_keys)} are both "
                "set; name all columns in .image_keys, and set .image_key=null"
            )
        if self.prompt_template is not None and self.prompt_template.count("{prompt}") != 1:
            yield (
                f".prompt_template={self.prompt_template!r} does not contain {{prompt}} exactly once, so the "
                "question has no place in it; write {prompt} where it belongs"
            )
