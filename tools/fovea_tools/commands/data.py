"""`fovea data NAME`: fetch or render a data set; every data set is a subcommand with its own options.

The paths of the files are printed to stdout, progress and the next commands to stderr. Each subcommand imports its
writer when it runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from fovea.cli.texts import Debug, Quiet, one_line_errors

app = typer.Typer(help="Fetch or render a data set.", no_args_is_help=True, add_completion=False, rich_markup_mode=None)


def _folder_of(files: str) -> Any:
    """The option `--out`: the folder to write these files to."""
    return typer.Option(file_okay=False, help=f"Folder for {files}.")


TwoSplits = Annotated[Path, _folder_of("train.parquet and test.parquet")]
ThreeSplits = Annotated[Path, _folder_of("train.parquet, validation.parquet and test.parquet")]
TrainRows = Annotated[int, typer.Option(min=1, help="Training rows; a tenth as many test rows are added.")]
RowsOfThree = Annotated[
    int,
    typer.Option(min=1, help="Training rows; a twentieth as many validation and a tenth as many test rows are added."),
]
Seed = Annotated[int, typer.Option(min=0, help="Random seed.")]
SideOfScene = Annotated[int, typer.Option(min=32, max=1024, help="Width and height of a scene.")]
TINY = "tiny"
"""Recipe that replaces the model of the recipe before it with a tiny one."""


@app.callback()
def data() -> None:
    """Fetch or render a data set."""


@app.command()
def geospot(
    out: TwoSplits = Path("data/geospot"),
    rows: TrainRows = 20_000,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of places and scales.")] = 0,
    image_side_px: Annotated[int, typer.Option(min=32, max=1024, help="Width and height of a map.")] = 64,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Render locator maps, offline, from GeoNames' cities."""
    with one_line_errors(debug=debug):
        from fovea_tools.data_sets.maps import write_maps

        _say("reading places and drawing maps ...", quiet)
        _report("geospot", write_maps(out, num_rows=rows, seed=seed, image_side_px=image_side_px), quiet=quiet)


@app.command("geospot-europe")
def geospot_europe(
    out: ThreeSplits = Path("data/geospot_europe"),
    rows: RowsOfThree = 4_000,
    seed: Seed = 0,
    image_side_px: Annotated[int, typer.Option(min=32, max=1024, help="Width and height of the map.")] = 64,
    hold_out_places: Annotated[
        bool,
        typer.Option("--hold-out-places", help="Mark unnamed places of these countries; test rows have other places."),
    ] = False,
    move_degrees: Annotated[
        float, typer.Option(min=0, max=10, help="Shift the centre of each map by up to this many degrees; 0: one map.")
    ] = 0.0,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Render a map of Europe with marks at 26 cities, offline.

    A tiny model learns to name the marked city with its region, country and coordinates.
    """
    with one_line_errors(debug=debug):
        from fovea_tools.data_sets.europe import write_europe

        _say("drawing maps ...", quiet)
        files = write_europe(
            out,
            num_rows=rows,
            seed=seed,
            image_side_px=image_side_px,
            hold_out_places=hold_out_places,
            move_degrees=move_degrees,
        )
        _report("geospot_europe", files, quiet=quiet)


@app.command()
def geo3k(
    out: Annotated[Path, _folder_of("SPLIT.parquet for each split")] = Path("data/geo3k"),
    source: Annotated[
        str, typer.Option("--from", metavar="ID|FOLDER", help="Hugging Face data set id, or a folder with its files.")
    ] = "hiyouga/geometry3k",
    split: Annotated[
        list[str] | None, typer.Option(metavar="SPLIT", help="Split to write; repeatable. [default: all three]")
    ] = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Fetch Geometry3K from the Hugging Face hub or a copy."""
    with one_line_errors(debug=debug):
        from fovea_tools.data_sets.geo3k import SPLITS, write_geo3k

        _say(f"reading {source} ...", quiet)
        _report("geo3k", write_geo3k(out, source=source, splits=split or SPLITS), TINY, quiet=quiet)


@app.command()
def readable(
    out: ThreeSplits = Path("data/readable"),
    rows: RowsOfThree = 8_000,
    seed: Seed = 0,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Draw geometry that a tiny model can read, offline.

    The rows have Geometry3K's layout and show five kinds of diagrams; a fifth of the problems are in the test file
    only.
    """
    with one_line_errors(debug=debug):
        from fovea_tools.data_sets.readable import write_readable

        _say("drawing diagrams ...", quiet)
        _report("readable", write_readable(out, num_rows=rows, seed=seed), quiet=quiet)


def _drawn(command: str, recipe: str, folder: Path, help_text: str) -> None:
    """Add the command of a data set of rendered scenes; the recipe trains on its files."""

    def draw(
        out: TwoSplits = folder,
        rows: TrainRows = 5_000,
        seed: Seed = 0,
        image_side_px: SideOfScene = 64,
        quiet: Quiet = False,
        debug: Debug = False,
    ) -> None:
        with one_line_errors(debug=debug):
            from fovea_tools.data_sets.scenes import write_captions
            from fovea_tools.data_sets.vqa import write_visual_qa, write_vqa

            _say("drawing scenes ...", quiet)
            write = {"vqa": write_vqa, "visual-qa": write_visual_qa, "caption": write_captions}[command]
            files = write(out, num_rows=rows, seed=seed, image_side_px=image_side_px)
            _report(recipe, files, TINY, quiet=quiet, folder=folder)

    app.command(command, help=help_text)(draw)


QUESTIONS = """Render scenes with questions, offline.

The questions ask for counts, attributes and existence, or are yes/no or multiple choice."""
VISUAL_QA = """Render scenes in mixtrain's visual QA layout, offline.

The questions ask for existence, attributes and counts, as in the curriculum of recipes/vlm_gym_vqa.yaml."""
_drawn("vqa", "vqa", Path("data/vqa"), QUESTIONS)
_drawn("visual-qa", "vlm_gym_vqa", Path("data/visual_qa"), VISUAL_QA)
_drawn("caption", "caption", Path("data/caption"), "Render scenes with one to five captions each, offline.")


@app.command("easy-vqa")
def easy_vqa(
    out: Annotated[Path, _folder_of("train.parquet, dev.parquet and test.parquet")] = Path("data/easy_vqa"),
    rows: Annotated[
        int, typer.Option(min=1, help="Most training rows; a tenth as many dev and test rows are added.")
    ] = 30_000,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the dev images and of the order.")] = 0,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Write easy-VQA from its package, offline.

    It has 4,000 pictures of a coloured shape with 38,575 questions, and 1,000 other pictures with 9,673 test questions;
    train, dev and test share no picture.
    """
    with one_line_errors(debug=debug):
        from fovea_tools.data_sets.easy_vqa import write_easy_vqa

        _say("reading pictures ...", quiet)
        _report("easy_vqa", write_easy_vqa(out, num_rows=rows, seed=seed), quiet=quiet)


def _say(text: str, quiet: bool) -> None:
    if not quiet:
        typer.echo(text, err=True)


def _report(name: str, files: Iterable[Path], *beside: str, quiet: bool, folder: Path | None = None) -> None:
    """Print the files and the commands that train on them, also with the recipes `beside` for a small run.

    `name` is a recipe, which looks for the files in `folder` (default: data/NAME).
    """
    by_split = {}
    for file in files:
        typer.echo(file)  # printed as soon as it is written
        by_split[file.stem] = file
    held_out = by_split.get("test", by_split.get("validation"))
    if "train" not in by_split or held_out is None:
        return
    default = folder or Path("data", name)
    settings = [
        f"'environment.{split}_files=[{file}]'"
        for split, file in (("train", by_split["train"]), ("test", held_out))
        if file != default / f"{split}.parquet"
    ]
    if name in ("geo3k", "readable", "geospot_europe"):
        settings += _dev_setting(by_split.get("validation"), held_out, default / "validation.parquet")
    if name == "easy_vqa":
        settings += _dev_setting(by_split["dev"], held_out, default / "dev.parquet")
    _say(f"train on them: {' '.join(['fovea train', name, *settings])}", quiet)
    if beside:
        words = ["fovea train", name, *beside, *settings]
        _say(f"on a CPU, with a tiny model: {' '.join(words)}", quiet)


def _dev_setting(written: Path | None, held_out: Path, default: Path) -> list[str]:
    """The setting of the dev rows' file; empty if the recipe's default, the validation split, is right."""
    if written is None or written == held_out:
        return ["environment.dev_files=null"]
    return [] if written == default else [f"'environment.dev_files=[{written}]'"]
