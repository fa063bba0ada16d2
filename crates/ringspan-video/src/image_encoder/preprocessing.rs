//! Prepares an image for the encoder: resizes, crops and normalizes it.

use crate::error::{Error, Result};
use crate::frames::{self, ResizeFilter, RgbFrame};
use serde::Deserialize;

/// Most pixels of a resized image. The longer side of a picture of a single row of pixels would become millions.
const MOST_PIXELS: usize = 1 << 28;

/// The steps of `CLIPImageProcessor`, by their names in `preprocessor_config.json`: the image is resized, its middle is cut out, and
/// its colors are normalized. Absent keys have the defaults of transformers.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default)]
pub struct ImagePreprocessing {
    do_resize: bool,
    size: ResizedSides,
    resample: u32,
    do_center_crop: bool,
    crop_size: Sides,
    do_rescale: bool,
    rescale_factor: f64,
    do_normalize: bool,
    image_mean: [f32; 3],
    image_std: [f32; 3],
}

#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
pub(super) struct Sides {
    height: usize,
    width: usize,
}

/// The sides of a resized image.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(untagged)]
enum ResizedSides {
    /// The shorter side has so many pixels, and the ratio of the sides is kept.
    Shortest {
        shortest_edge: usize,
    },
    Both(Sides),
}

/// Pillow's number of the bicubic filter.
const BICUBIC: u32 = 3;

impl Default for ImagePreprocessing {
    fn default() -> Self {
        Self {
            do_resize: true,
            size: ResizedSides::Shortest { shortest_edge: 224 },
            resample: BICUBIC,
            do_center_crop: true,
            crop_size: Sides { height: 224, width: 224 },
            do_rescale: true,
            rescale_factor: 1.0 / 255.0,
            do_normalize: true,
            image_mean: [0.481_454_66, 0.457_827_5, 0.408_210_73],
            image_std: [0.268_629_54, 0.261_302_6, 0.275_777_1],
        }
    }
}

impl ImagePreprocessing {
    /// Checks that images of every size become squares of `side` pixels.
    ///
    /// # Errors
    /// Another filter than the bicubic one, sides that give other sizes, a deviation of 0.
    pub fn check(&self, side: usize) -> Result<()> {
        let refuse = |problem: String| Err(Error::Config(problem));
        if self.do_resize && self.resample != BICUBIC {
            return refuse(format!("resample is {}, and {BICUBIC} (bicubic) is supported", self.resample));
        }
        if !self.do_center_crop {
            return refuse("do_center_crop is false: images that are not square would not fit the encoder".into());
        }
        let Sides { height, width } = self.crop_size;
        if (height, width) != (side, side) {
            return refuse(format!("crop_size is {height} x {width}, and the encoder takes {side} x {side}"));
        }
        let least = match self.size {
            ResizedSides::Shortest { shortest_edge } => shortest_edge,
            ResizedSides::Both(Sides { height, width }) => height.min(width),
        };
        if self.do_resize && least < side {
            return refuse(format!("size is {least} pixels, fewer than the {side} of crop_size"));
        }
        if self.do_normalize && self.image_std.contains(&0.0) {
            return refuse(format!("image_std is {:?}, which divides by 0", self.image_std));
        }
        Ok(())
    }

    /// The colors `[3, side, side]` of an image.
    ///
    /// # Errors
    /// An image without pixels, and one that is not resized and smaller than what is cut out.
    pub fn pixels(&self, image: &RgbFrame) -> Result<Vec<f32>> {
        let Sides { height, width } = self.crop_size;
        let image = self.resized(image)?;
        if image.height < height || image.width < width {
            return Err(Error::Input(format!(
                "an image of {} x {} pixels, from which {width} x {height} are cut (crop_size)",
                image.width, image.height
            )));
        }
        let (top, left) = ((image.height - height) / 2, (image.width - width) / 2);
        let scale = if self.do_rescale { self.rescale_factor as f32 } else { 1.0 };
        let mut pixels = Vec::with_capacity(3 * height * width);
        for color in 0..3 {
            let (mean, std) = match self.do_normalize {
                true => (self.image_mean[color], self.image_std[color]),
                false => (0.0, 1.0),
            };
            for row in top..top + height {
                let levels = &image.pixels[3 * (row * image.width + left)..][..3 * width];
                let of_color = levels.iter().skip(color).step_by(3);
                pixels.extend(of_color.map(|level| (f32::from(*level) * scale - mean) / std));
            }
        }
        Ok(pixels)
    }

    fn resized(&self, image: &RgbFrame) -> Result<RgbFrame> {
        let Sides { height, width } = self.resized_sides(image)?;
        frames::resized(image, width, height, ResizeFilter::Bicubic).map_err(|error| Error::Input(error.to_string()))
    }

    /// The sides of an image when it has been resized.
    ///
    /// # Errors
    /// More than [`MOST_PIXELS`].
    pub(super) fn resized_sides(&self, image: &RgbFrame) -> Result<Sides> {
        let RgbFrame { width, height, .. } = *image;
        let (height, width) = match self.size {
            _ if !self.do_resize => (height, width),
            ResizedSides::Both(Sides { height, width }) => (height, width),
            ResizedSides::Shortest { shortest_edge: short } => {
                // The longer side is rounded down, as transformers does. A picture without pixels is refused when it is resized.
                let longer = |long: usize, of: usize| short.saturating_mul(long) / of.max(1);
                if width <= height { (longer(height, width), short) } else { (short, longer(width, height)) }
            }
        };
        if width.saturating_mul(height) > MOST_PIXELS {
            return Err(Error::Input(format!(
                "the image encoder would resize an image of {} x {} pixels to {width} x {height}, more than {MOST_PIXELS} pixels",
                image.width, image.height
            )));
        }
        Ok(Sides { height, width })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn read(more: Value) -> ImagePreprocessing {
        serde_json::from_value(more).expect("a configuration")
    }

    #[test]
    fn what_gives_another_size_is_refused_with_the_numbers() {
        read(json!({})).check(224).expect("the defaults");
        for (more, words) in [
            (json!({ "resample": 2 }), "resample is 2"),
            (json!({ "do_center_crop": false }), "do_center_crop"),
            (json!({ "crop_size": { "height": 28, "width": 224 } }), "28 x 224"),
            (json!({ "size": { "shortest_edge": 200 } }), "200 pixels"),
            (json!({ "size": { "height": 300, "width": 100 } }), "100 pixels"),
            (json!({ "image_std": [1.0, 0.0, 1.0] }), "[1.0, 0.0, 1.0]"),
        ] {
            let message = read(more).check(224).expect_err("must be refused").to_string();
            assert!(message.contains(words), "{message}");
        }
    }

    #[test]
    fn the_middle_of_an_image_is_cut_out_and_normalized() {
        // Rows of 1, 2, 3 with green one more and blue two more than red.
        let pixels = (0..3u8).flat_map(|row| [[row + 1, row + 2, row + 3]; 2]).flatten().collect();
        let image = RgbFrame { width: 2, height: 3, pixels };
        let crop = json!({
            "do_resize": false, "crop_size": { "height": 1, "width": 2 },
            "do_rescale": false, "image_mean": [1.0, 1.0, 1.0], "image_std": [1.0, 2.0, 3.0],
        });
        assert_eq!(read(crop.clone()).pixels(&image).expect("pixels"), [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]);
        let mut large = crop;
        large["crop_size"]["height"] = json!(4);
        let message = read(large).pixels(&image).expect_err("too small").to_string();
        assert!(message.contains("2 x 3") && message.contains("2 x 4"), "{message}");
        // A row of pixels, whose longer side would have millions.
        let row = RgbFrame { width: 10_000_000, height: 1, pixels: vec![0; 30_000_000] };
        let message = read(json!({})).pixels(&row).expect_err("too large").to_string();
        assert!(message.contains("10000000 x 1") && message.contains("2240000000 x 224"), "{message}");
    }
}
