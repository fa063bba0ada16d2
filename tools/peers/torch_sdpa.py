"""PyTorch's scaled_dot_product_attention on the CPU."""

import pathlib

import tensors
from worker import Peer, serve


def prepare(job: dict) -> Peer:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    torch.set_num_threads(job["threads"])
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[job["dtype"]]
    given = tensors.read(pathlib.Path(job["input"]))
    # [B, S, H, D] in the file, [B, H, S, D] here.
    tensor = {name: torch.tensor(values).to(dtype).transpose(1, 2).contiguous() for name, values in given.items()}
    d_out = tensor.pop("d_out")
    q, k, v = (tensor[name].requires_grad_() for name in "qkv")
    groups = q.shape[1] // k.shape[1]
    causal = job["mask"] == "causal"

    def grouped() -> torch.Tensor:
        return sdpa(q, k, v, is_causal=causal, enable_gqa=groups > 1)

    def repeated() -> torch.Tensor:
        wide = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        return sdpa(q, *wide, is_causal=causal)

    def timed(attend) -> Peer:
        def forward() -> None:
            with torch.no_grad(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                attend()

        def both() -> torch.Tensor:
            q.grad = k.grad = v.grad = None
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                out = attend()
                out.backward(d_out)
            return out.detach()

        def results() -> dict:
            values = dict(out=both(), dq=q.grad, dk=k.grad, dv=v.grad)
            return {name: x.transpose(1, 2).float().numpy() for name, x in values.items()}

        how = "flash" if groups == 1 else "flash, enable_gqa" if attend is grouped else "flash, k and v repeated"
        return Peer(torch.__version__, how, forward, both, results)

    # Without its fused kernel it would keep all S x S scores; where that kernel refuses groups, keys are repeated.
    try:
        peer = timed(grouped)
        peer.both()
        return peer
    except RuntimeError:
        return timed(repeated)


serve(prepare)
