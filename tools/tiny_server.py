"""A tiny random model, and a server as a process, for the scripts that check servers."""

import json
import random
import struct
import subprocess
import sys
from contextlib import contextmanager

# Qwen's form without its words.
TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if tools %}<tool_call>{% endif %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def write_model(folder, positions=4096, window=None, chat=True):
    """Writes a tiny Llama, or, with a `window` of tokens, a Mistral with random weights for sequences of up to `positions` tokens, a
    tokenizer whose tokens are bytes, and, for a `chat`, a template."""
    hidden, width, heads, groups, head, layers, vocabulary = 32, 48, 4, 2, 8, 2, 259
    config = {
        "model_type": "mistral" if window else "llama", "sliding_window": window, "vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": width,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": head,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": positions, "tie_word_embeddings": True,
        "hidden_act": "silu", "eos_token_id": 256,
    }  # fmt: skip
    shapes = {"model.embed_tokens.weight": [vocabulary, hidden], "model.norm.weight": [hidden]}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        shapes |= {
            at + "input_layernorm.weight": [hidden],
            at + "post_attention_layernorm.weight": [hidden],
            at + "self_attn.q_proj.weight": [heads * head, hidden],
            at + "self_attn.k_proj.weight": [groups * head, hidden],
            at + "self_attn.v_proj.weight": [groups * head, hidden],
            at + "self_attn.o_proj.weight": [hidden, heads * head],
            at + "mlp.gate_proj.weight": [width, hidden],
            at + "mlp.up_proj.weight": [width, hidden],
            at + "mlp.down_proj.weight": [hidden, width],
        }
    draw, header, data = random.Random(5), {}, bytearray()
    for name, shape in shapes.items():
        values = [1.0] * shape[0] if len(shape) == 1 else [draw.gauss(0, 0.3) for _ in range(shape[0] * shape[1])]
        start = len(data)
        data += struct.pack(f"<{len(values)}f", *values)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, len(data)]}
    head_bytes = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(head_bytes)) + head_bytes + data)
    (folder / "config.json").write_text(json.dumps(config))
    if chat:
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = iter(range(0x100, 0x200))
    alphabet = {chr(byte if byte in printable else next(rest)): byte for byte in range(256)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    added = [
        {"id": 256 + i, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for i, text in enumerate(["<|im_end|>", "<|im_start|>", "<|endoftext|>"])
    ]
    model = {"type": "BPE", "vocab": alphabet, "merges": [], "fuse_unk": False, "byte_fallback": False}
    tokenizer = {"version": "1.0", "added_tokens": added, "pre_tokenizer": byte_level, "decoder": byte_level, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


@contextmanager
def server(command):
    """Starts a server and yields its address, which is the first line that it prints, and the number of its process."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        if not line.startswith("listening on http://"):
            sys.exit(f"{command[0]} prints {line!r} instead of its address")
        yield line.removeprefix("listening on ").strip(), process.pid
    finally:
        process.terminate()
        if process.wait(60) not in (0, -15):
            sys.exit(f"{command[0]} ended with {process.returncode}")
