// Several numbers at once. Behind `element.cu`, compiled at run time for what is at hand:
//   X_TYPE, W_TYPE   what tensors are stored in, and the weight of a norm, the gradient of logits or what is added: F32 or BF16
//   AT_ONCE          numbers that a thread reads at once: as many of X_TYPE as 16 bytes hold, or 1 where rows do not lie so
//   THREADS          threads of a block
//   JOB_BYTES        size of Job where it was filled
// All between reading and writing is f32.

template <int TYPE> struct Bits {
    typedef unsigned short of;
};

template <> struct Bits<F32> {
    typedef float of;
};

#define PACK_BYTES(TYPE) (AT_ONCE * sizeof(typename Bits<TYPE>::of))

// So aligned, it is read in one go.
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

// What would be read where it was written.
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
