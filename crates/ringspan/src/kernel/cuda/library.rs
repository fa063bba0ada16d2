//! Whether NVIDIA's libraries are on this machine.
//!
//! cudarc has this question only for programs that load them, and a program that links them as well (candle's does) is built
//! with another cudarc. So it is asked here.

use libloading::Library;

/// Names of the driver, as cudarc looks for it.
pub(super) const DRIVER: &[&str] = if cfg!(windows) { &["nvcuda.dll"] } else { &["libcuda.so", "libcuda.so.1"] };

/// Names of the compiler, as cudarc looks for it.
pub(super) const COMPILER: &[&str] = if cfg!(windows) {
    &["nvrtc64_130_0.dll", "nvrtc64_12.dll", "nvrtc64_11.dll"]
} else {
    &["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11"]
};

/// Whether a library of one of these names can be loaded.
pub(super) fn is_there(names: &[&str]) -> bool {
    // SAFETY: runs the initialisers of NVIDIA's libraries, which are their own.
    names.iter().any(|name| unsafe { Library::new(*name) }.is_ok())
}
