//! The sizes of convolutions and of their inputs.

/// The sizes of a convolution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ConvolutionSizes {
    pub(crate) inputs: usize,
    pub(crate) outputs: usize,
    /// Frames of the kernel: 1 or 3.
    pub(crate) time: usize,
    /// Rows, and columns, of the kernel: 1 or 3.
    pub(crate) side: usize,
    /// Input frames from an output to the next.
    pub(crate) time_stride: usize,
    /// Input rows, and columns, from an output to the next.
    pub(crate) stride: usize,
}

impl ConvolutionSizes {
    /// A kernel of one position.
    pub(crate) fn pointwise(inputs: usize, outputs: usize) -> Self {
        Self { inputs, outputs, time: 1, side: 1, time_stride: 1, stride: 1 }
    }

    /// A causal kernel of 3 x 3 x 3.
    pub(crate) fn causal(inputs: usize, outputs: usize) -> Self {
        Self { time: 3, side: 3, ..Self::pointwise(inputs, outputs) }
    }

    /// A kernel of 3 x 3 in each frame.
    pub(crate) fn spatial(inputs: usize, outputs: usize) -> Self {
        Self { side: 3, ..Self::pointwise(inputs, outputs) }
    }

    /// A causal kernel of 3 frames.
    pub(crate) fn temporal(inputs: usize, outputs: usize) -> Self {
        Self { time: 3, ..Self::pointwise(inputs, outputs) }
    }

    /// Rows, or columns, of zeros before the first of a frame. A convolution with a stride has them after the last
    /// alone.
    pub(crate) fn padding_before(self) -> usize {
        usize::from(self.side > 1 && self.stride == 1)
    }

    /// Rows, or columns, of zeros after the last of a frame.
    pub(crate) fn padding_after(self) -> usize {
        usize::from(self.side > 1)
    }

    /// Numbers of the weight and of the bias.
    pub(crate) fn parameters(self) -> usize {
        (self.inputs * self.time * self.side * self.side + 1) * self.outputs
    }

    /// Frames before the first new one that an output depends on.
    pub(crate) fn history(self) -> usize {
        self.time - self.time_stride
    }

    /// The number of output rows that depend only on the first `rows` of `height` input rows.
    pub(crate) fn outputs_of(self, rows: usize, height: usize) -> usize {
        if rows == height {
            return height / self.stride;
        }
        (rows + self.padding_before()).checked_sub(self.side).map_or(0, |more| more / self.stride + 1)
    }
}

/// An input with its padding: `[frames, rows, cols, inputs]`.
pub(crate) struct Padded<'a> {
    pub(crate) data: &'a [f32],
    pub(crate) rows: usize,
    pub(crate) cols: usize,
}
