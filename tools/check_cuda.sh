#!/usr/bin/env bash
# What of the features for NVIDIA GPUs can be checked without one: the kernels compile for the architectures of data centres
# (NVRTC, from the Python package of NVIDIA), and attention and models compute what they should on a GPU made of a CPU
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

# Both packages at once give all others the features that the whole workspace gives them: no other build of these is needed.
attention=(-p ringspan -p ringspan-cli --features "ringspan-cli/nccl${2:+,$2}")
models=(-p ringspan -p ringspan-candle -p ringspan-cli)
models+=(--features "ringspan-candle/nccl,ringspan-cli/nccl,ringspan-cli/candle-cuda${2:+,$2}")

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

check_attention() {
  LD_LIBRARY_PATH=$nvrtc tested compiles 2 cargo test "${attention[@]}" --lib kernels_compile -- --nocapture

  cargo test "${attention[@]}" --lib kernel::
  tested on-gpu any cargo test "${attention[@]}" --test attention_on_gpu --test gpu_memory -- --nocapture
  RINGSPAN_TEST_DEVICE=cuda cargo test "${attention[@]}" --test it attention_decode
  cargo test "${attention[@]}" --test gpu attend_device -- --skip between_processes
}

# All that models need, and what the compiler says of each set of features.
check_models() {
  cargo clippy -p ringspan -p ringspan-cli --all-targets --features ringspan-cli/cuda -- -D warnings
  cargo clippy "${attention[@]}" --all-targets -- -D warnings
  cargo clippy "${models[@]}" --all-targets -- -D warnings
  # They are linked with the compiler made of a CPU, so NVIDIA's is put before it.
  tested compiles-layers 1 cargo test "${models[@]}" --lib kernels_of_layers_compile \
    --config "target.'cfg(all())'.runner = ['env', 'LD_LIBRARY_PATH=$nvrtc:$LD_LIBRARY_PATH', 'LD_PRELOAD=libnvrtc.so.13']" \
    -- --nocapture
  tested copies 4 cargo test "${models[@]}" --lib -- --nocapture offload:: transfers::
  tested models any cargo test "${models[@]}" --test gpu -- --nocapture --skip between_processes
}

if [ "$part" != models ]; then check_attention; fi
if [ "$part" != attention ]; then check_models; fi
