#!/usr/bin/env bash
# Everything that wants a GPU, in one go: the GPU tests, the default job's stages, every ready-made variant, the benchmarks.
#   benchmarks/on_gpu.sh DIRECTORY [BENCHMARK ...]
# DIRECTORY gets gpu-tests.xml, the report, the results and the figures. Without a network, put Fashion-MNIST's raw
# files into data/raw/fashion_mnist first. Goes on after a failure, and ends with how many steps failed.
set -uo pipefail
out=$(realpath -m "$1")
shift
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mkdir -p "$out"
failed=0
step() {
    echo "== $*"
    "$@" || { echo "== failed: $*"; failed=$((failed + 1)); }
}

step python -m pytest -m gpu --junitxml="$out/gpu-tests.xml"
step python -m pipeline environment
[ -d data/raw/fashion_mnist ] || step python -m pipeline fetch
step python -m pipeline prepare
for variant in $(python -c 'from pipeline import config; print(*config.load().variants)'); do
    step python -m pipeline train "$variant"
done
step python -m pipeline bench
step python -m pipeline compare
cp -r environment.json bench.json reports/comparison.* results "$out"
for kind in profile infer; do
    step python -m pipeline "$kind" baseline
done
cp -r profiles inference "$out"

# verify of all variants that can run here. params.yaml is put back.
cp params.yaml "$out/params.yaml"
trap 'cp "$out/params.yaml" params.yaml' EXIT
for set in variants/*.yaml; do
    step python -m pipeline variants "$(basename "$set" .yaml)" --add
done
python -m pipeline verify --json >"$out/verify.json" || failed=$((failed + 1))
cp "$out/params.yaml" params.yaml

step python -m benchmarks --figures "$out" "$@"
step python -m benchmarks.ready_made --figures "$out"
echo "$failed step(s) failed"
exit "$failed"
