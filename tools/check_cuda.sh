#!/usr/bin/env bash
# What of feature cuda can be checked without a GPU: the kernels compile for the architectures of data centres (NVRTC, from
# the Python package of NVIDIA), and compute what they should on a GPU made of a CPU (tools/cuda_on_cpu).
# With a GPU, `cargo test -p ringspan --features cuda` runs the same tests on it.
set -euo pipefail
cd "$(dirname "$0")/.."

target=${CARGO_TARGET_DIR:-target}
cpu=$target/cuda-on-cpu
compiler=$target/nvrtc

mkdir -p "$cpu"
cp tools/cuda_on_cpu/prelude.h "$cpu"
c++ -std=c++17 -O2 -Wall -Wextra -shared -fPIC tools/cuda_on_cpu/*.cpp -ldl -Wl,-soname,libcuda.so.1 -o "$cpu/libcuda.so.1"
ln -sf libcuda.so.1 "$cpu/libnvrtc.so"

if [ ! -e "$compiler/done" ]; then
  rm -rf "$compiler" && mkdir -p "$compiler"
  python3 -m pip install --quiet --no-deps --target "$compiler" nvidia-cuda-nvrtc==13.0.88
  touch "$compiler/done"
fi

cargo clippy -p ringspan --all-targets --features cuda -- -D warnings
LD_LIBRARY_PATH=$(realpath "$compiler"/nvidia/cu13/lib) cargo test -p ringspan --features cuda --lib kernels_compile -- --nocapture | tee "$cpu/compiles"
grep -q "1 passed" "$cpu/compiles"
if grep skipped "$cpu/compiles"; then exit 1; fi

export LD_LIBRARY_PATH=$(realpath "$cpu")
cargo test -p ringspan --features cuda --lib kernel::
RINGSPAN_TEST_DEVICE=cuda cargo test -p ringspan --features cuda --test attention_decode
cargo test -p ringspan-cli --features cuda --test attend_device
