//! Files of `torch.save`: a zip archive of a pickle that names the tensors, and one member with the
//! bytes of each tensor.
//!
//! A pickle is parsed as data: no function that it names is called, and a file that refers to more
//! than tensors and plain values is rejected.

use std::io::{Cursor, Read, Seek, SeekFrom, Write};
use std::path::Path;

use pytorch_reader::{DType, PickleValue, PytorchReader};
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

use super::safetensors::to_bytes;
use super::{Array, Arrays, Element};
use crate::error::WeightsError;
use crate::precision::Precision;

/// Modules whose objects are data: `torch.save` writes them for tensors, sizes and types, and
/// training programs for their settings.
const DATA_MODULES: [&str; 9] =
    ["torch", "collections", "numpy", "argparse", "types", "omegaconf", "pathlib", "_codecs", "datetime"];

/// Longest end of an archive's directory, with its comment.
const MAX_END_BYTES: u64 = 22 + 65_535;

/// Reads the floating-point tensors in `path`; nested dictionaries yield names joined by dots.
///
/// # Errors
/// [`WeightsError::Malformed`], also for a pickle that would execute code.
pub(crate) fn read(path: &Path) -> Result<Arrays, WeightsError> {
    let malformed = |error: pytorch_reader::PytorchError| {
        let reason = match error.to_string() {
            // The directory of an archive is at its end.
            reason if reason.contains("Could not find EOCD") => {
                "it is truncated, or was not written by torch.save".to_string()
            }
            reason => reason,
        };
        WeightsError::malformed(path, reason)
    };
    let pickle = PytorchReader::read_pickle_data(path, None).map_err(malformed)?;
    if let Some(name) = foreign_object(&pickle) {
        return Err(WeightsError::malformed(
            path,
            format!("its pickle refers to {name}, which is neither a tensor nor a plain value"),
        ));
    }
    if has_two_members_of_a_name(path).map_err(|error| WeightsError::io("read", path, error))? {
        let reason = "two members of its archive have one name: readers take one or the other";
        return Err(WeightsError::malformed(path, reason.to_string()));
    }
    if let Some(view) = unresolved_view(path).map_err(|error| WeightsError::io("read", path, error))? {
        return Err(WeightsError::malformed(
            path,
            format!(
                "it holds a tensor that is a {view} view, whose values are not stored: save tensor.clone() instead"
            ),
        ));
    }
    let reader = PytorchReader::new(path).map_err(malformed)?;
    let mut arrays = Arrays::new();
    for (name, tensor) in reader.into_tensors() {
        let element = match tensor.dtype() {
            DType::F64 => Element::F64,
            DType::F32 => Element::F32,
            DType::F16 => Element::F16,
            DType::BF16 => Element::Bf16,
            _ => continue,
        };
        let bytes = tensor.read().map_err(|error| WeightsError::io("read", path, error))?;
        arrays.insert(name, Array { shape: tensor.shape().to_vec(), values: element.values(&bytes) });
    }
    Ok(arrays)
}

/// Returns whether the directory of the archive lists more members than have different names.
fn has_two_members_of_a_name(path: &Path) -> std::io::Result<bool> {
    let Ok(archive) = zip::ZipArchive::new(std::fs::File::open(path)?) else { return Ok(false) };
    let mut file = std::fs::File::open(path)?;
    // The end of the directory states the number of its entries; a comment of up to 64 KiB may
    // follow.
    let len_bytes = file.metadata()?.len();
    file.seek(SeekFrom::Start(len_bytes.saturating_sub(MAX_END_BYTES)))?;
    let mut end = Vec::new();
    file.read_to_end(&mut end)?;
    // The comment, whose length it states, ends the file.
    let Some(at) = (0..end.len()).find(|at| {
        let record = &end[*at..];
        record.starts_with(b"PK\x05\x06")
            && record
                .get(20..22)
                .is_some_and(|len| 22 + usize::from(u16::from_le_bytes([len[0], len[1]])) == record.len())
    }) else {
        return Ok(false);
    };
    let count = u16::from_le_bytes([end[at + 10], end[at + 11]]);
    // That number stands for one that does not fit.
    Ok(count != u16::MAX && usize::from(count) != archive.len())
}

/// Returns how a tensor of the file is a view whose stored numbers are not its values: negated, or
/// conjugate, which its metadata states as a word that is true.
fn unresolved_view(path: &Path) -> std::io::Result<Option<&'static str>> {
    let Ok(mut archive) = zip::ZipArchive::new(std::fs::File::open(path)?) else { return Ok(None) };
    for number in 0..archive.len() {
        let Ok(mut member) = archive.by_index(number) else { continue };
        if !member.name().is_ok_and(|name| name.ends_with("data.pkl")) {
            continue;
        }
        let mut pickle = Vec::new();
        member.read_to_end(&mut pickle)?;
        for (word, view) in [("neg", "negated"), ("conj", "conjugate")] {
            let mut long = vec![b'X'];
            long.extend((word.len() as u32).to_le_bytes());
            long.extend(word.as_bytes());
            let short = [&[0x8c, word.len() as u8], word.as_bytes()].concat();
            let holds = |text: &[u8]| {
                let mut starts = pickle.windows(text.len()).enumerate().filter(|(_, window)| *window == text);
                starts.any(|(at, _)| is_true_next(&pickle[at + text.len()..]))
            };
            if holds(&long) || holds(&short) {
                return Ok(Some(view));
            }
        }
    }
    Ok(None)
}

/// Returns whether the next value of a pickle is `True`, behind the note under which the one before
/// may be kept.
fn is_true_next(rest: &[u8]) -> bool {
    let rest = match rest {
        [b'q', _, rest @ ..] | [b'r', _, _, _, _, rest @ ..] | [0x94, rest @ ..] => rest,
        rest => rest,
    };
    rest.first() == Some(&0x88)
}

/// Returns the first object whose module is not one of [`DATA_MODULES`].
fn foreign_object(value: &PickleValue) -> Option<&str> {
    match value {
        PickleValue::List(values) => values.iter().find_map(foreign_object),
        PickleValue::Dict(entries) => entries.values().find_map(foreign_object),
        PickleValue::Unsupported(name) => {
            // Names without a module are tensors, storages and large integers.
            let module = name.split_once('.').map(|(module, _)| module)?;
            (!DATA_MODULES.contains(&module)).then_some(name)
        }
        _ => None,
    }
}

/// Encodes `arrays` as a file that `torch.load(weights_only=True)` reads into a dictionary.
///
/// # Errors
/// When the archive cannot be written.
pub(crate) fn bytes_of(arrays: &Arrays, precision: Precision) -> std::io::Result<Vec<u8>> {
    let options = SimpleFileOptions::default()
        .compression_method(CompressionMethod::Stored)
        .with_alignment(64)
        .large_file(true);
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    let mut member = |name: &str, bytes: &[u8]| -> std::io::Result<()> {
        zip.start_file(format!("archive/{name}"), options)?;
        zip.write_all(bytes)
    };
    member("data.pkl", &pickle_of(arrays, precision))?;
    member("byteorder", b"little")?;
    for (number, array) in arrays.values().enumerate() {
        member(&format!("data/{number}"), &to_bytes(&array.values, precision))?;
    }
    member("version", b"3\n")?;
    Ok(zip.finish()?.into_inner())
}

/// Pickles (protocol 2) a dictionary of tensors; each tensor refers to the storage with its number.
fn pickle_of(arrays: &Arrays, precision: Precision) -> Vec<u8> {
    let storage = match precision {
        Precision::F32 | Precision::Int8 => "FloatStorage",
        Precision::F16 => "HalfStorage",
        Precision::Bf16 => "BFloat16Storage",
    };
    let mut out = vec![0x80, 2, b'}', b'('];
    for (number, (name, array)) in arrays.iter().enumerate() {
        text(&mut out, name);
        global(&mut out, "torch._utils", "_rebuild_tensor_v2");
        out.push(b'(');
        // The storage, by a persistent id: ('storage', type, key, location, elements).
        out.push(b'(');
        text(&mut out, "storage");
        global(&mut out, "torch", storage);
        text(&mut out, &number.to_string());
        text(&mut out, "cpu");
        integer(&mut out, array.values.len());
        out.extend([b't', b'Q']);
        // Offset, shape, strides, `requires_grad`, hooks.
        integer(&mut out, 0);
        tuple(&mut out, &array.shape);
        tuple(&mut out, &strides(&array.shape));
        out.push(0x89);
        global(&mut out, "collections", "OrderedDict");
        out.extend([b')', b'R', b't', b'R']);
    }
    out.extend([b'u', b'.']);
    out
}

/// Strides, in elements, of a tensor in row-major order.
fn strides(shape: &[usize]) -> Vec<usize> {
    (0..shape.len()).map(|i| shape[i + 1..].iter().product()).collect()
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.push(b'X');
    out.extend((text.len() as u32).to_le_bytes());
    out.extend(text.as_bytes());
}

fn global(out: &mut Vec<u8>, module: &str, name: &str) {
    out.push(b'c');
    out.extend(format!("{module}\n{name}\n").as_bytes());
}

/// Appends a signed 64-bit little-endian integer.
fn integer(out: &mut Vec<u8>, value: usize) {
    out.extend([0x8a, 8]);
    out.extend((value as u64).to_le_bytes());
}

fn tuple(out: &mut Vec<u8>, values: &[usize]) {
    out.push(b'(');
    values.iter().for_each(|value| integer(out, *value));
    out.push(b't');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("w.pth");
        let values: Vec<f32> = (0..24).map(|i| i as f32 * 0.25 - 3.0).collect();
        let arrays = Arrays::from([
            ("a.weight".to_string(), Array { shape: vec![2, 3, 4], values }),
            ("b".to_string(), Array { shape: vec![1], values: vec![7.5] }),
        ]);
        for precision in [Precision::F32, Precision::F16, Precision::Bf16] {
            std::fs::write(&path, bytes_of(&arrays, precision).unwrap()).unwrap();
            assert_eq!(read(&path).unwrap(), arrays, "{precision:?}");
        }
    }

    /// The pickle is that of `pickle.dumps(Evil())`, where `Evil.__reduce__` returns `(os.system,
    /// ("touch ran",))`.
    #[test]
    fn a_pickle_that_would_run_something_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("evil.pth");
        let mut pickle = vec![0x80, 2, b'}', b'('];
        text(&mut pickle, "model");
        global(&mut pickle, "posix", "system");
        pickle.push(b'(');
        text(&mut pickle, "touch ran");
        pickle.extend([b't', b'R', b'u', b'.']);
        std::fs::write(&path, pickle).unwrap();
        let error = read(&path).unwrap_err().to_string();
        assert!(error.contains("posix.system"), "{error}");
    }
}
