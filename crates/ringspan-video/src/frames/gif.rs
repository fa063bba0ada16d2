//! Animated GIFs.

use super::error::{Error, Result};
use super::rgb::RgbFrame;
use gif::{Encoder, Frame, Repeat};

/// Hundredths of a second between two frames: WAN makes 16 a second.
const DELAY: u16 = 6;
/// Speed of the choice of 256 colors for each frame, from 1 (best) to 30.
const SPEED: i32 = 10;

/// A GIF of these pictures, which are of one size, and are taken one after the other; it repeats without end.
///
/// # Errors
/// No pictures, and a side of more than 65,535 pixels.
pub fn encode(pictures: impl ExactSizeIterator<Item = RgbFrame>) -> Result<Vec<u8>> {
    let (frames, mut pictures) = (pictures.len(), pictures.peekable());
    let (width, height) = pictures.peek().map_or((0, 0), |first| (first.width, first.height));
    let refuse = |problem: String| Error::Gif { frames, width, height, problem };
    let side = |size: usize| u16::try_from(size).ok().filter(|size| *size > 0);
    let Some((columns, rows)) = side(width).zip(side(height)) else {
        return Err(refuse("a side has 1 to 65535 pixels".into()));
    };
    let encoding = |error: gif::EncodingError| refuse(error.to_string());
    let mut bytes = Vec::new();
    let mut encoder = Encoder::new(&mut bytes, columns, rows, &[]).map_err(encoding)?;
    encoder.set_repeat(Repeat::Infinite).map_err(encoding)?;
    for picture in pictures {
        let mut frame = Frame::from_rgb_speed(columns, rows, &picture.pixels, SPEED);
        frame.delay = DELAY;
        encoder.write_frame(&frame).map_err(encoding)?;
    }
    drop(encoder);
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gif_has_the_frames_and_nearly_their_colors() {
        let picture = |level: u8| RgbFrame { width: 9, height: 4, pixels: [level, 255 - level, 9].repeat(36) };
        let bytes = encode([picture(3), picture(200)].into_iter()).expect("a GIF");
        let mut options = gif::DecodeOptions::new();
        options.set_color_output(gif::ColorOutput::RGBA);
        let mut decoder = options.read_info(&bytes[..]).expect("a GIF");
        for level in [3, 200] {
            let frame = decoder.read_next_frame().expect("a frame").expect("two frames");
            assert_eq!((frame.width, frame.height, frame.delay), (9, 4, DELAY));
            let near = |(got, wanted): (&u8, u8)| got.abs_diff(wanted) < 4;
            assert!(frame.buffer.chunks(4).all(|pixel| pixel.iter().zip([level, 255 - level, 9]).all(near)));
        }
        assert!(decoder.read_next_frame().expect("the end").is_none());
    }

    #[test]
    fn pictures_that_are_too_wide_or_missing_are_refused() {
        let wide = RgbFrame { width: 65_536, height: 1, pixels: vec![0; 3 * 65_536] };
        assert!(encode([wide].into_iter()).expect_err("too wide").to_string().contains("65536 x 1"));
        assert!(encode([].into_iter()).is_err());
    }
}
