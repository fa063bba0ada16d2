//! The arguments of the benchmark.

use ringspan::kernel::Isa;

/// Names of the `name=value` arguments.
const NAMES: [&str; 8] = ["case", "mask", "type", "threads", "rounds", "isa", "score", "clock"];

/// Exits if an argument would have no effect.
pub(crate) fn check_arguments() {
    for argument in std::env::args().skip(1).filter(|argument| !argument.starts_with('-')) {
        if let Some((name, _)) = argument.split_once('=').filter(|(name, _)| !NAMES.contains(name)) {
            eprintln!("{argument}: '{name}' is unknown: possible are {}", NAMES.join(", "));
            std::process::exit(2);
        }
    }
}

/// The value of the argument `name=value`.
pub(crate) fn given(name: &str) -> Option<String> {
    std::env::args().find_map(|argument| argument.strip_prefix(name)?.strip_prefix('=').map(str::to_owned))
}

/// Whether the argument `name=` chooses a value; without it, all are chosen.
pub(crate) fn chosen(name: &str, value: &str) -> bool {
    given(name).is_none_or(|wanted| wanted.split(',').any(|wanted| wanted == value))
}

/// The instruction sets to be timed: those given by `isa=`, or the fastest one.
pub(crate) fn isas() -> Vec<Isa> {
    let Some(wanted) = given("isa") else { return vec![Isa::best()] };
    let isa = |name: &str| name.parse().unwrap_or_else(|error| panic!("isa={name}: {error}"));
    wanted.split(',').map(isa).collect()
}

/// The numbers of threads to be timed.
pub(crate) fn threads() -> impl Iterator<Item = usize> {
    [1, 2].into_iter().filter(|threads| chosen("threads", &threads.to_string()))
}
