#!/usr/bin/env bash
# Checks the features for NVIDIA GPUs on a machine without one: the kernels compile for the architectures of data centres (NVRTC,
# from the Python package of NVIDIA), and attention and models give the right results on a GPU that is emulated on a CPU
# (tools/cuda_on_cpu), which also stands for the CUDA that feature candle-cuda is built with.
# With a GPU, the tests that are named here run on it.
#
#   tools/check_cuda.sh attention|models|all [FEATURES]    features of ringspan-cli to build with besides, so that crates of
#                                                          which a build exists already are not built again
set -euo pipefail
part=${1:-all}
case $part in attention | models | all) ;; *) echo "$0: '$part' is no part: attention, models, all" >&2 && exit 2 ;; esac
cd "$(dirname "$0")/.."

. tools/cuda_on_cpu/env.sh
compiler=$target/nvrtc

if [ ! -e "$compiler/done" ]; then
  rm -rf "$compiler" && mkdir -p "$compiler"
  python3 -m pip install --quiet --no-deps --target "$compiler" nvidia-cuda-nvrtc==13.0.88
  touch "$compiler/done"
fi

# All checks, and those of MPI (`.ci/run`), name the same packages and features, so that each crate is built once for them.
tests=(-p ringspan-cuda -p ringspan-candle -p ringspan-train -p ringspan-cli)
tests+=(--features "ringspan-candle/nccl,ringspan-cli/nccl,ringspan-cli/candle-cuda${2:+,$2}")

# tested NAME PASSED COMMAND...: runs tests of which as many pass, and none is skipped for want of a GPU or a compiler.
tested() {
  local said=$cpu/$1 passed=$2
  "${@:3}" | tee "$said"
  if [ "$passed" != any ]; then grep -q "ok. $passed passed" "$said"; fi
  if grep skipped "$said"; then exit 1; fi
}

nvrtc=$(realpath "$compiler"/nvidia/cu13/lib)
# All ranks of a test share a GPU.
export NCCL_MULTI_RANK_GPU_ENABLE=1

# Programs are linked with the compiler that is made of a CPU, so NVIDIA's is put before it.
with_nvrtc=(--config "target.'cfg(all())'.runner = ['env', 'LD_LIBRARY_PATH=$nvrtc:$LD_LIBRARY_PATH', 'LD_PRELOAD=libnvrtc.so.13']")

check_attention() {
  tested compiles 2 cargo test "${tests[@]}" --lib "${with_nvrtc[@]}" -- --nocapture kernels_compile
  tested kernels any cargo test "${tests[@]}" --test backend -- --nocapture
  tested on-gpu any cargo test "${tests[@]}" --test attention_on_gpu --test gpu_memory -- --nocapture
  cargo test "${tests[@]}" --test gpu attend_device -- --skip between_processes
}

# All that models need, and what the compiler says of each set of features.
check_models() {
  cargo clippy -p ringspan-cli --features cuda -- -D warnings
  cargo clippy -p ringspan-cli --features nccl -- -D warnings
  cargo clippy "${tests[@]}" --all-targets -- -D warnings
  tested compiles-layers 1 cargo test "${tests[@]}" --lib kernels_of_layers_compile "${with_nvrtc[@]}" -- --nocapture
  tested copies 4 cargo test "${tests[@]}" --lib -- --nocapture offload:: transfers::
  tested models any cargo test "${tests[@]}" --test gpu -- --nocapture --skip between_processes
}

if [ "$part" != models ]; then check_attention; fi
if [ "$part" != attention ]; then check_models; fi
