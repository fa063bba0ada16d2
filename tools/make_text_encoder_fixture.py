"""Makes UMT5's encoder with tiny random weights and a tiny Unigram tokenizer: the embeddings that transformers makes of prompts.

    pip install -r tools/requirements-video.txt && python tools/make_text_encoder_fixture.py

Writes crates/ringspan-video/tests/fixtures/text, or --out: the folders text_encoder and tokenizer of a pipeline, and
reference.json, which has prompts with their tokens; reference.safetensors has `embeds.N` [T,d], the last states of
the Nth prompt's tokens, padded to 512 and masked as in diffusers' WanPipeline, which puts zeros after them. The folder quantized has
another encoder, with the configuration of transformers and weights in a GGUF file with the names of llama.cpp, and the states
that transformers computes with these weights. The folder sentence_piece has a tokenizer in SentencePiece's own file, and
reference.json with the tokens that SentencePiece makes of texts.
"""

import argparse
import io
import json
import pathlib
import shutil
import tempfile

import gguf
import numpy as np
import sentencepiece
import torch
from safetensors.torch import save_file
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import UMT5Config, UMT5EncoderModel

OUT = pathlib.Path("crates/ringspan-video/tests/fixtures/text")
WORDS = "a cat and a dog are baking bread in the kitchen while it rains outside slowly".split()
# The prompts: one of a few words, one with white space and letters that the vocabulary lacks, one whose distances fall into all
# relative buckets, and one that is too long.
PROMPTS = ["a cat and a dog", "  The\tcat,\n 猫  bakes ", " ".join(WORDS * 12), "rain " * 600]
LENGTH = 512


def vocabulary() -> list[tuple[str, float]]:
    pieces = sorted({f"▁{word}" for word in WORDS} | set("▁abcdefghiklnorstuwTy,.") | {"in", "ing", "ai", "th"})
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    return special + [(piece, -2.0 - 0.05 * index - 3.0 / len(piece)) for index, piece in enumerate(pieces)]


def tokenizer() -> Tokenizer:
    made = Tokenizer(models.Unigram(vocabulary(), unk_id=2, byte_fallback=False))
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return made


@torch.no_grad()
def make(out: pathlib.Path) -> None:
    torch.manual_seed(5)
    made = tokenizer()
    config = UMT5Config(
        vocab_size=made.get_vocab_size(),
        d_model=20,
        d_kv=8,
        d_ff=36,
        num_heads=3,
        num_layers=2,
        feed_forward_proj="gated-gelu",
    )
    model = UMT5EncoderModel(config).eval()
    for name, parameter in model.named_parameters():
        parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    shutil.rmtree(out, ignore_errors=True)
    model.save_pretrained(out / "text_encoder")
    (out / "tokenizer").mkdir()
    made.save(str(out / "tokenizer/tokenizer.json"))
    tokens, embeds = [], {}
    for index, prompt in enumerate(PROMPTS):
        ids = made.encode(" ".join(prompt.split())).ids
        ids = ids if len(ids) <= LENGTH else ids[: LENGTH - 1] + ids[-1:]
        tokens.append(ids)
        padded = torch.zeros(1, LENGTH, dtype=torch.long)
        padded[0, : len(ids)] = torch.tensor(ids)
        mask = torch.arange(LENGTH)[None] < len(ids)
        states = model(padded, mask.long()).last_hidden_state[0, : len(ids)]
        embeds[f"embeds.{index}"] = states.contiguous()
    (out / "reference.json").write_text(json.dumps({"prompts": PROMPTS, "tokens": tokens}))
    save_file(embeds, out / "reference.safetensors")


# The types of quantized matrices, in turn.
TYPES = ["Q8_0", "Q4_0", "Q5_0", "F16"]


@torch.no_grad()
def make_quantized(out: pathlib.Path) -> None:
    torch.manual_seed(6)
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_heads": 2, "num_layers": 2}
    config = UMT5Config(vocab_size=tokenizer().get_vocab_size(), **sizes, feed_forward_proj="gated-gelu")
    model = UMT5EncoderModel(config).eval()
    for name, parameter in model.named_parameters():
        parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    config.architectures = ["UMT5EncoderModel"]
    config.save_pretrained(out)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.T5ENCODER, sizes["num_layers"])
    writer = gguf.GGUFWriter(str(out / "encoder.gguf"), "t5encoder")
    matrices = 0
    for name, parameter in sorted(model.named_parameters()):
        is_matrix = parameter.dim() == 2 and "relative_attention_bias" not in name
        kind = gguf.GGMLQuantizationType[TYPES[matrices % len(TYPES)] if is_matrix else "F32"]
        matrices += is_matrix
        values = gguf.quants.quantize(parameter.numpy().astype(np.float32), kind)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), values, raw_dtype=kind)
        parameter.copy_(torch.from_numpy(gguf.quants.dequantize(values, kind).astype(np.float32)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ids = tokenizer().encode(PROMPTS[2]).ids
    states = model(torch.tensor([ids])).last_hidden_state[0]
    (out / "reference.json").write_text(json.dumps({"tokens": ids}))
    save_file({"states": states.contiguous()}, out / "reference.safetensors")


# Rules of normalization: a wide A, a ligature of two letters, and a wide space.
RULES = "FF21\t61\nFB01\t66 69\n3000\t20\n"
# Texts with what the rules change, with a piece of the user, and with characters that are no piece.
TEXTS = PROMPTS + ["", "\uff21 \ufb01sh\u3000dog", "a<extra_id_0> cat<extra_id_0>", "\u732b\u732b a\u732b"]


def make_sentence_piece(out: pathlib.Path) -> None:
    """SentencePiece compiles the rules; the pieces are those of the other tokenizer, and one of the user."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    written = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder:
        rules = pathlib.Path(folder) / "rules.tsv"
        rules.write_text(RULES)
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(WORDS), model_writer=written, vocab_size=30, hard_vocab_limit=False, minloglevel=2,
            normalization_rule_tsv=str(rules), pad_id=0, eos_id=1, unk_id=2, bos_id=-1,
        )  # fmt: skip
    model = sentencepiece_model_pb2.ModelProto.FromString(written.getvalue())
    special = list(model.pieces)[:3]
    del model.pieces[:]
    model.pieces.extend(special)
    for text, score in vocabulary()[3:]:
        model.pieces.add(piece=text, score=score)
    model.pieces.add(piece="<extra_id_0>", score=0.0, type=model.SentencePiece.USER_DEFINED)
    model.trainer_spec.Clear()
    model.trainer_spec.pad_id, model.trainer_spec.eos_id, model.trainer_spec.unk_id = 0, 1, 2
    model.normalizer_spec.normalization_rule_tsv = ""
    (out / "spiece.model").write_bytes(model.SerializeToString(deterministic=True))
    made = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
    tokens = [made.encode(" ".join(text.split())) + [made.eos_id()] for text in TEXTS]
    (out / "reference.json").write_text(json.dumps({"texts": TEXTS, "tokens": tokens}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=OUT)
    out = parser.parse_args().out
    make(out)
    make_quantized(out / "quantized")
    make_sentence_piece(out / "sentence_piece")


if __name__ == "__main__":
    main()
