// Row sums of out * d_out, [H, Tq]. They are summed in the order in which the backward pass multiplies v by d_out, so that
// dp - delta is exactly 0 where one key has all the weight. The params passes the output as `q`.

extern "C" __global__ void __launch_bounds__(THREADS) delta(const Params params) {
    const i64 at = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (at >= (i64)params.heads * params.queries) {
        return;
    }
    const i64 head = at / params.queries, token = at % params.queries;
    const i64 out = token * params.q.token_stride + head * params.q.head_stride;
    const i64 d_out = token * params.d_out.token_stride + head * params.d_out.head_stride;
    float sum = 0.0f;
    for (int d = 0; d < V_DIM; d++) {
        sum += element<D_OUT_TYPE>(params.d_out.data, d_out + d) * element<OUT_TYPE>(params.q.data, out + d);
    }
    params.out[at] = sum;
}
