from pathlib import Path

from benchmarks.view import make_run, table_of


def test_every_request_of_a_page_is_in_the_table(tmp_path: Path) -> None:
    make_run(tmp_path / "run", 20)
    assert table_of(tmp_path / "run", 20).row_count == 7
