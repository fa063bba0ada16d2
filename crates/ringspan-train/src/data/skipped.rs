//! Records which files of a source are not read, and why.

use serde::{Deserialize, Serialize};

/// How many names are shown per reason.
const SHOWN: usize = 3;

/// The parts of a source that are not learned from.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Skipped {
    /// Files and folders that are not read, by reason.
    pub files: Vec<SkippedFiles>,
    /// Number of conversations in which nothing of the assistant is learned, and of empty completions.
    #[serde(rename = "silent")]
    pub without_targets: usize,
}

/// Files and folders that are not read for the same reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SkippedFiles {
    /// The reason, in words such as "binary".
    #[serde(rename = "what")]
    pub reason: String,
    /// Number of such files and folders.
    pub count: usize,
    /// Names of the first ones.
    pub first: Vec<String>,
}

impl Skipped {
    /// Counts one more file or folder.
    pub(super) fn add(&mut self, reason: &str, name: &str) {
        let index = self.files.iter().position(|of| of.reason == reason).unwrap_or_else(|| {
            self.files.push(SkippedFiles { reason: reason.into(), count: 0, first: Vec::new() });
            self.files.len() - 1
        });
        let group = &mut self.files[index];
        group.count += 1;
        if group.first.len() < SHOWN {
            group.first.push(name.into());
        }
    }

    /// The counts in words, unless nothing is skipped.
    pub(crate) fn describe(&self) -> Option<String> {
        let each = |of: &SkippedFiles| format!("{} {} ({})", of.count, of.reason, first_names(&of.first, of.count));
        let mut sentences: Vec<String> = Vec::new();
        if !self.files.is_empty() {
            sentences.push(format!("not read: {}", self.files.iter().map(each).collect::<Vec<_>>().join(", ")));
        }
        if self.without_targets > 0 {
            sentences.push(format!("skipped {} documents without anything to learn", self.without_targets));
        }
        (!sentences.is_empty()).then(|| sentences.join("; "))
    }
}

/// The first of `count` names, and how many more there are.
pub(super) fn first_names(names: &[String], count: usize) -> String {
    let shown = names[..names.len().min(SHOWN)].join(", ");
    if count > SHOWN { format!("{shown} and {} more", count - SHOWN) } else { shown }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_of_each_kind_are_named_and_the_others_counted() {
        let mut skipped = Skipped::default();
        assert_eq!(skipped.describe(), None);
        (0..5).for_each(|i| skipped.add("binary", &format!("{i}.png")));
        skipped.add("empty", "x.txt");
        skipped.without_targets = 2;
        assert_eq!(
            skipped.describe().unwrap(),
            "not read: 5 binary (0.png, 1.png, 2.png and 2 more), 1 empty (x.txt); skipped 2 documents without anything to \
             learn"
        );
    }
}
