//! Guesses the next tokens of a text from the text itself, for speculative decoding: texts often repeat names, code and quotations.

/// Most and fewest tokens of the suffixes that are looked up.
const MAX_NGRAM: usize = 4;
const MIN_NGRAM: usize = 2;

/// Proposes up to `most` draft tokens: finds the longest suffix of `text`, of [`MAX_NGRAM`] to [`MIN_NGRAM`] tokens, that also occurs
/// before, and returns the tokens after its last earlier occurrence. Empty if no suffix occurs before.
pub(super) fn propose(text: &[u32], most: usize) -> &[u32] {
    if most == 0 {
        return &[];
    }
    for len in (MIN_NGRAM..=MAX_NGRAM).rev().filter(|len| *len < text.len()) {
        let (before, ending) = (&text[..text.len() - 1], &text[text.len() - len..]);
        if let Some(at) = before.windows(len).rposition(|window| window == ending) {
            let followed = &text[at + len..];
            return &followed[..most.min(followed.len())];
        }
    }
    &[]
}

#[cfg(test)]
mod tests {
    use super::propose;

    #[test]
    fn what_followed_the_longest_ending_last_is_proposed() {
        assert_eq!(propose(&[1, 2, 3, 9, 1, 2, 3], 2), [9, 1]);
        assert_eq!(propose(&[1, 2, 3, 9, 1, 2, 3], 9), [9, 1, 2, 3]);
        // The latest of equal endings, and a longer one before a later one.
        assert_eq!(propose(&[5, 1, 2, 7, 4, 1, 2, 8, 1, 2], 1), [8]);
        assert_eq!(propose(&[5, 1, 2, 7, 4, 1, 2, 8, 5, 1, 2], 1), [7]);
        // An ending may overlap itself.
        assert_eq!(propose(&[6, 6, 6], 3), [6]);
        for text in [&[][..], &[1], &[1, 2], &[1, 1], &[1, 2, 3, 4, 2]] {
            assert!(propose(text, 4).is_empty(), "{text:?}");
        }
        assert!(propose(&[1, 2, 1, 2], 0).is_empty());
    }
}
