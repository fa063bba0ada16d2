//! Tests of the loss, which has kernels of its own on a GPU, for vocabularies of every size, whole and sharded over
//! ranks.

use crate::ranks::on_ranks;
use crate::{assert_equal, assert_within, bound, gpu, numbers, random, rounding};
use candle_core::{DType, Device, Result, Tensor};
use ringspan_candle::loss::{CHUNK, HeadLoss, IGNORE, OutputHead, head_loss, log_probs};
use ringspan_candle::tensor_parallel::NO_TENSOR_PARALLEL;
use ringspan_candle::{RankDevice, TensorParallel};

/// Hidden states, an output head, and a target for each token.
struct Case {
    hidden: Tensor,
    head: Tensor,
    targets: Vec<u32>,
    softcap: Option<f32>,
}

const SCALE: f32 = 0.25;

impl Case {
    /// Logits are small numbers, so that many tokens of the vocabulary contribute to the softmax.
    fn new(tokens: usize, width: usize, vocabulary: usize) -> Self {
        let target = |token: usize| if token % 7 == 3 { IGNORE } else { (token * 2311 % vocabulary) as u32 };
        Self {
            hidden: random(&[tokens, width], 1),
            head: (random(&[vocabulary, width], 2) * 2.0).expect("numbers"),
            targets: (0..tokens).map(target).collect(),
            softcap: None,
        }
    }

    fn sizes(&self) -> (usize, usize, usize) {
        let ((tokens, width), vocabulary) = (self.hidden.dims2().expect("rows"), self.head.dim(0).expect("rows"));
        (tokens, width, vocabulary)
    }

    /// The results on a device, with this rank's shard of the head.
    fn on(&self, device: &RankDevice, shared: &TensorParallel) -> Result<Results> {
        let part = shared.shard_range(self.head.dim(0)?);
        let (hidden, head) = (device.parameter(&self.hidden)?, self.head.narrow(0, part.start, part.len())?);
        let weight = device.parameter(&head)?.into();
        Results::new(&hidden, OutputHead { weight, softcap: self.softcap }, &self.targets, shared)
    }

    /// The results of plain loops in f64.
    fn in_f64(&self) -> Results {
        let (tokens, width, vocabulary) = self.sizes();
        let [hidden, head] =
            [&self.hidden, &self.head].map(|x| numbers(x).into_iter().map(f64::from).collect::<Vec<_>>());
        let (mut nll_sum, mut log_probs) = (0.0, vec![0.0; tokens]);
        let (mut d_hidden, mut d_head) = (vec![0.0; tokens * width], vec![0.0; vocabulary * width]);
        for (token, target) in self.targets.iter().enumerate().filter(|(_, target)| **target != IGNORE) {
            let row = &hidden[token * width..(token + 1) * width];
            let cap = |x: f64| self.softcap.map(f64::from).map_or(x, |cap| cap * (x / cap).tanh());
            let slope = |y: f64| self.softcap.map(f64::from).map_or(1.0, |cap| 1.0 - (y / cap).powi(2));
            let logits: Vec<f64> =
                head.chunks(width).map(|head| cap(head.iter().zip(row).map(|(a, b)| a * b).sum())).collect();
            let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let log_sum = max + logits.iter().map(|x| (x - max).exp()).sum::<f64>().ln();
            let nll = log_sum - logits[*target as usize];
            nll_sum += nll;
            log_probs[token] = -nll as f32;
            for (place, logit) in logits.iter().enumerate() {
                let hit = f64::from(u8::from(place == *target as usize));
                let d = f64::from(SCALE) * ((logit - log_sum).exp() - hit) * slope(*logit);
                for column in 0..width {
                    d_hidden[token * width + column] += d * head[place * width + column];
                    d_head[place * width + column] += d * row[column];
                }
            }
        }
        let narrow = |all: Vec<f64>| all.into_iter().map(|x| x as f32).collect();
        Results { nll_sum, log_probs, d_hidden: narrow(d_hidden), d_head: narrow(d_head) }
    }
}

#[derive(Debug, Clone, PartialEq)]
struct Results {
    nll_sum: f64,
    log_probs: Vec<f32>,
    d_hidden: Vec<f32>,
    d_head: Vec<f32>,
}

impl Results {
    fn new(hidden: &Tensor, head: impl Into<OutputHead>, targets: &[u32], shared: &TensorParallel) -> Result<Self> {
        let head: OutputHead = head.into();
        let HeadLoss { nll_sum, d_hidden, d_head } = head_loss(hidden, head.clone(), targets, SCALE, true, shared)?;
        let d_head = d_head.expect("trained");
        assert_eq!((d_hidden.dtype(), d_head.dtype()), (hidden.dtype(), DType::F32));
        assert_eq!((d_hidden.dims(), d_head.dims()), (hidden.dims(), head.weight.dims().as_slice()));
        let log_probs = log_probs(hidden, head, targets, shared)?;
        Ok(Self { nll_sum, log_probs, d_hidden: numbers(&d_hidden), d_head: numbers(&d_head) })
    }

    /// The loss is as exact in bf16 as in f32, since logits are never rounded.
    #[track_caller]
    fn assert_near(&self, wanted: &Self, bound: f64, what: &str) {
        let off = (self.nll_sum - wanted.nll_sum).abs();
        assert!(off <= 1e-6 * wanted.nll_sum.abs(), "{what}: {} is not {}", self.nll_sum, wanted.nll_sum);
        assert_equal(&format!("{what}: log-probabilities"), &self.log_probs, &wanted.log_probs);
        assert_within(bound, &format!("{what}: gradient of hidden"), &self.d_hidden, &wanted.d_hidden);
        assert_within(bound, &format!("{what}: gradient of head"), &self.d_head, &wanted.d_head);
    }

    fn bits(&self) -> (u64, Vec<Vec<u32>>) {
        let of = |all: &Vec<f32>| all.iter().map(|x| x.to_bits()).collect();
        (self.nll_sum.to_bits(), [&self.log_probs, &self.d_hidden, &self.d_head].map(of).to_vec())
    }
}

/// Tests rows that are handled by one thread, by some and by all threads of a block; read element by element and 16 bytes at
/// once; and more tokens than have their logits in memory at once.
#[test]
fn vocabularies_of_every_size_and_any_number_of_tokens() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    let small = [(5, 3, 2), (9, 8, 3), (1, 1, 4), (40, 16, 31), (12, 5, 100), (6, 8, 255), (6, 8, 256)];
    let large = [(5, 8, 1023), (5, 8, 1024), (5, 7, 1028), (3, 8, 4099), (3, 2, 5_001), (2, 4, 8192)];
    let long = [(2 * CHUNK, 4, 20), (2 * CHUNK + 1, 4, 21), (4 * CHUNK + 88, 8, 24)];
    for (tokens, width, vocabulary) in small.into_iter().chain(large).chain(long) {
        let case = Case::new(tokens, width, vocabulary);
        let wanted = case.in_f64();
        for gpu in [gpu.clone(), rounding(&gpu)] {
            let what = format!("{tokens} tokens of {width}, {vocabulary} in {}", gpu.precision());
            case.on(&gpu, &NO_TENSOR_PARALLEL)?.assert_near(&wanted, bound(&gpu), &what);
        }
    }
    Ok(())
}

#[test]
fn the_loss_of_a_head_is_that_of_the_cpu() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    let case = Case::new(CHUNK + 88, 8, 19);
    let wanted = case.on(&RankDevice::CPU, &NO_TENSOR_PARALLEL)?;
    for gpu in [gpu.clone(), rounding(&gpu)] {
        case.on(&gpu, &NO_TENSOR_PARALLEL)?.assert_near(&wanted, bound(&gpu), &gpu.precision().to_string());
    }
    Ok(())
}

/// Tests caps that change most logits, and caps that change only some of them.
#[test]
fn logits_are_capped() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    for (softcap, vocabulary) in [(1.5, 31), (30.0, 256), (0.2, 1027)] {
        let case = Case { softcap: Some(softcap), ..Case::new(40, 16, vocabulary) };
        let wanted = case.in_f64();
        case.on(&RankDevice::CPU, &NO_TENSOR_PARALLEL)?.assert_near(
            &wanted,
            bound(&gpu),
            &format!("cap {softcap} on the CPU"),
        );
        for gpu in [gpu.clone(), rounding(&gpu)] {
            let what = format!("cap {softcap}, {vocabulary} in {}", gpu.precision());
            case.on(&gpu, &NO_TENSOR_PARALLEL)?.assert_near(&wanted, bound(&gpu), &what);
        }
    }
    Ok(())
}

#[test]
fn no_tokens_and_none_with_a_target() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    for gpu in [gpu.clone(), rounding(&gpu)] {
        let none = Case::new(0, 4, 9).on(&gpu, &NO_TENSOR_PARALLEL)?;
        assert_eq!(none, Results { nll_sum: 0.0, log_probs: vec![], d_hidden: vec![], d_head: vec![0.0; 36] });
        let case = Case { targets: vec![IGNORE; 5], ..Case::new(5, 4, 9) };
        let zeros = |count| vec![0.0; count];
        let wanted = Results { nll_sum: 0.0, log_probs: zeros(5), d_hidden: zeros(20), d_head: zeros(36) };
        assert_eq!(case.on(&gpu, &NO_TENSOR_PARALLEL)?, wanted);
        // A frozen head has no gradient.
        let (hidden, head) = (gpu.parameter(&case.hidden)?, gpu.parameter(&case.head)?);
        assert!(head_loss(&hidden, &head, &case.targets, 1.0, false, &NO_TENSOR_PARALLEL)?.d_head.is_none());
        let wrong = head_loss(&hidden, &head, &[9; 5], 1.0, true, &NO_TENSOR_PARALLEL)
            .expect_err("a target outside the vocabulary");
        assert!(wrong.to_string().contains("target 9"), "{wrong}");
    }
    Ok(())
}

/// Tests tensors that begin in the middle of their storage, and columns, which are copied first.
#[test]
fn views_in_the_middle_of_their_storage() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    let case = Case::new(8, 12, 24);
    for gpu in [gpu.clone(), rounding(&gpu)] {
        let (hidden, head) = (gpu.parameter(&case.hidden)?, gpu.parameter(&case.head)?);
        for (first, columns) in [(1, 12), (4, 12), (0, 7), (3, 8)] {
            let part = |x: &Tensor, rows| x.narrow(0, first, rows)?.narrow(1, 12 - columns, columns);
            let targets = [0, 19, IGNORE, 7];
            let of = |hidden: &Tensor, head: &Tensor| -> Result<_> { Ok((part(hidden, 4)?, part(head, 20)?)) };
            let (hidden, head) = of(&hidden, &head)?;
            let (hidden_there, head_there) = of(&case.hidden, &case.head)?;
            let wanted =
                Case { hidden: hidden_there, head: head_there, targets: targets.to_vec(), softcap: None }.in_f64();
            let what = format!("from row {first}, {columns} columns in {}", gpu.precision());
            Results::new(&hidden, &head, &targets, &NO_TENSOR_PARALLEL)?.assert_near(&wanted, bound(&gpu), &what);
        }
    }
    Ok(())
}

/// Three ranks hold 6, 6 and 7 of 19 vocabulary entries; with 2 entries on two ranks, one rank holds the targets of few rows
/// only.
#[test]
fn ranks_that_share_the_vocabulary_have_what_one_has() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    for (ranks, tokens, width, vocabulary) in [(3, 9, 5, 19), (2, 4, 8, 2), (2, 2 * CHUNK + 5, 4, 12), (3, 5, 8, 3001)]
    {
        let case = Case::new(tokens, width, vocabulary);
        let wanted = case.in_f64();
        for gpu in [gpu.clone(), rounding(&gpu)] {
            let of_ranks = on_ranks(ranks, |comm| case.on(&gpu, &TensorParallel::new(comm)));
            let mut sum = Results { d_hidden: vec![0.0; tokens * width], d_head: Vec::new(), ..of_ranks[0].clone() };
            for of_rank in of_ranks {
                assert_eq!((of_rank.nll_sum, &of_rank.log_probs), (sum.nll_sum, &sum.log_probs), "on every rank");
                sum.d_hidden.iter_mut().zip(&of_rank.d_hidden).for_each(|(sum, part)| *sum += part);
                sum.d_head.extend(of_rank.d_head);
            }
            let what = format!("{vocabulary} on {ranks} ranks in {}", gpu.precision());
            sum.assert_near(&wanted, bound(&gpu), &what);
        }
    }
    Ok(())
}

/// Logits rise and fall along a row by more than the range of exponentials, with the maximum at each of several places.
#[test]
fn logits_beyond_what_exponentials_reach() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    for vocabulary in [7, 64, 3000] {
        let greatest = [0, 1, vocabulary / 2, vocabulary - 1];
        let slope = 4096 / vocabulary;
        // The head has a column for each place of the maximum, from which the logits fall to both sides.
        let logit = |place: usize, at: usize| -((place.abs_diff(at) * slope) as f32);
        let head: Vec<f32> = (0..vocabulary).flat_map(|place| greatest.map(|at| logit(place, at))).collect();
        let case = Case {
            hidden: (Tensor::eye(4, DType::F32, &Device::Cpu)? * 2.0)?,
            head: Tensor::from_vec(head, (vocabulary, 4), &Device::Cpu)?,
            targets: vec![0, (vocabulary - 1) as u32, 1, IGNORE],
            softcap: None,
        };
        let wanted = case.in_f64();
        assert!(wanted.nll_sum > 2000.0, "{}", wanted.nll_sum);
        case.on(&gpu, &NO_TENSOR_PARALLEL)?.assert_near(&wanted, bound(&gpu), &format!("slopes of {vocabulary}"));
    }
    Ok(())
}

/// NaN and infinite logits give the results that they give on the CPU, and affect only their own rows; rows without a target
/// stay zeros.
#[test]
fn nan_and_infinite_logits_stay_in_their_rows_as_on_the_cpu() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    let (nan, infinite) = (f32::NAN, f32::INFINITY);
    for vocabulary in [5, 1024] {
        // Hidden states have width 1, so each row of logits is a multiple of one of these columns.
        let mut head = numbers(&random(&[vocabulary, 6], 3));
        let mut put = |column: usize, place: usize, x: f32| head[place * 6 + column] = x;
        put(0, vocabulary - 2, nan);
        put(1, 0, infinite);
        put(2, 3, -infinite);
        (0..vocabulary).for_each(|place| put(3, place, -infinite));
        put(4, 2, nan);
        let columns = Tensor::from_vec(head, (vocabulary, 6), &Device::Cpu)?;
        for column in 0..6 {
            let head = columns.narrow(1, column, 1)?.contiguous()?;
            let targets = vec![1, 0, IGNORE];
            let hidden = Tensor::new(&[[1f32], [0.5], [1.0]], &Device::Cpu)?;
            let case = Case { hidden, head, targets, softcap: None };
            let [got, wanted] = [&gpu, &RankDevice::CPU]
                .map(|device| case.on(device, &NO_TENSOR_PARALLEL).expect("no error, whatever comes in"));
            let same = |got: &[f32], wanted: &[f32]| {
                let near = |a: f32, b: f32| (a - b).abs() <= 1e-5 * b.abs().max(1.0);
                got.iter().zip(wanted).all(|(a, b)| a == b || (a.is_nan() && b.is_nan()) || near(*a, *b))
            };
            assert_eq!(got.nll_sum.is_nan(), wanted.nll_sum.is_nan(), "column {column}");
            assert_eq!(got.log_probs[2], 0.0);
            assert!(same(&got.log_probs, &wanted.log_probs), "column {column}: {got:?} is not {wanted:?}");
            assert!(same(&got.d_hidden, &wanted.d_hidden), "column {column}: {got:?} is not {wanted:?}");
            assert!(same(&got.d_head, &wanted.d_head), "column {column}: {got:?} is not {wanted:?}");
            // The log-probability is NaN where a logit is NaN or plus infinity, and where all are minus infinity.
            assert_eq!(wanted.log_probs[0].is_nan(), [true, true, false, true, true, false][column]);
        }
    }
    Ok(())
}

/// One row of NaN logits among others.
#[test]
fn a_nan_token_does_not_change_other_tokens() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    let case = Case::new(3, 4, 40);
    let mut broken = numbers(&case.hidden);
    broken[5] = f32::NAN;
    let broken = Case { hidden: Tensor::from_vec(broken, (3, 4), &Device::Cpu)?, ..Case::new(3, 4, 40) };
    let (got, wanted) = (broken.on(&gpu, &NO_TENSOR_PARALLEL)?, case.on(&gpu, &NO_TENSOR_PARALLEL)?);
    for row in [0, 2] {
        assert_eq!(got.log_probs[row], wanted.log_probs[row]);
        assert_eq!(got.d_hidden[4 * row..4 * row + 4], wanted.d_hidden[4 * row..4 * row + 4]);
    }
    assert!(got.nll_sum.is_nan() && got.log_probs[1].is_nan() && got.d_hidden[4..8].iter().all(|x| x.is_nan()));
    Ok(())
}

#[test]
fn the_same_inputs_give_the_same_bits() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    for gpu in [gpu.clone(), rounding(&gpu)] {
        let case = Case::new(2 * CHUNK + 70, 8, 2100);
        let [one, other] = [(); 2].map(|()| case.on(&gpu, &NO_TENSOR_PARALLEL).map(|results| results.bits()));
        assert_eq!(one?, other?, "{}", gpu.precision());
    }
    Ok(())
}
