// Row sums of out * d_out, [H, Tq]. They are summed in the order in which the backward pass multiplies v by d_out, so that
// dp - delta is exactly 0 where one key has all the weight. The job passes the output as `q`.

extern "C" __global__ void __launch_bounds__(THREADS) delta(const Job job) {
    const i64 at = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (at >= (i64)job.heads * job.queries) {
        return;
    }
    const i64 head = at / job.queries, token = at % job.queries;
    const i64 out = token * job.q.token_stride + head * job.q.head_stride;
    const i64 d_out = token * job.d_out.token_stride + head * job.d_out.head_stride;
    float sum = 0.0f;
    for (int d = 0; d < V_DIM; d++) {
        sum += element<D_OUT_TYPE>(job.d_out.data, d_out + d) * element<OUT_TYPE>(job.q.data, out + d);
    }
    job.out[at] = sum;
}
