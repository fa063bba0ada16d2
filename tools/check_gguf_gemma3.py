"""Compares what `ringspan score` and `ringspan serve` compute of a Gemma 3 GGUF file with transformers on the weights that the gguf
package decodes, and the tokens they make of texts with SentencePiece's rule: of all neighbours, the pair whose piece has the highest
score is merged first.

    pip install -r tools/requirements.txt
    python tools/check_gguf_gemma3.py path/to/ringspan path/to/gemma-3-270m-q4_k_m.gguf
"""

import argparse
import json
import pathlib
import subprocess
import tempfile
import urllib.request

import gguf
import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from sentence_pieces import Pieces
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

TEXTS = [
    "The capital of France is Paris, and its river is the Seine.",
    "  In 1984, 12345 foxes didn't jump;\n\n\tthey'd wait -- naïve, déjà vu!  ",
    "fn main() {\n    println!(\"{}\", x[17]);\n}\r\n",
    "<start_of_turn>user\nHi<end_of_turn>\n",
    "漢字 and e\u0301mojis 🦊🦊 \u0007 𒀀",
]
PARTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def model(reader: gguf.GGUFReader) -> Gemma3ForCausalLM:
    field = lambda name: reader.fields[f"gemma3.{name}"].contents()
    layers = field("block_count")
    config = Gemma3TextConfig(
        vocab_size=len(reader.fields["tokenizer.ggml.tokens"].contents()),
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=layers,
        num_attention_heads=field("attention.head_count"),
        num_key_value_heads=field("attention.head_count_kv"),
        head_dim=field("attention.key_length"),
        query_pre_attn_scalar=field("attention.key_length"),
        sliding_window=field("attention.sliding_window"),
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        layer_types=["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(layers)],
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": field("rope.freq_base")},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        attn_implementation="eager",
    )
    weights = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        values = values.reshape([int(size) for size in reversed(tensor.shape)])
        if tensor.name.endswith("norm.weight"):
            values = values - 1
        if tensor.name.startswith("blk."):
            _, layer, part, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{PARTS[part]}.weight"
        else:
            name = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[tensor.name]
        weights[name] = values
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    made = Gemma3ForCausalLM(config).eval()
    made.load_state_dict(weights)
    return made


def run(program: str, file: str, *flags: str) -> dict:
    out = pathlib.Path(tempfile.mkdtemp()) / "out.safetensors"
    subprocess.run([program, "score", "--model", file, *flags, "--out", str(out)], check=True)
    return load_file(out)


def prompt_logprobs(url: str, tokens: list[int]) -> list[float]:
    """The log-probabilities that a server gives of the tokens of a prompt, except the first."""
    body = json.dumps(dict(model="gemma", prompt=tokens, max_tokens=1, echo=True, logprobs=1, temperature=0)).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as response:
        return json.load(response)["choices"][0]["logprobs"]["token_logprobs"][1 : len(tokens)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program")
    parser.add_argument("file")
    args = parser.parse_args()
    reader = gguf.GGUFReader(args.file)
    made, pieces = model(reader), Pieces(reader)
    folder = pathlib.Path(tempfile.mkdtemp())
    command = [args.program, "serve", "--model", args.file, "--model-name", "gemma", "--port", "0", "--ring", "2"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        compare(args, made, pieces, folder, server.stdout.readline().split("listening on ")[1].strip())
    finally:
        server.terminate()
        server.wait(30)


def compare(args: argparse.Namespace, made: Gemma3ForCausalLM, pieces: Pieces, folder: pathlib.Path, url: str) -> None:
    for text in TEXTS:
        tokens = pieces.encode(text)
        save_file({"tokens": np.array([tokens], dtype=np.int64)}, folder / "tokens.safetensors")
        got = run(args.program, args.file, "--tokens", str(folder / "tokens.safetensors"), "--logits")
        with torch.no_grad():
            wanted = made(torch.tensor([tokens])).logits[0].numpy()
        error = np.linalg.norm(got["logits"][0] - wanted) / np.linalg.norm(wanted)
        assert error < 1e-5, f"{text!r}: logits are off by {error:.1e}"
        (folder / "text.txt").write_bytes(text.encode())
        of_text = run(args.program, args.file, "--text", str(folder / "text.txt"))["logprobs"]
        same = of_text.shape == got["logprobs"].shape and np.abs(of_text - got["logprobs"]).max() < 1e-3
        assert same, f"{text!r}: ringspan makes other tokens of it"
        # What the server says of a prompt, read over two ranks. PyTorch sums so many exponentials in f32 with errors of 1e-4.
        logprobs = torch.log_softmax(torch.from_numpy(wanted).double(), -1)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        off = (torch.tensor(prompt_logprobs(url, tokens)) - logprobs).abs().max().item()
        assert off < 1e-3, f"{text!r}: a log-probability of the server is off by {off:.1e}"
        print(f"{text!r}: {len(tokens)} tokens, logits differ by {error:.1e}, log-probabilities of a server by {off:.1e}")


if __name__ == "__main__":
    main()
