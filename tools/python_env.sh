# Makes a Python environment below target/ with the packages of requirements*.txt, and keeps it until these change: to be sourced
# from the root of the repository. Afterwards $python is its interpreter, and $experts the folder of requirements-experts.txt.
# Several scripts load the same large packages: their bytecode is kept beside them.
unset PYTHONDONTWRITEBYTECODE
target=${CARGO_TARGET_DIR:-target}
environment=$target/python
python=$environment/bin/python
experts=$environment/experts
wanted=$(cat tools/python_env.sh tools/requirements*.txt | sha256sum)
if [ "$(cat "$environment/made-of" 2>/dev/null)" != "$wanted" ]; then
  rm -rf "$environment"
  python3 -m venv "$environment"
  # It installs PyTorch, which brings CUDA's libraries along, in a quarter of pip's processor time, and from its cache in seconds.
  "$python" -m pip install --quiet uv==0.13.9
  # PyTorch asks for a compiler of GPU kernels, 1 GB, that nothing here uses.
  echo 'triton; python_version < "3"' >"$environment/without"
  "$python" -m uv pip install --quiet --python "$python" --override "$environment/without" \
    -r tools/requirements-bench.txt -r tools/requirements-lm-eval.txt -r tools/requirements-video.txt
  "$python" -m uv pip install --quiet --python "$python" --no-deps --target "$experts" -r tools/requirements-experts.txt
  echo "$wanted" >"$environment/made-of"
fi
