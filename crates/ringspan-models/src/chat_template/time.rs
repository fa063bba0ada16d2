//! The time of day, as templates ask for it.

use chrono::format::{Item, StrftimeItems};
use chrono::{DateTime, FixedOffset, Local};
use minijinja::{Error, ErrorKind};
use std::fmt::Write;

/// `strftime_now` of templates: the local time, written as Python's `datetime.now().strftime(format)` writes it.
pub(super) fn strftime_now(format: &str) -> Result<String, Error> {
    strftime(&Local::now().fixed_offset(), format).map_err(|problem| Error::new(ErrorKind::InvalidOperation, problem))
}

/// Writes a local time without its zone, which Python's `now()` does not know.
fn strftime(time: &DateTime<FixedOffset>, format: &str) -> Result<String, String> {
    let unknown = || {
        format!(
            "strftime_now: the format {format:?} has a directive that is none of Python's, such as %Y, %m, %d, %B, %b, %A, %H, \
             %M, %S or %%"
        )
    };
    let ours = in_crate_directives(format);
    // Items that are checked before they are written: writing a wrong one as text would panic.
    let items: Vec<Item<'_>> = StrftimeItems::new(&ours).parse().map_err(|_| unknown())?;
    let mut text = String::new();
    write!(text, "{}", time.format_with_items(items.iter())).map_err(|_| unknown())?;
    Ok(text)
}

/// The format with those directives replaced that the crate writes differently: fractions of a second have six digits in Python,
/// and the zone of a time without one is empty.
fn in_crate_directives(format: &str) -> String {
    let mut out = String::with_capacity(format.len());
    let mut rest = format.chars();
    while let Some(c) = rest.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        match rest.next() {
            Some('f') => out.push_str("%6f"),
            Some('z' | 'Z') => {}
            Some(other) => out.extend(['%', other]),
            None => out.push('%'),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(format: &str) -> Result<String, String> {
        let time = DateTime::parse_from_rfc3339("2025-03-07T09:05:04.000321+05:30").expect("a time");
        strftime(&time, format)
    }

    #[test]
    fn times_are_written_as_python_writes_them() {
        // What python -c 'datetime(2025, 3, 7, 9, 5, 4, 321).strftime(..)' prints.
        for (format, text) in [
            ("%Y-%m-%d", "2025-03-07"),
            ("%d %b %Y", "07 Mar 2025"),
            ("%B %d, %Y", "March 07, 2025"),
            ("%A, %-d %B", "Friday, 7 March"),
            ("%H:%M:%S.%f", "09:05:04.000321"),
            ("%I %p%z|%Z|", "09 AM||"),
            ("100%% of %j", "100% of 066"),
            ("%c", "Fri Mar  7 09:05:04 2025"),
            ("", ""),
        ] {
            assert_eq!(at(format).as_deref(), Ok(text), "{format}");
        }
    }

    #[test]
    fn a_wrong_format_is_an_error_with_its_text() {
        for format in ["%", "%Q", "%Y-%", "%!", "%é", "%10d", "%-"] {
            let problem = at(format).expect_err(format);
            assert!(problem.contains(&format!("{format:?}")) && problem.contains("%Y"), "{problem}");
        }
    }
}
