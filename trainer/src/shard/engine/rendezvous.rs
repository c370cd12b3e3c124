//! One message from rank 0 to every other rank over TCP, for engines whose ranks need one to meet.
//!
//! ```text
//! rank r → rank 0   "ocelli" 0 1 | W as u32 | r as u32          little endian
//! rank 0 → rank r   length as u32 | message                     when all W - 1 have come
//! ```
//!
//! Ranks come in any order and try again until rank 0 listens. Whoever says something else is sent away.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use super::EngineError;

const MAGIC: [u8; 8] = *b"ocelli\0\x01";
/// How long one that has come may take to say who it is.
const HELLO: Duration = Duration::from_secs(5);
/// Between two tries.
const RETRY: Duration = Duration::from_millis(100);
/// More than any message.
const MAX_BYTES: usize = 1 << 16;

/// Where ranks meet, and for how long they try.
#[derive(Debug, Clone)]
pub struct Rendezvous {
    /// Host name or address of rank 0.
    pub host: String,
    /// Its port.
    pub port: u16,
    /// When to give up.
    pub deadline: Duration,
}

impl Rendezvous {
    /// The message of rank 0, on all of `world_size` ranks; `message` makes it on rank 0.
    ///
    /// # Errors
    /// [`EngineError::Unavailable`] with the ranks that have not come, or why rank 0 cannot be reached; those
    /// of `message`.
    pub fn share(
        &self,
        rank: usize,
        world_size: usize,
        message: impl FnOnce() -> Result<Vec<u8>, EngineError>,
    ) -> Result<Vec<u8>, EngineError> {
        match rank {
            0 => {
                let message = message()?;
                self.serve(world_size, &message)?;
                Ok(message)
            }
            rank => self.ask(rank, world_size),
        }
    }

    fn failed(&self, reason: String) -> EngineError {
        let Self { host, port, .. } = self;
        EngineError::Unavailable { engine: "rendezvous", reason: format!("{host}:{port}: {reason}") }
    }

    fn serve(&self, world_size: usize, message: &[u8]) -> Result<(), EngineError> {
        // On every address: the name that others know may stand for one that this machine does not have.
        let listener = TcpListener::bind(("0.0.0.0", self.port))
            .and_then(|listener| listener.set_nonblocking(true).map(|()| listener))
            .map_err(|error| self.failed(format!("rank 0 cannot listen there: {error}")))?;
        let start = Instant::now();
        let mut come: Vec<Option<TcpStream>> = (1..world_size).map(|_| None).collect();
        while come.iter().any(Option::is_none) {
            match listener.accept() {
                Ok((stream, _)) => match hello(&stream, world_size) {
                    Ok(rank) if come[rank - 1].is_none() => come[rank - 1] = Some(stream),
                    Ok(rank) => {
                        return Err(self.failed(format!("two processes say that they are rank {rank}")));
                    }
                    Err(Some(reason)) => return Err(self.failed(reason)),
                    Err(None) => {}
                },
                Err(_) if start.elapsed() > self.deadline => {
                    let missing = (1..world_size).filter(|rank| come[rank - 1].is_none());
                    let missing: Vec<String> = missing.map(|rank| rank.to_string()).collect();
                    let seconds = self.deadline.as_secs();
                    return Err(self.failed(format!(
                        "after {seconds} s these ranks have not come: {}",
                        missing.join(", ")
                    )));
                }
                Err(_) => std::thread::sleep(RETRY / 10),
            }
        }
        for (index, stream) in come.iter_mut().flatten().enumerate() {
            let mut packet = (message.len() as u32).to_le_bytes().to_vec();
            packet.extend_from_slice(message);
            stream
                .write_all(&packet)
                .map_err(|error| self.failed(format!("rank {} is gone: {error}", index + 1)))?;
        }
        Ok(())
    }

    fn ask(&self, rank: usize, world_size: usize) -> Result<Vec<u8>, EngineError> {
        let start = Instant::now();
        let mut stream = loop {
            match self.connect() {
                Ok(stream) => break stream,
                Err(error) if start.elapsed() > self.deadline => {
                    return Err(self.failed(format!("rank 0 cannot be reached: {error}")));
                }
                Err(_) => std::thread::sleep(RETRY),
            }
        };
        let left = self.deadline.saturating_sub(start.elapsed()).max(HELLO);
        let gone = |error: std::io::Error| self.failed(format!("rank 0 does not answer: {error}"));
        stream.set_read_timeout(Some(left)).map_err(gone)?;
        let mut packet = MAGIC.to_vec();
        packet.extend((world_size as u32).to_le_bytes());
        packet.extend((rank as u32).to_le_bytes());
        stream.write_all(&packet).map_err(gone)?;
        let mut len = [0; 4];
        stream.read_exact(&mut len).map_err(gone)?;
        let len = u32::from_le_bytes(len) as usize;
        if len > MAX_BYTES {
            return Err(self.failed(format!("something else than rank 0 answers: {len} bytes")));
        }
        let mut message = vec![0; len];
        stream.read_exact(&mut message).map_err(gone)?;
        Ok(message)
    }

    fn connect(&self) -> std::io::Result<TcpStream> {
        let mut last = std::io::Error::new(std::io::ErrorKind::NotFound, "the name has no address");
        for address in (self.host.as_str(), self.port).to_socket_addrs()? {
            match TcpStream::connect_timeout(&address, HELLO) {
                Ok(stream) => return Ok(stream),
                Err(error) => last = error,
            }
        }
        Err(last)
    }
}

/// Who has come; `None` for one that is no rank of ours.
fn hello(mut stream: &TcpStream, world_size: usize) -> Result<usize, Option<String>> {
    let mut packet = [0; 16];
    let read = stream
        .set_nonblocking(false)
        .and_then(|()| stream.set_read_timeout(Some(HELLO)))
        .and_then(|()| stream.read_exact(&mut packet));
    if read.is_err() || packet[..8] != MAGIC {
        return Err(None);
    }
    let number = |at: usize| u32::from_le_bytes([packet[at], packet[at + 1], packet[at + 2], packet[at + 3]]);
    let (theirs, rank) = (number(8) as usize, number(12) as usize);
    if theirs != world_size || rank == 0 || rank >= world_size {
        return Err(Some(format!(
            "a process says that it is rank {rank} of {theirs}, and there are {world_size} ranks"
        )));
    }
    Ok(rank)
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

    #[test]
    fn everybody_gets_the_message_of_rank_0() {
        let meeting = rendezvous(Duration::from_secs(20));
        std::thread::scope(|scope| {
            let come = |rank: usize| {
                let meeting = &meeting;
                move || {
                    // The last to come is rank 0, and something else has come before.
                    if rank == 0 {
                        std::thread::sleep(Duration::from_millis(150));
                    }
                    meeting.share(rank, 4, message).unwrap()
                }
            };
            let stray = scope.spawn(|| {
                loop {
                    if let Ok(mut stream) = meeting.connect() {
                        return stream.write_all(b"GET / HTTP/1.1\r\n\r\n");
                    }
                }
            });
            let ranks: Vec<_> = (0..4).map(|rank| scope.spawn(come(rank))).collect();
            for rank in ranks {
                assert_eq!(rank.join().unwrap(), message().unwrap());
            }
            let _ = stray.join().unwrap();
        });
    }

    #[test]
    fn who_does_not_come_is_named() {
        let meeting = rendezvous(Duration::from_millis(400));
        let error = std::thread::scope(|scope| {
            scope.spawn(|| meeting.share(2, 4, message));
            meeting.share(0, 4, message).unwrap_err().to_string()
        });
        assert!(error.contains("have not come: 1, 3"), "{error}");
        let error = meeting.share(1, 2, message).unwrap_err().to_string();
        assert!(error.contains("rank 0 cannot be reached"), "{error}");
    }

    #[test]
    fn contradictions_are_errors() {
        for (rank, world_size, words) in [(1, 3, "there are 2 ranks"), (5, 2, "rank 5 of 2")] {
            let meeting = rendezvous(Duration::from_secs(5));
            let error = std::thread::scope(|scope| {
                scope.spawn(|| meeting.share(rank, world_size, message));
                meeting.share(0, 2, message).unwrap_err().to_string()
            });
            assert!(error.contains(words), "{error}");
        }
    }
}
