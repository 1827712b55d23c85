"""Addresses of rows: those of a few protocols are opened, and none that leads on to others."""

from __future__ import annotations

from pathlib import Path

import pytest

from fovea.errors import DataError
from tests.data.three_rows import opened

OTHER_PROTOCOLS = ("ftp", "smb", "jdbc", "git", "github", "sftp", "ssh", "webhdfs", "memory", "local", "HTTP", "data")


def test_only_the_protocols_of_the_docs_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "r.jsonl"
    chains = (f"reference://r.jsonl::{file}", f"file://{file}::file://{file}", f"simplecache://x::file://{file}")
    templates = ("s3://bucket/{{x}}/r.jsonl", "file:///{% for x in y %}/r.jsonl")
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda url: pytest.fail(f"{url} was opened"))
    for url in (*(f"{name}://127.0.0.1/r.jsonl" for name in OTHER_PROTOCOLS), "data:,a/r.jsonl"):
        for name in (url, url.replace("r.jsonl", "*.jsonl")):
            with pytest.raises(DataError, match=r"of a protocol that is not read; give a path, or a URL at http"):
                opened(name, tmp_path)
    for url in (*chains, *templates):
        with pytest.raises(DataError, match=r"is a chain or a template of URLs"):
            opened(url, tmp_path)


@pytest.mark.parametrize("name", ["README.md", ".huggingface.yaml"])
def test_the_readme_of_a_data_set_names_files_of_its_own(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "rows.jsonl").write_text('{"n": 1}\n')
    mark = "---\n" if name == "README.md" else ""
    for pattern in ("reference://r.jsonl::refs.json", "http://127.0.0.1:9/r.jsonl", "file:///etc/r.jsonl", "hf://a::b"):
        (folder / name).write_text(f'{mark}configs: [{{config_name: a, data_files: "{pattern}"}}]\n{mark}')
        with pytest.raises(DataError, match=r"its README names .*, which is neither a file of it nor of the hub"):
            opened(f"{folder}@train", tmp_path)
    (folder / name).write_text(f"{mark}configs: [{{config_name: a, data_files: rows.jsonl}}]\n{mark}")
    assert opened(f"{folder}@train", tmp_path)[0] == {"n": 1}
