//! The activations of feed-forward layers, element by element, with their derivatives.

use crate::number::Number;
use crate::pool::vectorized;

/// The activation function of a feed-forward layer; of a gated one, that of the gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Activation {
    /// `x / (1 + e^-x)`: Llama, Qwen, Mistral (Elfwing et al., 2017).
    Silu,
    /// The tanh form of GELU, `x / (1 + e^-u)` with `u = sqrt(8 / pi) (x + 0.044715 x^3)`: Gemma (Hendrycks and Gimpel,
    /// 2016).
    GeluTanh,
}

/// The gated activation of gpt-oss, `(up + 1) gate / (1 + e^(-alpha gate))`, where gate is clamped to at most `limit` and up
/// to `-limit..=limit` (OpenAI, 2025, arXiv:2508.10925).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ClampedSwiglu {
    /// The factor of the gate inside the sigmoid.
    pub alpha: f32,
    /// The bound at which gate and up are clamped.
    pub limit: f32,
}

impl ClampedSwiglu {
    pub(crate) fn value(self, gate: f32, up: f32) -> f32 {
        self.with_slopes(gate, up).0
    }

    /// The value and its derivatives with respect to gate and up, which are 0 where the input is clamped.
    pub(crate) fn with_slopes(self, gate: f32, up: f32) -> (f32, f32, f32) {
        let Self { alpha, limit } = self;
        let (open, free) = (gate <= limit, (-limit..=limit).contains(&up));
        let (gate, up) = (gate.min(limit), up.clamp(-limit, limit) + 1.0);
        let s = 1.0 / (1.0 + exp(-alpha * gate));
        let slope = up * s * (1.0 + alpha * gate * (1.0 - s));
        (up * gate * s, if open { slope } else { 0.0 }, if free { gate * s } else { 0.0 })
    }
}

/// sqrt(8 / pi)
const SLOPE: f32 = 2.0 * std::f32::consts::FRAC_2_SQRT_PI * std::f32::consts::FRAC_1_SQRT_2;
const CUBE: f32 = 0.044_715;

impl Activation {
    /// The activation and its derivative at x. The code vectorises where `self` is a constant of the loop.
    #[inline(always)]
    pub(crate) fn value_and_slope(self, x: f32) -> (f32, f32) {
        let (u, du) = match self {
            Self::Silu => (x, 1.0),
            Self::GeluTanh => (SLOPE * x * (1.0 + CUBE * x * x), SLOPE * (1.0 + 3.0 * CUBE * x * x)),
        };
        let s = 1.0 / (1.0 + exp(-u));
        (x * s, s * (1.0 + x * (1.0 - s) * du))
    }

    /// `x = act(x)`, element by element.
    pub fn apply(self, x: &mut [f32]) {
        self.apply_in_place(x);
    }

    /// `gate = act(gate) * up`, element by element.
    pub(crate) fn gate_in_place<T: Number>(self, gate: &mut [T], up: &[T]) {
        // Each arm passes a constant, so that its loop is compiled for one activation.
        match self {
            Self::Silu => vectorized(
                #[inline(always)]
                || gated(Self::Silu, gate, up),
            ),
            Self::GeluTanh => vectorized(
                #[inline(always)]
                || gated(Self::GeluTanh, gate, up),
            ),
        }
    }

    /// `x = act(x)`, element by element.
    pub(crate) fn apply_in_place<T: Number>(self, x: &mut [T]) {
        match self {
            Self::Silu => vectorized(
                #[inline(always)]
                || applied(Self::Silu, x),
            ),
            Self::GeluTanh => vectorized(
                #[inline(always)]
                || applied(Self::GeluTanh, x),
            ),
        }
    }

    /// Turns the gradient `d` of `act(x)` in place into that of x.
    pub(crate) fn slopes_in_place<T: Number>(self, x: &[T], d: &mut [T]) {
        match self {
            Self::Silu => vectorized(
                #[inline(always)]
                || sloped(Self::Silu, x, d),
            ),
            Self::GeluTanh => vectorized(
                #[inline(always)]
                || sloped(Self::GeluTanh, x, d),
            ),
        }
    }

    /// Turns `gate`, `up` and the gradient `d` of `act(gate) * up` in place into the gradient of gate, the gradient of up and
    /// `act(gate) * up`.
    pub(crate) fn gate_backward_in_place<T: Number>(self, gate: &mut [T], up: &mut [T], d: &mut [T]) {
        match self {
            Self::Silu => vectorized(
                #[inline(always)]
                || gated_backward(Self::Silu, gate, up, d),
            ),
            Self::GeluTanh => vectorized(
                #[inline(always)]
                || gated_backward(Self::GeluTanh, gate, up, d),
            ),
        }
    }

    /// Turns `gate` and `up` in place into their gradients, where `d` is the gradient of `act(gate) * up`.
    pub(crate) fn gate_gradients_in_place<T: Number>(self, gate: &mut [T], up: &mut [T], d: &[T]) {
        match self {
            Self::Silu => vectorized(
                #[inline(always)]
                || gated_gradients(Self::Silu, gate, up, d),
            ),
            Self::GeluTanh => vectorized(
                #[inline(always)]
                || gated_gradients(Self::GeluTanh, gate, up, d),
            ),
        }
    }
}

#[inline(always)]
fn applied<T: Number>(act: Activation, x: &mut [T]) {
    for x in x {
        *x = T::round_from(act.value_and_slope(x.upcast()).0);
    }
}

#[inline(always)]
fn sloped<T: Number>(act: Activation, x: &[T], d: &mut [T]) {
    for (x, d) in x.iter().zip(d) {
        *d = T::round_from(d.upcast() * act.value_and_slope(x.upcast()).1);
    }
}

#[inline(always)]
fn gated<T: Number>(act: Activation, gate: &mut [T], up: &[T]) {
    for (gate, up) in gate.iter_mut().zip(up) {
        *gate = T::round_from(act.value_and_slope(gate.upcast()).0 * up.upcast());
    }
}

#[inline(always)]
fn gated_backward<T: Number>(act: Activation, gate: &mut [T], up: &mut [T], d: &mut [T]) {
    for ((gate, up), d) in gate.iter_mut().zip(up).zip(d) {
        let ((y, slope), u, dy) = (act.value_and_slope(gate.upcast()), up.upcast(), d.upcast());
        (*gate, *up, *d) = (T::round_from(dy * u * slope), T::round_from(dy * y), T::round_from(y * u));
    }
}

#[inline(always)]
fn gated_gradients<T: Number>(act: Activation, gate: &mut [T], up: &mut [T], d: &[T]) {
    for ((gate, up), d) in gate.iter_mut().zip(up).zip(d) {
        let ((y, slope), u, dy) = (act.value_and_slope(gate.upcast()), up.upcast(), d.upcast());
        (*gate, *up) = (T::round_from(dy * u * slope), T::round_from(dy * y));
    }
}

/// `e^x` with a relative error of at most 1.5e-7; 0 below -87, and at most e^88. It is plain arithmetic, so that loops over
/// it vectorise.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // Adding 1.5 * 2^23 rounds a number to an integer, which is left in the lowest bits.
    const ROUND: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let bounded = x.clamp(-87.0, 88.0);
    let shifted = bounded * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let f = bounded - n * LN2_HIGH - n * LN2_LOW;
    // The coefficients of this polynomial are those of `expf` in the Cephes library.
    let p = 1.987_569_1e-4;
    let p = p * f + 1.398_2e-3;
    let p = p * f + 8.333_452e-3;
    let p = p * f + 4.166_579_6e-2;
    let p = p * f + 0.166_666_65;
    let p = p * f + 0.5;
    let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(1.0f32.to_bits()));
    if x < -87.0 { 0.0 } else { (p * f * f + f + 1.0) * power }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exponential_is_exact_to_a_few_units_in_the_last_place() {
        for step in -870_000..880_000 {
            let x = step as f32 * 1e-4;
            let wanted = f64::from(x).exp();
            let error = (f64::from(exp(x)) - wanted).abs() / wanted;
            assert!(error < 1.5e-7, "e^{x} is wrong by {error:e}");
        }
        assert_eq!((exp(0.0), exp(-87.1), exp(f32::NEG_INFINITY)), (1.0, 0.0, 0.0));
        assert!(exp(f32::NAN).is_nan() && exp(f32::INFINITY).is_finite());
    }

    #[test]
    fn activations_and_derivatives_equal_their_definition_in_f64() {
        let gelu = |x: f64| 0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh());
        let silu = |x: f64| x / (1.0 + (-x).exp());
        for step in -1200..1200 {
            let x = step as f32 / 50.0;
            for (act, plain) in [(Activation::Silu, &silu as &dyn Fn(f64) -> f64), (Activation::GeluTanh, &gelu)] {
                let (y, dy) = act.value_and_slope(x);
                let (at, h) = (f64::from(x), 1e-4);
                let slope = (plain(at + h) - plain(at - h)) / (2.0 * h);
                assert!((f64::from(y) - plain(at)).abs() < 3e-7 * at.abs().max(1.0), "{act:?} of {x} is {y}");
                assert!((f64::from(dy) - slope).abs() < 2e-6, "slope of {act:?} at {x} is {dy}, not {slope}");
            }
        }
    }

    #[test]
    fn a_clamped_gate_has_the_slopes_of_its_definition_in_f64() {
        let act = ClampedSwiglu { alpha: 1.702, limit: 1.3 };
        let plain = |gate: f64, up: f64| {
            let (gate, up) = (gate.min(1.3), up.clamp(-1.3, 1.3));
            (up + 1.0) * gate / (1.0 + (-1.702 * gate).exp())
        };
        for gate in (-80..80).map(|step| step as f32 / 30.0) {
            for up in (-60..60).map(|step| step as f32 / 29.0) {
                let (y, d_gate, d_up) = act.with_slopes(gate, up);
                let (at, of, h) = (f64::from(gate), f64::from(up), 1e-5);
                assert!((f64::from(y) - plain(at, of)).abs() < 1e-6, "{gate}, {up}: {y}");
                // Central differences are compared where an input is inside its bounds or clamped; at a bound the slope
                // differs between the two sides.
                let slopes = [plain(at + h, of) - plain(at - h, of), plain(at, of + h) - plain(at, of - h)];
                for (got, wanted, value) in [(d_gate, slopes[0], gate), (d_up, slopes[1], up)] {
                    let on_a_bound = (value.abs() - 1.3).abs() < 1e-4;
                    let near = (f64::from(got) - wanted / (2.0 * h)).abs() < 1e-5;
                    assert!(near || on_a_bound, "{gate}, {up}: {got}");
                }
            }
        }
    }

    #[test]
    fn far_from_zero_a_gate_is_open_or_shut_and_never_nan() {
        for act in [Activation::Silu, Activation::GeluTanh] {
            assert_eq!(act.value_and_slope(200.0), (200.0, 1.0), "{act:?}");
            let (y, dy) = act.value_and_slope(-200.0);
            assert!(y.abs() < 1e-30 && dy.abs() < 1e-30, "{act:?}: {y}, {dy}");
        }
    }
}
