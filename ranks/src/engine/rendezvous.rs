//! Message from rank 0 to every other rank over TCP, for engines whose ranks need one to connect.
//!
//! ```text
//! rank r → rank 0   "ocelli" 0 2 | W as u32 | r as u32 | its device, 16 bytes      little endian
//! rank 0 → rank r   1 | length as u32 | message                 once all W - 1 have connected, or
//!                   0 | length as u32 | reason why ranks do not meet
//! ```
//!
//! Ranks connect in any order and retry until rank 0 listens. A connection that sends anything else
//! is dropped.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use crate::error::EngineError;

const MAGIC: [u8; 8] = *b"ocelli\0\x02";
/// Bytes of a rank's first message.
const HELLO_BYTES: usize = 32;
/// Time that a connection may take to identify itself.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause between two attempts to connect.
const RETRY_PAUSE: Duration = Duration::from_millis(100);
/// Limit of the bytes of a message.
const MAX_BYTES: usize = 1 << 16;

/// Address at which ranks meet, and the deadline.
#[derive(Debug, Clone)]
pub(super) struct Rendezvous {
    /// Host name or address of rank 0.
    pub(super) host: String,
    /// Port of rank 0.
    pub(super) port: u16,
    /// Time after which a rank gives up.
    pub(super) deadline: Duration,
}

/// A rank that has reached the rendezvous.
#[derive(Debug, Clone, Copy)]
pub(super) struct Participant {
    /// Index of the rank.
    pub(super) rank: usize,
    /// Number of ranks.
    pub(super) world_size: usize,
    /// Identifier of the GPU that the rank computes on; every rank must have its own.
    pub(super) device: [u8; 16],
}

/// Reason why ranks do not meet.
struct Refusal {
    reason: String,
    /// True if ranks contradict one another, which a retry would not fix.
    is_contradiction: bool,
}

impl Rendezvous {
    /// Returns the message of rank 0 on all ranks; `message` makes it on rank 0.
    ///
    /// # Errors
    /// Errors of `message`; [`EngineError::Failed`] with the missing ranks, or if rank 0 cannot be
    /// reached or refuses; [`EngineError::Unavailable`] on rank 0 if ranks contradict one another,
    /// on others if another program answers.
    pub(super) fn share(
        &self,
        participant: Participant,
        message: impl FnOnce() -> Result<Vec<u8>, EngineError>,
    ) -> Result<Vec<u8>, EngineError> {
        match participant.rank {
            0 => {
                let message = message()?;
                self.serve(participant, &message)?;
                Ok(message)
            }
            _ => self.request(participant),
        }
    }

    fn failed(&self, reason: &str) -> EngineError {
        let Self { host, port, .. } = self;
        let reason = format!("{host}:{port}: {reason}");
        EngineError::Failed { engine: "rendezvous", operation: "meeting", reason }
    }

    fn inconsistent(&self, reason: &str) -> EngineError {
        let Self { host, port, .. } = self;
        EngineError::Unavailable { engine: "rendezvous", reason: format!("{host}:{port}: {reason}") }
    }

    fn no_answer(&self, error: &std::io::Error) -> EngineError {
        self.failed(&format!("rank 0 does not answer: {error}"))
    }

    /// Sends `message` to all other ranks, or the reason why ranks do not meet.
    fn serve(&self, local: Participant, message: &[u8]) -> Result<(), EngineError> {
        // On every address: the name that others use may stand for an address that this machine
        // does not have.
        let listener = TcpListener::bind(("0.0.0.0", self.port))
            .and_then(|listener| listener.set_nonblocking(true).map(|()| listener))
            .map_err(|error| self.failed(&format!("rank 0 cannot listen there: {error}")))?;
        let mut connections: Vec<(Participant, TcpStream)> = Vec::new();
        let outcome = self.receive(local, &listener, &mut connections);
        let (flag, text) = match &outcome {
            Ok(()) => (1, message),
            Err(refusal) => (0, refusal.reason.as_bytes()),
        };
        let mut packet = vec![flag];
        packet.extend((text.len() as u32).to_le_bytes());
        packet.extend_from_slice(text);
        for (participant, stream) in &mut connections {
            let sent = stream.write_all(&packet);
            if outcome.is_ok() {
                sent.map_err(|error| self.failed(&format!("rank {} is gone: {error}", participant.rank)))?;
            }
        }
        match outcome {
            Ok(()) => Ok(()),
            Err(Refusal { reason, is_contradiction: true }) => Err(self.inconsistent(&reason)),
            Err(Refusal { reason, is_contradiction: false }) => Err(self.failed(&reason)),
        }
    }

    /// Accepts all other ranks.
    fn receive(
        &self,
        local: Participant,
        listener: &TcpListener,
        connections: &mut Vec<(Participant, TcpStream)>,
    ) -> Result<(), Refusal> {
        let start = Instant::now();
        while connections.len() + 1 < local.world_size {
            if start.elapsed() > self.deadline {
                let mut missing: Vec<String> = Vec::new();
                for rank in 1..local.world_size {
                    if !connections.iter().any(|(participant, _)| participant.rank == rank) {
                        missing.push(rank.to_string());
                    }
                }
                let seconds = self.deadline.as_secs();
                let reason =
                    format!("after {seconds} s these ranks are still missing: {}", missing.join(", "));
                return Err(Refusal { reason, is_contradiction: false });
            }
            let Ok((stream, _)) = listener.accept() else {
                std::thread::sleep(RETRY_PAUSE / 10);
                continue;
            };
            let Some(participant) = read_hello(&stream) else { continue };
            let Participant { rank, world_size, device } = participant;
            let contradiction = if world_size != local.world_size || rank == 0 || rank >= local.world_size {
                Some(format!(
                    "a process says that it is rank {rank} of {world_size}, but there are {}",
                    local.world_size
                ))
            } else if connections.iter().any(|(other, _)| other.rank == rank) {
                Some(format!("two processes say that they are rank {rank}"))
            } else {
                let mut others = connections.iter().map(|(participant, _)| participant).chain([&local]);
                let same = others.find(|other| other.device == device);
                same.map(|other| format!("ranks {} and {rank} have the same GPU", other.rank.min(rank)))
            };
            connections.push((participant, stream));
            if let Some(reason) = contradiction {
                return Err(Refusal { reason, is_contradiction: true });
            }
        }
        Ok(())
    }

    /// Returns the message of rank 0.
    fn request(&self, participant: Participant) -> Result<Vec<u8>, EngineError> {
        let start = Instant::now();
        let mut stream = loop {
            match self.connect() {
                Ok(stream) => break stream,
                Err(error) if start.elapsed() > self.deadline => {
                    return Err(self.failed(&format!("rank 0 cannot be reached: {error}")));
                }
                Err(_) => std::thread::sleep(RETRY_PAUSE),
            }
        };
        // Rank 0 may have begun to wait later, and reports the missing ranks itself.
        stream
            .set_read_timeout(Some(self.deadline + HELLO_TIMEOUT))
            .map_err(|error| self.no_answer(&error))?;
        let mut packet = MAGIC.to_vec();
        packet.extend((participant.world_size as u32).to_le_bytes());
        packet.extend((participant.rank as u32).to_le_bytes());
        packet.extend(participant.device);
        stream.write_all(&packet).map_err(|error| self.no_answer(&error))?;
        let mut head = [0; 5];
        stream.read_exact(&mut head).map_err(|error| self.no_answer(&error))?;
        let len = u32::from_le_bytes([head[1], head[2], head[3], head[4]]) as usize;
        if head[0] > 1 || len > MAX_BYTES {
            return Err(self.inconsistent("something other than rank 0 answers there"));
        }
        let mut message = vec![0; len];
        stream.read_exact(&mut message).map_err(|error| self.no_answer(&error))?;
        match head[0] {
            1 => Ok(message),
            _ => Err(self.failed(&format!("rank 0 says: {}", String::from_utf8_lossy(&message)))),
        }
    }

    fn connect(&self) -> std::io::Result<TcpStream> {
        let mut last = std::io::Error::new(std::io::ErrorKind::NotFound, "the name has no address");
        for address in (self.host.as_str(), self.port).to_socket_addrs()? {
            match TcpStream::connect_timeout(&address, HELLO_TIMEOUT) {
                Ok(stream) => return Ok(stream),
                Err(error) => last = error,
            }
        }
        Err(last)
    }
}

/// Reads the first message of a connection; `None` if it does not come from a rank.
fn read_hello(mut stream: &TcpStream) -> Option<Participant> {
    let mut packet = [0; HELLO_BYTES];
    let read = stream
        .set_nonblocking(false)
        .and_then(|()| stream.set_read_timeout(Some(HELLO_TIMEOUT)))
        .and_then(|()| stream.read_exact(&mut packet));
    if read.is_err() || packet[..8] != MAGIC {
        return None;
    }
    let world_size = u32::from_le_bytes([packet[8], packet[9], packet[10], packet[11]]) as usize;
    let rank = u32::from_le_bytes([packet[12], packet[13], packet[14], packet[15]]) as usize;
    let mut device = [0; 16];
    device.copy_from_slice(&packet[16..]);
    Some(Participant { rank, world_size, device })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rendezvous(deadline: Duration) -> Rendezvous {
        // A port that was free a moment ago.
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        Rendezvous { host: "localhost".into(), port, deadline }
    }

    fn message() -> Result<Vec<u8>, EngineError> {
        Ok((0..128).collect())
    }

    fn participant(rank: usize, world_size: usize) -> Participant {
        Participant { rank, world_size, device: [rank as u8; 16] }
    }

    #[test]
    fn every_rank_gets_the_message_of_rank_0() {
        let meeting = rendezvous(Duration::from_secs(20));
        std::thread::scope(|scope| {
            let stray = scope.spawn(|| {
                loop {
                    if let Ok(mut stream) = meeting.connect() {
                        return stream.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
                    }
                }
            });
            let mut ranks = Vec::new();
            for rank in 0..4 {
                let meeting = &meeting;
                ranks.push(scope.spawn(move || {
                    // Rank 0 starts last, and a connection that is not from a rank comes first.
                    if rank == 0 {
                        std::thread::sleep(Duration::from_millis(150));
                    }
                    meeting.share(participant(rank, 4), message).unwrap()
                }));
            }
            for rank in ranks {
                assert_eq!(rank.join().unwrap(), message().unwrap());
            }
            let _ = stray.join().unwrap();
        });
    }

    #[test]
    fn errors_of_all_ranks_name_the_missing_ranks() {
        let meeting = rendezvous(Duration::from_millis(400));
        std::thread::scope(|scope| {
            let other = scope.spawn(|| meeting.share(participant(2, 4), message).unwrap_err());
            let error = meeting.share(participant(0, 4), message).unwrap_err();
            // Trying again may help. The other rank has the error from rank 0.
            for (error, from) in [(error, ""), (other.join().unwrap(), "rank 0 says: ")] {
                let EngineError::Failed { reason, .. } = &error else { panic!("{error}") };
                assert!(reason.contains(from) && reason.ends_with("still missing: 1, 3"), "{error}");
            }
        });
        let error = meeting.share(participant(1, 2), message).unwrap_err();
        let EngineError::Failed { reason, .. } = &error else { panic!("{error}") };
        assert!(reason.contains("rank 0 cannot be reached"), "{error}");
    }

    #[test]
    fn contradictions_are_errors_on_both_sides() {
        let same = Participant { device: [0; 16], ..participant(1, 2) };
        for (other, words) in [
            (participant(1, 3), "rank 1 of 3, but there are 2"),
            (participant(5, 2), "rank 5 of 2"),
            (same, "ranks 0 and 1 have the same GPU"),
        ] {
            let meeting = rendezvous(Duration::from_secs(5));
            std::thread::scope(|scope| {
                let other = scope.spawn(|| meeting.share(other, message).unwrap_err());
                let error = meeting.share(participant(0, 2), message).unwrap_err();
                // Trying again would not help.
                assert!(
                    matches!(&error, EngineError::Unavailable { reason, .. } if reason.contains(words)),
                    "{error}"
                );
                let error = other.join().unwrap();
                assert!(
                    matches!(&error, EngineError::Failed { reason, .. } if reason.contains(words)),
                    "{error}"
                );
            });
        }
    }
}
