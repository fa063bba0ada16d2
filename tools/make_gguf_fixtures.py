"""Makes GGUF files of the tiny models that make_model_fixtures.py makes, and of tokenizers.

    pip install -r tools/requirements.txt && python tools/make_gguf_fixtures.py

crates/ringspan-models/tests/fixtures/gguf gets one file a model, which transformers reads back to the same logits, and
for each kind of tokenizer a file without tensors, and texts with their tokens by the tokenizers library.
"""

import argparse
import json
import pathlib

import gguf
import numpy as np
import torch
from safetensors.numpy import load_file
from tiny_gguf_families import COMMON
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM

FIXTURES = pathlib.Path("crates/ringspan-models/tests/fixtures")

# For each model, the type in which its matrices are stored; norms and biases stay in f32.
MODELS = {"llama_tied": "F32", "qwen2": "Q8_0", "qwen3": "F16"}

NAMES = COMMON | {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}

# The patterns by which each model splits text into words, one after the other. Those of Llama and Qwen differ in runs of digits;
# the letters of DeepSeek-V2 are those with a case in the Unicode version of its time.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CASED = (
    "[\\p{Lu}\\p{Ll}\\p{Lt}&&[^\u2d00-\u2d2d\ua790-\ua7ff\uab30-\uab69\U00010570-\U000105bf\U00016e40-\U0001dfff]]"
)
PATTERNS = {
    "llama-bpe": [WORDS.replace("DIGITS", r"\p{N}{1,3}")],
    "qwen2": [WORDS.replace("DIGITS", r"\p{N}")],
    "deepseek-llm": [
        r"[\r\n]",
        r"\s?" + CASED + "+",
        "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
        r"\s+$",
        "[一-龥\u0800-一가-\ud7ff]+",
        r"\p{N}",
    ],
    "deepseek-v3": [
        r"\p{N}{1,3}",
        "[一-龥\u3040-\u309f\u30a0-\u30ff]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
}
ARCHITECTURES = {"llama-bpe": "llama", "qwen2": "qwen2"}
TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "  In 1984, 12345 foxes didn't jump;\n\n\tthey'd wait -- naïve, déjà vu!  ",
    "fn main() { println!(\"{}\", x[17]); }\r\n",
    "<|begin|>The fox<|end|>",
    "漢字 and e\u0301mojis 🦊🦊",
]
# Texts that only DeepSeek's patterns split differently: kana, letters with a case, symbols before letters.
MORE_TEXTS = ["これはペンです。 漢字カナ: 20000x", "(if) ⴀⴁ 𝐀b Ǆ ƻ ʰ, ѐ! \u3000“quoted”  ", "a_b.c+=d $x\n\n  end  "]


def pairs_together(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorders rows: the two rows of a rotary pair are half a head apart, and llama.cpp wants them side by side."""
    rows = weight.shape[0]
    halves = weight.reshape(heads, 2, rows // heads // 2, -1)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def write_model(name: str, kind: str, out: pathlib.Path) -> None:
    folder = FIXTURES / name
    config = json.loads((folder / "config.json").read_text())
    model = config["model_type"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(out / f"{name}.gguf", model)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    if model == "llama":
        writer.add_rope_dimension_count(dim)
    if "head_dim" in config:
        writer.add_key_length(dim)
        writer.add_value_length(dim)
    for tensor_name, weight in load_file(folder / "model.safetensors").items():
        path, suffix = tensor_name.rsplit(".", 1)
        if path.startswith("model.layers."):
            _, _, layer, part = path.split(".", 3)
            stored = f"blk.{layer}.{NAMES[part]}.{suffix}"
            if model == "llama" and part.endswith(("q_proj", "k_proj")):
                weight = pairs_together(weight, heads if part.endswith("q_proj") else kv_heads)
        else:
            stored = f"{NAMES[path]}.{suffix}"
        # Blocks of 32 in a row are quantised together.
        if weight.ndim == 1 or kind == "F32" or (kind == "Q8_0" and weight.shape[1] % 32):
            writer.add_tensor(stored, weight)
        elif kind == "F16":
            writer.add_tensor(stored, weight.astype(np.float16))
        else:
            quantised = gguf.quants.quantize(weight, gguf.GGMLQuantizationType[kind])
            writer.add_tensor(stored, quantised, raw_dtype=gguf.GGMLQuantizationType[kind])
    close(writer)

    tokens = torch.arange(3, 40)[None]
    # Transformers does not read the width of Qwen3's heads from the file.
    own = dict(config=AutoConfig.from_pretrained(folder), attn_implementation="eager")
    logits = [
        AutoModelForCausalLM.from_pretrained(place, **own, **more)(tokens).logits
        for place, more in [(folder, {}), (out, dict(gguf_file=f"{name}.gguf", dtype=torch.float32))]
    ]
    error = ((logits[0] - logits[1]).norm() / logits[0].norm()).item()
    assert error < {"F32": 1e-6, "F16": 1e-2, "Q8_0": 5e-2}[kind], f"{name}: transformers reads {error} other logits"
    print(f"{name}: {kind}, logits differ by {error:.1e}")


def write_tokenizer(kind: str, out: pathlib.Path) -> None:
    tokenizer = Tokenizer(models.BPE(ignore_merges=kind == "llama-bpe"))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PATTERNS[kind]]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    size = 600 if kind.startswith("deepseek") else 330
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    texts = TEXTS + (MORE_TEXTS if kind.startswith("deepseek") else [])
    tokenizer.train_from_iterator(texts * 3, trainer)
    special = ["<|begin|>", "<|end|>"]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    begin, end = (tokenizer.token_to_id(token) for token in special)
    begins = kind != "qwen2"
    if begins:
        tokenizer.post_processor = processors.TemplateProcessing("<|begin|> $0", special_tokens=[("<|begin|>", begin)])

    by_id = sorted((id, token) for token, id in tokenizer.get_vocab().items())
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer = gguf.GGUFWriter(out / f"tokenizer-{kind}.gguf", ARCHITECTURES.get(kind, "deepseek2"))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(kind)
    writer.add_token_list([token for _, token in by_id])
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control if token in special else normal for _, token in by_id])
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(begin)
    writer.add_eos_token_id(end)
    if kind.startswith("deepseek"):
        writer.add_add_bos_token(True)
    close(writer)
    wanted = [dict(text=text, tokens=tokenizer.encode(text).ids) for text in texts]
    for entry in wanted:
        entry["decoded"] = tokenizer.decode(entry["tokens"])
    (out / f"tokenizer-{kind}.json").write_text(json.dumps(wanted, indent=1) + "\n")
    print(f"tokenizer-{kind}: {len(by_id)} tokens")


def close(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=FIXTURES / "gguf")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for name, kind in MODELS.items():
        write_model(name, kind, out)
    for kind in PATTERNS:
        write_tokenizer(kind, out)


if __name__ == "__main__":
    main()
