//! Input files for the binary, and dense attention in f64, written as plainly as possible.
#![allow(dead_code, unreachable_pub, missing_docs)] // Each test file uses a part of it.

pub mod bf16;
pub mod http;
pub mod model;
pub mod video_fixtures;

use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A tensor: type, shape, bytes.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

impl Tensor {
    pub fn f32(shape: &[usize], values: &[f32]) -> Self {
        Self { dtype: Dtype::F32, shape: shape.to_vec(), bytes: values.iter().flat_map(|x| x.to_le_bytes()).collect() }
    }

    pub fn i32(shape: &[usize], values: &[i32]) -> Self {
        Self { dtype: Dtype::I32, shape: shape.to_vec(), bytes: values.iter().flat_map(|x| x.to_le_bytes()).collect() }
    }

    pub fn i64(shape: &[usize], values: &[i64]) -> Self {
        Self { dtype: Dtype::I64, shape: shape.to_vec(), bytes: values.iter().flat_map(|x| x.to_le_bytes()).collect() }
    }

    pub fn bf16(shape: &[usize], values: &[f32]) -> Self {
        let bytes = values.iter().flat_map(|x| half::bf16::from_f32(*x).to_le_bytes()).collect();
        Self { dtype: Dtype::BF16, shape: shape.to_vec(), bytes }
    }

    pub fn f16(shape: &[usize], values: &[f32]) -> Self {
        let bytes = values.iter().flat_map(|x| half::f16::from_f32(*x).to_le_bytes()).collect();
        Self { dtype: Dtype::F16, shape: shape.to_vec(), bytes }
    }

    /// Pseudo-random values in -1..1; the same seed gives the same values.
    pub fn random(shape: &[usize], seed: u64) -> Self {
        Self::f32(shape, &random(shape.iter().product(), seed))
    }

    /// The elements as f32, whatever the float type.
    pub fn values(&self) -> Vec<f32> {
        match self.dtype {
            Dtype::F32 => self.bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
            Dtype::BF16 => {
                self.bytes.chunks_exact(2).map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
            }
            Dtype::F16 => self.bytes.chunks_exact(2).map(|b| half::f16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
            other => panic!("{other:?} is no float type"),
        }
    }
}

pub fn random(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        // xorshift64*
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        (state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

pub fn write(path: &Path, tensors: &[(&str, Tensor)]) {
    let views =
        tensors.iter().map(|(name, t)| (*name, TensorView::new(t.dtype, t.shape.clone(), &t.bytes).expect("sizes")));
    std::fs::write(path, safetensors::serialize(views, None).expect("tensors")).expect("file");
}

pub fn read(path: &Path) -> BTreeMap<String, Tensor> {
    let bytes = std::fs::read(path).expect("output");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let tensor = |view: &TensorView<'_>| Tensor {
        dtype: view.dtype(),
        shape: view.shape().to_vec(),
        bytes: view.data().to_vec(),
    };
    file.tensors().iter().map(|(name, view)| (name.clone(), tensor(view))).collect()
}

/// A folder with an input file, and the binary to run in it.
pub struct Bench {
    pub folder: tempfile::TempDir,
}

impl Bench {
    pub fn new(tensors: &[(&str, Tensor)]) -> Self {
        let folder = tempfile::tempdir().expect("folder");
        write(&folder.path().join("in.safetensors"), tensors);
        Self { folder }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn command(&self, command: &str) -> Command {
        let mut run = Command::new(env!("CARGO_BIN_EXE_ringspan"));
        run.current_dir(self.folder.path()).arg(command);
        run
    }

    /// `ringspan attend in.safetensors --out out.safetensors --threads 1` and `flags`, split at spaces.
    pub fn attend(&self, flags: &str) -> Output {
        let mut run = self.command("attend");
        run.args(["in.safetensors", "--out", "out.safetensors", "--threads", "1"]).args(flags.split_whitespace());
        run.output().expect("the binary runs")
    }

    /// Like [`Bench::attend`], for a run that must succeed; returns its results.
    pub fn results(&self, flags: &str) -> BTreeMap<String, Tensor> {
        let output = self.attend(flags);
        assert!(output.status.success(), "{flags}: {}", String::from_utf8_lossy(&output.stderr));
        read(&self.path("out.safetensors"))
    }

    /// The message of a run that must fail with exit code 1.
    pub fn refusal(&self, flags: &str) -> String {
        message(&self.attend(flags))
    }

    /// Names of all files in the folder.
    pub fn files(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.folder.path()).expect("folder");
        let mut names: Vec<String> =
            entries.map(|entry| entry.expect("entry").file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }
}

/// The message of a run that failed as it should: exit code 1, one line, no panic.
pub fn message(output: &Output) -> String {
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.starts_with("error: ") && !stderr.contains("panicked"), "{stderr}");
    assert_eq!(stderr.trim_end().lines().count(), 1, "{stderr}");
    stderr
}

/// Sizes of an attention: B, Sq, Sk, H, G, D, Dv.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    pub b: usize,
    pub sq: usize,
    pub sk: usize,
    pub h: usize,
    pub g: usize,
    pub d: usize,
    pub dv: usize,
}

impl Sizes {
    pub fn q(&self) -> [usize; 4] {
        [self.b, self.sq, self.h, self.d]
    }
    pub fn k(&self) -> [usize; 4] {
        [self.b, self.sk, self.g, self.d]
    }
    pub fn v(&self) -> [usize; 4] {
        [self.b, self.sk, self.g, self.dv]
    }
    pub fn out(&self) -> [usize; 4] {
        [self.b, self.sq, self.h, self.dv]
    }

    /// Random q, k, v and d_out.
    pub fn tensors(&self) -> Vec<(&'static str, Tensor)> {
        vec![
            ("q", Tensor::random(&self.q(), 1)),
            ("k", Tensor::random(&self.k(), 2)),
            ("v", Tensor::random(&self.v(), 3)),
            ("d_out", Tensor::random(&self.out(), 4)),
        ]
    }
}

/// All results of `attend`, in f64.
pub struct Dense {
    pub out: Vec<f64>,
    pub lse: Vec<f64>,
    pub dq: Vec<f64>,
    pub dk: Vec<f64>,
    pub dv: Vec<f64>,
    pub pairs: u64,
}

/// Dense attention; `sees(b, i, j)` says whether query i of row b sees key j.
pub fn dense(s: &Sizes, tensors: &[(&str, Tensor)], scale: f64, sees: impl Fn(usize, usize, usize) -> bool) -> Dense {
    let get = |name: &str| -> Vec<f64> {
        let found = tensors.iter().find(|(n, _)| *n == name);
        found.map_or(vec![0.0; s.out().iter().product()], |(_, t)| t.values().into_iter().map(f64::from).collect())
    };
    let (q, k, v, d_out) = (get("q"), get("k"), get("v"), get("d_out"));
    let at = |shape: [usize; 4], b: usize, t: usize, head: usize| ((b * shape[1] + t) * shape[2] + head) * shape[3];
    let mut r = Dense {
        out: vec![0.0; s.out().iter().product()],
        lse: vec![f64::NEG_INFINITY; s.b * s.h * s.sq],
        dq: vec![0.0; q.len()],
        dk: vec![0.0; k.len()],
        dv: vec![0.0; v.len()],
        pairs: 0,
    };
    for b in 0..s.b {
        for i in 0..s.sq {
            let keys: Vec<usize> = (0..s.sk).filter(|j| sees(b, i, *j)).collect();
            r.pairs += keys.len() as u64;
            for h in 0..s.h {
                let g = h / (s.h / s.g);
                let (qi, oi) = (at(s.q(), b, i, h), at(s.out(), b, i, h));
                let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
                let scores: Vec<f64> =
                    keys.iter().map(|j| scale * dot(&q[qi..qi + s.d], &k[at(s.k(), b, *j, g)..][..s.d])).collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                if max == f64::NEG_INFINITY {
                    continue;
                }
                let sum: f64 = scores.iter().map(|x| (x - max).exp()).sum();
                r.lse[(b * s.h + h) * s.sq + i] = max + sum.ln();
                let p: Vec<f64> = scores.iter().map(|x| (x - max).exp() / sum).collect();
                for (p, j) in p.iter().zip(&keys) {
                    let vj = at(s.v(), b, *j, g);
                    for c in 0..s.dv {
                        r.out[oi + c] += p * v[vj + c];
                        r.dv[vj + c] += p * d_out[oi + c];
                    }
                }
                let delta = dot(&r.out[oi..oi + s.dv], &d_out[oi..oi + s.dv]);
                for (p, j) in p.iter().zip(&keys) {
                    let (kj, vj) = (at(s.k(), b, *j, g), at(s.v(), b, *j, g));
                    let ds = scale * p * (dot(&v[vj..vj + s.dv], &d_out[oi..oi + s.dv]) - delta);
                    for c in 0..s.d {
                        r.dq[qi + c] += ds * k[kj + c];
                        r.dk[kj + c] += ds * q[qi + c];
                    }
                }
            }
        }
    }
    r
}

/// The relative difference ‖a - b‖ / ‖b‖ where b is finite; where b is -inf, a must be -inf, too.
pub fn relative_l2(a: &[f32], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let (mut difference, mut size) = (0.0, 0.0);
    for (index, (&a, &b)) in a.iter().zip(b).enumerate() {
        if b == f64::NEG_INFINITY {
            assert_eq!(a, f32::NEG_INFINITY, "element {index}");
            continue;
        }
        difference += (f64::from(a) - b).powi(2);
        size += b * b;
    }
    if size > 0.0 { (difference / size).sqrt() } else { difference.sqrt() }
}

/// Compares all results with the dense computation.
pub fn compare(what: &str, results: &BTreeMap<String, Tensor>, dense: &Dense, tolerance: f64) {
    for (name, expected) in
        [("out", &dense.out), ("lse", &dense.lse), ("dq", &dense.dq), ("dk", &dense.dk), ("dv", &dense.dv)]
    {
        let Some(tensor) = results.get(name) else {
            assert!(name.starts_with('d'), "{what}: no {name}");
            continue;
        };
        let apart = relative_l2(&tensor.values(), expected);
        // NaN fails, since it is not below the tolerance.
        assert!(apart <= tolerance, "{what}: {name} is {apart:.2e} from the dense result");
    }
}

/// The number of megabytes before a word in the line `memory` of a training's output.
pub fn megabytes(said: &str, word: &str) -> f64 {
    let line = said.lines().find(|line| line.starts_with("memory ")).unwrap_or_else(|| panic!("no memory in {said}"));
    let before = line.split(word).next().unwrap_or_default();
    let number = before.trim_end().strip_suffix("MB").and_then(|text| text.split_whitespace().last());
    number.and_then(|number| number.parse().ok()).unwrap_or_else(|| panic!("no {word} in {line}"))
}
