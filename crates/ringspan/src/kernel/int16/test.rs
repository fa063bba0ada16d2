use super::*;

/// Panels of random codes with their scales, and activations, `[tokens, width]`.
struct Case {
    codes: Vec<Box<RowCodes>>,
    x: Vec<f32>,
    tokens: usize,
    width: usize,
}

/// A number between -1 and 1.
fn random(seed: &mut u64) -> f32 {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*seed >> 40) as f32 / (1 << 23) as f32 - 1.0
}

impl Case {
    fn new(tokens: usize, width: usize, seed: u64) -> Self {
        let mut seed = seed;
        let codes = (0..2)
            .map(|_| {
                let mut codes = RowCodes::zeros();
                codes.codes.as_flattened_mut().iter_mut().for_each(|code| *code = (random(&mut seed) * 128.0) as i8);
                codes.codes[3] = [-128; COLUMNS];
                codes.scales.as_flattened_mut().iter_mut().for_each(|scale| *scale = random(&mut seed) * 0.01);
                codes.minima.as_flattened_mut().iter_mut().for_each(|minimum| *minimum = random(&mut seed));
                codes
            })
            .collect();
        let x = (0..tokens * width).map(|i| random(&mut seed) * if i % 97 == 0 { 100.0 } else { 1.0 }).collect();
        Self { codes, x, tokens, width }
    }

    fn rounded(&self, instructions: Instructions) -> RoundedActivations {
        let mut x = RoundedActivations::zeros(self.tokens, self.width);
        for mut part in x.parts_mut() {
            part.round(instructions, |token| &self.x[token * self.width..][..self.width]);
        }
        x
    }

    fn sums(&self, instructions: Instructions, scales: Scales) -> Vec<f32> {
        let x = self.rounded(instructions);
        let mut sums = vec![[[0.0; ROWS]; 2]; self.tokens];
        let mut panels = Panels::zeros();
        for start in (0..self.width).step_by(COLUMNS) {
            let width = COLUMNS.min(self.width - start);
            for (panel, codes) in self.codes.iter().enumerate() {
                panels.pack(instructions, panel, width, codes);
            }
            panels.add_products(instructions, &x, 0..self.tokens, (start, width), scales, &mut sums);
        }
        sums.as_flattened().as_flattened().to_vec()
    }

    /// The same without packing.
    fn row_sums(&self, instructions: Instructions, scales: Scales) -> Vec<f32> {
        let x = self.rounded(instructions);
        let mut sums = vec![[[0.0; ROWS]; 2]; self.tokens];
        for start in (0..self.width).step_by(COLUMNS) {
            let columns = (start, COLUMNS.min(self.width - start));
            for (panel, codes) in self.codes.iter().enumerate() {
                codes.add_products(instructions, &x, 0..self.tokens, columns, scales, (panel, &mut sums));
            }
        }
        sums.as_flattened().as_flattened().to_vec()
    }

    /// The weight of a row and column; all chunks of columns have the same codes.
    fn weight(&self, row: usize, column: usize, scales: Scales) -> f64 {
        let (codes, row, column) = (&self.codes[row / ROWS], row % ROWS, column % COLUMNS);
        let part = match scales {
            Scales::Of16 => column / 16,
            _ => column / 32 * 2,
        };
        let minimum = if scales == Scales::Of32WithMinima { codes.minima[column / 32][row] } else { 0.0 };
        f64::from(codes.codes[row][column]) * f64::from(codes.scales[part][row]) - f64::from(minimum)
    }
}

#[test]
fn every_instruction_set_multiplies_like_f64() {
    for (tokens, width) in [(1, 32), (2, 256), (7, 288), (15, 640), (3, 500)] {
        let case = Case::new(tokens, width, 7 + tokens as u64);
        for scales in [Scales::Of16, Scales::Of32, Scales::Of32WithMinima] {
            for instructions in Instructions::available() {
                let got = case.sums(instructions, scales);
                assert_eq!(case.row_sums(instructions, scales), got, "{instructions} {scales:?}");
                for (index, got) in got.iter().enumerate() {
                    let (token, row) = (index / (2 * ROWS), index % (2 * ROWS));
                    let (x, weight) = (&case.x[token * width..][..width], |i| case.weight(row, i, scales));
                    let wanted: f64 = x.iter().enumerate().map(|(i, x)| f64::from(*x) * weight(i)).sum();
                    // Half a step of each block's activations, and rounding of the sums of blocks in f32.
                    let rounding = x.chunks(BLOCK).enumerate().map(|(block, x)| {
                        let most = f64::from(x.iter().fold(0.0f32, |most, x| most.max(x.abs())));
                        let sizes = (0..x.len()).map(|i| weight(BLOCK * block + i).abs());
                        sizes.sum::<f64>() * most * (0.5 / f64::from(i16::MAX) + 1e-6)
                    });
                    let (wrong, most) = ((f64::from(*got) - wanted).abs(), rounding.sum::<f64>());
                    assert!(wrong <= most, "{instructions} {scales:?} {token} {row}: {got} {wanted} {most}");
                }
            }
        }
    }
}

#[test]
fn a_token_has_the_same_bits_whatever_is_beside_it() {
    let all = Case::new(15, 288, 3);
    for instructions in Instructions::available() {
        for scales in [Scales::Of16, Scales::Of32, Scales::Of32WithMinima] {
            let wanted = all.sums(instructions, scales);
            for token in 0..all.tokens {
                let x = all.x[token * all.width..][..all.width].to_vec();
                let alone = Case { codes: all.codes.clone(), x, tokens: 1, width: all.width };
                assert_eq!(alone.sums(instructions, scales), wanted[2 * ROWS * token..][..2 * ROWS], "{instructions}");
            }
        }
    }
}

#[test]
fn the_largest_products_do_not_overflow() {
    let mut case = Case::new(1, 256, 5);
    case.x.fill(-3.0);
    for codes in &mut case.codes {
        codes.codes.as_flattened_mut().fill(-128);
        codes.scales.as_flattened_mut().fill(1.0);
    }
    for instructions in Instructions::available() {
        let sums = case.sums(instructions, Scales::Of32);
        assert!(sums.iter().all(|sum| (sum / (256.0 * 128.0 * 3.0) - 1.0).abs() < 1e-6), "{sums:?}");
    }
}

#[test]
fn activations_that_are_not_finite_make_their_token_nan_and_no_other() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut case = Case::new(3, 288, 9);
        let wanted = case.sums(Instructions::best(None), Scales::Of32);
        case.x[288 + 270] = bad;
        for instructions in Instructions::available() {
            let sums = case.sums(instructions, Scales::Of32);
            assert!(sums[2 * ROWS..4 * ROWS].iter().all(|sum| sum.is_nan()));
            let close = |(a, b): (&f32, &f32)| (a - b).abs() < 1e-4;
            assert!(sums[..2 * ROWS].iter().zip(&wanted).all(close));
            assert!(sums[4 * ROWS..].iter().zip(&wanted[4 * ROWS..]).all(close));
        }
    }
}

#[test]
fn zeros_and_the_smallest_numbers_give_finite_sums() {
    let mut case = Case::new(1, 64, 11);
    for x in [0.0, -0.0, f32::from_bits(1), 1e-38, 1e-33, f32::MAX] {
        case.x.fill(x);
        for codes in &mut case.codes {
            codes.scales.as_flattened_mut().fill(1e-4);
        }
        for instructions in Instructions::available() {
            let sums = case.sums(instructions, Scales::Of32);
            assert!(sums.iter().all(|sum| sum.is_finite() && (x.abs() > 1e-30 || sum.abs() < 1e-30)), "{x}: {sums:?}");
        }
    }
}
