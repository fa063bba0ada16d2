//! Memory, where the system tells.

/// Bytes that are free for use.
pub(crate) fn available() -> Option<u64> {
    number("/proc/meminfo", "MemAvailable:")
}

/// Most bytes that this process has had in memory so far.
pub(crate) fn peak() -> Option<u64> {
    number("/proc/self/status", "VmHWM:")
}

/// A line of a file of the system's, in kibibytes there.
fn number(path: &str, name: &str) -> Option<u64> {
    let text = std::fs::read_to_string(path).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kibibytes: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kibibytes * 1024)
}

#[cfg(test)]
mod tests {
    #[test]
    #[cfg(target_os = "linux")]
    fn this_process_has_memory_and_leaves_some() {
        assert!(super::peak().is_some_and(|bytes| bytes > 1 << 20));
        assert!(super::available().is_some_and(|bytes| bytes > 1 << 20));
    }
}
