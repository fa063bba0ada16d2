"""Makes whole pipelines with tiny random weights: the frames that diffusers makes of prompts and images.

    pip install -r tools/requirements-video.txt && python tools/make_video_pipeline_fixture.py

Writes crates/ringspan-video/tests/fixtures/pipeline, or --out: for each pipeline its transformers, its scheduler and model_index.json
as diffusers saves them, and reference.safetensors with `noise`, which `ringspan` draws for the seed, `latents` and `frames`. The text
encoder and the autoencoder are those of the fixtures text and vae. image.png and last.png are given frames; resized.png is the
first one as diffusers resizes it. Pipelines of WAN 2.1 with images have image_encoder and image_processor, too, and their references
`pixels`, which the encoder takes, and `image_embeds`; `square_embeds` are of square.png, which is not resized. That of VACE has the
frames of its control and its mask in the folders control and mask; its references are image.png and upright.png.

The slices that diffusers' own tests publish are of a text encoder that these download; here all components are drawn, and frames are
compared whole.
"""

import argparse
import json
import math
import pathlib
import shutil

import numpy as np
import PIL.Image
import torch
from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanVACEPipeline,
    WanVACETransformer3DModel,
)
from diffusers.pipelines.wan import pipeline_wan, pipeline_wan_i2v, pipeline_wan_vace
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import CLIPVisionConfig, CLIPVisionModel, PreTrainedTokenizerFast, UMT5EncoderModel
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from make_video_fixture import randomised, saved, transformer

# Without ftfy, which repairs nothing in these prompts, the pipelines of images fail, and that of prompts does without.
pipeline_wan_i2v.prompt_clean = pipeline_wan_vace.prompt_clean = pipeline_wan.prompt_clean

ROOT = pathlib.Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "crates/ringspan-video/tests/fixtures"
PROMPT, NEGATIVE = "a cat and a dog are baking bread", "rain"
SEED = 7
# Frames, height and width: 18 tokens, which no number of ranks but 2, 3, 6 and 9 divides.
SIZE = (9, 32, 48)
MASK = (1 << 32) - 1


def chacha8(seed: int, count: int) -> list[int]:
    """The first `count` 64-bit numbers of the generator ChaCha8 of Rust's rand_chacha, of a seed of 64 bits."""
    state, key = seed, []
    for _ in range(8):
        state = (state * 6364136223846793005 + 11634580027462260723) % (1 << 64)
        word, turn = (((state >> 18) ^ state) >> 27) & MASK, state >> 59
        key.append(((word >> turn) | (word << (32 - turn))) & MASK)
    constants = [0x61707865, 0x3320646E, 0x79622D32, 0x6B206574]
    words = []
    for block in range(math.ceil(count / 8)):
        start = constants + key + [block & MASK, block >> 32, 0, 0]
        x = list(start)

        def quarter(a: int, b: int, c: int, d: int) -> None:
            for i, j, k, turn in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
                x[i] = (x[i] + x[j]) & MASK
                mixed = x[k] ^ x[i]
                x[k] = ((mixed << turn) | (mixed >> (32 - turn))) & MASK

        for _ in range(4):
            for column in range(4):
                quarter(column, column + 4, column + 8, column + 12)
            for a, b, c, d in ((0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14)):
                quarter(a, b, c, d)
        words += [(a + b) & MASK for a, b in zip(x, start)]
    return [words[2 * i] | words[2 * i + 1] << 32 for i in range(count)]


def noise(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    """The noise that `ringspan` draws: one normal number of each pair of uniform ones, by Box and Muller."""
    count = math.prod(shape)
    bits = np.array(chacha8(seed, 2 * count), dtype=np.uint64)
    uniform = ((bits >> np.uint64(11)).astype(np.float64) + 1) / 2**53
    normal = np.sqrt(-2 * np.log(uniform[0::2])) * np.cos(2 * np.pi * uniform[1::2])
    return torch.from_numpy(normal.astype(np.float32)).reshape(shape)


def picture(height: int, width: int, phase: float) -> PIL.Image.Image:
    """A picture of waves of three colors, with sharp edges."""
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    waves = [np.sin(x / 3 + phase), np.sin(y / 4 - phase), np.sign(np.sin((x + y) / 5 + phase))]
    return PIL.Image.fromarray(np.round((np.stack(waves, -1) + 1) * 127.5).astype(np.uint8))


def components(vae: str, steps: dict) -> dict:
    tokenizer = Tokenizer.from_file(str(FIXTURES / "text/tokenizer/tokenizer.json"))
    return {
        "tokenizer": PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>"),
        "text_encoder": UMT5EncoderModel.from_pretrained(FIXTURES / "text/text_encoder").eval(),
        "vae": AutoencoderKLWan.from_pretrained(FIXTURES / "vae" / vae).eval(),
        "scheduler": UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, **steps
        ),
    }


def image_encoder(seed: int, hidden_act: str) -> dict:
    """An encoder of images of 28 x 28 in 16 patches, with the preprocessing of its images."""
    sizes = {"hidden_size": 8, "intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = CLIPVisionConfig(**sizes, image_size=28, patch_size=7, hidden_act=hidden_act)
    model = randomised(CLIPVisionModel(config), seed)
    processor = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    return {"image_encoder": model, "image_processor": processor}


def save_image_encoder(folder: pathlib.Path, pipeline, images: list) -> dict[str, torch.Tensor]:
    """Saves the encoder as released pipelines have it, and returns what it takes and gives."""
    saved(pipeline.image_encoder, folder / "image_encoder", True)
    pipeline.image_processor.save_pretrained(folder / "image_processor")
    config = folder / "image_processor/preprocessor_config.json"
    settings = json.loads(config.read_text()) | {"image_processor_type": "CLIPImageProcessor"}
    config.write_text(json.dumps(settings, indent=1) + "\n")
    square = picture(28, 28, 0.9)
    square.save(folder / "square.png")
    pixels = pipeline.image_processor(images=images, return_tensors="pt")["pixel_values"]
    of_square = {"square_embeds": pipeline.encode_image(square, "cpu")}
    return {"pixels": pixels, "image_embeds": pipeline.encode_image(images, "cpu")} | of_square


def save(folder: pathlib.Path, pipeline, vae: str, **of_call) -> None:
    """Saves what is not in other fixtures, and the latents and frames of four steps."""
    names = [name for name in ("transformer", "transformer_2") if getattr(pipeline, name, None) is not None]
    for name in names:
        saved(getattr(pipeline, name), folder / name, True)
    pipeline.scheduler.save_pretrained(folder / "scheduler")
    settings = {"_class_name": type(pipeline).__name__, "boundary_ratio": pipeline.config.boundary_ratio}
    index = settings | {"expand_timesteps": getattr(pipeline.config, "expand_timesteps", False), "vae": vae}
    (folder / "model_index.json").write_text(json.dumps(index, indent=1) + "\n")
    frames, height, width = of_call.pop("size", SIZE)
    config = pipeline.vae.config
    space, time = config.scale_factor_spatial, config.scale_factor_temporal
    references = len(of_call.get("reference_images", []))
    start = noise(SEED, (1, config.z_dim, references + (frames - 1) // time + 1, height // space, width // space))
    call = of_call | {"prompt": PROMPT, "negative_prompt": NEGATIVE, "num_inference_steps": 4, "max_sequence_length": 512}
    call |= {"height": height, "width": width, "num_frames": frames}
    pipeline.set_progress_bar_config(disable=True)
    latents = pipeline(**call, latents=start.clone(), output_type="latent").frames
    video = pipeline(**call, latents=start.clone(), output_type="pt").frames
    video = (video * 2 - 1).transpose(1, 2)
    inside = (video.abs() < 1).float().mean()
    assert inside > 0.9, f"only {inside:.0%} of the elements are not clamped, so a test would see little"
    tensors = {"noise": start, "latents": latents, "frames": video}
    if getattr(pipeline, "image_encoder", None) is not None:
        images = [of_call[name] for name in ("image", "last_image") if name in of_call]
        tensors |= save_image_encoder(folder, pipeline, images)
    save_file({name: tensor.float().contiguous() for name, tensor in tensors.items()}, folder / "reference.safetensors")


def text_to_video(out: pathlib.Path) -> None:
    """WAN 2.2's two transformers, each with its guidance."""
    models = [transformer(seed, in_channels=16, out_channels=16, text_dim=20, freq_dim=32) for seed in (71, 72)]
    pipeline = WanPipeline(
        **components("tiny", {"flow_shift": 3.0}), transformer=models[0], transformer_2=models[1], boundary_ratio=0.875
    )
    save(out / "t2v", pipeline, "tiny", guidance_scale=4.0, guidance_scale_2=3.0)


def image_to_video(out: pathlib.Path) -> None:
    """WAN 2.2's conditioning by latents of a first and a last image, which are resized."""
    model = transformer(73, in_channels=36, out_channels=16, text_dim=20, freq_dim=32, num_layers=1)
    pipeline = WanImageToVideoPipeline(**components("tiny", {"flow_shift": 5.0}), transformer=model)
    images = {"image": picture(41, 57, 0.3), "last_image": picture(20, 24, 1.7)}
    out.mkdir(parents=True, exist_ok=True)
    images["image"].save(out / "image.png")
    images["last_image"].save(out / "last.png")
    pipeline.video_processor.resize(images["image"], SIZE[1], SIZE[2]).save(out / "resized.png")
    save(out / "i2v", pipeline, "tiny", guidance_scale=3.5, **images)


def encoded_image(out: pathlib.Path) -> None:
    """WAN 2.1's conditioning by the embeddings of an image, beside its latents."""
    sizes = {"in_channels": 36, "out_channels": 16, "text_dim": 20, "freq_dim": 32, "image_dim": 8, "added_kv_proj_dim": 24}
    pipeline = WanImageToVideoPipeline(
        **components("tiny", {"flow_shift": 3.0}), **image_encoder(81, "gelu"), transformer=transformer(75, **sizes, num_layers=1)
    )
    save(out / "i2v_2.1", pipeline, "tiny", guidance_scale=3.5, image=picture(41, 57, 0.3))


def encoded_images(out: pathlib.Path) -> None:
    """The same with a first and a last image, whose embeddings have positions; one image is upright, the other is not."""
    sizes = {"in_channels": 36, "out_channels": 16, "text_dim": 20, "freq_dim": 32, "image_dim": 8, "added_kv_proj_dim": 24}
    model = transformer(76, **sizes, num_layers=1, pos_embed_seq_len=34)
    pipeline = WanImageToVideoPipeline(
        **components("tiny", {"flow_shift": 16.0}), **image_encoder(82, "quick_gelu"), transformer=model
    )
    images = {"image": picture(41, 57, 0.3), "last_image": picture(61, 40, 2.3)}
    images["last_image"].save(out / "upright.png")
    save(out / "flf2v", pipeline, "tiny", guidance_scale=3.5, **images)


def first_frame(out: pathlib.Path) -> None:
    """The 5B model's way: the first frame is given, and time steps are those of tokens."""
    model = transformer(74, in_channels=4, out_channels=4, text_dim=20, freq_dim=32, num_layers=1)
    parts = components("residual", {"flow_shift": 5.0})
    pipeline = WanImageToVideoPipeline(**parts, transformer=model, expand_timesteps=True)
    save(out / "ti2v", pipeline, "residual", size=(5, 64, 64), guidance_scale=3.5, image=picture(41, 57, 0.3))


def controlled(out: pathlib.Path) -> None:
    """VACE: frames of which a mask keeps a part, and two references, one of them upright."""
    sizes = {"in_channels": 16, "out_channels": 16, "text_dim": 20, "freq_dim": 32, "vace_layers": [0], "vace_in_channels": 96}
    model = transformer(77, WanVACETransformer3DModel, **sizes, num_layers=2)
    pipeline = WanVACEPipeline(**components("tiny", {"flow_shift": 3.0}), transformer=model)
    frames, height, width = SIZE
    video = [picture(height, width, 0.4 * frame) for frame in range(frames)]
    # A dark gray, which is kept, and a bright one, which is not; their levels also are what the transformer sees.
    y, x = np.mgrid[0:height, 0:width]
    levels = [np.where(abs(x - 5 * frame) + abs(y - 16) < 14, 255 - 10 * frame, 12 * frame) for frame in range(frames)]
    mask = [PIL.Image.fromarray(level.astype(np.uint8)).convert("RGB") for level in levels]
    for name, pictures in {"control": video, "mask": mask}.items():
        (out / "vace" / name).mkdir(parents=True)
        for number, of_frame in enumerate(pictures):
            of_frame.save(out / "vace" / name / f"{number}.png")
    references = [picture(41, 57, 0.3), picture(61, 40, 2.3)]
    control = {"video": video, "mask": mask, "reference_images": references, "conditioning_scale": 0.7}
    save(out / "vace", pipeline, "tiny", guidance_scale=3.5, **control)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=FIXTURES / "pipeline")
    out = parser.parse_args().out
    shutil.rmtree(out, ignore_errors=True)
    for make in (text_to_video, image_to_video, encoded_image, encoded_images, first_frame, controlled):
        make(out)


if __name__ == "__main__":
    main()
