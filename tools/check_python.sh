#!/usr/bin/env bash
# Runs the Python scripts of this folder that call Ringspan, each in its smallest form, with binaries in the test profile, and
# checks that they work and that the results they compare agree. The speeds they print mean nothing.
set -euo pipefail
cd "$(dirname "$0")/.."

. tools/python_env.sh
"$python" tools/check_module_cycles.py
# Builds the binary as part of the tests: built alone, dependencies would get other features and be compiled again.
cargo test --workspace --no-run --quiet
ringspan=$target/debug/ringspan
"$python" tools/check_attend.py "$ringspan" --calls 60 --seed 1
"$python" tools/bench_peers.py --binary "$ringspan" --cases tiny --masks causal,full --dtype f32,bf16 --threads 1 --rings 2 \
  --peers torch,jax,alone --rounds 1 --repeat 1
"$python" tools/bench_training.py --profile test --tiny --lengths 64 --threads 2 --ranks 2 --rounds 1
"$python" tools/bench_video.py "$ringspan" --tiny --rounds 1
"$python" tools/plan_video.py "$ringspan" --tiny
# The pictures in docs/video.md.
"$python" tools/draw_video.py --out "$target/video-ranks.svg" && cmp "$target/video-ranks.svg" docs/video-ranks.svg
"$ringspan" draw --ring 2 --ulysses 2 --layout contiguous --mask full --tokens 180 --heads 12 --kv-heads 12 --svg "$target/video-schedule.svg"
cmp "$target/video-schedule.svg" docs/video-schedule.svg
# Clients have an environment of their own: their packages and those of the scripts above would constrain each other.
clients=$target/python-clients
wanted=$(cat tools/check_python.sh tools/requirements-serve.txt | sha256sum)
if [ "$(cat "$clients/made-of" 2>/dev/null)" != "$wanted" ]; then
  rm -rf "$clients"
  python3 -m venv "$clients"
  "$python" -m uv pip install --quiet --python "$clients/bin/python" -r tools/requirements-serve.txt
  PATH=$(realpath "$clients/bin"):$PATH npm install --silent --no-audit --no-fund --prefix "$clients" compatcanary@0.2.2
  echo "$wanted" >"$clients/made-of"
fi
"$python" tools/bench_serving.py "$ringspan" --tiny --torch --depths 0,64 --tokens 4 --streams 3 --rounds 1 --ours "two ranks=--ring 2 --threads 1"
"$python" tools/bench_serving.py "$ringspan" --tiny --depths 0,64 --tokens 4 --turns 2 --ours "two ranks=--ring 2 --threads 1"
python3 tools/bench_gaps.py "$ringspan" --tiny --streams 1,2 --prompt 2000 --seconds 0.1
python3 tools/check_load.py "$ringspan" --seconds 20 --longest-prompt 1000
python3 tools/check_load.py "$ringspan" --seconds 20 --longest-prompt 1000 -- --ring 2 --num-speculative-tokens 4
python3 tools/check_long_prompt.py "$ringspan" --tokens 3000 --ranks 1,3
"$clients/bin/python" tools/check_clients.py --scripted "$target/debug/examples/scripted_engine" --schemathesis \
  --ringspan "$ringspan" --compatcanary "$clients/node_modules/compatcanary/src/cli.js"
"$clients/bin/python" tools/check_page.py "$ringspan"
"$python" tools/check_lm_eval.py "$ringspan" --documents 4
