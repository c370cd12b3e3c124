//! Transfer of the bytes of a shard, unpacked and checked, into a sink.

use std::fs::File;
use std::io;
use std::io::{Seek, Write};
use std::path::Path;

use flate2::write::MultiGzDecoder;
use md5::{Digest, Md5};

use super::config::StorageConfig;
use super::parquet::write_tar;
use crate::PipelineError;
use crate::hash::hex;
use crate::remote::body::Failure;
use crate::remote::{Client, RetryPolicy, Sink, pipe};
use crate::secrets::display_name_of_command;
use crate::source::Source;
use crate::url::ShardUrl;

/// Number of times that a command is run before its failure is reported.
const COMMAND_ATTEMPTS: u32 = 3;

/// Number of compressed bytes that are unpacked at a time; they expand at most about a
/// thousandfold.
const PIECE_BYTES: usize = 16 << 10;

/// Sink that passes bytes on and computes their MD5, if one is wanted.
struct HashingSink<'a> {
    sink: &'a mut dyn Sink,
    md5: Option<Md5>,
}

/// Sink that decompresses bytes and passes them on.
struct DecompressingSink<'a> {
    sink: &'a mut dyn Sink,
    decoder: MultiGzDecoder<Vec<u8>>,
}

/// Sink into a file.
struct FileSink(File);

/// Sends the tar that `source` names to `sink`. `client` is called only if a client is needed. A
/// Parquet file from elsewhere is kept in the folder of the cache while it is turned into a tar.
///
/// # Errors
/// [`PipelineError::MissingShard`], [`PipelineError::Fetch`]; [`PipelineError::ShardMismatch`] if
/// the MD5 differs from the one that its list states; errors of the sink.
pub(crate) fn receive<'c>(
    source: &Source,
    client: impl Fn() -> Result<&'c Client, Failure>,
    config: &StorageConfig,
    sink: &mut dyn Sink,
) -> Result<(), PipelineError> {
    let retry = &config.retry;
    let folder = config.cache_folder.as_path();
    let transfer = |sink: &mut dyn Sink| match &source.url {
        ShardUrl::File(path) => copy_file(path, sink),
        ShardUrl::Remote(url) => client()?.fetch(url, sink),
        ShardUrl::Pipe(command) => run_command(command, retry, sink),
    };
    let md5 = source.md5.as_ref().map(|_| Md5::new());
    let (transferred, md5) = if source.url.is_parquet() {
        let name = source.url.to_string();
        if let (ShardUrl::File(path), None) = (&source.url, &source.md5) {
            let file = File::open(path).map_err(|error| PipelineError::io("open", path, error))?;
            return write_tar(&name, file, &config.columns, sink)
                .map_err(|error| failed(&source.url, Failure::Sink(error)));
        }
        // Its directory is at its end: a file must be there as a whole.
        let whole =
            tempfile::tempfile_in(folder).map_err(|error| PipelineError::io("write in", folder, error))?;
        let mut whole = FileSink(whole);
        let mut hashing = HashingSink { sink: &mut whole, md5 };
        let transferred = transfer(&mut hashing);
        let md5 = hashing.md5;
        (
            transferred
                .and_then(|()| write_tar(&name, whole.0, &config.columns, sink).map_err(Failure::Sink)),
            md5,
        )
    } else if source.url.is_gzip() {
        let mut unpacking = DecompressingSink { sink, decoder: MultiGzDecoder::new(Vec::new()) };
        let mut hashing = HashingSink { sink: &mut unpacking, md5 };
        let transferred = transfer(&mut hashing);
        let md5 = hashing.md5;
        (transferred.and_then(|()| unpacking.finish().map_err(Failure::Sink)), md5)
    } else {
        let mut hashing = HashingSink { sink, md5 };
        (transfer(&mut hashing), hashing.md5)
    };
    transferred.map_err(|failure| failed(&source.url, failure))?;
    match (md5.map(hex), &source.md5) {
        (Some(found), Some(says)) if !found.eq_ignore_ascii_case(says) => {
            let reason = format!("its list gives MD5 {says}, it has {found}");
            Err(PipelineError::ShardMismatch { shard: source.url.to_string(), reason })
        }
        _ => Ok(()),
    }
}

/// Converts a failure to fetch `url` into an error for the user.
pub(crate) fn failed(url: &ShardUrl, failure: Failure) -> PipelineError {
    let url = url.to_string();
    match failure {
        Failure::NotFound => PipelineError::MissingShard { path: url.into() },
        Failure::Sink(error) => match error.downcast::<PipelineError>() {
            Ok(error) => error,
            Err(error) => PipelineError::io("copy", url.as_ref(), error),
        },
        failure => PipelineError::Fetch { url, reason: failure.to_string() },
    }
}

fn copy_file(path: &Path, sink: &mut dyn Sink) -> Result<(), Failure> {
    let mut file = File::open(path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => Failure::NotFound,
        _ => Failure::Sink(error),
    })?;
    sink.restart(None).and_then(|()| io::copy(&mut file, sink)).map(|_| ()).map_err(Failure::Sink)
}

fn run_command(command: &str, retry: &RetryPolicy, sink: &mut dyn Sink) -> Result<(), Failure> {
    for attempt in 1.. {
        match pipe::run(command, sink) {
            Err(Failure::Temporary(reason)) if attempt < COMMAND_ATTEMPTS => {
                let wait = retry.wait(attempt);
                let name = display_name_of_command(command);
                tracing::warn!("{name}: {reason}; again in {:.1} s", wait.as_secs_f64());
                std::thread::sleep(wait);
            }
            ended => return ended,
        }
    }
    unreachable!("the last attempt returns")
}

impl Write for HashingSink<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.sink.write_all(bytes)?;
        if let Some(md5) = &mut self.md5 {
            md5.update(bytes);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.sink.flush()
    }
}

impl Sink for HashingSink<'_> {
    fn restart(&mut self, total_bytes: Option<u64>) -> io::Result<()> {
        self.md5 = self.md5.as_ref().map(|_| Md5::new());
        self.sink.restart(total_bytes)
    }
}

impl Write for FileSink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl Sink for FileSink {
    fn restart(&mut self, _total_bytes: Option<u64>) -> io::Result<()> {
        self.0.set_len(0)?;
        self.0.rewind()
    }
}

impl DecompressingSink<'_> {
    /// Checks the end of the stream, which holds a checksum of its own.
    fn finish(&mut self) -> io::Result<()> {
        self.decoder.try_finish()?;
        self.forward_unpacked()
    }

    fn forward_unpacked(&mut self) -> io::Result<()> {
        let unpacked = self.decoder.get_mut();
        self.sink.write_all(unpacked)?;
        unpacked.clear();
        Ok(())
    }
}

impl Write for DecompressingSink<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        for piece in bytes.chunks(PIECE_BYTES) {
            self.decoder.write_all(piece)?;
            self.forward_unpacked()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.sink.flush()
    }
}

impl Sink for DecompressingSink<'_> {
    /// Restarts the decoder; the unpacked length is not known.
    fn restart(&mut self, _packed_bytes: Option<u64>) -> io::Result<()> {
        self.decoder = MultiGzDecoder::new(Vec::new());
        self.sink.restart(None)
    }
}
