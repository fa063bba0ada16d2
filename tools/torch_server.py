"""Answers `POST /v1/completions` with a model of Hugging Face on PyTorch, one request at a time, for `bench_serving.py --torch`.

It computes in f32, since PyTorch has no products with quantized matrices of GGUF files: these are dequantized when they are read.
"""

import http.server
import json
import pathlib


def serve(path: pathlib.Path, threads: int) -> None:
    """Prints `listening on URL`, and answers until the process ends."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    gguf = dict(gguf_file=path.name) if path.is_file() else {}
    folder = path.parent if path.is_file() else path
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **gguf).eval()

    def generate(prompt: list[int], count: int):
        tokens, cache = torch.tensor([prompt]), None
        for _ in range(count):
            output = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            tokens, cache = output.logits[:, -1].argmax(-1, keepdim=True), output.past_key_values
            yield int(tokens)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            for token in generate(body["prompt"], body["max_tokens"]):
                self.event(dict(choices=[dict(index=0, text=str(token))]))
            self.event(dict(choices=[], usage=dict(completion_tokens=body["max_tokens"])))

        def event(self, event: dict) -> None:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.flush()

        def log_message(self, *_) -> None:
            """Standard error is for failures."""

    class Server(http.server.HTTPServer):
        # Connections beyond this number would be refused while one request is answered.
        request_queue_size = 128

    server = Server(("127.0.0.1", 0), Handler)
    print(f"listening on http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()
