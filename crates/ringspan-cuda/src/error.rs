//! Converts errors of the driver to errors of the library.

use cudarc::driver::DriverError;
use ringspan::Error;

/// Makes the error of a driver call that `device` did not do.
pub(crate) fn failed(device: &str, operation: &'static str) -> impl Fn(DriverError) -> Error + use<> {
    let device = device.to_string();
    move |error| {
        let name = error.error_name().map_or_else(|_| format!("{:?}", error.0), |name| name.to_string_lossy().into());
        let text = error.error_string().map_or_else(|_| String::new(), |text| text.to_string_lossy().into_owned());
        Error::Device { device: device.clone(), operation, message: format!("{text} ({name})") }
    }
}
