#!/usr/bin/env bash
# Checks ranks that are processes and compute on GPUs, whose blocks go by NCCL where each has one: `attend` and models, on GPUs that are
# emulated on a CPU (tools/cuda_on_cpu). Needs what feature mpi needs. On a machine with two GPUs and NCCL, the tests that are named here run
# on these.
#
#   tools/check_cuda_mpi.sh [FEATURES]    as tools/check_cuda.sh
set -euo pipefail
cd "$(dirname "$0")/.."

. tools/cuda_on_cpu/env.sh
tests=(-p ringspan-cuda -p ringspan-candle -p ringspan-train -p ringspan-cli)
tests+=(--features "ringspan-candle/nccl,ringspan-cli/nccl,ringspan-cli/candle-cuda,ringspan-cli/mpi${1:+,$1}" --test gpu)
timeout 900 cargo test "${tests[@]}" between_processes -- --nocapture | tee "$cpu/processes"
if grep skipped "$cpu/processes"; then exit 1; fi
