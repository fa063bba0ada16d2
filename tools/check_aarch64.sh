#!/usr/bin/env bash
# Compiles the library for aarch64 and checks that the portable kernel's matrix products are vector instructions there: its
# forward and backward kernels must use fused multiply-adds of four f32, and none of a single one.
set -euo pipefail
cd "$(dirname "$0")/.."

target=aarch64-unknown-linux-gnu
folder=${CARGO_TARGET_DIR:-target}
rustup target list --installed | grep -qx "$target" || rustup target add "$target"
rm -f "$folder/$target/release/deps/"ringspan-*.s
# A library needs no linker.
RUSTFLAGS="-D warnings" cargo rustc --quiet -p ringspan --release --lib --target "$target" -- --emit asm

awk '
  /^[_A-Za-z][^ ]*:/ { kernel = ""; if (match($0, /13forward_block|13backward_head/)) kernel = substr($0, RSTART + 2, RLENGTH - 2) }
  kernel && /fmla[ \t]+v[0-9]+\.4s/ { vector[kernel]++ }
  kernel && /fmadd[ \t]+s[0-9]+/ { scalar[kernel]++ }
  END {
    split("forward_block backward_head", names, " ")
    for (i in names) {
      name = names[i]
      printf "%s: %d vector and %d scalar fused multiply-adds\n", name, vector[name], scalar[name]
      if (vector[name] < 50 || scalar[name] > 0) bad = 1
    }
    exit bad
  }
' "$folder/$target/release/deps/"ringspan-*.s
