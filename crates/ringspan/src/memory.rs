//! Reads free and used memory from the operating system.

/// Bytes of free memory: of the machine, or of the container if that has less. `None` if they are unknown.
pub fn available() -> Option<u64> {
    let of_machine = number("/proc/meminfo", "MemAvailable:")?;
    Some(of_container().map_or(of_machine, |bytes| bytes.min(of_machine)))
}

/// Peak resident memory of this process, in bytes.
pub fn peak() -> Option<u64> {
    number("/proc/self/status", "VmHWM:")
}

/// Bytes that a container's memory limit leaves free, if there is a limit (cgroup v2).
fn of_container() -> Option<u64> {
    let number = |name| std::fs::read_to_string(format!("/sys/fs/cgroup/{name}")).ok()?.trim().parse::<u64>().ok();
    let (limit, used): (u64, u64) = (number("memory.max")?, number("memory.current")?);
    // The kernel frees its cache of files when memory is needed, so inactive file pages count as free.
    let statistics = std::fs::read_to_string("/sys/fs/cgroup/memory.stat").unwrap_or_default();
    let cached = statistics.lines().find_map(|line| line.strip_prefix("inactive_file ")?.parse::<u64>().ok());
    Some(limit.saturating_sub(used.saturating_sub(cached.unwrap_or(0))))
}

/// Bytes in the line `name` of a system file that gives kibibytes.
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
