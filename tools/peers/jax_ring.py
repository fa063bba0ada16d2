"""Ring attention in JAX as one writes it by hand: shard_map, ppermute, online softmax, zigzag for causal masks.

Blocks that a causal mask hides are skipped. Scores are recomputed in the backward pass (jax.checkpoint), which sends keys,
values and their gradients around once more.
"""

import os
import pathlib

import tensors
from worker import Peer, serve

# Number of queries in a block of scores.
BLOCK = 512


def prepare(job: dict) -> Peer:
    ranks = job["ring"]
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={ranks}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    given = tensors.read(pathlib.Path(job["input"]))
    causal = job["mask"] == "causal"
    batch, length, heads, dim = given["q"].shape
    groups = heads // given["k"].shape[2]
    parts = 2 * ranks if causal else ranks
    if length % parts:
        raise SystemExit(f"S = {length} does not divide by {parts} chunks")
    chunk = length // parts
    # Rank r holds chunks r and 2P - 1 - r, or just chunk r.
    owned = [(r, 2 * ranks - 1 - r) if causal else (r,) for r in range(ranks)]
    order = np.concatenate([np.arange(c * chunk, (c + 1) * chunk) for pair in owned for c in pair])
    block = next(size for size in range(min(BLOCK, chunk), 0, -1) if chunk % size == 0)

    mesh = jax.make_mesh((ranks,), ("ring",))
    spec = PartitionSpec(None, "ring")

    def tile(q, k, v, q_start, k_start, state):
        """Adds keys to the running maximum, sum and output of one block of queries."""
        scores = jnp.einsum("bqgnd,bkgd->bgnqk", q, k, preferred_element_type=jnp.float32) * dim**-0.5
        if causal:
            rows = q_start + jnp.arange(q.shape[1])[:, None]
            columns = k_start + jnp.arange(k.shape[1])[None]
            scores = jnp.where(rows >= columns, scores, -jnp.inf)
        high, total, out = state
        new_high = jnp.maximum(high, scores.max(-1))
        base = jnp.where(jnp.isneginf(new_high), 0.0, new_high)
        p = jnp.exp(scores - base[..., None])
        keep = jnp.exp(high - base)
        added = jnp.einsum("bgnqk,bkgd->bgnqd", p.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return new_high, total * keep + p.sum(-1), out * keep[..., None] + added

    tile = jax.checkpoint(tile)

    def chunk_of(rank, which):
        return jnp.where(which == 0, rank, 2 * ranks - 1 - rank) if causal else rank

    def local(q, k, v):
        rank = jax.lax.axis_index("ring")
        mine = len(owned[0])
        blocks = q.shape[1] // block
        q = q.reshape(batch, blocks, block, heads // groups, groups, dim).swapaxes(0, 1)
        shape = (blocks, batch, heads // groups, groups, block)
        state = (jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros((*shape, dim)))
        state = jax.tree.map(lambda x: jax.lax.pcast(x, "ring", to="varying"), state)
        starts = jnp.concatenate([chunk_of(rank, n) * chunk + jnp.arange(chunk // block) * block for n in range(mine)])
        for step in range(ranks):
            sender = (rank - step) % ranks
            for n in range(mine):
                keys, values = (x[:, n * chunk : (n + 1) * chunk] for x in (k, v))
                k_start = chunk_of(sender, n) * chunk

                def one(args, keys=keys, values=values, k_start=k_start):
                    q, start, state = args
                    visible = (start + block > k_start) if causal else (start >= 0)
                    return jax.lax.cond(
                        visible, lambda s: tile(q, keys, values, start, k_start, s), lambda s: s, state
                    )

                state = jax.lax.map(one, (q, starts, state))
            if step + 1 < ranks:
                turn = [(r, (r + 1) % ranks) for r in range(ranks)]
                k, v = (jax.lax.ppermute(x, "ring", turn) for x in (k, v))
        _, total, out = state
        out = (out / total[..., None]).transpose(1, 0, 4, 2, 3, 5)
        return out.reshape(batch, blocks * block, heads, dim).astype(q.dtype)

    attend = jax.shard_map(local, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)

    def gradients(q, k, v, d_out):
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(d_out)

    dtype = {"f32": jnp.float32, "bf16": jnp.bfloat16}[job["dtype"]]
    place = NamedSharding(mesh, spec)
    q, k, v, d_out = (jax.device_put(given[n][:, order].astype(dtype), place) for n in ("q", "k", "v", "d_out"))
    forward, both = jax.jit(attend), jax.jit(gradients)

    def results() -> dict:
        values = (np.asarray(x.astype(jnp.float32)) for x in both(q, k, v, d_out))
        return {name: x[:, np.argsort(order)] for name, x in zip(("out", "dq", "dk", "dv"), values)}

    return Peer(
        jax.__version__,
        f"ring of {ranks}, {'zigzag' if causal else 'contiguous'}",
        lambda: jax.block_until_ready(forward(q, k, v)),
        lambda: jax.block_until_ready(both(q, k, v, d_out)),
        results,
    )


serve(prepare)
