//! Headers, which precede payloads: what a message is, for which group, of which type and length.

use super::codec::{Reader, Writer};
use crate::comm::Buffer;
use crate::comm::group::mailbox::GroupId;
use crate::comm::group::operation::Operation;

/// The header of a payload. Its sender and receiver are those of the message that carries it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::comm) struct Header {
    pub(in crate::comm) content: Content,
    pub(in crate::comm) kind: Kind,
    /// Number of elements of the payload.
    pub(in crate::comm) len: usize,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::comm) enum Content {
    /// A message of a group under a tag.
    Message { group: GroupId, tag: u64 },
    /// A part of a collective of a group.
    CollectivePart { group: GroupId, number: u64, call: CallDescription },
    /// No message follows from the sender.
    Finished,
}

/// How a rank describes its collective: a text for people, and a fingerprint for comparison, since the text shortens long
/// lists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::comm) struct CallDescription {
    pub(in crate::comm) text: String,
    pub(in crate::comm) fingerprint: u64,
}

/// The type of a payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::comm) enum Kind {
    F32,
    U16,
    U64,
    U8,
}

impl CallDescription {
    pub(in crate::comm) fn new(operation: &Operation) -> Self {
        // The hash is FNV-1a over the operation's debug output, which has all of its fields.
        let add = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        let fingerprint = format!("{operation:?}").bytes().fold(0xcbf2_9ce4_8422_2325, add);
        Self { text: operation.to_string(), fingerprint }
    }
}

impl Kind {
    pub(in crate::comm) fn of(buffer: &Buffer) -> Self {
        match buffer {
            Buffer::F32(_) => Self::F32,
            Buffer::U16(_) => Self::U16,
            Buffer::U64(_) => Self::U64,
            // No device buffer is sent with this kind: the direct transport announces them itself, and MPI refuses them.
            Buffer::U8(_) | Buffer::Device(_) => Self::U8,
        }
    }

    /// A buffer of zeros to receive a payload of this type into.
    #[cfg(feature = "mpi")]
    pub(in crate::comm) fn zeros(self, len: usize) -> Buffer {
        match self {
            Self::F32 => Buffer::F32(vec![0.0; len]),
            Self::U16 => Buffer::U16(vec![0; len]),
            Self::U64 => Buffer::U64(vec![0; len]),
            Self::U8 => Buffer::U8(vec![0; len]),
        }
    }
}

impl Header {
    pub(in crate::comm) fn encode(&self) -> Vec<u8> {
        let head = Writer::default().number(self.kind as u64).number(self.len as u64);
        let with_group = |writer: Writer, group: &GroupId| {
            let writer = writer.number(group.len() as u64);
            group.iter().fold(writer, |writer, (number, color)| writer.number(*number).number(*color))
        };
        let message = match &self.content {
            Content::Finished => head.number(0),
            Content::Message { group, tag } => with_group(head.number(1).number(*tag), group),
            Content::CollectivePart { group, number, call } => {
                with_group(head.number(2).number(*number).number(call.fingerprint).text(&call.text), group)
            }
        };
        message.0
    }

    pub(in crate::comm) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader(bytes);
        let kind = match reader.number()? {
            0 => Kind::F32,
            1 => Kind::U16,
            2 => Kind::U64,
            3 => Kind::U8,
            _ => return None,
        };
        let len = reader.index()?;
        let group = |reader: &mut Reader<'_>| -> Option<GroupId> {
            let splits = reader.index()?;
            (0..splits).map(|_| Some((reader.number()?, reader.number()?))).collect()
        };
        let content = match reader.number()? {
            0 => Content::Finished,
            1 => {
                let tag = reader.number()?;
                Content::Message { tag, group: group(&mut reader)? }
            }
            2 => {
                let number = reader.number()?;
                let fingerprint = reader.number()?;
                let call = CallDescription { text: reader.text()?, fingerprint };
                Content::CollectivePart { number, call, group: group(&mut reader)? }
            }
            _ => return None,
        };
        reader.end(Self { content, kind, len })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_come_back_and_damaged_ones_are_refused() {
        let group: GroupId = [(3, 7), (u64::MAX, 0)].into();
        let call = CallDescription { text: "all_gather #3".into(), fingerprint: 9 };
        for content in [
            Content::Finished,
            Content::Message { group: [].into(), tag: u64::MAX },
            Content::CollectivePart { group, number: 5, call },
        ] {
            for kind in [Kind::F32, Kind::U16, Kind::U64, Kind::U8] {
                let header = Header { content: content.clone(), kind, len: 1 << 40 };
                let bytes = header.encode();
                assert_eq!(Header::decode(&bytes), Some(header));
                (0..bytes.len()).for_each(|len| assert_eq!(Header::decode(&bytes[..len]), None));
                assert_eq!(Header::decode(&[&bytes[..], &[0]].concat()), None);
            }
        }
    }
}
