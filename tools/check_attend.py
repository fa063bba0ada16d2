"""Compares random calls of `ringspan attend` with the same attention in PyTorch, f64, with autograd.

    cargo build --release
    python tools/check_attend.py target/release/ringspan --calls 200 --seed 1

Every call draws shapes, types, documents, mask, score and mesh. A call that fails, or a tensor that differs by more than
1e-5 (f32), 1e-3 (f16) or 8e-3 (bf16) in relative L2, is printed with the command; the exit status counts them.
"""

import argparse
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


class Call:
    """One random call: the tensors, the flags, and the results of PyTorch."""

    def __init__(self, rng):
        self.rng = rng
        self.kind = rng.choice(["plain", "plain", "packed", "ids", "kv", "cross", "cross"])
        self.batch = 1 if self.kind == "packed" else rng.choice([1, 2, 3])
        self.heads, groups = rng.choice([(4, 4), (8, 1), (4, 2), (6, 3), (5, 1)])
        dim, v_dim = rng.choice([(16, 16), (64, 64), (64, 32), (80, 80), (8, 24), (33, 33), (128, 128)])
        self.queries = rng.choice([1, 5, 7, 64, 97, 200, 300])
        self.keys = rng.choice([1, 13, 64, 150, 333]) if self.kind in ("cross", "kv") else self.queries
        self.dtype = rng.choice([torch.float32] * 3 + [torch.bfloat16, torch.float16])
        self.backward = rng.random() < 0.8
        self.flags, self.tensors = [], {}
        normal = lambda *shape: torch.randn(*shape).to(self.dtype)
        self.tensors["q"] = normal(self.batch, self.queries, self.heads, dim)
        self.tensors["k"] = normal(self.batch, self.keys, groups, dim)
        self.tensors["v"] = normal(self.batch, self.keys, groups, v_dim)
        if self.backward:
            self.tensors["d_out"] = normal(self.batch, self.queries, self.heads, v_dim)
            self.flags.append("--backward")
        self.scale = rng.choice([None, 0.3])
        if self.scale is not None:
            self.flags += ["--scale", str(self.scale)]
        self.scale = self.scale or dim**-0.5
        self.draw_mask()
        self.draw_score()
        self.draw_mesh()

    def draw_mask(self):
        rng = self.rng
        mask = rng.choice(["full", "full-bottom-right", "causal", "causal", "causal-bottom-right"])
        self.flags += ["--mask", mask]
        i, j = torch.arange(self.queries)[:, None], torch.arange(self.keys)[None]
        shift = self.keys - self.queries if mask.endswith("bottom-right") else 0
        document = torch.zeros(self.batch, self.queries, dtype=torch.long)
        start = torch.zeros(self.batch, self.queries, dtype=torch.long)
        visible = torch.ones(self.batch, self.queries, self.keys, dtype=torch.bool)
        plain_positions = True
        if self.kind == "packed":
            cuts = [0] + sorted(rng.randint(0, self.queries) for _ in range(4))
            self.tensors["cu_seqlens"] = torch.tensor(cuts, dtype=torch.int32)
            for n, (a, b) in enumerate(zip(cuts, cuts[1:])):
                document[:, a:b], start[:, a:b] = n + 1, a
        if self.kind == "ids":
            ids = torch.randint(0, 4, (self.batch, self.queries))
            if rng.random() < 0.6:
                ids = ids.sort(1)[0]
            self.tensors["document_ids"] = document = ids
            self.tensors["document_ids"] = ids.int()
            for b in range(self.batch):
                for n in range(1, 4):
                    at = (ids[b] == n).nonzero()
                    if len(at):
                        start[b][ids[b] == n] = at[0].item()
        if self.kind in ("packed", "ids"):
            visible &= (document[:, :, None] == document[:, None]) & (document[:, :, None] > 0)
            shift, plain_positions = 0, False
        if self.kind == "kv":
            lengths = torch.tensor([rng.randint(0, self.keys) for _ in range(self.batch)], dtype=torch.int32)
            self.tensors["kv_lengths"] = lengths
            visible &= j[None] < lengths[:, None, None]
        # Positions inside the document: those of queries are [B, Sq, 1], those of keys [B, 1, Sk].
        i = (i[None, :, 0] - start)[:, :, None] if not plain_positions else i[None].expand(self.batch, -1, -1)
        j = (j[None, 0] - start)[:, None] if not plain_positions else j[None].expand(self.batch, -1, -1)
        self.distance = i + shift - j
        ahead = -self.distance
        limited = causal = mask.startswith("causal")
        allowed = ahead <= 0 if causal else torch.ones_like(visible)
        if rng.random() < 0.4:
            left, right = rng.choice([(5, -1), (40, 0)] if causal else [(5, -1), (9, 3), (-1, 2), (40, 0)])
            self.flags += ["--window", f"{left},{right}"]
            if left >= 0:
                visible &= self.distance <= left
            if right >= 0:
                limited = True
                allowed &= ahead <= right
        if limited and rng.random() < 0.25:
            length = rng.choice([1, 6, 50])
            self.flags += ["--prefix", str(length)]
            allowed |= (j < length).expand_as(allowed)
        visible &= allowed
        if rng.random() < 0.25:
            size = rng.choice([4, 16, 100])
            self.flags += ["--chunk", str(size)]
            visible &= torch.div(i + shift, size, rounding_mode="floor") == torch.div(j, size, rounding_mode="floor")
        if rng.random() < 0.25:
            rows, columns = rng.choice([(8, 8), (16, 5)])
            grid = torch.rand(self.queries // rows + 1, self.keys // columns + 1) < 0.6
            self.tensors["block_pairs"] = grid.nonzero().int().contiguous()
            self.flags += ["--block-size", f"{rows},{columns}"]
            visible &= grid[torch.div(i.clamp(min=0), rows, rounding_mode="floor"), torch.div(j.clamp(min=0), columns, rounding_mode="floor")]
        self.visible = visible[:, None]
        self.padding = (document == 0) if self.kind in ("packed", "ids") else torch.zeros_like(document, dtype=torch.bool)

    def draw_score(self):
        rng = self.rng
        self.softcap = rng.choice([None, None, 2.0])
        if self.softcap:
            self.flags += ["--softcap", str(self.softcap)]
        if rng.random() < 0.3:
            self.tensors["alibi_slopes"] = torch.rand(self.heads) * 0.5
        elif rng.random() < 0.3:
            self.tensors["relative_bias"] = torch.randn(16, self.heads)
            self.flags += ["--relative-max-distance", "60"]
            self.bidirectional = rng.random() < 0.5
            if self.bidirectional:
                self.flags.append("--relative-bidirectional")
        if rng.random() < 0.3:
            self.tensors["sinks"] = torch.randn(self.heads)
        elif rng.random() < 0.2:
            self.flags.append("--off-by-one")
        if rng.random() < 0.25:
            rows, heads = rng.choice([1, self.batch]), rng.choice([1, self.heads])
            self.tensors["bias"] = torch.randn(rows, heads, self.queries, self.keys)

    def draw_mesh(self):
        rng = self.rng
        ring, ulysses = rng.choice([1, 2, 3, 4, 8]), rng.choice([1, 1, 2, 4])
        self.flags += ["--ring", str(ring), "--ulysses", str(ulysses), "--threads", "1"]
        strategies = ["ring", "bidirectional-ring", "all-gather", "halo", "auto"] + ["pass-q"] * ("bias" not in self.tensors)
        self.flags += ["--strategy", rng.choice(strategies)]
        if ulysses > 1 and rng.random() < 0.5:
            self.flags += ["--head-chunks", str(rng.choice([2, 3]))]
        if ulysses > 1 and ring > 1 and rng.random() < 0.5:
            self.flags.append("--ulysses-outer")
        if rng.random() < 0.8:
            layouts = ["contiguous", "zigzag", "striped:1", "striped:40", "per-document-zigzag", "balanced", "balanced:7"]
            self.flags += ["--layout", rng.choice(layouts)]

    def buckets(self, count):
        """T5's bucket for each distance."""
        ahead, bucket = -self.distance, torch.zeros_like(self.distance)
        if self.bidirectional:
            count //= 2
            bucket += (ahead > 0) * count
            size = ahead.abs()
        else:
            size = (-ahead).clamp(min=0)
        exact = count // 2
        part = (size.double().clamp(min=1) / exact).log() / torch.tensor(60.0 / exact, dtype=torch.double).log()
        large = (exact + (part * (count - exact)).long()).clamp(max=count - 1)
        return bucket + torch.where(size < exact, size, large)

    def expected(self):
        leaves = {name: self.tensors[name].double().requires_grad_() for name in ("q", "k", "v", "sinks", "relative_bias", "bias") if name in self.tensors}
        group = self.heads // self.tensors["k"].shape[2]
        q, k, v = leaves["q"], leaves["k"].repeat_interleave(group, 2), leaves["v"].repeat_interleave(group, 2)
        s = torch.einsum("bihd,bjhd->bhij", q, k) * self.scale
        if self.softcap:
            s = self.softcap * torch.tanh(s / self.softcap)
        if "alibi_slopes" in self.tensors:
            s = s - self.tensors["alibi_slopes"].double()[None, :, None, None] * self.distance.abs()[:, None]
        if "relative_bias" in leaves:
            s = s + leaves["relative_bias"][self.buckets(16)].movedim(-1, 1)
        if "bias" in leaves:
            s = s + leaves["bias"]
        s = s.masked_fill(~self.visible, float("-inf"))
        sinks = leaves.get("sinks", torch.zeros(self.heads, dtype=torch.double) if "--off-by-one" in self.flags else None)
        all_scores = s if sinks is None else torch.cat([s, sinks[None, :, None, None].expand(*s.shape[:3], 1)], -1)
        lse = torch.logsumexp(all_scores, -1)
        p = torch.where(self.visible, (s - torch.where(lse.isinf(), 0.0, lse)[..., None]).exp(), 0.0)
        out = torch.einsum("bhij,bjhd->bihd", p, v)
        out = torch.where(self.padding[:, :, None, None], 0.0, out)
        lse = torch.where(self.padding[:, None], float("-inf"), lse)
        wanted = {"out": out.detach(), "lse": lse.detach()}
        if self.backward:
            names = {"q": "dq", "k": "dk", "v": "dv", "sinks": "d_sinks", "relative_bias": "d_relative_bias", "bias": "d_bias"}
            gradients = torch.autograd.grad(out, list(leaves.values()), self.tensors["d_out"].double(), allow_unused=True)
            for name, gradient in zip(leaves, gradients):
                wanted[names[name]] = torch.zeros_like(leaves[name]) if gradient is None else gradient
        return wanted


def relative_error(got, wanted):
    if got.shape != wanted.shape:
        return float("inf")
    got, finite = got.double(), wanted.isfinite()
    if not ((got[~finite] == wanted[~finite]).all() and got[finite].isfinite().all()):
        return float("inf")
    # Tensors that cancel to zero (dq, if one key is visible) are compared as if their elements had size 0.01.
    floor = 1e-2 * max(1, finite.sum().item()) ** 0.5
    return ((got[finite] - wanted[finite]).norm() / wanted[finite].norm().clamp(min=floor)).item()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ringspan", type=Path, help="the binary")
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng, bad, worst = random.Random(args.seed), 0, {}
    torch.manual_seed(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "in.safetensors"), Path(folder, "out.safetensors")
        for _ in range(args.calls):
            call = Call(rng)
            save_file(call.tensors, source)
            command = [str(args.ringspan), "attend", str(source), "--out", str(target), *call.flags]
            run = subprocess.run(command, capture_output=True, text=True)
            shapes = {name: tuple(tensor.shape) for name, tensor in call.tensors.items()}
            if run.returncode:
                bad += 1
                print("FAILED", " ".join(call.flags), shapes, run.stderr.strip())
                continue
            got, wanted, limit = load_file(target), call.expected(), TOLERANCE[call.dtype]
            errors = {name: relative_error(got[name], tensor) if name in got else float("inf") for name, tensor in wanted.items()}
            for name, error in errors.items():
                worst[name] = max(worst.get(name, 0.0), error / limit)
            if set(got) != set(wanted) or max(errors.values()) > limit:
                bad += 1
                print("DIFFERS", " ".join(call.flags), call.kind, call.dtype, shapes, errors)
    print(f"{args.calls} calls, {bad} bad; largest errors as shares of the tolerance:")
    print("  " + ", ".join(f"{name} {share:.2f}" for name, share in sorted(worst.items())))
    sys.exit(min(bad, 100))


if __name__ == "__main__":
    main()
