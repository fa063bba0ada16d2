//! Sets up the watch: rank 0 listens, MPI tells the others the address, and each connects.

use super::super::wire::Wire;
use super::signal::Signal;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

/// How long to wait until all ranks are connected.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum length of a machine's name in bytes.
const NAME: usize = 256;

/// The machine of a rank, and the address at which rank 0 listens.
pub(in super::super) struct RankAddress {
    pub(super) rank: usize,
    pub(super) size: usize,
    /// Number of ranks on this machine, and how many of them have a lower rank than this one.
    pub(in super::super) local: (usize, usize),
    listener: Option<TcpListener>,
    host: String,
    port: u16,
    /// A secret that identifies the ranks of this world to rank 0.
    secret: [u64; 2],
}

impl RankAddress {
    /// Lets rank 0 listen, and tells all ranks the address. All ranks must call this.
    pub(in super::super) fn agree(wire: &Wire) -> Result<Self, String> {
        let name =
            ::mpi::environment::processor_name().map_err(|error| format!("the name of this machine: {error}"))?;
        let mut own = [0u8; NAME];
        let len = name.len().min(NAME);
        own[..len].copy_from_slice(&name.as_bytes()[..len]);
        let names = wire.gather(&own)?;
        let here = |names: &[u8]| names.chunks(NAME).filter(|other| **other == own).count();
        let (local, before) = (here(&names), here(&names[..wire.rank * NAME]));
        let mut listener = None;
        // The port, or 0 if rank 0 cannot listen: it still must take part in the broadcast, or the others would hang.
        let mut told = [0u8; 18];
        let mut refused = None;
        if wire.rank == 0 {
            // If all ranks are on one machine, no other machine can connect.
            let address = if local == wire.size { Ipv4Addr::LOCALHOST } else { Ipv4Addr::UNSPECIFIED };
            match TcpListener::bind((address, 0)).and_then(|bound| Ok((bound.local_addr()?.port(), bound))) {
                Ok((port, bound)) => {
                    // Each state is seeded from the system's random number generator.
                    let secret = [0, 1].map(|n: u64| RandomState::new().hash_one(n));
                    told[..2].copy_from_slice(&port.to_le_bytes());
                    told[2..10].copy_from_slice(&secret[0].to_le_bytes());
                    told[10..].copy_from_slice(&secret[1].to_le_bytes());
                    listener = Some(bound);
                }
                Err(error) => refused = Some(error),
            }
        }
        wire.broadcast(0, &mut told)?;
        let number = |range: std::ops::Range<usize>| {
            told[range].iter().rev().fold(0u64, |number, byte| number << 8 | u64::from(*byte))
        };
        let port = number(0..2) as u16;
        if let (0, why) = (port, refused) {
            let why = why.map_or("see its own message".into(), |why| why.to_string());
            return Err(format!("rank 0 cannot listen for the other ranks: {why}"));
        }
        let first = names[..NAME].iter().copied().take_while(|byte| *byte != 0).collect();
        let host = match local == wire.size {
            true => Ipv4Addr::LOCALHOST.to_string(),
            false => String::from_utf8(first).map_err(|_| "the name of rank 0's machine is no text")?,
        };
        let secret = [number(2..10), number(10..18)];
        Ok(Self { rank: wire.rank, size: wire.size, local: (local, before), listener, host, port, secret })
    }

    /// Connects this rank; returns its connections with the rank at the other end of each.
    pub(super) fn connect(&self) -> io::Result<Vec<(usize, TcpStream)>> {
        let start = Instant::now();
        let Some(listener) = &self.listener else {
            loop {
                match TcpStream::connect((self.host.as_str(), self.port)) {
                    Ok(mut stream) => {
                        Signal::Hello { rank: self.rank, secret: self.secret }.write(&mut stream)?;
                        return Ok(vec![(0, stream)]);
                    }
                    Err(error) if start.elapsed() >= CONNECT_TIMEOUT => {
                        let (host, port) = (&self.host, self.port);
                        let problem =
                            format!("no connection to rank 0 at {host}:{port} in {CONNECT_TIMEOUT:?}: {error}");
                        return Err(io::Error::new(error.kind(), problem));
                    }
                    Err(_) => thread::sleep(Duration::from_millis(20)),
                }
            }
        };
        listener.set_nonblocking(true)?;
        let mut streams: Vec<(usize, TcpStream)> = Vec::new();
        while streams.len() + 1 < self.size {
            match listener.accept() {
                Ok((stream, _)) => {
                    let known = self.greet(stream)?.filter(|(rank, _)| streams.iter().all(|(other, _)| other != rank));
                    streams.extend(known);
                }
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error),
                Err(_) if start.elapsed() >= CONNECT_TIMEOUT => {
                    let here = |rank: &usize| streams.iter().any(|(other, _)| other == rank);
                    let missing: Vec<usize> = (1..self.size).filter(|rank| !here(rank)).collect();
                    let problem = format!("ranks {missing:?} did not connect to rank 0 in {CONNECT_TIMEOUT:?}");
                    return Err(io::Error::new(io::ErrorKind::TimedOut, problem));
                }
                Err(_) => thread::sleep(Duration::from_millis(2)),
            }
        }
        Ok(streams)
    }

    /// The rank at the other end of a new connection, if it belongs to this world.
    fn greet(&self, mut stream: TcpStream) -> io::Result<Option<(usize, TcpStream)>> {
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(Duration::from_secs(2)))?;
        Ok(match Signal::read(&mut stream) {
            Ok(Signal::Hello { rank, secret }) if secret == self.secret && (1..self.size).contains(&rank) => {
                Some((rank, stream))
            }
            _ => None,
        })
    }
}
