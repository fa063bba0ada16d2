//! Resizes pictures.

use super::error::{Error, Result};
use super::rgb::RgbFrame;
use fast_image_resize::images::{TypedImage, TypedImageRef};
use fast_image_resize::pixels::U8x3;
use fast_image_resize::{FilterType, ResizeAlg, ResizeOptions, Resizer};

/// The filter by which a picture is resized; both compute as Pillow's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResizeFilter {
    /// Lanczos's filter of three lobes, by which diffusers resizes the image of a video.
    Lanczos,
    /// Keys's cubic filter with a = -1/2, by which the image processor of CLIP resizes.
    Bicubic,
}

/// The picture with these numbers of pixels. The ratio of the sides is not kept.
///
/// # Errors
/// A side without pixels, or with more than 2^32 - 1.
pub fn resized(picture: &RgbFrame, width: usize, height: usize, filter: ResizeFilter) -> Result<RgbFrame> {
    if (picture.width, picture.height) == (width, height) {
        return Ok(picture.clone());
    }
    let refuse = |problem: String| Error::Resize {
        width: picture.width,
        height: picture.height,
        wanted_width: width,
        wanted_height: height,
        problem,
    };
    let side = |size: usize| {
        u32::try_from(size).ok().filter(|size| *size > 0).ok_or_else(|| refuse(format!("a side of {size} pixels")))
    };
    let error = |error: &dyn std::fmt::Display| refuse(error.to_string());
    let (columns, rows) = (side(width)?, side(height)?);
    let from = TypedImageRef::<U8x3>::from_buffer(side(picture.width)?, side(picture.height)?, &picture.pixels)
        .map_err(|of| error(&of))?;
    let filter = match filter {
        ResizeFilter::Lanczos => FilterType::Lanczos3,
        ResizeFilter::Bicubic => FilterType::CatmullRom,
    };
    let options = ResizeOptions::new().resize_alg(ResizeAlg::Convolution(filter));
    let mut resizer = Resizer::new();
    // Between the two directions levels are rounded and clamped, so the order counts: Pillow's first one is the width.
    // The type of pixels is known to the compiler: `resize`, which finds it out, is the code of all types, most of this crate's.
    let mut wide = TypedImage::<U8x3>::new(columns, side(picture.height)?);
    resizer.resize_typed(&from, &mut wide, &options).map_err(|of| error(&of))?;
    // Both directions take a reference, so that the compiler makes the code of one type of images only.
    let wide = TypedImageRef::new(columns, side(picture.height)?, wide.pixels()).map_err(|of| error(&of))?;
    let mut to = TypedImage::<U8x3>::new(columns, rows);
    resizer.resize_typed(&wide, &mut to, &options).map_err(|of| error(&of))?;
    Ok(RgbFrame { width, height, pixels: to.pixels().iter().flat_map(|pixel| pixel.0).collect() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_picture_of_one_color_keeps_it_and_sides_without_pixels_are_refused() {
        let picture = RgbFrame { width: 7, height: 5, pixels: [10, 200, 30].repeat(35) };
        for filter in [ResizeFilter::Lanczos, ResizeFilter::Bicubic] {
            let found = resized(&picture, 16, 3, filter).expect("a picture");
            assert_eq!((found.width, found.height, found.pixels), (16, 3, [10, 200, 30].repeat(48)));
            assert_eq!(resized(&picture, 7, 5, filter).expect("the same"), picture);
        }
        let message = resized(&picture, 0, 3, ResizeFilter::Lanczos).expect_err("no pixels").to_string();
        assert!(message.contains("7 x 5") && message.contains("0 x 3"), "{message}");
    }
}
