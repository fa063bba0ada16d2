//! PNG files.

use super::error::{Error, Result};
use super::rgb::{RgbFrame, from_rgb};
use crate::vae::VideoTensor;
use png::{BitDepth, ColorType, Decoder, Encoder, Transformations};
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

/// The most bytes that a picture may decode to: a file of a few bytes can claim any size.
const MOST_BYTES: usize = 1 << 30;

/// Writes each picture into an existing folder, as `frame_0000.png` and so on.
///
/// # Errors
/// Failures of the file system, and pictures without pixels.
pub fn write_folder(folder: &Path, pictures: impl IntoIterator<Item = RgbFrame>) -> Result<()> {
    pictures.into_iter().enumerate().try_for_each(|(index, picture)| write(&folder.join(name(index)), &picture))
}

fn name(index: usize) -> String {
    format!("frame_{index:04}.png")
}

fn write(path: &Path, picture: &RgbFrame) -> Result<()> {
    std::fs::write(path, encode_picture(path, picture)?).map_err(|source| Error::Io { path: path.to_owned(), source })
}

/// The bytes of a PNG file for `path`, whose name errors give.
///
/// # Errors
/// A picture without pixels.
pub fn encode_picture(path: &Path, picture: &RgbFrame) -> Result<Vec<u8>> {
    encode(picture).map_err(|problem| Error::Encode { path: path.to_owned(), problem })
}

fn encode(picture: &RgbFrame) -> std::result::Result<Vec<u8>, String> {
    let side = |size: usize| u32::try_from(size).unwrap_or(u32::MAX);
    let mut bytes = Vec::new();
    let mut encoder = Encoder::new(&mut bytes, side(picture.width), side(picture.height));
    encoder.set_color(ColorType::Rgb);
    encoder.set_depth(BitDepth::Eight);
    let mut writer = encoder.write_header().map_err(|error| error.to_string())?;
    writer.write_image_data(&picture.pixels).map_err(|error| error.to_string())?;
    writer.finish().map_err(|error| error.to_string())?;
    Ok(bytes)
}

/// Reads the pictures of a folder, in the order of their names (`2.png` before `10.png`), as a video `[1, 3, F, H, W]`.
///
/// # Errors
/// A folder without PNG files, files that cannot be read, and pictures of several sizes.
pub fn read_pictures(folder: &Path) -> Result<VideoTensor> {
    let io = |source| Error::Io { path: folder.to_owned(), source };
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(io)? {
        let path = entry.map_err(io)?.path();
        if path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("png")) {
            paths.push(path);
        }
    }
    paths.sort_by_cached_key(|path| (order(path), path.clone()));
    video(&paths, folder)
}

/// A part of a file's name. Numbers are compared by size: without leading zeros, the one with more digits is larger.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum NamePart {
    Number { digits: usize, number: String },
    Text(String),
}

fn order(path: &Path) -> Vec<NamePart> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let chars: Vec<char> = name.chars().collect();
    let parts = chars.chunk_by(|a, b| a.is_ascii_digit() == b.is_ascii_digit());
    let part = |part: &[char]| {
        let text: String = part.iter().collect();
        if !part[0].is_ascii_digit() {
            return NamePart::Text(text);
        }
        let number = text.trim_start_matches('0').to_owned();
        NamePart::Number { digits: number.len(), number }
    };
    parts.map(part).collect()
}

/// Reads one picture as a video `[1, 3, 1, H, W]`.
///
/// # Errors
/// A file that cannot be read.
pub fn read_picture(path: &Path) -> Result<VideoTensor> {
    video(&[path.to_owned()], path)
}

fn video(paths: &[PathBuf], of: &Path) -> Result<VideoTensor> {
    let mut pictures: Vec<RgbFrame> = Vec::with_capacity(paths.len());
    for path in paths {
        let picture = read(path)?;
        if let Some(first) =
            pictures.first().filter(|first| (first.width, first.height) != (picture.width, picture.height))
        {
            return Err(Error::Sizes {
                path: path.clone(),
                width: picture.width,
                height: picture.height,
                expected_width: first.width,
                expected_height: first.height,
            });
        }
        pictures.push(picture);
    }
    let (shape, values) = from_rgb(&pictures);
    VideoTensor::new(shape, values).map_err(|_| Error::Empty { path: of.to_owned() })
}

/// Reads a PNG of any color type; gray becomes three equal colors, and transparency is ignored.
fn read(path: &Path) -> Result<RgbFrame> {
    let broken = |problem: String| Error::Png { path: path.to_owned(), problem };
    let decoding = |error: png::DecodingError| broken(error.to_string());
    let file = File::open(path).map_err(|source| Error::Io { path: path.to_owned(), source })?;
    let mut decoder = Decoder::new(BufReader::new(file));
    decoder.set_transformations(Transformations::normalize_to_color8());
    let mut reader = decoder.read_info().map_err(decoding)?;
    let size = reader.output_buffer_size().filter(|size| *size <= MOST_BYTES);
    let size = size.ok_or_else(|| broken(format!("its pixels take more than {MOST_BYTES} bytes")))?;
    let mut bytes = vec![0; size];
    let info = reader.next_frame(&mut bytes).map_err(decoding)?;
    let (samples, gray) = match info.color_type {
        ColorType::Grayscale => (1, true),
        ColorType::GrayscaleAlpha => (2, true),
        ColorType::Rgb => (3, false),
        ColorType::Rgba => (4, false),
        ColorType::Indexed => return Err(broken("its palette was not expanded".into())),
    };
    let pixel = |pixel: &[u8]| if gray { [pixel[0]; 3] } else { [pixel[0], pixel[1], pixel[2]] };
    let pixels = bytes[..info.buffer_size()].chunks_exact(samples).flat_map(pixel).collect();
    Ok(RgbFrame { width: info.width as usize, height: info.height as usize, pixels })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frames::to_rgb;

    fn picture(width: usize, height: usize, seed: usize) -> RgbFrame {
        RgbFrame {
            width,
            height,
            pixels: (0..width * height * 3).map(|i| ((i * 37 + seed * 101) % 256) as u8).collect(),
        }
    }

    #[test]
    fn a_folder_of_pictures_is_read_as_it_was_written() {
        let folder = tempfile::tempdir().expect("a folder");
        let pictures = [picture(7, 5, 1), picture(7, 5, 2), picture(7, 5, 3)];
        write_folder(folder.path(), pictures.clone()).expect("written");
        std::fs::write(folder.path().join("notes.txt"), "no picture").expect("written");
        let read = read_pictures(folder.path()).expect("a video");
        assert!(to_rgb(&read).expect("pictures").eq(pictures));
        let one = read_picture(&folder.path().join("frame_0002.png")).expect("a picture");
        assert!(to_rgb(&one).expect("pictures").eq([picture(7, 5, 3)]));
    }

    #[test]
    fn numbers_in_names_are_ordered_by_size() {
        let folder = tempfile::tempdir().expect("a folder");
        for index in [10, 2, 1, 9] {
            write(&folder.path().join(format!("{index}.png")), &picture(2, 1, index)).expect("written");
        }
        let read = read_pictures(folder.path()).expect("a video");
        assert!(to_rgb(&read).expect("pictures").eq([1, 2, 9, 10].map(|index| picture(2, 1, index))));
        let ordered =
            ["007.png", "a2b10.png", "a10b2.png", "frame_0999.png", "frame_9999.png", "frame_10000.png", "z.png"];
        assert!(ordered.is_sorted_by_key(|name| order(Path::new(name))));
        assert!(order(Path::new(&name(9_999))) < order(Path::new(&name(10_000))));
    }

    #[test]
    fn pictures_that_are_missing_broken_or_of_another_size_are_refused_by_name() {
        let folder = tempfile::tempdir().expect("a folder");
        let refused = || read_pictures(folder.path()).expect_err("must be refused").to_string();
        assert!(refused().contains("no file that ends in .png"));
        write_folder(folder.path(), [picture(4, 3, 1)]).expect("written");
        write(&folder.path().join("later.png"), &picture(3, 4, 1)).expect("written");
        let message = refused();
        assert!(message.contains("later.png: 3 x 4") && message.contains("4 x 3"), "{message}");
        std::fs::write(folder.path().join("frame_0000.png"), b"text").expect("written");
        assert!(refused().contains("frame_0000.png: not a PNG"));
        let path = folder.path().join("later.png");
        let bytes = std::fs::read(&path).expect("a file");
        std::fs::write(&path, &bytes[..bytes.len() / 2]).expect("written");
        assert!(read_picture(&path).is_err());
    }

    #[test]
    fn gray_pictures_have_three_equal_colors() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("gray.png");
        let mut encoder = Encoder::new(File::create(&path).expect("a file"), 2, 1);
        encoder.set_color(ColorType::GrayscaleAlpha);
        encoder.write_header().and_then(|mut writer| writer.write_image_data(&[10, 255, 200, 0])).expect("written");
        assert_eq!(read(&path).expect("a picture").pixels, [10, 10, 10, 200, 200, 200]);
    }
}
