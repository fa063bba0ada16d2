//! The signals that ranks exchange on the connections of the watch.

use crate::comm::codec::{Reader, Writer};
use crate::comm::group::failure::Failure;
use std::io::{self, Read, Write};

/// Maximum bytes of a signal; error messages are cut to fit.
const LONGEST: usize = 64 << 10;

/// Maximum number of ranks waited for in a heartbeat.
const MAX_WAITS_FOR: usize = 1024;

/// A signal between rank 0 and another rank.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Signal {
    /// The first signal on a connection: the rank of the sender, and the world's secret.
    Hello { rank: usize, secret: [u64; 2] },
    /// A heartbeat: what the rank does, the ranks it waits for, and for how many milliseconds.
    Heartbeat { operation: String, waits_for: Vec<usize>, for_ms: u64 },
    /// The world has failed.
    Failed(Failure),
    /// Asks what a rank does.
    Ask(usize),
    /// The answer: what that rank does.
    Answer(usize, String),
    /// The sender has reported its error and is ready to end.
    Left,
    /// All ranks are ready to end.
    Over,
    /// The sender has finished well; the connection closes when its process ends.
    Bye,
}

impl Signal {
    pub(super) fn write(&self, to: &mut impl Write) -> io::Result<()> {
        let body = self.encode();
        let mut message = (body.len() as u32).to_le_bytes().to_vec();
        message.extend(body);
        to.write_all(&message)
    }

    pub(super) fn read(from: &mut impl Read) -> io::Result<Self> {
        let mut len = [0; 4];
        from.read_exact(&mut len)?;
        let len = u32::from_le_bytes(len) as usize;
        let damaged = || io::Error::new(io::ErrorKind::InvalidData, "a damaged signal");
        if len > LONGEST {
            return Err(damaged());
        }
        let mut body = vec![0; len];
        from.read_exact(&mut body)?;
        Self::decode(&body).ok_or_else(damaged)
    }

    fn encode(&self) -> Vec<u8> {
        let kind = |kind: u64| Writer::default().number(kind);
        let message = match self {
            Self::Hello { rank, secret } => kind(0).number(*rank as u64).number(secret[0]).number(secret[1]),
            Self::Heartbeat { operation, waits_for, for_ms } => {
                let start = kind(1).number(*for_ms).text(cut(operation));
                // A shortened list may only delay the detection of a cycle.
                waits_for.iter().take(MAX_WAITS_FOR).fold(start, |signal, rank| signal.number(*rank as u64))
            }
            Self::Failed(Failure::Rank { peer, message }) => kind(2).number(*peer as u64).text(cut(message)),
            Self::Failed(Failure::Mismatch { ranks, operations }) => {
                let ranks = kind(3).number(ranks[0] as u64).number(ranks[1] as u64);
                ranks.text(cut(&operations[0])).text(cut(&operations[1]))
            }
            Self::Failed(Failure::Deadlock { problem }) => kind(4).text(cut(problem)),
            Self::Ask(rank) => kind(5).number(*rank as u64),
            Self::Answer(rank, operation) => kind(6).number(*rank as u64).text(cut(operation)),
            Self::Left => kind(7),
            Self::Over => kind(8),
            Self::Bye => kind(9),
        };
        message.0
    }

    fn decode(body: &[u8]) -> Option<Self> {
        let mut reader = Reader(body);
        let signal = match reader.number()? {
            0 => Self::Hello { rank: reader.index()?, secret: [reader.number()?, reader.number()?] },
            1 => {
                let for_ms = reader.number()?;
                let operation = reader.text()?;
                let waits_for = (0..reader.0.len() / 8).map(|_| reader.index()).collect::<Option<_>>()?;
                Self::Heartbeat { operation, waits_for, for_ms }
            }
            2 => Self::Failed(Failure::Rank { peer: reader.index()?, message: reader.text()? }),
            3 => {
                let ranks = [reader.index()?, reader.index()?];
                Self::Failed(Failure::Mismatch { ranks, operations: [reader.text()?, reader.text()?] })
            }
            4 => Self::Failed(Failure::Deadlock { problem: reader.text()? }),
            5 => Self::Ask(reader.index()?),
            6 => Self::Answer(reader.index()?, reader.text()?),
            7 => Self::Left,
            8 => Self::Over,
            9 => Self::Bye,
            _ => return None,
        };
        reader.end(signal)
    }
}

/// The beginning of a text, as long as a signal can carry.
fn cut(text: &str) -> &str {
    let mut end = text.len().min(LONGEST / 4);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_come_back_and_damaged_ones_are_refused() {
        let long = "ß".repeat(LONGEST);
        let failure = Failure::Mismatch { ranks: [1, 2], operations: ["barrier #1".into(), "split #1".into()] };
        let signals = [
            Signal::Hello { rank: 3, secret: [u64::MAX, 1] },
            Signal::Heartbeat { operation: "waits".into(), waits_for: vec![2, 0], for_ms: 7 },
            Signal::Failed(Failure::Rank { peer: 5, message: "lost".into() }),
            Signal::Failed(failure),
            Signal::Failed(Failure::Deadlock { problem: "a circle".into() }),
            Signal::Ask(9),
            Signal::Answer(9, "computes".into()),
            Signal::Left,
            Signal::Over,
            Signal::Bye,
        ];
        for signal in signals {
            let mut bytes = Vec::new();
            signal.write(&mut bytes).expect("a vector takes all");
            assert_eq!(Signal::read(&mut &bytes[..]).expect("whole"), signal);
            (0..bytes.len()).for_each(|len| assert!(Signal::read(&mut &bytes[..len]).is_err()));
            let body = &bytes[4..];
            assert_eq!(Signal::decode(&[body, &[0]].concat()), None);
        }
        let mut bytes = Vec::new();
        Signal::Failed(Failure::Rank { peer: 0, message: long.clone() }).write(&mut bytes).expect("a vector");
        match Signal::read(&mut &bytes[..]).expect("it fits") {
            Signal::Failed(Failure::Rank { message, .. }) => assert!(long.starts_with(&message) && message.len() > 999),
            other => panic!("{other:?}"),
        }
        assert!(Signal::read(&mut &u32::MAX.to_le_bytes()[..]).is_err());
    }
}
