#!/usr/bin/env bash
# Everything that wants a GPU, in one go: the GPU tests, the default job's stages, the benchmarks.
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
step python -m pipeline compare
cp -r environment.json reports/comparison.* results "$out"
step python -m benchmarks --figures "$out" "$@"
echo "$failed step(s) failed"
exit "$failed"
