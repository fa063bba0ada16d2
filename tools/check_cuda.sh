#!/usr/bin/env bash
# What of the features for NVIDIA GPUs can be checked without one: the kernels compile for the architectures of data centres
# (NVRTC, from the Python package of NVIDIA), and attention and models compute what they should on a GPU made of a CPU
# (tools/cuda_on_cpu), which also stands for the CUDA that feature candle-cuda is built with.
# With a GPU, the tests that are named here run on it.
set -euo pipefail
cd "$(dirname "$0")/.."

. tools/cuda_on_cpu/env.sh
compiler=$target/nvrtc

if [ ! -e "$compiler/done" ]; then
  rm -rf "$compiler" && mkdir -p "$compiler"
  python3 -m pip install --quiet --no-deps --target "$compiler" nvidia-cuda-nvrtc==13.0.88
  touch "$compiler/done"
fi

cargo clippy -p ringspan --all-targets --features cuda -- -D warnings
cargo clippy -p ringspan -p ringspan-cli --all-targets --features ringspan/nccl,ringspan-cli/nccl -- -D warnings
LD_LIBRARY_PATH=$(realpath "$compiler"/nvidia/cu13/lib) cargo test -p ringspan --features nccl --lib kernels_compile -- --nocapture | tee "$cpu/compiles"
grep -q "2 passed" "$cpu/compiles"
if grep skipped "$cpu/compiles"; then exit 1; fi

cargo test -p ringspan --features nccl --lib kernel::
# All ranks of a test share a GPU.
export NCCL_MULTI_RANK_GPU_ENABLE=1
cargo test -p ringspan --features nccl --test attention_on_gpu --test gpu_memory -- --nocapture | tee "$cpu/on-gpu"
if grep skipped "$cpu/on-gpu"; then exit 1; fi
RINGSPAN_TEST_DEVICE=cuda cargo test -p ringspan --features nccl --test attention_decode
cargo test -p ringspan-cli --features nccl --test attend_device

# Models.
models=(-p ringspan-candle -p ringspan-cli --features ringspan-candle/nccl,ringspan-cli/candle-cuda,ringspan-cli/nccl)
cargo clippy "${models[@]}" --all-targets -- -D warnings
# They are linked with the compiler made of a CPU, so NVIDIA's is put before it.
nvrtc=$(realpath "$compiler"/nvidia/cu13/lib)
cargo test "${models[@]}" --lib kernels_of_layers_compile \
  --config "target.'cfg(all())'.runner = ['env', 'LD_LIBRARY_PATH=$nvrtc:$LD_LIBRARY_PATH', 'LD_PRELOAD=libnvrtc.so.13']" \
  -- --nocapture | tee "$cpu/compiles-layers"
grep -q "1 passed" "$cpu/compiles-layers"
if grep skipped "$cpu/compiles-layers"; then exit 1; fi
cargo test "${models[@]}" --lib -- --nocapture offload:: transfers:: | tee "$cpu/copies"
grep -q "4 passed" "$cpu/copies"
if grep skipped "$cpu/copies"; then exit 1; fi
cargo test "${models[@]}" --test gpu --test device --test offload --test gpu_memory -- --nocapture | tee "$cpu/models"
if grep skipped "$cpu/models"; then exit 1; fi
