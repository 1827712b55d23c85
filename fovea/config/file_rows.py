"""Settings of the columns of rows in your own files, common to the environments that read a question from each."""

from __future__ import annotations

from pydantic import model_validator

from fovea.config.splits import SplitFiles

ANSWER_KEYS = ("answer", "reward_model")


class FileEnvironment(SplitFiles):
    """Rows in your own files (docs/data.md)."""

    prompt_key: str | None = None
    """Column of the question, a text or messages; default: problem, prompt, question, conversations or messages."""
    answer_key: str | None = None
    """Column of the true answer; default: answer, reward_model, or the reply that ends the conversation."""
    image_keys: tuple[str, ...] | None = None
    """Columns of the images, in order; [] for none; default: images or image, where there is one."""
    image_key: str | None = None
    """Column of the only image."""
    kind_key: str | None = None
    """Column of the question type, for accuracies by type; default: all rows have one type."""
    level_key: str | None = None
    """Column of a level of difficulty, a text, by which curriculum.level_weights draws rows."""
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
        """Usual names of the column of the answer, where no setting names it."""
        return ANSWER_KEYS

    @property
    def named_columns(self) -> list[tuple[str, str]]:
        named = [
            (key, getattr(self, key)) for key in ("prompt_key", "answer_key", "kind_key", "level_key", "image_key")
        ]
        named += [("image_keys", key) for key in self.image_keys or ()]
        return [(f"environment.{key}", column) for key, column in named if column is not None]

    @property
    def names_images(self) -> bool:
        return self.image_key is not None or self.image_keys is not None

    @model_validator(mode="after")
    def _keys_agree(self) -> FileEnvironment:
        if self.image_key is not None and self.image_keys is not None:
            raise ValueError(
                f"environment.image_key={self.image_key} and environment.image_keys={list(self.image_keys)} are both "
                "set; name all columns in environment.image_keys, and set environment.image_key=null"
            )
        if self.prompt_template is not None and self.prompt_template.count("{prompt}") != 1:
            raise ValueError(
                f"environment.prompt_template={self.prompt_template!r} does not hold {{prompt}} once, so that the "
                "question has no place in it; write {prompt} where it belongs"
            )
        return self
