import json
import re
from pathlib import Path

import pytest

from fovea.errors import ConfigError
from fovea.view.export import export
from fovea.view.page_files import SCRIPT, page_file
from fovea.view.viewed_run import ViewedRun
from tests.view.folders import write_run


def value_of(script: Path) -> tuple[str, object]:
    found = re.fullmatch(r"foveaData\((\"[^\"]*\"), (.*)\);\n", script.read_text(encoding="ascii"), re.DOTALL)
    assert found, script
    return json.loads(found[1]), json.loads(found[2])


def test_every_answer_of_the_server_is_a_file(tmp_path: Path) -> None:
    run = ViewedRun(write_run(tmp_path / "run", text="</script>\u2028<b>\ud800"))
    page = export([run, run], tmp_path / "out")
    assert page == tmp_path / "out" / "index.html"
    data = tmp_path / "out" / "data"
    for path, expected in {
        "curve/1/0": run.curve(0),
        "entries/0/0": json.loads(run.entries(0)),
        "step/1/4": run.step(4),
    }.items():
        assert value_of(data / f"{path}.js") == (path, json.loads(json.dumps(expected)))
    assert all("<" not in script.read_text() for script in data.rglob("*.js"))
    (first, _) = value_of(data / "runs.js")[1]
    assert (first["name"], first["folder"]) == ("run", "run"), "where the runs lay is nobody's business"
    images = sorted(path.name for path in (tmp_path / "out" / "images" / "1").iterdir())
    assert images == sorted(path.name for path in (run.folder / "samples" / "images").iterdir())


def test_an_exported_page_loads_its_own_files_alone(tmp_path: Path) -> None:
    page = export([ViewedRun(write_run(tmp_path / "run"))], tmp_path / "out").read_text()
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', page)
    assert page.index(policy) < page.index("<script"), "a policy counts for what comes after it"
    rules = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    own = dict.fromkeys(("script-src", "style-src", "img-src"), "'self' file:")
    assert rules == own | dict.fromkeys(("default-src", "base-uri", "form-action"), "'none'")


def test_a_step_that_is_gone_is_left_out(tmp_path: Path) -> None:
    run = ViewedRun(write_run(tmp_path / "run"))
    (run.folder / "samples" / "step-000002.jsonl").unlink()
    export([run], tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out" / "data" / "step" / "0").iterdir()) == ["1.js", "4.js"]


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    run = ViewedRun(write_run(tmp_path / "run"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    with pytest.raises(ConfigError, match=r"--export .*full: it is not empty; give a new folder"):
        export([run], tmp_path / "full")
    export([run], tmp_path / "new")
    with pytest.raises(ConfigError, match="not empty"):
        export([run], tmp_path / "new")


def test_the_bundle_has_no_import_or_export_left() -> None:
    assert not re.findall(r"^(?:import|export)\b.*", page_file(SCRIPT), re.MULTILINE)
