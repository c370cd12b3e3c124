//! Formats of files by their first bytes, for messages about a file that is not what its name says.

use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Number of bytes at the beginning of a file by which its format is recognized.
pub const START_BYTES: usize = 512;

/// First bytes of a PNG file.
pub const PNG: &[u8] = b"\x89PNG\r\n\x1a\n";

/// Format of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileFormat {
    /// Description that follows "it is": `a JPEG image`, `compressed with gzip`.
    pub name: &'static str,
    /// Kind of the contents.
    pub kind: FileKind,
}

/// Kind of the contents of a file, as far as a remedy depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileKind {
    /// An encoded picture.
    Image,
    /// An array of NumPy: an image, or features.
    Array,
    /// Data compressed with gzip.
    Gzip,
    /// Data compressed by the program.
    Compressed(&'static str),
    /// An archive of another format than tar.
    Archive,
    /// A table of Parquet.
    Parquet,
    /// A page of the web.
    Page,
    /// A pointer of Git LFS in place of the file.
    Pointer,
    /// Weights of a network.
    Weights,
    /// Text, such as a list or a recipe.
    Text,
    /// Anything else that has a name.
    Other,
}

/// First bytes of the files of a format.
struct Signature {
    beginning: &'static [u8],
    name: &'static str,
    kind: FileKind,
}

const SIGNATURES: [Signature; 24] = [
    signature(b"\xff\xd8\xff", "a JPEG image", FileKind::Image),
    signature(PNG, "a PNG image", FileKind::Image),
    signature(b"GIF8", "a GIF image", FileKind::Image),
    signature(b"II*\0", "a TIFF image", FileKind::Image),
    signature(b"MM\0*", "a TIFF image", FileKind::Image),
    signature(b"II+\0", "a TIFF image", FileKind::Image),
    signature(b"MM\0+", "a TIFF image", FileKind::Image),
    signature(b"\0\0\0\x0cjP  ", "a JPEG 2000 image", FileKind::Image),
    signature(b"\x93NUMPY", "a NumPy array", FileKind::Array),
    signature(b"\x1f\x8b", "compressed with gzip", FileKind::Gzip),
    signature(b"\x28\xb5\x2f\xfd", "compressed with zstd", FileKind::Compressed("zstd")),
    signature(b"\xfd7zXZ\0", "compressed with xz", FileKind::Compressed("xz")),
    signature(b"BZh", "compressed with bzip2", FileKind::Compressed("bzip2")),
    signature(b"PK\x03\x04", "a zip archive", FileKind::Archive),
    signature(b"7z\xbc\xaf\x27\x1c", "a 7z archive", FileKind::Archive),
    signature(b"Rar!", "a RAR archive", FileKind::Archive),
    signature(b"PAR1", "a Parquet file", FileKind::Parquet),
    signature(b"\x89HDF\r\n\x1a\n", "an HDF5 file", FileKind::Other),
    signature(b"version https://git-lfs", "a pointer of Git LFS, not the file itself", FileKind::Pointer),
    signature(b"%PDF", "a PDF document", FileKind::Other),
    signature(b"SQLite format 3", "an SQLite database", FileKind::Other),
    signature(b"\x7fELF", "a program", FileKind::Other),
    signature(b"ARROW1", "an Arrow file", FileKind::Other),
    signature(b"CDF\x01", "a NetCDF file", FileKind::Other),
];

const fn signature(beginning: &'static [u8], name: &'static str, kind: FileKind) -> Signature {
    Signature { beginning, name, kind }
}

/// Recognizes the format of a file that begins with `start`, its first [`START_BYTES`] or all of
/// them; `None` if it is not known.
pub fn recognize(start: &[u8]) -> Option<FileFormat> {
    // First, because its length could be any signature.
    if is_safetensors(start) {
        return Some(FileFormat { name: "a safetensors file", kind: FileKind::Weights });
    }
    for known in &SIGNATURES {
        if start.starts_with(known.beginning) {
            return Some(FileFormat { name: known.name, kind: known.kind });
        }
    }
    if let Some(name) = image_with_length(start) {
        return Some(FileFormat { name, kind: FileKind::Image });
    }
    // Protocols 2 to 5 of pickles.
    if matches!(start, [0x80, 2..=5, ..]) {
        return Some(FileFormat { name: "a pickle, as torch.save writes", kind: FileKind::Weights });
    }
    if is_page(start) {
        return Some(FileFormat { name: "a web page, perhaps a login page", kind: FileKind::Page });
    }
    is_text(start).then_some(FileFormat { name: "a text file", kind: FileKind::Text })
}

/// Recognizes the format of the file at `path`; `None` if it is not known or cannot be read.
pub fn recognize_file(path: &Path) -> Option<FileFormat> {
    // Opening a pipe would wait for a writer.
    if !path.is_file() {
        return None;
    }
    let mut start = Vec::new();
    File::open(path).ok()?.take(START_BYTES as u64).read_to_end(&mut start).ok()?;
    recognize(&start)
}

/// Recognizes the formats of images whose beginning contains a length.
fn image_with_length(start: &[u8]) -> Option<&'static str> {
    if start.starts_with(b"RIFF") && has_at(start, 8, b"WEBP") {
        return Some("a WebP image");
    }
    // Two reserved numbers follow the length.
    if start.starts_with(b"BM") && has_at(start, 6, &[0; 4]) {
        return Some("a BMP image");
    }
    if !has_at(start, 4, b"ftyp") {
        return None;
    }
    match start.get(8..12)? {
        b"avif" | b"avis" => Some("an AVIF image"),
        b"heic" | b"heix" | b"mif1" | b"msf1" => Some("a HEIC image"),
        _ => None,
    }
}

/// Returns whether `start` has `bytes` at `offset`.
fn has_at(start: &[u8], offset: usize, bytes: &[u8]) -> bool {
    start.get(offset..).is_some_and(|rest| rest.starts_with(bytes))
}

/// Returns whether a length of eight bytes and a table in JSON follow one another.
fn is_safetensors(start: &[u8]) -> bool {
    let Some((len, rest)) = start.split_first_chunk::<8>() else { return false };
    // A table of more than 100 MB is refused by the library.
    u64::from_le_bytes(*len) < 100_000_000 && rest.starts_with(b"{\"")
}

/// Returns whether `start` is the beginning of a page, in any encoding of its text.
fn is_page(start: &[u8]) -> bool {
    let text = String::from_utf8_lossy(start);
    let beginning = text.trim_start_matches('\u{feff}').trim_start().to_ascii_lowercase();
    ["<!doctype html", "<html", "<?xml"].iter().any(|tag| beginning.starts_with(tag))
}

/// Returns whether `start` is text, whose last character may be cut off.
fn is_text(start: &[u8]) -> bool {
    let text = match std::str::from_utf8(start) {
        Ok(text) => text,
        Err(error) if error.error_len().is_none() => {
            std::str::from_utf8(&start[..error.valid_up_to()]).unwrap_or_default()
        }
        Err(_) => return false,
    };
    !text.is_empty() && !text.contains(|c: char| c.is_control() && !c.is_whitespace())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(start: &[u8]) -> Option<&'static str> {
        recognize(start).map(|format| format.name)
    }

    #[test]
    fn formats_are_recognized_by_their_first_bytes() {
        let known: [(&[u8], &str); 14] = [
            (b"\xff\xd8\xff\xe0\0\x10JFIF", "a JPEG image"),
            (b"\x89PNG\r\n\x1a\n\0\0", "a PNG image"),
            (b"RIFF\x24\0\0\0WEBPVP8 ", "a WebP image"),
            (b"BM\x36\x03\0\0\0\0\0\0\x36", "a BMP image"),
            (b"\0\0\0\x20ftypheic\0\0", "a HEIC image"),
            (b"PK\x03\x04\x14", "a zip archive"),
            (b"\x1f\x8b\x08", "compressed with gzip"),
            (b"PAR1\x15\x04", "a Parquet file"),
            (b"\x40\0\0\0\0\0\0\0{\"a\":{", "a safetensors file"),
            (b"\x89HDF\r\n\x1a\n\0", "an HDF5 file"),
            (b"\n <!DOCTYPE html><html>", "a web page, perhaps a login page"),
            (b"version https://git-lfs.github.com/spec/v1", "a pointer of Git LFS, not the file itself"),
            (b"\x80\x02}q\0", "a pickle, as torch.save writes"),
            ("path,label\ncaf\u{e9}.jpg,1".as_bytes(), "a text file"),
        ];
        for (start, expected) in known {
            assert_eq!(name(start), Some(expected), "{start:?}");
        }
        // The text may be cut within a character.
        assert_eq!(name(&"caf\u{e9}".as_bytes()[..4]), Some("a text file"));
        for start in [&b""[..], b"BM of a text\0", b"RIFF\0\0\0\0WAVE", &[0; 512], b"\xff\xfe\0\0"] {
            assert_eq!(name(start), None, "{start:?}");
        }
    }
}
