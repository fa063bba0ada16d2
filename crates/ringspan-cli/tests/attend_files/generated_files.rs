//! Generates files for `attend`: good ones, strange ones, and ways to damage their bytes.

use proptest::prelude::*;
use proptest::sample::{Index, select};

/// A tensor as the header describes it. Its bytes have the size that the shape implies, unless that is too large.
#[derive(Debug, Clone)]
pub(crate) struct Tensor {
    name: &'static str,
    dtype: &'static str,
    shape: Vec<u64>,
    /// Amounts by which the tensor's offsets in the header are wrong.
    shift: (i64, i64),
    values: Values,
}

#[derive(Debug, Clone, Copy)]
enum Values {
    Zeros,
    /// All bits set: NaN as a float, -1 as an integer.
    Ones,
    Counting,
    Noise(u64),
}

/// A file, and the damage that is done to it.
#[derive(Debug, Clone)]
pub(crate) struct File {
    tensors: Vec<Tensor>,
    pub(crate) damage: Vec<Damage>,
    pub(crate) backward: bool,
}

#[derive(Debug, Clone)]
pub(crate) enum Damage {
    /// Flips a bit of the header, or of the rest.
    Flip {
        header: bool,
        at: f64,
        bit: u8,
    },
    /// Keeps only this share of the file.
    Cut(f64),
    Append(usize),
    /// Writes another header length.
    Length(u64),
    /// Replaces the n-th number in the header.
    Number {
        which: Index,
        by: u64,
    },
    /// Removes a range from the header, and corrects the header's length or leaves it.
    Remove {
        at: f64,
        len: usize,
        length_too: bool,
    },
}

/// Bytes of an element.
fn width(dtype: &str) -> u64 {
    match dtype {
        "F64" | "I64" => 8,
        "F32" | "I32" | "U32" => 4,
        "BF16" | "F16" => 2,
        _ => 1,
    }
}

impl Tensor {
    fn size(&self) -> Option<u64> {
        let elements = self.shape.iter().try_fold(1u64, |product, dim| product.checked_mul(*dim))?;
        elements.checked_mul(8 * width(self.dtype)).map(|bits| bits / 8)
    }

    fn data(&self) -> Vec<u8> {
        // A tensor whose size is only claimed has a few bytes.
        let len = self.size().filter(|size| *size <= 1 << 16).unwrap_or(8) as usize;
        let mut state = 1u64;
        let mut byte = |i: usize| match self.values {
            Values::Zeros => 0,
            Values::Ones => 0xFF,
            Values::Counting => {
                let w = width(self.dtype) as usize;
                if i.is_multiple_of(w) { (i / w).min(120) as u8 } else { 0 }
            }
            Values::Noise(seed) => {
                state = (state ^ seed).wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 56) as u8
            }
        };
        (0..len).map(&mut byte).collect()
    }
}

impl File {
    pub(crate) fn damaged(self, damage: Vec<Damage>) -> Self {
        Self { damage, ..self }
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut data = Vec::new();
        let mut entries = Vec::new();
        for tensor in &self.tensors {
            let start = data.len() as u64;
            data.extend(tensor.data());
            let (from, to) =
                (start.wrapping_add_signed(tensor.shift.0), (data.len() as u64).wrapping_add_signed(tensor.shift.1));
            entries.push(format!(
                r#""{}":{{"dtype":"{}","shape":{:?},"data_offsets":[{from},{to}]}}"#,
                tensor.name, tensor.dtype, tensor.shape
            ));
        }
        let header = format!("{{{}}}", entries.join(","));
        let mut bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
        self.damage.iter().for_each(|damage| damage.apply(&mut bytes));
        bytes
    }

    /// The shape of a tensor whose size overflows, if nothing else in the header is wrong.
    pub(crate) fn overflow(&self) -> Option<&[u64]> {
        let sound = self.tensors.iter().all(|tensor| tensor.shift == (0, 0));
        let mut strange = self.tensors.iter().filter(|tensor| tensor.size().is_none_or(|size| size > 1 << 16));
        match (strange.next(), strange.next()) {
            (Some(tensor), None) if sound && tensor.size().is_none() => Some(&tensor.shape),
            _ => None,
        }
    }
}

impl Damage {
    pub(crate) fn apply(&self, bytes: &mut Vec<u8>) {
        let header = 8.min(bytes.len())
            ..bytes.get(..8).and_then(|b| b.try_into().ok()).map_or(bytes.len(), |length: [u8; 8]| {
                usize::try_from(u64::from_le_bytes(length)).unwrap_or(0).saturating_add(8).min(bytes.len())
            });
        let place = |range: std::ops::Range<usize>, at: f64| range.start + (at * range.len() as f64) as usize;
        match *self {
            Self::Flip { header: in_header, at, bit } => {
                let range = if in_header { 0..header.end } else { header.end..bytes.len() };
                if let Some(byte) = bytes.get_mut(place(range, at)) {
                    *byte ^= 1 << bit;
                }
            }
            Self::Cut(share) => bytes.truncate(place(0..bytes.len(), share)),
            Self::Append(len) => bytes.extend(std::iter::repeat_n(7, len)),
            Self::Length(length) => bytes.iter_mut().zip(length.to_le_bytes()).for_each(|(b, l)| *b = l),
            Self::Number { which, by } => {
                let Some(text) = bytes.get(header.clone()).and_then(|header| std::str::from_utf8(header).ok()) else {
                    return;
                };
                let digit = |c: char| c.is_ascii_digit();
                // Numbers after a bracket or a comma are dims and offsets, unlike the digits of a type.
                let starts: Vec<usize> = text
                    .match_indices(digit)
                    .map(|(at, _)| at)
                    .filter(|at| *at > 0 && matches!(text.as_bytes()[at - 1], b'[' | b',' | b' '))
                    .collect();
                if starts.is_empty() {
                    return;
                }
                let start = *which.get(&starts);
                let len = text[start..].find(|c| !digit(c)).unwrap_or(text.len() - start);
                let changed = format!("{}{by}{}", &text[..start], &text[start + len..]);
                let rest = bytes[header.end..].to_vec();
                *bytes = [&(changed.len() as u64).to_le_bytes()[..], changed.as_bytes(), &rest].concat();
            }
            Self::Remove { at, len, length_too } => {
                let start = place(header.clone(), at).min(bytes.len());
                let end = (start + len).min(header.end).max(start);
                bytes.drain(start..end);
                if length_too && bytes.len() >= 8 {
                    let length = header.end.saturating_sub(8 + end - start) as u64;
                    bytes[..8].copy_from_slice(&length.to_le_bytes());
                }
            }
        }
    }
}

fn values() -> impl Strategy<Value = Values> {
    prop_oneof![Just(Values::Zeros), Just(Values::Ones), Just(Values::Counting), any::<u64>().prop_map(Values::Noise)]
}

/// Numbers at which sizes and sums of sizes overflow.
fn huge() -> impl Strategy<Value = u64> {
    prop_oneof![
        select(vec![1 << 16, 1 << 20, 1 << 28, 1 << 31, 1 << 32, 1 << 40, 1 << 60, 1 << 61, 1 << 62, 1 << 63]),
        select(vec![u64::MAX, u64::MAX - 7, i64::MAX as u64, (1 << 61) - 1]),
        any::<u64>(),
    ]
}

fn dim() -> impl Strategy<Value = u64> {
    prop_oneof![12 => 1..5u64, 3 => Just(0), 2 => huge()]
}

/// Names of tensors, those of float tensors first.
const NAMES: [&str; 14] = [
    "q",
    "k",
    "v",
    "d_out",
    "bias",
    "sinks",
    "alibi_slopes",
    "relative_bias",
    "cu_seqlens",
    "document_ids",
    "kv_lengths",
    "prefix_lengths",
    "block_pairs",
    "other",
];
const TYPES: [&str; 12] = ["F32", "BF16", "F16", "F64", "I64", "I32", "U32", "U8", "I8", "BOOL", "F8_E4M3", "F8_E5M2"];

/// A tensor of any type, shape and offsets.
fn tensor(name: &'static str) -> impl Strategy<Value = Tensor> {
    let floats = NAMES[..8].contains(&name);
    let dims = if NAMES[..5].contains(&name) { 4..5 } else { 1..3usize };
    let dtype = prop_oneof![6 => Just(if floats { "F32" } else { "I32" }), 2 => select(TYPES.to_vec())];
    let shape = prop_oneof![9 => proptest::collection::vec(dim(), dims), 1 => proptest::collection::vec(dim(), 0..6)];
    let shift = prop_oneof![12 => Just((0, 0)), 1 => (-9..9i64, -9..9i64), 1 => any::<(i64, i64)>()];
    (dtype, shape, shift, values()).prop_map(move |(dtype, shape, shift, values)| Tensor {
        name,
        dtype,
        shape,
        shift,
        values,
    })
}

/// Any file: all tensors are arbitrary, or one is, or the sizes fit each other but are extreme.
pub(crate) fn file() -> impl Strategy<Value = File> {
    let strange = proptest::sample::subsequence(NAMES.to_vec(), 0..=NAMES.len())
        .prop_flat_map(|names| names.into_iter().map(tensor).collect::<Vec<_>>());
    // In an otherwise good file, one tensor is arbitrary.
    let almost = (good(), any::<Index>()).prop_flat_map(|(file, which)| {
        let at = which.index(file.tensors.len());
        tensor(file.tensors[at].name).prop_map(move |tensor| {
            let mut tensors = file.tensors.clone();
            tensors[at] = tensor;
            tensors
        })
    });
    // Sizes that fit each other, but may be 0 or too large.
    let sizes = (dim(), dim(), dim(), dim(), dim(), dim(), dim(), any::<bool>());
    let fits = sizes.prop_map(|(b, sq, sk, heads, g, d, dv, same)| {
        let (sk, heads) = (if same { sq } else { sk }, heads.saturating_mul(g));
        shapes(b, sq, sk, heads, g, d, dv).map(|(name, shape)| plain(name, "F32", shape)).to_vec()
    });
    (prop_oneof![strange, almost, fits], any::<bool>()).prop_map(|(tensors, backward)| File {
        tensors,
        damage: vec![],
        backward,
    })
}

fn plain(name: &'static str, dtype: &'static str, shape: Vec<u64>) -> Tensor {
    Tensor { name, dtype, shape, shift: (0, 0), values: Values::Counting }
}

fn shapes(b: u64, sq: u64, sk: u64, h: u64, g: u64, d: u64, dv: u64) -> [(&'static str, Vec<u64>); 4] {
    let [q, k, v, d_out] = [[b, sq, h, d], [b, sk, g, d], [b, sk, g, dv], [b, sq, h, dv]].map(Vec::from);
    [("q", q), ("k", k), ("v", v), ("d_out", d_out)]
}

/// A file that `attend` accepts.
pub(crate) fn good() -> impl Strategy<Value = File> {
    let sizes = (0..3u64, 0..6u64, 0..6u64, 1..4u64, 1..3u64, 1..5u64, 1..4u64);
    let dtype = select(TYPES[..3].to_vec());
    (sizes, dtype, values(), 0..10usize).prop_map(|((b, sq, sk, groups, g, d, dv), dtype, values, extra)| {
        // Documents describe queries and keys alike, and packed documents are in a batch of one row.
        let (b, sk) = match extra {
            1 => (1, sq),
            2 => (b, sq),
            _ => (b, sk),
        };
        let tensors = shapes(b, sq, sk, groups * g, g, d, dv);
        let mut tensors = tensors.map(|(name, shape)| Tensor { values, ..plain(name, dtype, shape) }).to_vec();
        match extra {
            1 => tensors.push(plain("cu_seqlens", "I32", vec![sq + 1])),
            2 => tensors.push(plain("document_ids", "I32", vec![b, sq])),
            4 => tensors.push(plain("bias", "F32", vec![b, 1, sq, sk])),
            5 => tensors.push(plain("sinks", "F32", vec![groups * g])),
            6 => tensors.push(plain("alibi_slopes", "BF16", vec![groups * g])),
            7 => tensors.push(plain("relative_bias", "F32", vec![5, groups * g])),
            8 => tensors.push(plain("prefix_lengths", "I32", vec![b])),
            9 => tensors.push(plain("block_pairs", "I32", vec![sk, 2])),
            3 => tensors.push(Tensor { values: Values::Zeros, ..plain("kv_lengths", "I32", vec![b]) }),
            _ => {}
        }
        File { tensors, damage: vec![], backward: true }
    })
}

/// Ways to damage a file.
pub(crate) fn damage() -> impl Strategy<Value = Damage> {
    let share = || 0.0..1.0f64;
    prop_oneof![
        (any::<bool>(), share(), 0..8u8).prop_map(|(header, at, bit)| Damage::Flip { header, at, bit }),
        share().prop_map(Damage::Cut),
        (1..40usize).prop_map(Damage::Append),
        prop_oneof![huge(), 0..700u64].prop_map(Damage::Length),
        (any::<Index>(), prop_oneof![huge(), 0..9u64]).prop_map(|(which, by)| Damage::Number { which, by }),
        (share(), 1..20usize, any::<bool>()).prop_map(|(at, len, length_too)| Damage::Remove { at, len, length_too }),
    ]
}
