"""Prints what videos of WAN's models need on several meshes, from the plans of `ringspan denoise --dry-run`.

    pip install -r tools/requirements-video.txt
    cargo build --release
    python tools/plan_video.py target/release/ringspan

Of a model only the names and shapes of tensors are made: its file has holes instead of weights, and takes no space. A plan computes
nothing, so it can be made for many more ranks than the machine has.
"""

import argparse
import json
import pathlib
import re
import struct
import subprocess
import tempfile

import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import save_file

# Width is heads times 128.
MODELS = {
    "WAN 2.1 T2V 1.3B": {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30},
    "WAN 2.1 T2V 14B": {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40},
}
TINY = {"tiny": {"num_attention_heads": 2, "ffn_dim": 64, "num_layers": 2}}
# Frames, height and width of the videos, and (ring, ulysses) of the meshes.
VIDEOS = {"WAN 2.1 T2V 1.3B": [(33, 320, 576), (81, 480, 832)], "WAN 2.1 T2V 14B": [(81, 480, 832), (81, 720, 1280)]}
MESHES = [(1, 1), (1, 2), (1, 4), (2, 4), (4, 4)]
STEPS = 20


def write_model(folder: pathlib.Path, sizes: dict) -> None:
    """A model's folder whose tensors are bf16 and not written."""
    with torch.device("meta"):
        model = WanTransformer3DModel(cross_attn_norm=True, **sizes)
    model.save_config(folder)
    header, end = {}, 0
    for name, parameter in model.state_dict().items():
        begin, end = end, end + 2 * parameter.numel()
        header[name] = {"dtype": "BF16", "shape": list(parameter.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with open(folder / "diffusion_pytorch_model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def plan(program: str, folder: pathlib.Path, video: tuple, mesh: tuple) -> dict[str, str]:
    size = [word for name, value in zip(("--frames", "--height", "--width"), video) for word in (name, str(value))]
    flags = ["--steps", str(STEPS), "--guidance", "5", "--scheduler", "unipc", "--shift", "5", "--dtype", "bf16"]
    flags += ["--ring", str(mesh[0]), "--ulysses", str(mesh[1]), "--threads", "1", "--dry-run"]
    files = ["--model", folder, "--embeds", folder / "embeds.safetensors", "--out", folder / "out.safetensors"]
    made = subprocess.run([program, "denoise", *files, *size, *flags], check=True, capture_output=True, text=True).stdout
    tokens, of_rank = re.search(r"(\d+) tokens a video, (.+) a rank", made).groups()
    heads = re.search(r"heads +(.+) a Ulysses rank", made)[1]
    sent = sum(map(int, re.search(r"up to (\d+) bytes a rank and step in attention, (\d+) for", made).groups()))
    activations, weights = re.search(r"activations up to (.+) a rank, weights (.+)", made).groups()
    work = float(re.search(r"([\d.e+]+) floating-point operations in all steps", made)[1])
    return {
        "tokens": tokens, "tokens a rank": of_rank, "heads a rank": heads, "sent a rank and step": f"{sent / 1e6:.0f} MB",
        "activations a rank": activations, "weights": weights, "operations a step": f"{work / STEPS:.2e}",
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--tiny", action="store_true", help="one tiny model on two meshes")
    arguments = parser.parse_args()
    models, meshes = (TINY, MESHES[:2]) if arguments.tiny else (MODELS, MESHES)
    rows = []
    for name, sizes in models.items():
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            write_model(folder, sizes)
            embeds = torch.zeros(1, 512, 4096)
            save_file({"prompt_embeds": embeds, "negative_prompt_embeds": embeds.clone()}, folder / "embeds.safetensors")
            for video in VIDEOS.get(name, [(5, 32, 48)]):
                for mesh in meshes:
                    frames, height, width = video
                    head = {"model": name, "video": f"{frames} x {height} x {width}", "ring x ulysses": f"{mesh[0]} x {mesh[1]}"}
                    rows.append(head | plan(arguments.program, folder, video, mesh))
    for row in [dict(zip(rows[0], rows[0])), dict.fromkeys(rows[0], "---"), *rows]:
        print("|", " | ".join(row.values()), "|")


if __name__ == "__main__":
    main()
