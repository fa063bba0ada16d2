"""Makes a tiny GGUF file of each family that ringspan reads, with matrices in several formats, and transformers' logits for the
weights that the gguf package decodes from it; and a tokenizer of SentencePiece's kind with texts and their tokens.

    pip install -r tools/requirements.txt && python tools/make_gguf_family_fixtures.py

The names and changes of tensors are those of llama.cpp's converter: rows of queries and keys permuted (Llama, Granite,
SmolLM3), 1 added to the weights of norms (Gemma), experts stacked, gate and up of gpt-oss's experts taken apart, and of
DeepSeek's the part of `kv_b_proj` that makes keys transposed.
"""

import argparse
import json
import pathlib

import gguf
import numpy as np
import torch
from safetensors.numpy import save_file
from sentence_pieces import Pieces
from tiny_gguf_families import ARCHITECTURES, COMMON, FACTORS, FAMILIES, NEIGHBOURS, SIZES, WHOLE
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoConfig

FIXTURES = pathlib.Path("crates/ringspan-models/tests/fixtures/gguf_families")
FORMATS = ["Q8_0", "Q4_0", "BF16", "Q5_0", "F16", "IQ4_NL", "Q4_1"]


def pairs_together(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorders rows: the two rows of a rotary pair are half a head apart, and llama.cpp wants them side by side."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def halves_together(weight: np.ndarray, heads: int) -> np.ndarray:
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


def encoded(values: np.ndarray, kind: str, random: np.random.Generator) -> np.ndarray:
    """Encodes values in a format; the gguf package cannot encode IQ4_NL, so its codes are random."""
    if kind != "IQ4_NL":
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    blocks = values.size // 32
    scale = random.uniform(0.0005, 0.002, (blocks, 1)).astype(np.float16).view(np.uint8)
    codes = random.integers(0, 256, (blocks, 16), dtype=np.uint8)
    return np.concatenate([scale, codes], axis=1).reshape(*values.shape[:-1], -1)


def transposed(values: np.ndarray) -> np.ndarray:
    return np.swapaxes(values, 1, 2)


def pieces_of(name: str, part: str, suffix: str, values: np.ndarray, names: dict, config) -> tuple[list, callable]:
    """The stored tensors of a layer's parameter, as names and values, and a function from these values to the parameter."""
    path = f"{part}.{suffix}"
    if path == "mlp.experts.gate_up_proj" and name == "gpt-oss":
        rows = transposed(values)
        pieces = [("ffn_gate_exps.weight", rows[:, ::2]), ("ffn_up_exps.weight", rows[:, 1::2])]
        return pieces, lambda both: transposed(np.stack(both, axis=2).reshape(rows.shape))
    if path == "mlp.experts.gate_up_proj_bias":
        pieces = [("ffn_gate_exps.bias", values[:, ::2]), ("ffn_up_exps.bias", values[:, 1::2])]
        return pieces, lambda both: np.stack(both, axis=2).reshape(values.shape)
    if path == "mlp.experts.gate_up_proj":
        halves = zip(["ffn_gate_exps.weight", "ffn_up_exps.weight"], np.split(values, 2, axis=1))
        return list(halves), lambda both: np.concatenate(both, axis=1)
    if path == "mlp.experts.down_proj" and name == "gpt-oss":
        return [(WHOLE[path], transposed(values))], lambda one: transposed(one[0])
    if part == "self_attn.kv_b_proj" and name in ("deepseek2-lite", "deepseek3"):
        heads = values.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
        keys, rest = np.split(heads, [config.qk_nope_head_dim], axis=1)
        pieces = [("attn_k_b.weight", transposed(keys)), ("attn_v_b.weight", rest)]
        return pieces, lambda both: np.concatenate([transposed(both[0]), both[1]], axis=1).reshape(values.shape)
    stored = WHOLE.get(path) or f"{(COMMON | names)[part]}.{suffix}"
    return [(stored, values)], lambda one: one[0]


def format_of(name: str, stored: str, count: int) -> str:
    """A tensor's format: MXFP4 for experts in the first layer of gpt-oss; 16 bits for both parts of latent heads, or neither."""
    if name == "gpt-oss" and stored.startswith("blk.0.") and "_exps" in stored:
        return "MXFP4"
    if name == "deepseek2-lite" and stored.endswith(("k_b.weight", "v_b.weight")):
        return "BF16" if stored.startswith("blk.0.") else "F16"
    return FORMATS[count % len(FORMATS)]


def write_model(name: str, out: pathlib.Path) -> None:
    model_type, keys, names, metadata = FAMILIES[name]
    config = AutoConfig.for_model(model_type, **(SIZES | keys), attn_implementation="eager")
    torch.manual_seed(len(name))
    random = np.random.default_rng(len(name))
    model = AutoModelForCausalLM.from_config(config).eval()
    architecture = ARCHITECTURES.get(name, name)
    writer = gguf.GGUFWriter(out / f"{name}.gguf", architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(metadata.get("attention.head_count_kv", config.num_key_value_heads))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for key, value in ({"rope.freq_base": 10000.0} | metadata).items():
        kinds = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, bool: writer.add_bool}
        if key != "attention.head_count_kv":
            kinds[type(value)](f"{architecture}.{key}", value)
    if name == "phi3":
        for kind in ["short", "long"]:
            writer.add_tensor(f"rope_factors_{kind}.weight", np.array(FACTORS[f"{kind}_factor"], dtype=np.float32))
    tied, changed, count = config.tie_word_embeddings, {}, 0
    for path, values in model.state_dict().items():
        if path == "lm_head.weight" and tied:
            continue
        values = (torch.randn(values.shape) * 0.15).numpy()
        if path.endswith("norm.weight") and not name.startswith("gemma"):
            values = values + 1
        part, _, suffix = path.removeprefix("model.").rpartition(".")
        stored = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}.get(part)
        pieces, join = [(f"{stored}.{suffix}", values)], lambda one: one[0]
        if stored is None:
            _, layer, part = part.split(".", 2)
            pieces, join = pieces_of(name, part, suffix, values, names, config)
            pieces = [(f"blk.{layer}.{stored}", values) for stored, values in pieces]
        decoded = []
        for stored, values in pieces:
            heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(part.split(".")[-1])
            if name in NEIGHBOURS and heads:
                values = pairs_together(values, heads)
            if name.startswith("gemma") and path.endswith("norm.weight"):
                values = values + 1
            values = np.ascontiguousarray(values, dtype=np.float32)
            if values.ndim == 1 or part in ("mlp.gate", "mlp.router") or stored.endswith("bias"):
                writer.add_tensor(stored, values)
            else:
                kind, count = format_of(name, stored, count), count + 1
                raw = encoded(values, kind, random)
                writer.add_tensor(stored, raw, raw_dtype=gguf.GGMLQuantizationType[kind])
                values = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]).reshape(values.shape)
            if name.startswith("gemma") and path.endswith("norm.weight"):
                values = values - 1
            if name in NEIGHBOURS and heads:
                values = halves_together(values, heads)
            decoded.append(values)
        changed[path] = torch.from_numpy(np.ascontiguousarray(join(decoded)))
    if tied:
        changed["lm_head.weight"] = changed["model.embed_tokens.weight"]
    close(writer)
    model.load_state_dict(changed)
    tokens = torch.arange(3, 27)[None] * 7 % config.vocab_size
    with torch.no_grad():
        logits = model(tokens, use_cache=False).logits[0].float().numpy()
    save_file({"tokens": tokens[0].to(torch.int32).numpy(), "logits": logits}, out / f"{name}.safetensors")
    print(f"{name}: {count} matrices, {(out / f'{name}.gguf').stat().st_size} bytes, logits near {np.abs(logits).mean():.2f}")


TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "  In 1984, 12345 foxes didn't jump;\n\n\tthey'd wait -- naïve, déjà vu!  ",
    "<turn>The fox\n\nand   the dog<end>\n",
    "漢字 and e\u0301mojis 🦊🦊",
]


def write_tokenizer(name: str, prefix: bool, out: pathlib.Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    trainer = trainers.BpeTrainer(vocab_size=160, show_progress=False)
    tokenizer.train_from_iterator([text for text in TEXTS[:2] if text] * 3, trainer)
    trained = json.loads(tokenizer.to_str())["model"]
    merged = ["".join(pair) for pair in trained["merges"]]
    letters = [token for token in sorted(trained["vocab"]) if token not in merged]
    kinds = gguf.TokenType
    tokens = [("<unk>", 0.0, kinds.UNKNOWN), ("<s>", 0.0, kinds.CONTROL), ("<end>", 0.0, kinds.CONTROL)]
    tokens += [("<turn>", 0.0, kinds.USER_DEFINED), ("\n\n", 0.0, kinds.USER_DEFINED)]
    tokens += [(f"<0x{byte:02X}>", 0.0, kinds.BYTE) for byte in range(256)]
    tokens += [(piece, -float(rank), kinds.NORMAL) for rank, piece in enumerate(dict.fromkeys(merged + letters + ["▁"]))]
    path = out / f"tokenizer-{name}.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([text for text, _, _ in tokens])
    writer.add_token_scores([score for _, score, _ in tokens])
    writer.add_token_types([kind for _, _, kind in tokens])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_space_prefix(prefix)
    writer.add_chat_template("{{ bos_token }}{% for message in messages %}<turn>{{ message['content'] }}{% endfor %}")
    close(writer)
    pieces = Pieces(gguf.GGUFReader(path))
    wanted = [dict(text=text, tokens=pieces.encode(text)) for text in TEXTS]
    (out / f"tokenizer-{name}.json").write_text(json.dumps(wanted, indent=1) + "\n")
    print(f"tokenizer-{name}: {len(tokens)} tokens, {[len(one['tokens']) for one in wanted]}")


def close(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=FIXTURES)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for name in FAMILIES:
        write_model(name, out)
    for name, prefix in [("gemma", False), ("llama", True)]:
        write_tokenizer(name, prefix, out)


if __name__ == "__main__":
    main()
