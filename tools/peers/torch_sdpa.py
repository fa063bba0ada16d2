"""PyTorch's scaled_dot_product_attention on the CPU, or on a GPU."""

import pathlib

import tensors
from worker import Peer, seconds, serve


def prepare(job: dict) -> Peer:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    torch.set_num_threads(job["threads"])
    device = job["device"]
    if device == "cuda" and not torch.cuda.is_available():
        raise ImportError(f"PyTorch {torch.__version__} finds no GPU")
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[job["dtype"]]
    given = tensors.read(pathlib.Path(job["input"]))
    # [B, S, H, D] in the file, [B, H, S, D] here.
    tensor = {name: torch.tensor(values).to(device, dtype).transpose(1, 2).contiguous() for name, values in given.items()}
    d_out = tensor.pop("d_out")
    q, k, v = (tensor[name].requires_grad_() for name in "qkv")
    groups = q.shape[1] // k.shape[1]
    causal = job["mask"] == "causal"

    def grouped() -> torch.Tensor:
        return sdpa(q, k, v, is_causal=causal, enable_gqa=groups > 1)

    def repeated() -> torch.Tensor:
        wide = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        return sdpa(q, *wide, is_causal=causal)

    def finish() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    def timed(attend, backend: SDPBackend) -> Peer:
        def forward() -> None:
            with torch.no_grad(), sdpa_kernel(backend):
                attend()
            finish()

        def both() -> torch.Tensor:
            q.grad = k.grad = v.grad = None
            with sdpa_kernel(backend):
                out = attend()
                out.backward(d_out)
            finish()
            return out.detach()

        def results() -> dict:
            values = dict(out=both(), dq=q.grad, dk=k.grad, dv=v.grad)
            return {name: x.transpose(1, 2).float().cpu().numpy() for name, x in values.items()}

        of_groups = "" if groups == 1 else ", enable_gqa" if attend is grouped else ", k and v repeated"
        how = backend.name.removesuffix("_ATTENTION").lower() + of_groups
        return Peer(torch.__version__, how, forward, both, results)

    # Without a fused kernel PyTorch would store all S x S scores. If a kernel refuses grouped heads, keys are repeated.
    def fused(backend: SDPBackend) -> Peer | None:
        for attend in (grouped, repeated):
            try:
                peer = timed(attend, backend)
                peer.both()
                return peer
            except RuntimeError:
                continue
        return None

    backends = [SDPBackend.FLASH_ATTENTION]
    if device == "cuda":
        backends += [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    peers = [peer for backend in backends if (peer := fused(backend))]
    if not peers:
        raise ImportError(f"PyTorch {torch.__version__} has no fused kernel for {dtype} on {device}")
    # Of several kernels, the fastest in forward and backward together is taken.
    return peers[0] if len(peers) == 1 else min(peers, key=lambda peer: seconds(peer.both, job["repeat"]))


serve(prepare)
