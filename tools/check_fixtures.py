"""Makes all fixtures again, in a temporary folder, and compares them with those in the tree.

    pip install -r tools/requirements-video.txt
    pip install --no-deps --target experts -r tools/requirements-experts.txt
    python tools/check_fixtures.py --experts experts

Files are equal bit for bit where the libraries' kernels give the same bits on this processor; tensors and the numbers in
JSON may differ by 1e-5 of the largest value (singular vectors, and what is computed with them, by 1e-4), and are then named. A script `tools/make_*.py` takes `--out FOLDER` and has a
row here; without `--out` it writes to the tree. The exit status counts the scripts that fail or make something else.
"""

import argparse
import concurrent.futures
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
from safetensors.numpy import load_file

TOOLS = pathlib.Path(__file__).resolve().parent
ROOT = TOOLS.parent
MODELS = ROOT / "crates/ringspan-models/tests/fixtures"
TRAIN = ROOT / "crates/ringspan-train/tests/fixtures"
VIDEO = ROOT / "crates/ringspan-video/tests/fixtures"
CANDLE = ROOT / "crates/ringspan-candle/tests/fixtures"
# For each script: its folder for `--out`, and the folders that it writes there.
SCRIPTS = {
    "make_model_fixtures.py": (MODELS, ["."]),
    "make_adapter_fixture.py": (MODELS, ["llama_lora", "adapters"]),
    "make_expert_adapter_fixture.py": (MODELS / "qwen3_moe_lora", ["."]),
    "make_gguf_fixtures.py": (MODELS / "gguf", ["."]),
    "make_gguf_family_fixtures.py": (MODELS / "gguf_families", ["."]),
    "make_training_fixture.py": (TRAIN / "ten_steps", ["."]),
    "make_chat_fixture.py": (TRAIN / "chat", ["."]),
    "make_video_fixture.py": (VIDEO / "transformer", ["."]),
    "make_video_lora_fixture.py": (VIDEO / "lora", ["."]),
    "make_video_training_fixture.py": (VIDEO / "training", ["."]),
    "make_quantized_fixture.py": (CANDLE / "quantized", ["."]),
    "make_text_encoder_fixture.py": (VIDEO / "text", ["."]),
    "make_video_vae_fixture.py": (VIDEO / "vae", ["."]),
    "make_tiny_decoder_fixture.py": (VIDEO / "tiny_decoder", ["."]),
    "make_video_pipeline_fixture.py": (VIDEO / "pipeline", ["."]),
    "make_video_gguf_fixture.py": (VIDEO / "gguf", ["."]),
}
# This script needs older packages than the others.
EXPERTS = "make_expert_adapter_fixture.py"
TOLERANCE = 1e-5
# PiSSA begins with singular vectors that PEFT computes in f32. If singular values are close to each other, the vectors
# depend on the rounding of the processor's kernels; differences of up to 2e-5 have been seen.
OF_SINGULAR_VECTORS = pathlib.Path("adapters/pissa_converted")
TOLERANCE_OF_SINGULAR_VECTORS = 1e-4


def json_difference(made, kept) -> float:
    """The largest relative distance of corresponding numbers in two JSON values; infinite if anything else differs."""
    if isinstance(made, dict) and isinstance(kept, dict) and list(made) == list(kept):
        return max((json_difference(made[key], kept[key]) for key in made), default=0.0)
    if isinstance(made, list) and isinstance(kept, list) and len(made) == len(kept):
        return max(map(json_difference, made, kept), default=0.0)
    if isinstance(made, float) and isinstance(kept, float):
        return abs(made - kept) / max(abs(kept), 1e-30)
    return 0.0 if made == kept and type(made) is type(kept) else math.inf


def tensors_difference(made: pathlib.Path, kept: pathlib.Path) -> float:
    """The largest distance of two elements, relative to the largest in their tensor; infinite if anything else differs."""
    ours, theirs = load_file(made), load_file(kept)
    if ours.keys() != theirs.keys():
        return math.inf
    worst = 0.0
    for name, a in ours.items():
        b = theirs[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            return math.inf
        if np.array_equal(a, b):
            continue
        if not np.issubdtype(a.dtype, np.floating):
            return math.inf
        a, b = a.astype(np.float64), b.astype(np.float64)
        found = np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)
        worst = max(worst, found if np.isfinite(found) else math.inf)
    return worst


def difference(made: pathlib.Path, kept: pathlib.Path) -> float:
    if made.read_bytes() == kept.read_bytes():
        return 0.0
    if made.suffix == ".safetensors":
        return tensors_difference(made, kept)
    if made.suffix == ".json":
        return json_difference(json.loads(made.read_text()), json.loads(kept.read_text()))
    return math.inf


def files(folder: pathlib.Path, root: pathlib.Path | None = None) -> set[pathlib.Path]:
    """All files of a folder, as paths from `root`, or from the folder itself."""
    return {path.relative_to(root or folder) for path in folder.rglob("*") if path.is_file()}


def compare(name: str, made: pathlib.Path) -> list[str]:
    """Differences between the files that a script made and the fixtures."""
    kept, folders = SCRIPTS[name]
    # Fixtures of other scripts may lie in the same folder.
    others = {root / folder for other, (root, folders) in SCRIPTS.items() if other != name for folder in folders}
    others = {other for other in others if any(kept / folder in other.parents for folder in folders)}
    made_here = {path for folder in folders for path in files(kept / folder, kept)}
    expected = {path for path in made_here if not any(other in (kept / path).parents for other in others)}
    problems = [f"{path} is made, but is not in the tree" for path in sorted(files(made) - expected)]
    problems += [f"{path} is in the tree, but is not made" for path in sorted(expected - files(made))]
    for path in sorted(expected & files(made)):
        found = difference(made / path, kept / path)
        of_vectors = OF_SINGULAR_VECTORS in path.parents
        if found > (TOLERANCE_OF_SINGULAR_VECTORS if of_vectors else TOLERANCE):
            problems.append(f"{path} differs" + (f" by {found:.1e}" if math.isfinite(found) else ""))
        elif found > 0:
            print(f"{name}: {path} differs by {found:.1e}, which the tolerance allows", flush=True)
    return problems


def kernels(name: str) -> dict[str, str]:
    """The setting of MKL's kernels with which a script's numbers are within the tolerance on Intel's processors.

    The fixtures were made on AMD's, as far as is known; a script that makes them anew on Intel's, without this setting, changes them.
    There, MKL takes other kernels by default, from which the gradients of
    `make_video_training_fixture.py` differ by 3e-5. Those for all processors give what the others do, save for the frames of
    one pipeline, which enlarge differences of the latents of 4e-6 to 1.5e-5: there, those for AVX2 are closer.
    """
    cpus = pathlib.Path("/proc/cpuinfo")
    if not cpus.exists() or "GenuineIntel" not in cpus.read_text():
        return {}
    return {"MKL_CBWR": "AVX2" if name == "make_video_pipeline_fixture.py" else "COMPATIBLE"}


def check(name: str, folder: pathlib.Path, experts: pathlib.Path) -> bool:
    out = folder / name.removesuffix(".py")
    environment = os.environ | kernels(name) | ({"PYTHONPATH": str(experts.resolve())} if name == EXPERTS else {})
    command = [sys.executable, str(TOOLS / name), "--out", str(out)]
    run = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if run.returncode:
        print(f"{name} failed:\n{run.stdout}", flush=True)
        return False
    problems = compare(name, out)
    print(f"{name}: " + ("; ".join(problems) or f"{len(files(out))} files as in the tree"), flush=True)
    return not problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=pathlib.Path, required=True, help="the folder of requirements-experts.txt")
    arguments = parser.parse_args()
    if unlisted := sorted({path.name for path in TOOLS.glob("make_*.py")} ^ SCRIPTS.keys()):
        parser.error(f"scripts and rows of this script's table do not match: {', '.join(unlisted)}")
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(lambda name: check(name, pathlib.Path(folder), arguments.experts), SCRIPTS))
    sys.exit(results.count(False))


if __name__ == "__main__":
    main()
