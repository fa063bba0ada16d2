# Builds the emulated GPU, and sets variables so that later builds and programs find it in place of NVIDIA's libraries. Source it from
# the root of the repository. Programs are linked with it, and load it, like CUDA's libraries.
target=${CARGO_TARGET_DIR:-target}
cpu=$target/cuda-on-cpu
mkdir -p "$cpu/toolkit/bin"

build_emulator() {
  cp -r tools/cuda_on_cpu/prelude.h tools/cuda_on_cpu/include "$cpu"
  # The prelude is precompiled, with the flags with which kernels are compiled.
  c++ -std=c++17 -O1 -fno-fast-math -ffp-contract=off -fPIC -w -x c++-header "$cpu/prelude.h" -o "$cpu/prelude.h.gch"
  c++ -std=c++17 -O2 -Wall -Wextra -shared -fPIC tools/cuda_on_cpu/*.cpp -ldl -Wl,-soname,libcuda.so.1 -o "$cpu/libcuda.so.1"
  for name in cuda nvrtc cublas cublasLt curand cudart; do ln -sf libcuda.so.1 "$cpu/lib$name.so"; done
  ln -sf libcuda.so.1 "$cpu/libnccl.so.2"
  # Candle's build calls the emulator's nvcc.
  cp tools/cuda_on_cpu/nvcc "$cpu/toolkit/bin"
  ln -sfn .. "$cpu/toolkit/lib"
}

# Scripts that run side by side share the emulator, so it is built once for the same sources and compiler, by one of them.
sources=$({ c++ --version && find tools/cuda_on_cpu -type f -print0 | sort -z | xargs -0 sha256sum; } | sha256sum)
exec {lock}>"$cpu/lock"
flock "$lock"
if [ "$(cat "$cpu/built" 2>/dev/null)" != "$sources" ]; then
  rm -f "$cpu/built"
  build_emulator
  echo "$sources" >"$cpu/built"
fi
exec {lock}>&-

LD_LIBRARY_PATH=$(realpath "$cpu")
CUDA_HOME=$LD_LIBRARY_PATH/toolkit
export LD_LIBRARY_PATH CUDA_HOME NVCC=$CUDA_HOME/bin/nvcc CUDA_COMPUTE_CAP=80
