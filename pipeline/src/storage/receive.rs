//! Transfer of the bytes of a shard, decompressed and checked, into a sink.

use std::fs::File;
use std::io;
use std::io::{Seek, Write};
use std::path::Path;

use flate2::write::MultiGzDecoder;
use md5::{Digest, Md5};

use super::config::StorageConfig;
use super::parquet::write_tar;
use super::verify::check_md5;
use crate::PipelineError;
use crate::hash::hex;
use crate::magic::START_BYTES;
use crate::remote::body::Failure;
use crate::remote::{Client, RetryPolicy, Sink, pipe};
use crate::secrets::display_name_of_command;
use crate::shard::tar::mismatch_of_gzip;
use crate::source::Source;
use crate::url::ShardUrl;

/// Number of times that a command is run before its failure is reported.
const COMMAND_ATTEMPTS: u32 = 3;

/// Number of compressed bytes that are decompressed at a time; they expand at most about a
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
    /// Name of the shard, for messages.
    shard: String,
    /// Whether the beginning of the bytes has been checked.
    is_checked: bool,
}

/// Sink into a file.
struct FileSink(File);

/// Sends the tar that `source` names to `sink`; gzip is decompressed. `client` is called only if a
/// client is needed. A remote Parquet file is stored in the folder of the cache while it is
/// converted into a tar.
///
/// # Errors
/// [`PipelineError::MissingShard`], [`PipelineError::Fetch`]; [`PipelineError::ShardMismatch`] if
/// the MD5 of the stored bytes differs from the one given in the shard list; errors of the sink.
pub(crate) fn stream_tar<'c>(
    source: &Source,
    client: impl Fn() -> Result<&'c Client, Failure>,
    config: &StorageConfig,
    sink: &mut dyn Sink,
) -> Result<(), PipelineError> {
    let folder = config.cache_folder.as_path();
    let md5 = source.md5.as_ref().map(|_| Md5::new());
    let (result, md5) = if source.url.is_parquet() {
        let name = source.url.to_string();
        if let (ShardUrl::File(path), None) = (&source.url, &source.md5) {
            let file = File::open(path).map_err(|error| PipelineError::io("open", path, error))?;
            return write_tar(&name, file, &config.columns, sink)
                .map_err(|error| fetch_error(&source.url, Failure::Sink(error)));
        }
        // The directory of a Parquet file is at its end: it is read once the file is complete.
        let file =
            tempfile::tempfile_in(folder).map_err(|error| PipelineError::io("write in", folder, error))?;
        let mut file = FileSink(file);
        let mut hashing = HashingSink { sink: &mut file, md5 };
        let mut result = transfer(&source.url, client, &config.retry, &mut hashing);
        let md5 = hashing.md5;
        if result.is_ok() {
            result = write_tar(&name, file.0, &config.columns, sink).map_err(Failure::Sink);
        }
        (result, md5)
    } else if source.url.is_gzip() {
        let mut decompressing = DecompressingSink {
            sink,
            decoder: MultiGzDecoder::new(Vec::new()),
            shard: source.url.to_string(),
            is_checked: false,
        };
        let mut hashing = HashingSink { sink: &mut decompressing, md5 };
        let mut result = transfer(&source.url, client, &config.retry, &mut hashing);
        let md5 = hashing.md5;
        if result.is_ok() {
            result = decompressing.finish().map_err(Failure::Sink);
        }
        (result, md5)
    } else {
        let mut hashing = HashingSink { sink, md5 };
        let result = transfer(&source.url, client, &config.retry, &mut hashing);
        (result, hashing.md5)
    };
    result.map_err(|failure| fetch_error(&source.url, failure))?;
    if let Some(stated) = &source.md5
        && let Some(md5) = md5
    {
        check_md5(source.url.to_string(), stated, &hex(md5))?;
    }
    Ok(())
}

/// Sends the stored bytes of the shard at `url` to `sink`.
fn transfer<'c>(
    url: &ShardUrl,
    client: impl Fn() -> Result<&'c Client, Failure>,
    retry: &RetryPolicy,
    sink: &mut dyn Sink,
) -> Result<(), Failure> {
    match url {
        ShardUrl::File(path) => copy_file(path, sink),
        ShardUrl::Remote(url) => client()?.fetch(url, sink),
        ShardUrl::Pipe(command) => run_command(command, retry, sink),
    }
}

/// Converts a failure to fetch `url` into an error for the user.
pub(crate) fn fetch_error(url: &ShardUrl, failure: Failure) -> PipelineError {
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
                tracing::warn!("{name}: {reason}; retrying in {:.1} s", wait.as_secs_f64());
                std::thread::sleep(wait);
            }
            result => return result,
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
    /// Checks that the bytes, which begin with `bytes` if none were written before, are compressed.
    fn check_beginning(&mut self, bytes: &[u8]) -> io::Result<()> {
        if self.is_checked || bytes.is_empty() {
            return Ok(());
        }
        self.is_checked = true;
        // A signature has two bytes: a beginning of one shows nothing, and the decoder fails later.
        if bytes.len() < 2 {
            return Ok(());
        }
        match mismatch_of_gzip(&bytes[..bytes.len().min(START_BYTES)]) {
            Some(reason) => {
                Err(io::Error::other(PipelineError::NotATar { path: self.shard.clone().into(), reason }))
            }
            None => Ok(()),
        }
    }

    /// Checks the end of the compressed stream, which contains a checksum.
    fn finish(&mut self) -> io::Result<()> {
        self.decoder.try_finish()?;
        self.forward_decompressed()
    }

    fn forward_decompressed(&mut self) -> io::Result<()> {
        let decompressed = self.decoder.get_mut();
        self.sink.write_all(decompressed)?;
        decompressed.clear();
        Ok(())
    }
}

impl Write for DecompressingSink<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.check_beginning(bytes)?;
        for piece in bytes.chunks(PIECE_BYTES) {
            self.decoder.write_all(piece)?;
            self.forward_decompressed()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.sink.flush()
    }
}

impl Sink for DecompressingSink<'_> {
    /// Restarts the decoder; the decompressed length is not known.
    fn restart(&mut self, _compressed_bytes: Option<u64>) -> io::Result<()> {
        self.decoder = MultiGzDecoder::new(Vec::new());
        self.is_checked = false;
        self.sink.restart(None)
    }
}
