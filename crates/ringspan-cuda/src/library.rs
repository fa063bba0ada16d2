//! Checks whether NVIDIA's libraries are on this machine.
//!
//! cudarc can check this only in programs that load the libraries at run time; a program that links them as well (as candle
//! does) has a cudarc without the check.

use libloading::Library;

/// Names of the driver library that cudarc tries.
pub(crate) const DRIVER: &[&str] = if cfg!(windows) { &["nvcuda.dll"] } else { &["libcuda.so", "libcuda.so.1"] };

/// Names of the compiler library that cudarc tries.
pub(crate) const COMPILER: &[&str] = if cfg!(windows) {
    &["nvrtc64_130_0.dll", "nvrtc64_12.dll", "nvrtc64_11.dll"]
} else {
    &["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11"]
};

/// Whether a library of one of these names can be loaded.
pub(crate) fn is_there(names: &[&str]) -> bool {
    // SAFETY: loading runs the initialisers of NVIDIA's libraries, which have no preconditions.
    names.iter().any(|name| unsafe { Library::new(*name) }.is_ok())
}
