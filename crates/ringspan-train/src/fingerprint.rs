//! Fingerprints: hashes that are the same on every system.

/// FNV-1a over 64-bit words, then mixed so that the low bits are as good as the high ones: equal on every system and version.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fingerprint(u64);

impl Fingerprint {
    pub(crate) fn new() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }

    pub(crate) fn push(&mut self, word: u64) {
        self.0 = (self.0 ^ word).wrapping_mul(0x0000_0100_0000_01b3);
        self.0 ^= self.0 >> 29;
    }

    /// Adds bytes, and their number.
    pub(crate) fn push_bytes(&mut self, bytes: &[u8]) {
        let (whole, rest) = bytes.as_chunks::<8>();
        whole.iter().for_each(|word| self.push(u64::from_le_bytes(*word)));
        self.push(rest.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte)));
        self.push(bytes.len() as u64);
    }

    pub(crate) fn finish(self) -> u64 {
        let hash = (self.0 ^ (self.0 >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
        hash ^ (hash >> 33)
    }
}

/// The fingerprint of `words`.
#[must_use]
pub fn fingerprint(words: impl IntoIterator<Item = u64>) -> u64 {
    let mut hash = Fingerprint::new();
    words.into_iter().for_each(|word| hash.push(word));
    hash.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fingerprint_sees_words_order_and_borders() {
        let base = fingerprint([2, 1, 2, 1, 3]);
        assert_ne!(base, fingerprint([1, 1, 2, 2, 3]));
        assert_ne!(base, fingerprint([2, 1, 2, 1, 4]));
        assert_eq!(base, fingerprint([2, 1, 2, 1, 3]));
        let of = |bytes: &[u8]| {
            let mut hash = Fingerprint::new();
            hash.push_bytes(bytes);
            hash.finish()
        };
        assert_ne!(of(b"a"), of(b"a\0"));
        assert_ne!(of(b"12345678"), of(b"12345679"));
    }
}
