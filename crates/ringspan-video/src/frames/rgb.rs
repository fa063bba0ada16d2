//! Pixels of 256 levels for each color.

use super::error::{Error, Result};
use crate::vae::VideoTensor;

/// A picture: rows of pixels, three bytes each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RgbFrame {
    /// Pixels of a row.
    pub width: usize,
    /// Rows.
    pub height: usize,
    /// `[height, width, 3]`
    pub pixels: Vec<u8>,
}

/// The pictures of one video `[1, 3, F, H, W]` of colors in [-1, 1], made one after the other as they are taken.
///
/// ```
/// use ringspan_video::frames::to_rgb;
/// use ringspan_video::vae::VideoTensor;
///
/// let red = VideoTensor::new([1, 3, 1, 1, 1], vec![1.0, -1.0, -1.0])?;
/// assert_eq!(to_rgb(&red)?.next().map(|frame| frame.pixels), Some(vec![255, 0, 0]));
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Several videos, or other channels than 3.
pub fn to_rgb(video: &VideoTensor) -> Result<impl ExactSizeIterator<Item = RgbFrame>> {
    let shape @ [batch, channels, frames, height, width] = video.shape();
    if (batch, channels) != (1, 3) {
        return Err(Error::Shape { shape });
    }
    let area = height * width;
    Ok((0..frames).map(move |frame| {
        let mut pixels = vec![0; 3 * area];
        for color in 0..3 {
            let values = &video.values()[(color * frames + frame) * area..][..area];
            pixels.iter_mut().skip(color).step_by(3).zip(values).for_each(|(level, x)| *level = level_of(*x));
        }
        RgbFrame { width, height, pixels }
    }))
}

/// The level of a color in [-1, 1]; what is outside is clamped, and NaN is black.
fn level_of(x: f32) -> u8 {
    ((x + 1.0) * 127.5).round().clamp(0.0, 255.0) as u8
}

/// The colors `[1, 3, F, H, W]` in [-1, 1] of pictures of one size.
pub(crate) fn from_rgb(pictures: &[RgbFrame]) -> ([usize; 5], Vec<f32>) {
    let (height, width) = pictures.first().map_or((0, 0), |first| (first.height, first.width));
    let area = height * width;
    let mut values = vec![0.0; 3 * pictures.len() * area];
    for (frame, picture) in pictures.iter().enumerate() {
        for color in 0..3 {
            let to = &mut values[(color * pictures.len() + frame) * area..][..area];
            let levels = picture.pixels.iter().skip(color).step_by(3);
            to.iter_mut().zip(levels).for_each(|(x, level)| *x = f32::from(*level) / 127.5 - 1.0);
        }
    }
    ([1, 3, pictures.len(), height, width], values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_level_returns_to_itself_and_colors_outside_are_clamped() {
        let pixels: Vec<u8> = (0..=255).flat_map(|level| [level, 255 - level, 7]).collect();
        let picture = RgbFrame { width: 32, height: 8, pixels };
        let (shape, values) = from_rgb(&[picture.clone(), picture.clone()]);
        let video = VideoTensor::new(shape, values).expect("a video");
        assert!(to_rgb(&video).expect("pictures").eq([picture.clone(), picture]));
        assert_eq!([-1.5, -1.0, 0.0, 1.0, 7.0, f32::NAN].map(level_of), [0, 0, 128, 255, 255, 0]);
    }

    #[test]
    fn several_videos_are_no_pictures() {
        let video = VideoTensor::new([2, 3, 1, 1, 1], vec![0.0; 6]).expect("a video");
        let message = to_rgb(&video).err().expect("two videos").to_string();
        assert!(message.contains("[2, 3, 1, 1, 1]") && message.contains(".safetensors"), "{message}");
    }
}
