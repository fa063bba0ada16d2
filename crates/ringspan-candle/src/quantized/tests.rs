use super::blocks::{Block, with_block};
use super::dots;
use super::input::Input;
use super::lanes::{Lanes, VectorWork, f16_to_f32, on_each};
use super::{Format, QuantizedMatrix, linear_quantized, linear_quantized_recomputed};
use crate::activation_dtype::ActivationDType;
use crate::backward_from::backward;
use crate::linear::linear;
use crate::pool;
use crate::stored_activation::{Storage, StoredActivation};
use bytes::Bytes;
use candle_core::{DType, Device, Result, Tensor, Var};
use std::collections::HashMap;

const CPU: Device = Device::Cpu;

/// The tensors that tools/make_quantized_fixture.py has written.
fn fixture() -> Result<HashMap<String, Tensor>> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/quantized/blocks.safetensors");
    candle_core::safetensors::load(path, &CPU)
}

fn bytes(tensor: &Tensor) -> Result<Vec<u8>> {
    tensor.flatten_all()?.to_vec1()
}

fn floats(tensor: &Tensor) -> Result<Vec<f32>> {
    tensor.flatten_all()?.to_vec1()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// A matrix that repeats the fixture's first blocks, with the size of a weight, differing scales, and no two rows alike.
pub(super) fn matrix(format: Format, rows: usize, columns: usize) -> Result<QuantizedMatrix> {
    let blocks = bytes(&fixture()?[&format!("{format}.bytes")].narrow(0, 0, 2)?)?;
    let count = rows * columns / format.block_len();
    let blocks: Vec<&[u8]> = blocks.chunks(format.block_bytes()).collect();
    let stored: Vec<u8> = (0..count).flat_map(|i| blocks[(i + i / 5) % blocks.len()]).copied().collect();
    QuantizedMatrix::new(format, rows, columns, stored.into())
}

/// Numbers between -1 and 1.
fn waves(rows: usize, columns: usize, seed: usize) -> Result<Tensor> {
    let values = (0..rows * columns).map(|i| ((i * 7919 + seed * 104_729) as f32 * 0.377).sin());
    Tensor::from_iter(values, &CPU)?.reshape((rows, columns))
}

fn message<T>(result: Result<T>) -> String {
    result.err().map(|error| error.to_string()).unwrap_or_default()
}

#[test]
fn every_format_decodes_to_the_bits_of_the_reference() -> Result<()> {
    let fixture = fixture()?;
    for format in Format::ALL {
        let wanted = &fixture[&format!("{format}.values")];
        let (rows, columns) = wanted.dims2()?;
        let stored = bytes(&fixture[&format!("{format}.bytes")])?;
        // In a mapped file, blocks may begin at any address.
        let moved: Bytes = [&[0; 1][..], &stored].concat().into();
        for stored in [Bytes::from(stored), moved.slice(1..)] {
            let matrix = QuantizedMatrix::new(format, rows, columns, stored)?;
            for threads in [1, 3] {
                let got = pool::run(threads, || matrix.dequantize())??;
                assert_eq!(bits(&floats(&got)?), bits(&floats(wanted)?), "{format}");
            }
            let got = matrix.dequantize_rows(&[5, 0, 5])?;
            let wanted = wanted.index_select(&Tensor::new(&[5u32, 0, 5], &CPU)?, 0)?;
            assert_eq!(bits(&floats(&got)?), bits(&floats(&wanted)?), "{format}");
        }
    }
    Ok(())
}

/// Decodes the blocks of a row, and multiplies their numbers with x.
#[derive(Clone, Copy)]
struct Row<'a, B, const LEN: usize> {
    blocks: &'a [B],
    x: &'a [f32],
}

fn row_on_each<B: Block<LEN>, const LEN: usize>(stored: &[u8], x: &[f32]) -> Vec<(Vec<f32>, f32)> {
    on_each(Row::<B, LEN> { blocks: bytemuck::cast_slice(stored), x })
}

impl<B: Block<LEN>, const LEN: usize> VectorWork for Row<'_, B, LEN> {
    type Output = (Vec<f32>, f32);

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) -> Self::Output {
        let Self { blocks, x } = self;
        let mut values = vec![0.0; x.len()];
        B::decode(l, blocks, &mut values);
        let mut sums = [l.splat(0.0)];
        B::add_dots(l, blocks, blocks, 0, &B::arranged(l, Input::new(x, 1, x.len())), &mut sums);
        (values, l.sums([sums[0]; 4])[0])
    }
}

#[test]
fn every_instruction_set_decodes_to_the_bits_of_the_reference() -> Result<()> {
    let fixture = fixture()?;
    for format in Format::ALL {
        let wanted = fixture[&format!("{format}.values")].to_vec2::<f32>()?;
        let x = floats(&waves(1, wanted[0].len(), 1)?)?;
        for (stored, wanted) in fixture[&format!("{format}.bytes")].to_vec2::<u8>()?.iter().zip(wanted) {
            // Rows in formats with one number for each block may end within a vector.
            let ends = if format.block_len() == 1 { vec![256, 250, 3] } else { vec![256] };
            for end in ends {
                let stored = &stored[..end / format.block_len() * format.block_bytes()];
                let terms: Vec<f64> =
                    wanted[..end].iter().zip(&x).map(|(w, x)| f64::from(*w) * f64::from(*x)).collect();
                let (sum, size) = (terms.iter().sum::<f64>(), terms.iter().map(|term| term.abs()).sum::<f64>());
                for (values, dot) in with_block!(format, row_on_each(stored, &x[..end])) {
                    assert_eq!(bits(&values), bits(&wanted[..end]), "{format}");
                    assert!((f64::from(dot) - sum).abs() <= 1e-6 * size, "{format}: {dot}, not {sum}, of {size:e}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn the_bits_of_a_product_do_not_depend_on_the_rows_beside_it() -> Result<()> {
    const ROWS: usize = 7;
    for format in [Format::Q5_0, Format::Q6K, Format::F16] {
        let (weight, x) = (matrix(format, ROWS, 512)?, waves(1, 512, 3)?);
        let together = pool::run(1, || linear_quantized(&x, &weight, None))??;
        for row in 0..ROWS {
            let alone = pool::run(1, || linear_quantized(&x, &weight.rows(row..row + 1)?, None))??;
            assert_eq!(bits(&floats(&alone)?), bits(&floats(&together.narrow(1, row, 1)?)?), "{format}, row {row}");
        }
    }
    Ok(())
}

#[test]
fn gpt_oss_matrices_are_those_of_transformers() -> Result<()> {
    let fixture = fixture()?;
    let (codes, exponents) = (bytes(&fixture["gpt-oss.blocks"])?, bytes(&fixture["gpt-oss.scales"])?);
    let wanted = &fixture["gpt-oss.values"];
    let (rows, columns) = wanted.dims2()?;
    let matrix = QuantizedMatrix::from_gpt_oss(rows, columns, &codes, &exponents)?;
    // Transformers decodes a negative zero, ggml does not; the two compare as equal.
    assert_eq!(floats(&matrix.dequantize()?)?, floats(wanted)?);
    assert_eq!((matrix.format(), matrix.dims(), matrix.bytes().len()), (Format::Mxfp4, (rows, columns), 17 * 16));
    let refused = message(QuantizedMatrix::from_gpt_oss(rows, columns, &codes, &exponents[1..]));
    assert!(refused.contains("2 x 256 in 256 bytes of codes and 16 exponents, given 256 and 15"), "{refused}");
    Ok(())
}

#[test]
fn every_f16_and_bf16_number_is_decoded() {
    for number in 0..=u16::MAX {
        let (got, wanted) = (f16_to_f32(number.to_le_bytes()), half::f16::from_bits(number).to_f32());
        assert!(
            got.to_bits() == wanted.to_bits() || got.is_nan() && wanted.is_nan(),
            "{number:x}: {got}, not {wanted}"
        );
    }
}

/// Tests one row, no rows, few and many tokens, and rows and columns that are not multiples of those computed together, or of those
/// decoded at once.
#[test]
fn products_equal_those_of_the_decoded_matrix_in_f64() -> Result<()> {
    for format in Format::ALL {
        let block = format.block_len();
        let columns = if block == 1 {
            vec![1, 7, 300, 1000]
        } else {
            [block, 608, 1056].map(|columns| columns.next_multiple_of(block)).to_vec()
        };
        for (rows, columns) in
            [1, 5, 70].into_iter().flat_map(|rows| columns.iter().map(move |columns| (rows, *columns)))
        {
            let weight = matrix(format, rows, columns)?;
            let decoded = weight.dequantize()?.to_dtype(DType::F64)?;
            let bias = waves(1, rows, 3)?.flatten_all()?;
            for tokens in [0, 1, 2, 3, 7, 18, dots::MAX_TOKENS, dots::MAX_TOKENS + 1] {
                // The rows of x lie apart in memory.
                let x = waves(tokens, columns + 5, 1)?.narrow(1, 2, columns)?;
                let wide = x.to_dtype(DType::F64)?.contiguous()?;
                let sums =
                    if tokens == 0 { Tensor::zeros((0, rows), DType::F64, &CPU)? } else { wide.matmul(&decoded.t()?)? };
                let sizes = if tokens == 0 { sums.clone() } else { wide.abs()?.matmul(&decoded.abs()?.t()?)? };
                for (threads, bias) in [(1, None), (3, Some(&bias))] {
                    let got = pool::run(threads, || linear_quantized(&x, &weight, bias))??.to_dtype(DType::F64)?;
                    assert_eq!(got.dims(), [tokens, rows]);
                    let wanted = match bias {
                        None => sums.clone(),
                        Some(bias) => sums.broadcast_add(&bias.to_dtype(DType::F64)?)?,
                    };
                    let errors = (got - wanted)?.abs()?.flatten_all()?.to_vec1::<f64>()?;
                    for (error, size) in errors.iter().zip(sizes.flatten_all()?.to_vec1::<f64>()?) {
                        let what = format!("{format} {rows} x {columns}, {tokens} tokens, {threads} threads");
                        assert!(*error <= 1e-6 * (size + 1.0), "{what}: wrong by {error:e} of {size:e}");
                    }
                }
            }
        }
    }
    Ok(())
}

/// The weight is packed in several blocks, of columns and of rows, in the forward pass, and has several tiles in the backward pass.
#[test]
fn products_of_several_blocks_equal_those_of_the_decoded_matrix() -> Result<()> {
    for (rows, columns) in [(3000, 1056), (16_400, 64), (300, 4128)] {
        let weight = matrix(Format::Q4_0, rows, columns)?;
        let decoded = weight.dequantize()?;
        let tokens = dots::MAX_TOKENS + 1;
        let x = Var::from_tensor(&waves(tokens, columns, 1)?)?;
        let dy = waves(tokens, rows, 2)?;
        let [y, dx] = pool::run(3, || {
            let y = linear_quantized(&x, &weight, None)?;
            let dx = backward(&y, &dy)?.get(&x).cloned().expect("a gradient");
            Ok::<_, candle_core::Error>([y, dx])
        })??;
        let dense = linear(&x, &decoded, None)?;
        let d_dense = backward(&dense, &dy)?.get(&x).cloned().expect("a gradient");
        let [x, dy, decoded] = [x.as_tensor(), &dy, &decoded].map(|factor| factor.to_dtype(DType::F64));
        let (x, dy, decoded) = (x?, dy?, decoded?);
        for (name, got, dense, wanted) in
            [("y", y, dense, x.matmul(&decoded.t()?)?), ("dx", dx, d_dense, dy.matmul(&decoded)?)]
        {
            let norm = |tensor: Tensor| tensor.sqr()?.sum_all()?.to_scalar::<f64>().map(f64::sqrt);
            let error = |of: Tensor| norm((of.to_dtype(DType::F64)? - &wanted)?);
            let (error, of_f32, size) = (error(got)?, error(dense)?, norm(wanted.clone())?);
            // Sums of many terms in f32 are less exact than 1e-6 with any weight.
            let most = (1e-6 * size).max(1.25 * of_f32);
            assert!(
                error < most,
                "{name} of {rows} x {columns}: wrong by {error:e} of {size:e}; {of_f32:e} with an f32 weight"
            );
        }
    }
    Ok(())
}

#[test]
fn gradients_are_those_of_a_linear_layer_of_the_decoded_matrix() -> Result<()> {
    for (format, tokens) in Format::ALL.into_iter().flat_map(|format| [(format, 2), (format, dots::MAX_TOKENS + 3)]) {
        let (rows, columns) = (37, 256);
        let weight = matrix(format, rows, columns)?;
        let decoded = weight.dequantize()?;
        let x = Var::from_tensor(&waves(tokens, columns, 1)?)?;
        let bias = Var::from_tensor(&waves(1, rows, 2)?.flatten_all()?)?;
        let dy = waves(tokens, rows, 3)?;
        let (got, wanted) = (linear_quantized(&x, &weight, Some(&bias))?, linear(&x, &decoded, Some(&bias))?);
        let (got, wanted) = (backward(&got, &dy)?, backward(&wanted, &dy)?);
        for (name, var) in [("x", &x), ("bias", &bias)] {
            let (Some(got), Some(wanted)) = (got.get(var), wanted.get(var)) else { panic!("no gradient of {name}") };
            let size = wanted.abs()?.max_all()?.to_scalar::<f32>()?;
            let error = (got - wanted)?.abs()?.max_all()?.to_scalar::<f32>()?;
            assert!(error <= 2e-6 * size, "{format}, {name}, {tokens} tokens: wrong by {error:e} of {size:e}");
        }
        // Without a bias, x has the same gradient.
        let dx = backward(&linear_quantized(&x, &weight, None)?, &dy)?;
        assert_eq!(floats(dx.get(&x).expect("a gradient"))?, floats(got.get(&x).expect("a gradient"))?);
    }
    Ok(())
}

#[test]
fn a_recomputed_layer_has_the_stored_values_and_the_same_gradient() -> Result<()> {
    let weight = matrix(Format::Q8_0, 5, 64)?;
    let (x, dy) = (Var::from_tensor(&waves(3, 64, 1)?)?, waves(3, 5, 2)?);
    let y = linear_quantized(&x, &weight, None)?;
    let dx = floats(backward(&y, &dy)?.get(&x).expect("a gradient"))?;
    for known in [Some(StoredActivation::new(&y, Storage::F32)?), None] {
        let wanted = if known.is_some() { floats(&y)? } else { vec![0.0; 15] };
        let again = linear_quantized_recomputed(&x, &weight, None, known)?;
        assert_eq!(floats(&again)?, wanted);
        assert_eq!(floats(backward(&again, &dy)?.get(&x).expect("a gradient"))?, dx);
    }
    let refused =
        message(linear_quantized_recomputed(&x, &weight, None, Some(StoredActivation::new(&dy.t()?, Storage::F32)?)));
    assert!(refused.contains("[5, 3]") && refused.contains("[3, 5]"), "{refused}");
    Ok(())
}

#[test]
fn ranges_of_rows_share_bytes_and_ranges_of_columns_keep_numbers() -> Result<()> {
    for format in Format::ALL {
        let columns = 3 * format.block_len();
        let matrix = matrix(format, 6, columns)?;
        let whole = matrix.dequantize()?;
        let rows = matrix.rows(2..5)?;
        assert_eq!(rows.dims(), (3, columns));
        let row_bytes = matrix.bytes().len() / 6;
        assert_eq!(rows.bytes().as_ptr(), matrix.bytes()[2 * row_bytes..].as_ptr());
        assert_eq!(floats(&rows.dequantize()?)?, floats(&whole.narrow(0, 2, 3)?)?);
        assert_eq!(matrix.rows(6..6)?.dequantize()?.dims(), [0, columns]);

        let (from, to) = (columns / 3, columns);
        let part = rows.columns(from..to)?;
        assert_eq!(floats(&part.dequantize()?)?, floats(&whole.narrow(0, 2, 3)?.narrow(1, from, to - from)?)?);
        assert_eq!(matrix.columns(0..columns)?.bytes().as_ptr(), matrix.bytes().as_ptr());
        assert_eq!(matrix.columns(from..from)?.dims(), (6, 0));

        let order = Tensor::new(&[4u32, 0, 4, 5], &CPU)?;
        assert_eq!(
            floats(&matrix.select_rows(&[4, 0, 4, 5])?.dequantize()?)?,
            floats(&whole.index_select(&order, 0)?)?
        );
    }
    Ok(())
}

/// Tests products without columns to sum over, and products without rows.
#[test]
fn empty_matrices_multiply() -> Result<()> {
    for tokens in [0, 2, dots::MAX_TOKENS + 1] {
        let none = QuantizedMatrix::new(Format::Q4K, 0, 256, Bytes::new())?;
        assert_eq!(linear_quantized(&waves(tokens, 256, 1)?, &none, None)?.dims(), [tokens, 0]);
        let narrow = QuantizedMatrix::new(Format::Q4K, 3, 0, Bytes::new())?;
        let x = Tensor::zeros((tokens, 0), DType::F32, &CPU)?;
        let bias = Tensor::new(&[1f32, 2.0, 3.0], &CPU)?;
        assert_eq!(floats(&linear_quantized(&x, &narrow, Some(&bias))?)?, [1.0, 2.0, 3.0].repeat(tokens));
        assert_eq!(narrow.dequantize_rows(&[2])?.dims(), [1, 0]);
    }
    Ok(())
}

#[test]
fn formats_have_the_numbers_and_names_of_gguf_files() {
    for format in Format::ALL {
        assert_eq!(Format::from_ggml(format.ggml()), Some(format));
        match format.candle() {
            Some(kind) => {
                assert_eq!(Format::from_candle(kind), Some(format));
                assert_eq!((kind.block_size(), kind.type_size()), (format.block_len(), format.block_bytes()));
            }
            None => assert!(matches!(format, Format::Iq4Nl | Format::Mxfp4)),
        }
    }
    assert_eq!(Format::from_ggml(10), None);
    let names = Format::ALL.map(|format| format.to_string()).join(" ");
    assert_eq!(names, "F16 BF16 Q4_0 Q5_0 Q8_0 Q4_K Q5_K Q6_K IQ4_NL MXFP4");
}

#[test]
fn sizes_that_do_not_fit_are_refused_with_the_numbers() -> Result<()> {
    let matrix = matrix(Format::Q4_0, 4, 96)?;
    let refusals = [
        (message(Format::Q4K.bytes(2, 300)), "Q4_K stores blocks of 256 numbers, and rows of 300 columns"),
        (message(Format::Q8_0.bytes(usize::MAX / 4, 32)), "more bytes than there are addresses"),
        (message(QuantizedMatrix::new(Format::Q4_0, 2, 32, Bytes::from_static(&[0; 35]))), "takes 36 bytes, given 35"),
        (message(matrix.rows(2..5)), "rows 2..5 of a Q4_0 matrix of 4 x 96"),
        (message(matrix.columns(32..128)), "columns 32..128 of a Q4_0 matrix of 4 x 96"),
        (
            message(matrix.columns(16..96)),
            "columns 16..96 of a Q4_0 matrix of 4 x 96: it can be cut at multiples of 32",
        ),
        (message(matrix.select_rows(&[0, 4])), "row 4 of a Q4_0 matrix of 4 x 96"),
        (message(matrix.dequantize_rows(&[7])), "row 7 of a Q4_0 matrix of 4 x 96"),
        (
            message(linear_quantized(&waves(2, 64, 1)?, &matrix, None)),
            "linear of [2, 64] with weight QuantizedMatrix[4 x 96; Q4_0]",
        ),
        (message(linear_quantized(&waves(2, 96, 1)?, &matrix, Some(&waves(1, 4, 1)?))), "bias [1, 4]"),
        (message(linear_quantized(&waves(2, 96, 1)?.to_dtype(DType::BF16)?, &matrix, None)), "given x of BF16 on Cpu"),
    ];
    for (got, wanted) in refusals {
        assert!(got.contains(wanted), "'{got}' does not say '{wanted}'");
    }
    Ok(())
}

#[test]
fn rounded_activations_are_multiplied_within_their_rounding_in_every_format() -> Result<()> {
    for format in Format::ALL {
        // More columns than are packed at once, and rows that end within a panel.
        let (rows, columns) = (75, if format.block_len() == 256 { 512 } else { 608 });
        let weight = matrix(format, rows, columns)?;
        let rounded = weight.clone().rounding_activations(ActivationDType::Int16);
        let (decoded, x, bias) = (weight.dequantize()?, waves(300, columns, 3)?, waves(1, rows, 5)?.squeeze(0)?);
        let (w, x64) = (floats(&decoded)?, floats(&x)?);
        let all = floats(&linear_quantized(&x, &rounded, Some(&bias))?)?;
        for (index, (got, bias)) in all.iter().zip(floats(&bias)?.iter().cycle()).enumerate() {
            let (x, w) = (&x64[index / rows * columns..][..columns], &w[index % rows * columns..][..columns]);
            let terms = || x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w));
            let wrong = (f64::from(*got) - f64::from(*bias) - terms().sum::<f64>()).abs();
            let size = w.iter().map(|w| f64::from(*w).powi(2)).sum::<f64>().sqrt() * (columns as f64).sqrt();
            assert!(wrong < 3e-5 * size, "{format}: {wrong} of {size}");
        }
        // A token has the same bits with any others, on any number of threads.
        for (tokens, threads) in [(1, 1), (1, 3), (2, 1), (7, 3), (33, 1), (300, 3)] {
            if !format.has_codes() {
                continue;
            }
            let x = x.narrow(0, 0, tokens)?;
            let got = pool::run(threads, || linear_quantized(&x, &rounded, Some(&bias)))??;
            assert_eq!(bits(&floats(&got)?), bits(&all[..tokens * rows]), "{format}, {tokens} tokens");
        }
        if !format.has_codes() {
            let same = linear_quantized(&x, &weight, Some(&bias))?;
            assert_eq!(bits(&floats(&same)?), bits(&all), "{format}");
        }
    }
    Ok(())
}
