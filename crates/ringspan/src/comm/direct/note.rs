//! The notes that ranks exchange about their messages.

use crate::comm::codec::{Reader, Writer};
use crate::comm::header::Header;

/// A note from one rank to another. The notes of a pair of ranks keep their order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Note {
    /// Announces the next message: its header, and how it travels if it is on a device; else the underlying communicator
    /// carries it.
    Announce { header: Header, device: Option<DeviceAnnouncement> },
    /// The first announced block without an answer goes with this flight.
    Answer { flight: u64 },
    /// Asks what the receiver does.
    Question,
    /// The operation that the sender waits in; empty if it computes.
    Doing { text: String },
    /// The sender sends nothing more.
    Bye,
}

/// The announcement of a block that moves from device to device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DeviceAnnouncement {
    pub(super) type_code: u64,
    /// The block can go with this flight or a later one.
    pub(super) earliest: u64,
}

impl Note {
    pub(super) fn encode(&self) -> Vec<u8> {
        let Writer(mut bytes) = match self {
            Self::Announce { device: None, .. } => Writer::default().number(0),
            Self::Announce { device: Some(DeviceAnnouncement { type_code, earliest }), .. } => {
                Writer::default().number(1).number(*type_code).number(*earliest)
            }
            Self::Answer { flight } => Writer::default().number(2).number(*flight),
            Self::Bye => Writer::default().number(3),
            Self::Question => Writer::default().number(4),
            Self::Doing { text } => Writer::default().number(5).text(text),
        };
        if let Self::Announce { header, .. } = self {
            bytes.extend(header.encode());
        }
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader(bytes);
        let device = match reader.number()? {
            0 => None,
            1 => Some(DeviceAnnouncement { type_code: reader.number()?, earliest: reader.number()? }),
            2 => {
                let flight = reader.number()?;
                return reader.end(Self::Answer { flight });
            }
            3 => return reader.end(Self::Bye),
            4 => return reader.end(Self::Question),
            5 => {
                let text = reader.text()?;
                return reader.end(Self::Doing { text });
            }
            _ => return None,
        };
        Some(Self::Announce { header: Header::decode(reader.0)?, device })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::header::{Content, Kind};

    #[test]
    fn notes_come_back_and_damaged_ones_are_refused() {
        let content = Content::Message { group: [(1, 2)].into(), tag: 5 };
        let header = Header { content, kind: Kind::U16, len: 7 };
        let device = Some(DeviceAnnouncement { type_code: 2, earliest: u64::MAX });
        for note in [
            Note::Announce { header: header.clone(), device: None },
            Note::Announce { header, device },
            Note::Answer { flight: 9 },
            Note::Question,
            Note::Doing { text: "barrier #3".into() },
            Note::Bye,
        ] {
            let bytes = note.encode();
            assert_eq!(Note::decode(&bytes), Some(note));
            (0..bytes.len()).for_each(|len| assert_eq!(Note::decode(&bytes[..len]), None));
            assert_eq!(Note::decode(&[&bytes[..], &[0]].concat()), None);
        }
    }
}
