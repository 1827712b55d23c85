#!/usr/bin/env bash
# All checks and measurements on a machine with a GPU, without network, in at most 580 seconds.
#
#     benchmarks/first_visit.sh OUT [cpu]      cpu: run small versions of all parts, to test the script itself
#
# Every part has its own time limit and its own file in OUT, so a hang costs one part. PYTHON names the interpreter.
set -u
out=${1:?the folder for the results}
cpu=${2:-}
py=${PYTHON:-python3}
cd "$(dirname "$0")/.." || exit 1
mkdir -p "$out" || exit 1
out=$(cd "$out" && pwd)
export PYTHONPATH=$PWD:$PWD/gym:$PWD/tools${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

failed=0
part() { # NAME LIMIT COMMAND...
  local name=$1 limit=$2 started=$SECONDS
  shift 2
  [ -z "$cpu" ] || limit=$((10 * limit)) # this tests that the commands work, not how fast they are
  timeout -k 5 "$limit" "$@" >"$out/$name.txt" 2>&1
  local code=$?
  [ "$code" -eq 0 ] || failed=$((failed + 1))
  echo "[$SECONDS s] $name: exit code $code after $((SECONDS - started)) of $limit s"
  tail -n 6 "$out/$name.txt"
}

device=cuda doctor=(--gpu) bench=(--seconds 160)
if [ -n "$cpu" ]; then
  device=cpu doctor=(--gpu --cpu) bench=(--tiny --seconds 160)
fi
run=$(mktemp -d)
trap 'rm -rf "$run"' EXIT

# The packages are not installed here: write the metadata by which `fovea` finds the gym's environments and the tools
"$py" - "$run/site" <<'END' || exit 1
import pathlib, sys, tomllib
for package in ("gym", "tools"):
    project = tomllib.loads(pathlib.Path(package, "pyproject.toml").read_text())["project"]
    folder = pathlib.Path(sys.argv[1], f"{project['name'].replace('-', '_')}-0.dist-info")
    folder.mkdir(parents=True)
    groups = project["entry-points"].items()
    lines = [line for group, points in groups for line in (f"[{group}]", *(f"{a} = {b}" for a, b in points.items()))]
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0\n")
END
export PYTHONPATH=$PYTHONPATH:$run/site

part 0-machine 20 bash -c '
  nvidia-smi | head -n 15
  free -g | head -n 2
  which gcc
  "$0" - <<END
import os, sysconfig
from importlib.metadata import distributions
print("Python.h:", os.path.exists(sysconfig.get_path("include") + "/Python.h"))
print(*sorted(f"{each.name} {each.version}" for each in distributions()), sep="\n")
END' "$py"
part 1-doctor 180 "$py" -m fovea doctor "${doctor[@]}"
part 2-bench 195 "$py" -m benchmarks.gpu "${bench[@]}" --json "$out/gpu.json"
part 3-train 90 "$py" -m fovea train shapes "model.device=$device" warmup.max_steps=20 max_steps=8 profile=true \
  evaluate.before_training=false evaluate.image_controls=false environment.dev_size=8 environment.test_size=8 \
  log.progress=false "run_dir=$run/run"
cp "$run/run/metrics.jsonl" "$run/run/profile/phases.txt" "$out/"
part 4-tests 60 "$py" -m pytest -m gpu -q -p no:cacheprovider tests/rollout/test_gpu_decoding.py \
  tests/models/test_token_logprobs.py tests/train/test_optimizer.py tests/models/test_kernels_liger.py
echo "$failed parts failed; $SECONDS s in all"
[ "$failed" -eq 0 ]
