# Builds the GPU that is made of a CPU, and lets what is built and started next find it in place of NVIDIA's: to be sourced from
# the root of the repository. Programs are linked with it, and load it, as they are with CUDA's libraries.
target=${CARGO_TARGET_DIR:-target}
cpu=$target/cuda-on-cpu
mkdir -p "$cpu/toolkit/bin"
cp -r tools/cuda_on_cpu/prelude.h tools/cuda_on_cpu/include "$cpu"
# What kernels begin with is read once, by the flags with which they are compiled.
c++ -std=c++17 -O1 -fno-fast-math -ffp-contract=off -fPIC -w -x c++-header "$cpu/prelude.h" -o "$cpu/prelude.h.gch"
c++ -std=c++17 -O2 -Wall -Wextra -shared -fPIC tools/cuda_on_cpu/*.cpp -ldl -Wl,-soname,libcuda.so.1 -o "$cpu/libcuda.so.1"
for name in cuda nvrtc cublas cublasLt curand cudart; do ln -sf libcuda.so.1 "$cpu/lib$name.so"; done
ln -sf libcuda.so.1 "$cpu/libnccl.so.2"
# Candle's kernels are built by an nvcc that is made of a CPU as well.
cp tools/cuda_on_cpu/nvcc "$cpu/toolkit/bin"
ln -sfn .. "$cpu/toolkit/lib"

LD_LIBRARY_PATH=$(realpath "$cpu")
CUDA_HOME=$LD_LIBRARY_PATH/toolkit
export LD_LIBRARY_PATH CUDA_HOME NVCC=$CUDA_HOME/bin/nvcc CUDA_COMPUTE_CAP=80
