"""SentencePiece's BPE of a GGUF file by its definition: of all neighbours, the pair whose piece has the highest score is merged."""

import gguf


class Pieces:
    """A tokenizer for a file of the kind `llama`, written without a tokenizer library; it takes quadratic time."""

    def __init__(self, reader: gguf.GGUFReader):
        field = lambda name: reader.fields[f"tokenizer.ggml.{name}"].contents()
        tokens, self.scores, kinds = field("tokens"), field("scores"), field("token_type")
        self.ids = {token: id for id, token in enumerate(tokens)}
        whole = {gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED}
        self.whole = {token for token, kind in zip(tokens, kinds) if kind in whole}
        self.longest = max(map(len, self.whole))
        self.begin = field("bos_token_id")
        self.prefix = "▁" if field("add_space_prefix") else ""

    def encode(self, text: str) -> list[int]:
        out, plain, at = [self.begin], "", 0
        while at < len(text):
            sizes = range(min(self.longest, len(text) - at), 0, -1)
            found = next((text[at : at + size] for size in sizes if text[at : at + size] in self.whole), None)
            if found is None:
                plain += text[at]
                at += 1
                continue
            out += self.merged(plain) + [self.ids[found]]
            plain, at = "", at + len(found)
        return out + self.merged(plain)

    def merged(self, text: str) -> list[int]:
        pieces = list(self.prefix + text.replace(" ", "▁")) if text else []
        while True:
            pairs = [(self.ids.get(a + b), i) for i, (a, b) in enumerate(zip(pieces, pieces[1:]))]
            pairs = [(self.scores[id], -i) for id, i in pairs if id is not None]
            if not pairs:
                break
            at = -max(pairs)[1]
            pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
        as_bytes = lambda piece: [self.ids[f"<0x{byte:02X}>"] for byte in piece.encode()]
        return [id for piece in pieces for id in ([self.ids[piece]] if piece in self.ids else as_bytes(piece))]
