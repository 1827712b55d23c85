"""`fovea cluster start|status|stop`: Ray's commands with authentication, reachable only from within the cluster."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from time import monotonic, sleep
from typing import Annotated

import typer

from fovea.cli.texts import Debug, one_line_errors
from fovea.cluster.ray_token import has_token, make_token, token_path, use_token
from fovea.utils.installing import pip_install
from fovea_gym.errors import ClusterError, MissingExtraError

NO_STATUS_YET = "No cluster status."
"""Start of Ray's output in the first seconds of a head node."""
NO_CLUSTER = "Could not find any running Ray instance"
"""Ray's message on a machine outside any cluster; its advice names an option that `fovea cluster` does not have."""
STATUS_SECONDS = 30.0
"""Longest wait for the first status of a cluster."""

app = typer.Typer(help="Start, show and stop a Ray cluster, node by node.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def cluster() -> None:
    """Start, show and stop a Ray cluster, node by node."""


@app.command()
def start(
    address: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Join the cluster of this head node; default: start one.")
    ] = None,
    port: Annotated[int, typer.Option(min=1024, max=10001, help="Port of a head node, below 10002.")] = 6379,
    node_ip: Annotated[
        str | None, typer.Option(metavar="IP", help="Address by which the other nodes reach this one.")
    ] = None,
    num_gpus: Annotated[int | None, typer.Option(min=0, help="GPUs to offer; default: all.")] = None,
    num_cpus: Annotated[int | None, typer.Option(min=0, help="CPUs to offer; default: all.")] = None,
    debug: Debug = False,
) -> None:
    """Make this machine a node of a cluster: the head first, then the others with --address.

    All nodes share a token: the head creates it, and the other nodes need it in the same file. `fovea train` with
    cluster.gpus_per_node then runs on the cluster, from any of its nodes.
    """
    with one_line_errors(debug=debug):
        use_token()
        if address is None:
            make_token()
            place = ["--head", f"--port={port}", "--dashboard-host=127.0.0.1"]
        elif has_token():
            place = [f"--address={address}"]
        else:
            raise ClusterError(
                f"this machine has no token of the cluster at {address}; copy {token_path()} of the head node to the "
                "same path here, readable only by you, and run this again"
            )
        sizes = {"node-ip-address": node_ip, "num-gpus": num_gpus, "num-cpus": num_cpus}
        options = [f"--{name}={value}" for name, value in sizes.items() if value is not None]
        said = run_ray("start", *place, *options, "--disable-usage-stats", "--log-style=record")
        typer.echo(f"this machine is a node of the cluster at {address or _address_in(said)}")
        if address is None:
            typer.echo(
                f"on every other node: copy {token_path()} there, then run\n"
                f"  fovea cluster start --address {_address_in(said)}"
            )


@app.command()
def status(debug: Debug = False) -> None:
    """Show the nodes of the cluster and which resources are in use."""
    with one_line_errors(debug=debug):
        use_token()
        deadline = monotonic() + STATUS_SECONDS
        try:
            while (said := run_ray("status")).startswith(NO_STATUS_YET) and monotonic() < deadline:
                sleep(1)
        except ClusterError as error:
            if NO_CLUSTER not in str(error):
                raise
            raise ClusterError(
                "this machine is not a node of a cluster; run `fovea cluster start`, with --address to join one, or "
                "set RAY_ADDRESS"
            ) from error
        if said.startswith(NO_STATUS_YET):
            raise ClusterError(
                f"the cluster gave no status for {STATUS_SECONDS:g} s: its head node has just started, or hangs; "
                "run this again, or run `fovea cluster stop` and `fovea cluster start` on the head node"
            )
        typer.echo(said)


@app.command()
def stop(debug: Debug = False) -> None:
    """End all Ray processes on this machine, and with them the runs that use them."""
    with one_line_errors(debug=debug):
        use_token()
        run_ray("stop")
        typer.echo("this machine is no longer a node of a cluster")


def run_ray(*arguments: str) -> str:
    """Run a Ray command and return its output; ClusterError if it fails."""
    if find_spec("ray") is None:
        raise MissingExtraError(f"fovea cluster needs Ray, which is not installed; {pip_install('ray')}")
    done = subprocess.run(
        [sys.executable, "-m", "ray.scripts.scripts", *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        # the last line of a traceback is the error
        raise ClusterError(
            f"`ray {' '.join(arguments)}` failed: {(done.stderr or done.stdout).strip().splitlines()[-1]}"
        )
    return done.stdout


def _address_in(said: str) -> str:
    """The address of a head node, which `ray start` prints for the other nodes."""
    return said.partition("ray start --address='")[2].partition("'")[0]
