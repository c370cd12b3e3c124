//! Files of `torch.save`: a zip archive of a pickle that names the tensors, and one member with the
//! bytes of each tensor.
//!
//! A pickle is parsed as data: no function that it names is called, and a file that refers to more
//! than tensors and plain values is rejected.

use std::io::{Cursor, Read, Seek, SeekFrom, Write};
use std::path::Path;

use pytorch_reader::{DType, PickleValue, PytorchError, PytorchReader};
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

use super::safetensors::to_bytes;
use super::{Array, Arrays, Element};
use crate::error::WeightsError;
use crate::precision::Precision;

/// Modules whose objects are only data: `torch.save` writes them for tensors, sizes and types, and
/// training programs for their settings.
const DATA_MODULES: [&str; 9] =
    ["torch", "collections", "numpy", "argparse", "types", "omegaconf", "pathlib", "_codecs", "datetime"];

/// Refusal of a file of `torch.jit.save`.
const IS_SCRIPT: &str = "it is a TorchScript program; OpenAI's CLIP is one, which is not supported; of \
                         another network, save torch.jit.load(FILE).state_dict() with torch.save";

/// Maximum length of the record that ends an archive's directory, including its comment.
const MAX_END_BYTES: u64 = 22 + 65_535;

/// Reads the floating-point tensors in `path`; nested dictionaries yield names joined by dots.
///
/// # Errors
/// [`WeightsError::Malformed`], also for a pickle that would execute code.
pub(crate) fn read(path: &Path) -> Result<Arrays, WeightsError> {
    if is_script(path).map_err(|error| WeightsError::io("read", path, error))? {
        return Err(WeightsError::malformed(path, IS_SCRIPT));
    }
    let pickle = PytorchReader::read_pickle_data(path, None).map_err(|error| malformed(path, &error))?;
    if let Some(name) = foreign_object(&pickle) {
        return Err(WeightsError::malformed(
            path,
            format!("its pickle refers to {name}, which is neither a tensor nor a plain value"),
        ));
    }
    if has_duplicate_members(path).map_err(|error| WeightsError::io("read", path, error))? {
        let reason = "two members of its archive have the same name: readers may use either";
        return Err(WeightsError::malformed(path, reason.to_string()));
    }
    if let Some(view) = unresolved_view(path).map_err(|error| WeightsError::io("read", path, error))? {
        return Err(WeightsError::malformed(
            path,
            format!(
                "it holds a tensor that is a {view} view, whose values are not stored: save tensor.clone() \
                 instead"
            ),
        ));
    }
    let reader = PytorchReader::new(path).map_err(|error| malformed(path, &error))?;
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

/// Converts an error of the reader of `path`.
fn malformed(path: &Path, error: &PytorchError) -> WeightsError {
    let reason = error.to_string();
    // The directory of an archive is at its end.
    if reason.contains("Could not find EOCD") {
        return WeightsError::malformed(path, "it is truncated, or was not written by torch.save");
    }
    WeightsError::malformed(path, reason)
}

/// Returns whether the file is an archive of `torch.jit.save`, which has a member of constants.
fn is_script(path: &Path) -> std::io::Result<bool> {
    let Ok(archive) = zip::ZipArchive::new(std::fs::File::open(path)?) else { return Ok(false) };
    Ok(archive.file_names_raw().any(|name| name.ends_with(b"/constants.pkl")))
}

/// Returns whether the directory of the archive lists two members with the same name.
fn has_duplicate_members(path: &Path) -> std::io::Result<bool> {
    let Ok(archive) = zip::ZipArchive::new(std::fs::File::open(path)?) else { return Ok(false) };
    let mut file = std::fs::File::open(path)?;
    // The record at the end of the directory states the number of its entries; a comment of up to
    // 64 KiB may follow.
    let len_bytes = file.metadata()?.len();
    file.seek(SeekFrom::Start(len_bytes.saturating_sub(MAX_END_BYTES)))?;
    let mut end = Vec::new();
    file.read_to_end(&mut end)?;
    let Some(start) = (0..end.len()).find(|start| is_end_record(&end[*start..])) else { return Ok(false) };
    let count = u16::from_le_bytes([end[start + 10], end[start + 11]]);
    // The largest number stands for counts that do not fit into 16 bits.
    Ok(count != u16::MAX && usize::from(count) != archive.len())
}

/// Returns whether `bytes` are the record that ends an archive's directory, with its comment, whose
/// length it states.
fn is_end_record(bytes: &[u8]) -> bool {
    let Some(comment_len) = bytes.get(20..22) else { return false };
    let comment_len = usize::from(u16::from_le_bytes([comment_len[0], comment_len[1]]));
    bytes.starts_with(b"PK\x05\x06") && 22 + comment_len == bytes.len()
}

/// Returns the kind of view that a tensor of the file is, if its stored numbers are not its values:
/// negated or conjugate. The metadata of a tensor states this by a key whose value is true.
fn unresolved_view(path: &Path) -> std::io::Result<Option<&'static str>> {
    let Ok(mut archive) = zip::ZipArchive::new(std::fs::File::open(path)?) else { return Ok(None) };
    for index in 0..archive.len() {
        let Ok(mut member) = archive.by_index(index) else { continue };
        if !member.name().is_ok_and(|name| name.ends_with("data.pkl")) {
            continue;
        }
        let mut pickle = Vec::new();
        member.read_to_end(&mut pickle)?;
        for (key, view) in [("neg", "negated"), ("conj", "conjugate")] {
            let mut long_key = Vec::new();
            push_text(&mut long_key, key);
            let short_key = [&[0x8c, key.len() as u8], key.as_bytes()].concat();
            if has_true_entry(&pickle, &long_key) || has_true_entry(&pickle, &short_key) {
                return Ok(Some(view));
            }
        }
    }
    Ok(None)
}

/// Returns whether a dictionary of `pickle` has the encoded `key` with the value `True`.
fn has_true_entry(pickle: &[u8], key: &[u8]) -> bool {
    let mut windows = pickle.windows(key.len()).enumerate();
    windows.any(|(start, window)| window == key && is_true_next(&pickle[start + key.len()..]))
}

/// Returns whether the next value of a pickle is `True`, after an opcode that may store the value
/// before it in the memo.
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
pub(crate) fn encode(arrays: &Arrays, precision: Precision) -> std::io::Result<Vec<u8>> {
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    add_member(&mut zip, "data.pkl", &pickle(arrays, precision))?;
    add_member(&mut zip, "byteorder", b"little")?;
    for (index, array) in arrays.values().enumerate() {
        add_member(&mut zip, &format!("data/{index}"), &to_bytes(&array.values, precision))?;
    }
    add_member(&mut zip, "version", b"3\n")?;
    Ok(zip.finish()?.into_inner())
}

fn add_member(zip: &mut ZipWriter<Cursor<Vec<u8>>>, name: &str, bytes: &[u8]) -> std::io::Result<()> {
    let options = SimpleFileOptions::default()
        .compression_method(CompressionMethod::Stored)
        .with_alignment(64)
        .large_file(true);
    zip.start_file(format!("archive/{name}"), options)?;
    zip.write_all(bytes)
}

/// Pickles (protocol 2) a dictionary of tensors; each tensor refers to the storage with its number.
fn pickle(arrays: &Arrays, precision: Precision) -> Vec<u8> {
    let storage = match precision {
        Precision::F32 | Precision::Int8 => "FloatStorage",
        Precision::F16 => "HalfStorage",
        Precision::Bf16 => "BFloat16Storage",
    };
    let mut out = vec![0x80, 2, b'}', b'('];
    for (index, (name, array)) in arrays.iter().enumerate() {
        push_text(&mut out, name);
        push_global(&mut out, "torch._utils", "_rebuild_tensor_v2");
        out.push(b'(');
        // The storage, by a persistent id: ('storage', type, key, location, elements).
        out.push(b'(');
        push_text(&mut out, "storage");
        push_global(&mut out, "torch", storage);
        push_text(&mut out, &index.to_string());
        push_text(&mut out, "cpu");
        push_integer(&mut out, array.values.len());
        out.extend([b't', b'Q']);
        // Offset, shape, strides, `requires_grad`, hooks.
        push_integer(&mut out, 0);
        push_tuple(&mut out, &array.shape);
        push_tuple(&mut out, &strides(&array.shape));
        out.push(0x89);
        push_global(&mut out, "collections", "OrderedDict");
        out.extend([b')', b'R', b't', b'R']);
    }
    out.extend([b'u', b'.']);
    out
}

/// Returns the strides, in elements, of a tensor in row-major order.
fn strides(shape: &[usize]) -> Vec<usize> {
    (0..shape.len()).map(|i| shape[i + 1..].iter().product()).collect()
}

fn push_text(out: &mut Vec<u8>, text: &str) {
    out.push(b'X');
    out.extend((text.len() as u32).to_le_bytes());
    out.extend(text.as_bytes());
}

fn push_global(out: &mut Vec<u8>, module: &str, name: &str) {
    out.push(b'c');
    out.extend(format!("{module}\n{name}\n").as_bytes());
}

/// Appends a signed 64-bit little-endian integer.
fn push_integer(out: &mut Vec<u8>, value: usize) {
    out.extend([0x8a, 8]);
    out.extend((value as u64).to_le_bytes());
}

fn push_tuple(out: &mut Vec<u8>, values: &[usize]) {
    out.push(b'(');
    for value in values {
        push_integer(out, *value);
    }
    out.push(b't');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoded_arrays_are_read_back_unchanged() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("w.pth");
        let values: Vec<f32> = (0..24).map(|i| i as f32 * 0.25 - 3.0).collect();
        let arrays = Arrays::from([
            ("a.weight".to_string(), Array { shape: vec![2, 3, 4], values }),
            ("b".to_string(), Array { shape: vec![1], values: vec![7.5] }),
        ]);
        for precision in [Precision::F32, Precision::F16, Precision::Bf16] {
            std::fs::write(&path, encode(&arrays, precision).unwrap()).unwrap();
            assert_eq!(read(&path).unwrap(), arrays, "{precision:?}");
        }
    }

    #[test]
    fn programs_of_torchscript_are_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ViT-B-32.pt");
        let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
        for name in ["data.pkl", "constants.pkl"] {
            add_member(&mut zip, name, b"").unwrap();
        }
        std::fs::write(&path, zip.finish().unwrap().into_inner()).unwrap();
        let error = read(&path).unwrap_err().to_string();
        assert!(error.contains("TorchScript") && error.contains("CLIP"), "{error}");
    }

    /// The pickle is that of `pickle.dumps(Evil())`, where `Evil.__reduce__` returns `(os.system,
    /// ("touch ran",))`.
    #[test]
    fn pickle_that_would_execute_code_is_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("evil.pth");
        let mut pickle = vec![0x80, 2, b'}', b'('];
        push_text(&mut pickle, "model");
        push_global(&mut pickle, "posix", "system");
        pickle.push(b'(');
        push_text(&mut pickle, "touch ran");
        pickle.extend([b't', b'R', b'u', b'.']);
        std::fs::write(&path, pickle).unwrap();
        let error = read(&path).unwrap_err();
        assert!(
            matches!(&error, WeightsError::Malformed { reason, .. } if reason.contains("posix.system")),
            "{error}"
        );
    }
}
