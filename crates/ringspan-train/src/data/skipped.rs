//! Records which parts of a source are not read, and why.

use serde::{Deserialize, Serialize};

/// How many names are shown per reason.
const SHOWN: usize = 3;

/// The parts of a source that are not learned from.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Skipped {
    /// Files and folders that are not read, by reason.
    pub files: Vec<NotRead>,
    /// Number of conversations in which nothing of the assistant is learned, and of empty completions.
    pub silent: usize,
}

/// Files and folders that are not read for the same reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NotRead {
    /// The reason, in words such as "binary".
    pub what: String,
    /// Number of such files and folders.
    pub count: usize,
    /// Names of the first ones.
    pub first: Vec<String>,
}

impl Skipped {
    /// Counts one more file or folder.
    pub(super) fn add(&mut self, what: &str, name: &str) {
        let index = self.files.iter().position(|of| of.what == what).unwrap_or_else(|| {
            self.files.push(NotRead { what: what.into(), count: 0, first: Vec::new() });
            self.files.len() - 1
        });
        let same = &mut self.files[index];
        same.count += 1;
        if same.first.len() < SHOWN {
            same.first.push(name.into());
        }
    }

    /// The counts in words, unless nothing is skipped.
    pub(crate) fn words(&self) -> Option<String> {
        let each = |of: &NotRead| format!("{} {} ({})", of.count, of.what, few(&of.first, of.count));
        let mut words: Vec<String> = Vec::new();
        if !self.files.is_empty() {
            words.push(format!("not read: {}", self.files.iter().map(each).collect::<Vec<_>>().join(", ")));
        }
        if self.silent > 0 {
            words.push(format!("skipped {} documents without anything to learn", self.silent));
        }
        (!words.is_empty()).then(|| words.join("; "))
    }
}

/// The first of `count` names, and how many more there are.
pub(super) fn few(names: &[String], count: usize) -> String {
    let shown = names[..names.len().min(SHOWN)].join(", ");
    if count > SHOWN { format!("{shown} and {} more", count - SHOWN) } else { shown }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_of_each_kind_are_named_and_the_others_counted() {
        let mut skipped = Skipped::default();
        assert_eq!(skipped.words(), None);
        (0..5).for_each(|i| skipped.add("binary", &format!("{i}.png")));
        skipped.add("empty", "x.txt");
        skipped.silent = 2;
        assert_eq!(
            skipped.words().unwrap(),
            "not read: 5 binary (0.png, 1.png, 2.png and 2 more), 1 empty (x.txt); skipped 2 documents without anything to \
             learn"
        );
    }
}
