"""What rows, models and URLs bring in is shown without steering a terminal and without giving keys away."""

from __future__ import annotations

import pytest

from fovea_gym.utils.shown_text import printable, without_secrets

URL = "https://bob:hunter2@host.org/rows.parquet?version=3&X-Amz-Signature=abc123&token=t0psecret#part"
SHOWN = "https://***@host.org/rows.parquet?version=3&X-Amz-Signature=***&token=***#part"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (URL, SHOWN),
        (f"cannot read {URL} today", f"cannot read {SHOWN} today"),
        ("https://bob:p@ss@word@host.org/a@b", "https://***@host.org/a@b"),
        ("https://host.org/a@b/c?author=ann&keyword=cat", "https://host.org/a@b/c?author=ann&keyword=cat"),
        ("s3://bucket/rows@train[:90%]", "s3://bucket/rows@train[:90%]"),
        ("bob@host.org has no secrets: token=1", "bob@host.org has no secrets: token=1"),
    ],
)
def test_passwords_and_keys_of_urls_are_hidden(text: str, shown: str) -> None:
    assert without_secrets(text) == shown


def test_what_steers_a_terminal_is_replaced() -> None:
    assert printable("a\x1b[2J\x9b31mb\r\u202ec\td\ne\x7f") == "a�[2J�31mb��c\td\ne�"
