// Reads and writes of several numbers at once. This source follows `element.cu` and is compiled at run time with these macros:
//   X_TYPE, W_TYPE   types of stored elements, F32 or BF16: of the main tensors, and of a second one that each kernel names
//   AT_ONCE          numbers that a thread reads at once: as many of X_TYPE as 16 bytes hold, or 1 if rows are not aligned
//   THREADS          threads of a block
//   PARAMS_BYTES        size of Params on the host
// Arithmetic between reads and writes is in f32.

template <int TYPE> struct Bits {
    typedef unsigned short of;
};

template <> struct Bits<F32> {
    typedef float of;
};

#define PACK_BYTES(TYPE) (AT_ONCE * sizeof(typename Bits<TYPE>::of))

// The alignment lets one instruction read all elements.
template <int TYPE> struct alignas(PACK_BYTES(TYPE) < 16 ? PACK_BYTES(TYPE) : 16) Pack {
    typename Bits<TYPE>::of at[AT_ONCE];
};

template <int TYPE> __device__ void read(float (&to)[AT_ONCE], const void *from, i64 at) {
    const Pack<TYPE> pack = *(const Pack<TYPE> *)((const typename Bits<TYPE>::of *)from + at);
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++) {
        to[n] = element<TYPE>(pack.at, n);
    }
}

// Rounds numbers as a write and a read of this type would.
template <int TYPE> __device__ void round_to(float (&x)[AT_ONCE]) {
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++) {
        typename Bits<TYPE>::of bits;
        store<TYPE>(&bits, 0, x[n]);
        x[n] = element<TYPE>(&bits, 0);
    }
}

template <int TYPE> __device__ void write(void *to, i64 at, const float (&from)[AT_ONCE]) {
    Pack<TYPE> pack;
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++) {
        store<TYPE>(pack.at, n, from[n]);
    }
    *(Pack<TYPE> *)((typename Bits<TYPE>::of *)to + at) = pack;
}
