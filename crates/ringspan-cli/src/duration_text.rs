//! Durations in words.

/// Seconds as a person reads them.
pub(crate) fn duration_text(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min {:02} s", seconds / 60, seconds % 60),
        _ => format!("{} h {:02} min", seconds / 3600, seconds / 60 % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_the_units_that_matter() {
        assert_eq!([0, 59, 60, 3599].map(duration_text), ["0 s", "59 s", "1 min 00 s", "59 min 59 s"]);
        assert_eq!([3600, 3661, 100_000].map(duration_text), ["1 h 00 min", "1 h 01 min", "27 h 46 min"]);
    }
}
